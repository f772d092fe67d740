"""Items of passes over the data whose last batch is smaller, and what a dataset's transforms are, without a process."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch

from ndd_watch.clock import S
from ndd_watch.looks import Looks, augments
from ndd_watch.loops import Passes
from ndd_watch.mapped import MICRO


def settings(items: int | None, drop_last: bool = False, size: int = 32) -> dict[str, Any]:
    return {"batch_size": size, "items": items, "drop_last": drop_last}


@pytest.fixture
def passes() -> Any:
    before, S[MICRO] = S[MICRO], 0
    yield Passes(lambda code: False, Looks(torch))
    S[MICRO] = before


@pytest.mark.parametrize(
    ("items", "drop_last", "batches", "lacked"),
    [(732, False, 23, 4), (736, False, 23, 0), (732, True, 22, 0), (732, False, 10, 0), (None, False, 23, 0)],
)
def test_the_last_batch_of_a_whole_pass_is_smaller(
    passes: Passes, items: int | None, drop_last: bool, batches: int, lacked: int
) -> None:
    found = 0
    for _ in range(3):
        passes.began(sys._getframe())
        passes.reads_loader(settings(items, drop_last))
        for _ in range(batches):
            S[MICRO] += 1
            found += passes.lacked(32)
    assert found == 3 * lacked
    # Two views of each item.
    passes.began(sys._getframe())
    S[MICRO] += batches
    assert passes.lacked(64) == 2 * lacked


def test_a_last_batch_that_was_looked_at_is_not_the_usual_one(passes: Passes) -> None:
    passes.reads_loader(settings(732))
    assert [passes.full(*given) for given in ((28, 0), (32, 0), (56, 64), (7, 0))] == [32, 32, 64, 7]
    passes.reads_loader(settings(None))  # not known at this moment
    assert passes.full(28, 0) == 32


class Thing:
    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)


class RandomCrop:
    pass


class Normalize:
    pass


def test_random_transforms_of_a_dataset_are_found_and_others_not() -> None:
    compose = Thing(transforms=[Normalize(), RandomCrop()])
    dataset = Thing(transform=Thing(transform=compose))
    assert augments(Thing(dataset=dataset, indices=[1])) == "RandomCrop"
    assert augments(Thing(transform=Normalize(), generator=RandomCrop())) == ""
    assert augments(object()) == ""


class Draws:
    def __getitem__(self, index: int) -> Any:
        return torch.randn(3), index


class Repeats:
    def __getitem__(self, index: int) -> Any:
        return torch.randn(3, generator=torch.Generator().manual_seed(index)), index


def turned(image: Any) -> Any:
    return image * random.uniform(0, 1)


def test_functions_that_draw_at_random_are_transforms_too() -> None:
    assert augments(Thing(transform=turned)) == "turned"
    assert augments(Thing(dataset=Thing(transform=lambda image: image / 2))) == ""
    assert augments(Draws()) == "Draws.__getitem__"
    assert augments(Thing(dataset=Draws())) == "Draws.__getitem__"
    assert augments(Repeats()) == ""


def test_batches_of_unknown_sizes_are_counted_as_they_are_read(passes: Passes) -> None:
    passes.reads_loader({**settings(None), "uneven": True})
    for size in (4, 9, 2, 7):
        passes.count((torch.zeros(size, 3), torch.zeros(size)))
    # One was read before the training was observed, and one is read ahead.
    assert passes.counted(3, 9) == 15
    passes.count(torch.zeros(5, 3))
    assert passes.counted(2, None) == 12
    # So the batch that was counted last is trained now.
    passes.count(torch.zeros(9, 3))
    assert passes.counted(1, 5) == 9
    assert passes.counted(1, 9) == 7  # a usual one
    # The model gets something else.
    passes.count(torch.zeros(5, 3))
    assert passes.counted(1, 3) is None
    # Another loader whose sizes are known.
    passes.reads_loader({**settings(732), "uneven": False})
    passes.count(torch.zeros(5, 3))
    assert passes.counted(1, 5) is None

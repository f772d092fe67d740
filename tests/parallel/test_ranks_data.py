"""Which items several ranks see: each once in an epoch, in the steps of one process, also over a resume."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from ranks_workloads import Points, Shuffled
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from ndd_engine.config import Config, read
from ndd_engine.errors import TrainingError
from ndd_engine.train.data.loader import Batches, at_pass_end, end_pass
from ndd_engine.train.data.order import Share
from ndd_engine.workloads.base import Order, Stream
from ndd_engine.workloads.factory_data import read_data
from ndd_engine.workloads.problems import Problems

COUNT = 45


class Buckets(Sampler[list[int]]):
    """Batches of 3 to 6 items in a random order from the global generator; the state is what is left."""

    def __init__(self) -> None:
        self.batches, at = [], 0
        while at < COUNT - 6:
            size = 3 + len(self.batches) % 4
            self.batches.append(list(range(at, at + size)))
            at += size
        self.left = list[int]()

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        self.left = self.left or random.sample(range(len(self.batches)), len(self.batches))
        while self.left:
            yield self.batches[self.left.pop(0)]

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = list(state["left"])


def config(accumulation: int, *sets: str) -> Config:
    common = ("batch.micro=4", f"batch.accumulation={accumulation}", "run.epochs=2", "loader.workers=0")
    return read(None, [*common, *sets]).resolve()


def made(kind: str, rank: int, ranks: int, per_step: int = 4) -> Batches:
    """The batches of a rank, with as many micro-batches to a step for every number of ranks."""
    data: Dataset[Any] = Points(COUNT, 1)
    order = None
    if kind == "sampler":
        order = Order(False, sampler=torch.utils.data.RandomSampler(range(COUNT)))
    elif kind == "batch_sampler":
        order = Order(False, batch_sampler=Buckets())
    elif kind == "stream":
        data, order = Stream(Shuffled(COUNT)), Order(False)
    sets = ("loader.shuffle=false",) if kind == "in order" else ()
    return Batches(data, config(per_step // ranks, *sets), order=order, share=Share(rank, ranks))


def steps(batches: Batches, step: int, limit: int = 1000) -> Iterator[list[list[int]]]:
    """The items of this rank's micro-batches, step by step, over two epochs."""
    torch.manual_seed(100 * batches.share.rank + 7)  # as a model that draws random numbers of its own
    random.seed(batches.share.rank)
    for _ in range(limit):
        epoch, at = batches.place(step)
        if epoch == 2:
            return
        iterator = batches.epoch(epoch, at * batches.accumulation)
        while True:
            part = [batch[2].tolist() for batch in islice(iterator, batches.accumulation)]
            if len(part) < batches.accumulation:
                end_pass(batches.own_order, batches.of_step)  # type: ignore[arg-type]
                break
            step += 1
            torch.rand(batches.share.rank + 1)  # the model's
            yield part
            if batches.own_order is None and batches.place(step)[1] == 0:
                break


def run(kind: str, ranks: int) -> list[list[list[int]]]:
    """The micro-batches of all ranks, step by step, in the order of one process."""
    return merged([list(steps(made(kind, rank, ranks), 0)) for rank in range(ranks)])


def merged(by_rank: list[list[list[list[int]]]]) -> list[list[list[int]]]:
    assert len({len(of_rank) for of_rank in by_rank}) == 1
    return [
        [items for turn in zip(*of_step, strict=True) for items in turn]
        for of_step in zip(*by_rank, strict=True)
    ]


KINDS = ["shuffled", "in order", "sampler", "batch_sampler", "stream"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [(2, 2, 2), (4, 4, 4), (2, 1, 2), (1, 4, 2), (4, 2, 4)])
def test_no_item_is_repeated_or_lost_over_a_resume_with_another_number_of_ranks(
    kind: str, order: tuple[int, ...]
) -> None:
    """A run of four steps, two in each epoch, that resumes after the first and after the third."""
    state: Any = None
    found, step = [], 0
    for ranks, count in zip(order, (1, 2, 1), strict=True):
        parts, states = [], []
        for rank in range(ranks):
            batches = made(kind, rank, ranks)
            batches.load(state)
            taken = steps(batches, step)
            parts.append([next(taken) for _ in range(count)])
            states.append(batches.state())
        state = states[0]
        step += count
        found += merged(parts)
    # The stream draws its order from the model's generator in a single process.
    if kind != "stream":
        assert found == run(kind, 1)
    for first in (0, 2):
        seen = [item for part in found[first : first + 2] for items in part for item in items]
        assert len(seen) == len(set(seen))
        assert len(seen) == 32 or kind == "batch_sampler"
    if kind in ("shuffled", "stream"):
        assert found[:2] != found[2:]


def test_a_pass_ends_where_no_step_of_all_ranks_is_left() -> None:
    batches = Batches(Points(20, 1), config(1), order=Order(False, sampler=range(20)), share=Share(0, 2))
    assert (batches.per_epoch, batches.steps_per_epoch, batches.of_step) == (2, 2, 2)
    iterator = batches.epoch(0)
    for _ in range(2):
        assert not at_pass_end(batches.own_order, batches.of_step)
        next(iterator)
    assert at_pass_end(batches.own_order, batches.of_step)  # the fifth micro-batch fills no step


def test_a_stream_without_a_step_for_all_ranks_ends_the_run() -> None:
    batches = Batches(Stream(Shuffled(7)), config(1), order=Order(False), share=Share(1, 2))
    assert list(batches.epoch(0)) == []
    with pytest.raises(TrainingError, match="1 micro-batch"):
        end_pass(batches.own_order, batches.of_step)  # type: ignore[arg-type]


def test_loader_workers_of_each_rank_draw_random_numbers_of_their_own() -> None:
    def seed_of(rank: int, data: Any, order: Order | None = None) -> int:
        batches = Batches(data, config(1, "loader.workers=1"), order=order, share=Share(rank, 2))
        assert batches.loader is not None and batches.loader.generator is not None
        return batches.loader.generator.initial_seed()

    assert seed_of(0, Points(COUNT, 1)) == 1337 != seed_of(1, Points(COUNT, 1))
    # All ranks read the same stream.
    assert seed_of(0, Stream(Shuffled(9), True), Order(False)) == seed_of(
        1, Stream(Shuffled(9), True), Order(False)
    )


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        ({"shuffle": True}, "train_data.drop_last"),
        (
            {"sampler": DistributedSampler(Points(COUNT, 1), 2, 0), "drop_last": True},  # type: ignore[arg-type]
            "train_data.sampler",
        ),
    ],
)
def test_a_loader_that_loses_items_with_several_ranks_is_refused(loader: dict[str, Any], words: str) -> None:
    found: DataLoader[Any] = DataLoader(Points(COUNT, 1), batch_size=4, **loader)
    for ranks, keys in ((1, []), (2, [words])):
        problems = Problems("test")
        read_data("train_data", found, config(1, f"parallel.ranks={ranks}"), problems)
        assert [problem.key for problem in problems.found] == keys

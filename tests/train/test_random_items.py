"""Items that change each time they are read, as by random augmentation, are never cached."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

from ndd_engine.config import read
from ndd_engine.errors import UsageError
from ndd_engine.train.data.loader import Batches
from ndd_engine.train.rehearsal import probe_loader


class Items(Dataset[torch.Tensor]):
    """Items with noise, or with NaN, which is equal to itself here."""

    def __init__(self, random: bool) -> None:
        self.random = random

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4) if self.random else torch.tensor([float(index), float("nan")])


def batches(random: bool, *sets: str) -> Batches:
    config = read(None, ["workload.size=tiny", "batch.micro=4", *sets]).resolve()
    return Batches(Items(random), config, None)


def test_a_cache_of_random_items_is_refused() -> None:
    with pytest.raises(UsageError, match="item 0"):
        batches(True, "loader.cache=true")
    assert batches(False, "loader.cache=true").source.encoded == 64


@pytest.mark.parametrize("random", [True, False])
def test_a_cache_of_random_items_is_not_offered(random: bool) -> None:
    """The measurement before training reads an item twice, and leaves the random numbers of the training alone."""
    made = batches(random)
    before = torch.get_rng_state()
    found = probe_loader(made, next(iter(made.epoch(0, 0))), 1e6)
    assert found.epochs_differ is random
    assert random or torch.equal(torch.get_rng_state(), before)

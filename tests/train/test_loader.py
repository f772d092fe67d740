"""Batches: an order that depends only on seed and epoch, from any position, with any number of workers."""

from __future__ import annotations

import os
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from ndd_engine.batches import tensors
from ndd_engine.config import Config, read
from ndd_engine.train.data.item_sources import EpochBatches
from ndd_engine.train.data.loader import Batches, EvalBatches, checksum, to_device


class Numbers(Dataset[Any]):
    """Item n is the number n and the process that made it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor(index), os.getpid()


def config(*sets: str) -> Config:
    return read(None, ["workload.size=tiny", "batch.micro=4", *sets]).resolve()


def numbers(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


@given(st.integers(1, 200), st.integers(1, 20), st.integers(0, 2**63 - 1), st.integers(0, 50), st.data())
def test_an_epoch_from_any_position_is_the_rest_of_the_epoch(
    items: int, micro: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    sampler = EpochBatches(items, micro, seed)
    sampler.set(epoch)
    whole = list(sampler)
    assert len(whole) == len(sampler) == items // micro
    seen = [index for batch in whole for index in batch]
    # Each item at most once, and only the items that fill no batch are left out.
    assert len(set(seen)) == len(seen) == items - items % micro
    assert set(seen) <= set(range(items))
    start = data.draw(st.integers(0, len(whole)))
    sampler.set(epoch, start)
    assert list(sampler) == whole[start:]
    assert len(sampler) == len(whole) - start
    # Another object, and epochs taken in another order, agree.
    again = EpochBatches(items, micro, seed)
    again.set(epoch + 1)
    list(again)
    again.set(epoch)
    assert list(again) == whole


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {}
    for seed in range(6):
        for epoch in range(6):
            sampler = EpochBatches(40, 40, seed)
            sampler.set(epoch)
            (batch,) = sampler
            orders[seed, epoch] = tuple(batch)
    assert len(set(orders.values())) == 36


def test_the_same_items_whatever_the_micro_batch() -> None:
    flat = []
    for micro in (4, 8, 16):
        sampler = EpochBatches(48, micro, 3)
        sampler.set(2)
        flat.append([index for batch in sampler for index in batch])
    assert flat[0] == flat[1] == flat[2]


def test_the_order_does_not_move_the_random_numbers_of_the_training() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    batches = Batches(Numbers(20), config())
    assert len(numbers(batches.epoch(0))) == batches.per_epoch == 5
    list(EvalBatches(Numbers(10), config()))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("persistent", ["false", None])
def test_workers_deliver_the_same_batches_in_the_same_order(persistent: str | None) -> None:
    alone = Batches(Numbers(22), config())
    helped = Batches(
        Numbers(22),
        config(
            "loader.workers=2",
            "loader.prefetch=3",
            *([f"loader.persistent={persistent}"] if persistent else []),
        ),
    )
    makers = set()
    for epoch, start in ((0, 0), (1, 2)):
        delivered = list(helped.epoch(epoch, start))
        assert numbers(delivered) == numbers(alone.epoch(epoch, start))
        makers |= {pid for batch in delivered for pid in batch[1].tolist()}
    assert os.getpid() not in makers
    assert len(makers) == (4 if persistent == "false" else 2)  # by default they live on between epochs


def test_batches_in_any_order_are_the_same_batches() -> None:
    alone = Batches(Numbers(40), config())
    helped = Batches(Numbers(40), config("loader.workers=2", "loader.in_order=false"))
    assert helped.loader is not None and not helped.loader.in_order
    assert sorted(numbers(helped.epoch(0))) == sorted(numbers(alone.epoch(0)))


def test_leaving_an_epoch_in_the_middle_leaves_nothing_behind() -> None:
    helped = Batches(Numbers(40), config("loader.workers=1", "loader.persistent=true"))
    iterator = helped.epoch(0)
    first = next(iterator)[0].tolist()
    del iterator
    assert numbers(helped.epoch(0))[0] == first
    assert numbers(helped.epoch(1)) == numbers(Batches(Numbers(40), config()).epoch(1))


def test_evaluation_keeps_the_order_and_every_item() -> None:
    assert numbers(EvalBatches(Numbers(10), config())) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_batches_of_any_shape_go_to_the_device() -> None:
    meta = torch.device("meta")
    batch = {"a": torch.zeros(2), "b": (torch.zeros(3), [torch.zeros(1), "text"])}
    moved = to_device(batch, meta)
    assert moved["a"].device == meta
    assert moved["b"][0].device == moved["b"][1][0].device == meta
    assert (type(moved["b"]), moved["b"][1][1]) == (tuple, "text")


def over_all_bytes(data: Any) -> int:
    """The checksum of whole items, computed byte by byte."""
    crc, count = 0, min(len(data), 16)
    for index in (place * len(data) // count for place in range(count)):
        for tensor in tensors(data[index]):
            if tensor.numel():
                plain = tensor.detach().contiguous().view(-1).view(torch.uint8)
                crc = zlib.crc32(bytes(plain.tolist()), crc)
    return crc


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64],
)
def test_the_checksum_covers_small_items_wholly(dtype: torch.dtype) -> None:
    values = (torch.arange(40 * 6) % 7).view(40, 6).to(dtype)
    data = TensorDataset(values, values.view(40, 2, 3).transpose(1, 2), torch.zeros(40, 0), torch.arange(40))
    assert checksum(data, 40) == over_all_bytes(data)


def test_large_items_are_covered_by_blocks() -> None:
    size = 200_000
    values = torch.arange(3 * size, dtype=torch.int32).view(3, size)
    data = TensorDataset(values)
    crc = checksum(data, 3, limit=64 << 10)
    assert crc != over_all_bytes(data)
    assert crc == checksum(TensorDataset(values.clone()), 3, limit=64 << 10)
    # Other data, another length, one changed end: each has another checksum.
    for other in (values + 1, values[:, :-1], torch.cat((values[:, :-1], values[:, :1]), 1), values.flip(0)):
        assert checksum(TensorDataset(other), len(other), limit=64 << 10) != crc

"""Batches: their order depends on seed and epoch alone; from any position, with workers, cached or on the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from ndd_engine.batches import tensors
from ndd_engine.config import Config, read
from ndd_engine.errors import MachineError, UsageError
from ndd_engine.train.data import item_sources as source_module
from ndd_engine.train.data.item_sources import EpochBatches
from ndd_engine.train.data.loader import Batches, EvalBatches, checksum, to_device
from ndd_engine.train.rehearsal import probe_loader
from ndd_engine.workloads.factory_data import prepare


class Made(Dataset[Any]):
    """Items that `make` makes of their indices; counts how often."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self.count, self.make, self.asked = count, make, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return self.make(index)


def numbered(index: int) -> tuple[Tensor, int]:
    """The number of the item and the process that made it."""
    return torch.tensor(index), os.getpid()


def config(*sets: str) -> Config:
    return read(None, ["workload.size=tiny", "batch.micro=4", *sets]).resolve()


def loaded(items: int, *sets: str) -> Batches:
    return Batches(Made(items, numbered), config(*sets))


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
    batches = loaded(20)
    assert len(numbers(batches.epoch(0))) == batches.per_epoch == 5
    # An evaluation keeps the order and every item.
    evaluation = EvalBatches(Made(10, numbered), config())
    assert numbers(evaluation) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("persistent", [(), ("loader.persistent=false",)])
def test_workers_deliver_the_same_batches_in_the_same_order(persistent: tuple[str, ...]) -> None:
    alone = loaded(22)
    helped = loaded(22, "loader.workers=2", "loader.prefetch=3", *persistent)
    makers = set()
    for epoch, start in ((0, 0), (1, 2)):
        delivered = list(helped.epoch(epoch, start))
        assert numbers(delivered) == numbers(alone.epoch(epoch, start))
        makers |= {pid for batch in delivered for pid in batch[1].tolist()}
    assert os.getpid() not in makers
    assert len(makers) == (4 if persistent else 2)  # by default they live on between epochs


def test_batches_in_any_order_are_the_same_batches() -> None:
    helped = loaded(40, "loader.workers=2", "loader.in_order=false")
    assert helped.loader is not None and not helped.loader.in_order
    assert sorted(numbers(helped.epoch(0))) == sorted(numbers(loaded(40).epoch(0)))


def test_leaving_an_epoch_in_the_middle_leaves_nothing_behind() -> None:
    helped = loaded(40, "loader.workers=1", "loader.persistent=true")
    iterator = helped.epoch(0)
    first = next(iterator)[0].tolist()
    del iterator
    assert numbers(helped.epoch(0))[0] == first
    assert numbers(helped.epoch(1)) == numbers(loaded(40).epoch(1))


# Where items come from

SMALL = {
    "chartext": ("workload.size=tiny", "workload.max_characters=4000", "batch.sequence=16", "batch.micro=8"),
    "eeg": ("workload.samples=200", "workload.channels=3", "batch.sequence=8", "batch.micro=16"),
}
WAYS = (
    ["loader.fetch=item"],
    ["loader.fetch=auto"],
    ["loader.cache=true"],
    ["loader.cache=true", "loader.fetch=item"],
    ["loader.placement=device"],
    ["loader.placement=device", "loader.cache=true"],
)


def flat(batches: Any) -> list[list[Tensor]]:
    return [list(tensors(batch)) for batch in batches]


def same(first: list[list[Tensor]], second: list[list[Tensor]]) -> bool:
    return len(first) == len(second) and all(
        len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, way) for name in SMALL for way in WAYS), ("eeg", ["loader.fetch=batch", "loader.workers=1"])],
)
def test_every_way_gives_the_same_batches(name: str, way: list[str]) -> None:
    chosen, plain = (
        read(None, [*SMALL[name], *sets], name).resolve() for sets in (way, ["loader.fetch=item"])
    )
    workload = prepare(chosen)
    batches, expected = (
        Batches(workload.train_data, each, workload.collate, workload.epochs_differ)
        for each in (chosen, plain)
    )
    for epoch, start in ((0, 0), (3, 2)):
        assert same(flat(batches.epoch(epoch, start)), flat(expected.epoch(epoch, start)))
    assert batches.per_epoch == expected.per_epoch
    assert list(batches.epoch(0, batches.per_epoch)) == []
    evaluation = EvalBatches(workload.eval_data, chosen, workload.collate)
    assert same(flat(evaluation), flat(EvalBatches(workload.eval_data, plain, workload.collate)))
    assert len(flat(evaluation)) == -(-len(workload.eval_data) // chosen.batch.micro)  # type: ignore[arg-type]
    assert same(flat(evaluation), flat(evaluation))  # it can be asked again


def padded(items: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(items, batch_first=True)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("key", ["loader.cache=true", "loader.placement=device"])
def test_each_item_is_encoded_once_for_all_epochs(ragged: bool, key: str) -> None:
    def make(index: int) -> Tensor:
        return torch.full((index + 1 if ragged else 4,), float(index))

    data, collate = Made(12, make), padded if ragged else None
    batches = Batches(data, config(key), collate)
    before = data.asked
    seen = [flat(batches.epoch(epoch)) for epoch in range(5)]
    assert data.asked == before
    assert batches.source.encoded == 12
    plain = Batches(Made(12, make), config("loader.fetch=item"), collate)
    assert all(same(seen[epoch], flat(plain.epoch(epoch))) for epoch in range(5))


@pytest.mark.parametrize("key", ["loader.cache=true", "loader.placement=device"])
def test_what_does_not_fit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(source_module, "free_bytes", lambda _: 150)
    with pytest.raises(MachineError) as caught:
        Batches(Made(100, lambda index: torch.full((4,), float(index))), config(key))
    text = str(caught.value)
    assert key.partition("=")[0] in text
    assert "needs 3 KiB" in text  # 100 items of 16 bytes, twice while they are stacked
    assert "150 B are free" in text
    assert caught.value.exit_status == 3


def test_items_that_change_every_epoch_hear_of_it_and_are_not_kept() -> None:
    data = Made(10, lambda index: torch.tensor(divmod(index, 10)))
    batches = Batches(data, config("batch.micro=5"), epochs_differ=True)
    for epoch in (0, 2):
        rows = torch.cat(list(batches.epoch(epoch)))
        assert rows[:, 0].tolist() == [epoch] * 10
        assert sorted(rows[:, 1].tolist()) == list(range(10))
    with pytest.raises(UsageError, match="every epoch"):
        Batches(data, config("loader.cache=true"), epochs_differ=True)


@pytest.mark.parametrize("random", [True, False])
def test_items_that_differ_each_time_they_are_read_are_not_cached(random: bool) -> None:
    """The measurement before training reads an item twice, and leaves the random numbers of the training alone."""
    # NaN is equal to itself here.
    data = Made(64, lambda index: torch.randn(4) if random else torch.tensor([float(index), float("nan")]))
    made = Batches(data, config())
    before = torch.get_rng_state()
    found = probe_loader(made, next(iter(made.epoch(0, 0))), 1e6)
    assert found.epochs_differ is random
    if random:
        with pytest.raises(UsageError, match="item 0"):
            Batches(data, config("loader.cache=true"))
    else:
        assert torch.equal(torch.get_rng_state(), before)
        assert Batches(data, config("loader.cache=true")).source.encoded == 64


def test_batches_of_any_shape_go_to_the_device() -> None:
    meta = torch.device("meta")
    batch = {"a": torch.zeros(2), "b": (torch.zeros(3), [torch.zeros(1), "text"])}
    moved = to_device(batch, meta)
    assert moved["a"].device == meta
    assert moved["b"][0].device == moved["b"][1][0].device == meta
    assert (type(moved["b"]), moved["b"][1][1]) == (tuple, "text")
    # Those that are built on the host cannot lie there from the beginning.
    with pytest.raises(UsageError, match=r"loader\.cache"):
        Batches(
            Made(4, torch.tensor),
            config("loader.placement=device"),
            lambda items: torch.zeros(len(items)),
            device=meta,
        )


# Whether the data is the same


KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


# Small items are covered wholly, large ones by blocks.
@pytest.mark.parametrize(("dtype", "size"), [*((dtype, 6) for dtype in KINDS), (torch.int32, 200_000)])
def test_other_data_has_another_checksum(dtype: torch.dtype, size: int) -> None:
    values = (torch.arange(3 * size) % 7).view(3, size).to(dtype)

    def crc(values: Tensor) -> int:
        data = TensorDataset(values.view(len(values), 2, -1).transpose(1, 2), torch.zeros(len(values), 0))
        return checksum(data, len(data), limit=64 << 10)

    assert crc(values) == crc(values.clone())
    others = [values + values + 1 if dtype != torch.bool else ~values, values[:, :-2], values.flip(0)]
    for place in (0, 1, 2, 3, 4, 5) if size == 6 else (0, -1):
        changed = values.clone()
        changed[:, place] = values[:, place] == 0
        others.append(changed)
    for other in others:
        assert crc(other) != crc(values)

"""Sources of items: cached, gathered or on the device give the same batches; what does not fit is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ndd_engine.batches import tensors
from ndd_engine.config import Config, read
from ndd_engine.errors import MachineError, UsageError
from ndd_engine.train.data import item_sources as source_module
from ndd_engine.train.data.loader import Batches, EvalBatches
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.factory_data import prepare

WAYS = (
    ["loader.fetch=item"],
    ["loader.fetch=auto"],
    ["loader.fetch=batch", "loader.workers=1"],
    ["loader.cache=true"],
    ["loader.cache=true", "loader.fetch=item"],
    ["loader.placement=device"],
    ["loader.placement=device", "loader.cache=true"],
)


def config(*sets: str, workload: str = "chartext") -> Config:
    small = {
        "chartext": [
            "workload.size=tiny",
            "workload.max_characters=4000",
            "batch.sequence=16",
            "batch.micro=8",
        ],
        "eeg": ["workload.samples=200", "workload.channels=3", "batch.sequence=8", "batch.micro=16"],
    }
    return read(None, [*small[workload], *sets], workload).resolve()


def of(workload: Workload, chosen: Config) -> Batches:
    return Batches(workload.train_data, chosen, workload.collate, workload.epochs_differ)


def flat(batches: Any) -> list[list[Tensor]]:
    return [list(tensors(batch)) for batch in batches]


def same(first: list[list[Tensor]], second: list[list[Tensor]]) -> bool:
    return len(first) == len(second) and all(
        len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("name", ["chartext", "eeg"])
@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_every_way_gives_the_same_batches(name: str, way: list[str]) -> None:
    chosen = config(*way, workload=name)
    workload = prepare(chosen)
    plain = config("loader.fetch=item", workload=name)
    batches, expected = of(workload, chosen), of(workload, plain)
    for epoch, start in ((0, 0), (3, 2)):
        assert same(flat(batches.epoch(epoch, start)), flat(expected.epoch(epoch, start)))
    assert batches.per_epoch == expected.per_epoch
    assert list(batches.epoch(0, batches.per_epoch)) == []
    evaluation = EvalBatches(workload.eval_data, chosen, workload.collate)
    assert same(flat(evaluation), flat(EvalBatches(workload.eval_data, plain, workload.collate)))
    assert len(flat(evaluation)) == -(-len(workload.eval_data) // chosen.batch.micro)  # type: ignore[arg-type]
    assert same(flat(evaluation), flat(evaluation))  # it can be asked again


class Counted(Dataset[Any]):
    """Items of one shape, or each of its own, that count how often they are encoded."""

    def __init__(self, count: int, ragged: bool = False) -> None:
        self.count, self.ragged, self.encoded = count, ragged, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.encoded += 1
        return torch.full((index + 1 if self.ragged else 4,), float(index))


def padded(items: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(items, batch_first=True)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("key", ["loader.cache=true", "loader.placement=device"])
def test_each_item_is_encoded_once_for_all_epochs(ragged: bool, key: str) -> None:
    data, collate = Counted(12, ragged), padded if ragged else None
    batches = Batches(data, config("batch.micro=4", key), collate)
    before = data.encoded
    seen = [flat(batches.epoch(epoch)) for epoch in range(5)]
    assert data.encoded == before
    assert batches.source.encoded == 12
    plain = Batches(Counted(12, ragged), config("batch.micro=4", "loader.fetch=item"), collate)
    assert all(same(seen[epoch], flat(plain.epoch(epoch))) for epoch in range(5))


@pytest.mark.parametrize("key", ["loader.cache=true", "loader.placement=device"])
def test_what_does_not_fit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(source_module, "free_bytes", lambda _: 150)
    with pytest.raises(MachineError) as caught:
        Batches(Counted(100), config("batch.micro=4", key))
    text = str(caught.value)
    assert key.partition("=")[0] in text
    assert "needs 3 KiB" in text  # 100 items of 16 bytes, twice while they are stacked
    assert "150 B are free" in text
    assert caught.value.exit_status == 3


def test_items_that_change_every_epoch_are_not_kept() -> None:
    with pytest.raises(UsageError, match="every epoch"):
        Batches(Counted(8), config("batch.micro=4", "loader.cache=true"), epochs_differ=True)


class Epochs(Dataset[Any]):
    """Items that contain the epoch in which they were requested."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(divmod(index, 10))


def test_a_dataset_that_differs_by_epoch_hears_of_it() -> None:
    batches = Batches(Epochs(), config("batch.micro=5"), epochs_differ=True)
    for epoch in (0, 2):
        rows = torch.cat(list(batches.epoch(epoch)))
        assert rows[:, 0].tolist() == [epoch] * 10
        assert sorted(rows[:, 1].tolist()) == list(range(10))


def test_batches_that_are_built_on_the_host_cannot_lie_on_the_device() -> None:
    meta = torch.device("meta")
    chosen = config("batch.micro=4", "loader.placement=device")
    with pytest.raises(UsageError, match=r"loader\.cache"):
        Batches(Counted(4), chosen, collate=lambda items: torch.zeros(len(items)), device=meta)

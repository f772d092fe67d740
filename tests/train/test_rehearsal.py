"""What is tried and measured before training: a batch, a step, the size of the model. Training has no trace of it."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from train_help import EVERY_STEP, Trainer

from ndd_engine.config import Config, read
from ndd_engine.record.events import BaselineEvent, LoaderEvent
from ndd_engine.train import rehearsal
from ndd_engine.train.checkpoint_state import random_state
from ndd_engine.train.data.item_sources import Stacked
from ndd_engine.train.data.loader import CPU, Batches
from ndd_engine.train.rehearsal import MOST_ITEMS, Baseline, choose_size, probe_loader, rehearse
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.factory_data import prepare
from ndd_watch.clock import PhaseClock


class Made(Dataset[Any]):
    """Items that `make` makes; counts how often."""

    def __init__(self, make: Callable[[int], Any], count: int = 64) -> None:
        self.make, self.count, self.asked = make, count, list[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.make(index)


class PlantedClock:
    """Time passes only where a test says so. wall, cpu, delay: nanoseconds, the last one without a core."""

    def __init__(self) -> None:
        self.wall = self.cpu = self.delay = 0

    def perf_counter_ns(self) -> int:
        return self.wall

    def thread_time_ns(self) -> int:
        return self.cpu

    def spend(self, wall: int, cpu: int = 0, delay: int = 0) -> Tensor:
        self.wall, self.cpu, self.delay = self.wall + wall, self.cpu + cpu, self.delay + delay
        return torch.zeros(3)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> PlantedClock:
    planted = PlantedClock()
    monkeypatch.setattr(rehearsal, "time", planted)
    monkeypatch.setattr(rehearsal, "_delay_ns", lambda: planted.delay)
    return planted


def probe(data: Any, *sets: str, collate: Any = None) -> LoaderEvent:
    config = read(None, ["workload.size=tiny", "batch.micro=8", *sets]).resolve()
    batches = Batches(data, config, collate)
    begin = time.perf_counter_ns()
    sample = batches.sample()
    return probe_loader(batches, sample, time.perf_counter_ns() - begin)


def test_items_that_wait_are_told_from_items_that_compute(
    clock: PlantedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times(event: LoaderEvent) -> tuple[float | None, ...]:
        return event.item_ns, event.item_cpu_ns, event.item_delay_ns

    assert times(probe(Made(lambda _: clock.spend(30_000_000)))) == (30e6, 0, 0)
    assert times(probe(Made(lambda _: clock.spend(10_000_000, 10_000_000)))) == (10e6, 10e6, 0)
    # Waiting for a core is not waiting for storage; null where the kernel does not report it.
    crowded = Made(lambda _: clock.spend(30_000_000, 10_000_000, 20_000_000))
    assert times(probe(crowded)) == (30e6, 10e6, 20e6)
    monkeypatch.setattr(rehearsal, "_delay_ns", lambda: None)
    assert times(probe(crowded)) == (30e6, 10e6, None)


def test_few_items_are_made_when_they_are_slow_and_none_of_the_sample_again(clock: PlantedClock) -> None:
    slow = Made(lambda _: clock.spend(30_000_000))
    event = probe(slow)
    assert event.probed == 2
    *_, again = slow.asked
    sample, probed = slow.asked[-9 - event.probed : -1 - event.probed], slow.asked[-1 - event.probed : -1]
    assert not set(sample) & set(probed) and again == probed[0]  # read twice: is it random?
    assert probe(Made(lambda index: torch.tensor(index), 200), "batch.micro=100").probed == MOST_ITEMS


def test_data_in_memory_is_known_as_such_even_when_items_are_fetched_one_by_one(clock: PlantedClock) -> None:
    class Timed(Stacked):
        def __getitem__(self, index: int) -> Any:
            clock.spend(2_000_000)
            return super().__getitem__(index)

        def batch(self, indices: Tensor) -> Any:
            clock.spend(3_000_000)
            return super().batch(indices)

    tensors = Timed((torch.arange(600.0).view(200, 3), torch.arange(200)))
    for sets in ((), ("loader.fetch=item",), ("loader.fetch=item", "loader.workers=1")):
        event = probe(tensors, *sets)
        assert event.in_memory and (event.gather_ns, event.item_ns) == (3e6, 2e6)
    assert event.batch_bytes == 8 * (3 * 4 + 8)
    plain = probe(TensorDataset(torch.zeros(200, 3)))
    assert not plain.in_memory and plain.gather_ns is None and plain.encoded is None
    kept = probe(Made(lambda index: torch.tensor([index])), "loader.cache=true")
    assert kept.encoded == 64 and kept.in_memory
    placed = probe(tensors, 'loader.placement="device"')
    assert placed.in_memory and placed.micro == 8 and placed.items == 200


def test_a_probe_that_fails_says_nothing_and_moves_no_random_number() -> None:
    made = 0

    def fragile(_index: int) -> Tensor:
        nonlocal made
        made += 1
        if made > 16 + 8:  # 16 items for the checksum, 8 for the sample
            raise RuntimeError("too often")
        return torch.zeros(3)

    event = probe(Made(fragile))
    assert (event.item_ns, event.collate_ns, event.probed) == (None, None, 0)
    assert event.batch_bytes == 8 * 3 * 4
    config = read(None, ["workload.size=tiny", "batch.micro=8"]).resolve()
    batches = Batches(Made(lambda _: torch.rand(3) + random.random()), config)
    sample = batches.sample()
    before = random_state(CPU)
    assert probe_loader(batches, sample, 1e6).item_ns
    after = random_state(CPU)
    assert torch.equal(before.pop("torch"), after.pop("torch")) and before == after


# A step and a micro-batch

EEG = ("workload.samples=300", "batch.sequence=8")


def made(*sets: str, workload: str = "eeg") -> tuple[Stepper, Batches]:
    config = read(None, ["batch.micro=8", *sets], workload).resolve()
    torch.manual_seed(5)
    prepared = prepare(config)
    return Stepper(prepared, config, CPU, 10), Batches(prepared.train_data, config)


@pytest.mark.parametrize(
    ("workload", "sets"),
    [
        ("eeg", (*EEG, "workload.dropout=0.5")),
        ("chartext", ("workload.size=tiny", "workload.dropout=0.5", "workload.objective=diffusion")),
    ],
)
def test_the_trial_step_leaves_no_trace(workload: str, sets: tuple[str, ...]) -> None:
    stepper, batches = made(*sets, "precision.amp=fp16", workload=workload)
    other, other_batches = made(*sets, "precision.amp=fp16", workload=workload)
    before = random_state(CPU)
    buffers = {name: buffer.clone() for name, buffer in stepper.model.named_buffers()}
    found = rehearse(stepper, batches.sample())
    assert found.counter is not None
    assert found.counter.flops > 0
    after = random_state(CPU)
    assert torch.equal(before["torch"], after["torch"])
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in stepper.model.named_buffers())
    assert all(parameter.grad is None for parameter in stepper.parameters)
    losses = []
    for one, iterator in ((stepper, batches.epoch(0)), (other, other_batches.epoch(0))):
        torch.manual_seed(6)
        losses.append([float(one.step(iterator, PhaseClock(), 0) or 0) for _ in range(3)])
    assert losses[0] == losses[1]


def test_a_micro_batch_of_another_size_and_with_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "BASELINE_NS", 60_000_000_000)  # whatever else the machine does
    stepper, batches = made(*EEG)
    sizes: list[int] = []

    def make(count: int) -> Any:
        batch = batches.sample(count)
        sizes.append(len(next(iter(batch))))
        return batch

    event = rehearse(stepper, batches.sample(), Baseline(make, 1e3, 2)).baseline
    assert event is not None
    assert (event.micro, event.other_micro, event.threads, sizes) == (8, 4, 1, [4])
    assert event.micro_ns > 0 and event.other_ns is not None and 1 <= event.runs <= rehearsal.MOST_RUNS
    assert [threads for threads, _ in event.by_threads] == [2.0]
    assert event.operations is not None and event.operations > 10
    assert torch.get_num_threads() == 1
    assert all(parameter.grad is None for parameter in stepper.parameters)
    torch.set_num_threads(2)
    try:
        event = rehearse(stepper, batches.sample(), Baseline(make, 1e3, 2)).baseline
        assert event is not None and [threads for threads, _ in event.by_threads] == [1.0]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    one, few = made(*EEG, "batch.micro=1", "workload.model=lstm", "workload.hidden=[8]")
    event = rehearse(one, few.sample(), Baseline(few.sample, 1e3, 1)).baseline
    assert event is not None and event.other_micro == 2 and event.by_threads == []


def test_what_would_take_long_is_left_out() -> None:
    stepper, batches = made(*EEG)
    baseline = Baseline(batches.sample, 1e9, 1)  # an item of a second
    event = rehearse(stepper, batches.sample(), baseline).baseline
    assert event is not None and event.other_ns is None and event.other_micro is None
    plain = Workload.forward

    def slow(self: Workload, model: Any, batch: Any) -> Any:
        time.sleep(0.5)
        return plain(self, model, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workload, "forward", slow)
        patch.setattr(rehearsal, "SLOW_NS", 60e9)
        event = rehearse(stepper, batches.sample(), Baseline(batches.sample, 1e3, 2)).baseline
        patch.setattr(rehearsal, "SLOW_NS", 0.3e9)
        slower = rehearse(stepper, batches.sample(), Baseline(batches.sample, 1e3, 2)).baseline
    # A slow one is worth a second run, and the other thread count; a very slow one is not.
    assert event is not None and event.micro_ns > 0.5e9
    assert (event.runs, event.other_ns, [count for count, _ in event.by_threads]) == (2, None, [2])
    assert slower is not None
    assert (slower.runs, slower.other_ns, slower.by_threads) == (1, None, [])


@pytest.mark.long
@pytest.mark.promise
def test_the_losses_are_the_same_with_and_without_the_probes(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = (*trainer.ndd, *EVERY_STEP, "workload.dropout=0.5", "run.max_steps=20", "evaluate.every_epochs=0")
    probed = trainer.train(*sets)
    kinds = [type(event) for event in probed.events]
    assert kinds.count(LoaderEvent) == kinds.count(BaselineEvent) == 1
    assert probed.identity.usable_cores is not None
    monkeypatch.setattr(Baseline, "measure", lambda *_: None)
    plain = trainer.train(*sets)
    assert BaselineEvent not in [type(event) for event in plain.events]
    assert plain.losses == probed.losses and len(plain.losses) == 20


def test_waiting_for_an_epochs_first_batch_is_told_from_the_second_epoch_on(trainer: Trainer) -> None:
    # Workers that are restarted each epoch.
    restarted = ("run.epochs=2", "loader.workers=1", "loader.persistent=false", "evaluate.every_epochs=0")
    result = trainer.train(*trainer.ndd, *EVERY_STEP, *restarted)
    (first,) = [window for window in result.windows if "data_wait/first_batch" in window.phases]
    assert first.step == result.identity.steps_per_epoch + 1
    assert 0 < first.phases["data_wait/first_batch"]["host_ns"] <= first.phases["data_wait"]["host_ns"]
    # No step has it: neither the longest one nor a phase of it.
    assert first.phases["data_wait/first_batch"]["max_ns"] == 0
    assert first.step_max_ns <= first.wall_ns - first.phases["data_wait/first_batch"]["host_ns"]


# The size of the model


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], float]:
    """Steps per second by (size, threads) of the machine that is pretended; a size that is not in it fails the test."""
    table: dict[tuple[str, int], float] = {}

    def measure(config: Config, *_: object) -> float:
        return table[str(config.workload.size), torch.get_num_threads()]

    monkeypatch.setattr(rehearsal, "steps_per_second", measure)
    return table


def chosen(*sets: str, file: Path | None = None) -> Any:
    return choose_size(read(file, sets), CPU, lambda text: None)


# Threads at the beginning, settings, speeds; the size, the threads that are chosen, and those that torch then has.
@pytest.mark.parametrize(
    ("threads", "sets", "measured", "expected"),
    [
        (1, (), {("tiny", 1): 0.5}, ("tiny", None, 1)),  # too slow for every size
        (
            2, (), {("tiny", 2): 1.2, ("tiny", 1): 100.0, ("mini", 1): 9.0, ("small", 1): 3.0},
            ("mini", 1, 1),  # one thread is faster
        ),
        (2, ("run.threads=2",), {("tiny", 2): 1.2}, ("tiny", None, 2)),  # those that the user named stay
    ],
)  # fmt: skip
def test_sizes_and_threads_are_chosen_by_their_speed(
    speeds: dict[tuple[str, int], float], threads: int, sets: tuple[str, ...], measured: Any, expected: Any
) -> None:
    torch.set_num_threads(threads)
    speeds.update(measured)
    choice = chosen(*sets)
    assert (choice.size, choice.threads, torch.get_num_threads()) == expected


def test_the_largest_size_that_is_fast_enough_is_taken(speeds: dict[tuple[str, int], float]) -> None:
    speeds.update({("tiny", 1): 200.0, ("mini", 1): 60.0, ("small", 1): 20.0, ("medium", 1): 3.0})
    choice = chosen()
    assert choice.size == "small"
    # What is measured alone is 1.3 times as fast as the run: 20 and 3 steps/s.
    assert re.findall(r"[\d.]+", choice.reason) == ["15", "2.3", "5"]


@pytest.mark.parametrize("rate", [4.0, 5.1, 6.49, 6.5, 6.51, 7.0, 64.9])
def test_the_figure_shown_decides(speeds: dict[tuple[str, int], float], rate: float) -> None:
    torch.set_num_threads(1)
    speeds.update({("tiny", 1): 200.0, ("mini", 1): 60.0, ("small", 1): rate, ("medium", 1): 0.1})
    choice = chosen()
    shown = re.search(r"small(?:, about)? ([0-9.]+)", choice.reason)
    assert shown is not None, choice.reason
    assert (float(shown[1]) >= 5) == (choice.size == "small"), choice.reason


def test_a_hopeless_size_is_not_tried(speeds: dict[tuple[str, int], float]) -> None:
    speeds.update({("tiny", 1): 200.0, ("mini", 1): 60.0, ("small", 1): 7.0})  # trying medium would fail
    choice = chosen()
    assert choice.size == "small"
    assert "(medium 0.8" in choice.reason and "predicted" in choice.reason


def test_a_size_that_the_data_cannot_feed_is_not_in_question(
    speeds: dict[tuple[str, int], float], tmp_path: Path
) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a short text. " * 150)  # 2100 characters: enough for segments of 64, not of 128
    speeds.update({("tiny", 1): 1e9, ("mini", 1): 1e9, ("small", 1): 1e9, ("medium", 1): 1e9})
    assert chosen(f"workload.data={text}").size == "tiny"


def test_a_size_is_really_measured() -> None:
    told: list[str] = []
    draft = read(None, ["run.threads=1"])
    choice = choose_size(draft, CPU, told.append)
    assert choice.size in draft.auto["candidates"]
    assert any("tiny" in text for text in told)


def test_sizes_and_threads_of_an_own_workload_are_measured_too(
    speeds: dict[tuple[str, int], float], tmp_path: Path
) -> None:
    (tmp_path / "sized.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from torch.utils.data import TensorDataset\n"
        "def factory(settings):\n"
        "    model = nn.Linear(3, settings.option('width', 1))\n"
        "    data = TensorDataset(torch.rand(settings.option('items', 1000), 3))\n"
        "    return dict(model=model, train_data=data, loss=lambda output, batch: output.square().mean())\n"
    )
    file = tmp_path / "sized.toml"
    file.write_text(
        "[workload]\nname = 'sized:factory'\nsize = 'auto'\n[run]\nepochs = 1\n[batch]\nmicro = 2\n"
        "[sizes.small.workload.options]\nwidth = 2\n[sizes.large.workload.options]\nwidth = 4\n"
        "[auto]\ncandidates = ['small', 'large']\ngpu_size = 'large'\nmin_steps_per_second = 5\n"
        "probe = { options = { items = 9 } }\n"
    )
    torch.set_num_threads(2)
    speeds.update({("small", 2): 1.2, ("small", 1): 100.0, ("large", 1): 50.0})
    choice = chosen(file=file)
    assert (choice.size, choice.threads) == ("large", 1)

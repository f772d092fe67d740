"""Scalars for TensorBoard: what is written, and that writing never disturbs the training."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.records import run_event, window
from train_help import EVERY_STEP, Trainer

from ndd_engine.record.events import EndEvent, MarkEvent, MemoryEvent
from ndd_engine.train import loggers
from ndd_engine.train.loggers import TENSORBOARD as FOLDER
from ndd_engine.train.loggers import TensorBoard
from ndd_engine.train.scalars import Scalars


@dataclass
class FakeWriter:
    """Remembers what it was given; fails from the `fails_at`-th scalar on."""

    folder: Path
    purge_step: int | None
    fails_at: int | None = None
    written: list[tuple[str, float, int | None]] = field(default_factory=list)
    closed: bool = False

    def add_scalar(
        self, tag: str, value: float, step: int | None = None, walltime: float | None = None
    ) -> None:
        if self.fails_at is not None and len(self.written) >= self.fails_at:
            raise OSError(28, "No space left on device")
        assert not self.closed and walltime is not None
        self.written.append((tag, value, step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Runs write to fakes. "fails_at": of the writers to come; "made": those that were made."""
    told: dict[str, Any] = {"fails_at": None, "made": []}

    def opener(folder: Path, purge_step: int | None) -> FakeWriter:
        writer = FakeWriter(folder, purge_step, told["fails_at"])
        told["made"].append(writer)
        return writer

    class Faked(TensorBoard):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder, opener)

    monkeypatch.setattr(loggers, "TensorBoard", Faked)
    monkeypatch.setattr(loggers, "installed", lambda package: True)
    yield told


ON = ("log.tensorboard=true", *EVERY_STEP)


def test_a_run_writes_its_figures_by_step(trainer: Trainer, writers: dict[str, Any]) -> None:
    result = trainer.train(
        *trainer.ndd, *ON, "run.max_steps=12", "evaluate.every_steps=6", "clip.max_norm=1.0"
    )
    assert result.end.status == "done"
    (writer,) = writers["made"]
    assert writer.folder == result.directory.path / FOLDER and writer.purge_step is None and writer.closed
    losses = {step: value for tag, value, step in writer.written if tag == "train/loss"}
    recorded = {event.step: event.loss for event in result.windows if event.loss is not None}
    assert losses == pytest.approx(recorded) and losses
    tags = {tag for tag, _, _ in writer.written}
    assert {"train/lr", "train/grad_norm", "speed/items_per_s", "phase_ms/backward", "idle/share"} <= tags
    assert [step for tag, _, step in writer.written if tag == "evaluation/rmse"] == [6, 12]
    last = next(event for event in reversed(result.windows) if event.steps)
    backward = [
        value for tag, value, step in writer.written if tag == "phase_ms/backward" and step == last.step
    ]
    assert backward[0] == pytest.approx(last.phases["backward"]["host_ns"] * 1e-6 / last.steps)


def test_a_resume_hides_what_it_does_again(trainer: Trainer, writers: dict[str, Any]) -> None:
    first = trainer.train(*trainer.ndd, *ON, "run.max_steps=6")
    trainer.train("run.max_steps=9", resume=first)
    assert [writer.purge_step for writer in writers["made"]] == [None, 7]


def test_a_disk_that_fails_costs_one_warning_and_no_step(trainer: Trainer, writers: dict[str, Any]) -> None:
    writers["fails_at"] = 30
    result = trainer.train(*trainer.ndd, *ON, "run.max_steps=12")
    assert result.end.status == "done" and result.end.step == 12
    told = [mark.text for mark in result.marks("warning") if "TensorBoard" in mark.text]
    assert len(told) == 1 and "No space left" in told[0]
    assert writers["made"][0].closed


def test_an_installation_that_is_broken_costs_one_warning(
    trainer: Trainer, writers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "TensorBoard", TensorBoard)
    real = importlib.import_module

    def broken(name: str, package: str | None = None) -> Any:
        if name == "torch.utils.tensorboard":
            raise ImportError("numpy is of another world")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", broken)
    result = trainer.train(*trainer.ndd, *ON, "run.max_steps=3")
    assert result.end.status == "done"
    assert ["another world" in mark.text for mark in result.marks("warning")] == [True]
    assert not (result.directory.path / FOLDER).exists()


def test_what_is_missing_is_not_written(tmp_path: Path, writers: dict[str, Any]) -> None:
    marks: list[Any] = []
    made = writers["made"]
    view = Scalars(loggers.TensorBoard(tmp_path), marks.append)
    identity = run_event(device="cuda:0")
    view(1.0, identity)  # not prepared yet: nothing happens
    assert made == []
    view.prepare()
    view(1.0, identity)
    view(2.0, window(3, loss=float("nan")))
    view(2.0, MemoryEvent(10, 20, 30, 40, None, 0, 0, None, None, None))
    view(2.0, MarkEvent("evaluation", 3, "", {"metrics": {"loss": 2.5, "lost": None}}))
    view(3.0, EndEvent("done", "", 3, 0))
    assert marks == [] and made[0].closed
    tags = {tag for tag, _, _ in made[0].written}
    assert {"memory/allocated_bytes", "evaluation/loss", "phase_ms/forward"} <= tags
    assert not tags & {"train/loss", "train/lr", "memory/free_bytes", "evaluation/lost", "idle/share"}


def test_the_real_package_reads_back_what_was_written(trainer: Trainer) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = trainer.train(*trainer.ndd, *ON, "run.max_steps=6")
    result = trainer.train("run.max_steps=9", resume=first)
    assert [mark for mark in result.marks("warning") if "TensorBoard" in mark.text] == []
    read = EventAccumulator(str(result.directory.path / FOLDER))
    read.Reload()
    assert [item.step for item in read.Scalars("train/loss")] == list(range(1, 10))
    assert read.Scalars("speed/items_per_s")[-1].value > 0

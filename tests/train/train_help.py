"""Tiny runs for the training tests: made, executed in this process or another, and read back from their log."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.records import events_of, losses_of, snapshot_of
from tests.states import equal

from ndd_engine.config import read
from ndd_engine.record.events import EndEvent, Event, MarkEvent, RunEvent, SettingEvent, WindowEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.run.run import Run
from ndd_engine.train.checkpoint import CheckpointStore
from ndd_engine.train.request import RunRequest
from ndd_engine.train.training_run import TrainingRun
from tests import forked

NDD = (
    "workload.name=eeg", "workload.samples=400", "workload.channels=2", "workload.hidden=[8]",
    "batch.sequence=8", "batch.micro=16", "run.threads=1", "log.profile_every_s=0",
)  # fmt: skip
CHARTEXT = (
    "workload.name=chartext", "workload.size=tiny", "workload.width=16",
    "batch.sequence=16", "batch.micro=8", "run.threads=1", "log.profile_every_s=0",
)  # fmt: skip
Written = Callable[[str], tuple[str, ...]]
# What sources of workloads need.
IMPORTS = "import itertools, math, random, torch; from torch import nn; from torch.utils.data import *\n"
# Of a user's own workload with 324 items to train on. `step` is the one that is done, from 1.
OWN = ("run.epochs=3", "batch.micro=16", "batch.sequence=4", "run.threads=1", "log.profile_every_s=0")
_SOURCE = """
import time

step = 1

def count(train):
    global step
    AFTER
    step = train.step + 1

def join(items):
    DATA
    return default_collate(items)

def loss(output, batch):
    value = (output - batch[1]).square().mean()
    LOSS
    return value

def factory(settings):
    x = torch.rand(360, 4, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return dict(model=nn.Linear(4, 1), train_data=data, collate=join, loss=loss, on_step=count)
"""
EVERY_STEP = ("log.every_steps=1", "log.window_s=0")
QUIET = ("evaluate.every_epochs=0", "evaluate.at_end=false", "checkpoint.every_epochs=0")
ENDLESS = ("run.epochs=100000", *QUIET)


@dataclass
class Result:
    """What a run left behind."""

    directory: RunDir
    _end: EndEvent | None = None

    @property
    def end(self) -> EndEvent:
        assert self._end is not None
        return self._end

    @property
    def events(self) -> list[Event]:
        return events_of(self.directory)

    @property
    def windows(self) -> list[WindowEvent]:
        return [event for event in self.events if isinstance(event, WindowEvent)]

    @property
    def identity(self) -> RunEvent:
        """The newest `run` event."""
        return [event for event in self.events if isinstance(event, RunEvent)][-1]

    def marks(self, kind: str) -> list[MarkEvent]:
        return [event for event in self.events if isinstance(event, MarkEvent) and event.kind == kind]

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step; with EVERY_STEP each step has its own. Steps done twice must agree bit for bit."""
        return losses_of(self.directory)

    @property
    def snapshot(self) -> Snapshot:
        return snapshot_of(self.directory)

    @property
    def settings(self) -> dict[str, SettingEvent]:
        """The newest event of each setting."""
        return {event.name: event for event in self.events if isinstance(event, SettingEvent)}

    @property
    def rates(self) -> list[float]:
        """The learning rate of each step; with EVERY_STEP."""
        found = {window.step: round(float(window.lr or 0), 6) for window in self.windows if window.steps}
        return [rate for _, rate in sorted(found.items())]

    def closed_ns(self) -> int:
        """Nanoseconds of all windows, each of which is the sum of its phases."""
        assert self.windows
        for window in self.windows:
            phases = {name: figures["host_ns"] for name, figures in window.phases.items() if "/" not in name}
            assert sum(phases.values()) == window.wall_ns
            assert all(ns >= 0 for ns in phases.values())
        return sum(window.wall_ns for window in self.windows)

    @property
    def checkpoints(self) -> list[int]:
        """Steps of the checkpoints on disk."""
        return sorted(saved.step for saved in CheckpointStore(self.directory.checkpoints, 9).all())

    def state(self, step: int) -> dict[str, Any]:
        """What the checkpoint of a step holds."""
        store = CheckpointStore(self.directory.checkpoints, 9)
        return store.load(next(saved for saved in store.all() if saved.step == step))


class Trainer:
    """Makes runs below `root`."""

    def __init__(self, root: Path, text: Path) -> None:
        self.root = root
        self.chartext = (*CHARTEXT, f"workload.data={text}")
        self.ndd = NDD

    def open(
        self, *sets: str, resume: Result | None = None, from_step: int | None = None, listener: Any = None
    ) -> Run:
        """An open run; with `resume` on the configuration that it wrote."""
        directory = resume.directory if resume else None
        draft = read(directory.config if directory else None, sets)
        return Run.open(TrainingRun(RunRequest(draft, self.root, directory, from_step)), listener)

    def train(
        self,
        *sets: str,
        resume: Result | None = None,
        from_step: int | None = None,
        steer: Callable[[Run, Event], None] | None = None,
    ) -> Result:
        """Train to the end. steer: called with each recorded event, in the recorder's thread, in place of loggers."""
        run = self.open(*sets, resume=resume, from_step=from_step)
        if steer is not None:
            run.recorder._listener = lambda _, event: steer(run, event)
        try:
            end = run.execute()
        finally:
            run.close()
        return Result(run.directory, end)

    @contextmanager
    def beside(self, *sets: str, resume: Result | None = None) -> Iterator[Run]:
        """A run that trains in a thread of its own meanwhile."""
        run = self.open(*sets, resume=resume)
        thread = threading.Thread(target=run.execute)
        thread.start()
        try:
            yield run
        finally:
            run.control.request("kill")
            thread.join(60)
            run.close()
            assert not thread.is_alive()

    def process(self, *sets: str, name: str, resume: bool = False) -> subprocess.Popen[bytes]:
        """The same in a real process, as a user starts it."""
        options = [part for each in sets for part in ("--set", each)]
        command = ["--runs", str(self.root), "train", "--headless", "--resume" if resume else "--run", name]
        return forked.Popen(
            [*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def spoiled(loss: str = "pass", data: str = "pass", after: str = "pass") -> str:
    """The source of a workload that executes a statement in its loss, in its data or after each step."""
    return _SOURCE.replace("LOSS", loss).replace("DATA", data).replace("AFTER", after)


def in_step() -> bool:
    """Whether the caller is called by an optimizer step, and not by what is tried and timed before the first one."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != "eager_step":
        frame = frame.f_back
    return frame.f_back is not None


def stop_at(step: int) -> Callable[[Run, Event], None]:
    """Steers a run to stop soon after a step."""

    def steer(run: Run, event: Event) -> None:
        if isinstance(event, WindowEvent) and event.step >= step:
            run.control.request("stop", "far enough")

    return steer


def training_state(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a checkpoint that two equal runs share."""
    return {key: value for key, value in state.items() if key not in ("position", "threads", "torch")}


def resumed(trainer: Trainer, sets: tuple[str, ...], *steps: int) -> Result:
    """A run that goes on from its checkpoints of all `steps` but the last. It ends as it did, bit for bit."""
    first, last = steps[0], steps[-1]
    result = trainer.train(
        *sets, f"run.max_steps={last}", f"checkpoint.every_steps={first}", "checkpoint.keep=9"
    )
    assert result.end.status == "done", result.end.reason
    expected = training_state(result.state(last))
    for step in steps[:-1]:
        result = trainer.train(resume=result, from_step=step)
        assert result.end.status == "done", result.end.reason
        assert result.identity.resumed_step == step
        # `losses` compares the steps that were done twice.
        assert sorted(result.losses) == list(range(1, last + 1))
        assert equal(training_state(result.state(last)), expected)
    return result

"""A workload for trials, with faults that options plant or take away, and trials of it with small budgets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.runs import TINY
from tests.waiting import children, lives, until

from ndd_engine.child import Json, Tick
from ndd_engine.config import read
from ndd_engine.record.events import TrialEvent
from ndd_engine.run.run import Run
from ndd_engine.train.request import RunRequest
from ndd_engine.train.training_run import TrainingRun
from ndd_engine.trial.outcome import Base, Progress, TrialRequest
from ndd_engine.trial.sides import Budget, Trained
from ndd_engine.trial.trial import run_trial

SOURCE = '''
import os, signal, time
import torch
from torch import nn
from torch.utils.data import Dataset

class Clock:
    """Of this process, in place of time.perf_counter: it goes on only with what is planted, by so many seconds."""
    now = time.perf_counter()

def pass_time(seconds):
    Clock.now += seconds

class Pairs(Dataset):
    """Points of a line; each item takes `sleep` seconds to make."""
    def __init__(self, count, sleep, wait):
        self.count, self.sleep, self.wait = count, sleep, wait
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        if self.sleep:
            self.wait(self.sleep)
        x = torch.full((3,), index / self.count)
        return x, x.sum()

class Net(nn.Module):
    """Of several ranks, only the second one has the fault."""
    def __init__(self, fault):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.fault = fault
    def forward(self, x):
        ranks = torch.distributed.is_initialized()
        if not ranks or torch.distributed.get_rank() == 1:
            if self.fault == "huge":
                torch.empty(1 << 46)
            if self.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "broken":
                raise ValueError("this model is broken")
        return self.layer(x)

def loss(output, batch):
    return nn.functional.mse_loss(output.squeeze(1), batch[1])

def factory(settings):
    """With `step`, a step takes so many seconds of the clock of this process, besides its items."""
    step, model, wait = settings.option("step", 0.0), Net(settings.option("fault", "")), time.sleep
    if step:
        time.perf_counter, wait = lambda: Clock.now, pass_time
        model.register_forward_pre_hook(lambda *_: pass_time(step))
    data = Pairs(settings.option("count", 64), settings.option("sleep", 0.0), wait)
    return dict(model=model, train_data=data, loss=loss)
'''
# One epoch of tiny batches takes milliseconds; the thread leaves the other core to the trial.
BASE = """
[run]
epochs = 1
device = "cpu"
threads = 1

[workload]
name = "planted:factory"

[batch]
micro = 4
"""


def planted(folder: Path, **options: object) -> Base:
    """The baseline: the workload with these options, in a folder of its own."""
    (folder / "planted.py").write_text(SOURCE, encoding="utf-8")
    config = folder / "planted.toml"
    config.write_text(BASE, encoding="utf-8")
    sets = tuple(f"workload.options.{name}={_toml(value)}" for name, value in options.items())
    return Base("planted.toml", config, None, sets)


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def measured(
    base: Base, *sets: str, budget_s: float = 120.0, tell: Callable[[Progress], None] | None = None
) -> TrialEvent:
    """The result of a trial, which leaves nothing behind."""
    before = children()
    event = run_trial(TrialRequest(base, sets, budget_s), tell or (lambda _: None))
    # The server of loader workers ends once it reads that its process is gone.
    until(lambda: children() <= before, "a process was left behind")
    return event


def with_lengths(monkeypatch: pytest.MonkeyPatch, *step_s: float) -> None:
    """The processes of a trial train, and a step of the baseline and of the candidate is said to take so long.

    Without lengths, it takes what the process says. Nothing else takes time of the budget.
    """
    really, spent_s = Trained._ask, [0.0]

    def ask(self: Trained, command: Json, limit_s: float, tick: Tick) -> list[Json]:
        found = really(self, command, limit_s, tick)
        if command["do"] == "train":
            if step_s:
                length_s = command["steps"] * step_s[command["side"]]
                found = [{**each, "seconds": length_s, "waited_s": 0.0} for each in found]
            spent_s[0] += found[0]["seconds"]
        return found

    monkeypatch.setattr(Trained, "_ask", ask)
    monkeypatch.setattr(Budget, "elapsed_s", property(lambda _: spent_s[0]))


def descendants(pid: int) -> list[psutil.Process]:
    """What a process started: the sides of its trial, with their loaders' workers."""
    return [child for child in psutil.Process(pid).children(recursive=True) if lives(child)]


@contextmanager
def live_run(root: Path, name: str = "live") -> Iterator[Run]:
    """A run that trains in a thread of this process, without an end in sight."""
    run = Run.open(
        TrainingRun(RunRequest(read(sets=(*TINY, "run.epochs=1000000", f"run.name={name}")), root))
    )
    thread = threading.Thread(target=run.execute)
    thread.start()
    try:
        until(lambda: run.recorder.snapshot().step > 5)
        yield run
    finally:
        run.control.request("kill")
        thread.join(150)
        run.close()
        assert not thread.is_alive()

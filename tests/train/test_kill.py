"""A real process is killed with kill -9 in the middle of training, and the run resumes bit for bit."""

from __future__ import annotations

import signal
import subprocess

import psutil
import pytest
from tests.states import equal
from tests.waiting import LIMIT_S, lives, until
from train_help import EVERY_STEP, Result, Trainer, stop_at, training_state

from ndd_engine.record.events import RunEvent, WindowEvent, parse
from ndd_engine.record.rundir import RunDir

# Long enough to be killed, however fast the machine; the cosine makes the rate depend on the whole length.
LONG = (
    "run.epochs=100000", "run.max_steps=20000", "workload.dropout=0.2", "batch.accumulation=2", "schedule.kind=cosine",
    "schedule.warmup_steps=10", "checkpoint.every_steps=10", "checkpoint.every_epochs=0", "checkpoint.keep=100000",
    "evaluate.every_epochs=1", "evaluate.at_end=false",
)  # fmt: skip


def newest_step(result: Result) -> int:
    try:
        lines = result.directory.events.read_bytes()[-20_000:].splitlines()
    except FileNotFoundError:
        return 0
    windows = (
        item[1].step for item in map(parse, reversed(lines)) if item and isinstance(item[1], WindowEvent)
    )
    return next(windows, 0)


def kill_at(process: subprocess.Popen[bytes], result: Result, step: int) -> None:
    """kill -9 when the run has done that many steps; everything that it started has to go with it."""
    helpers: list[psutil.Process] = []
    try:
        until(lambda: newest_step(result) >= step or process.poll() is not None)
        assert process.poll() is None, "it ended before it could be killed"
        helpers = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(LIMIT_S)
        try:
            until(lambda: not any(map(lives, helpers)))
        finally:
            for helper in filter(lives, helpers):
                helper.kill()


@pytest.mark.long
@pytest.mark.promise
def test_killed_and_resumed_equals_uninterrupted(trainer: Trainer) -> None:
    # fp16, whose scaler is part of the state; what else can be part of it is tested in test_resume.
    sets = (*trainer.chartext, *EVERY_STEP, *LONG, "precision.amp=fp16", "optimizer.lr=0.01")
    killed = Result(RunDir(trainer.root / "killed"))
    kill_at(trainer.process(*sets, name="killed"), killed, 35)
    assert killed.snapshot.status == "lost"
    assert killed.directory.live_owner() is None
    reached = max(killed.losses)
    per_epoch = killed.identity.steps_per_epoch
    assert reached > per_epoch  # it crossed the end of an epoch
    resumed = trainer.train(resume=killed, steer=stop_at(reached + 2 * per_epoch))
    start = resumed.identity.resumed_step
    assert start is not None
    assert 0 < start <= reached
    assert sum(isinstance(event, RunEvent) for event in resumed.events) == 2
    whole = trainer.train(*sets, steer=stop_at(reached + 2 * per_epoch))
    last = min(max(resumed.losses), max(whole.losses))
    assert last >= reached + 2 * per_epoch
    # `losses` already compared what was done twice, before and after the kill.
    steps = range(1, last + 1)
    assert [resumed.losses[step] for step in steps] == [whole.losses[step] for step in steps]
    rates = [{window.step: window.lr for window in each.windows if window.steps} for each in (resumed, whole)]
    assert [rates[0][step] for step in steps] == [rates[1][step] for step in steps]
    saved = last // 10 * 10
    assert saved > start
    assert equal(training_state(resumed.state(saved)), training_state(whole.state(saved)))
    assert resumed.state(saved)["scaler"]["_growth_tracker"] == saved

"""A script is paused, let go and stopped from elsewhere; its losses stay the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pexpect
import pytest
from script_help import environment, events, run, start
from test_torchrun import SCRIPT as RANKS
from test_torchrun import TORCHRUN
from tests.tiers import few
from tests.ui.fakes import trial_event
from tests.waiting import LIMIT_S, contains, lives, until

from ndd_console.jobs.run_sources import AttachedSource
from ndd_engine.record.channel import send
from ndd_engine.record.events import MarkEvent, TrialEvent, WindowEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.trial.outcome import TrialRequest

pytestmark = pytest.mark.long

# Trains until a file is there and a number of steps is done; writes its steps as it goes, and prints its last loss.
SCRIPT = """
import os, pathlib, sys
import torch
from torch import nn
{before}
torch.manual_seed(0)
torch.set_num_threads(1)
open("pid", "w").write(str(os.getpid()))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
steps = open("steps", "w", buffering=1)
count = 0
try:
    while not pathlib.Path("enough").exists() or count % 1000:
        optimizer.zero_grad()
        loss = (model(torch.randn(32, 64)) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        count += 1
        if not count % 10:
            print(count, file=steps)
except KeyboardInterrupt:
    print("INTERRUPTED")
    sys.exit(3)
print("LAST", count, loss.item().hex())
"""


def steps(folder: Path) -> int:
    return (folder / "steps").stat().st_size


def written(folder: Path, before: str = "") -> RunDir:
    """Write the script; the folder of its run."""
    (folder / "train.py").write_text(SCRIPT.format(before=before))
    return RunDir(folder / "runs" / "it")


def paused(folder: Path, directory: RunDir) -> None:
    """Pause it, and see that it stands."""
    until(lambda: contains(directory.events, '"window"'))
    send(directory.control_socket, "pause")
    until(lambda: contains(directory.events, '"pause"'))
    at = steps(folder)
    time.sleep(1.0)
    assert steps(folder) == at


def marks(folder: Path, kind: str) -> list[MarkEvent]:
    return [one for one in events(folder, "it") if isinstance(one, MarkEvent) and one.kind == kind]


@pytest.mark.promise
def test_a_script_pauses_and_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    directory, begin = written(tmp_path), time.monotonic()
    with start(
        tmp_path, "run", "--run", "it", "--", sys.executable, "train.py", NDD_WATCH_STALLED_S="0.5"
    ) as process:
        try:
            paused(tmp_path, directory)
            at = steps(tmp_path)
            send(directory.control_socket, "resume")
            until(lambda: steps(tmp_path) > at)
        finally:
            (tmp_path / "enough").touch()
        assert process.stdout is not None
        last = process.stdout.read().split()
    spent_s = time.monotonic() - begin
    assert process.returncode == 0
    # The same steps without an observer.
    bare = SCRIPT.replace('not pathlib.Path("enough").exists() or count % 1000', f"count < {last[1]}")
    (tmp_path / "train.py").write_text(bare.format(before=""))
    done = run(tmp_path, "run", "--run", "bare", "--", sys.executable, "train.py")
    assert done.stdout.split() == last
    (pause,), (resume,) = marks(tmp_path, "pause"), marks(tmp_path, "resume")
    assert pause.step == resume.step and resume.data["seconds"] > 0.9
    # Standing still was no hang, and it is in no window.
    kinds = [one.kind for one in events(tmp_path, "it") if isinstance(one, MarkEvent)]
    assert "warning" not in kinds[kinds.index("pause") : kinds.index("resume")]
    windows = [one for one in events(tmp_path, "it") if isinstance(one, WindowEvent)]
    assert sum(one.steps for one in windows) == int(last[1])
    assert sum(one.wall_ns for one in windows) * 1e-9 + resume.data["seconds"] < spent_s
    assert all(
        sum(one.phases[name]["host_ns"] for name in one.phases if "/" not in name) == one.wall_ns
        for one in windows
    )


@pytest.mark.parametrize("number", few([signal.SIGINT, signal.SIGTERM], 1))
def test_a_signal_reaches_a_paused_script_at_once(tmp_path: Path, number: signal.Signals) -> None:
    directory = written(tmp_path)
    with start(tmp_path, "run", "--run", "it", "--", sys.executable, "train.py") as process:
        paused(tmp_path, directory)
        os.kill(int((tmp_path / "pid").read_text()), number)
        process.wait(LIMIT_S)
        assert process.stdout is not None
        assert ("INTERRUPTED" in process.stdout.read()) == (number == signal.SIGINT)
    assert process.returncode == (3 if number == signal.SIGINT else 128 + number)


@pytest.mark.slow
def test_a_paused_script_is_stopped(tmp_path: Path) -> None:
    directory = written(tmp_path)
    with start(tmp_path, "run", "--run", "it", "--", sys.executable, "train.py") as process:
        paused(tmp_path, directory)
        send(directory.control_socket, "stop")
        process.wait(LIMIT_S)
    assert process.returncode == 3 and events(tmp_path, "it")[-1].status == "stopped"


def test_a_live_script_is_paused_during_a_trial(tmp_path: Path) -> None:
    directory = written(tmp_path)
    stood: list[bool] = []

    def measure(request: TrialRequest, tell: Any, stop: Any) -> TrialEvent:
        at = steps(tmp_path)
        time.sleep(1.0)
        stood.append(steps(tmp_path) == at)
        return trial_event("faster", sets=list(request.sets), against=request.base.name)

    with start(tmp_path, "run", "--run", "it", "--", sys.executable, "train.py"):
        try:
            until(lambda: contains(directory.events, '"window"'))
            source = AttachedSource(directory, 0.05)
            trials = source.trials()
            trials._measure = measure
            assert (trials.pauses(), trials.refusal()) == ("it", "")
            job = trials.start(("run.threads=2",), None, 60.0)
            until(lambda: job.done)
            assert job.problem == "" and stood == [True]
            at = steps(tmp_path)
            until(lambda: steps(tmp_path) > at)
            source.close()
        finally:
            (tmp_path / "enough").touch()


def test_a_script_goes_on_when_its_console_is_gone(tmp_path: Path) -> None:
    """It observes itself, so that it does not end with the console."""
    before = "from ndd_engine import observe\nobserve('it')"
    directory = written(tmp_path, before=before)
    script = pexpect.spawn(
        sys.executable, ["train.py"], cwd=str(tmp_path), env=environment(), timeout=LIMIT_S
    )
    try:
        paused(tmp_path, directory)
        owner: Any = directory.live_owner()
        assert lives(owner["pid"])
        os.kill(owner["pid"], signal.SIGKILL)
        at = steps(tmp_path)
        until(lambda: steps(tmp_path) > at)
    finally:
        (tmp_path / "enough").touch()
    script.expect("LAST")
    script.expect(pexpect.EOF)


@pytest.mark.slow
@pytest.mark.budget(40)
def test_ranks_pause_after_the_same_step_and_each_is_captured(tmp_path: Path) -> None:
    each = "open(f'step-{rank}', 'w').write(str(step)); time.sleep(0.002)"
    options = {"STEPS": "1500", "EACH": each, "OMP_NUM_THREADS": "1"}
    (tmp_path / "train.py").write_text(RANKS)
    directory = RunDir(tmp_path / "runs" / "it")

    def at() -> list[str]:
        return [(tmp_path / f"step-{rank}").read_text() for rank in (0, 1)]

    def losses() -> list[str]:
        return [(tmp_path / f"loss-{rank}").read_text() for rank in (0, 1)]

    words = (*TORCHRUN, "--nproc-per-node", "2", "train.py")
    with start(tmp_path, "run", "--run", "it", "--", *words, **options) as process:
        until(lambda: contains(directory.events, '"window"'))
        send(directory.control_socket, "pause")
        until(lambda: contains(directory.events, '"pause"'))
        first, second = at()
        assert (
            abs(int(first) - int(second)) <= 1
        )  # it is written after the optimizer's step, in which they pause
        time.sleep(1.0)
        assert at() == [first, second]
        send(directory.control_socket, "kernels")
        send(directory.control_socket, "resume")
        shown = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 0, shown
    observed = losses()
    subprocess.run(
        words, cwd=tmp_path, env=environment(**options), check=True, capture_output=True, timeout=LIMIT_S
    )
    assert losses() == observed
    (pause,), (resume,) = marks(tmp_path, "pause"), marks(tmp_path, "resume")
    assert pause.step == resume.step
    assert {path.name for path in directory.path.glob("capture*")} == {"capture.json", "capture.rank-1.json"}

"""Runs that many tests read. Each is made once in a session of pytest, by the worker that needs it first.

Nobody writes into them: a test that does takes a `copy`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ndd_engine.config import read
from ndd_engine.record.rundir import RunDir
from ndd_engine.run.run import Run
from ndd_engine.train.request import RunRequest
from ndd_engine.train.training_run import TrainingRun

# Steps without work, in one thread.
TINY = (
    "workload.name=eeg", "workload.samples=400", "workload.channels=2", "workload.hidden=[8]", "batch.sequence=8",
    "batch.micro=16", "run.threads=1", "run.device=cpu", "evaluate.every_epochs=0", "checkpoint.every_epochs=0",
    "evaluate.at_end=false", "log.window_s=0.02", "log.every_steps=1",
)  # fmt: skip
# A script whose items wait for a slow disk: workers wait in parallel, however busy the cores are. STEPS: of its
# environment. Its run, and what the console printed of it.
SCRIPT, SCRIPT_RUN, OUTPUT = "slow.py", "base", "output.txt"
SLOW = """import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def decode(index):
    time.sleep(0.004)
    return torch.full((8,), float(index)), torch.ones(1)


class Files(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return decode(index)


torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
open("pid", "w").write(str(os.getpid()))
print("hello from the script", flush=True)
steps = int(os.environ.get("STEPS", "1000000000"))
while True:
    for x, y in DataLoader(Files(), batch_size=8):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        steps -= 1
        if not steps:
            raise SystemExit
"""


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The folder of this name, which `make` has filled in this process or in another worker of the session."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "runs" / name
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not lock.read():  # what a failed attempt has left goes
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            lock.write("made")
    return folder


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that has done its 5 steps."""

    def make(folder: Path) -> None:
        draft = read(sets=(*TINY, "run.max_steps=5", "run.name=ended"))
        run = Run.open(TrainingRun(RunRequest(draft, folder)))
        try:
            assert run.execute().status == "done"
        finally:
            run.close()

    return RunDir(made_once(tmp_path_factory, "finished", make) / "ended")


@pytest.fixture(scope="session")
def script_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script SCRIPT, its run of 120 steps in `runs`, and OUTPUT. Tests that use it are `long`."""

    def make(folder: Path) -> None:
        (folder / SCRIPT).write_text(SLOW)
        words = ("run", "--run", SCRIPT_RUN, "--", sys.executable, SCRIPT)
        more = {"NDD_WATCH_WINDOW_S": "0.2", "NO_COLOR": "1", "STEPS": "120"}
        done = subprocess.run(
            [sys.executable, "-m", "ndd_console", *words], cwd=folder, env={**os.environ, **more}, check=True,
            capture_output=True, text=True, timeout=150,
        )  # fmt: skip
        (folder / OUTPUT).write_text(done.stderr)

    return made_once(tmp_path_factory, "script", make)


def copy(run: RunDir, root: Path) -> RunDir:
    """A copy of a run in another folder of runs."""
    shutil.copytree(run.path, root / run.name)
    return RunDir(root / run.name)

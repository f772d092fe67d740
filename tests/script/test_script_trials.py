"""Trials of scripts: a change from outside, measured in scratch copies, and the edit that makes it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

CONSOLE = (sys.executable, "-m", "ndd_console")
# Items wait for a slow disk: workers wait in parallel, however busy the cores are.
SCRIPT = """import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Files(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.full((8,), float(index)), torch.ones(1)


torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
open("written.txt", "a").write(str(os.getpid()))
steps = int(os.environ.get("STEPS", "1000000000"))
for epoch in range(1000):
    for x, y in DataLoader(Files(), batch_size=8):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        steps -= 1
        if not steps:
            raise SystemExit
"""


def console(folder: Path, *words: str, status: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*CONSOLE, *words], cwd=folder, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL,
        env={**os.environ, "NDD_WATCH_WINDOW_S": "0.2", **more}, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    return done


def hashes(folder: Path) -> dict[str, str]:
    """Of all files besides those of the runs."""
    files = (path for path in folder.rglob("*") if path.is_file() and "runs" not in path.parts)
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def leftovers(name: str) -> list[Any]:
    found: list[Any] = list(Path(tempfile.gettempdir()).glob(f".ndd-*/work/{name}"))
    running = psutil.process_iter(["cmdline"])
    return [*found, *(one for one in running if name in " ".join(one.info["cmdline"] or ()))]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script and a run of it."""
    folder = tmp_path_factory.mktemp("recorded")
    name = f"waits{os.getpid()}.py"
    (folder / name).write_text(SCRIPT)
    console(folder, "run", "--run", "base", "--", sys.executable, name, STEPS="40")
    return folder


@pytest.fixture
def script(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    command = next(tmp_path.glob("runs/base/*.json"))
    command.write_text(command.read_text().replace(str(recorded), str(tmp_path)))
    return next(tmp_path.glob("waits*.py"))


@pytest.mark.slow
def test_workers_for_slow_storage_are_faster_and_the_edit_is_applied(script: Path, tmp_path: Path) -> None:
    before, there = hashes(tmp_path), set(map(str, leftovers(script.name)))
    done = console(tmp_path, "try", "base", "--set", "loader.workers=2", "--budget", "30")
    assert "faster" in done.stdout and "in effect" in done.stdout and "losses identical" in done.stdout
    assert "+    for x, y in DataLoader(Files(), batch_size=8, num_workers=2):" in done.stdout
    assert hashes(tmp_path) == before
    assert not set(map(str, leftovers(script.name))) - there
    again = console(tmp_path, "try", "base", "--set", "loader.workers=2", "--budget", "30", "--apply")
    assert (
        "not measured again" in again.stderr
        and "wrote" in again.stderr
        and "num_workers=2" in script.read_text()
    )
    shown = console(tmp_path, "report", "base", "--json")
    assert [trial["sets"] for trial in json.loads(shown.stdout)["trials"]] == [["loader.workers=2"]]


@pytest.mark.slow
def test_threads_are_switched_in_one_process(script: Path, tmp_path: Path) -> None:
    before = hashes(tmp_path)
    done = console(tmp_path, "try", "base", "--set", "run.threads=1", "--budget", "15", "--json")
    event = json.loads(done.stdout)
    assert event["method"] == "one process" and event["in_effect"] is True
    assert event["loss"] == "not comparable"
    assert hashes(tmp_path) == before


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("workload.size=tiny", "cannot be changed without editing"),
        ("loader.workers=many", "loader.workers"),
        ("loader.workers=0", "nothing to compare"),
    ],
)
def test_what_cannot_be_tried_is_refused(script: Path, tmp_path: Path, change: str, words: str) -> None:
    assert words in console(tmp_path, "try", "base", "--set", change, status=2).stderr


@pytest.mark.long
@pytest.mark.promise
def test_a_killed_trial_leaves_nothing(script: Path, tmp_path: Path) -> None:
    before = hashes(tmp_path)
    process = subprocess.Popen(
        [*CONSOLE, "try", "base", "--set", "run.threads=1"], cwd=tmp_path, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while (
        not any(isinstance(one, psutil.Process) for one in leftovers(script.name))
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    time.sleep(4)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while leftovers(script.name) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not leftovers(script.name)
    assert hashes(tmp_path) == before

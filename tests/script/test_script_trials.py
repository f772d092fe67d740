"""Trials of scripts: a change from outside, measured in scratch copies, and the edit that makes it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from script_help import events, report, run, start
from tests.tiers import few
from tests.waiting import until

from ndd_console.__main__ import status_of
from ndd_engine.child import ChildError
from ndd_engine.record.events import RunEvent
from ndd_engine.script.command import Command
from ndd_engine.script.edits import edit_of, first_steps, refusal
from ndd_engine.script.trials import ScriptProcess
from ndd_engine.trial.outcome import LOSSES, SideFacts

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


def hashes(folder: Path) -> dict[str, str]:
    """Of all files besides those of the runs."""
    files = (path for path in folder.rglob("*") if path.is_file() and "runs" not in path.parts)
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def leftovers(name: str) -> list[Any]:
    found: list[Any] = list(Path(tempfile.gettempdir()).glob(f".ndd-*/above/**/{name}"))
    running = psutil.process_iter(["cmdline"])
    return [*found, *(one for one in running if name in " ".join(one.info["cmdline"] or ()))]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script and a run of it."""
    folder = tmp_path_factory.mktemp("recorded")
    name = f"waits{os.getpid()}.py"
    (folder / name).write_text(SCRIPT)
    run(folder, "run", "--run", "base", "--", sys.executable, name, STEPS="40")
    return folder


@pytest.fixture
def script(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob(
        "runs/base/*.json*"
    ):  # the command, and the record with the places of the loader
        path.write_text(path.read_text().replace(str(recorded), str(tmp_path)))
    return next(tmp_path.glob("waits*.py"))


@pytest.mark.slow
def test_workers_for_slow_storage_are_faster_and_the_edit_is_applied(script: Path, tmp_path: Path) -> None:
    before, there = hashes(tmp_path), set(map(str, leftovers(script.name)))
    words = ("try", "base", "--set", "loader.workers=2", "--budget", "60")
    done = run(tmp_path, *words, stdin="")
    assert "num_workers=2):" in done.stdout
    assert hashes(tmp_path) == before
    assert not set(map(str, leftovers(script.name))) - there
    run(tmp_path, *words, "--apply", stdin="")
    assert "num_workers=2" in script.read_text()
    (trial,) = report(tmp_path, "base")["trials"]  # it was not measured again
    assert (trial["sets"], trial["verdict"], trial["loss"]) == (["loader.workers=2"], "faster", "same")
    assert trial["in_effect"] is True


@pytest.mark.slow
def test_threads_are_switched_in_one_process(script: Path, tmp_path: Path) -> None:
    before = hashes(tmp_path)
    done = run(tmp_path, "try", "base", "--set", "run.threads=1", "--budget", "15", "--json", stdin="")
    event = json.loads(done.stdout)
    assert event["method"] == "one process" and event["in_effect"] is True
    assert event["loss"] == "not comparable"
    assert hashes(tmp_path) == before


@pytest.mark.long
@pytest.mark.parametrize("change", few(["workload.size=tiny", "loader.workers=many", "loader.workers=0"], 1))
def test_what_cannot_be_tried_is_refused(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    assert status_of(["--runs", str(tmp_path / "runs"), "try", "base", "--set", change]) == 2
    assert change.partition("=")[0] in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.promise
def test_a_killed_trial_leaves_nothing(script: Path, tmp_path: Path) -> None:
    before = hashes(tmp_path)
    process = start(tmp_path, "try", "base", "--set", "run.threads=1")
    until(lambda: any(isinstance(one, psutil.Process) for one in leftovers(script.name)))
    time.sleep(4)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    until(lambda: not leftovers(script.name))
    assert hashes(tmp_path) == before


BESIDE = """import sys
from pathlib import Path

import torch
from shared import size
from torch import nn

torch.manual_seed(0)
model = nn.Linear(size(), 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
width = int(Path("../data/width.txt").read_text())
for step in range(10**9):
    optimizer.zero_grad()
    loss = model(torch.randn(4, width)).square().mean()
    loss.backward()
    optimizer.step()
    if len(sys.argv) > 1:
        Path("../data/width.txt").write_text("9")
"""


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script that needs data and a package which are beside it."""
    for name, text in (
        ("lib/shared.py", "def size():\n    return 8\n"), ("data/width.txt", "8"), ("own/train.py", BESIDE),
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", "../lib")
    return tmp_path / "own"


def trained(folder: Path, *words: str) -> SideFacts:
    """What is known of a script that trains in a scratch copy."""
    command = Command((sys.executable, "train.py", *words), folder)
    with ScriptProcess(command, [{}], {}, folder / "runs", False) as process:
        process.prepare(60.0, lambda _: None)
        process.train(12, 60.0, lambda _: None, lead=0)
        process.learn(lambda _: None)
        return process.facts


@pytest.mark.slow
@pytest.mark.long
def test_a_script_trains_with_files_and_packages_beside_its_folder(beside: Path) -> None:
    before = hashes(beside.parent)
    once, again = trained(beside), trained(beside)
    assert (once.items_per_step, once.item, once.of_tokens) == (4, [8], False)
    assert hashes(beside.parent) == before
    # Of the same steps, in every process; the first step is not seen whole.
    assert once.loss_steps == again.loss_steps and len(once.loss_steps) == LOSSES
    assert once.losses == again.losses and len(set(once.losses)) == LOSSES
    assert len(once.lengths_us) >= 12 and min(once.lengths_us) > 0


@pytest.mark.long
def test_a_script_that_writes_beside_its_folder_ends_before_it_does(beside: Path) -> None:
    before = hashes(beside.parent)
    with pytest.raises(ChildError, match="outside its folder"):
        trained(beside, "writes")
    assert hashes(beside.parent) == before


UNSEEDED = """import random

import torch
from torch import nn

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    loss = (model(torch.randn(4, 8)) - random.random()).square().mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.budget(30)
def test_starts_for_losses_have_the_same_seed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNSEEDED)
    command = Command((sys.executable, "train.py"), tmp_path)

    def losses(**change: Any) -> list[float]:
        side = {key.replace("__", "."): value for key, value in change.items()}
        process = ScriptProcess(command, [side], {}, tmp_path / "runs", False, seeded=True)
        return first_steps(process, 1.0, lambda _: None).losses

    usual = losses()
    assert usual == losses() and len(usual) == LOSSES
    lowered = losses(precision__amp="bf16")
    assert usual != lowered and usual == pytest.approx(lowered, rel=0.1, abs=0.05)


LOADED = """import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kwargs = {"num_workers": 1, "batch_size": 4}
for epoch in range(10**9):
    for x in DataLoader(torch.randn(64, 8), sampler=range(64), **kwargs):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""
CALL = "DataLoader(torch.randn(64, 8), sampler=range(64), **kwargs)"


@pytest.mark.long
@pytest.mark.budget(60)
@pytest.mark.parametrize(
    ("call", "reason"),
    few(
        [
            ("", ""),
            # As version 0.5.0 edited it.
            (CALL.replace("**kwargs", "**kwargs, num_workers=0"), "num_workers"),
            (CALL + " ", "instead of 0"),
            ("DataLoader(torch.randn(64, 8) + 1, batch_size=4)", "losses"),
        ],
        1,
    ),
    ids=["right", "given twice", "without effect", "other losses"],
)
def test_an_edit_is_shown_only_if_it_trains_as_the_change_does(
    tmp_path: Path, call: str, reason: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(LOADED)
    seen = {"script": {"loader": [str(path), 10]}}
    edit = edit_of(seen, {"loader.workers": 0}, "cpu", path)
    if call:
        edit = replace(edit, after=LOADED.replace(CALL, call))
    command = Command((sys.executable, str(path)), tmp_path)

    def start(edited: Any, expected: Any, change: Any) -> ScriptProcess:
        return ScriptProcess(command, [change], {}, tmp_path / "runs", False, edited, expected)

    why = refusal(edit, {"loader.workers": 0}, start, 1.0, lambda _: None)
    assert reason in why and bool(reason) == bool(why), why
    assert path.read_text() == LOADED


IMAGES = """import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    loss = model(torch.randn(4, 3, 8, 8)).square().mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.budget(30)
@pytest.mark.parametrize("effective", [True, False])
def test_the_edit_of_a_memory_format_is_read_back(tmp_path: Path, effective: bool) -> None:
    path, changes = tmp_path / "train.py", {"speed.channels_last": True}
    path.write_text(IMAGES)
    edit = edit_of({"script": {"optimizer": [str(path), 6]}}, changes, "cpu", path)
    assert "model.to(memory_format=torch.channels_last)" in edit.after
    if not effective:
        edit = replace(edit, after=edit.after.replace("model.to(", "torch.zeros(1, 1, 1, 1).to("))
    command = Command((sys.executable, str(path)), tmp_path)

    def start(edited: Any, expected: Any, change: Any) -> ScriptProcess:
        return ScriptProcess(command, [change], {}, tmp_path / "runs", False, edited, expected)

    why = refusal(edit, changes, start, 1.0, lambda _: None)
    assert ("speed.channels_last is false" in why) != effective and bool(why) != effective, why


@pytest.mark.long
@pytest.mark.parametrize("text", few([IMAGES, UNSEEDED], 1), ids=["images", "numbers"])
def test_a_run_tells_whether_the_model_has_convolutions(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.py").write_text(text.replace("while True", "for _ in range(40)"))
    run(tmp_path, "run", "--run", "base", "--", sys.executable, "train.py")
    last = [event for event in events(tmp_path, "base") if isinstance(event, RunEvent)][-1]
    assert last.config["script"].get("convolutions", False) == (text is IMAGES)

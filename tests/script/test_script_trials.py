"""Trials of scripts: a change from outside, measured in contained scratch copies, and the edit that makes it."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from script_help import events, report, run, start
from tests.cli.program import call
from tests.records import run_event, write
from tests.runs import SCRIPT, SCRIPT_RUN
from tests.tiers import few
from tests.trial.trial_help import with_lengths
from tests.waiting import until

from ndd_console.__main__ import status_of
from ndd_engine.child import ChildError
from ndd_engine.errors import UsageError
from ndd_engine.record.events import RunEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.run.run import Run
from ndd_engine.script.command import Command
from ndd_engine.script.edits import Edit, edit_of, first_steps, refusal
from ndd_engine.script.script_run import Script
from ndd_engine.script.script_tuning import observe
from ndd_engine.script.trials import ScriptProcess
from ndd_engine.trial.outcome import LOSSES, SideFacts

# A loop without data of its own. first, before, each, after: more lines of the script, the first before torch.
LOOP = """import multiprocessing, os, random, socket, sqlite3, subprocess, sys
{first}
from pathlib import Path

import torch
from torch import nn
{before}
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(os.environ.get("STEPS", "1000000000"))):
    optimizer.zero_grad()
    loss = (model(torch.randn(4, 8)) - random.random()).square().mean()
    loss.backward()
    optimizer.step()
    {each}
{after}
"""


def written(folder: Path, before: str = "", each: str = "", after: str = "", first: str = "") -> Path:
    path = folder / "train.py"
    path.write_text(LOOP.format(first=first, before=before, each=each, after=after))
    return path


def trained(folder: Path, *words: str) -> SideFacts:
    """What is known of a script that trains in a scratch copy. words: its command, else that of `written`."""
    command = Command(words or (sys.executable, "train.py"), folder)
    with ScriptProcess(command, [{}], {}, folder / "runs", False) as process:
        process.prepare(60.0, lambda _: None)
        process.train(12, 60.0, lambda _: None, lead=0)
        process.learn(lambda _: None)
        return process.facts


def hashes(folder: Path) -> dict[str, str]:
    """Of all files besides those of the runs."""
    files = (path for path in folder.rglob("*") if path.is_file() and "runs" not in path.parts)
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def leftovers(name: str) -> list[Any]:
    found: list[Any] = list(Path(tempfile.gettempdir()).glob(f".ndd-*/above/**/{name}"))
    running = psutil.process_iter(["cmdline"])
    return [*found, *(one for one in running if name in " ".join(one.info["cmdline"] or ()))]


# Trials of a run.


@pytest.fixture
def script(script_run: Path, tmp_path: Path) -> Path:
    """A copy of the script that is slow, with its run; of this name there are no processes of other tests."""
    shutil.copytree(script_run, tmp_path, dirs_exist_ok=True)
    path = (tmp_path / SCRIPT).rename(tmp_path / f"waits{os.getpid()}.py")
    # The command, and the record with the places of the loader.
    for file in tmp_path.glob(f"runs/{SCRIPT_RUN}/*.json*"):
        text = file.read_text().replace(str(script_run), str(tmp_path)).replace(SCRIPT, path.name)
        file.write_text(text)
    return path


# In the same lines, so that the recorded places are right: a clock of this process, which items and steps move.
BY_CLOCK = {
    "import time": "import time; clock = [time.perf_counter_ns()]; time.perf_counter_ns = lambda: clock[0]",
    "time.sleep(0.004)": "clock[0] += 50_000_000",
    "optimizer.step()": "optimizer.step(); clock[0] += 50_000_000",
}


@pytest.mark.long
@pytest.mark.budget(30)
def test_workers_for_slow_storage_are_faster_and_the_edit_is_applied(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_lengths(monkeypatch)
    text = script.read_text()
    for real, planted in BY_CLOCK.items():
        text = text.replace(real, planted)
    script.write_text(text)
    before, there = hashes(tmp_path), set(map(str, leftovers(script.name)))
    words = ("try", "base", "--set", "loader.workers=1", "--budget", "30")
    done = call(*words, folder=tmp_path)
    assert "num_workers=1):" in done.stdout
    assert hashes(tmp_path) == before
    assert not set(map(str, leftovers(script.name))) - there
    call(*words, "--apply", folder=tmp_path)
    assert "num_workers=1" in script.read_text()
    (trial,) = report(tmp_path, "base")["trials"]  # it was not measured again
    assert (trial["sets"], trial["verdict"], trial["loss"]) == (["loader.workers=1"], "faster", "same")
    # Of 450 ms, the items take 400.
    assert trial["ratio"] == pytest.approx(9) and trial["low"] > 8
    assert trial["in_effect"] is True


@pytest.mark.parametrize("change", ["workload.size=tiny", "loader.workers=many", "loader.workers=0"])
def test_what_cannot_be_tried_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    base = RunDir(tmp_path / "runs" / "base")
    write(base, [(0.0, run_event(config={"loader": {"workers": 0}, "script": {}}))])
    Command((sys.executable, str(written(tmp_path))), tmp_path).keep(base)
    assert status_of(["--runs", str(tmp_path / "runs"), "try", "base", "--set", change]) == 2
    assert change.partition("=")[0] in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.budget(20)
def test_a_killed_trial_leaves_nothing(script: Path, tmp_path: Path) -> None:
    before = hashes(tmp_path)
    process = start(tmp_path, "try", "base", "--set", "run.threads=1")
    until(lambda: any(isinstance(one, psutil.Process) for one in leftovers(script.name)))
    time.sleep(4)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    until(lambda: not leftovers(script.name))
    assert hashes(tmp_path) == before


@pytest.mark.slow
def test_a_script_trains_with_files_and_packages_beside_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lib", "data", "own"):
        (tmp_path / name).mkdir()
    (tmp_path / "lib/shared.py").write_text("SEED = 7\n")
    (tmp_path / "data/seed.txt").write_text("8")
    needs = 'import shared; torch.manual_seed(shared.SEED); random.seed(int(Path("../data/seed.txt").read_text()))'
    written(tmp_path / "own", before=needs)
    monkeypatch.setenv("PYTHONPATH", "../lib")
    before = hashes(tmp_path)
    once, again = trained(tmp_path / "own"), trained(tmp_path / "own")
    assert (once.items_per_step, once.item, once.of_tokens) == (4, [8], False)
    assert hashes(tmp_path) == before
    # Of the same steps, in every process; the first step is not seen whole.
    assert once.loss_steps == again.loss_steps and len(once.loss_steps) == LOSSES
    assert once.losses == again.losses and len(set(once.losses)) == LOSSES
    assert len(once.lengths_us) >= 12 and min(once.lengths_us) > 0


@pytest.mark.slow
def test_a_console_script_trains_in_the_copy_as_its_module_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, programs = tmp_path / "own/src/mytrain", tmp_path / "bin"
    package.mkdir(parents=True)
    programs.mkdir()
    here = "torch.manual_seed(1); random.seed(1); assert __file__.startswith(os.getcwd()), __file__"
    written(package, before=here).rename(package / "__main__.py")
    (package / "__init__.py").touch()
    program = programs / "my-train"
    program.write_text(
        f"#!{sys.executable}\nimport runpy\nrunpy.run_module('mytrain', run_name='__main__')\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", "src")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    before = hashes(tmp_path)
    as_module = trained(tmp_path / "own", sys.executable, "-m", "mytrain")
    by_name, by_path = (trained(tmp_path / "own", word) for word in ("my-train", str(program)))
    assert as_module.losses == by_name.losses == by_path.losses and len(set(by_name.losses)) == LOSSES
    assert hashes(tmp_path) == before


# Each process that makes items keeps 64 MiB.
KEEPS = """
class Items(torch.utils.data.Dataset):
    kept = b""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        Items.kept = Items.kept or b"x" * (1 << 26)
        return torch.zeros(1)


batches = iter(torch.utils.data.DataLoader(Items(), 4, num_workers={workers}))
"""


@pytest.mark.slow
def test_the_peak_memory_of_a_side_has_that_of_its_workers(tmp_path: Path) -> None:
    peaks = {}
    for workers in (0, 2):
        (tmp_path / str(workers)).mkdir()
        written(tmp_path / str(workers), before=KEEPS.format(workers=workers), each="next(batches)")
        peaks[workers] = trained(tmp_path / str(workers)).peak_bytes
    assert peaks[2] is not None and peaks[0] is not None and peaks[2] - peaks[0] > 60 << 20


# What a scratch copy does not contain.


FORKED = """
def work():
    open({path!r}, "a").write("x")

child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("does", "named"),
    few(
        [
            ("subprocess.run(['sh', '-c', 'date >> {path}'])", "sh -c date"),
            ("os.system('date >> {path}')", "date"),
            ("socket.create_connection(('192.0.2.1', 9), 0.1)", "192.0.2.1:9"),
            ("open({path!r}, 'a')", "outside its folder"),
            (FORKED, "outside its folder"),
        ],
        1,
    ),
    ids=["program", "shell", "connection", "original", "forked"],
)
def test_what_a_trial_does_not_contain_ends_it_before(tmp_path: Path, does: str, named: str) -> None:
    path = tmp_path / "outside.txt"
    script = written(tmp_path, does.format(path=str(path)))
    with pytest.raises(ChildError) as failed:
        trained(tmp_path, sys.executable, str(script))
    assert named in str(failed.value) and "--allow-side-effects" in str(failed.value)
    assert not path.exists()


CHILD = "subprocess.run([sys.executable, '-c', 'import sys; open(sys.argv[1], \"w\")', {path!r}])"


@pytest.mark.long
@pytest.mark.parametrize(
    ("does", "named"),
    few(
        [
            (CHILD, "results.txt, outside its folder"),
            ("open({path!r}, 'w')", "results.txt, outside its folder"),
            ("os.system('date >> {path}')", "starts another program (date"),
            ("sqlite3.connect({path!r}).execute('create table steps (loss)')", "results.txt, outside"),
            ("subprocess.run([sys.executable, '-I', '-c', '1'])", "starts another program"),
        ],
        1,
    ),
    ids=["child", "file", "program", "database", "unwatched child"],
)
def test_what_a_script_does_before_it_imports_torch_ends_a_trial_before(
    tmp_path: Path, does: str, named: str
) -> None:
    path = tmp_path / "results.txt"
    path.write_text("of weeks")
    script = written(tmp_path, first=does.format(path=str(path)))
    with pytest.raises(ChildError) as failed:
        trained(tmp_path, sys.executable, str(script))
    assert named in str(failed.value) and "--allow-side-effects" in str(failed.value)
    assert path.read_text() == "of weeks"


@pytest.mark.long
@pytest.mark.promise
def test_what_a_run_started_first_and_last_is_named_before_a_trial(tmp_path: Path) -> None:
    path = tmp_path / "outside.txt"
    does = "subprocess.run(['sh', '-c', '{} >> {}'])"
    written(tmp_path, first=does.format("echo", path), after=does.format("date", path))
    run(tmp_path, "run", "--run", "base", "--", sys.executable, "train.py", STEPS="8")
    before = path.read_text()
    last = [event for event in events(tmp_path, "base") if isinstance(event, RunEvent)][-1]
    assert last.config["script"]["outside"]["programs"] == [
        f"sh -c {does} >> {path}" for does in ("echo", "date")
    ]
    done = run(tmp_path, "try", "base", "--set", "run.threads=1", status=2)
    assert "sh -c date" in done.stderr and path.read_text() == before


@pytest.mark.slow
def test_a_command_that_is_tuned_is_refused_before_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "results.txt"
    path.write_text("of weeks")
    script = written(tmp_path, first=f"open({str(path)!r}, 'w')")
    words = shlex.split("tune --only threads --budget 5 --")
    done = run(tmp_path, *words, sys.executable, str(script), status=2)
    assert "outside" in done.stderr and path.read_text() == "of weeks"


def test_what_the_observed_copy_is_given_is_not_set_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Mapping[str, str]] = []

    def opened(script: Script) -> Run:
        given.append(script.request.environment)
        raise UsageError("not started")

    monkeypatch.setattr(Run, "open", opened)
    command, before = Command((sys.executable, str(written(tmp_path))), tmp_path), dict(os.environ)
    with pytest.raises(UsageError, match="not started"):
        observe(tmp_path / "runs", command, lambda _: None, threading.Event())
    assert given[0]["HF_HUB_OFFLINE"] == "1" and dict(os.environ) == before


# The edit that makes a change trains before it is shown.


@pytest.mark.slow
@pytest.mark.budget(30)
def test_starts_for_losses_have_the_same_seed(tmp_path: Path) -> None:
    written(tmp_path)
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


def why_not(path: Path, changes: dict[str, Any], edit: Edit) -> str:
    """Why an edit is not shown, after it has trained in a scratch copy."""
    before = path.read_text()

    def start(edited: Any, expected: Any, change: Any) -> ScriptProcess:
        command = Command((sys.executable, str(path)), path.parent)
        return ScriptProcess(command, [change], {}, path.parent / "runs", False, edited, expected)

    found = refusal(edit, changes, start, 1.0, lambda _: None)
    assert path.read_text() == before
    return found


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
    path, changes = tmp_path / "train.py", {"loader.workers": 0}
    path.write_text(LOADED)
    edit = edit_of({"script": {"loader": [str(path), 10]}}, changes, "cpu", path)
    if call:
        edit = replace(edit, after=LOADED.replace(CALL, call))
    why = why_not(path, changes, edit)
    assert reason in why and bool(reason) == bool(why), why

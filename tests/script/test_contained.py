"""A trial is contained: what it would do outside its scratch copy ends it before anything happens."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from script_help import events, run
from tests.tiers import few

from ndd_engine.child import ChildError
from ndd_engine.record.events import RunEvent
from ndd_engine.script.command import Command
from ndd_engine.script.trials import ScriptProcess

SCRIPT = """import multiprocessing, os, socket, subprocess, sys
from pathlib import Path

import torch
from torch import nn

here = Path(__file__).parent
{before}
torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(os.environ.get("STEPS", "1000000000"))):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    if step == 4:
        (here / "beside.txt").open("a").write("x")
{after}
"""
FORKED = """
def work():
    open({path!r}, "a").write("x")

child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()
"""


def written(folder: Path, before: str = "", after: str = "") -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(before=before, after=after))
    return path


def train(folder: Path) -> None:
    """Train in a scratch copy, by the whole path of the script."""
    command = Command((sys.executable, str(folder / "train.py")), folder)
    with ScriptProcess(command, [{}], {}, folder / "runs", False) as process:
        process.prepare(60.0, lambda _: None)
        process.train(8, 60.0, lambda _: None, lead=0)


@pytest.mark.slow
@pytest.mark.long
def test_a_script_that_is_named_by_its_whole_path_writes_beside_its_copy(tmp_path: Path) -> None:
    written(tmp_path)
    train(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


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
        2,
    ),
    ids=["program", "shell", "connection", "original", "forked"],
)
def test_what_a_trial_does_not_contain_ends_it_before(tmp_path: Path, does: str, named: str) -> None:
    path = tmp_path / "outside.txt"
    written(tmp_path, does.format(path=str(path)))
    with pytest.raises(ChildError) as failed:
        train(tmp_path)
    assert named in str(failed.value) and "--allow-side-effects" in str(failed.value)
    assert not path.exists()


@pytest.mark.long
@pytest.mark.promise
def test_what_a_run_started_at_its_end_is_named_before_a_trial(tmp_path: Path) -> None:
    path = tmp_path / "outside.txt"
    written(tmp_path, after=f"subprocess.run(['sh', '-c', 'date >> {path}'])")
    run(tmp_path, "run", "--run", "base", "--", sys.executable, "train.py", STEPS="8")
    before = path.read_text()
    last = [event for event in events(tmp_path, "base") if isinstance(event, RunEvent)][-1]
    assert last.config["script"]["outside"]["programs"] == [f"sh -c date >> {path}"]
    done = run(tmp_path, "try", "base", "--set", "run.threads=1", status=2)
    assert "sh -c date" in done.stderr and path.read_text() == before


@pytest.mark.slow
@pytest.mark.long
def test_a_command_that_is_tuned_is_refused_before_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "outside.txt"
    script = written(tmp_path, f"open({str(path)!r}, 'a')")
    words = shlex.split("tune --only threads --budget 5 --")
    done = run(tmp_path, *words, sys.executable, str(script), status=2)
    assert "outside its folder" in done.stderr and not path.exists()

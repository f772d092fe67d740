"""A user's own model from the command line: the example, where its module is found, and what goes wrong."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ndd_engine.config import read

from .program import call, environment, refused, run

QUICK = ("--set", "run.threads=1", "--set", "log.every_steps=1", "--set", "log.window_s=0")
SMALL = """
import torch
from torch import nn
from torch.utils.data import Dataset

class Doubles(Dataset):
    def __len__(self):
        return 80
    def __getitem__(self, index):
        x = torch.rand(4, generator=torch.Generator().manual_seed(index))
        return x, 2 * x

def loss(output, batch):
    return nn.functional.mse_loss(output, batch[1])

def factory(settings):
    return dict(model=nn.Linear(4, 4), train_data=Doubles(), loss=loss)
"""


def write(folder: Path, name: str, old: str = "", new: str = "") -> tuple[str, ...]:
    """A workload in a module of this name, with a change: the options that name it."""
    assert old in SMALL
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(SMALL.replace(old, new) if old else SMALL)
    return ("--workload", f"{name}:factory", *QUICK)


def line_of(path: Path, text: str) -> str:
    """The place of a line in its file: "name.py:3"."""
    return f"{path.name}:{path.read_text().splitlines().index(text) + 1}"


# The example


@pytest.mark.long
def test_the_example_trains_with_the_command_that_is_printed(tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    made = call("scaffold", "a folder/net.py", folder=tmp_path)
    # The installed program: unlike python -m, it does not have the current folder on its path.
    program = str(Path(sys.executable).with_name("ndd-console"))
    command = made.stdout.strip().replace("ndd-console", shlex.quote(program))
    done = subprocess.run(
        ["sh", "-c", f"{command} --json {shlex.join(QUICK)}"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    identity = next(event for event in events if event["type"] == "run")
    assert (identity["workload"], identity["item"]) == ("net:factory", "wave")
    assert sum(event["steps"] for event in events if event["type"] == "window") == 20
    result = next(event for event in events if event.get("kind") == "evaluation")
    assert 0 <= result["data"]["metrics"]["accuracy"] <= 1


def test_the_example_in_a_package_names_it_in_its_command_and_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    made = call("scaffold", "models/net.py", folder=tmp_path)
    assert "models.net:factory" in shlex.split(made.stdout)
    assert "models.net:factory" in (tmp_path / "models" / "net.py").read_text()


def test_the_file_that_the_example_shows_can_be_used(tmp_path: Path) -> None:
    assert call("scaffold", folder=tmp_path).returncode == 0
    lines = (tmp_path / "my_workload.py").read_text().splitlines()
    start, end = lines.index("    [workload]"), lines.index("    sequence = 128")
    (tmp_path / "my_workload.toml").write_text("\n".join(lines[start : end + 1]))
    config = read(tmp_path / "my_workload.toml", ("run.max_steps=2",)).resolve()
    assert (config.workload.name, config.batch.micro) == ("my_workload:factory", 64)
    assert config.workload.options["width"] == 64  # type: ignore[union-attr]


def test_nothing_is_overwritten_unless_asked_to(tmp_path: Path) -> None:
    write(tmp_path, "my_workload")
    assert "--force" in refused("scaffold", folder=tmp_path)
    assert call("scaffold", "--force", folder=tmp_path).returncode == 0
    assert (tmp_path / "my_workload.py").read_text() != SMALL


@pytest.mark.parametrize("path", ["my-model.py", "class.py", "model", "random.py", "nowhere/net.py", "."])
def test_names_that_cannot_be_imported(tmp_path: Path, path: str) -> None:
    assert path in refused("scaffold", path, folder=tmp_path)


# Where a module is found


@pytest.mark.slow
def test_a_module_is_found_beside_its_file_by_a_resume_and_where_it_is_said_to_be(tmp_path: Path) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    write(project, "moved_workload")
    (project / "run.toml").write_text('[workload]\nname = "moved_workload:factory"\n[run]\nmax_steps = 3\n')
    unused = refused("check", "project/run.toml", "--set", "workload.options.unknown=3", folder=tmp_path)
    assert "workload.options.unknown" in unused
    done = run("train", "project/run.toml", "--run", "half", *QUICK, folder=tmp_path)
    assert done.returncode == 0 and "project/moved_workload.py:" in done.stderr, done.stderr
    resume = ("--runs", str(tmp_path / "runs"), "train", "--resume", "half", "--max-steps")
    assert run(*resume, "6", folder=elsewhere).returncode == 0
    (project / "moved_workload.py").rename(elsewhere / "moved_workload.py")
    assert "moved_workload" in refused(*resume, "8", folder=tmp_path)
    assert run(*resume, "8", "--set", 'workload.path=["elsewhere"]', folder=tmp_path).returncode == 0


# What goes wrong


@pytest.mark.long
@pytest.mark.promise
def test_an_error_in_the_factory_is_one_line_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    call_of = "    return dict("
    own = write(tmp_path, "failing_factory", call_of, f"    settings.no_such_thing\n{call_of}")
    place = line_of(tmp_path / "failing_factory.py", "    settings.no_such_thing")
    done = run("train", "--max-steps", "3", *own, folder=tmp_path)
    told = done.stdout + done.stderr
    assert done.returncode == 2 and place in told and "AttributeError" in told and "Traceback" not in told
    log = (tmp_path / "runs" / "failing_factory-001" / "console.log").read_text()
    assert "Traceback" in log and "settings.no_such_thing" in log
    checked = call("check", "--json", "--set", "run.epochs=1", *own, folder=tmp_path)
    assert checked.returncode == 2 and "Traceback" not in checked.stderr
    (problem,) = json.loads(checked.stdout)["problems"]
    assert problem["where"] == place


@pytest.mark.long
@pytest.mark.promise
def test_an_item_that_fails_in_a_worker_is_named_with_its_place(tmp_path: Path) -> None:
    method = "    def __getitem__(self, index):\n"
    fails = "        if index == 33:\n            raise ValueError('lost')\n"
    own = write(tmp_path, "failing_item", method, method + fails)
    options = ("--set", "run.epochs=1", "--set", "loader.workers=1", "--set", "batch.micro=8")
    done = run("train", *options, *own, folder=tmp_path)
    told = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback" not in told
    place = line_of(tmp_path / "failing_item.py", "            raise ValueError('lost')")
    assert "ValueError" in told and "data_wait" in told and place in told


@pytest.mark.slow
@pytest.mark.long
def test_what_the_module_prints_does_not_get_between_the_data(tmp_path: Path) -> None:
    call_of = "    return dict("
    own = write(tmp_path, "printing_factory", call_of, f"    print('printed here')\n{call_of}")
    done = run("train", "--json", "--max-steps", "3", *own, folder=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["type"] == "end"
    log = (tmp_path / "runs" / "printing_factory-001" / "console.log").read_text()
    assert "printed here" in done.stderr and "printed here" in log
    checked = call("check", "--json", "--set", "run.epochs=2", *own, folder=tmp_path)
    report = json.loads(checked.stdout)
    assert (report["train_items"], report["eval_items"], report["parameters"]) == (72, 8, 20)
    assert any("printing_factory.py:" in note for note in report["notes"])

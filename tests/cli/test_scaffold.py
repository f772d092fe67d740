"""A user's own model from the command line: the example, the README's, resume, workers, and what goes wrong."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ndd_engine.record.rundir import all_runs

from ..terminal.screen import START_S, Terminal
from .program import environment, run

pytestmark = [pytest.mark.long, pytest.mark.timeout(150)]
README = Path(__file__).parents[2] / "README.md"
QUICK = ("--set", "run.threads=1", "--set", "log.every_steps=1", "--set", "log.window_s=0")
OWN = ("--workload", "my_workload:factory", *QUICK)
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


def write(folder: Path, source: str = SMALL) -> None:
    (folder / "my_workload.py").write_text(source, "utf-8")


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def losses(found: list[dict[str, Any]]) -> dict[int, float]:
    windows = [event for event in found if event["type"] == "window" and event["last_loss"]]
    return {event["last_loss"][0]: event["last_loss"][1] for event in windows}


def test_the_example_trains_with_the_command_that_is_printed(tmp_path: Path) -> None:
    made = run("scaffold", folder=tmp_path)
    assert made.returncode == 0 and "wrote my_workload.py" in made.stderr
    program, *arguments = shlex.split(made.stdout)
    assert program == "ndd-console"
    # The installed program: unlike python -m, it does not have the current folder on its path.
    done = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *arguments, "--json", *QUICK],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = events(done.stdout)
    identity = next(event for event in found if event["type"] == "run")
    assert identity["item"] == "wave" and identity["model"] == "convolutions of width 32"
    assert sum(event["steps"] for event in found if event["type"] == "window") == 20
    assert [entry.name for entry in all_runs(tmp_path / "runs")] == ["my_workload-001"]
    table = run("runs", folder=tmp_path).stdout
    assert "my_workload:factory" in table and "accuracy" in table


@pytest.mark.slow  # 15 s; the example trains in several others
def test_the_example_learns_with_loader_workers(tmp_path: Path) -> None:
    assert run("scaffold", "waves.py", folder=tmp_path).returncode == 0
    done = run(
        "train", "--json", "--workload", "waves:factory", "--max-steps", "60", *QUICK,
        "--set", "loader.workers=2", "--set", "loader.eval_workers=1", "--set", "optimizer.lr=0.01",
        "--set", "workload.options.noise=0.1", folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = events(done.stdout)
    curve = losses(found)
    assert curve[60] < 0.8 * curve[1]
    result = next(event for event in found if event.get("kind") == "evaluation")
    assert result["data"]["metrics"]["accuracy"] > 0.5  # by chance it would be a third


def test_nothing_is_overwritten_unless_asked_to(tmp_path: Path) -> None:
    write(tmp_path)
    kept = run("scaffold", folder=tmp_path)
    assert (
        kept.returncode == 2 and "my_workload.py already exists" in kept.stderr and "--force" in kept.stderr
    )
    assert kept.stdout == "" and (tmp_path / "my_workload.py").read_text() == SMALL
    assert run("scaffold", "--force", folder=tmp_path).returncode == 0
    assert "class Waves" in (tmp_path / "my_workload.py").read_text()


def test_the_example_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    made = run("scaffold", "models/net.py", folder=tmp_path)
    assert made.returncode == 0 and "--workload models.net:factory" in made.stdout
    assert "--workload models.net:factory" in (tmp_path / "models" / "net.py").read_text()
    checked = run("check", "--workload", "models.net:factory", "--set", "run.epochs=1", folder=tmp_path)
    assert checked.returncode == 0 and "convolutions of width 32" in checked.stdout, checked.stderr
    (tmp_path / "a folder").mkdir()
    made = run("scaffold", str(tmp_path / "a folder" / "net.py"), folder=tmp_path / "models")
    assert (
        made.stdout
        == f"cd '{tmp_path}/a folder' && ndd-console train --workload net:factory --max-steps 20\n"
    )


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("my-model.py", "letters, digits and _"),
        ("class.py", "letters, digits and _"),
        ("model", "must end in .py: model.py"),
        ("random.py", "a standard library module"),
        ("nowhere/net.py", "No such file or directory"),
        (".", "is a folder"),
    ],
)
def test_names_that_cannot_be_imported(tmp_path: Path, path: str, expected: str) -> None:
    made = run("scaffold", path, folder=tmp_path)
    assert made.returncode == 2 and expected in made.stderr
    assert not list(tmp_path.iterdir())


def test_the_file_that_the_example_shows_can_be_used(tmp_path: Path) -> None:
    assert run("scaffold", folder=tmp_path).returncode == 0
    lines = (tmp_path / "my_workload.py").read_text().splitlines()
    start, end = lines.index("    [workload]"), lines.index("    sequence = 128")
    (tmp_path / "my_workload.toml").write_text("\n".join(lines[start : end + 1]))
    done = run("train", "my_workload.toml", "--json", "--max-steps", "2", *QUICK, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    identity = next(event for event in events(done.stdout) if event["type"] == "run")
    assert identity["model"] == "convolutions of width 64" and identity["items_per_step"] == 64


def test_help_and_completion_know_it(tmp_path: Path) -> None:
    assert "scaffold" in run("--help", folder=tmp_path).stdout
    assert "--force" in run("scaffold", "--help", folder=tmp_path).stdout
    assert "module:factory" in run("train", "--help", folder=tmp_path).stdout
    done = run(
        folder=tmp_path, _NDD_CONSOLE_COMPLETE="bash_complete", COMP_WORDS="ndd-console sca", COMP_CWORD="1"
    )
    assert "scaffold" in done.stdout


def test_a_resume_finds_its_module_from_elsewhere_and_a_moved_one_once_it_is_said_where(
    tmp_path: Path,
) -> None:
    write(tmp_path)
    assert run("train", "--run", "half", "--max-steps", "4", *OWN, folder=tmp_path).returncode == 0
    (tmp_path / "elsewhere").mkdir()
    further = ("--runs", str(tmp_path / "runs"), "train", "--resume", "half", "--max-steps")
    other = run(*further, "6", "--set", "workload.options.a=1", folder=tmp_path / "elsewhere")
    assert other.returncode == 2 and "workload.options was {}" in other.stderr
    assert run(*further, "6", folder=tmp_path / "elsewhere").returncode == 0
    (tmp_path / "my_workload.py").rename(tmp_path / "elsewhere" / "my_workload.py")
    further = ("train", "--resume", "half", "--max-steps", "8")
    lost = run(*further, folder=tmp_path)
    assert lost.returncode == 2 and "there is no module my_workload" in lost.stderr
    assert run(*further, "--set", 'workload.path=["elsewhere"]', folder=tmp_path).returncode == 0


def test_a_configuration_file_finds_the_module_beside_it(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    write(tmp_path / "project")
    (tmp_path / "project" / "run.toml").write_text(
        '[workload]\nname = "my_workload:factory"\n[workload.options]\nunknown = 3\n[run]\nmax_steps = 3\n'
    )
    wrong = run("train", "project/run.toml", *QUICK, folder=tmp_path)
    assert wrong.returncode == 2
    assert "workload.options.unknown = 3: is not used by the factory" in wrong.stdout + wrong.stderr
    file = tmp_path / "project" / "run.toml"
    file.write_text(file.read_text().replace("unknown = 3\n", ""))
    done = run("train", "project/run.toml", *QUICK, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "my_workload:factory is defined at project/my_workload.py:" in done.stderr


@pytest.mark.promise
def test_an_error_in_the_factory_is_one_line_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    write(tmp_path, SMALL.replace("    return dict(", "    settings.no_such_thing\n    return dict("))
    line = 1 + (tmp_path / "my_workload.py").read_text().splitlines().index("    settings.no_such_thing")
    done = run("train", "--max-steps", "3", *OWN, folder=tmp_path)
    assert done.returncode == 2
    told = done.stdout + done.stderr
    assert f"my_workload.py:{line}: the factory failed: AttributeError" in told and "Traceback" not in told
    log = (tmp_path / "runs" / "my_workload-001" / "console.log").read_text()
    assert "Traceback" in log and "settings.no_such_thing" in log
    checked = run("check", "--json", "--set", "run.epochs=1", *OWN, folder=tmp_path)
    assert checked.returncode == 2 and "Traceback" not in checked.stderr
    (problem,) = json.loads(checked.stdout)["problems"]
    assert problem["where"] == f"my_workload.py:{line}"


@pytest.mark.promise
def test_an_item_that_fails_in_a_worker_is_named_with_its_place(tmp_path: Path) -> None:
    lost = (
        "    def __getitem__(self, index):\n        if index == 33:\n            raise ValueError('lost')\n"
    )
    write(tmp_path, SMALL.replace("    def __getitem__(self, index):\n", lost))
    line = 1 + (tmp_path / "my_workload.py").read_text().splitlines().index(
        "            raise ValueError('lost')"
    )
    options = ("--set", "run.epochs=1", "--set", "loader.workers=1", "--set", "batch.micro=8")
    done = run("train", *options, *OWN, folder=tmp_path)
    told = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback (most" not in told
    assert "ValueError at step" in told and "in data_wait" in told and f"my_workload.py:{line}" in told


@pytest.mark.slow
def test_what_the_module_prints_does_not_get_between_the_data(tmp_path: Path) -> None:
    write(tmp_path, SMALL.replace("    return dict(", "    print('from the factory')\n    return dict("))
    done = run("train", "--json", "--max-steps", "3", *OWN, folder=tmp_path)
    assert done.returncode == 0 and events(done.stdout)[-1]["type"] == "end"
    assert "from the factory" in done.stderr
    assert "from the factory" in (tmp_path / "runs" / "my_workload-001" / "console.log").read_text()
    checked = run("check", "--json", "--set", "run.epochs=2", *OWN, folder=tmp_path)
    report = json.loads(checked.stdout)
    assert (report["train_items"], report["eval_items"], report["parameters"]) == (72, 8, 20)
    assert any("my_workload.py:" in note for note in report["notes"])


def test_the_live_screen_shows_it_and_attach_reads_it(tmp_path: Path) -> None:
    write(tmp_path)
    endless = (
        "--set",
        "run.epochs=100000",
        "--set",
        f'workload.path=["{tmp_path}"]',
        "--set",
        "run.threads=1",
    )
    runs = tmp_path / "runs"
    with Terminal("train", "--workload", "my_workload:factory", *endless, runs=runs) as terminal:
        screen = terminal.until("● training", START_S)
        assert "my_workload-001" in screen
        terminal.press("\x03")
        assert terminal.wait() == 130
    attached = run("attach", "my_workload-001", folder=tmp_path)
    assert attached.returncode == 130 and "interrupted" in attached.stdout

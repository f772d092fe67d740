"""Scripts of Lightning, Hugging Face's Trainer and Accelerate, observed without a change and from another environment.

The Python of the scripts knows the installed packages, but nothing of ndd-console.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from ndd_engine.record.events import MarkEvent, RunEvent, ScalarsEvent, WindowEvent, parse
from ndd_engine.record.rundir import RunDir
from ndd_watch import FOLDER, SITE
from tests.diagnose.kinds_of_runs import EVERYTHING, OFTEN, check
from tests.records import events_of
from tests.torch_exit import ABORTED

from .test_extras import need

SUBJECTS = Path(__file__).parents[1] / "observe" / "subjects"
# Subject -> (package, epochs that the framework tells, epochs, micro-batches of an epoch, steps of an epoch): every
# third micro-batch is a step, and so is the rest of an epoch.
SCRIPTS = {
    "lightning_fit": ("lightning", 3, 3, 16, 6),
    "hf_trainer": ("transformers", 3, 3, 16, 6),
    "accelerate_fit": ("accelerate", 0, 4, 16, 6),
}
# Importing these packages takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)
# What the scripts report without observation.
_BARE: dict[str, list[str]] = {}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the packages of this one, but without ndd-console, which is installed through a .pth file."""
    folder = tmp_path_factory.mktemp("theirs")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    Path(packages, "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    known = subprocess.run([python, "-c", "import ndd_engine"], capture_output=True, check=False)
    assert known.returncode == 1
    return python


def environment(**more: str) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", FOLDER)}
    return {**inherited, "NDD_WATCH_WINDOW_S": "0.1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", **more}


def execute(folder: Path, *words: object, **more: str) -> str:
    folder.mkdir(exist_ok=True, parents=True)
    for _ in range(4):
        done = subprocess.run(
            [*map(str, words)], cwd=folder, capture_output=True, text=True, timeout=400, check=False,
            env=environment(**more),
        )  # fmt: skip
        if done.returncode == 0 or ABORTED not in done.stdout + done.stderr:
            break
        shutil.rmtree(folder / "runs", ignore_errors=True)
    assert done.returncode == 0, done.stderr
    assert "not observed" not in done.stderr, done.stderr
    return done.stdout


def bare(folder: Path, python: Path, name: str) -> list[str]:
    """What a script reports without observation."""
    if name not in _BARE:
        _BARE[name] = words(execute(folder, python, SUBJECTS / f"{name}.py"))
    return _BARE[name]


def words(text: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith("STEPS")).split()


def recorded(folder: Path, *command: object) -> tuple[list[str], list[Any]]:
    """(what it reports, the events) of a command under `ndd-console run`."""
    console = (sys.executable, "-m", "ndd_console", "run", "--headless", "--run", "it", "--")
    said = words(execute(folder, *console, *command))
    run = folder / "runs" / "it"
    found = [
        item[1] for item in map(parse, (run / "events.jsonl").read_bytes().splitlines()) if item is not None
    ]
    return said, found


def counted(events: list[Any]) -> tuple[int, int]:
    """(steps, micro-steps) of the first process, whose phases add up to the wall time."""
    windows = [event for event in events if isinstance(event, WindowEvent)]
    for window in windows:
        # A wait for other ranks is part of its phase, too.
        phases = [body["host_ns"] for name, body in window.phases.items() if "/" not in name]
        assert sum(phases) == window.wall_ns
    return sum(window.steps for window in windows), sum(window.micro_steps for window in windows)


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_steps_phases_evaluations_and_losses(theirs: Path, tmp_path: Path, name: str) -> None:
    package, told, epochs, micro, steps = SCRIPTS[name]
    need(package)
    said, events = recorded(tmp_path, theirs, SUBJECTS / f"{name}.py")
    assert said == bare(tmp_path, theirs, name) and said[1] == str(epochs * steps)
    assert counted(events) == (epochs * steps, epochs * micro)
    windows = [event for event in events if isinstance(event, WindowEvent)]
    assert sum(event.steps for event in windows) == epochs * steps
    for phase in ("data_wait", "forward", "backward", "optimizer", "zero_grad", "evaluate"):
        assert any(event.phases.get(phase, {"host_ns": 0})["host_ns"] for event in windows), phase
    run = [event for event in events if isinstance(event, RunEvent)][-1]
    assert (run.total_steps, run.epochs) == (told * steps, told)
    evaluations = [event for event in events if isinstance(event, MarkEvent) and event.kind == "evaluation"]
    assert [event.step for event in evaluations] == [steps * (epoch + 1) for epoch in range(told)]
    if told:
        best, loss = {"lightning_fit": ("val_loss", "train_loss"), "hf_trainer": ("eval_loss", "loss")}[name]
        for event in evaluations:
            assert next(iter(event.data["metrics"])) == best and loss not in event.data["metrics"]
            assert event.data["better"] == "lower"
        logged = [event.step for event in events if isinstance(event, ScalarsEvent) and loss in event.values]
        assert logged == [5, 10, 15]
        assert windows[-1].epoch == epochs - 1
        # Each epoch ends with an evaluation; the next one still waits for its first batch.
        assert sum(event.passes for event in windows) == epochs - 1


@pytest.mark.long
def test_lightning_has_the_facts_of_its_kind(theirs: Path, tmp_path: Path) -> None:
    need("lightning")
    console = (sys.executable, "-m", "ndd_console", "run", "--headless", "--run", "it", "--")
    execute(tmp_path, *console, theirs, EVERYTHING, "lightning", **OFTEN, OMP_NUM_THREADS="1")
    check("framework", events_of(RunDir(tmp_path / "runs" / "it")))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "processes"), [("accelerate_fit", 1), ("accelerate_fit", 2), ("hf_trainer", 2)]
)
def test_accelerate_launch(theirs: Path, tmp_path: Path, name: str, processes: int) -> None:
    need("accelerate")
    package, told, epochs, micro, _ = SCRIPTS[name]
    need(package)
    # Its launcher knows no option for several processes on the CPU; the scripts ask for it.
    way = ("--cpu",) if processes == 1 else ("--multi_gpu", "--main_process_port", "0")
    launch = (
        theirs, "-m", "accelerate.commands.launch", *way, "--num_processes", processes, "--num_machines", 1,
        "--mixed_precision", "no", "--dynamo_backend", "no", SUBJECTS / f"{name}.py",
    )  # fmt: skip
    steps = epochs * -(-micro // processes // 3)
    said, events = recorded(tmp_path, *launch)
    assert said[1] == str(steps)
    # One launched process trains as one that is not.
    assert said == (words(execute(tmp_path, *launch)) if processes > 1 else bare(tmp_path, theirs, name))
    assert counted(events) == (steps, epochs * micro // processes)
    assert sum(event.steps for event in events if isinstance(event, WindowEvent)) == steps
    evaluations = [event for event in events if isinstance(event, MarkEvent) and event.kind == "evaluation"]
    assert len(evaluations) == told


# Every way of a callback to the record raises an error: the script must not notice.
BREAK = """
import os, runpy, sys
import torch
import _ndd_watch.frameworks as frameworks
# As if it were a defect in the observer's own file.
exec(compile("def raises(*_, **__): raise RuntimeError('planted')", frameworks.__file__, "exec"))
if sys.argv[1] == "told":
    sys.modules["_ndd_watch.install"].observer.put = raises
else:
    frameworks.numbers = frameworks._batches = frameworks.first = raises
    frameworks.hugging_face = frameworks.lightning = raises if sys.argv[1] == "classes" else frameworks.lightning
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
@pytest.mark.parametrize(("name", "broken"), [
    ("lightning_fit", "told"), ("lightning_fit", "methods"), ("hf_trainer", "told"), ("hf_trainer", "classes"),
])  # fmt: skip
def test_an_error_of_a_callback_never_reaches_the_script(
    theirs: Path, tmp_path: Path, name: str, broken: str
) -> None:
    need(SCRIPTS[name][0])
    breaker = tmp_path / "breaker.py"
    breaker.write_text(BREAK)
    script = SUBJECTS / f"{name}.py"
    (tmp_path / "records").mkdir()
    more = {"PYTHONPATH": str(SITE), FOLDER: str(tmp_path / "records")}
    said = words(execute(tmp_path, theirs, breaker, broken, script, **more))
    assert said == bare(tmp_path, theirs, name)

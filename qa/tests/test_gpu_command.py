"""`make gpu` sets up an environment; `python -m benchmarks.gpu` survives failures, and keeps its files up to date."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.waiting import LIMIT_S, lives, until

from ndd_engine.trial.claims import measurements
from ndd_watch.changes import Conditions
from qa.gpu import __main__ as gpu_command
from qa.gpu import claims, faults, setup
from qa.gpu import session as sessions
from qa.gpu.figures import FAIL, PASS, SKIPPED, Figure, append, one_line, read
from qa.gpu.page import Page
from qa.gpu.parts import FIRST, FULL_S, QUICK_S, Part, parts
from qa.gpu.session import Session
from qa.gpu.setup import NEEDED, ROOT, environment, options, unmet

PYTHON = sys.executable
# Starts a process in a session of its own that ignores every request, as the sides of a trial are, and prints its id.
ORPHAN = """
import os, signal, subprocess, sys, time
sleeper = 'import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)'
print(subprocess.Popen([sys.executable, '-c', sleeper], start_new_session=True).pid, flush=True)
signal.signal(signal.SIGINT, signal.SIG_IGN)
"""


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions of these tests leave the signals of pytest alone, and are not patient."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sessions, "GRACE_S", 0.3)


# The session and its file.


@dataclass(frozen=True)
class Script(Part):
    """A part that runs this code, with the path of its figures as `out`."""

    code: str = ""

    def command(self, python: str, out: str, device: str, effort: str, limit_s: float) -> list[str]:
        head = "import sys, time\nfrom qa.gpu.figures import Task\nfrom pathlib import Path\n"
        given = f"given = Task(Path({out!r}), 'cpu', 'smoke', time.monotonic() + 60)\n"
        return [python, "-c", head + given + self.code]


def script(name: str, code: str, limit_s: float = 60.0) -> Script:
    return Script("Section", name, "", limit_s, limit_s, code=code)


def session(path: Path, *wanted: Part, seconds: float = 600, asked: tuple[str, ...] = ()) -> Session:
    return Session(wanted, "cpu", "full", time.monotonic() + seconds, 600, path, asked)


@pytest.mark.long
@pytest.mark.promise
def test_failures_cost_only_their_part_and_the_file_says_so(tmp_path: Path) -> None:
    sessions.adopt()
    work = session(
        tmp_path / "out" / "result.md",
        script(
            "good", "given.put('GPU', 'A | B', verdict='fact'); given.check('speed', '1.2x', '> 1', True)"
        ),
        script("crash", f"given.check('before', '1', '1', True)\n{ORPHAN}\nos.abort()"),
        script("oom", "raise RuntimeError('CUDA error: out of memory')"),
        script("hang", f"given.check('first', '7', '8', False)\n{ORPHAN}\ntime.sleep(600)", limit_s=5.0),
        script("silent", "pass"),
        script("later", "given.skip('nvidia-smi', 'is not installed')"),
        replace(script("left out", "1/0"), full_s=0.0),
        replace(script("named", "1/0"), named_only=True),
        replace(script("lacking", "1/0"), modules=("json", "no_such_module")),
    )
    assert work.run() == 1
    entries = {entry.part.name: entry for entry in work.page.entries}
    states = {name: entry.state for name, entry in entries.items()}
    assert [name for name, state in states.items() if state == "done"] == ["good", "later"]
    assert [name for name, state in states.items() if state == "failed"] == ["crash", "oom", "hang", "silent"]
    assert [name for name, state in states.items() if state == "not run"] == ["left out", "named", "lacking"]
    assert entries["crash"].why.startswith("killed by SIGABRT")
    assert "out of memory" in entries["oom"].why and "5 s" in entries["hang"].why
    assert "'named'" in entries["named"].why and "no_such_module" in entries["lacking"].why
    # What they started is gone.
    for name in ("crash", "hang"):
        (log,) = work.folder.glob(f"*-{name}.log")
        assert not lives(int(log.read_text().split()[0])), name
    text = (tmp_path / "out" / "result.md").read_text("utf-8")
    assert text.startswith("# ndd-console on A | B\n")
    assert "| GPU | A \\| B |" in text, "a name cannot break the table"
    # What a part had before it crashed or hung is kept.
    assert "| crash: before | 1 | 1 | pass |" in text and "| hang: first | 7 | 8 | fail |" in text
    body = json.loads((tmp_path / "out" / "result.json").read_text("utf-8"))
    assert body["machine"] == {"GPU": "A | B"} and body["counts"] == {"pass": 2, "fail": 1, "skipped": 1}
    found = {part["name"]: part for part in body["parts"]}
    assert [(figure["name"], figure["verdict"]) for figure in found["hang"]["figures"]] == [("first", "fail")]
    assert found["oom"]["state"] == "failed" and "CUDA error: out of memory" in found["oom"]["log"][-1]


def test_parts_that_the_time_does_not_allow_are_listed(tmp_path: Path) -> None:
    named = replace(script("named", "1/0"), named_only=True)  # allowed where it is asked for
    assert session(tmp_path / "r.md", script("a", "1/0"), named, seconds=5, asked=("named",)).run() == 0
    for name in ("a", "named"):
        assert f"| Section: {name} | not run | no time left |" in (tmp_path / "r.md").read_text()


def test_a_file_that_cannot_be_written_is_reported_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    work = session(tmp_path / "file" / "r.md", script("a", "given.put('x', '1')"))
    assert work.run() == 2
    assert work.page.entries[0].figures == []


@pytest.mark.long
def test_a_disk_that_fills_up_does_not_end_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = Page.write, []

    def failing(page: Page, path: Path) -> None:
        calls.append(path)
        if 1 < len(calls) < 4:
            raise OSError(28, "No space left on device")
        write(page, path)

    monkeypatch.setattr(Page, "write", failing)
    assert session(tmp_path / "r.md", script("a", "given.put('x', '1')")).run() == 0
    assert len(calls) >= 4 and "| x | 1 |" in (tmp_path / "r.md").read_text("utf-8")


def test_figures_survive_torn_lines_and_name_no_private_folder(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    assert read(path) == []
    append(path, Figure("a", "1"))
    with path.open("a") as file:
        file.write('[1]\n{"name": 3}\n{"name": "x", "colour": "red"}\n{"name": "torn')
    assert read(path) == [Figure("a", "1")]
    assert one_line(f"no {Path.home() / 'secret'}\n in  it") in ("no ~/secret in it", "no ./secret in it")


# The parts.


def test_the_limits_of_all_parts_keep_the_promised_time() -> None:
    every = parts()
    always = [part for part in every if not part.named_only]
    assert sum(part.full_s for part in always) <= FULL_S
    assert sum(part.quick_s for part in always) <= QUICK_S
    assert len({(part.section, part.name) for part in every}) == len(every)
    tests = {part.tests for part in every} - {""}
    assert tests == {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}


@pytest.mark.parametrize("effort", ["full", "quick"])
@pytest.mark.parametrize("cores", [2, 64])
def test_claims_and_faults_have_the_time_that_they_need(effort: str, cores: int) -> None:
    """What does not fit is left to --only: nothing is left out for want of time."""
    limits = {part.name: part.limit_s(effort) for part in parts()}
    place = Conditions(True, cores)
    for which, name in (("decisive", "decisive claims"), ("other", "other claims")):
        count = sum(measurements(claim, place) for claim in claims.wanted(which, effort, place))
        assert count
        assert claims.IMPORTS_S + count * (claims.LEAST_S + claims.START_S) <= limits[name], name
    case_s = faults.TRIED_S if effort == "full" else faults.CASE_S
    for which, name in (("severe", "severe faults"), ("other", "other faults")):
        count = len(faults.wanted(which, effort))
        assert count
        assert faults.IMPORTS_S + count * case_s <= limits[name], name


@pytest.mark.long
def test_each_test_becomes_a_figure(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_it_works():\n    pass\n"
        "def test_it_fails():\n    assert 1 == 2, 'one is not two'\n"
        "@pytest.mark.skip(reason='no tensor cores')\n"
        "def test_it_is_skipped():\n    pass\n"
    )
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    out = tmp_path / "figures.jsonl"
    part = Part("tests", "x", str(tmp_path / "test_some.py"), 60, 60)
    words = part.command(PYTHON, str(out), "cpu", "full", 60)
    words[words.index("--rootdir") + 1] = str(tmp_path)
    words += ["-q", "--continue-on-collection-errors", "test_broken.py"]
    variables = {**environment(), "NDD_GPU_FIGURES": str(out)}
    subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, timeout=LIMIT_S, check=False)
    found = {figure.name: (figure.verdict, figure.why) for figure in read(out)}
    assert found["it works"] == (PASS, "")
    assert found["it fails"][0] == FAIL and "one is not two" in found["it fails"][1]
    assert found["it is skipped"] == (SKIPPED, "no tensor cores")
    assert found["test_broken.py"][0] == FAIL and "nothing_of_this_name" in found["test_broken.py"][1]


# The real command.


@contextmanager
def command(tmp_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [PYTHON, "-m", "benchmarks.gpu", "--cpu", "-o", "result.md", *arguments], cwd=tmp_path, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_the_smallest_part_of_the_command(tmp_path: Path) -> None:
    with command(tmp_path, "--budget", "20", "--only", "machine") as process:
        _, progress = process.communicate(timeout=170)
    body = json.loads((tmp_path / "result.json").read_text("utf-8"))
    assert body["command"] == "python -m benchmarks.gpu --cpu --only machine --budget 20"
    assert body["state"] == "complete" and body["budget_s"] == 20
    (part,) = body["parts"]
    if part["why"].startswith(("no time left", "time limit")):
        pytest.skip(f"this machine is too busy: {part['why']}")
    assert process.returncode == 0, progress
    assert body["machine"]["torch"].startswith("2.")
    text = (tmp_path / "result.md").read_text("utf-8")
    assert body["machine"]["torch"] in text and socket.gethostname() not in text.split()


@pytest.mark.long
def test_control_c_keeps_what_there_is(tmp_path: Path) -> None:
    result = tmp_path / "result.json"

    def measures() -> bool:
        assert process.poll() is None
        return result.exists() and "seconds per measurement" in result.read_text("utf-8")

    with command(tmp_path, "--only", "claims") as process:
        until(measures)
        before = json.loads(result.read_text("utf-8"))  # what a kill would leave
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, progress = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, progress
    assert before["state"] == "running" and before["machine"]["torch"]
    states = {part["name"]: part["state"] for part in before["parts"]}
    assert states == {"machine": "done", "decisive claims": "running", "other claims": "waiting"}
    body = json.loads(result.read_text("utf-8"))
    assert "SIGINT" in body["state"] and body["parts"][1]["figures"]
    psutil.wait_procs(children, timeout=10)
    assert not [child for child in children if child.is_running()], "nothing keeps the GPU busy"


@pytest.mark.parametrize(
    "words", [("--budget", "0"), ("--budget", "nan"), ("--budget", "1h"), ("-o", "r.json")]
)
def test_wrong_options_are_refused(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        options(None, "make gpu", words)
    assert raised.value.code == 2 and repr(words[1]) in capsys.readouterr().err


def test_an_unknown_part_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--cpu", "--only", "gremlins"])
    assert gpu_command.main() == 2
    message = capsys.readouterr().err
    assert "gremlins" in message and "overhead" in message


def test_a_torch_that_sees_no_gpu_is_one_message_and_exit_status_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.setattr(gpu_command, "unmet", lambda _: "")
    monkeypatch.setattr(gpu_command, "unusable", lambda _: "torch 2.13.0+cpu is built without CUDA")
    assert gpu_command.main() == 3
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith("an NVIDIA GPU: torch 2.13.0+cpu is built without CUDA")
    )


@pytest.mark.slow
@pytest.mark.parametrize("only", [(), ("other faults", "other claims")])
def test_every_part_runs_on_the_cpu(tmp_path: Path, only: tuple[str, ...]) -> None:
    words = [word for name in only for word in ("--only", name)]
    with command(tmp_path, "--budget", "1400", *words) as process:
        _, progress = process.communicate(timeout=1500)
    assert process.returncode == 0, progress
    body = json.loads((tmp_path / "result.json").read_text("utf-8"))
    left_out = {part["name"] for part in body["parts"] if part["state"] != "done"}
    assert left_out == (set() if only else {"other faults", "other claims"})
    first = [figure for part in body["parts"] if part["section"] == FIRST for figure in part["figures"]]
    assert not [figure for figure in first if figure["verdict"] == FAIL]


# What this Python lacks.


@pytest.mark.long
def test_a_bare_python_is_told_all_that_is_missing_in_one_message(tmp_path: Path) -> None:
    for name in ("psutil", "pynvml", "pydantic"):
        text = f"raise ModuleNotFoundError(\"No module named '{name}'\", name={name!r})\n"
        (tmp_path / f"{name}.py").write_text(text, "utf-8")
    (tmp_path / "tomlkit.py").write_text("import no_such_part\n", "utf-8")
    variables = {**environment(), "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        [PYTHON, "-m", "benchmarks.gpu", "--cpu"], cwd=tmp_path, env=variables, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    message = done.stderr.strip().splitlines()[-1]
    assert "psutil, nvidia-ml-py, pydantic;" in message and "No module named 'no_such_part'" in message
    assert not list(tmp_path.glob("*.md"))


@pytest.mark.long
def test_an_import_that_crashes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "click.py").write_text("import os; os.kill(os.getpid(), 11)", "utf-8")
    monkeypatch.setattr(setup, "NEEDED", {"click": "click", "tomli": "tomli"})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    why = unmet(PYTHON)
    assert why.startswith("click") and "-11" in why and "tomli" not in why


def test_what_is_imported_first_is_what_the_package_depends_on() -> None:
    words = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    names = {re.split(r"[<>=; ]", word)[0] for word in words}
    later = {name for part in parts() for name in part.modules}
    # py-spy is a program, and what it adds is left out where it is missing. No part writes a page with jinja2, and
    # rich comes with textual.
    assert names - {"py-spy", "jinja2", "rich"} <= {*NEEDED.values(), *later}


# The environment: a torch with CUDA is never replaced.


NONE: list[Any] = [None, None, False, "ModuleNotFoundError: No module named 'torch'", ""]
CPU: list[Any] = ["2.13.0+cpu", None, False, "", "/venv/torch"]
CUDA: list[Any] = ["2.13.0+cu130", "13.0", True, "", "/opt/packages/torch"]
OLD: list[Any] = ["2.4.0+cu121", "12.1", True, "", "/opt/packages/torch"]


@dataclass
class Pip:
    """Stands in for subprocess.run: what was run, and the torch that each Python imports."""

    inner: list[Any]
    outer: list[Any]
    ran: list[list[str]] = field(default_factory=list)

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        command = [str(word) for word in command]
        if command[1] == "-c":
            found = self.outer if command[0] == sys.executable else self.inner
            return subprocess.CompletedProcess(command, 0, f"a warning\n{json.dumps(found)}\n", "")
        self.ran.append(command)
        if "venv" in command:
            venv = Path(command[-1])
            (venv / "bin").mkdir(parents=True)
            (venv / "bin" / "python").touch()
            (venv / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
        if "uninstall" in command:
            self.inner = self.outer
        elif self.torch_of(command):
            self.inner = CUDA
        return subprocess.CompletedProcess(command, 0, "", "")

    @staticmethod
    def torch_of(command: list[str]) -> bool:
        """Whether it installs torch."""
        return "uninstall" not in command and any(word.startswith("torch") for word in command[4:])

    @property
    def installs(self) -> list[list[str]]:
        return [command for command in self.ran if self.torch_of(command)]


@pytest.mark.parametrize(
    ("inner", "outer", "index", "options"),
    [
        (NONE, NONE, None, set()),
        (CPU, CPU, None, {"--force-reinstall"}),
        (CPU, NONE, None, {"--force-reinstall"}),
        (NONE, OLD, None, set()),  # too old to count
        (NONE, CUDA, "https://example.org/cu126", {"--index-url", "https://example.org/cu126"}),
    ],
)
def test_torch_is_installed_where_none_can_be_used(
    tmp_path: Path, inner: list[Any], outer: list[Any], index: str | None, options: set[str]
) -> None:
    pip = Pip(inner, outer)
    how = setup.prepare(tmp_path / "venv", index, run=pip)
    (torch,) = pip.installs
    assert {"--force-reinstall", "--index-url", "https://example.org/cu126"} & {*torch} == options
    assert (index or "default") in how
    assert any(word.endswith("[dev]") for word in pip.ran[-1])
    # A second call finds everything there.
    pip.ran.clear()
    assert setup.prepare(tmp_path / "venv", index, run=pip) == how
    assert pip.ran == []


def test_a_torch_with_cuda_is_never_replaced(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    pip = Pip(CUDA, NONE)
    setup.prepare(venv, run=pip)
    assert pip.installs == []
    limits = (venv / "constraints.txt").read_text().splitlines()
    assert [line for line in limits if line.startswith("torch==")] == ["torch==2.13.0+cu130"]


@pytest.mark.parametrize("inner", [NONE, CPU])
def test_the_torch_of_this_python_is_used_from_where_it_is(tmp_path: Path, inner: list[Any]) -> None:
    venv = tmp_path / "venv"
    pip = Pip(inner, CUDA)
    setup.prepare(venv, run=pip)
    (pth,) = venv.rglob("*.pth")
    assert pth.read_text().strip() == "/opt/packages"
    removed = [command for command in pip.ran if "uninstall" in command]
    assert len(removed) == (inner is CPU), "a torch without CUDA in the environment would be imported first"
    assert pip.installs == []


def test_gpus_are_found_without_installing_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, proc, tools = tmp_path / "dev", tmp_path / "proc", tmp_path / "bin"
    for folder in (devices, proc, tools):
        folder.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    assert "nvidia-smi" in setup.no_gpu(devices, proc)
    smi = tools / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'it could not communicate with the driver'\nexit 9\n")
    smi.chmod(0o755)
    assert "could not communicate" in setup.no_gpu(devices, proc)
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA A10 (UUID: GPU-1)'\n")
    assert setup.no_gpu(devices, proc) == ""
    smi.unlink()
    (devices / "nvidiactl").touch()
    assert setup.no_gpu(devices, proc) == ""


@pytest.mark.long
@pytest.mark.skipif(not setup.no_gpu(), reason="this machine has an NVIDIA GPU")
def test_without_a_gpu_there_is_one_message_and_exit_status_3(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    done = subprocess.run(
        [sys.executable, "-m", "qa.gpu.setup", str(venv), "--quick"], capture_output=True, text=True, cwd=tmp_path,
        env=environment(), timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert done.stdout == "" and "NVIDIA GPU" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == [], "nothing is installed on a machine that cannot use it"

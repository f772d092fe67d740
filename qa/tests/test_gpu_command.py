"""`python -m benchmarks.gpu` survives failures, and keeps its files up to date; the real command on a CPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from ndd_engine.trial.candidates import Place
from ndd_engine.trial.claims import measurements
from qa.gpu import claims, faults, needs, running
from qa.gpu.figures import FACT, FAIL, PASS, SKIPPED, Figure, append, one_line, read
from qa.gpu.needs import NEEDED, ROOT, unmet
from qa.gpu.page import Entry, Page
from qa.gpu.parts import FIRST, FULL_S, MACHINE, QUICK_S, Part, parts
from qa.gpu.session import Session

PYTHON = sys.executable


def environment() -> dict[str, str]:
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


# The process of a part.


def carry_out(
    tmp_path: Path, code: str, limit_s: float = 60.0, stopped: Callable[[], bool] = lambda: False
) -> str:
    command = [PYTHON, "-c", code]
    return running.carry_out(command, tmp_path / "log", limit_s, tmp_path, os.environ, lambda: None, stopped)


@pytest.mark.long
def test_the_end_of_a_process_is_explained(tmp_path: Path) -> None:
    assert carry_out(tmp_path, "print('done')") == ""
    assert carry_out(tmp_path, "raise MemoryError('no 3 GiB')") == "exit status 1: MemoryError: no 3 GiB"
    killed = "import os, signal; print('before', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    assert carry_out(tmp_path, killed) == "killed by SIGSEGV: before"
    oom = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert "memory of the host may have run out" in carry_out(tmp_path, oom)


def test_a_missing_tool_is_a_reason(tmp_path: Path) -> None:
    why = running.carry_out(
        [str(tmp_path / "absent")], tmp_path / "log", 5, tmp_path, {}, lambda: None, lambda: False
    )
    assert why == "could not be started: No such file or directory"


@pytest.mark.long
def test_a_process_that_hangs_is_killed_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "GRACE_S", 0.3)
    # A child in a session of its own, as the sides of a trial, that ignores every request.
    code = (
        "import signal, subprocess, sys, time\n"
        "sleeper = 'import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)'\n"
        "child = subprocess.Popen([sys.executable, '-c', sleeper], start_new_session=True)\n"
        "open('pid', 'w').write(str(child.pid))\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "time.sleep(600)\n"
    )
    found: list[psutil.Process] = []

    def look() -> None:
        place = tmp_path / "pid"
        if not found and place.exists() and place.read_text():
            found.append(psutil.Process(int(place.read_text())))

    # It is stopped as soon as its child runs, as if the limit had been reached then.
    why = running.carry_out(
        [PYTHON, "-c", code], tmp_path / "log", 60.0, tmp_path, os.environ, look, lambda: bool(found)
    )
    assert why == "interrupted"
    assert psutil.wait_procs(found, timeout=10)[1] == []


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_what_a_crashed_process_leaves_behind_is_killed_too(tmp_path: Path) -> None:
    part = (
        "import os, subprocess, sys\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "print(subprocess.Popen(command, start_new_session=True).pid, flush=True)\n"
        "os.abort()\n"
    )
    session = (
        "import os, sys\nfrom pathlib import Path\nfrom qa.gpu.running import adopt, carry_out\n"
        f"adopt()\ncommand = [sys.executable, '-c', {part!r}]\n"
        "print(carry_out(command, Path('log'), 60, Path('.'), os.environ, lambda: None, lambda: False))\n"
    )
    command = [PYTHON, "-c", session]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.startswith("killed by SIGABRT")
    assert not psutil.pid_exists(int((tmp_path / "log").read_text().split()[0]))


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
    return Script("Section", name, "", (), limit_s, limit_s, "About it.", code=code)


@pytest.mark.long
@pytest.mark.promise
def test_failures_cost_only_their_part_and_the_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(running, "GRACE_S", 0.3)
    wanted = (
        script(
            "good", "given.put('GPU', 'A | B', verdict='fact'); given.check('speed', '1.2x', '> 1', True)"
        ),
        script("crash", "given.check('before', '1', '1', True); import os; os.abort()"),
        script("oom", "raise RuntimeError('CUDA error: out of memory')"),
        script("hang", "given.check('first', '7', '8', False); time.sleep(600)", limit_s=4.0),
        script("silent", "pass"),
        script("later", "given.skip('nvidia-smi', 'is not installed')"),
        replace(script("left out", "1/0"), full_s=0.0),
        replace(script("named", "1/0"), named_only=True),
        replace(script("lacking", "1/0"), modules=("json", "no_such_module")),
    )
    path = tmp_path / "out" / "result.md"
    session = Session(wanted, "cpu", "full", time.monotonic() + 600, 600, path)
    assert session.run() == 1
    states = {entry.part.name: (entry.state, entry.why) for entry in session.page.entries}
    assert states["good"] == states["later"] == ("done", "")
    assert states["crash"] == ("failed", "killed by SIGABRT")
    assert states["oom"][1] == "exit status 1: RuntimeError: CUDA error: out of memory"
    assert states["hang"] == ("failed", "time limit of 4 s")
    assert states["silent"] == ("failed", "no figures")
    assert states["left out"] == ("not run", "not part of --quick")
    assert states["named"] == ("not run", "runs with --only 'named'")
    assert states["lacking"] == ("not run", "needs no_such_module, which is not installed")
    text = path.read_text("utf-8")
    assert text.startswith("# ndd-console on A | B\n")
    assert "complete: 2 of 9 parts" in text
    assert "2 pass, 1 fail, 1 skipped" in text
    assert "| GPU | A \\| B |" in text, "a name cannot break the table"
    # What a part had before it crashed or hung is kept.
    assert "| crash: before | 1 | 1 | pass |" in text
    assert "| hang: first | 7 | 8 | fail |" in text
    assert "skipped | is not installed" in text
    assert text.index("## Failed or not run") < text.index("## Section")
    assert "RuntimeError: CUDA error: out of memory" in text
    body = json.loads((tmp_path / "out" / "result.json").read_text("utf-8"))
    assert body["machine"] == {"GPU": "A | B"} and body["counts"] == session.page.counts
    found = {part["name"]: part for part in body["parts"]}
    assert found["hang"]["figures"] == [
        {"name": "first", "value": "7", "target": "8", "verdict": "fail", "why": ""}
    ]
    assert found["oom"]["state"] == "failed" and "CUDA error: out of memory" in found["oom"]["log"][-1]


@pytest.mark.long
def test_a_part_that_only_runs_when_named_runs_when_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    part = replace(script("rest", "given.put('x', '1')"), named_only=True)
    end = time.monotonic() + 60
    session = Session((part,), "cpu", "full", end, 60, tmp_path / "r.md", ("rest",))
    assert session.run() == 0
    assert session.page.entries[0].figures == [Figure("x", "1")]


def test_parts_that_the_time_does_not_allow_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    session = Session((script("a", "1/0"),), "cpu", "full", time.monotonic() + 5, 600, tmp_path / "r.md")
    assert session.run() == 0
    assert "| Section: a | not run | no time left |" in (tmp_path / "r.md").read_text()


def test_a_file_that_cannot_be_written_is_reported_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "r.md"
    session = Session((script("a", "given.put('x', '1')"),), "cpu", "full", time.monotonic() + 60, 60, path)
    assert session.run() == 2
    assert capsys.readouterr().err.startswith(f"cannot write {path}: ")
    assert session.page.entries[0].figures == []


@pytest.mark.long
def test_a_disk_that_fills_up_does_not_end_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    write, calls = Page.write, []

    def failing(page: Page, path: Path) -> None:
        calls.append(path)
        if 1 < len(calls) < 4:
            raise OSError(28, "No space left on device")
        write(page, path)

    monkeypatch.setattr(Page, "write", failing)
    wanted = (script("a", "given.put('x', '1')"), script("b", "given.put('y', '2')"))
    session = Session(wanted, "cpu", "full", time.monotonic() + 60, 60, tmp_path / "r.md")
    assert session.run() == 0
    assert "No space left on device" in capsys.readouterr().err
    assert "| a: x | 1 |" in (tmp_path / "r.md").read_text("utf-8")


def test_the_limits_of_all_parts_keep_the_promised_time() -> None:
    every = parts()
    always = [part for part in every if not part.named_only]
    assert sum(part.full_s for part in always) <= FULL_S
    assert sum(part.quick_s for part in always) <= QUICK_S
    assert len({(part.section, part.name) for part in every}) == len(every)
    for part in every:
        for argument in part.args:
            if argument.startswith("tests/"):
                assert (ROOT / argument).is_file()
    tests = {argument for part in every for argument in part.args if argument.startswith("tests/")}
    assert tests == {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}


@pytest.mark.parametrize("effort", ["full", "quick"])
@pytest.mark.parametrize("cores", [2, 16, 64])
def test_claims_and_faults_have_the_time_that_they_need(effort: str, cores: int) -> None:
    """What does not fit is left to --only: nothing is left out for want of time."""
    limits = {part.name: part.limit_s(effort) for part in parts()}
    place = Place(True, cores)
    for which, name in (("decisive", "decisive claims"), ("other", "other claims")):
        count = sum(measurements(claim, place) for claim in claims.wanted(which, effort, place))
        assert count
        assert claims.IMPORTS_S + count * (claims.LEAST_S + claims.START_S) <= limits[name], name
    case_s = faults.TRIED_S if effort == "full" else faults.CASE_S
    for which, name in (("severe", "severe faults"), ("other", "other faults")):
        count = len(faults.wanted(which, effort))
        assert count
        assert faults.IMPORTS_S + count * case_s <= limits[name], name


def test_the_first_checks_run_first_and_say_what_they_decide() -> None:
    every = parts()
    assert [part.section for part in every[:12]] == [MACHINE] + [FIRST] * 11
    assert all(bool(part.decides) == (part.section == FIRST) for part in every)
    assert {part.name for part in every if "first" in part.words} == {part.name for part in every[1:12]}


def test_figures_survive_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    assert read(path) == []
    append(path, Figure("a", "1"))
    with path.open("a") as file:
        file.write('[1]\n{"name": 3}\n{"name": "x", "colour": "red"}\n{"name": "torn')
    assert read(path) == [Figure("a", "1")]


def test_private_folders_are_not_named() -> None:
    assert one_line(f"no {Path.home() / 'secret'}\n in  it") in ("no ~/secret in it", "no ./secret in it")
    assert len(one_line("x" * 1000)) == 300


def test_the_title_names_the_gpu_and_facts_come_first() -> None:
    part = script("machine", "")
    page = Page(
        [Entry(part, "done", figures=[Figure("GPU", "NVIDIA <A10>", verdict=FACT)])],
        "quick",
        480.0,
        "complete",
        command="make gpu ARGS=--quick",
    )
    lines = list(page.lines())
    assert lines[2].startswith("`make gpu ARGS=--quick`, complete")
    assert "| GPU | NVIDIA &lt;A10> |" in lines


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
    assert body["machine"]["torch"] in (tmp_path / "result.md").read_text("utf-8")


@pytest.mark.long
def test_a_killed_command_leaves_what_was_known(tmp_path: Path) -> None:
    with command(tmp_path, "--only", "claims") as process:
        result = tmp_path / "result.json"
        deadline = time.monotonic() + 120
        while not (result.exists() and "seconds per measurement" in result.read_text("utf-8")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for child in children:
            child.kill()
    body = json.loads(result.read_text("utf-8"))
    assert body["state"] == "running" and body["machine"]["torch"]
    states = {part["name"]: part["state"] for part in body["parts"]}
    assert states == {"machine": "done", "decisive claims": "running", "other claims": "waiting"}
    assert "| torch | 2." in (tmp_path / "result.md").read_text("utf-8")


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "0"), "argument --budget: '0' is not a number of seconds above 0"),
        (("--budget", "nan"), "argument --budget: 'nan' is not a number of seconds above 0"),
        (("--budget", "1h"), "argument --budget: '1h' is not a number of seconds above 0"),
        (("-o", "r.json"), "argument -o: 'r.json' is the name of the file of JSON; name the Markdown file"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, words: tuple[str, str], message: str) -> None:
    with command(tmp_path, *words) as process:
        _, progress = process.communicate(timeout=60)
    assert process.returncode == 2
    assert progress.strip().endswith(message)
    assert list(tmp_path.iterdir()) == []


# What this Python lacks.


def absent(folder: Path, name: str) -> None:
    """A module that is found first, and is not there."""
    text = f"raise ModuleNotFoundError(\"No module named '{name}'\", name={name!r})\n"
    (folder / f"{name}.py").write_text(text, "utf-8")


@pytest.mark.long
def test_a_bare_python_is_told_all_that_is_missing_in_one_message(tmp_path: Path) -> None:
    for name in ("psutil", "pynvml", "pydantic"):
        absent(tmp_path, name)
    (tmp_path / "tomlkit.py").write_text("import no_such_part\n", "utf-8")
    variables = {**environment(), "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        [PYTHON, "-m", "benchmarks.gpu", "--cpu"], cwd=tmp_path, env=variables, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    first, message = done.stderr.strip().splitlines()
    assert first.startswith("importing what the parts need")
    assert message == (
        f"{PYTHON} cannot run this: not installed: psutil, nvidia-ml-py, pydantic; tomlkit cannot be imported "
        "(ModuleNotFoundError: No module named 'no_such_part')"
    )
    assert not list(tmp_path.glob("*.md"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os.kill(os.getpid(), 11)", "Python ended with status -11"),
        ("import time; time.sleep(600)", "Python did not end within 10 s"),
    ],
)
def test_an_import_that_crashes_or_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    (tmp_path / "click.py").write_text(code, "utf-8")
    monkeypatch.setattr(needs, "NEEDED", {"click": "click", "tomli": "tomli"})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert unmet(PYTHON, 10) == f"click cannot be imported ({why})"


@pytest.mark.long
def test_a_warm_up_that_fails_is_left_to_the_first_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part "machine" computes on the GPU, and says what is wrong there."""
    ran = tmp_path / "ran"
    fake = (
        "print('failed')\nprint('import')\nclass cuda:\n    is_available = lambda: True\n"
        f"def ones(*_, **__):\n    open({str(ran)!r}, 'w')\n    1 / 0\n"
    )
    (tmp_path / "torch.py").write_text(fake, "utf-8")
    monkeypatch.setattr(needs, "NEEDED", {"torch": "torch"})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert unmet(PYTHON, 60) == ""
    assert ran.exists()


@pytest.mark.long
def test_a_python_that_does_not_work_is_named() -> None:
    assert unmet(shutil.which("false") or "") == "Python ended with status 1 before it imported anything"
    assert unmet("/no/python") == "/no/python cannot be started: No such file or directory"


@pytest.mark.long
def test_a_package_that_only_some_parts_need_costs_only_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("click", "jinja2", "textual", "pytest", "hypothesis"):
        (tmp_path / f"{name}.py").write_text(
            f"raise ModuleNotFoundError({f'No module named {name!r}'!r})", "utf-8"
        )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert unmet(PYTHON) == ""
    assert {part.name for part in parts() if "textual" in part.modules} == {"screen"}
    assert all("pytest" in part.modules for part in parts() if part.module == "pytest")


def test_what_is_imported_first_is_what_the_package_depends_on() -> None:
    words = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    names = {re.split(r"[<>=; ]", word)[0] for word in words}
    later = {name for part in parts() for name in part.modules}
    # py-spy is a program, and what it adds is left out where it is missing. No part writes a page with jinja2, and
    # rich comes with textual.
    assert names - {"py-spy", "jinja2", "rich"} <= {*NEEDED.values(), *later}


@pytest.mark.long
def test_the_command_measures_what_a_cpu_can_and_says_what_needs_a_gpu(tmp_path: Path) -> None:
    with command(tmp_path, "--only", "hardware", "--only", "overhead") as process:
        _, progress = process.communicate(timeout=170)
    assert process.returncode == 0, progress
    text = (tmp_path / "result.md").read_text("utf-8")
    assert "# ndd-console on the CPU" in text
    assert "measures nothing" in text
    assert "complete: 3 of 3 parts" in text
    assert "| torch | 2." in text
    assert "| sampling costs little |  | passes | skipped | no CUDA GPU" in text
    assert "tiny step: engine / bare loop" in text
    assert "device timing on / off |  |  | skipped | needs a CUDA GPU |" in text


@pytest.mark.long
def test_control_c_keeps_what_there_is(tmp_path: Path) -> None:
    with command(tmp_path, "--only", "claims") as process:
        result = tmp_path / "result.md"
        deadline = time.monotonic() + 120
        while not (result.exists() and "seconds per measurement" in result.read_text("utf-8")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, progress = process.communicate(timeout=60)
    assert process.returncode == 130, progress
    text = result.read_text("utf-8")
    assert "stopped by SIGINT: 1 of 3 parts" in text
    assert "| torch |" in text and "seconds per measurement" in text
    psutil.wait_procs(children, timeout=10)
    assert not [child for child in children if child.is_running()], "nothing keeps the GPU busy"


@pytest.mark.long
def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    with command(tmp_path, "--only", "gremlins") as process:
        _, progress = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "unknown part gremlins; allowed: " in progress


@pytest.mark.slow
def test_every_part_runs_on_the_cpu(tmp_path: Path) -> None:
    with command(tmp_path, "--budget", "1400") as process:
        _, progress = process.communicate(timeout=1500)
    assert process.returncode == 0, progress
    text = (tmp_path / "result.md").read_text("utf-8")
    for heading in {part.section for part in parts()}:
        assert f"## {heading}" in text
    body = json.loads((tmp_path / "result.json").read_text("utf-8"))
    left_out = {part["name"]: part["why"] for part in body["parts"] if part["state"] != "done"}
    assert left_out == {name: f"runs with --only '{name}'" for name in ("other faults", "other claims")}
    missed = [figure for part in body["parts"] if part["section"] == FIRST for figure in part["figures"]]
    assert not [figure for figure in missed if figure["verdict"] == FAIL]


@pytest.mark.slow
def test_parts_that_only_run_when_named_run_on_the_cpu(tmp_path: Path) -> None:
    with command(tmp_path, "--budget", "600", "--only", "other faults", "--only", "other claims") as process:
        _, progress = process.communicate(timeout=700)
    assert process.returncode == 0, progress
    assert "complete: 3 of 3 parts" in (tmp_path / "result.md").read_text("utf-8")


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
    for name in ("test_some.py", "test_broken.py"):
        part = Part("tests", "x", "pytest", (str(tmp_path / name),), 60, 60)
        words = part.command(PYTHON, str(out), "cpu", "full", 60)
        words[words.index("--rootdir") + 1] = str(tmp_path)
        variables = {**environment(), "NDD_GPU_FIGURES": str(out)}
        subprocess.run(
            [*words, "-q"], cwd=tmp_path, env=variables, capture_output=True, timeout=120, check=False
        )
    found = {figure.name: (figure.verdict, figure.why) for figure in read(out)}
    assert found["it works"] == (PASS, "")
    assert found["it fails"][0] == FAIL and "one is not two" in found["it fails"][1]
    assert found["it is skipped"] == (SKIPPED, "no tensor cores")
    assert found["test_broken.py"][0] == FAIL and "nothing_of_this_name" in found["test_broken.py"][1]

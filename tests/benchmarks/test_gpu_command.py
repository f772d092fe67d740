"""`make gpu` survives failures, and keeps its file up to date; the real command on a CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from benchmarks.gpu import running
from benchmarks.gpu.__main__ import Session
from benchmarks.gpu.figures import FACT, FAIL, PASS, SKIPPED, Figure, append, one_line, read
from benchmarks.gpu.page import Entry, Page
from benchmarks.gpu.parts import FULL_S, QUICK_S, ROOT, Part, parts

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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_what_a_crashed_process_leaves_behind_is_killed_too(tmp_path: Path) -> None:
    part = (
        "import os, subprocess, sys\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "print(subprocess.Popen(command, start_new_session=True).pid, flush=True)\n"
        "os.abort()\n"
    )
    session = (
        "import os, sys\nfrom pathlib import Path\nfrom benchmarks.gpu.running import adopt, carry_out\n"
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

    def command(self, python: str, out: Path, device: str, effort: str, limit_s: float) -> list[str]:
        head = "import sys, time\nfrom benchmarks.gpu.figures import Task\nfrom pathlib import Path\n"
        given = f"given = Task(Path({str(out)!r}), 'cpu', 'smoke', time.monotonic() + 60)\n"
        return [python, "-c", head + given + self.code]


def script(name: str, code: str, limit_s: float = 60.0) -> Script:
    return Script("Section", name, "", (), limit_s, limit_s, "About it.", code)


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
    text = path.read_text("utf-8")
    assert text.startswith("# ndd-console on A | B\n")
    assert "complete: 2 of 7 parts" in text
    assert "2 pass, 1 fail, 1 skipped" in text
    assert "| GPU | A \\| B |" in text, "a name cannot break the table"
    # What a part had before it crashed or hung is kept.
    assert "| crash: before | 1 | 1 | pass |" in text
    assert "| hang: first | 7 | 8 | fail |" in text
    assert "skipped | is not installed" in text
    assert text.index("## Failed or not run") < text.index("## Section")
    assert "RuntimeError: CUDA error: out of memory" in text


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
    assert sum(part.full_s for part in every) <= FULL_S
    assert sum(part.quick_s for part in every) <= QUICK_S
    assert len({(part.section, part.name) for part in every}) == len(every)
    for part in every:
        for argument in part.args:
            if argument.startswith("tests/"):
                assert (ROOT / argument).is_file()
    tests = {argument for part in every for argument in part.args if argument.startswith("tests/")}
    assert tests == {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}


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
    assert "stopped by SIGINT: 1 of 2 parts" in text
    assert "| torch |" in text and "seconds per measurement" in text
    psutil.wait_procs(children, timeout=10)
    assert not [child for child in children if child.is_running()], "nothing keeps the GPU busy"


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    with command(tmp_path, "--only", "gremlins") as process:
        _, progress = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "unknown part gremlins; allowed: " in progress


@pytest.mark.slow
def test_every_part_runs_on_the_cpu(tmp_path: Path) -> None:
    with command(tmp_path, "--minutes", "20") as process:
        _, progress = process.communicate(timeout=1500)
    assert process.returncode == 0, progress
    text = (tmp_path / "result.md").read_text("utf-8")
    for heading in {part.section for part in parts()}:
        assert f"## {heading}" in text
    assert "complete: 18 of 18 parts" in text


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
        words = part.command(PYTHON, out, "cpu", "full", 60)
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

"""`make gpu` without a GPU: setting up, surviving failures, the file, and every part in its smallest form."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from benchmarks.common import STATISTICS, Table, Target, as_ratio, statistics_cells
from benchmarks.engine import ONLY_STEPS, engine
from benchmarks.faults.cases import Case
from benchmarks.faults.catalogue import all_cases
from benchmarks.faults.on_gpu import GPU_CASES
from benchmarks.faults.outcome import Measured, Outcome
from benchmarks.faults.plants import write_module
from benchmarks.gpu import capped, claims, faults, memory, overhead, running, screen, setup
from benchmarks.gpu.__main__ import Session
from benchmarks.gpu.figures import FACT, FAIL, PASS, SKIPPED, Figure, Task, append, one_line, read
from benchmarks.gpu.machine import facts as facts_of
from benchmarks.gpu.page import Entry, Page
from benchmarks.gpu.parts import FULL_S, QUICK_S, ROOT, Part, parts

from ndd_engine.config import read as read_config
from ndd_engine.diagnose import CAUSES
from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpu import Gpu
from ndd_engine.trial.claims_table import claims as all_claims

PYTHON = sys.executable


def environment() -> dict[str, str]:
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def task(
    tmp_path: Path, *args: str, effort: str = "smoke", seconds: float = 300.0, device: str = "cpu"
) -> Task:
    return Task(tmp_path / "figures.jsonl", device, effort, time.monotonic() + seconds, args)


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


# Setting up.


@dataclass
class Pip:
    """Stands in for subprocess.run: what was run, and the torch that each Python imports."""

    inner: list[Any]
    outer: list[Any]
    installs: list[Any] | None = None
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
        elif self.installs is not None and any(word.startswith("torch") for word in command):
            self.inner = self.installs
        return subprocess.CompletedProcess(command, 0, "", "")

    def installing_torch(self) -> list[list[str]]:
        return [command for command in self.ran if any(word.startswith("torch") for word in command[4:])]


NONE: list[Any] = [None, None, False, "ModuleNotFoundError: No module named 'torch'", ""]
CPU: list[Any] = ["2.13.0+cpu", None, False, "", "/venv/torch"]
CUDA: list[Any] = ["2.13.0+cu130", "13.0", True, "", "/opt/packages/torch"]
OLD: list[Any] = ["2.4.0+cu121", "12.1", True, "", "/opt/packages/torch"]


def test_a_fresh_machine_gets_torch_and_the_development_tools(tmp_path: Path) -> None:
    pip = Pip(NONE, NONE, installs=CUDA)
    how = setup.prepare(tmp_path / "venv", run=pip)
    assert "installed from the default index" in how
    (torch,) = pip.installing_torch()
    assert "--index-url" not in torch and "--force-reinstall" not in torch
    assert any(word.endswith("[dev]") for word in pip.ran[-1])
    # A second call finds everything there.
    pip.ran.clear()
    assert setup.prepare(tmp_path / "venv", run=pip) == how
    assert pip.ran == []


def test_a_torch_with_cuda_is_never_replaced(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    pip = Pip(CUDA, NONE)
    assert "kept" in setup.prepare(venv, run=pip)
    assert pip.installing_torch() == []
    limits = (venv / "constraints.txt").read_text()
    assert "torch==2.13.0+cu130" in limits, "pip has to be told to keep it"
    assert "torch==2.13.0\n" not in limits
    assert "textual==" in limits


@pytest.mark.parametrize("inner", [NONE, CPU])
def test_the_torch_of_this_python_is_used_from_where_it_is(tmp_path: Path, inner: list[Any]) -> None:
    venv = tmp_path / "venv"
    pip = Pip(inner, CUDA)
    assert setup.prepare(venv, run=pip) == "the installed torch was used"
    (pth,) = venv.rglob("*.pth")
    assert pth.read_text().strip() == "/opt/packages"
    removed = [command for command in pip.ran if "uninstall" in command]
    assert len(removed) == (inner is CPU), "a torch without CUDA in the environment would be imported first"
    assert all("install" not in command for command in pip.installing_torch())


@pytest.mark.parametrize(("inner", "outer"), [(CPU, CPU), (CPU, NONE), (NONE, OLD)])
def test_a_torch_without_cuda_or_too_old_does_not_count(
    tmp_path: Path, inner: list[Any], outer: list[Any]
) -> None:
    pip = Pip(inner, outer, installs=CUDA)
    setup.prepare(tmp_path / "venv", run=pip)
    (torch,) = pip.installing_torch()
    assert ("--force-reinstall" in torch) == (inner is CPU)


def test_an_index_for_another_cuda_is_passed_on(tmp_path: Path) -> None:
    pip = Pip(NONE, CUDA, installs=CUDA)
    how = setup.prepare(tmp_path / "venv", "https://example.org/cu126", run=pip)
    (torch,) = pip.installing_torch()
    assert torch[torch.index("--index-url") + 1] == "https://example.org/cu126"
    assert "https://example.org/cu126" in how


def test_gpus_are_found_without_installing_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, proc, tools = tmp_path / "dev", tmp_path / "proc", tmp_path / "bin"
    for folder in (devices, proc, tools):
        folder.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    assert "nvidia-smi is not installed" in setup.no_gpu(devices, proc)
    smi = tools / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver'\nexit 9\n"
    )
    smi.chmod(0o755)
    assert "could not communicate" in setup.no_gpu(devices, proc)
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA A10 (UUID: GPU-1)'\n")
    assert setup.no_gpu(devices, proc) == ""
    smi.unlink()
    (devices / "nvidiactl").touch()
    assert setup.no_gpu(devices, proc) == ""


@pytest.mark.skipif(not setup.no_gpu(), reason="this machine has an NVIDIA GPU")
def test_without_a_gpu_there_is_one_message_and_exit_status_3(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    for arguments in (["benchmarks.gpu.setup", str(venv), "--quick"], ["benchmarks.gpu"]):
        done = subprocess.run(
            [PYTHON, "-m", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment(),
            timeout=120,
        )
        assert done.returncode == 3, done.stderr
        assert done.stdout == ""
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("make gpu needs an NVIDIA GPU: ")
    assert not venv.exists(), "nothing is installed on a machine that cannot use it"
    assert not list(tmp_path.glob("*.md"))


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


def test_a_file_that_cannot_be_written_does_not_end_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "file").touch()
    session = Session(
        (script("a", "given.put('x', '1')"),),
        "cpu",
        "full",
        time.monotonic() + 60,
        60,
        tmp_path / "file" / "r.md",
    )
    assert session.run() == 0
    assert "cannot write" in capsys.readouterr().err
    assert session.page.entries[0].figures == [Figure("x", "1")]


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
    assert "complete: 16 of 16 parts" in text


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


# The parts.


def test_a_median_below_the_target_fails_only_with_its_interval() -> None:
    assert overhead.judged(0.995, None)[0] == PASS
    assert overhead.judged(0.98, (0.97, 0.985))[0] == FAIL
    assert overhead.judged(0.98, (0.95, 1.01))[0] == "inconclusive"
    assert overhead.judged(0.98, None)[0] == "inconclusive"


def test_memory_is_predicted_and_compared_with_a_replay(tmp_path: Path) -> None:
    given = task(tmp_path, "ndd")
    sets = ("workload.hidden=[32]",)
    cases = list(memory.extrapolated(given, "ndd", sets, "off"))
    assert [case.times for case in cases] == [1, 4]
    assert all(abs(case.error) < 0.05 for case in cases)
    memory.summary(given, cases)
    found = by_name(read(given.out))
    assert found["replay vs. max_memory_reserved"].why == "needs a CUDA GPU"
    assert found["error of 1 larger batches, median"].verdict == PASS
    assert found["more than 2 % too low without a warning"].value == "0"


def test_a_prediction_that_is_silently_too_low_fails(tmp_path: Path) -> None:
    given = task(tmp_path, device="cuda")
    low = [memory.Case(1, 0.02, True), memory.Case(4, -0.03, True), memory.Case(8, -0.2, False)]
    memory.summary(given, low)
    found = by_name(read(given.out))
    assert found["replay of the recorded steps, worst"].verdict == FAIL
    assert found["more than 2 % too low without a warning"] == Figure(
        "more than 2 % too low without a warning", "1", "0", FAIL
    )


class Linear:
    """A prediction of 10 bytes per item."""

    def peak(self, micro: int, _accumulation: int) -> int:
        return 10 * micro


@pytest.mark.parametrize(
    ("cap", "micro"), [(1000, 96), (960, 96), (959, 88), (80, 8), (79, None), (10**9, None)]
)
def test_the_proposal_is_the_largest_batch_within_the_limit(cap: int, micro: int | None) -> None:
    assert capped.proposal(Linear(), cap, 100_000) == micro  # type: ignore[arg-type]


@pytest.mark.parametrize(("most", "runs", "larger"), [(105, True, 107), (95, False, 107), (200, True, None)])
def test_a_proposal_runs_and_a_larger_batch_does_not(
    monkeypatch: pytest.MonkeyPatch, most: int, runs: bool, larger: int | None
) -> None:
    monkeypatch.setattr(capped, "fits", lambda _prober, micro, _cap, _gpu: micro <= most)
    assert capped.tried(None, 96, 1000, True) == capped.Result(96, runs, larger)  # type: ignore[arg-type]


def test_proposals_under_a_limit_are_replayed_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = task(tmp_path, "off")
    monkeypatch.setattr(capped, "task", lambda: given)
    assert capped.main() == 0
    found = by_name(read(given.out))
    assert found["steps on the GPU under a limit"].verdict == SKIPPED
    assert found["out of memory, of 1"].verdict == PASS


@pytest.mark.parametrize("runs_out", [False, True])
def test_a_limit_ends_with_the_steps_that_it_is_for(monkeypatch: pytest.MonkeyPatch, runs_out: bool) -> None:
    parts_of_memory: list[float] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (6 * capped.GIB, 8 * capped.GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", parts_of_memory.append)

    class Probe:
        def trace(self, micro: int) -> None:
            assert parts_of_memory == [0.25]
            if runs_out:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    assert capped.fits(Probe(), 8, 2 * capped.GIB, True) is not runs_out  # type: ignore[arg-type]
    assert parts_of_memory == [0.25, 1.0]


def test_the_facts_name_the_gpu_and_not_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(
        0,
        0,
        "GPU-1",
        "NVIDIA A10",
        24 << 30,
        (8, 6),
        "580.1",
        "13.0",
        "13.0",
        processes=(),
        free_bytes=20 << 30,
    )
    found = detect("cpu")
    machine = replace(found, cards=(gpu,), chosen=gpu, device="cuda:0")
    monkeypatch.setattr("ndd_engine.hardware.detect.detect", lambda *_: machine)
    facts = dict(facts_of(task(tmp_path, device="cuda")))
    assert facts["GPU"] == "NVIDIA A10"
    assert facts["GPU memory"] == "24.0 GiB, 20.0 GiB free"
    assert facts["driver"] == "580.1, for CUDA up to 13.0"
    assert facts["other processes on the GPU"] == "0"
    assert "torch" in facts and "triton" in facts
    assert not [value for value in facts.values() if socket.gethostname() in value.split()]


def test_the_tables_of_the_screen_become_figures(tmp_path: Path) -> None:
    given = task(tmp_path)
    table = Table("screen", ("figure", *STATISTICS))
    table.add(
        "steps/s, screen on / off",
        *statistics_cells([0.97, 0.98, 0.99, 0.98, 0.98], as_ratio, Target(0.99, True)),
    )
    table.add("CPU ms per refresh", *statistics_cells([3.0], as_ratio))
    screen.put(given, table)
    ratio, cost = read(given.out)
    assert (ratio.verdict, ratio.target) == (FAIL, "≥ 0.9900")
    assert ratio.value.startswith("0.9800 (95 % CI 0.97")
    assert (cost.verdict, cost.value) == ("info", "3.0000")


def test_limits_emulate_gpus_and_follow_what_is_free(tmp_path: Path) -> None:
    full = dict(capped.settings(task(tmp_path, effort="full"), 10 * capped.GIB))
    assert full["guide"] == [size * capped.GIB for size in (8, 12, 16, 24, 48)]
    assert len(full["small"]) > 200
    assert all(capped.GIB <= cap <= 8 * capped.GIB for cap in full["small"])


def test_claims_take_turns_by_guide_and_share_the_time() -> None:
    order = claims.in_turn(all_claims())
    assert len(order) == len(all_claims())
    guides = list(dict.fromkeys(claim.guide for claim in all_claims()))
    assert [claim.guide for claim in order[: len(guides)]] == guides
    assert claims.LEAST_S <= claims.budget(35, 955) <= 30
    assert claims.budget(35, 10) == claims.LEAST_S
    assert claims.budget(1, 1000) == claims.MOST_S


def test_the_faults_that_need_a_gpu_can_be_configured(tmp_path: Path) -> None:
    assert {case.fault for case in GPU_CASES} >= {"launch-bound", "sync", "transfer", "amp"}
    assert all(case.truth in CAUSES for case in GPU_CASES)
    names = [case.name for case in all_cases(gpu=True)]
    assert len(set(names)) == len(names)
    assert not set(all_cases()) & set(GPU_CASES)
    write_module(tmp_path)
    for case in GPU_CASES:
        sets = case.all_sets(tmp_path)
        config = read_config(sets=sets, workload=case.workload_name).resolve()
        assert config.run.device == "cuda"
        assert config != read_config(sets=[*sets, *case.cure], workload=case.workload_name).resolve()


def test_the_planted_workloads_train(tmp_path: Path) -> None:
    write_module(tmp_path)
    reading = ("workload.options.reads=3", "workload.options.empty=1", "workload.options.rounds=4")
    for factory, options in (("reading", reading), ("heavy", ("workload.options.megabytes=2",))):
        sets = (f'workload.path=["{tmp_path}"]', *options, *ONLY_STEPS, "run.device=cpu", "batch.micro=4")
        with engine(f"planted:{factory}", sets) as subject:
            subject.train(3)
            assert subject.loop.step == 3


def test_faults_are_run_until_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = task(tmp_path, effort="full", device="cuda")
    ran: list[str] = []

    def carried_out(_self: object, case: Case) -> Outcome:
        ran.append(case.name)
        if len(ran) == 3:
            given.__dict__["deadline"] = 0.0
            return replace(Outcome.of(case), error="run hung; see /nowhere")
        gain = Measured(("a=1",), "gain", 2.0, 1.9, 2.1)
        named = case.truth if len(ran) == 1 else "healthy"
        return Outcome.of(case, named=named, found=((named, 3.0),), fix=("a=1",), tried=gain, cured=gain)

    monkeypatch.setattr(faults, "task", lambda: given)
    monkeypatch.setattr(faults.Suite, "carry_out", carried_out)
    assert faults.main() == 0
    found = read(given.out)
    assert ran[0].endswith("-high-chartext"), "the most severe come first"
    assert [figure.verdict for figure in found[:2]] == [PASS, FAIL]
    assert any("run hung" in figure.why for figure in found)
    assert sum(figure.why == "no time left" for figure in found) == len(GPU_CASES) - 3
    assert found[-1] == Figure("correct", "1 of 3", "all", FAIL)

"""However a process with a screen ends, the terminal is usable again and says what happened."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from importlib.resources import files
from pathlib import Path

import ptyprocess
import pytest

from tests.tiers import few
from tests.trial.written_runs import steady, windows, write_run
from tests.waiting import LIMIT_S, lives, until

from .screen import Terminal

pytestmark = pytest.mark.long

# A shell with one job: runs it in the foreground, stops it when `go` exists, takes the terminal back, terminates it.
SHELL = """
import os, signal, sys, termios, time
stop, go, *command = sys.argv[1:]
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = os.fork()
if job == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(command[0], command)
before = termios.tcgetattr(0)
while not os.path.exists(go):
    time.sleep(0.05)
os.kill(-job, int(stop))
os.waitpid(job, os.WUNTRACED)
os.tcsetpgrp(0, os.getpgrp())
before[3] |= termios.TOSTOP
termios.tcsetattr(0, termios.TCSANOW, before)
os.kill(-job, signal.SIGTERM)
os.kill(-job, signal.SIGCONT)
for _ in range(400):
    ended, status = os.waitpid(job, os.WNOHANG | os.WUNTRACED)
    if ended:
        break
    time.sleep(0.05)
print("JOB", "stopped" if ended and os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status) if ended else "hangs")
if not ended or os.WIFSTOPPED(status):
    os.kill(-job, signal.SIGKILL)
"""


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def exiting_workload(folder: Path, ending: str) -> None:
    """A workload that ends its process after some items."""
    text = files("ndd_console.cli").joinpath("example_workload.py").read_text("utf-8")
    ends = f"        if index % 100 == 77:\n            {ending}\n"
    marker = "    def __getitem__(self, index: int) -> tuple[Tensor, int]:\n"
    (folder / "ending.py").write_text(
        "import os\n" + text.replace("from __future__", "# ").replace(marker, marker + ends)
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and prctl")
@pytest.mark.parametrize(
    ("ending", "status", "words"),
    few(
        [
            pytest.param("os._exit(0)", 1, "status 0", marks=pytest.mark.promise),
            ("os._exit(5)", 5, "status 5"),
            ("os.abort()", 134, "SIGABRT"),
        ],
        1,
    ),
)
def test_training_that_exits_its_process(tmp_path: Path, ending: str, status: int, words: str) -> None:
    exiting_workload(tmp_path, ending)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    sets = ("--set", "run.epochs=100", "--set", "run.threads=1")
    arguments = ("train", "--workload", "ending:factory", *sets)
    with Terminal(*arguments, runs=tmp_path / "runs", columns=120, PYTHONPATH=path) as terminal:
        assert terminal.wait() == status
        assert terminal.echoes()
        assert terminal.raw.rindex(b"\x1b[?1049l") > terminal.raw.rindex(b"\x1b[?1049h")
        assert words in terminal.words and "--resume" in terminal.words


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_killed_viewer_restores_the_terminal(tmp_path: Path) -> None:
    write_run(tmp_path / "old", windows(steady(20, 0.1)))
    with Terminal("attach", "old", runs=tmp_path) as terminal:
        terminal.until("done")
        os.kill(child_of(terminal.process.pid), signal.SIGKILL)
        assert terminal.wait() == 128 + signal.SIGKILL
        assert terminal.echoes()
        assert "SIGKILL" in terminal.text and "resume" not in terminal.text


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("rows", few([pytest.param(0, marks=pytest.mark.promise), 24], 1))
def test_a_screen_ends_with_its_terminal(tmp_path: Path, rows: int) -> None:
    """Also where the terminal knows no size, for which Textual and Rich assume different ones."""
    write_run(tmp_path / "old", windows(steady(20, 0.1)))
    with Terminal(runs=tmp_path, columns=rows and 80, rows=rows) as terminal:
        terminal.until("done")
        viewer = child_of(terminal.process.pid)
        terminal.hang_up()
        until(lambda: not lives(viewer) and not lives(terminal.process.pid))


@pytest.mark.parametrize(
    "stop", few([pytest.param(signal.SIGTSTP, marks=pytest.mark.promise), signal.SIGSTOP], 1)
)
def test_a_stopped_screen_in_the_background_can_be_terminated(tmp_path: Path, stop: signal.Signals) -> None:
    go = tmp_path / "go"
    command = [sys.executable, "-m", "ndd_console", "--runs", str(tmp_path), "wizard"]
    env = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
    shell = [sys.executable, "-c", SHELL, str(int(stop)), str(go), *command]
    process = ptyprocess.PtyProcess.spawn(shell, env=env)
    try:
        raw = b""
        deadline = time.monotonic() + LIMIT_S
        while not re.search(rb"JOB \w+\r", raw) and time.monotonic() < deadline:
            try:
                raw += process.read(65536)
            except EOFError:
                break
            if b"next" in raw:
                go.touch()
        assert b"JOB 143" in raw, raw[-2000:]
    finally:
        process.close(force=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_shell_shows_its_prompt_after_ctrl_z(tmp_path: Path) -> None:
    write_run(tmp_path / "old", windows(steady(20, 0.1)))
    env = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PS1": "prompt> "}
    process = ptyprocess.PtyProcess.spawn(["bash", "--norc", "--noediting"], env=env)

    def read_until(wanted: bytes) -> bytes:
        read, deadline = b"", time.monotonic() + LIMIT_S
        while wanted not in read and time.monotonic() < deadline:
            read += process.read(65536)
        assert wanted in read, read[-2000:]
        return read

    try:
        read_until(b"prompt> ")
        process.write(f"{sys.executable} -m ndd_console --runs {tmp_path} attach old\n".encode())
        read_until(b"help")  # in the footer
        process.write(b"\x1a")
        read = read_until(b"prompt> ")
        assert b"Stopped" in read and read.rindex(b"Stopped") > read.rindex(b"\x1b[?1049l")
        process.write(b"fg\n")
        read_until(b"help")
        process.write(b"q")
        read_until(b"prompt> ")
    finally:
        process.close(force=True)

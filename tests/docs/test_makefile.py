"""`make run` with a stand-in for the program: where the program is, and the status it ends with."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

MAKEFILE = Path(__file__).parents[2] / "Makefile"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def start(folder: Path, script: str, stdin: int | None = None) -> subprocess.Popen[str]:
    """`make run` in a process group of its own, as in a terminal; the installation is already up to date."""
    shutil.copy(MAKEFILE, folder)
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
        os.utime(folder / name, (0, 0))
    program = folder / ".venv/bin/ndd-console"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    (folder / ".venv/.run").touch()
    return subprocess.Popen(
        ["make", "run", "VENV=.venv"],
        # `make test` may run this: without its variables, this make is not a sub-make that names its folders.
        env={name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")},
        cwd=folder, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.parametrize("status", [0, 3])
def test_it_says_where_the_program_is_and_keeps_the_status(tmp_path: Path, status: int) -> None:
    output, errors = (process := start(tmp_path, f"echo done; exit {status}")).communicate(timeout=LIMIT_S)
    assert output == "done\n"
    assert errors.count("source .venv/bin/activate") == 1
    # make itself reports every failure as 2, and names the status.
    assert process.returncode == (2 if status else 0)
    assert (f"Error {status}" in errors) == bool(status)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_so_after_a_signal_too(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C reaches make and the program, SIGTERM only make, which passes it on."""
    process = start(tmp_path, stoppable(number, 128 + number))
    for _ in range(300):
        if (tmp_path / "ready").exists():
            break
        time.sleep(0.1)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    output, errors = process.communicate(timeout=LIMIT_S)
    assert output == "stopped\n" and "source .venv/bin/activate" in errors
    assert process.returncode != 0 and ("Error 130" in errors or number == signal.SIGTERM)


def test_the_program_has_the_standard_input_of_make(tmp_path: Path) -> None:
    process = start(tmp_path, "read line; echo $line", stdin=subprocess.PIPE)
    assert process.communicate("hello\n", timeout=LIMIT_S)[0] == "hello\n"


def stoppable(number: signal.Signals, status: int) -> str:
    """A program that takes a moment to stop, and handles signals as ndd-console does: even those it starts without."""
    code = f"""import signal, sys, time
def stop(*_):
    time.sleep(0.3)
    print("stopped", flush=True)
    sys.exit({status})
signal.signal({int(number)}, stop)
open("ready", "w").close()
time.sleep(60)"""
    return f"exec {sys.executable} -c '{code}'"

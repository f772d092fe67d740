"""Runs the process of a part: its time limit, its end, and everything that it leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from .figures import one_line

# After SIGINT a process may write what it has; after SIGKILL a process that hangs in the driver may never end.
GRACE_S = 5.0
REAP_S = 10.0
POLL_S = 0.25
_PR_SET_CHILD_SUBREAPER = 36
_LOG_LINES = 12


def adopt() -> None:
    """Become the parent of processes whose parent died, so that none of them keeps the GPU busy. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def carry_out(
    command: Sequence[str],
    log: Path,
    limit_s: float,
    cwd: Path,
    environment: Mapping[str, str],
    look: Callable[[], None],
    stopped: Callable[[], bool],
) -> str:
    """Run the command with its output in `log`; returns "" or why it did not run to its end. Raises nothing.

    look: called a few times a second. stopped: whether the user wants to stop, which ends the process.
    """
    begin, before = time.monotonic(), _descendants()
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=cwd,
                env=dict(environment), start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        return f"could not be started: {error.strerror or error}"
    why = ""
    try:
        while process.poll() is None and not why:
            look()
            if stopped():
                why = "interrupted"
            elif time.monotonic() - begin > limit_s:
                why = f"time limit of {limit_s:.0f} s"
            time.sleep(POLL_S)
    finally:
        killed = _end(process, before)
        look()
    if why:
        return why if killed else f"{why}; the process cannot be killed (it hangs in the driver)"
    return ended(process.returncode, log)


def ended(status: int | None, log: Path) -> str:
    """Why a process with this exit status failed, "" if it did not."""
    if not status:
        return ""
    last = last_lines(log, 1)
    if status < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-status).name
            hint = " (memory of the host may have run out)" if name == "SIGKILL" else ""
            return f"killed by {name}{hint}" + (f": {one_line(last[0])}" if last else "")
    return f"exit status {status}" + (f": {one_line(last[0])}" if last else "")


def last_lines(log: Path, count: int = _LOG_LINES) -> list[str]:
    """The last lines of a log that are not empty."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - 16384, 0))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return lines[-count:]


def _end(process: subprocess.Popen[bytes], before: set[psutil.Process]) -> bool:
    """Ask the process to end, then kill it and all that it leaves behind; whether it has ended.

    before: our descendants before it was started.
    """
    family = _descendants()
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    left = (family | _descendants()) - before
    for each in left:
        with contextlib.suppress(psutil.Error):
            each.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAP_S)
    psutil.wait_procs(left, timeout=REAP_S)
    return process.poll() is not None


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))

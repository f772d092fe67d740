"""Commands of ndd-console that the first checks run, and what they said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .figures import Task, one_line


def console(given: Task, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of ndd-console in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ndd_console", *words]
    # The part ends at its limit; this one only keeps a command that hangs from taking all of it.
    limit_s = max(given.left_s * 0.8, 5.0)
    try:
        return subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -1, "", f"did not end within {limit_s:.0f} s")


def last(done: subprocess.CompletedProcess[str]) -> str:
    """The last lines of its output; all of it goes into the log of the part."""
    print(done.stdout + done.stderr, flush=True)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return one_line(" / ".join(lines[-6:])) if lines else "no output"

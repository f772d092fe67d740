"""Reads the Python stack of another process from outside, with py-spy, which neither stops nor changes it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ndd_engine.text import printable

# py-spy reads the symbols of the interpreter first.
LIMIT_S = 30.0


class UnreadableError(Exception):
    """Why a process cannot be read, in words."""


def find() -> str | None:
    """The path of py-spy: in the environment of this program, or else on PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def threads(spy: str, pid: int, limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
    """The threads of a process, as `py-spy dump --json` describes them. spy: its path. Raises UnreadableError."""
    try:
        done = subprocess.run(
            [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False,
        )  # fmt: skip
        if not done.returncode:
            return list(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        raise UnreadableError(type(error).__name__) from error
    last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
    raise UnreadableError(printable(last)[:200])

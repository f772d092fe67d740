"""Commands of ndd-console, and what they said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LIMIT_S = 300.0


def console(
    folder: Path, *words: str, limit_s: float = LIMIT_S, **more: str
) -> subprocess.CompletedProcess[str]:
    """A command in this folder; status -1 if it takes too long. more: environment variables."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ndd_console", *words]
    try:
        return subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s,
            check=False, env={**os.environ, **more},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -1, "", f"did not end within {limit_s:.0f} s")


def output(folder: Path, *words: str, **more: str) -> str:
    """What a command prints. Raises RuntimeError if it fails."""
    done = console(folder, *words, **more)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: status {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def sets_of(*items: str) -> list[str]:
    """Options of a command for these settings."""
    return [word for item in items for word in ("--set", item)]

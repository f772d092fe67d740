"""Commands of ndd-console, and results that are kept line by line, so that an interrupted command can be continued."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

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


def output(folder: Path, *words: str, limit_s: float = LIMIT_S, **more: str) -> str:
    """What a command prints. Raises RuntimeError if it fails."""
    done = console(folder, *words, limit_s=limit_s, **more)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: status {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def sets_of(*items: str) -> list[str]:
    """Options of a command for these settings."""
    return [word for item in items for word in ("--set", item)]


def python_words(script: str, *arguments: str, ranks: int = 1, python: str = sys.executable) -> list[str]:
    """The command of a script, under torchrun if it has several ranks."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return [python, *(launcher if ranks > 1 else ()), script, *arguments]


T = TypeVar("T")


def append(path: Path, line: str) -> None:
    """Add a line to a record, complete or not at all, after ending a torn one."""
    torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    with path.open("ab", buffering=0) as file:
        file.write(f"{chr(10) if torn else ''}{line}\n".encode())


def read_lines(record: Path, make: Callable[[str], T]) -> list[T]:
    """What `make` returns for each line of a record; torn and strange lines are ignored."""
    found = []
    for line in record.read_text("utf-8", "replace").splitlines() if record.exists() else ():
        with suppress(ValueError, TypeError, KeyError):
            found.append(make(line))
    return found

"""Waits for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil

# For whatever must happen, also on a busy machine. No test waits for less.
LIMIT_S = 150.0


def until(condition: Callable[[], object], what: str = "it did not happen in time") -> None:
    """Wait for something that must happen. what: the message if it does not."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def contains(path: Path, text: str) -> bool:
    """Whether a file exists and contains a text."""
    return path.exists() and text.encode() in path.read_bytes()


def lives(process: psutil.Process | int) -> bool:
    """Whether a process, or one of this number, runs. Its parent may take its time to collect it."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def children() -> set[int]:
    """Numbers of this process's descendants."""
    return {child.pid for child in psutil.Process().children(recursive=True) if lives(child)}

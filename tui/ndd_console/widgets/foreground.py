"""What this process may do with its terminal: whether it has it, its settings, and its size."""

from __future__ import annotations

import os
import signal
import termios
from typing import Any


def in_background(terminal: int) -> bool:
    """Whether another process group, such as the shell, has the terminal."""
    try:
        return os.tcgetpgrp(terminal) != os.getpgrp()
    except OSError:
        return False


def terminal_mode(terminal: int) -> list[Any] | None:
    """The terminal's settings; None if it has none."""
    try:
        return termios.tcgetattr(terminal)
    except (termios.error, OSError):
        return None


def allow_background() -> None:
    """Let this process use the terminal from the background; by default the kernel stops it (SIGTTOU, SIGTTIN)."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)


def follow_terminal() -> None:
    """Remove COLUMNS and LINES: if exported, they override the terminal's size and hide a resize.

    Before an app is made: it keeps what it reads, and would draw itself for ever where the terminal has another size.
    """
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)

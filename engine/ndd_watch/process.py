"""What Linux knows of this process."""

from __future__ import annotations

from .exceptions import Dropped
from .library import open_file, os

_PR_SET_PTRACER = 0x59616D61


def let_read(tracer: str) -> None:
    """Let a process and what it starts read the stack of this one from outside, where Yama allows only ancestors to.

    It is set where the console has found py-spy. It replaces another choice of the script, which cannot be read.
    """
    with Dropped():
        with open_file("/proc/sys/kernel/yama/ptrace_scope", encoding="ascii") as file:
            if file.read().strip() != "1" or not tracer.isdigit():
                return
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, int(tracer), 0, 0, 0)


def resident() -> int | None:
    """The memory of this process in bytes; None if that is not known."""
    with (
        Dropped(OSError, ValueError, IndexError),
        open_file("/proc/self/statm", encoding="ascii") as file,
    ):
        return int(file.read().split()[1]) * int(os.sysconf("SC_PAGE_SIZE"))
    return None

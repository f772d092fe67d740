"""What Linux and the C library know of this process."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from .exceptions import Dropped
from .library import os, time

_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True)
# Looked up once: Python reports that to audit hooks.
_open, _rename, _prctl = _libc.open, _libc.rename, getattr(_libc, "prctl", None)
_mallinfo = getattr(_libc, "mallinfo2", None)  # of glibc, from 2.33 on
# Reading the heap may take this part of the time, and is not done again if it took longer than this.
_HEAP_SHARE, _LONGEST_NS = 2e-3, 200_000_000


def opened(path: str, flags: int) -> int:
    """An open descriptor, as that of `os.open`, which Python would report to audit hooks. Raises OSError."""
    if sys.platform != "linux":
        return int(os.open(path, flags))
    return _checked(_open(os.fsencode(path), flags | os.O_CLOEXEC))


def renamed(old: str, new: str) -> None:
    """The same of `os.rename`. Raises OSError."""
    _checked(_rename(os.fsencode(old), os.fsencode(new)))


def _checked(found: int) -> int:
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


def _text(path: str) -> str:
    """A small file. Raises OSError."""
    handle = opened(path, os.O_RDONLY)
    try:
        return str(os.read(handle, 4096).decode("ascii"))
    finally:
        os.close(handle)


def let_read(tracer: str) -> None:
    """Let a process and what it starts read the stack of this one from outside, where Yama allows only ancestors to.

    It is set where the console has found py-spy. It replaces another choice of the script, which cannot be read.
    """
    with Dropped():
        if (
            tracer.isdigit()
            and _prctl is not None
            and _text("/proc/sys/kernel/yama/ptrace_scope").strip() == "1"
        ):
            _prctl(_PR_SET_PTRACER, int(tracer), 0, 0, 0)


def resident() -> int | None:
    """The memory of this process in bytes; None if that is not known."""
    with Dropped(OSError, ValueError, IndexError):
        return int(_text("/proc/self/statm").split()[1]) * int(os.sysconf("SC_PAGE_SIZE"))
    return None


def in_use(device: Any) -> int | None:
    """Bytes that this process uses of a GPU, or of the host for any other device; None if that is not known."""
    if device is not None and device.type == "cuda":
        with Dropped():
            return int(sys.modules["torch"].cuda.memory_stats(device).get("allocated_bytes.all.current", 0))
    return resident()


def moved() -> tuple[int, int] | None:
    """Bytes that this process has read and written so far, through files and pipes; None if that is not known."""
    with Dropped(OSError, ValueError, IndexError):
        read, written = (int(line.split()[1]) for line in _text("/proc/self/io").splitlines()[:2])
        return read, written
    return None


def allocator(device: Any) -> dict[str, Any]:
    """The fields of the record's memory event: counters of torch's allocator of a GPU. None of them is reset.

    Raises what an allocator of somebody else raises.
    """
    cuda: Any = sys.modules["torch"].cuda
    counters = cuda.memory_stats(device)
    free, total = cuda.mem_get_info(device)
    found = {
        name: int(counters.get(key, 0))
        for name, key in (
            ("allocated_bytes", "allocated_bytes.all.current"), ("reserved_bytes", "reserved_bytes.all.current"),
            ("peak_allocated_bytes", "allocated_bytes.all.peak"), ("peak_reserved_bytes", "reserved_bytes.all.peak"),
            ("retries", "num_alloc_retries"), ("ooms", "num_ooms"),
        )
    }  # fmt: skip
    growth = found["peak_allocated_bytes"] - found["allocated_bytes"]
    return {**found, "growth_bytes": growth, "free_bytes": free, "total_bytes": total, "others_bytes": None}


class _Mallinfo(ctypes.Structure):
    """See mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


if _mallinfo is not None:
    _mallinfo.restype = _Mallinfo


class Heap:
    """The bytes in use of this process's heap, which has the tensors of the CPU.

    Unlike the resident memory, they fall when something is freed. The C library goes through all pieces that are free:
    200,000 of them took 49 ms. Where that takes long, it is asked less often, or not again.
    """

    def __init__(self) -> None:
        self._due = 0

    def read(self) -> int | None:
        """The bytes in use; None if it is too early to ask again, or where the C library does not tell."""
        now, begin = time.perf_counter_ns(), time.thread_time_ns()
        if _mallinfo is None or now < self._due:
            return None
        found = _mallinfo()
        spent = time.thread_time_ns() - begin
        self._due = now + int(spent / _HEAP_SHARE) if spent < _LONGEST_NS else 1 << 63
        return int(found.uordblks + found.hblkhd)

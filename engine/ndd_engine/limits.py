"""Recognises errors that mean that a limit of the process was reached, and how to raise it."""

from __future__ import annotations

import errno
import re
import resource

from ndd_engine.errors import text_of
from ndd_engine.text import size


def limit_of(error: BaseException) -> str | None:
    """The limit of this process that an error has reached, and how to raise it; None for other errors."""
    number = error.errno if isinstance(error, OSError) else None
    text = text_of(error) if isinstance(error, RuntimeError) else ""
    if number in (errno.EMFILE, errno.ENFILE) or re.search("Too many open files|items of ancdata", text):
        return f"too many open files{_soft(resource.RLIMIT_NOFILE)}; raise it (ulimit -n) or use fewer loader workers"
    if number == errno.EAGAIN or "can't start new thread" in text:
        advice = "raise it (ulimit -u, or the pids limit of the container) or use fewer loader workers"
        return f"cannot start another thread or process{_soft(resource.RLIMIT_NPROC)}; {advice}"
    if number == errno.EFBIG:
        return f"file too large{_soft(resource.RLIMIT_FSIZE, True)}; raise it (ulimit -f)"
    if re.search("unable to (open|write|mmap|allocate|resize).*(shared memory|torch_)", text):
        return "no shared memory left for the batches of the loader workers (/dev/shm); enlarge it or use fewer workers"
    return None


def _soft(kind: int, in_bytes: bool = False) -> str:
    limit = resource.getrlimit(kind)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    return f" (the limit of this process is {size(limit) if in_bytes else f'{limit:,}'})"

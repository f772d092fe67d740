"""What this program got from the one that started it, limits of a process, and what signal handlers share."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal itself imports more
import errno
import os
import re
import resource
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ndd_engine.errors import text_of
from ndd_engine.text import size

# What errors say when the limit of open descriptors is reached.
FULL = re.compile("Too many open files|items of ancdata")
# Python ignores these by itself.
_BY_PYTHON = ("SIGPIPE", "SIGXFZ", "SIGXFSZ")
_ignored: tuple[int, ...] | None = None
_closed: tuple[int, ...] = ()


def note() -> None:
    """Remember which signals are ignored and which standard streams are closed, before this program changes that."""
    global _ignored, _closed
    _closed = tuple(number for number in range(3) if not _is_open(number))
    own = {getattr(_signal, name, None) for name in _BY_PYTHON}
    _ignored = tuple(
        int(number)
        for number in _signal.valid_signals()
        if number not in own and _signal.getsignal(number) == _signal.SIG_IGN
    )


def ignored() -> tuple[int, ...]:
    """Numbers of the signals that were ignored when this program began, as under nohup."""
    if _ignored is None:
        note()
    return _ignored or ()


def closed() -> tuple[int, ...]:
    """Numbers of the standard streams that were closed when this program began."""
    return _closed


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def was_given(name: str) -> bool:
    """Whether a variable was in the environment when this program began; True where that is not known."""
    try:
        with open("/proc/self/environ", "rb") as file:  # noqa: PTH123  pathlib imports more
            return any(item.partition(b"=")[0] == os.fsencode(name) for item in file.read().split(b"\0"))
    except OSError:
        return True


def limit_of(error: BaseException) -> str | None:
    """The limit of this process that an error has reached, and how to raise it; None for other errors."""
    number = error.errno if isinstance(error, OSError) else None
    text = text_of(error) if isinstance(error, RuntimeError) else ""
    if number in (errno.EMFILE, errno.ENFILE) or FULL.search(text):
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


_SLICE_S = 0.5
T = TypeVar("T")


class SignalEvent(threading.Event):
    """An Event that a signal handler can set.

    The standard one has a lock that is not re-entrant. A handler that sets it while the main thread sets or waits for
    it, or a second handler within the first, waits for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition(threading.RLock())

    def wait(self, timeout: float | None = None) -> bool:
        """Also hears a handler that runs between the look at the flag and the sleep, after at most half a second."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _SLICE_S if end is None else min(_SLICE_S, end - time.monotonic())
            if super().wait(max(0.0, left)) or (end is not None and time.monotonic() >= end):
                return self.is_set()


def undisturbed(work: Callable[[], T]) -> T:
    """Do the work in a thread, so that a signal handler that raises is heard after it. Raises what the work raises.

    For torch.save into a file of Python's: where a handler raises while torch writes, torch writes again when its
    writer is deleted, to a file that is closed by then, and ends the process.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()
    unclaimed = [work]  # whoever takes it decides whether the work is done

    def run() -> None:
        try:
            claimed = unclaimed.pop()
        except IndexError:
            return
        try:
            results.append(claimed())
        except BaseException as error:  # noqa: BLE001  raised again below
            errors.append(error)
        finally:
            done.set()

    interruption: BaseException | None = None
    try:
        threading.Thread(target=run, name="ndd-undisturbed", daemon=True).start()
    except BaseException as error:  # noqa: BLE001  of a handler, before or after the thread begins; or there is none
        try:
            unclaimed.pop()
        except IndexError:
            interruption = error
        else:
            raise
    while not done.is_set():
        try:
            done.wait()
        except BaseException as error:  # noqa: BLE001  raised again below
            interruption = interruption or error
    if interruption is not None:
        raise interruption
    if errors:
        raise errors[0]
    return results[0]

"""What this program got from the one that started it, for what it starts itself. `note` comes first of all."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal itself imports more
import os

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

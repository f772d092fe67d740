"""The small memory of a worker of a loader, which others can read: what it does at present, and what it has told.

As with the memory of a process that trains, a store cannot fail or wait, and what was stored is there after any end of
the process. Its file is made with all of its space, or not at all.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Sequence
from json import loads
from typing import Any

from .apart import os
from .looks import class_name
from .mapped import _checked, _open, renamed

SUFFIX = ".worker"
_MAGIC, SIZE = 0x73686565743031, 1 << 15
# Integers: number of the format; process id; times that a report began or ended to be written, odd meanwhile; and its
# bytes. Then of the present batch: its number; when it began on the monotonic clock, 0 between two; and how many
# indices it has. The first ones of them follow. Below 0, these are the bytes of a text instead.
_MARK, _PID, _WRITES, _LENGTH, _BATCH, _BEGUN, _SHOWN = range(7)
# Indices of a batch that are told, and how so many integers are stored.
INDICES = 8
_INTEGERS = [struct.Struct(f"{count}q") for count in range(INDICES + 1)]
_TEXT, _MOST_TEXT, _REPORT = 64, 192, 256
MOST_BYTES = SIZE - _REPORT
_WRITE = 0x200  # PyBUF_WRITE
# Characters of the name of an index.
LONGEST_NAME = 40

_libc_map: Any = ctypes.CDLL(None, use_errno=True).mmap
_libc_map.restype = ctypes.c_void_p
_libc_map.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip


class Sheet:
    """Makes the file. Raises OSError."""

    def __init__(self, folder: str, name: str) -> None:
        path = os.path.join(folder, name)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = _checked(_open(os.fsencode(path), flags, 0o600))
        try:
            os.posix_fallocate(handle, 0, SIZE)
            found = _libc_map(None, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, handle, 0)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(handle)
        if found is None or found == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "the file of a worker cannot be mapped")
        view: Any = ctypes.pythonapi.PyMemoryView_FromMemory
        view.restype, view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
        self._data: memoryview = view(found, SIZE, _WRITE)
        self._values = self._data.cast("q")
        self._values[_PID], self._values[_MARK] = os.getpid(), _MAGIC
        renamed(path, path + SUFFIX)

    def doing(self, batch: int, begun: int, indices: Any) -> None:
        """It makes this batch since then, in nanoseconds of the monotonic clock. About a microsecond for integers."""
        values = self._values
        values[_BATCH], values[_BEGUN] = batch, begun
        if type(indices) is list:
            some = indices[:INDICES]
            try:
                _INTEGERS[len(some)].pack_into(self._data, _TEXT, *some)
                values[_SHOWN] = len(indices)
                return
            except struct.error:  # they are no integers, or too large
                values[_SHOWN] = 0
        text = shown(indices).encode("utf-8", "replace")[:_MOST_TEXT]
        self._data[_TEXT : _TEXT + len(text)] = text
        values[_SHOWN] = -len(text)

    def rests(self) -> None:
        """The batch is made."""
        self._values[_BEGUN] = 0

    def tell(self, report: str) -> None:
        """Replace the report, if it is not too long."""
        text, values = report.encode(), self._values
        if len(text) <= MOST_BYTES:
            values[_WRITES] += 1
            self._data[_REPORT : _REPORT + len(text)] = text
            values[_LENGTH] = len(text)
            values[_WRITES] += 1


def read(data: bytes) -> tuple[dict[str, Any], int, int, str] | None:
    """(report, batch, begin, indices), see `Sheet.doing`, of the bytes of a file; None if it is none, or changes."""
    if len(data) != SIZE:
        return None
    mark, _, writes, length, batch, begun, told = struct.unpack_from("7q", data)
    if mark != _MAGIC or writes % 2 or not 0 < length <= MOST_BYTES or told < -_MOST_TEXT:
        return None
    try:
        report = loads(data[_REPORT : _REPORT + length])
    except ValueError:
        return None
    if not isinstance(report, dict):
        return None
    if told < 0:
        return report, batch, begun, data[_TEXT : _TEXT - told].decode("utf-8", "replace")
    some = _INTEGERS[min(told, INDICES)].unpack_from(data, _TEXT)
    return report, batch, begun, listed(some, told)


def shown(indices: Any, most: int = INDICES) -> str:
    """Some indices of a batch as text."""
    if type(indices) is not list:
        return name_of(indices) if indices is not None else ""
    return listed(indices[:most], len(indices))


def listed(some: Sequence[Any], count: int) -> str:
    """ "3, 4, ...": the first ones of so many indices."""
    return ", ".join(map(name_of, some)) + (", ..." if count > len(some) else "")


def name_of(index: Any) -> str:
    """An index as text, or its class: nothing of an object of the script is run."""
    kind = type(index)
    return f"{index}"[:LONGEST_NAME] if kind in (int, str) else class_name(kind)

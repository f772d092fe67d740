"""The output of a script: into console.log, and to a stream as it is."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ndd_engine.files import open_regular

# A log of this size is moved to console.log.1, and a new one begins.
MOST_BYTES = 64 << 20


class OutputLog:
    """Writes the bytes of a script's terminal. stream: descriptor that gets them as well, or None. Never raises later.

    Raises OSError if the log cannot be opened.
    """

    def __init__(self, path: Path, stream: int | None) -> None:
        self._path, self._stream = path, stream
        self._handle = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._written = 0

    def write(self, data: bytes) -> None:
        """Called in the thread that reads the script's terminal: a reader that stops reading stops the script, too."""
        if self._stream is not None:
            try:
                _all(self._stream, data)
            except OSError:  # the terminal is lost; the log goes on
                self._stream = None
        if self._handle < 0:
            return
        with contextlib.suppress(OSError):  # a full disk costs output, not the script
            _all(self._handle, data)
            self._written += len(data)
            if self._written >= MOST_BYTES:
                self._turn()

    def _turn(self) -> None:
        self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        os.close(self._handle)
        self._handle, self._written = -1, 0
        self._handle = open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def close(self) -> None:
        """Close the log."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def _all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]

"""The output of a script: into console.log, and to a stream as it is."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from ndd_engine.files import open_regular

# Of a file, at once.
CHUNK = 1 << 20
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
        self.keep(data)

    def keep(self, data: bytes) -> None:
        """Write to the log only."""
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


class FileOutput:
    """Reads what a command writes to the files that are its standard output and error, from now on.

    output: called by `poll` with what is new. The command has the files as they are; nothing is between.
    """

    def __init__(self, output: Callable[[bytes], None]) -> None:
        self._output = output
        # By device and number of the file: a descriptor of our own, and how far it was read.
        self._files: dict[tuple[int, int], list[int]] = {}
        for stream in (1, 2):
            with contextlib.suppress(OSError):
                about = os.fstat(stream)
                key = about.st_dev, about.st_ino
                if stat.S_ISREG(about.st_mode) and key not in self._files:
                    handle = os.open(f"/proc/self/fd/{stream}", os.O_RDONLY | os.O_CLOEXEC)
                    self._files[key] = [handle, max(about.st_size, os.lseek(stream, 0, os.SEEK_CUR))]

    def poll(self) -> bool:
        """Read what is new; whether there may be more."""
        more = False
        for one in self._files.values():
            with contextlib.suppress(OSError):
                handle, done = one
                if os.fstat(handle).st_size < done:  # somebody has emptied it
                    one[1] = done = 0
                if data := os.pread(handle, CHUNK, done):
                    one[1] += len(data)
                    self._output(data)
                    more = more or len(data) == CHUNK
        return more

    def close(self) -> None:
        """Read the rest."""
        while self.poll():
            pass
        for handle, _ in self._files.values():
            os.close(handle)
        self._files = {}


def _all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]

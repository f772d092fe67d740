"""Reads a recording, plain or gzipped, with a limit on its size."""

from __future__ import annotations

import gc
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ndd_engine.errors import UsageError
from ndd_engine.text import printable, size

# Maximum size of the decompressed file. Reading takes about ten times as much memory.
MAX_BYTES = 1 << 30
# A file is read in pieces of this size.
_PIECE = 1 << 22


def contents(path: Path, shown: str, advice: str) -> bytes:
    """The bytes of a file, decompressed. shown: its name in messages; advice: how to make it smaller.

    Raises UsageError.
    """
    try:
        if not path.is_file():
            problem = (
                "is a folder" if path.is_dir() else "does not exist" if not path.exists() else "is no file"
            )
            raise UsageError(f"{shown} {problem}")
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            source: Any = gzip.GzipFile(fileobj=file) if packed else file
            pieces, length = [], 0
            while piece := source.read(_PIECE):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_BYTES:
                    raise UsageError(f"{shown} is longer than {size(MAX_BYTES)}; {advice}")
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{shown} cannot be read: {printable(reason)}") from None
    if not length:
        raise UsageError(f"{shown} is empty")
    return b"".join(pieces)


@contextmanager
def no_collection() -> Iterator[None]:
    """Without Python's garbage collector, which would walk millions of new objects again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()

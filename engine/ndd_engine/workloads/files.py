"""Reads a user's text file, or says what is wrong with it. No torch here."""

from __future__ import annotations

import codecs
import difflib
from pathlib import Path

from ndd_engine.text import size

from .windows import Complaints

KEY = "workload.data"
MAX_BYTES = 1 << 30  # the whole file is held in memory, up to nine times its size

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text(
    data: str, complaints: Complaints, suffixes: tuple[str, ...], words: tuple[str, ...] = ()
) -> str | None:
    """The text of a UTF-8 file, without a byte order mark; None after complaining.

    suffixes: what such files are usually called, for suggestions. words: what could be written in place of
    a path ("builtin").
    """
    try:
        path = Path(data).expanduser()
        if not path.exists():
            complaints.add(KEY, "there is no such file", data, _allowed(words), alike(path, data, words))
            return None
        if path.is_dir():
            inside = sorted(child.name for child in path.iterdir() if child.suffix.lower() in suffixes)
            advice = f"did you mean {path / inside[0]}?" if inside else None
            complaints.add(KEY, "this is a directory", data, "a file", advice)
            return None
        if not path.is_file():
            complaints.add(KEY, "this is neither a file nor a directory", data, "a regular file")
            return None
        length = path.stat().st_size
        if length > MAX_BYTES:
            message = f"the file has {size(length)} and is held in memory whole"
            complaints.add(KEY, message, data, f"at most {size(MAX_BYTES)}")
            return None
        content = path.read_bytes()
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # RuntimeError: "~nobody"; ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        complaints.add(KEY, f"the file cannot be read: {reason}", data)
        return None
    return _decode(content, data, complaints)


def _decode(content: bytes, data: str, complaints: Complaints) -> str | None:
    if not content:
        complaints.add(KEY, "the file is empty", data)
        return None
    if content.startswith(_UTF16):
        advice = "convert it with: iconv -f UTF-16 -t UTF-8"
        complaints.add(KEY, "this is UTF-16 text", data, "UTF-8 text", advice)
        return None
    zero = content.find(0)
    if zero >= 0:
        complaints.add(KEY, f"this is a binary file: a zero byte at offset {zero:,}", data, "UTF-8 text")
        return None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # utf-8-sig counts from after its mark.
        offset = error.start + (3 if content.startswith(codecs.BOM_UTF8) else 0)
        line = content.count(b"\n", 0, offset) + 1
        message = f"this is not UTF-8 text: byte 0x{content[offset]:02x} at offset {offset:,} (line {line:,})"
        complaints.add(KEY, message, data, "UTF-8 text")
        return None
    if not text:
        complaints.add(KEY, "the file is empty", data)
        return None
    return text


def _allowed(words: tuple[str, ...]) -> str:
    return ", ".join((*(f'"{word}"' for word in words), "a path to a file"))


def alike(path: Path, data: str, words: tuple[str, ...]) -> str | None:
    """What was probably meant by the path `data` that does not exist: a word, or a neighbour of that name."""
    close = difflib.get_close_matches(data, words, n=1)
    if close:
        return f'did you mean "{close[0]}"?'
    parent = path.parent
    if not parent.is_dir():
        return f"there is no directory {parent} either"
    close = difflib.get_close_matches(path.name, [child.name for child in parent.iterdir()], n=1, cutoff=0.75)
    return f"did you mean {parent / close[0]}?" if close else None

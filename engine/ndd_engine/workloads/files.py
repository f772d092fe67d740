"""Reads a user's text file, or reports why it cannot be read. No torch here."""

from __future__ import annotations

import codecs
import difflib
from pathlib import Path

from ndd_engine.text import size

from .problems import KEY, Problems

MAX_BYTES = 1 << 30  # the file is read as a whole and takes up to nine times its size in memory
UNREADABLE_PATH = (
    OSError,
    RuntimeError,
    ValueError,
)  # RuntimeError: "~nobody"; ValueError: a NUL in the name

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text(
    data: str, problems: Problems, suffixes: tuple[str, ...], words: tuple[str, ...] = ()
) -> str | None:
    """The text of a UTF-8 file without its byte order mark, or None after adding to `problems`.

    suffixes: usual suffixes of such files, for suggestions. words: values allowed in place of a path ("builtin").
    """
    try:
        path = Path(data).expanduser()
        if not path.exists():
            allowed = ", ".join((*(f'"{word}"' for word in words), "a path to a file"))
            problems.add(KEY, "there is no such file", data, allowed, suggest_path(path, data, words))
            return None
        if path.is_dir():
            inside = sorted(child.name for child in path.iterdir() if child.suffix.lower() in suffixes)
            advice = f"did you mean {path / inside[0]}?" if inside else None
            problems.add(KEY, "this is a directory", data, "a file", advice)
            return None
        if not path.is_file():
            problems.add(KEY, "this is neither a file nor a directory", data, "a regular file")
            return None
        length = path.stat().st_size
        if length > MAX_BYTES:
            message = f"the file has {size(length)}, but must fit into memory as a whole"
            problems.add(KEY, message, data, f"at most {size(MAX_BYTES)}")
            return None
        content = path.read_bytes()
    except UNREADABLE_PATH as error:
        problems.add(KEY, f"the file cannot be read: {path_error(error)}", data)
        return None
    return _decode(content, data, problems)


def path_error(error: Exception) -> str:
    """Why a path cannot be read, for people."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def source_name(data: str, **names: str) -> str:
    """What `workload.data` is called while it is read: one of `names` ("builtin"), else the file's name."""
    return names.get(data, Path(data).name)


def manual_topics(problems: Problems, suggestion: str) -> list[str] | None:
    """The topics of Python's manual (PSF licence), about 465,000 characters, sorted by name; None if missing."""
    try:
        from pydoc_data.topics import topics  # some distributions leave it out
    except ImportError:
        problems.add(KEY, "this Python is installed without pydoc_data", "builtin", suggestion=suggestion)
        return None
    return [topics[name] for name in sorted(topics)]


def _decode(content: bytes, data: str, problems: Problems) -> str | None:
    if content.startswith(_UTF16):
        advice = "convert it with: iconv -f UTF-16 -t UTF-8"
        problems.add(KEY, "this is UTF-16 text", data, "UTF-8 text", advice)
        return None
    zero = content.find(0)
    if zero >= 0:
        problems.add(KEY, f"this is a binary file: a zero byte at offset {zero:,}", data, "UTF-8 text")
        return None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # utf-8-sig counts from after the byte order mark.
        offset = error.start + (3 if content.startswith(codecs.BOM_UTF8) else 0)
        line = content.count(b"\n", 0, offset) + 1
        message = f"this is not UTF-8 text: byte 0x{content[offset]:02x} at offset {offset:,} (line {line:,})"
        problems.add(KEY, message, data, "UTF-8 text")
        return None
    if not text:
        problems.add(KEY, "the file is empty", data)
        return None
    return text


def suggest_path(path: Path, data: str, words: tuple[str, ...]) -> str | None:
    """A suggestion for a path that does not exist: one of `words`, or a similar name in the same directory."""
    close = difflib.get_close_matches(data, words, n=1)
    if close:
        return f'did you mean "{close[0]}"?'
    parent = path.parent
    if not parent.is_dir():
        return f"the directory {parent} does not exist either"
    close = difflib.get_close_matches(path.name, [child.name for child in parent.iterdir()], n=1, cutoff=0.75)
    return f"did you mean {parent / close[0]}?" if close else None

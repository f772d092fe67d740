"""Mistakes in a configuration's data, reported all at once, and text files that may have them. Imports no torch."""

from __future__ import annotations

import codecs
import difflib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ndd_engine.errors import ConfigError, Problem
from ndd_engine.text import printable, size

T = TypeVar("T")
Row = TypeVar("Row")
Progress = Callable[[str], None]  # called with short texts to show

KEY = "workload.data"
SHOWN_ERRORS = 5  # lines or files reported one by one; the rest are counted
MAX_BYTES = 1 << 30  # a file is read as a whole and takes up to nine times its size in memory
# RuntimeError: "~nobody"; ValueError: a NUL in the name
UNREADABLE_PATH = (OSError, RuntimeError, ValueError)


@dataclass
class Problems:
    """The errors found so far. where: the file or option that the configuration came from.

    data: what is read, the value of the option `key`.
    """

    where: str
    data: str = ""
    key: str = KEY
    found: list[Problem] = field(default_factory=list)

    def add(
        self,
        key: str,
        message: str,
        found: object = None,
        allowed: str | None = None,
        suggestion: str | None = None,
    ) -> None:
        """Adds an error; arguments as in Problem. Control characters in text from files are escaped."""
        shown = (
            f'"{_cut(found, 120)}"'
            if isinstance(found, str)
            else None
            if found is None
            else _cut(in_toml(found), 120)
        )
        advice = None if suggestion is None else _cut(suggestion)
        self.found.append(Problem(self.where, _cut(key, 120), _cut(message), shown, allowed, advice))

    def add_data(self, message: str, allowed: str | None = None, suggestion: str | None = None) -> None:
        """Adds an error in the data."""
        self.add(self.key, message, self.data, allowed, suggestion)

    def stop(self, message: str, allowed: str | None = None, suggestion: str | None = None) -> NoReturn:
        """Adds an error in the data and raises ConfigError with all errors."""
        self.add_data(message, allowed, suggestion)
        raise ConfigError(self.found)

    def check(self) -> None:
        """Raises ConfigError with all errors if there is any."""
        if self.found:
            raise ConfigError(self.found)

    def of(self, data: str) -> Problems:
        """The same list of errors, for another file."""
        return replace(self, data=data)


def in_toml(value: object) -> str:
    """A value as TOML writes it, without quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cut(text: str, longest: int = 600) -> str:
    """Printable, and not longer than a message may be: names and values may come from a user's code."""
    shown = printable(text[:longest])
    return shown if len(text) <= longest else f"{shown}…"


@dataclass
class ErrorList:
    """Errors in the lines or files of the data: the first few are added to `problems`, the rest are counted."""

    problems: Problems
    allowed: str | None = None
    kind: str = "lines"
    count: int = 0

    def add(self, place: int | str, message: str, suggestion: str | None = None) -> None:
        """place: a line number, or the name of a file."""
        self.count += 1
        if self.count <= SHOWN_ERRORS:
            place = f"line {place:,}" if isinstance(place, int) else place
            self.problems.add_data(f"{place}: {message}", self.allowed, suggestion)

    @property
    def full(self) -> bool:
        """Whether further errors would only be counted."""
        return self.count > SHOWN_ERRORS

    def finish(self) -> None:
        """Adds the number of errors not shown. Raises ConfigError if the list has any."""
        if self.full:
            self.problems.add_data(f"{self.count - SHOWN_ERRORS:,} more {self.kind} with errors")
        if self.count:
            self.problems.check()

    def parse(
        self, rows: Iterable[tuple[int, Row]], parse: Callable[[Row], T], limit: int | None = None
    ) -> list[T]:
        """What `parse` returns for numbered rows, up to `limit`. Raises ConfigError with its ValueErrors."""
        found: list[T] = []
        for number, row in rows:
            if limit is not None and len(found) == limit:
                break
            try:
                found.append(parse(row))
            except ValueError as error:
                self.add(number, str(error))
        self.finish()
        return found


def read_text(problems: Problems, suffixes: tuple[str, ...], words: tuple[str, ...] = ()) -> str:
    """The text of the UTF-8 file `problems.data` without its byte order mark. Raises ConfigError.

    suffixes: usual suffixes of such files, for suggestions. words: values allowed in place of a path ("builtin").
    """
    data = problems.data
    try:
        path = Path(data).expanduser()
        if not path.exists():
            allowed = ", ".join((*(f'"{word}"' for word in words), "a path to a file"))
            problems.stop("there is no such file", allowed, suggest_path(path, data, words))
        if path.is_dir():
            inside = sorted(child.name for child in path.iterdir() if child.suffix.lower() in suffixes)
            advice = f"did you mean {path / inside[0]}?" if inside else None
            problems.stop("this is a directory", "a file", advice)
        if not path.is_file():
            problems.stop("this is neither a file nor a directory", "a regular file")
        length = path.stat().st_size
        if length > MAX_BYTES:
            message = f"the file has {size(length)}, but must fit into memory as a whole"
            problems.stop(message, f"at most {size(MAX_BYTES)}")
        content = path.read_bytes()
    except UNREADABLE_PATH as error:
        problems.stop(f"the file cannot be read: {path_error(error)}")
    return _decode(content, problems)


def is_folder(data: str) -> bool:
    """Whether it is the path of a folder that can be reached."""
    with suppress(*UNREADABLE_PATH):
        return Path(data).expanduser().is_dir()
    return False


def files_below(
    problems: Problems,
    suffixes: tuple[str, ...],
    what: str,
    words: tuple[str, ...] = (),
    allowed: str | None = None,
) -> list[Path]:
    """The files with these suffixes in the folder `problems.data` and below, sorted by path, without hidden ones.

    what: "WAV files". words: values allowed in place of a path. allowed: what a folder should have. Raises ConfigError
    if there are none; a folder below that cannot be read is added to the problems.
    """
    data, found, before = problems.data, list[Path](), len(problems.found)

    def unreadable(error: OSError) -> None:
        problems.of(str(error.filename)).add_data(f"the folder cannot be read: {error.strerror}")

    try:
        folder = Path(data).expanduser()
        if not folder.exists():
            paths = ", ".join((*(f'"{word}"' for word in words), f"a path to a folder of {what}"))
            problems.stop("there is no such folder", paths, suggest_path(folder, data, words))
        if not folder.is_dir():
            problems.stop("this is a file", f"a folder of {what}", f"its folder is {folder.parent}")
        for place, subfolders, names in os.walk(folder, onerror=unreadable):
            subfolders[:] = [name for name in subfolders if not name.startswith((".", "__"))]
            wanted = (name for name in names if name.lower().endswith(suffixes) and name[0] != ".")
            found += [Path(place) / name for name in wanted]
    except UNREADABLE_PATH as error:
        problems.stop(f"the folder cannot be read: {path_error(error)}")
    if not found:
        if len(problems.found) == before:
            problems.add_data(
                f"there are no {what} in this folder or below it", allowed or ", ".join(suffixes)
            )
        problems.check()
    return sorted(found)


def read_texts(problems: Problems, suffixes: tuple[str, ...]) -> list[str]:
    """The text files in a folder and below, sorted by path. Raises ConfigError with every unusable file."""
    before, texts = len(problems.found), list[str]()
    for path in files_below(problems, suffixes, "text files"):
        with suppress(ConfigError):  # the error is in `problems`
            texts.append(read_text(problems.of(str(path)), suffixes).strip("\r\n"))
        if sum(map(len, texts)) > MAX_BYTES:
            message = "the texts are too long in total to be kept in memory"
            problems.add_data(message, f"at most {MAX_BYTES:,} characters")
            break
    errors = len(problems.found) - before
    if errors > SHOWN_ERRORS:
        del problems.found[before + SHOWN_ERRORS :]
        problems.add_data(f"{errors - SHOWN_ERRORS:,} more files with errors")
    if errors:
        problems.check()
    return texts


def path_error(error: Exception) -> str:
    """Why a path cannot be read, as a message."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _decode(content: bytes, problems: Problems) -> str:
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        problems.stop("this is UTF-16 text", "UTF-8 text", "convert it with: iconv -f UTF-16 -t UTF-8")
    zero = content.find(0)
    if zero >= 0:
        problems.stop(f"this is a binary file: a zero byte at offset {zero:,}", "UTF-8 text")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # utf-8-sig counts from after the byte order mark.
        offset = error.start + (3 if content.startswith(codecs.BOM_UTF8) else 0)
        line = content.count(b"\n", 0, offset) + 1
        message = f"this is not UTF-8 text: byte 0x{content[offset]:02x} at offset {offset:,} (line {line:,})"
        problems.stop(message, "UTF-8 text")
    if not text:
        problems.stop("the file is empty")
    return text


def json_strings(line: str, choose: Callable[[dict[str, Any]], Sequence[str]]) -> list[str]:
    """The strings of a JSON object at the keys that `choose` returns. Raises ValueError for any other line."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        at = f"{error.msg} at column {error.colno:,}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"this is not JSON: {at}") from None
    if not isinstance(value, dict):
        raise ValueError(f"this is {_json_kind(value)}, not an object")
    keys = choose(value)
    for key in keys:
        if not isinstance(value[key], str):
            raise ValueError(f'"{key}" is {_json_kind(value[key])}, not a string')
    return [value[key] for key in keys]


def _json_kind(value: object) -> str:
    words = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return words.get(type(value), "a number")


def numbered_lines(text: str) -> list[tuple[int, str]]:
    """The lines of a text that are not blank, with their numbers."""
    # Not splitlines(), which also splits at characters that a JSON string may contain.
    lines = enumerate(text.split("\n"), 1)
    return [(number, line.rstrip("\r")) for number, line in lines if line.strip()]


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

"""Reads TOML text and `--set key=value` into plain tables, and refuses what no configuration contains.

Everything later may rely on it: tables are at most MAX_DEPTH deep, integers have 64 bits, strings can be written to a
file and passed to the system.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli

from ndd_engine.errors import ConfigError, Problem
from ndd_engine.text import printable

from .messages import in_short, shown

Table = dict[str, Any]
COMMAND_LINE = "--set"
MAX_BYTES = 1_000_000
MAX_DEPTH = 20
MAX_KEY = 200
INT64 = range(-(2**63), 2**63)


def text_of(path: Path) -> str:
    """The contents of a configuration file. Raises ConfigError."""
    name = printable(str(path))
    try:
        if path.is_char_device() or path.is_block_device():  # reading may never end
            raise ConfigError([Problem(name, "", "is a device, not a TOML file")])
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            text = f"is longer than {MAX_BYTES:,} bytes; is this a TOML file?"
            raise ConfigError([Problem(name, "", text)])
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        text = f"is not UTF-8 text (byte {error.start}); is this a TOML file?"
        raise ConfigError([Problem(name, "", text)]) from None
    except OSError as error:
        raise ConfigError([Problem(name, "", f"cannot be read: {error.strerror}")]) from None
    except ValueError:  # a path with a NUL
        raise ConfigError([Problem(name, "", "is not a valid path")]) from None


def parsed(name: str, text: str) -> Table:
    """The tables of a TOML text. name: of its file. Raises ConfigError."""
    try:
        table = _loaded(text)
        problem = next(_refused(table), None)
    except (tomli.TOMLDecodeError, _UnreadableError) as error:
        problem = ("", f"is not valid TOML: {in_short(printable(str(error)))}")
    if problem is not None:
        raise ConfigError([Problem(printable(name), *problem)])
    return table


def put(target: Table, item: str) -> Problem | None:
    """Set "section.key=value" in a table. Returns what is wrong with it, or None."""
    key, equals, value = item.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path) or not 2 <= len(path) <= MAX_DEPTH:
        text, allowed = f"cannot parse {shown(item)}", "section.key=value, such as batch.micro=64"
        return Problem(COMMAND_LINE, "", text, allowed=allowed)
    found: object
    try:
        found = _loaded(f"value = {value}")["value"]
    except tomli.TOMLDecodeError:
        word = value.strip()
        found = None if word == "none" else word  # a bare word is a string; "none" unsets a key
    except _UnreadableError as error:
        return Problem(COMMAND_LINE, in_short(printable(key)), str(error))
    table = target
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return Problem(COMMAND_LINE, in_short(printable(key)), "is set both as a value and as a section")
    problem = next(_refused({key: found}, len(path) - 1), None)
    if problem is not None:
        return Problem(COMMAND_LINE, *problem)
    table[path[-1]] = found
    return None


class _UnreadableError(ValueError):
    """Valid TOML that Python's parser cannot read."""


def _loaded(text: str) -> Table:
    try:
        return tomli.loads(text)
    except RecursionError:
        raise _UnreadableError(f"tables and lists are nested deeper than {MAX_DEPTH} levels") from None
    except tomli.TOMLDecodeError:
        raise
    except ValueError:  # more digits than Python converts
        raise _UnreadableError("an integer does not have 64 bits") from None


def _refused(table: Table, depth: int = 0) -> Iterator[tuple[str, str]]:
    """(key, message) of each part that no configuration contains. Not recursive: the table may be deep."""
    parts: list[tuple[str, Any, int]] = [("", table, depth)]
    while parts:
        key, value, depth = parts.pop()
        if depth > MAX_DEPTH:
            yield key, f"is nested deeper than {MAX_DEPTH} levels"
        elif isinstance(value, dict):
            for name, part in value.items():
                if len(name) > MAX_KEY:
                    yield in_short(printable(name)), f"is longer than {MAX_KEY} characters"
                else:
                    parts.append((f"{key}.{printable(name)}".lstrip("."), part, depth + 1))
        elif isinstance(value, list):
            parts += ((key, part, depth + 1) for part in value)
        elif isinstance(value, int) and value not in INT64:
            yield key, "is not a 64-bit integer"
        elif isinstance(value, str) and (why := _no_text(value)) is not None:
            yield key, why


def _no_text(value: str) -> str | None:
    if "\x00" in value:
        return "contains a NUL character"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "contains bytes that are not UTF-8"
    return None

"""Reads TOML text and `--set key=value` into plain tables, and says what is wrong and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import tomli
from pydantic import BaseModel

from ndd_engine.errors import ConfigError, Problem
from ndd_engine.text import printable

from .schema import Config
from .workload_sections import SECTIONS, kind


def suggest(path: Sequence[str | int], merged: dict[str, Any]) -> tuple[str, str | None]:
    """(the keys allowed in the section of an unknown key, a suggestion or None)."""
    names = _neighbours(path, merged)
    key = str(path[-1])
    if key == "extends":
        return ", ".join(sorted(names)), "extends belongs above the first section of a file"
    suggestion = meant(key, [*names, "extends"] if len(path) == 1 else names)
    if suggestion is None and (elsewhere := _sections_with(key)):
        suggestion = f"it is a key of {' or '.join(f'[{name}]' for name in elsewhere)}"
    return ", ".join(sorted(names)), suggestion


def meant(word: str, words: Sequence[str]) -> str | None:
    """ "did you mean micro?", or None without a close match."""
    close = difflib.get_close_matches(word[:64], words, n=1)
    return f"did you mean {close[0]}?" if close else None


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not None or isinstance(annotation, UnionType):
        for part in get_args(annotation):
            yield from _models(part)


def _neighbours(path: Sequence[str | int], merged: dict[str, Any]) -> list[str]:
    """The keys allowed in the section of `path`."""
    if len(path) == 1:
        return list(Config.model_fields)
    section = Config.model_fields.get(str(path[0]))
    models = list(_models(section.annotation)) if section is not None else []
    if path[0] == "workload":
        wanted = SECTIONS.get(kind(merged.get("workload", {})) or "")
        models = [model for model in models if model is wanted]
    return [name for model in models for name in model.model_fields]


def _sections_with(key: str) -> list[str]:
    return [
        section
        for section, info in Config.model_fields.items()
        if any(key in model.model_fields for model in _models(info.annotation))
    ]


_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": 'a string ("…")',
    "list_type": "a list ([…])",
    "model_type": "a table of keys",
    "model_attributes_type": "a table of keys",
    "dict_type": "a table of keys",
}
_SAID = {
    "extra_forbidden": "unknown key",
    "missing": "is required",
    "literal_error": "is not a valid choice",
    "finite_number": "is not a finite number",
}
# Error -> (sign, name of the limit in the error's context).
_LIMITS = {
    "greater_than_equal": ("≥", "ge"),
    "greater_than": (">", "gt"),
    "less_than_equal": ("≤", "le"),
    "less_than": ("<", "lt"),
}


def explain(item: Any) -> tuple[str, str | None]:
    """(message, allowed values or None) for one pydantic error."""
    kind, context = item["type"], item.get("ctx", {})
    if kind in _EXPECTED:
        return "has the wrong type", _EXPECTED[kind]
    if kind in _SAID:
        return _SAID[kind], context.get("expected")
    if kind in _LIMITS:
        sign, name = _LIMITS[kind]
        limit = context[name]
        return "is out of range", f"{sign} {limit:g}" if isinstance(limit, float) else f"{sign} {limit}"
    if kind == "string_pattern_mismatch":
        device = "cuda" in context.get("pattern", "")
        allowed = "auto, cpu, cuda or cuda:N" if device else "up to 64 letters, digits, '.', '_' and '-'"
        return "is not a valid value", allowed
    if kind == "value_error":
        return str(context.get("error", item["msg"])), None
    return in_short(item["msg"][:1].lower() + item["msg"][1:]), None


def shown(value: object) -> str:
    """A value as TOML shows it, in at most 80 characters."""
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return in_short(printable(text.lower() if isinstance(value, bool) else text), 80)


def in_short(text: str, limit: int = 160) -> str:
    """The text, cut to at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


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

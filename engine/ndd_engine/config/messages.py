"""Error messages for invalid configurations: the problem, the allowed values, and a suggestion."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel

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

"""Checks parsed JSON by declared types, so that a record holds what its readers expect.

A type is int, float, str, bool, None, a Literal, a union, list, tuple, dict[str, …], a TypedDict or a dataclass (as the
object of its fields). Annotated[Json, Other] is checked as Other. Any is any JSON value of at most DEPTH levels. The
function of a type is generated once, since long records have many lines.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NewType,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

# Integers of a record are counts, sizes, times and ids: never negative.
LARGEST_INT = 2**63 - 1
# Sums and products of a few such numbers are finite.
LARGEST = 1e100
DEPTH = 16
# Unix time in seconds, up to the year 9892: later ones have no date.
Time = NewType("Time", float)

Check = Callable[[Any], bool]

# Expressions for a value `x`.
_SIMPLE: dict[Any, str] = {
    int: f"(x.__class__ is int and 0 <= x <= {LARGEST_INT})",
    float: f"((x.__class__ is float or x.__class__ is int) and {-LARGEST} <= x <= {LARGEST})",
    Time: "((x.__class__ is float or x.__class__ is int) and 0 <= x <= 2.5e11)",
    str: "x.__class__ is str",
    bool: "x.__class__ is bool",
    type(None): "x is None",
    Any: "plain(x)",
}


def plain(value: Any, depth: int = DEPTH) -> bool:
    """Whether it is a JSON value with numbers up to LARGEST and at most `depth` levels."""
    kind = value.__class__
    if kind is str or value is None or kind is bool:
        return True
    if kind is int or kind is float:
        return bool(-LARGEST <= value <= LARGEST)
    if kind is dict:
        value = value.values()
    elif kind is not list:
        return False
    return depth > 0 and all(plain(item, depth - 1) for item in value)


@cache
def check_of(hint: Any) -> Check:
    """A function that returns whether a parsed JSON value has this type. Raises TypeError for other types."""
    scope: dict[str, Any] = {"plain": plain}
    lines = ["def check(x):", *_lines(hint, scope)]
    exec("\n".join(lines), scope)
    check: Check = scope["check"]
    return check


def _expression(hint: Any, scope: dict[str, Any]) -> str:
    """An expression that is true for an `x` of this type. scope: of the code; gets the functions that it calls."""
    if (simple := _SIMPLE.get(hint)) is not None:
        return simple
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _expression(parts[1], scope)
    if origin in (Required, NotRequired):
        return _expression(parts[0], scope)
    if origin in (Union, types.UnionType):
        ordered = sorted(parts, key=lambda part: part is not type(None))
        return "(" + " or ".join(_expression(part, scope) for part in ordered) + ")"
    if origin is Literal:
        return f"(x.__class__ is str and x in {parts!r})"
    if not (origin in (list, tuple, dict) or is_typeddict(hint) or is_dataclass(hint)):
        raise TypeError(f"cannot check {hint!r}")
    name = f"check_{len(scope)}"
    scope[name] = check_of(hint)
    return f"{name}(x)"


def _lines(hint: Any, scope: dict[str, Any]) -> list[str]:
    """The body of the function for a type."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is list or origin is dict:
        each, values = (parts[0], "x") if origin is list else (parts[1], "x.values()")
        return [
            f" if x.__class__ is not {origin.__name__}: return False",
            f" for x in {values}:",
            f"  if not {_expression(each, scope)}: return False",
            " return True",
        ]
    if origin is tuple:
        checks = (f" x = row[{index}]\n if not {_expression(part, scope)}: return False"
                  for index, part in enumerate(parts))  # fmt: skip
        return [
            f" if x.__class__ is not list or len(x) != {len(parts)}: return False",
            " row = x",
            *checks,
            " return True",
        ]
    if is_typeddict(hint) or is_dataclass(hint):
        return list(_fields(hint, scope))
    return [f" return {_expression(hint, scope)}"]


def _fields(kind: Any, scope: dict[str, Any]) -> list[str]:
    hints = get_type_hints(kind, include_extras=True)
    if is_dataclass(kind):
        required = {
            item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING
        }
    else:
        # Of annotations that are still text, the class itself does not know which are Required.
        required = kind.__required_keys__ | {
            name for name, hint in hints.items() if get_origin(hint) is Required
        }
    lines = [" body = x", " if x.__class__ is not dict: return False", " known = 0"]
    for name, hint in hints.items():
        if get_origin(hint) is ClassVar:
            continue
        test = f"if not {_expression(hint, scope)}: return False"
        lines += [f" if {name!r} in body:", "  known += 1", f"  x = body[{name!r}]", f"  {test}"]
        if name in required:
            lines.append(" else: return False")
    if is_typeddict(kind):
        # Unknown fields of an event are dropped, those of its tables are kept.
        lines.append(" if known < len(body): return plain(body)")
    return [*lines, " return True"]

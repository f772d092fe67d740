"""Strange values: texts that attack a terminal, numbers at the limits, damaged JSON, and mutations of dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from typing_extensions import is_typeddict

# The first one is what the tests try: escape sequences, markup and HTML.
TEXTS = (
    "\x1b[2J\x1b]0;title\x07[red]<script>alert(1)</script>\x9b31m",
    "", " ", "\n", "\t\t", "a", "x" * 28, "x" * 300, "y" * 5000, "wort " * 200,
    "\x1b[2J\x1b[31mred", "\x1b]0;title\x07", "\x1b]52;c;aGk=\x07", "\x1bPq\x1b\\", "\x9b31m", "\x90q\x9c",
    "a\x00b", "\x07\x08\x0b\x0c\x0e\x7f", "first\r\nsecond", "\rover", "a\u2028b\u2029c\x85d\x1cx",
    "\u202eabc\u202c", "\u2066\u2067\u2069x", "\u200b\u200c\u200d\u2060\ufeff", "\u00ad\u034f",
    "漢字" * 20, "ｗｉｄｅ", "한국어", "👩‍👩‍👧‍👦" * 6, "❤️" * 9, "🇩🇪🇫🇷", "👍🏽", "e" + "\u0301" * 60, "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢",
    "שלום עולם", "مرحبا بالعالم", "นี่คือ", "\udc80\udcff", "\ud800", "\U000e0001\U000e0041", "\ufff9\ufffb", "\ue000",
    "[bold]markup[/bold]", "[/]", "<script>alert(1)</script>", "&amp;\"'<>",
    "</style><svg onload=x>", "{0} %s %n {x.y}",
    "../../etc/passwd", "-rf", "--help", "$(reboot)", "`id`", "; ls", "a/b", "C:\\x", "nan", "None", "\\x1b[31m",
    "ﷺ" * 8, "𒐫" * 5, "\t" * 40, "—" * 90, "a" + "b" * 200 + "漢" * 200,
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 7, 99, 1023, 10**6, 10**9, 10**15, 2**63 - 1, -(2**63),
    0.0, -0.0, 0.5, 1.0, 1e-300, 1e-9, 1.5, 99.95, 1e6, 1e15, 1e300, -1e300, math.nan, math.inf, -math.inf,
)  # fmt: skip
POSITIVE = (1, 2, 7, 99, 1023, 10**6, 10**12, 0.25, 1.5, 1e-6, 1e6)
SIZES = (1, 2, 3, 5, 8, 10, 19, 20, 23, 24, 27, 39, 40, 41, 44, 48, 60, 72, 80, 100, 120, 150, 200, 300)


def text(rng: random.Random) -> str:
    """A strange text, sometimes two."""
    found = rng.choice(TEXTS)
    return found + rng.choice(TEXTS) if rng.random() < 0.15 else found


def size(rng: random.Random) -> tuple[int, int]:
    """The size of a terminal: columns, rows."""
    known = ((80, 24), (80, 24), (1, 1), (20, 5), (120, 40), (300, 100))
    return rng.choice(known) if rng.random() < 0.4 else (rng.choice(SIZES), min(rng.choice(SIZES), 100))


def anything(rng: random.Random, depth: int = 2) -> Any:
    """A JSON value."""
    kind = rng.randrange(7 if depth else 5)
    if kind == 5:
        return [anything(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {text(rng): anything(rng, depth - 1) for _ in range(rng.randrange(4))}
    return (None, rng.random() < 0.5, rng.choice(NUMBERS), rng.choice(NUMBERS), text(rng))[kind]


def mutated(rng: random.Random, value: Any, share: float, numbers: Sequence[float] = NUMBERS) -> Any:
    """A copy of a dataclass in which about `share` of all values are strange ones of their types.

    numbers: those to use.
    """
    hints = _hints(type(value))
    changes = {}
    for item in dataclasses.fields(value):
        if item.init:
            changes[item.name] = _mutated(rng, getattr(value, item.name), hints[item.name], share, numbers)
    return dataclasses.replace(value, **changes)


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    import importlib

    more: dict[str, Any] = {}
    for name in ("ndd_engine.wizard.proposals", "ndd_engine.trial.outcome", "ndd_engine.trial.tuning"):
        more.update(vars(importlib.import_module(name)))
    return typing.get_type_hints(kind, localns=more, include_extras=True)


def _mutated(rng: random.Random, value: Any, hint: Any, share: float, numbers: Sequence[float]) -> Any:
    if typing.get_origin(hint) is typing.Annotated:
        if isinstance(value, Mapping) and (required := _required(hint)):
            return {
                key: _mutated(rng, item, required.get(key, Any), share, numbers)
                for key, item in value.items()
            }
        hint = hint.__origin__
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if types.NoneType in args and rng.random() < share / 2:
            return None
        kinds = [arg for arg in args if arg is not types.NoneType]
        if value is None:
            plain = [kind for kind in kinds if kind in (int, float, str)]
            return (
                _mutated(rng, None, rng.choice(plain), 1.0, numbers)
                if plain and rng.random() < share
                else None
            )
        return _mutated(rng, value, kinds[0], share, numbers)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return mutated(rng, value, share, numbers)
    if isinstance(value, tuple) and not args:
        return value
    if origin is tuple and Ellipsis not in args and isinstance(value, (list, tuple)):
        # The reader of records checks the length and the types of such rows.
        pairs = zip(value, args, strict=True)
        return type(value)(_mutated(rng, item, kind, share, numbers) for item, kind in pairs)
    if isinstance(value, (tuple, list)):
        return _sequence(rng, value, args, share, numbers)
    if isinstance(value, Mapping):
        return _mapping(rng, value, args, share, numbers)
    if rng.random() >= share or origin is typing.Literal:
        return value
    if hint is bool:
        return rng.random() < 0.5
    if hint is int:
        return rng.choice([number for number in numbers if isinstance(number, int)])
    if hint is float:
        return rng.choice(numbers)
    if hint is str:
        return text(rng)
    return anything(rng) if hint in (Any, object) else value


@lru_cache
def _required(hint: Any) -> dict[str, Any]:
    """The types of the keys of a table without some of which the reader of records skips the line; {} for others."""
    (kind,) = (getattr(one, "_kind", None) for one in hint.__metadata__[:1])
    hints = typing.get_type_hints(kind, include_extras=True) if is_typeddict(kind) else {}
    if typing.Required not in map(typing.get_origin, hints.values()):
        return {}
    return {
        key: typing.get_args(one)[0] if typing.get_origin(one) is typing.Required else one
        for key, one in hints.items()
    }


def _sequence(
    rng: random.Random, value: Any, args: tuple[Any, ...], share: float, numbers: Sequence[float]
) -> Any:
    fixed = isinstance(value, tuple) and args and args[-1] is not Ellipsis
    if not fixed and rng.random() < share / 2:
        return type(value)()
    hints = args if fixed else (args[0] if args else Any,) * len(value)
    few = share if len(value) < 30 else share / 10
    out = [_mutated(rng, item, hint, few, numbers) for item, hint in zip(value, hints, strict=True)]
    if not fixed and out and rng.random() < share / 2:
        out *= rng.choice((2, 5, 20)) if len(out) < 30 else 2
    return type(value)(out)


def _mapping(
    rng: random.Random,
    value: Mapping[Any, Any],
    args: tuple[Any, ...],
    share: float,
    numbers: Sequence[float],
) -> Any:
    hint = args[1] if len(args) == 2 else Any
    out = {}
    for key, item in value.items():
        if rng.random() < share / 4:
            continue
        name = text(rng) if rng.random() < share / 4 else key
        out[name] = _mutated(rng, item, hint, share, numbers)
    return out


# Values and lines that no reader of a record or a message expects.


PLACE = "\ue000"  # stands for a value that is put in as text
NASTY = "\x1b[31m\x07\r\n\u202e\u200b漢字\x00"
# What no reader expects; each as JSON text, since a value such as a number of 400 digits is one.
VALUES = (
    "null", "true", "false", "0", "-1", "1", "7.5", "-0.0", "1e-320", "1e99", "-1e99",
    "200000000000", "1e308", "-1e308", "1e999", "NaN", "-Infinity",
    str(2**63 - 1), str(2**63), str(-(2**63)), "1" + "0" * 400, "-1" + "0" * 400, "9" * 5000,
    '""', '"x"', '"1"', '"nan"',
    '"' + "x" * 10_000 + '"', json.dumps(NASTY), '"\\ud800"', '"[bold]markup[/bold]</script>"', '"cuda:0"', '"cpu"',
    "[]", "{}", "[null]", "[[]]", "[1]", '["x","y","z"]', "[1,2,3,4,5,6]", '{"":1}', '{"a":{"b":null}}',
    "[" * 60 + "]" * 60, '{"a":' * 900 + "1" + "}" * 900, "[" * 100_000,
)  # fmt: skip
NONSENSE = (
    b"", b"   ", b"null", b"3", b"[]", b"{}", b'"x"', b"\x00" * 500, b"\xff\xfe", b"\xc3(", b"[" * 100_000,
    b'{"a":' * 100_000, b"1" * 5000, b'{"v":2}', b'{"v":2,"type":"future","t":1.0}', b'{"v":2,"type":["mark"],"t":1.0}',
    b'{"v":2,"type":"mark","t":"x"}', b'{"v":2,"type":"fold","t":1.0,"state":{}}', b'{"v":2,"type":"fold","t":1.0}',
    b'{"v":2,"type":"window","t":1e400}', b"x" * 300_000, b'{"v":2,"type":"stage","t":5,"name":"a","text":"b"',
)  # fmt: skip


def damaged(rng: random.Random, body: Any) -> tuple[str, bytes]:
    """(what was done, the line of JSON) after one value is replaced, removed, or gets another name."""
    body = copy.deepcopy(body)
    path = rng.choice(list(_paths(body)))
    holder = body
    for part in path[:-1]:
        holder = holder[part]
    what, new = rng.choice("rrrrrrrrrdn"), rng.choice(VALUES)
    if what == "r":
        holder[path[-1]] = PLACE
    else:
        value = holder.pop(path[-1])
        if what == "n" and isinstance(holder, dict):
            holder[NASTY] = value
    done = {"r": new[:40], "d": "removed", "n": "renamed"}[what]
    return f"{'.'.join(map(str, path))} = {done}", line(body, new)


def line(body: object, value: str = "null") -> bytes:
    """As a line of JSON, with this value in the place of PLACE."""
    return json.dumps(body, separators=(",", ":")).replace(json.dumps(PLACE), value).encode()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value, short lists and tables as a whole and in parts."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _paths(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value[:6]):
            yield from _paths(item, (*path, index))

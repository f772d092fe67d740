"""Values and lines that no reader of a record or a message expects."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

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

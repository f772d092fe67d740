"""What a profiler capture says of the model: a tree of modules, lines, operators and loops; and what has changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ndd_engine.record.events import KernelsEvent
from ndd_engine.text import MISSING, finite, number, percent, size, times

from .blocks import Table, ns, safe

# Rows of lines, operators and loops.
_TOP, _FEW = 12, 5
_BETWEEN = "(between the operators)"
_MODULES = (
    "In the fastest of the steps. Forward and backward are sums of the kernels or operators, with those of the modules "
    "inside. Backward is assigned by autograd's sequence numbers. Modules of equal blocks are one row (*). Returned: "
    "what the operators return in forward, which is what backward may keep."
)
_LINES = "Sums of the kernels or operators that a line of your own code launches, directly or in a library."
_OPERATIONS = (
    "Equal operators of a module at a line, with the shapes of what they are given. The median is of forward."
)
_LOOPS = "Loops of your own code in the forward pass."
# Changes of a module from one run to another that are shown: nanoseconds of a step, and their factor.
_LEAST_NS, _LEAST_RATIO = 50_000.0, 1.15


def work_tables(kernels: KernelsEvent, at: str) -> list[Table]:
    """at: "profiler capture at step 120"."""
    return [table for table in (_tree(kernels, at), _lines(kernels, at), _operations(kernels, at), _loops(kernels, at))
            if table.rows]  # fmt: skip


@dataclass
class _Node:
    """A module, or a part of the names of several. figures: forward, backward, returned bytes, parameters' bytes."""

    kind: str = ""
    calls: float = 0.0
    figures: list[float] = field(default_factory=lambda: [0.0] * 4)
    inside: dict[str, _Node] = field(default_factory=dict)

    @property
    def ns(self) -> float:
        return self.figures[0] + self.figures[1]


def _figures(row: Sequence[Any]) -> list[float]:
    """Forward, backward, returned bytes and parameters' bytes of a row of modules."""
    return [finite(value) or 0.0 for value in (row[2], row[3], row[5], row[6])]


def _tree(kernels: KernelsEvent, at: str) -> Table:
    root = _Node()
    for row in kernels.modules:
        figures, node = _figures(row), root
        parts = [row[0]] if row[1] in ("", row[0]) else row[0].split(".")
        for part in ("", *parts):
            node = node.inside.setdefault(part, _Node()) if part else root
            node.figures = [old + new for old, new in zip(node.figures, figures, strict=True)]
        node.kind, node.calls = row[1], finite(row[4]) or 0.0
    rows = [*_branches(kernels, root, 0)]
    left = [
        max(kernels.passes.get(name, 0) - root.figures[place], 0.0)
        for place, name in enumerate(("forward", "backward"))
    ]
    if rows and kernels.method == "operators" and sum(left):
        rows.append(_row(kernels, (*left, 0.0, 0.0), 0.0, _BETWEEN))
    columns = ("share", "forward", "backward", "calls", "returned", "parameters", "module")
    heading = f"Forward and backward by module in the {at}"
    return Table(heading, columns if rows else (), tuple(rows), frozenset(range(6)), _MODULES, wide=6)


def _branches(kernels: KernelsEvent, node: _Node, depth: int) -> Iterator[tuple[str, ...]]:
    for name, inner in sorted(node.inside.items(), key=lambda item: -item[1].ns):
        kind = f" ({inner.kind})" if inner.kind not in ("", name) else ""
        if inner.kind == name and not inner.inside and len(node.inside) > 1:
            kind = " (by itself)"  # a model whose modules have rows of their own
        yield _row(kernels, inner.figures, inner.calls, f"{'· ' * depth}{name}{kind}")
        yield from _branches(kernels, inner, depth + 1)


def _row(kernels: KernelsEvent, figures: Sequence[float], calls: float, name: str) -> tuple[str, ...]:
    forward, backward, returned, parameters = figures
    share = percent((forward + backward) / max(kernels.model_ns, 1))
    sizes = (size(int(value)) if value else "" for value in (returned, parameters))
    count = number(calls) if calls else ""
    return share, ns(forward), ns(backward), count, *sizes, safe(name)


def _lines(kernels: KernelsEvent, at: str) -> Table:
    rows = []
    for file, line, name, *figures in kernels.lines[:_TOP]:
        forward, backward, calls = (finite(value) or 0.0 for value in figures)
        share = percent((forward + backward) / max(kernels.model_ns, 1))
        where = safe(f"{file}:{line} in {name}")
        rows.append((share, ns(forward), ns(backward), number(calls), where))
    columns = ("share", "forward", "backward", "operators", "line")
    heading = f"Forward and backward by line in the {at}"
    return Table(heading, columns, tuple(rows), frozenset(range(4)), _LINES, wide=4)


def _operations(kernels: KernelsEvent, at: str) -> Table:
    rows = []
    for (
        name,
        shapes,
        kind,
        detail,
        file,
        line,
        _,
        module,
        _,
        forward,
        backward,
        calls,
        middle,
    ) in kernels.operations[:_TOP]:
        share = percent(((finite(forward) or 0.0) + (finite(backward) or 0.0)) / max(kernels.model_ns, 1))
        about = ", ".join(part for part in (shapes, kind, detail) if part)
        where = f"{file.rpartition('/')[2]}:{line}" if line else ""
        rows.append((
            share, ns(finite(forward) or 0.0), ns(finite(backward) or 0.0), number(calls),
            ns(finite(middle)), safe(f"{name}({about})"), safe(" ".join(part for part in (module, where) if part)),
        ))  # fmt: skip
    columns = ("share", "forward", "backward", "calls", "median", "operator", "module, line")
    heading = f"Operators of the model in the {at}"
    return Table(heading, columns, tuple(rows), frozenset(range(5)), _OPERATIONS, wide=5)


def _loops(kernels: KernelsEvent, at: str) -> Table:
    wall = max(kernels.model_ns, 1)
    rows = []
    for file, line, name, steps, runs, forward, backward, operators, middle, *_ in kernels.loops[:_FEW]:
        spent = (finite(forward) or 0.0) + (finite(backward) or 0.0)
        turns = max(steps * runs, 1)
        rows.append((
            percent(spent / wall), number(steps), ns(spent / turns), number(operators / turns), ns(finite(middle)),
            safe(f"{file}:{line} in {name}"),
        ))  # fmt: skip
    columns = ("share", "iterations", "time of one", "operators in it", "median operator", "loop")
    return Table(f"Loops in the {at}", columns, tuple(rows), frozenset(range(5)), _LOOPS, wide=5)


def changed_modules(a: KernelsEvent | None, b: KernelsEvent | None) -> Table | None:
    """Modules whose forward and backward take another time in the captures of two runs; None without both captures."""
    if a is None or b is None or not a.modules or not b.modules:
        return None
    sides = [{(row[0], row[1]): sum(_figures(row)[:2]) for row in one.modules} for one in (a, b)]
    rows = []
    for key in {**sides[0], **sides[1]}:
        before, after = (side.get(key) for side in sides)
        first, second = before or 0.0, after or 0.0
        low, high = sorted((first, second))
        if high - low >= _LEAST_NS and high >= _LEAST_RATIO * low:
            name = key[0] if key[1] in ("", key[0]) else f"{key[0]} ({key[1]})"
            ratio = times(second / first) if first and second else MISSING
            rows.append((high - low, (safe(name), *(ns(value) for value in (before, after)), ratio)))
    rows.sort(key=lambda row: -row[0])
    note = "In the fastest step of the newest profiler capture of each run; without the modules inside."
    columns = ("module", "A", "B", "B / A")
    return Table("Modules that take another time", columns, tuple(row for _, row in rows[:_TOP]),
                 frozenset({1, 2, 3}), note, wide=0)  # fmt: skip

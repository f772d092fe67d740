"""Steps at other sizes than the traced ones: sizes grow linearly, and loops are repeated. Does not import torch.

A step that loops over time has thousands of operations. It is traced with 3 and with 4 steps of the loop; what the
second trace has more is one step, which is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any, Generic, NamedTuple, TypeVar

from ndd_engine.hardware.kernels import Op, Shape

from .estimate import FREED, Trace, common_start

Item = TypeVar("Item")
# Steps of a loop in the two traces.
LENGTHS = (3, 4)


@dataclass(frozen=True)
class Sized(Generic[Item]):
    """How items are compared and sized. key: what has to be equal; sizes: what may grow; at: an item with new sizes."""

    key: Callable[[Item], Any]
    sizes: Callable[[Item], tuple[int, ...]]
    at: Callable[[Item, Iterator[int]], Item]


def scaled(
    first: Sequence[Item], second: Sequence[Item], at: tuple[int, int], size: int, how: Sized[Item]
) -> list[Item]:
    """The items at `size` from those at the two sizes `at`. Raises ValueError if they are not the same items."""
    if list(map(how.key, first)) != list(map(how.key, second)):
        raise ValueError(f"the operations at {at[0]} and {at[1]} differ")
    known: dict[tuple[int, int], Item] = {}
    found = []
    for one, other in zip(first, second, strict=True):
        item = known.get((id(one), id(other)))
        if item is None:
            pairs = zip(how.sizes(one), how.sizes(other), strict=True)
            item = how.at(one, iter([_on_line(*pair, at, size) for pair in pairs]))
            known[id(one), id(other)] = item
        found.append(item)
    return found


def repeated(
    short: Sequence[Item],
    longer: Sequence[Item],
    at: tuple[int, int],
    length: int,
    how: Sized[Item],
    like: Sequence[Item] | None = None,
) -> list[Item]:
    """The items of a loop of `length` steps from those of loops of `at` steps.

    like: those of the longer loop with other sizes, such as of a larger batch; the result then has these. Raises
    ValueError if `like` differs from `longer` in more than sizes.
    """
    if like is not None and list(map(how.key, like)) != list(map(how.key, longer)):
        raise ValueError("the operations of two micro-batches differ")
    lines: dict[tuple[Any, tuple[int, ...]], tuple[int, ...]] = {}
    blocks = list(_blocks([how.key(item) for item in short], [how.key(item) for item in longer]))
    for (begin, end), (start, _) in blocks:
        for place in range(begin, end):
            before, after = how.sizes(short[place]), how.sizes(longer[start + place - begin])
            grown = tuple(_on_line(*pair, at, length) for pair in zip(before, after, strict=True))
            lines.setdefault((how.key(longer[start + place - begin]), after), grown)
    found: list[Item] = []
    extra = round((length - at[1]) / (at[1] - at[0]))
    for (begin, end), (start, stop) in blocks:
        block = [
            _grown(longer[place], lines, how, None if like is None else like[place])
            for place in range(start, stop)
        ]
        found += block if begin != end or start == stop else block * (1 + extra)
    return found


def _grown(
    item: Item, lines: dict[tuple[Any, tuple[int, ...]], tuple[int, ...]], how: Sized[Item], like: Item | None
) -> Item:
    before = how.sizes(item)
    after = lines.get((how.key(item), before), before)
    if like is not None:
        ratios = zip(after, before, how.sizes(like), strict=True)
        after = tuple(round(size * other / now) if now else size for size, now, other in ratios)
    return how.at(item, iter(after))


def _on_line(first: int, second: int, at: tuple[int, int], size: int) -> int:
    if first == second:
        return first
    return max(round(first + (second - first) / (at[1] - at[0]) * (size - at[0])), 0)


def _blocks(first: list[Any], second: list[Any]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Parts of both that are equal, and in between parts of the second alone, as ((0, 0), its place)."""
    head = common_start(first, second)
    tail = common_start(first[head:][::-1], second[head:][::-1])
    yield (0, head), (0, head)
    inner = first[head : len(first) - tail], second[head : len(second) - tail]
    for _, begin, end, start, stop in SequenceMatcher(None, *inner, autojunk=False).get_opcodes():
        alike = end - begin == stop - start and inner[0][begin:end] == inner[1][start:stop]
        places = (head + begin, head + end) if alike else (0, 0)
        yield places, (head + start, head + stop)
    yield (len(first) - tail, len(first)), (len(second) - tail, len(second))


# Operations.


def _op_key(op: Op) -> tuple[Any, ...]:
    return op.phase, op.name, len(_op_sizes(op)), op.out is None


def _op_sizes(op: Op) -> tuple[int, ...]:
    return (*(size for arg in op.args for size in _sizes(arg)), *(op.out or ()))


def _sizes(arg: Any) -> Iterator[int]:
    if isinstance(arg, Shape):
        yield from arg.dims
    elif _alike(arg):
        yield len(arg)  # a list may have an entry for each step
        yield from arg[0].dims
    elif isinstance(arg, tuple):
        for part in arg:
            yield from _sizes(part)


def _op_at(op: Op, sizes: Iterator[int]) -> Op:
    args = tuple(_arg_at(arg, sizes) for arg in op.args)
    return op._replace(args=args, out=op.out if op.out is None else tuple(sizes))


def _arg_at(arg: Any, sizes: Iterator[int]) -> Any:
    if isinstance(arg, Shape):
        return arg._replace(dims=tuple(next(sizes) for _ in arg.dims))
    if _alike(arg):
        count = next(sizes)
        return (arg[0]._replace(dims=tuple(next(sizes) for _ in arg[0].dims)),) * count
    if isinstance(arg, tuple):
        return tuple(_arg_at(part, sizes) for part in arg)
    return arg


def _alike(arg: Any) -> bool:
    return (
        isinstance(arg, tuple)
        and not isinstance(arg, Shape)
        and len(arg) > 1
        and all(isinstance(part, Shape) and part == arg[0] for part in arg)
    )


OPS = Sized(_op_key, _op_sizes, _op_at)


# Allocations.


class _Event(NamedTuple):
    label: str
    freed: bool
    size: int


_EVENTS = Sized[_Event](
    lambda event: (event.label, event.freed),
    lambda event: (event.size,),
    lambda event, sizes: event._replace(size=next(sizes)),
)


def repeated_traces(
    short: Trace, longer: Trace, at: tuple[int, int], length: int, like: Trace
) -> tuple[Trace, Trace]:
    """As `repeated`, of the allocations of a step; the second trace has sizes as in `like`.

    Both have the same allocations in the same order. Which of several of the same operator and size is freed does not
    matter: the newest is. Raises ValueError if the marks differ, or `like` in more than sizes.
    """
    names = sorted(longer.marks, key=lambda name: longer.marks[name])
    if not set(names) == set(short.marks) == set(like.marks):
        raise ValueError("the marks of the traces differ")
    events: tuple[list[tuple[int, int]], ...] = ([], [])
    labels: list[str] = []
    marks: dict[str, int] = {}
    live: dict[tuple[str, int, int], list[int]] = {}
    parts = (_between(trace, names) for trace in (short, longer, like))
    for few, more, others, name in zip(*parts, [*names, ""], strict=True):
        firsts = repeated(few, more, at, length, _EVENTS)
        seconds = repeated(few, more, at, length, _EVENTS, others)
        for first, second in zip(firsts, seconds, strict=True):
            kept = live.setdefault((first.label, first.size, second.size), [])
            if not first.freed:
                kept.append(len(labels))
                for each, size in zip(events, (first.size, second.size), strict=True):
                    each.append((len(labels), size))
                labels.append(first.label)
            elif kept:
                key = kept.pop()
                for each in events:
                    each.append((key, FREED))
        if name:
            marks[name] = len(events[0])
    one, other = (
        replace(longer, events=tuple(each), labels=tuple(labels), marks=marks, streams=()) for each in events
    )
    return one, other


def _between(trace: Trace, names: Sequence[str]) -> Iterator[list[_Event]]:
    """The events up to each mark, and after the last."""
    labels, sizes = trace.all_labels(), trace.sizes()
    begin = 0
    for end in (*(trace.marks[name] for name in names), len(trace.events)):
        yield [_Event(labels[key], size < 0, sizes[key]) for key, size in trace.events[begin:end]]
        begin = end

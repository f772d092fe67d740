"""What the model does in a profiler capture: by module, by the line of the user's code, and by operator with shapes.

An operator of forward and the node of backward that belongs to it have the same autograd sequence number: so all work
of backward has its origin in forward, where a module and a line were running. On a GPU, a kernel belongs to the
operator that launched it. Loops of the user's code, calls of a module with the same input as before, and gradients that
nothing uses are told with what they take.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from statistics import median
from typing import Any

from ndd_engine.record.event import LineTime, Loop, ModuleTime, Operation, Repeat, Unused
from ndd_engine.record.profile_events import ModelWork
from ndd_engine.text import printable
from ndd_watch.mapped import CALL_AGAIN, CALL_ENDS, FUNCTION_BEGINS, FUNCTION_ENDS, LINE_BEGINS

from .timeline import Span, TraceEvent, gaps, is_transfer, launches, on_gpu, operators, total, union

# Rows of modules and lines, of operators, and of all else.
TOP, TOP_OPERATORS, FEW = 16, 32, 8
# Instead of the index of a module or a line; and the one of all that are not among the longest.
OTHER, IN_LOSS = -1, -2
REST = "(other modules)"
ELSEWHERE = {OTHER: "(outside of modules)", IN_LOSS: "(loss)"}
# Phases whose operators belong to forward or backward.
PASSES = frozenset({"forward", "loss", "backward"})
# An operator that is shorter takes hardly more than its launch.
SMALL_NS = 20_000
# Runs of a line in one call of its function from which on it is a loop.
LEAST_RUNS = 8
_NODE = "autograd::engine::evaluate_function"
_ACCUMULATES = "AccumulateGrad"
_TEXT = 160  # characters kept of the shapes of an operator
# Nodes of backward, which receive gradients of the size of what their operator has returned; and those of operators
# that return a part of what they are given, or all of it, in another shape.
_DIFFERENTIATES = re.compile(r"Backward\d+$")
_VIEWS = re.compile(
    r"(Unsafe)?(View|T|Transpose|Permute|Expand|Unsqueeze|Squeeze|Slice|Select|Split|Chunk|Alias|AsStrided|Unbind)"
)
_BYTES = {
    "float": 4,
    "double": 8,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "long int": 8,
    "c10::complex<float>": 8,
}
# What draws numbers: the same input does not have the same output.
_RANDOM = ("dropout", "bernoulli", "rand", "multinomial", "normal_", "uniform_")
_ATTENTION, _MATH = "aten::scaled_dot_product_attention", "aten::_scaled_dot_product_attention_math"
_CONVOLUTIONS = ("aten::conv2d", "aten::convolution")

Mark = tuple[int, int]  # nanoseconds, index of the module or line that is innermost from then on
# Nanoseconds, index of the module that is innermost from then on, that of the line that calls it, and CALL_ENDS,
# CALL_BEGINS or CALL_AGAIN.
Call = tuple[int, int, int, int]
Line = tuple[str, int, str]  # file, line, function
# Nanoseconds, index of the line, and what it is: LINE_BEGINS and so on.
Trail = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Watched:
    """What was noted while the model ran, with times on the profiler's clock.

    names: (name, class) of each module. sizes: bytes of its own parameters. lines, calls, trail: see above; without a
    trail, the lines are those that call modules. thread: the profiler's id of the training thread. unused: indices of
    modules whose gradients no optimizer uses.
    """

    names: Sequence[tuple[str, str]]
    calls: Sequence[Call]
    thread: int
    lines: Sequence[Line] = ()
    trail: Sequence[Trail] = ()
    sizes: Sequence[int] = ()
    unused: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Work:
    """An operator of the host, or a kernel. origin: when it was launched in forward; 0 if that is unknown."""

    ns: int
    origin: int
    backward: bool
    module: int
    line: int


class _Marks:
    """What is innermost at any time."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self._marks, self._times = marks, [time for time, _ in marks]

    def at(self, time: int) -> tuple[int, int]:
        """(index, since when)."""
        place = bisect_right(self._times, time) - 1
        return (self._marks[place][1], self._times[place]) if place >= 0 else (OTHER, 0)


class _Phases:
    """The phase at any time, without what is behind a slash; "" outside."""

    def __init__(self, phases: Sequence[Span]) -> None:
        self.spans, self._begins = phases, [low for low, _, _ in phases]

    def at(self, time: int) -> str:
        place = bisect_right(self._begins, time) - 1
        inside = place >= 0 and time < self.spans[place][1]
        return self.spans[place][2].partition("/")[0] if inside else ""

    def of(self, *names: str) -> list[tuple[int, int]]:
        """(begin, end) of these."""
        return [(low, high) for low, high, name in self.spans if name.partition("/")[0] in names]


def model_work(
    seen: Sequence[TraceEvent],
    watched: Watched,
    phases: Sequence[Span],
    gpu: bool,
    device: int | None = None,
) -> ModelWork:
    """What operators, or kernels on GPU number `device`, that begin in `phases` (spans without gaps) belong to."""
    reader = _Reader(seen, watched, _Phases(phases), gpu, device)
    return ModelWork(
        reader.modules(), reader.line_times(), reader.operations(), reader.loops(), reader.repeats(),
        reader.unused(), reader.passes(), phases[-1][1] - phases[0][0] if phases else 0, *reader.small(),
    )  # fmt: skip


class _Reader:
    """Of one capture."""

    def __init__(
        self, seen: Sequence[TraceEvent], watched: Watched, phases: _Phases, gpu: bool, device: int | None
    ) -> None:
        self._seen, self._watched, self._phases, self._gpu = seen, watched, phases, gpu
        self._modules = _Marks([(time, index) for time, index, _, _ in watched.calls])
        self._frames = _Frames(watched.trail)
        trail = self._frames.marks if watched.trail else [(time, line) for time, _, line, _ in watched.calls]
        self._lines = _Marks(trail)
        self._origins = _Origins(seen, self._modules, watched.thread, phases.at)
        self._operators = operators(seen)
        forward = [
            item
            for item in self._operators
            if item.thread == watched.thread and phases.at(item.begin) in PASSES - {"backward"}
        ]
        self._forward, self._begins = forward, [item.begin for item in forward]
        on_host = ((item.end - item.begin, item.thread, item.begin) for item in self._operators)
        self._work = [
            self._of(ns, *self._origins.of(thread, time))
            for ns, thread, time in (_gpu_work(seen, device) if gpu else on_host)
            if phases.at(time) in PASSES
        ]
        backward = sorted((one.origin, one.ns) for one in self._work if one.backward and one.origin)
        self._back_times = [time for time, _ in backward]
        self._back_sums = [0, *accumulate(ns for _, ns in backward)]

    def _of(self, ns: int, origin: int, backward: bool) -> _Work:
        module, line = (self._modules.at(origin)[0], self._lines.at(origin)[0]) if origin else (OTHER, OTHER)
        if module < 0 and self._phases.at(origin) == "loss":
            module = IN_LOSS
        return _Work(ns, origin, backward, module, line)

    def modules(self) -> list[ModuleTime]:
        """The longest ones, and all others as one row."""
        spent: Counter[tuple[str, str, bool]] = Counter()
        for one in self._work:
            spent[*self._name(one.module), one.backward] += one.ns
        calls = Counter(
            self._name(index)
            for time, index, _, what in self._watched.calls
            if what != CALL_ENDS and index >= 0 and self._phases.at(time) in PASSES
        )
        made: Counter[tuple[str, str]] = Counter()
        for item in self._seen:
            differentiates = (
                not item.on_gpu and _DIFFERENTIATES.search(item.name) and self._phases.at(item.begin)
            )
            if differentiates and not _VIEWS.match(item.name):
                origin = self._origins.of(item.thread, item.begin)[0]
                made[self._name(self._of(0, origin, True).module)] += _bytes_of(item)
        sizes: Counter[tuple[str, str]] = Counter()
        for owner, own in zip(self._watched.names, self._watched.sizes, strict=False):
            sizes[owner] += own
        totals: Counter[tuple[str, str]] = Counter()
        for (name, kind, _), ns in spent.items():
            totals[name, kind] += ns
        ranked = [key for key in sorted(totals, key=lambda key: (-totals[key], key)) if totals[key] > 0]

        def row(name: str, kind: str, keys: Sequence[tuple[str, str]]) -> ModuleTime:
            forward, backward = (sum(spent[*key, back] for key in keys) for back in (False, True))
            count, memory, size = (sum(each[key] for key in keys) for each in (calls, made, sizes))
            return name, kind, forward, backward, count, memory, size

        found = [row(*key, [key]) for key in ranked[:TOP]]
        return [*found, row(REST, "", ranked[TOP:])] if ranked[TOP:] else found

    def _name(self, index: int) -> tuple[str, str]:
        return self._watched.names[index] if index >= 0 else (ELSEWHERE[index], "")

    def line_times(self) -> list[LineTime]:
        """The longest ones, with the number of operators that each has launched in forward."""
        forward: Counter[int] = Counter()
        backward: Counter[int] = Counter()
        for one in self._work:
            (backward if one.backward else forward)[one.line] += one.ns
        counts = Counter(self._lines.at(item.begin)[0] for item in self._forward)
        indices = [index for index in {*forward, *backward} if index >= 0]
        indices.sort(key=lambda index: (-forward[index] - backward[index], index))
        return [
            (*self._place(index), forward[index], backward[index], counts[index]) for index in indices[:TOP]
        ]

    def _place(self, index: int) -> Line:
        if index < 0:
            return "", 0, ""
        file, line, function = self._watched.lines[index]
        return printable(file), line, printable(function)

    def operations(self) -> list[Operation]:
        """The longest ones: equal operators of one module at one line."""
        times: dict[tuple[Any, ...], list[int]] = {}
        spent: Counter[tuple[tuple[Any, ...], bool]] = Counter()
        attention = _within(self._seen)
        keys = []
        for item in self._forward:
            module, line = self._modules.at(item.begin)[0], self._lines.at(item.begin)[0]
            if module < 0 and self._phases.at(item.begin) == "loss":
                module = IN_LOSS
            name = item.name.removeprefix("aten::")
            key = name, *_given(item, attention), *self._place(line), *self._name(module)
            keys.append(key)
            times.setdefault(key, []).append(item.end - item.begin)
        for one in self._work:
            place = bisect_right(self._begins, one.origin) - 1
            if place >= 0 and one.origin < self._forward[place].end:
                spent[keys[place], one.backward] += one.ns
        longest = sorted(times, key=lambda key: -spent[key, False] - spent[key, True])[:TOP_OPERATORS]
        return [
            (*key, spent[key, False], spent[key, True], len(times[key]), round(median(times[key])))
            for key in longest
            if spent[key, False] + spent[key, True] > 0
        ]

    def _backward_of(self, begin: int, end: int) -> int:
        """Nanoseconds of backward that belong to what ran in forward between these times."""
        low, high = bisect_left(self._back_times, begin), bisect_left(self._back_times, end)
        return self._back_sums[high] - self._back_sums[low]

    def _forward_in(self, begin: int, end: int) -> list[TraceEvent]:
        return self._forward[bisect_left(self._begins, begin) : bisect_left(self._begins, end)]

    def loops(self) -> list[Loop]:
        """Loops of the user's code in forward and loss, the longest first."""
        calls = [
            (time, index) for time, index, _, what in self._watched.calls if what != CALL_ENDS and index >= 0
        ]
        begun = [time for time, _ in calls]
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for line, steps, begin, end in self._frames.loops:
            if self._phases.at(begin) in ("forward", "loss"):
                found.setdefault((line, steps), []).append((begin, end))
        rows: list[Loop] = []
        for (line, steps), windows in found.items():
            items = [item for window in windows for item in self._forward_in(*window)]
            if not items:
                continue
            inside = [
                index
                for begin, end in windows
                for _, index in calls[bisect_left(begun, begin) : bisect_left(begun, end)]
            ]
            rows.append((
                *self._place(line), steps, len(windows), sum(end - begin for begin, end in windows),
                sum(self._backward_of(*window) for window in windows), len(items),
                round(median(item.end - item.begin for item in items)), len(inside), len({*inside}),
                *self._name(self._most(items)),
            ))  # fmt: skip
        return sorted(rows, key=lambda row: -row[5] - row[6])[:FEW]

    def _most(self, items: Sequence[TraceEvent]) -> int:
        """The module that takes most of operators of forward."""
        spent: Counter[int] = Counter()
        for item in items:
            spent[self._modules.at(item.begin)[0]] += item.end - item.begin
        return spent.most_common(1)[0][0]

    def repeats(self) -> list[Repeat]:
        """Calls of modules with the same input as before, that draw no random numbers, the longest first."""
        random = sorted(
            item.begin
            for item in self._seen
            if not item.on_gpu and any(word in item.name for word in _RANDOM)
        )
        found: dict[tuple[Any, ...], list[int]] = {}
        running: list[tuple[int, int, int, int]] = []
        for time, module, line, what in self._watched.calls:
            if what != CALL_ENDS:
                running.append((time, module, line, what))
                continue
            if not running:
                continue
            begin, called, at, kind = running.pop()
            while running and running[-1][1] != module:  # they ended with an exception
                running.pop()
            drawn = bisect_left(random, begin) < bisect_left(random, time)
            if kind == CALL_AGAIN and called >= 0 and not drawn and self._phases.at(begin) in PASSES:
                row = found.setdefault((*self._name(called), *self._place(at)), [0, 0, 0])
                for place, value in enumerate((1, time - begin, self._backward_of(begin, time))):
                    row[place] += value
        rows: list[Repeat] = [(*key, *values) for key, values in found.items()]
        return sorted(rows, key=lambda row: -row[6] - row[7])[:FEW]

    def unused(self) -> list[Unused]:
        """Modules whose gradients no optimizer uses, with the time of their backward."""
        wanted = {*self._watched.unused}
        spent: Counter[tuple[str, str]] = Counter()
        for one in self._work:
            if one.backward and one.module in wanted:
                spent[self._name(one.module)] += one.ns
        return [(*key, ns) for key, ns in spent.most_common(FEW)]

    def passes(self) -> dict[str, int]:
        """Nanoseconds of forward (with the loss) and backward: of their phases, or of their kernels."""
        if self._gpu:
            return {
                name: sum(one.ns for one in self._work if one.backward == back)
                for name, back in (("forward", False), ("backward", True))
            }
        spans = {"forward": self._phases.of("forward", "loss"), "backward": self._phases.of("backward")}
        return {name: sum(high - low for low, high in found) for name, found in spans.items()}

    def small(self) -> tuple[int, int, int]:
        """(operators of forward and backward; nanoseconds of small ones and of what is between all; their median)."""
        inside = [item for item in self._operators if self._phases.at(item.begin) in PASSES]
        large = [(item.begin, item.end) for item in inside if item.end - item.begin >= SMALL_NS]
        free = 0
        for low, high in self._phases.of(*PASSES):
            free += total(gaps(union(large, low, high), low, high))
        return len(inside), free, round(median(item.end - item.begin for item in inside)) if inside else 0


class _Frames:
    """The functions of the user that ran. marks: (time, line). loops: (line, steps, begin, end)."""

    def __init__(self, trail: Sequence[Trail]) -> None:
        self.marks: list[Mark] = []
        self.loops: list[tuple[int, int, int, int]] = []
        # Of each function that runs: the times of its lines.
        open_ones: list[list[Mark]] = [[]]
        for time, line, what in trail:
            if what == LINE_BEGINS:
                open_ones[-1].append((time, line))
                self.marks.append((time, line))
            elif what == FUNCTION_BEGINS:
                open_ones.append([])
            elif what == FUNCTION_ENDS:
                self._ended(open_ones.pop(), time)
                if not open_ones:
                    open_ones.append([])  # it had begun before
                self.marks.append((time, open_ones[-1][-1][1] if open_ones[-1] else OTHER))
            else:
                self.marks.append((time, OTHER))
                open_ones = [[]]

    def _ended(self, ran: Sequence[Mark], end: int) -> None:
        if len(ran) < LEAST_RUNS:
            return
        counts = Counter(line for _, line in ran)
        until = 0
        for place, (time, line) in enumerate(ran):
            if time < until or counts[line] < LEAST_RUNS:
                continue
            last = max(at for at, (_, other) in enumerate(ran) if other == line)
            until = ran[last + 1][0] if last + 1 < len(ran) else end
            # The first line of a loop runs once more than the others, at its end.
            inside = {other for _, other in ran[place:last] if other != line}
            steps = max(
                (counts[other] for other in inside if counts[other] <= counts[line]), default=counts[line]
            )
            self.loops.append((line, steps, time, until))


class _Nodes:
    """The nodes of backward that run in one thread, as marks: (time, origin or None) of the innermost one."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, int | None]] = [(-1, None)]
        self.last: int | None = None  # the origin of the newest node
        self._running: list[tuple[int, int]] = []  # (end, origin), the outermost first

    def until(self, time: int) -> None:
        """All nodes that end by then have ended."""
        while self._running and self._running[-1][0] <= time:
            end, _ = self._running.pop()
            self.marks.append((end, self._running[-1][1] if self._running else None))

    def add(self, begin: int, end: int, origin: int) -> None:
        """Nodes are added in the order of their begins."""
        self._running.append((end, origin))
        self.marks.append((begin, origin))
        self.last = origin

    def at(self, time: int) -> tuple[int, int | None]:
        """(since when, origin of the innermost node then)."""
        return self.marks[bisect_right(self.marks, time, key=lambda mark: mark[0]) - 1]


class _Origins:
    """When in forward an operator has its origin, by its thread and time."""

    def __init__(
        self, seen: Iterable[TraceEvent], modules: _Marks, thread: int, phase_at: Callable[[int], str]
    ) -> None:
        self._modules, self._thread, self._phase_at = modules, thread, phase_at
        self._nodes: dict[int, _Nodes] = {}
        made: dict[tuple[int, int], int] = {}
        host = [
            item for item in seen if not item.on_gpu and (item.sequence >= 0 or item.name.startswith(_NODE))
        ]
        # In order of time, since operators within a node may create nodes themselves.
        for item in sorted(host, key=lambda item: (item.begin, -item.end)):
            nodes = self._nodes.setdefault(item.thread, _Nodes())
            nodes.until(item.begin)
            if not item.name.startswith(_NODE):
                if not item.forward_thread:
                    # The last operator with a number, and the innermost one, created the node.
                    made[item.thread, item.sequence] = self.of(item.thread, item.begin)[0]
            elif item.sequence >= 0:
                origin = made.get((item.forward_thread, item.sequence), 0)
                nodes.add(item.begin, item.end, origin)
            elif nodes.last is not None and _ACCUMULATES in item.name:
                # A gradient is added to its parameter right after the node that computed it.
                nodes.add(item.begin, item.end, nodes.last)
            else:
                nodes.add(item.begin, item.end, 0)
        for nodes in self._nodes.values():
            nodes.until(sys.maxsize)

    def of(self, thread: int, time: int) -> tuple[int, bool]:
        """(its time in forward, 0 if that is unknown; whether it is backward)."""
        backward = self._phase_at(time) == "backward"
        since, origin = self._node(thread, time, backward)
        if origin is not None:
            # Within backward a module runs only where activations are recomputed.
            module, entered = self._modules.at(time) if thread == self._thread else (OTHER, 0)
            return (time if module >= 0 and entered > since else origin), True
        return (time if thread == self._thread else 0), backward

    def _node(self, thread: int, time: int, anywhere: bool) -> tuple[int, int | None]:
        """(since when, origin of the node of backward that runs then). anywhere: in any thread if not in this one."""
        found = self._nodes[thread].at(time) if thread in self._nodes else (0, None)
        if found[1] is not None or not anywhere:
            return found
        others = (nodes.at(time) for other, nodes in self._nodes.items() if other != thread)
        return next((item for item in others if item[1] is not None), found)


def _gpu_work(seen: Sequence[TraceEvent], device: int | None) -> Iterable[tuple[int, int, int]]:
    """(nanoseconds, thread and time of the launch) of each kernel whose launch was recorded."""
    launched = launches(seen)
    for item in on_gpu(seen, device):
        launch = launched.get(item.correlation)
        if launch is not None and not is_transfer(item):
            yield item.end - item.begin, launch.thread, launch.begin


def _bytes_of(item: TraceEvent) -> int:
    """The bytes of the tensors that an operator is given."""
    given = item.given if isinstance(item.given, dict) else {}
    dims, types = given.get("Input Dims"), given.get("Input type")
    if not isinstance(dims, (list, tuple)) or not isinstance(types, (list, tuple)):
        return 0
    return sum(
        prod(shape) * _BYTES.get(str(kind), 4)
        for shape, kind in zip(dims, types, strict=False)
        if isinstance(shape, (list, tuple)) and shape and all(type(one) is int and one >= 0 for one in shape)
    )


def _within(seen: Iterable[TraceEvent]) -> list[int]:
    """When attention without a fused kernel begins."""
    return sorted(item.begin for item in seen if item.name == _MATH)


def _given(item: TraceEvent, math: Sequence[int]) -> tuple[str, str, str]:
    """(shapes of the tensors that an operator is given, type of the first one, what else is known)."""
    given = item.given if isinstance(item.given, dict) else {}
    lists = (given.get(name) for name in ("Input Dims", "Input type", "Concrete Inputs", "Input Strides"))
    dims, types, scalars, strides = ([*one] if isinstance(one, (list, tuple)) else [] for one in lists)
    shapes = ["x".join(map(str, one)) for one in dims if isinstance(one, (list, tuple)) and one]
    detail = ""
    if item.name == _ATTENTION and bisect_left(math, item.begin) < bisect_left(math, item.end):
        drops = str(scalars[4]) if len(scalars) > 4 else ""
        masked = len(dims) > 3 and bool(dims[3])
        detail = "math" + (", dropout" if drops not in ("", "0", "0.", "0.0") else "") + ", mask" * masked
    elif (
        item.name in _CONVOLUTIONS
        and strides
        and isinstance(strides[0], (list, tuple))
        and len(strides[0]) == 4
    ):
        detail = "channels last" if strides[0][1] == 1 else "channels first"
    kind = next((str(one) for one in types if one), "")
    return printable(", ".join(shapes))[:_TEXT], printable(kind)[:40], detail

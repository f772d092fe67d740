"""A profiler capture by module and line, and the event with all that it shows.

Hooks note when each module begins and ends, which attributes the operators of forward. An operator of forward and the
node of backward that belongs to it have the same autograd sequence number, which attributes backward. On a GPU, a
kernel belongs to the module whose operator launched it.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ndd_engine.record.event import LineTime, ModuleTime
from ndd_engine.record.events import KernelsEvent
from ndd_engine.text import printable
from ndd_watch.mapped import ANCHOR

from .timeline import Span, TraceEvent, is_transfer, launches, on_gpu, operators, spans, timeline

if TYPE_CHECKING:
    from torch import nn

TOP = 16
_NAME = 120  # characters kept of a module's name
_NODE = "autograd::engine::evaluate_function"
_ACCUMULATES = "AccumulateGrad"
# Phases whose operators belong to forward or backward.
_PASSES = frozenset({"forward", "loss", "backward"})
# Instead of the index of a module.
OTHER, IN_LOSS = -1, -2
# Classes of compiled and scripted modules.
COMPILED = frozenset({"OptimizedModule", "ScriptModule", "RecursiveScriptModule", "TopLevelTracedModule"})
ELSEWHERE = {OTHER: "(outside of modules)", IN_LOSS: "(loss)"}

Mark = tuple[int, int]  # nanoseconds, index of the module that is innermost from then on
# Nanoseconds, index of the module that is innermost from then on, that of the line that calls it, whether it begins.
Call = tuple[int, int, int, bool]
Line = tuple[str, int, str]  # file, line, function


def shown_names(names: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """(name, class) of modules; the model itself, which is "", has the name of its class.

    Modules at the same place in equal blocks have one name: "blocks.*.attention".
    """
    parents = {name.rpartition(".")[0] for name, _ in names}
    found = []
    for name, kind in names:
        parts = name.split(".") if name else []
        shown = [
            "*" if part.isdecimal() and ".".join(parts[: place + 1]) in parents else part
            for place, part in enumerate(parts)
        ]
        found.append((printable(".".join(shown))[:_NAME] or printable(kind), printable(kind)[:_NAME]))
    return found


def runs_compiled(model: nn.Module) -> bool:
    """Whether a part of the model is compiled or scripted: hooks would compile it again, or do nothing."""
    return any(
        type(module).__name__ in COMPILED or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


@dataclass(frozen=True, slots=True)
class ModuleMarks:
    """What a capture heard of modules, on the profiler's clock. thread: the profiler's id of the training thread."""

    names: Sequence[tuple[str, str]]
    marks: Sequence[Mark]
    calls: Sequence[Mark]
    thread: int


def module_times(
    seen: Sequence[TraceEvent],
    watched: ModuleMarks,
    phases: Sequence[Span],
    gpu: bool,
    device: int | None = None,
) -> list[ModuleTime]:
    """(name, class, forward nanoseconds, backward nanoseconds, calls) of the modules, the longest first.

    Times are sums of operators, or of kernels on GPU number `device`, that begin in `phases` (spans of the capture,
    without gaps); each belongs to its innermost module only. "(loss)" is the loss function.
    """
    begins = [low for low, _, _ in phases]

    def phase_at(time: int) -> str:
        place = bisect_right(begins, time) - 1
        inside = place >= 0 and time < phases[place][1]
        return phases[place][2].partition("/")[0] if inside else ""

    owners = _Owners(seen, watched, phase_at)
    spent: Counter[tuple[str, str, bool]] = Counter()
    for ns, thread, time in _gpu_work(seen, device) if gpu else _host_work(seen):
        if phase_at(time) in _PASSES:
            owner, backward = owners.at(thread, time)
            name, kind = watched.names[owner] if owner >= 0 else (ELSEWHERE[owner], "")
            spent[name, kind, backward] += ns
    calls = Counter(watched.names[index] for time, index in watched.calls if phase_at(time) in _PASSES)
    totals: Counter[tuple[str, str]] = Counter()
    for (name, kind, _), ns in spent.items():
        totals[name, kind] += ns
    longest = sorted(totals, key=lambda key: (-totals[key], key))[:TOP]
    return [(*key, spent[*key, False], spent[*key, True], calls[key]) for key in longest if totals[key] > 0]


def line_times(
    seen: Sequence[TraceEvent],
    watched: ModuleMarks,
    phases: Sequence[Span],
    gpu: bool,
    device: int | None = None,
) -> list[LineTime]:
    """The same by the lines that call modules, which are the names in `watched`: "file:line" and function."""
    found: list[LineTime] = []
    for place, function, forward, backward, calls in module_times(seen, watched, phases, gpu, device):
        file, colon, line = str(place).rpartition(":")
        if colon:
            found.append((file, int(line), function, forward, backward, calls))
    return found


class _Nodes:
    """The nodes of backward that run in one thread, as marks: (time, owner or None) of the innermost one."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, int | None]] = [(-1, None)]
        self.last: int | None = None  # the owner of the newest node
        self._running: list[tuple[int, int]] = []  # (end, owner), the outermost first

    def until(self, time: int) -> None:
        """All nodes that end by then have ended."""
        while self._running and self._running[-1][0] <= time:
            end, _ = self._running.pop()
            self.marks.append((end, self._running[-1][1] if self._running else None))

    def add(self, begin: int, end: int, owner: int) -> None:
        """Nodes are added in the order of their begins."""
        self._running.append((end, owner))
        self.marks.append((begin, owner))
        self.last = owner

    def at(self, time: int) -> tuple[int, int | None]:
        """(since when, owner of the innermost node then)."""
        return self.marks[bisect_right(self.marks, time, key=lambda mark: mark[0]) - 1]


class _Owners:
    """The module that an operator belongs to, by its thread and time."""

    def __init__(
        self, seen: Iterable[TraceEvent], watched: ModuleMarks, phase_at: Callable[[int], str]
    ) -> None:
        self._marks, self._thread, self._phase_at = watched.marks, watched.thread, phase_at
        self._times = [time for time, _ in watched.marks]
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
                    made[item.thread, item.sequence] = self.at(item.thread, item.begin)[0]
            elif item.sequence >= 0:
                owner = made.get((item.forward_thread, item.sequence), OTHER)
                nodes.add(item.begin, item.end, owner)
            elif nodes.last is not None and _ACCUMULATES in item.name:
                # A gradient is added to its parameter right after the node that computed it.
                nodes.add(item.begin, item.end, nodes.last)
            else:
                nodes.add(item.begin, item.end, OTHER)
        for nodes in self._nodes.values():
            nodes.until(sys.maxsize)

    def at(self, thread: int, time: int) -> tuple[int, bool]:
        """(index of the module, or IN_LOSS or OTHER; whether it is backward)."""
        phase = self._phase_at(time)
        since, owner = self._node(thread, time, phase == "backward")
        marked, entered = self._mark(time) if thread == self._thread else (OTHER, 0)
        if owner is not None:
            # Within backward a module runs only where activations are recomputed.
            return (marked if marked >= 0 and entered > since else owner), True
        if marked < 0 and phase == "loss":
            marked = IN_LOSS
        return marked, phase == "backward"

    def _mark(self, time: int) -> tuple[int, int]:
        """(index of the innermost module then, since when)."""
        place = bisect_right(self._times, time) - 1
        return (self._marks[place][1], self._times[place]) if place >= 0 else (OTHER, 0)

    def _node(self, thread: int, time: int, anywhere: bool) -> tuple[int, int | None]:
        """(since when, owner of the node of backward that runs then). anywhere: in any thread if not in this one."""
        found = self._nodes[thread].at(time) if thread in self._nodes else (0, None)
        if found[1] is not None or not anywhere:
            return found
        others = (nodes.at(time) for other, nodes in self._nodes.items() if other != thread)
        return next((item for item in others if item[1] is not None), found)


def _host_work(seen: Sequence[TraceEvent]) -> Iterable[tuple[int, int, int]]:
    """(nanoseconds, thread, begin) of each top-level operator."""
    return ((item.end - item.begin, item.thread, item.begin) for item in operators(seen))


def _gpu_work(seen: Sequence[TraceEvent], device: int | None) -> Iterable[tuple[int, int, int]]:
    """(nanoseconds, thread and time of the launch) of each kernel whose launch was recorded."""
    launched = launches(seen)
    for item in on_gpu(seen, device):
        launch = launched.get(item.correlation)
        if launch is not None and not is_transfer(item):
            yield item.end - item.begin, launch.thread, launch.begin


@dataclass(frozen=True)
class Noted:
    """What a process noted; times are nanoseconds on its clock.

    begin, end: of the steps. anchors: right before each of the ranges with that name. marks: (time, phase that begins).
    device: index of the GPU, None without one. names: (name, class) of the modules. calls: of modules; [] if they are
    compiled.
    """

    begin: int
    end: int
    anchors: Sequence[int]
    marks: Sequence[tuple[int, str]]
    device: int | None
    names: Sequence[tuple[str, str]] = ()
    lines: Sequence[Line] = ()
    calls: Sequence[Call] = field(default=())

    @staticmethod
    def of(found: Mapping[str, Any]) -> Noted:
        """What `ndd_watch.captures` has noted. Raises KeyError, TypeError or ValueError for anything else."""
        names = [(str(name), str(kind)) for name, kind in found["modules"]]
        compiled = bool(found["compiled"]) or any(kind in COMPILED for _, kind in names)
        calls = [(int(t), int(module), int(line), bool(begins)) for t, module, line, begins in found["calls"]]
        device = found["device"]
        return Noted(
            int(found["begin"]), int(found["end"]), [int(t) for t in found["anchors"]],
            [(int(t), str(name)) for t, name in found["marks"]],
            None if device is None else int(device), shown_names(names),
            [(str(file), int(at), str(name)) for file, at, name in found["lines"]],
            [] if compiled else calls,
        )  # fmt: skip


def captured(seen: Sequence[TraceEvent], noted: Noted, step: int, steps: int) -> KernelsEvent:
    """What was recorded in `steps` steps, after `step` optimizer steps.

    Raises ValueError if the profiler recorded nothing, RuntimeError if its clock cannot be aligned with the other one.
    """
    gpu, device = noted.device is not None, noted.device or 0
    anchors = [item for item in seen if item.name == ANCHOR and not item.on_gpu]
    offset = _offset(anchors, noted.anchors)
    begin, end = noted.begin + offset, noted.end + offset
    marks = [(time + offset, name) for time, name in noted.marks]
    found = timeline(seen, marks, begin, end, gpu, device)
    modules: list[ModuleTime] = []
    lines: list[LineTime] = []
    if noted.calls:
        phases, thread = spans(marks, begin, end), anchors[0].thread
        calls = [(time + offset, module, line, begins) for time, module, line, begins in noted.calls]
        by_module = _marks(noted.names, [(call[0], call[1], call[3]) for call in calls], thread)
        places = [(f"{printable(file)}:{line}", printable(name)) for file, line, name in noted.lines]
        by_line = _marks(places, [(call[0], call[2], call[3]) for call in calls], thread)
        modules = module_times(seen, by_module, phases, gpu, device)
        lines = line_times(seen, by_line, phases, gpu, device)
    method = "kernels" if gpu else "operators"
    return KernelsEvent(method=method, step=step, steps=steps, modules=modules, lines=lines, **asdict(found))


def _marks(
    names: Sequence[tuple[str, str]], calls: Sequence[tuple[int, int, bool]], thread: int
) -> ModuleMarks:
    begun: list[Mark] = [(time, index) for time, index, begins in calls if begins and index >= 0]
    return ModuleMarks(names, [(time, index) for time, index, _ in calls], begun, thread)


def _offset(anchors: Sequence[TraceEvent], times: Sequence[int]) -> int:
    """How far the profiler's clock is ahead of the other one, in nanoseconds."""
    begins = sorted(item.begin for item in anchors)
    if not begins or len(begins) != len(times):
        raise RuntimeError(f"only {len(begins)} of {len(times)} ranges for aligning the clocks were kept")
    # A range always begins after its clock reading, so the smallest difference is the closest.
    return min(begin - time for begin, time in zip(begins, times, strict=True))

"""A profiler capture of a model: what is noted meanwhile, and the event with all that it shows.

Hooks note when each module begins and ends, and `Lines` which line of the user's code runs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ndd_engine.record.events import KernelsEvent
from ndd_engine.text import printable
from ndd_watch.lines import Lines
from ndd_watch.looks import own_frame
from ndd_watch.mapped import ANCHOR, CALL_BEGINS, CALL_ENDS

from .model_work import OTHER, Call, Line, ModelWork, Trail, Watched, model_work
from .timeline import TraceEvent, spans, timeline

if TYPE_CHECKING:
    from torch import nn

_NAME = 120  # characters kept of a module's name
# Classes of compiled and scripted modules.
COMPILED = frozenset({"OptimizedModule", "ScriptModule", "RecursiveScriptModule", "TopLevelTracedModule"})


class ModuleWatch:
    """Notes when the modules of a model begin and end, in the thread that calls `start`.

    own: whether a code object is the user's own. names: (name, class) of each module. calls: in order of time, by `now`
    (nanoseconds). lines: their indices in it. sizes: bytes of the own parameters of each module.
    """

    def __init__(self, model: nn.Module, now: Callable[[], int], own: Callable[[Any], bool]) -> None:
        self.names = module_names(model)
        self.sizes = [
            sum(one.numel() * one.element_size() for one in module.parameters(recurse=False))
            for module in model.modules()
        ]
        self._trail = Lines()
        self.calls: list[Call] = []
        self.lines: dict[Line, int] = {}
        self._model, self._now, self._own = model, now, own
        self._within: list[tuple[int, int]] = []
        self._thread = 0
        self._hooks: list[Any] = []

    def start(self) -> None:
        """Attach the hooks. They change nothing about the computation."""
        self._thread = threading.get_ident()
        for index, module in enumerate(self._model.modules()):
            self._hooks.append(module.register_forward_pre_hook(self._before(index)))
            self._hooks.append(module.register_forward_hook(self._after(index)))
        self._trail.begin(ours=True)

    @property
    def trail(self) -> list[Trail]:
        """The lines that ran so far, which are forgotten; by `ndd_watch.clock.now`."""
        return self._trail.take(self.lines)

    def stop(self) -> None:
        """Remove the hooks; safe to call twice."""
        self._trail.end()
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def _before(self, index: int) -> Callable[..., None]:
        def enter(_module: nn.Module, _inputs: object) -> None:
            # With activation checkpointing, modules also run in threads of backward.
            if threading.get_ident() == self._thread:
                if not index:
                    self._within.clear()  # what recomputes activations leaves modules by an exception
                line = self._line(sys._getframe(1))
                self._within.append((index, line))
                self.calls.append((self._now(), index, line, CALL_BEGINS))

        return enter

    def _after(self, index: int) -> Callable[..., None]:
        def leave(_module: nn.Module, _inputs: object, _output: object) -> None:
            if threading.get_ident() != self._thread or all(index != inner for inner, _ in self._within):
                return
            # Modules that ended with an exception are still in the list.
            while self._within.pop()[0] != index:
                pass
            self.calls.append(
                (self._now(), *(self._within[-1] if self._within else (OTHER, OTHER)), CALL_ENDS)
            )

        return leave

    def _line(self, frame: Any) -> int:
        """The index of the innermost line of the user's own code."""
        found = own_frame(frame, self._own)
        if found is None:
            return OTHER
        place = found.f_code.co_filename, found.f_lineno, found.f_code.co_qualname
        return self.lines.setdefault(place, len(self.lines))


def module_names(model: nn.Module) -> list[tuple[str, str]]:
    """(name, class) of each module in the order of `model.modules()`, as `shown_names` has them."""
    return shown_names([(name, type(module).__name__) for name, module in model.named_modules()])


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


@dataclass(frozen=True)
class Noted:
    """What a process noted; times are nanoseconds on its clock.

    begin, end: of the steps. ends: of each of them, [] if that is unknown. anchors: right before each of the ranges
    with that name. marks: (time, phase that begins).
    device: index of the GPU, None without one. names, lines, calls, trail, sizes, unused: see `Watched`; calls is [] if
    the modules are compiled.
    """

    begin: int
    end: int
    anchors: Sequence[int]
    marks: Sequence[tuple[int, str]]
    device: int | None
    names: Sequence[tuple[str, str]] = ()
    lines: Sequence[Line] = ()
    calls: Sequence[Call] = field(default=())
    trail: Sequence[Trail] = ()
    sizes: Sequence[int] = ()
    unused: Sequence[int] = ()
    ends: Sequence[int] = ()


def captured(
    seen: Sequence[TraceEvent],
    noted: Noted,
    step: int,
    steps: int,
) -> KernelsEvent:
    """What was recorded in `steps` steps, after `step` optimizer steps.

    Raises ValueError if the profiler recorded nothing, RuntimeError if its clock cannot be aligned with the other one.
    """
    gpu, device = noted.device is not None, noted.device or 0
    anchors = [item for item in seen if item.name == ANCHOR and not item.on_gpu]
    offset = _offset(anchors, noted.anchors)
    begin, end = noted.begin + offset, noted.end + offset
    marks = [(time + offset, name) for time, name in noted.marks]
    found = timeline(seen, marks, begin, end, gpu, device)
    work = ModelWork()
    if noted.calls:
        watched = Watched(
            noted.names, [(time + offset, *rest) for time, *rest in noted.calls], anchors[0].thread,  # type: ignore[misc]
            noted.lines, [(time + offset, line, what) for time, line, what in noted.trail], noted.sizes,
            noted.unused,
        )  # fmt: skip
        # The fastest step is the one that other processes have disturbed least.
        edges = [begin, *(time + offset for time in noted.ends)] if noted.ends else [begin, end]
        low, high = min(pairwise(edges), key=lambda edge: edge[1] - edge[0])
        work = model_work(seen, watched, spans(_with_loss(marks), low, high), gpu, device)
    shown = {name: getattr(work, name) for name in work.__dataclass_fields__}
    method = "kernels" if gpu else "operators"
    return KernelsEvent(method=method, step=step, steps=steps, **asdict(found), **shown)


def _with_loss(marks: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """What a script computes between the model and backward is its loss, although no module tells where it begins."""
    found = list(marks)
    for place in range(1, len(found) - 1):
        before, (time, name), after = found[place - 1], found[place], found[place + 1]
        if name == "other" and before[1].partition("/")[0] in ("forward", "loss") and after[1] == "backward":
            found[place] = time, "loss"
    return found


def _offset(anchors: Sequence[TraceEvent], times: Sequence[int]) -> int:
    """How far the profiler's clock is ahead of the other one, in nanoseconds."""
    begins = sorted(item.begin for item in anchors)
    if not begins or len(begins) != len(times):
        raise RuntimeError(f"only {len(begins)} of {len(times)} ranges for aligning the clocks were kept")
    # A range always begins after its clock reading, so the smallest difference is the closest.
    return min(begin - time for begin, time in zip(begins, times, strict=True))

"""A profiler capture of a model: what was noted meanwhile, and the event with all that it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ndd_engine.hardware.gpus import GpuProfile
from ndd_engine.record.profile_events import KernelsEvent, ModelWork
from ndd_engine.text import printable
from ndd_watch.mapped import ANCHOR

from .model_work import Call, Line, Trail, Watched, model_work
from .timeline import TraceEvent, spans, timeline

if TYPE_CHECKING:
    from torch import nn

_NAME = 120  # characters kept of a module's name
# Classes of compiled and scripted modules.
COMPILED = frozenset({"OptimizedModule", "ScriptModule", "RecursiveScriptModule", "TopLevelTracedModule"})


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

    @staticmethod
    def of(found: Mapping[str, Any]) -> Noted:
        """What `ndd_watch.captures` has noted. Raises KeyError, TypeError or ValueError for anything else."""
        names = [(str(name), str(kind)) for name, kind, _ in found["modules"]]
        compiled = bool(found["compiled"]) or any(kind in COMPILED for _, kind in names)
        calls = [(int(t), int(module), int(line), int(what)) for t, module, line, what in found["calls"]]
        device = found["device"]
        return Noted(
            int(found["begin"]), int(found["end"]), [int(t) for t in found["anchors"]],
            [(int(t), str(name)) for t, name in found["marks"]],
            None if device is None else int(device), shown_names(names),
            [(str(file), int(at), str(name)) for file, at, name in found["lines"]],
            [] if compiled else calls, [(int(t), int(line), int(what)) for t, line, what in found["trail"]],
            [int(size) for *_, size in found["modules"]], [int(index) for index in found["unused"]],
            [int(t) for t in found["ends"]],
        )  # fmt: skip


def captured(
    seen: Sequence[TraceEvent],
    noted: Noted,
    step: int,
    steps: int,
    profile: GpuProfile | None = None,
) -> KernelsEvent:
    """What was recorded in `steps` steps, after `step` optimizer steps. profile: of the GPU, None if there is none.

    Raises ValueError if the profiler recorded nothing, RuntimeError if its clock cannot be aligned with the other one.
    """
    gpu, device = noted.device is not None, noted.device or 0
    anchors = [item for item in seen if item.name == ANCHOR and not item.on_gpu]
    offset = _offset(anchors, noted.anchors)
    begin, end = noted.begin + offset, noted.end + offset
    marks = [(time + offset, name) for time, name in noted.marks]
    found = timeline(seen, marks, begin, end, gpu, device, profile)
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
    method = "kernels" if gpu else "operators"
    return KernelsEvent(method=method, step=step, steps=steps, **vars(found), **vars(work))


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

"""Events of what was looked at more closely: profiler captures, stacks and the functions of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .event import (
    Call,
    Count,
    Event,
    Figure,
    Flag,
    Frame,
    Function,
    Kernel,
    LineTime,
    Loop,
    ModuleTime,
    Operation,
    Repeat,
    Table,
    Unused,
    Wait,
)


@dataclass(frozen=True)
class CaptureTimeline:
    """Times of a capture, see KernelsEvent. busy_ns and the values of idle_ns add up to wall_ns exactly."""

    wall_ns: Count
    busy_ns: Count
    copy_ns: Count
    idle_ns: dict[str, Count]
    launches: Count
    top: list[Kernel] = field(default_factory=list)
    collective_ns: Count = 0
    exposed_ns: Count = 0
    convolution_ns: Count = 0
    exposed_copies_ns: dict[str, Count] = field(default_factory=dict)
    queued: list[Kernel] = field(default_factory=list)
    waits: list[Kernel] = field(default_factory=list)
    after_waits_ns: Count = 0
    products_ns: dict[str, Count] = field(default_factory=dict)
    estimated_ns: dict[str, Count] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelWork:
    """What the modules, lines and operators of a model take in a capture, see KernelsEvent."""

    modules: list[ModuleTime] = field(default_factory=list)
    lines: list[LineTime] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    repeats: list[Repeat] = field(default_factory=list)
    unused: list[Unused] = field(default_factory=list)
    passes: dict[str, Count] = field(default_factory=dict)
    model_ns: Count = 0
    small: Count = 0
    small_ns: Count = 0
    median_ns: Count = 0


@dataclass(frozen=True, kw_only=True)
class KernelsEvent(ModelWork, CaptureTimeline, Event):
    """A profiler capture of a few whole steps.

    method: "kernels" (kernels and copies on the GPU) or "operators" (operators on the CPU, without a GPU). step:
    optimizer steps done at its end. steps: optimizer steps captured. wall_ns: duration. busy_ns: time with at least
    one kernel or copy running. copy_ns: time with a copy from or to another memory running. idle_ns: cause -> idle
    nanoseconds; busy_ns and all causes add up to wall_ns. launches: number of kernels or top-level operators. top: the
    longest kernels or operators, [name, total nanoseconds, count] each. trace: path of the exported Chrome trace, or
    null. collective_ns: time with a collective (NCCL) running, part of busy_ns; exposed_ns: the part of it without any
    other kernel running. convolution_ns: total duration of the convolution kernels. exposed_copies_ns: kind ->
    nanoseconds in which copies or fills run without any kernel, each instant once. The kinds are "host to GPU", "pinned
    host to GPU", "GPU to host", "GPU to pinned host", "GPU to GPU", "other copy", "within the GPU" and "fill".
    queued: what is between kernels that had been launched in time, [kind, idle
    nanoseconds, gaps] each; the kinds are "short" (below 10 us), "another stream", "one stream", "CUDA graph" and
    "before a CUDA graph". waits: what waits for the GPU on the host, [call, idle nanoseconds inside, calls] each.
    after_waits_ns: part of the launch gaps that follows such a wait and is no longer than it.
    products_ns: total duration of the kernels that multiply fp32 matrices: by "fp32", or "tf32" on tensor cores.
    estimated_ns: total duration of all "kernels"; of those whose operators have shapes, "measured" and as it is
    estimated for this GPU: "usual", and its range "low" to "high". {} without a profile of the GPU.
    """

    type: ClassVar[str] = "kernels"
    method: str
    step: Count
    steps: Count
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class StacksEvent(Event):
    """Stack samples of the training thread of an observed script since the previous one.

    step: optimizer steps done. looks: number of stack samples. frames: [phase, file, line, function, samples, own]
    each, the most frequent first. The phase is "?" if it is not known: in a step that was timed as a whole, at a line
    that was seen in no other step. The frame is the innermost one outside of torch, the standard library and this
    package (own 1), or the innermost one of a library if there is none (own 0).
    """

    type: ClassVar[str] = "stacks"
    step: Count
    looks: Count
    frames: list[Frame]


@dataclass(frozen=True, slots=True)
class FunctionsEvent(Event):
    """The functions of the user's own code in one step under Python's profiler, which sees every call.

    step: optimizer steps done. wall_ns: of the profiled step, which is slower than the others and is part of no
    statistics. functions: [file, line, name, calls, ns, own_ns, caller, phase] each, the longest first. Here, ns
    includes everything that the function calls, and own_ns leaves out torch and other functions of the user's own code.
    The caller is the one of these that calls it, or "". The phase is that of most of its time, or "" if it is unknown.
    waits: [file, line, name, method, calls, ns] of what waits for the device, such as item and float, by the
    function that calls them. phases: nanoseconds of this step by phase. Up to Python 3.11, pure Python takes longer
    under the profiler: compare a function with its phase in this event, not with usual steps. calls: [file, line, name,
    function, library, calls, ns, phase] of what lines of the user's code call in libraries. Its time leaves the user's
    own functions out, and in a step it is part of own_ns unless the library is torch. inside: "evaluate" or
    "checkpoint" if this is (the end of) one of these instead of a step; calls then name functions inside libraries.
    sizes: the highest numbers of what may grow, by kind and name, such as "hooks:block.3". There are "parameters:SGD"
    and "state:SGD" of an optimizer, and "handlers:root" of a logger. The number of "graph:" is how many steps back the
    graph of the loss reaches, at least. Those of "read:" and "written:" are bytes that the step moved through files and
    pipes.
    tables: [name, class, rows, columns, indices, share, optimizer] of embeddings of which this step reads few
    rows, while their gradients have values for all of them. Indices are those that it reads, and share is the part of
    all values that the optimizers update. denormals: share of denormal numbers in "parameters", "gradients" or a state
    of optimizers, and how many times as long the processor takes for them, where that is slow. anomaly: whether anomaly
    detection of autograd is on. retains: file and line of the backward pass of a step of one's own that keeps its graph
    without need, once that is known; of a script, its configuration says both.
    """

    type: ClassVar[str] = "functions"
    step: Count
    wall_ns: Count
    functions: list[Function]
    waits: list[Wait] = field(default_factory=list)
    phases: dict[str, Count] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    inside: str = ""
    sizes: dict[str, Count] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    anomaly: Flag = False
    retains: tuple[str, Count] | None = None
    denormals: dict[str, tuple[Figure, Figure]] = field(default_factory=dict)

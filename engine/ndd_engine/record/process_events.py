"""Events about the processes of a run: one stands still, has died, opens more and more files, or keeps what grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .event import Count, Event, Figure, Flag, ShapeCount

# Kinds of stalls that are over, and those that are no hang as far as is known: the process computes, or waits for a
# person, on purpose or for ranks that may compute.
OVER = "over"
NO_HANGS = ("computing", "input", "sleep", "stopped", "ranks")


@dataclass(frozen=True, slots=True)
class StallEvent(Event):
    """No process of the run has made progress for a while, or does so again.

    step: optimizer steps done. seconds: without progress. kind: "threads" (forked after threads were started), "lock",
    "queue", "dead" (of a process that another one waits for), "collective", "storage" or "waits" (anything else); none
    of a hang: "stopped", "input", "sleep", "ranks" and "computing"; or "over". text: which process waits for what.
    advice: what to change, or "". where: the line of the user's code that waits, or "". processes: what each process
    does, one line each.
    """

    type: ClassVar[str] = "stall"
    step: Count
    seconds: Figure
    kind: str
    text: str
    advice: str = ""
    where: str = ""
    processes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DeathEvent(Event):
    """A process that the training process has started, such as a loader worker, has died.

    step: optimizer steps done. pid: of the process. name: "loader worker 1". how: "SIGKILL", "status 3" or "" if it is
    not known. resident_bytes: its memory when it was seen last. shm_free_bytes: free in /dev/shm afterwards. oom_kills:
    by how much the kernel's out-of-memory counter of the control group rose meanwhile, null without a counter.
    """

    type: ClassVar[str] = "death"
    step: Count
    pid: Count
    name: str
    how: str
    resident_bytes: Count | None = None
    shm_free_bytes: Count | None = None
    oom_kills: Count | None = None


@dataclass(frozen=True, slots=True)
class DescriptorsEvent(Event):
    """Open descriptors of the process that trains; recorded as their number changes.

    step: optimizer steps done. open: number of descriptors. limit: the most that it may have, null if it is not known.
    kinds: of the newest ones, "shared memory", "socket", "pipe" or "file" -> number. path: what the newest files have
    in common, with N for digits that differ, or "". where: the line of the script that keeps them, as far as its source
    tells, or "".
    """

    type: ClassVar[str] = "descriptors"
    step: Count
    open: Count
    limit: Count | None = None
    kinds: dict[str, Count] = field(default_factory=dict)
    path: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class Holder:
    """A container, or a tensor, that has grown between two looks at what a process keeps.

    type: "list", "tensor". length, grown: elements, and those since the earlier look. bytes: of the latter, estimated
    from the newest ones, without their autograd graphs; graphs: whether they have some. holds: the newest element,
    "tensor 4 x 512". kind, name, owner: who refers to it, as far as that is known. A "global" is a variable of the
    module `file`. A "local", "closure", "default" or "cache" belongs to the function `owner`, which begins at
    file:line. An "attribute" belongs to an object of the class `owner`, and a "class" to the class itself. limit: the
    most elements that it can have, null without one. at: file and line where it grows, if the source shows that.
    """

    type: str
    length: Count
    grown: Count
    bytes: Count
    holds: str
    graphs: Flag
    kind: str = ""
    name: str = ""
    owner: str = ""
    file: str = ""
    line: Count = 0
    limit: Count | None = None
    at: tuple[str, Count] | None = None


@dataclass(frozen=True, slots=True)
class HoldersEvent(Event):
    """A look at what the process that trains keeps, when its memory grows.

    step: optimizer steps done. steps: since the look before it, which it is compared with; 0 for the first. ns: what
    it took. holders: what has grown, the most bytes first. tensors: [shape, number, bytes] of the live ones. inside:
    "evaluate" for a look within an evaluation, of which `steps` then counts batches. grown_bytes: by what memory in use
    has grown since the look before it; null if that is not measured. gradients: whether autograd was on within the
    evaluation.
    """

    type: ClassVar[str] = "holders"
    step: Count
    steps: Count
    ns: Count
    holders: list[Holder]
    tensors: list[ShapeCount] = field(default_factory=list)
    inside: str = ""
    grown_bytes: Count | None = None
    gradients: Flag = False

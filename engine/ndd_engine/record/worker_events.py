"""The event about the workers of a loader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .event import Count, Event, Figure, Flag

# File, first line and name of a function of the user's own, and its calls. Then the part of a batch's time that it
# takes, with and without other such functions that it calls; and by kind what the former is spent with.
WorkerFunction = tuple[str, Count, str, Count, Figure, Figure, dict[str, Figure]]
# Kinds, besides that it computes.
WAITS = ("storage", "lock", "connection", "sleeps", "device", "waits")


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker, or all that had its place, where each pass over the data starts new ones.

    number: from 0. pid: of the newest. starts: workers that had this place. batches, items: made so far. batch_ns,
    cpu_ns: mean time of a batch until it is handed over, and processor time of it. item_ns: of an item, the median, and
    the 90th and 99th percentiles. collate_ns: of a batch, null where items are read together. pickle_ns, send_ns: of a
    batch, pickling and sharing it, and writing it to the pipe; blocked_ns: waiting for another worker that writes.
    idle_ns: before each batch, waiting until one is wanted. batch_bytes: of the tensors of a batch. start_ns: from its
    begin until it could take a batch; first_ns: the first batch. slow: [ns, index] of the slowest items. pss_bytes,
    private_bytes, descriptors: of the newest; faults, read_bytes: pages that were touched first, and bytes from
    storage, by batch; late: the part of its time in which it was ready, and had no processor; null if not known. doing:
    what it makes now, if that takes long.
    """

    number: Count
    pid: Count
    starts: Count
    batches: Count
    items: Count
    batch_ns: Figure
    cpu_ns: Figure
    item_ns: tuple[Figure, Figure, Figure]
    collate_ns: Figure | None = None
    pickle_ns: Figure = 0.0
    blocked_ns: Figure = 0.0
    send_ns: Figure = 0.0
    idle_ns: Figure = 0.0
    batch_bytes: Figure = 0.0
    start_ns: Figure = 0.0
    first_ns: Figure = 0.0
    slow: list[tuple[Count, str]] = field(default_factory=list)
    pss_bytes: Count | None = None
    private_bytes: Count | None = None
    descriptors: Count | None = None
    faults: Figure | None = None
    read_bytes: Figure | None = None
    late: Figure | None = None
    doing: str = ""

    @property
    def idle(self) -> float:
        """The part of its time in which it waits until a batch is wanted."""
        return self.idle_ns / max(self.idle_ns + self.batch_ns, 1.0)


@dataclass(frozen=True, slots=True)
class WorkersEvent(Event):
    """The workers of the loader that the training reads, so far; seen from inside them.

    step: optimizer steps done. workers: by their numbers. profiles: batches that were profiled. functions: [file, line,
    name, calls, share, whole share, {kind: share}] of the user's own functions in them, the largest share first. A
    share is a part of the time of a batch, without other functions of the list that the function calls; the whole share
    has these. Kinds are "computes", "touches" (memory for the first time), "collects" (garbage), "pickle", "storage",
    "lock", "connection", "sleeps", "device", and "waits" for anything else.
    transforms: [name, whole share] of callables in lists of transforms. batch_quantiles_ns: of the times of batches, at
    equal distances. stream: the dataset has no index.
    """

    type: ClassVar[str] = "workers"
    step: Count
    workers: list[WorkerFigures]
    profiles: Count = 0
    functions: list[WorkerFunction] = field(default_factory=list)
    transforms: list[tuple[str, Figure]] = field(default_factory=list)
    batch_quantiles_ns: list[Figure] = field(default_factory=list)
    stream: Flag = False

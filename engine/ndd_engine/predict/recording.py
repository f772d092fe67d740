"""Records the allocations of real training steps: with torch.profiler on the CPU, with the memory history on a GPU.

A recording contains two steps with one micro-batch (the first creates the optimizer state) and one step with two.
Gradient accumulation needs the same memory for any number of micro-batches above one, so the marks "one" and "many"
cover all of them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ndd_engine.measure.clock import PhaseClock
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Batch

from .memory import MANY, ONE
from .trace import DATA, DATA_END, FREED, Trace

STEPS_OF_ONE = 2
_MARK = "ndd/mark/"
# Operators that exchange between ranks; what they allocate is labelled with them.
EXCHANGE = "c10d::"
# Maximum entries of the GPU's memory history; a step has thousands.
_HISTORY = 4_000_000

Mark = Callable[[str], None]


def record(make: Callable[[], Stepper], batches: Iterator[Batch], device: torch.device) -> Trace:
    """The trace of creating a stepper and running its steps. Raises what they raise, including out of memory.

    make: called once. batches: endless, of the size to record. The parameters are part of the trace only on a GPU, as
    they are moved there; on the CPU they exist already.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()  # it would free reference cycles at unpredictable points
    try:
        run = _Steps(make, batches)
        return _of_gpu(run, device) if device.type == "cuda" else _of_host(run)
    finally:
        if enabled:
            gc.enable()


class _Steps:
    """The steps of a recording. Call it with a function that sets a mark."""

    def __init__(self, make: Callable[[], Stepper], batches: Iterator[Batch]) -> None:
        self._make, self._batches = make, batches
        self._made = 0

    def __call__(self, mark: Mark) -> None:
        stepper = self._make()
        config = stepper.config
        clock = PhaseClock()
        counts = [1] * STEPS_OF_ONE + [2]
        try:
            for index, count in enumerate(counts):
                if count > 1:
                    mark(ONE)
                batch = config.batch.model_copy(update={"accumulation": count})
                stepper.config = config.model_copy(update={"batch": batch})
                stepper.eager_step(self._marked(mark), clock, index)
        finally:
            stepper.config = config
        mark(MANY)

    def _marked(self, mark: Mark) -> Iterator[Batch]:
        """The batches, with marks before and after each is created."""
        while True:
            self._made += 1
            mark(f"{DATA}{self._made}")
            batch = next(self._batches)
            mark(f"{DATA_END}{self._made}")
            yield batch


def _of_host(run: Callable[[Mark], None]) -> Trace:
    # Kineto writes to the terminal directly, where its messages cannot be captured.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:

        def mark(name: str) -> None:
            with record_function(_MARK + name):
                pass

        run(mark)
    results = profiler.profiler.kineto_results
    return _in_order(_nodes(results.experimental_event_tree()))


def _nodes(roots: list[Any]) -> list[tuple[int, str, int, int]]:
    """(nanoseconds, label, address, bytes) by time. bytes > 0: allocation, < 0: free, 0: mark."""
    found = []
    stack = [(node, "") for node in reversed(roots)]
    while stack:
        node, label = stack.pop()
        fields = node.extra_fields
        if hasattr(fields, "alloc_size"):
            if fields.device.type == "cpu":
                found.append((node.start_time_ns, label, int(fields.ptr), int(fields.alloc_size)))
            continue
        name = str(node.name)
        if name.startswith(_MARK):
            found.append((node.start_time_ns, name.removeprefix(_MARK), 0, 0))
        inner = label if label.startswith(EXCHANGE) else name
        stack += [(child, inner) for child in reversed(node.children)]
    return sorted(found, key=lambda item: item[0])


def _in_order(nodes: list[tuple[int, str, int, int]]) -> Trace:
    events: list[tuple[int, int]] = []
    labels: list[str] = []
    marks: dict[str, int] = {}
    live: dict[int, int] = {}
    for _, label, address, amount in nodes:
        if amount > 0:
            if (key := live.pop(address, None)) is not None:
                events.append((key, FREED))  # by a thread that is not recorded
            live[address] = len(labels)
            events.append((len(labels), amount))
            labels.append(label)
        elif amount < 0:
            if (key := live.pop(address, None)) is not None:
                events.append((key, FREED))
        elif not address:
            marks[label] = len(events)
    return Trace(tuple(events), tuple(labels), marks)


def _of_gpu(run: Callable[[Mark], None], device: torch.device) -> Trace:
    memory = torch.cuda.memory
    marks: dict[str, int] = {}

    def entries() -> list[dict[str, Any]]:
        torch.cuda.synchronize(device)
        found: list[dict[str, Any]] = memory._snapshot()["device_traces"][device.index or 0]
        return found

    def mark(name: str) -> None:
        marks[name] = len(entries())

    torch.cuda.synchronize(device)
    memory._record_memory_history("all", context=None, max_entries=_HISTORY)
    try:
        run(mark)
        history = entries()
    finally:
        memory._record_memory_history(None)
    # Marks come before the entry at their place.
    nodes = [(place, name, 0, 0) for name, place in marks.items()]
    for place, entry in enumerate(history):
        if entry["action"] in ("alloc", "free_completed"):
            size = int(entry["size"]) if entry["action"] == "alloc" else -1
            nodes.append((place, "", int(entry["addr"]), size))
    return _in_order(sorted(nodes, key=lambda node: node[0]))

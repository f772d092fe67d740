"""Measures one configuration: traces of a step at three small micro-batches, a line through them, and step times.

Allocations are recorded with torch.profiler on the CPU, and with the memory history on a GPU.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count, cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import psutil
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import Subset

from ndd_engine.batches import tensors
from ndd_engine.config import Config
from ndd_engine.hardware.gpus import resident_peak
from ndd_engine.measure.memory import is_out_of_memory
from ndd_engine.text import counted, size
from ndd_engine.train.data.item_sources import ItemSource, StreamOrder, can_keep, gathers, kept_bytes
from ndd_engine.train.data.loader import Batches, EvalBatches, gathered
from ndd_engine.train.evaluate import check_metric
from ndd_engine.train.parallel.strategy import strategy_of
from ndd_engine.train.prepare import seed
from ndd_engine.train.rehearsal import ALONE, MOST_RUNS, SLOW_NS, probe_batches, time_micro
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Batch, Stream, Workload, item_count
from ndd_watch.clock import PhaseClock

from .allocator import KIB, Rules
from .estimate import (
    DATA,
    DATA_END,
    FREED,
    HOST_GRANULE,
    MANY,
    ONE,
    Family,
    ItemCounts,
    Memory,
    StepTime,
    TimedBatch,
    Trace,
    fit,
    merged,
    variation,
)
from .rank_memory import is_sharded, stepper_of_rank

STEPS_OF_ONE = 2
# Numbers of threads are compared in so many turns each, which take at least one micro-batch
# and about this long; after so many seconds, two turns are enough.
THREAD_TURNS, THREADS_NS, THREADS_S = 3, 300_000_000, 5.0
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

    numbers = count(1)

    def marked(mark: Mark) -> Iterator[Batch]:
        for number in numbers:
            mark(f"{DATA}{number}")
            batch = next(batches)
            mark(f"{DATA_END}{number}")
            yield batch

    def run(mark: Mark) -> None:
        stepper = make()
        config, clock = stepper.config, PhaseClock()
        counts = [1] * STEPS_OF_ONE + [2]
        try:
            for index, accumulation in enumerate(counts):
                if accumulation > 1:
                    mark(ONE)
                stepper.config = config.changed(batch={"accumulation": accumulation})
                stepper.eager_step(marked(mark), clock, index)
        finally:
            stepper.config = config
        mark(MANY)

    gc.collect()
    enabled = gc.isenabled()
    gc.disable()  # it would free reference cycles at unpredictable points
    try:
        return _of_gpu(run, device) if device.type == "cuda" else _of_host(run)
    finally:
        if enabled:
            gc.enable()


def _of_host(run: Callable[[Mark], None]) -> Trace:
    # Kineto writes to the terminal directly, where its messages cannot be captured.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:

        def mark(name: str) -> None:
            with record_function(_MARK + name):
                pass

        run(mark)
    results = profiler.profiler.kineto_results
    return in_order((*node, 0) for node in _nodes(results.experimental_event_tree()))


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


def in_order(nodes: Iterable[tuple[int, str, int, int, int]]) -> Trace:
    """The trace of (time, label, address, bytes, stream) by time. bytes > 0: allocation, < 0: free, 0: mark."""
    streams: list[int] = []
    events: list[tuple[int, int]] = []
    labels: list[str] = []
    marks: dict[str, int] = {}
    live: dict[int, int] = {}
    for _, label, address, amount, stream in nodes:
        if amount > 0:
            if (key := live.pop(address, None)) is not None:
                events.append((key, FREED))  # by a thread that is not recorded
            live[address] = len(labels)
            events.append((len(labels), amount))
            labels.append(label)
            streams.append(stream)
        elif amount < 0:
            if (key := live.pop(address, None)) is not None:
                events.append((key, FREED))
        elif not address:
            marks[label] = len(events)
    return Trace(tuple(events), tuple(labels), marks, tuple(streams) if any(streams) else ())


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
    nodes = [(place, name, 0, 0, 0) for name, place in marks.items()]
    for place, entry in enumerate(history):
        if entry["action"] in ("alloc", "free_completed"):
            size = int(entry["size"]) if entry["action"] == "alloc" else -1
            nodes.append((place, "", int(entry["addr"]), size, int(entry.get("stream", 0))))
    return in_order(sorted(nodes, key=lambda node: node[0]))


# Seconds after which no larger micro-batch is recorded.
RECORD_S = 3.0
# Maximum difference between a third recording and the line through two, as a share of the memory and in bytes.
LINEAR, LINEAR_BYTES = 0.01, 256 * KIB
UNCHECKED = "no recording at a third micro-batch confirms that memory grows linearly with it"


def alike(trace: Callable[[int], Trace], at: Sequence[int], limit_s: float | None = None) -> Family:
    """Fit the first two neighbouring sizes whose traces match, or the last two. A single size is used for all sizes.

    Libraries may select other kernels for very small batches. A recording at a third size must confirm the line: an
    earlier one, or the next; otherwise the next two are fitted. limit_s: of a recording, after which no larger one is
    tried. Raises what the first two recordings raise.
    """
    if len(at) == 1:
        only = trace(at[0])
        return fit(only, only, (at[0], at[0] + 1))
    recorded = [(at[0], trace(at[0]))]
    found = None
    for above in at[1:]:
        begin = time.perf_counter()
        try:
            large = trace(above)
        except RuntimeError as error:
            if found is None or not is_out_of_memory(error):
                raise
            break
        why = UNCHECKED
        if found is not None and found.aligned:
            why = departs(found, large, above)
            if not why:
                return replace(found, nonlinear="")
        below, small = recorded[-1]
        found = fit(small, large, (below, above))
        if found.aligned and any(not departs(found, other, micro) for micro, other in recorded[:-1]):
            return found
        found = replace(found, nonlinear=why)
        if time.perf_counter() - begin > (RECORD_S if limit_s is None else limit_s):
            break
        recorded.append((above, large))
    assert found is not None  # `at` has at least two sizes
    # With fewer than three sizes there is nothing left to predict.
    return found if len(at) > 2 else replace(found, nonlinear="")


def departs(family: Family, recorded: Trace, micro: int) -> str:
    """How far a recording at a third size is from the fitted line, in words, or "" if it confirms it."""
    fitted = family.trace(micro)
    for mark in (ONE, MANY):
        line, real = (trace.until(mark).peak(HOST_GRANULE) for trace in (fitted, recorded))
        if abs(line - real) > max(LINEAR * real, LINEAR_BYTES):
            return (
                f"the memory of a step does not grow linearly with the micro-batch: at {micro} it takes "
                f"{size(real)} instead of {size(line)}"
            )
    return ""


Tell = Callable[[str], None]
# Micro-batches to record until the traces of two neighbours match. Libraries select other kernels for smaller ones, and
# batch normalisation needs more than one item.
SIZES = (4, 8, 16, 32)
# Maximum relative error of a replay in the simulated allocator before the prediction has low confidence.
TOLERANCE = 0.02
# Limits of the search for the longest items, as items and seconds: reading an item may encode it.
LOOKED_AT = 4096
LOOK_S = 1.5
# Batches that are cached for timing if the loader caches items.
KEPT_BATCHES = 2
# Seconds to time one micro-batch, at least twice; only once if the first run takes longer than HOPELESS_S.
POINT_S = 0.5
HOPELESS_S = 4.0


class Prober:
    """Probes a configuration on its prepared workload. Its loader settings and batch size are ignored.

    With several ranks it predicts the memory of one of them, within `ranks.pretended`.
    """

    def __init__(self, config: Config, workload: Workload, device: torch.device, tell: Tell) -> None:
        self.config, self.workload, self.device = config, workload, device
        self.tell = tell
        # The latest recording on a GPU and its peak reserved bytes.
        self._seen: tuple[Trace, int] | None = None
        self.extremes, self._looked = extremes(workload)
        # On the host: by micro-batch, the most bytes that the process grew by while it was timed.
        self._grown: dict[int, int] = {}

    def warm(self) -> int:
        """Run one step, which loads the libraries that torch initialises lazily. Returns the resident bytes."""
        self.tell("running a test step")
        stepper = self._timed_stepper()
        batches = endless(self.workload, self.config, sizes(self.workload)[0])
        stepper.eager_step(batches, PhaseClock(), 0)
        del stepper
        _tidy()
        return resident()

    def check_metric(self) -> None:
        """Raise TrainingError if evaluations have no `evaluate.metric`, as a training does."""
        if self.config.evaluate.metric is not None:
            self.tell("evaluating a batch")
            workload = self.workload
            batches = EvalBatches(
                workload.eval_data, self.config, workload.collate, self.device, order=workload.eval_order
            )
            check_metric(self._timed_stepper(), batches)
            _tidy()

    def by_threads(self, other: int) -> tuple[list[float], list[float]]:
        """Seconds of a micro-batch with the present number of intra-op threads, and with `other`, in turns.

        Leaves torch with the present number. Both are empty if a micro-batch is too slow with both, or fails.
        """
        self.tell(f"timing {counted(other, 'thread')}")
        present, items = torch.get_num_threads(), item_count(self.workload.train_data)
        micro = self.config.batch.micro if items is None else min(self.config.batch.micro, items)
        found: tuple[list[float], list[float]] = ([], [])
        begin = time.perf_counter()
        try:
            stepper = self._timed_stepper()
            batch = next(endless(self.workload, self.config, micro))
            for turn in range(2 * THREAD_TURNS):
                torch.set_num_threads((present, other)[turn % 2])
                if turn < 2:
                    time_micro(stepper, batch)  # starts the threads
                spent, _ = time_micro(stepper, batch, MOST_RUNS, THREADS_NS)
                found[turn % 2].append(spent * 1e-9)
                if turn % 2 and min(each[-1] for each in found) * 1e9 > SLOW_NS:
                    return [], []
                if turn >= 3 and turn % 2 and time.perf_counter() - begin > THREADS_S:
                    break
            stepper.drop_gradients()
        except RuntimeError:  # such as out of memory: the probes choose smaller micro-batches
            return [], []
        finally:
            torch.set_num_threads(present)
            _tidy()
        return found

    def memory(self, outside_bytes: int, at: Sequence[int] = ()) -> Memory:
        """Predict memory from recordings at small micro-batches. Raises what a step raises.

        at: which; by default two that match, and a third one that confirms the line through them.
        """
        cuda = self.device.type == "cuda"
        source = f"steps recorded on this {'GPU' if cuda else 'CPU'}"
        rules = Rules.of_environment()
        family = alike(self.trace, at or sizes(self.workload))
        doubt = caveat(self.config) or self._unseen() or (self._self_check(rules) if cuda else "")
        return Memory(family, "gpu" if cuda else "host", outside_bytes, source, rules, doubt)

    def family(self) -> Family:
        """The traces of its steps for any batch size. Raises what a step raises."""
        return alike(self.trace, sizes(self.workload))

    def trace(self, micro: int) -> Trace:
        """The trace of steps with this micro-batch."""
        self.tell(f"recording allocations with micro-batch {micro}")
        seed(self.config.run.seed)
        # What earlier steps left must not be freed during the recording.
        self.workload.training.reset()
        if self.device.type == "cuda":
            self.workload.model.to("cpu")
            # Release all cached GPU memory, including cuBLAS workspaces, so that a recording starts at zero.
            torch.cuda.synchronize(self.device)
            getattr(torch._C, "_cuda_clearCublasWorkspaces", bool)()  # not in every build
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        config = self._plain()
        strategy = strategy_of(config, self.device, self.workload.training)
        found = record(
            lambda: stepper_of_rank(self.workload, config, self.device, strategy),
            longest_first(self.workload, self.config, micro, self.extremes),
            self.device,
        )
        if self.device.type == "cuda":
            self._seen = found, torch.cuda.max_memory_reserved(self.device)
        return found

    def _unseen(self) -> str:
        if self.workload.collate is not None and self.workload.epochs_differ:
            return "later epochs may contain longer items"
        items = item_count(self.workload.train_data)
        if items is None:
            return "" if self.workload.collate is None else "later items of the stream may be longer"
        if not self.extremes or self._looked == items:
            return ""
        return f"the longest items determine the peak, but only {self._looked:,} of {items:,} were checked"

    def _self_check(self, rules: Rules) -> str:
        """How the simulated allocator disagrees with the real one, or ""."""
        if self._seen is None:
            return ""
        trace, reserved = self._seen
        replayed = [allocator.peak_reserved for allocator in trace.on_any_gpu(rules)]
        return disagreement(min(replayed, key=lambda peak: abs(peak - reserved)), reserved)

    def time(self, micros: Sequence[int], longest_s: float, fits: Callable[[int], bool]) -> StepTime | None:
        """Time micro-batches in ascending order, up to the first that takes longer than `longest_s`.

        fits: whether a micro-batch fits into memory; timing ends at the first that does not. Returns None if none
        fits. Raises what a step raises.
        """
        stepper = self._timed_stepper()
        on_gpu = self.device.type == "cuda"
        points: list[TimedBatch] = []
        update_s = 0.0
        _tidy()
        before = resident()
        self._grown = {}
        for micro in sorted(micros):
            if not fits(micro):
                break
            self.tell(f"timing micro-batch {micro}")
            watched = not on_gpu and _forget_peak()
            try:
                point, update_s = self._point(stepper, micro)
            except RuntimeError as error:
                if points and is_out_of_memory(error):
                    stepper.drop_gradients()
                    break
                raise
            points.append(point)
            if watched and (most_seen := resident_peak()) is not None:
                self._grown[micro] = most_seen - before
            if point.compute_s + point.data_s > longest_s:
                break
        if not points:
            return None
        found = StepTime(merged(points), update_s, on_gpu)
        # Interpolation is least accurate where the bottleneck moves from the host to the GPU.
        knee = found.knee()
        if knee is not None and points[0].micro < knee < points[-1].micro and not found.measured(knee):
            point, _ = self._point(stepper, knee)
            found = StepTime(merged([*points, point]), update_s, on_gpu)
        return found

    def with_heap(self, memory: Memory) -> Memory:
        """Add the memory that the process held beyond the prediction while micro-batches were timed."""
        if memory.on == "gpu":
            return memory
        peaks = {micro: memory.peak(micro) - memory.outside_bytes for micro in self._grown}
        heap = ((micro, max(grown - peaks[micro], 0)) for micro, grown in sorted(self._grown.items()))
        return replace(memory, heap=tuple(heap))

    def _point(self, stepper: Stepper, micro: int) -> tuple[TimedBatch, float]:
        """Time one micro-batch. Returns it with the seconds of the optimizer's update."""
        batches = endless(self.workload, self.config, micro, as_kept=True)
        samples: list[tuple[float, ...]] = []
        begin = time.perf_counter()
        while len(samples) < 2 or time.perf_counter() - begin < POINT_S:
            at = time.perf_counter()
            batch = next(batches)
            data = time.perf_counter() - at
            stepper.carry.value = None  # of another number of items
            host, compute = self._timed(stepper, batch)
            at = time.perf_counter()
            stepper.finish_step(_nowhere, 0)
            self._wait()
            samples.append((compute, host, data, time.perf_counter() - at))
            if compute > HOPELESS_S:
                break
        # The first run of a shape includes kernel selection. Means, because a real run has slow steps as well.
        compute, host, data, update = map(fmean, zip(*(samples[1:] or samples), strict=True))
        varied = variation([sample[0] for sample in samples[1:]])
        return TimedBatch(micro, compute, host, data, varied), update

    def _timed(self, stepper: Stepper, batch: Batch) -> tuple[float, float]:
        """(seconds until launched, seconds until done) of copying a micro-batch, forward and backward."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            stepper.forward_backward(batch, _nowhere)
            spent = time.perf_counter() - begin
            return spent, spent
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._wait()
        begin = time.perf_counter()
        first.record()
        stepper.forward_backward(stepper.moved(batch), _nowhere)
        last.record()
        issued = time.perf_counter() - begin
        self._wait()
        return issued, float(first.elapsed_time(last)) * 1e-3

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def with_levels(self, levels: dict[str, str]) -> Prober:
        """The same with other levels of the model's blocks, see `memory.recompute`."""
        recompute = [f"{name}={level}" for name, level in levels.items()]
        return self.with_config(self.config.changed(memory={"recompute": recompute}))

    def with_config(self, config: Config) -> Prober:
        """The same with another configuration of the same workload and data."""
        other = copy.copy(self)
        other.config = config
        return other

    def stepper(self) -> Stepper:
        """A new eager stepper of a single rank, with one micro-batch per step."""
        return Stepper(
            self.workload, self._plain().changed(parallel={"ranks": 1}), self.device, total_steps=1000
        )

    def _timed_stepper(self) -> Stepper:
        """As `stepper`; of a sharded model on a GPU a rank's, since the whole model may not fit."""
        config = self._plain()
        if not is_sharded(config) or self.device.type != "cuda":
            return self.stepper()
        strategy = strategy_of(config, self.device, self.workload.training)
        return stepper_of_rank(self.workload, config, self.device, strategy)

    def _plain(self) -> Config:
        """The configuration of the steps to probe."""
        # Compiling would recompile for every batch size.
        return self.config.changed(batch={"accumulation": 1}, speed={"compile": "off", "cuda_graph": False})


def sizes(workload: Workload) -> tuple[int, ...]:
    """The micro-batches to record: those in SIZES up to the number of items, or the largest possible."""
    items = item_count(workload.train_data)
    if items is None:
        return SIZES
    found = [micro for micro in SIZES if micro <= items]
    # Avoid a single item: batch normalisation cannot train on it.
    for micro in (items, items - 1, items - 2):
        if len(found) < 3 and micro > 1 and micro not in found:
            found.append(micro)
    return tuple(sorted(found)) or (1,)


def items_of(workload: Workload) -> ItemCounts:
    """Memory that caching all data would take."""
    parts = (workload.train_data, workload.eval_data)
    if any(isinstance(part, Stream) for part in parts):
        return ItemCounts(None, False, workload.collate is not None)
    keeps = all(can_keep(part, workload.epochs_differ) for part in parts)
    kept = sum(map(kept_bytes, parts)) if keeps else None
    return ItemCounts(kept, all(map(gathers, parts)), workload.collate is not None)


def disagreement(replayed: int, reserved: int) -> str:
    """A message if the replayed peak differs from the reserved bytes by more than TOLERANCE, else ""."""
    if abs(replayed - reserved) <= TOLERANCE * reserved:
        return ""
    return (
        f"the allocator reserved {size(reserved)} for the recorded steps, but {size(replayed)} was predicted"
    )


def caveat(config: Config) -> str:
    """Why probes of a configuration do not represent its run, or ""."""
    speed = config.speed
    if speed.cuda_graph:
        return "CUDA graphs use their own memory pool"
    if speed.compile != "off":
        return "compiled steps fuse operations and use their own memory pools"
    return ""


def endless(workload: Workload, config: Config, micro: int, as_kept: bool = False) -> Iterator[Any]:
    """Micro-batches created in this process, for endless epochs. Raises ValueError if the data is too small.

    as_kept: if the loader caches items, repeat a few cached ones to measure the cost of cached data.
    """
    config = config.changed(batch={"micro": micro, "accumulation": 1})
    if as_kept and config.loader.cache and not workload.epochs_differ:
        few = min(KEPT_BATCHES * micro, len(cast("Any", workload.train_data)))
        data = Subset(workload.train_data, range(few))
        batches = Batches(
            data, config.changed(loader={**ALONE, "cache": True}), workload.collate, resumes=False
        )
    else:
        batches = probe_batches(workload, config)
    if isinstance(batches.own_order, StreamOrder):
        batches.sample()  # reads the items now, not in the first step
        # Reading on would take items from other probes, and may never end.
        return (batches.sample() for _ in count())
    if not batches.per_epoch:
        raise ValueError(f"the data has fewer than {micro:,} items")
    return (batch for epoch in count() for batch in batches.epoch(epoch))


def extremes(workload: Workload) -> tuple[list[int], int]:
    """Find the items that make a batch as large as possible, by a random sample.

    Returns (for each tensor of an item, the item where it is longest; the number of items checked), or ([], 0) if the
    workload has no collate function. The batch that contains these items determines the run's peak.
    """
    if workload.collate is None or workload.epochs_differ or isinstance(workload.train_data, Stream):
        return [], 0
    data = cast("Any", workload.train_data)
    longest: list[tuple[int, int]] = []
    looked, end = 0, time.perf_counter() + LOOK_S
    for place in random.Random(0).sample(range(len(data)), min(len(data), LOOKED_AT)):
        sizes_ = [tensor.numel() for tensor in tensors(data[place])]
        longest = longest or [(-1, 0)] * len(sizes_)
        longest = [max(known, (size_, place)) for known, size_ in zip(longest, sizes_, strict=False)]
        looked += 1
        if time.perf_counter() > end:
            break
    return sorted({place for _, place in longest}), looked


def longest_first(workload: Workload, config: Config, micro: int, first: Sequence[int]) -> Iterator[Any]:
    """Endless micro-batches that start with the items `first`, filled up with others."""
    if not first:
        return endless(workload, config, micro)
    return _longest_first(workload, config, micro, first)


def _longest_first(workload: Workload, config: Config, micro: int, first: Sequence[int]) -> Iterator[Any]:
    source = probe_batches(workload, config).source
    assert isinstance(source, ItemSource)  # only items with an index are looked for
    places = range(len(cast("Any", workload.train_data)))
    others = cycle(sorted(set(places) - set(first)))
    while True:
        indices = [*first, *islice(others, max(micro - len(first), 0))][:micro]
        yield from gathered(source, iter([torch.tensor(indices)]), False)


# The largest context that was seen on each GPU, in bytes: it lasts as long as the process.
_contexts: dict[int, int] = {}


def context_bytes(device: torch.device, free_before: int | None) -> int:
    """GPU memory of this process outside the allocator: the CUDA context and libraries. 0 on the CPU.

    Computed from the free memory before and now, so it includes changes by other processes. Only the first measurement
    of a process sees the context: later ones find it there before.
    """
    if device.type != "cuda" or free_before is None:
        return 0
    taken = free_before - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    _contexts[index] = max(int(taken), _contexts.get(index, 0))
    return _contexts[index]


def resident() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


def _tidy() -> None:
    """Return free heap memory to the system, for example after larger model sizes were tried."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _forget_peak() -> bool:
    """Reset the peak resident size of this process. Returns whether the kernel supports it."""
    _tidy()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _nowhere(_phase: int) -> None:
    return

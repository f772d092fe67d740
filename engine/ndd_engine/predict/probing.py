"""Measures one configuration: the traces of its steps at two small micro-batches, and the time of a few spread ones."""

from __future__ import annotations

import ctypes
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, cast

import psutil
import torch
from torch.utils.data import Subset

from ndd_engine.batches import tensors
from ndd_engine.config import Config
from ndd_engine.hardware.host import resident_peak
from ndd_engine.measure.clock import PhaseClock
from ndd_engine.measure.memory import is_out_of_memory
from ndd_engine.text import size
from ndd_engine.train.data.loader import Batches, gathered
from ndd_engine.train.data.source import can_keep, gathers, kept_bytes
from ndd_engine.train.prepare import seed
from ndd_engine.train.probes.autosize import ALONE, probe_batches
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import Batch, Workload

from .allocator import Rules
from .memory import Items, Memory
from .recording import record
from .steptime import StepTime, TimedBatch, merged
from .trace import Family, Trace, fit

Tell = Callable[[str], None]
# Micro-batches that are recorded, until two neighbours allocate alike. Smaller ones take other ways: two items are no
# matrix to some kernels, and batch normalisation needs more than one.
SIZES = (4, 8, 16, 32)
# A recording that took longer is the last one.
RECORD_S = 3.0
# Of what was reserved, how far a replay of the same steps may be off before the model is not believed.
TOLERANCE = 0.02
# Items that are looked at for the longest ones at most, and seconds: each may have to be encoded.
LOOKED_AT = 4096
LOOK_S = 1.5
# Batches that are kept where the loader keeps items.
KEPT_BATCHES = 2
# Seconds for one size of the micro-batch, of which at least two runs are made, unless the first takes far too long.
POINT_S = 0.5
HOPELESS_S = 4.0


class Prober:
    """Probes of a configuration on its prepared workload; its loader settings and batch do not matter."""

    def __init__(self, config: Config, workload: Workload, device: torch.device, tell: Tell) -> None:
        self.config, self.workload, self.device = config, workload, device
        self._tell = tell
        # The newest recording on a card, and the bytes that its allocator had reserved at most.
        self._seen: tuple[Trace, int] | None = None
        self._extremes, self._looked = extremes(workload)
        # On the host: most bytes that the process grew by while a micro-batch was timed, by its size.
        self._grown: dict[int, int] = {}

    def warm(self) -> int:
        """Bytes of this process in memory once it has done a step: torch brings in much of itself only then."""
        self._tell("trying a step")
        stepper = self.stepper()
        stepper.eager_step(self._batches(sizes(self.workload)[0]), PhaseClock(), 0)
        del stepper
        _tidy()
        return resident()

    def memory(self, outside_bytes: int) -> Memory:
        """Recorded here, at small micro-batches. Raises what a step raises."""
        card = self.device.type == "cuda"
        source = "two steps recorded on this card" if card else "two steps recorded on this processor"
        on: Literal["card", "host"] = "card" if card else "host"
        rules = Rules.of_environment()
        family = self.family()
        doubt = caveat(self.config) or self._unseen() or (self._self_check(rules) if card else "")
        return Memory(family, on, outside_bytes, source, rules, doubt)

    def family(self) -> Family:
        """Of its steps' traces. Raises what a step raises."""
        return alike(self.trace, sizes(self.workload))

    def trace(self, micro: int) -> Trace:
        """Of steps with that micro-batch."""
        self._tell(f"recording what a step of {micro} allocates")
        seed(self.config.run.seed)
        if self.device.type == "cuda":
            self.workload.model.to("cpu")
            _forget(self.device)
        found = record(
            self.stepper, longest_first(self.workload, self.config, micro, self._extremes), self.device
        )
        if self.device.type == "cuda":
            self._seen = found, torch.cuda.max_memory_reserved(self.device)
        return found

    def _unseen(self) -> str:
        if self.workload.collate is not None and self.workload.epochs_differ:
            return "the items of later epochs may be longer"
        items = len(cast(Any, self.workload.train_data))
        if not self._extremes or self._looked == items:
            return ""
        return f"the longest items make the peak, and {self._looked:,} of {items:,} were looked at"

    def _self_check(self, rules: Rules) -> str:
        """Whether the allocator of this card does what the model of it does; "" where it does."""
        if self._seen is None:
            return ""
        trace, reserved = self._seen
        return disagreement(trace.on_gpu(rules).peak_reserved, reserved)

    def time(self, micros: Sequence[int], longest_s: float, most: Callable[[int], bool]) -> StepTime | None:
        """At those micro-batches, ascending, up to the first that takes longer than `longest_s`.

        most: whether memory holds a micro-batch; the first that it does not ends them. None where it holds none.
        Raises what a step raises.
        """
        stepper = self.stepper()
        on_gpu = self.device.type == "cuda"
        points: list[TimedBatch] = []
        update_s = 0.0
        _tidy()
        before = resident()
        self._grown = {}
        for micro in sorted(micros):
            if not most(micro):
                break
            self._tell(f"timing micro-batches of {micro}")
            watched = not on_gpu and _forget_peak()
            try:
                point, update_s = self._point(stepper, micro)
            except RuntimeError as error:
                if points and is_out_of_memory(error):
                    stepper.optimizer.zero_grad(set_to_none=True)
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
        # Where the host's pace gives way to the card's, the two lines are furthest from the truth.
        knee = found.knee()
        if knee is not None and points[0].micro < knee < points[-1].micro and not found.measured(knee):
            point, _ = self._point(stepper, knee)
            found = StepTime(merged([*points, point]), update_s, on_gpu)
        return found

    def with_heap(self, memory: Memory) -> Memory:
        """The prediction with what the process was seen to hold beyond it, while micro-batches were timed."""
        if memory.on == "card":
            return memory
        peaks = {micro: memory.peak(micro) - memory.outside_bytes for micro in self._grown}
        heap = ((micro, max(grown - peaks[micro], 0)) for micro, grown in sorted(self._grown.items()))
        return replace(memory, heap=tuple(heap))

    def _point(self, stepper: Stepper, micro: int) -> tuple[TimedBatch, float]:
        """One size of the micro-batch, and the seconds of the optimizer's step."""
        batches = endless(self.workload, self.config, micro, as_kept=True)
        data: list[float] = []
        compute: list[float] = []
        host: list[float] = []
        updates: list[float] = []
        begin = time.perf_counter()
        while len(compute) < 2 or time.perf_counter() - begin < POINT_S:
            at = time.perf_counter()
            batch = next(batches)
            data.append(time.perf_counter() - at)
            issued, done = self._timed(stepper, batch)
            host.append(issued)
            compute.append(done)
            at = time.perf_counter()
            stepper.set_rate(0)
            stepper.update(_nowhere)
            stepper.optimizer.zero_grad(set_to_none=stepper.config.optimizer.set_to_none)
            self._wait()
            updates.append(time.perf_counter() - at)
            if done > HOPELESS_S:
                break
        # Libraries choose their ways at the first run of a shape. Means, as a run has its slow steps as well.
        skip = 1 if len(compute) > 1 else 0
        point = TimedBatch(micro, fmean(compute[skip:]), fmean(host[skip:]), fmean(data[skip:]))
        return point, fmean(updates[skip:])

    def _timed(self, stepper: Stepper, batch: Batch) -> tuple[float, float]:
        """(seconds until everything was issued, until it was done) of moving a micro-batch and computing it."""
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

    def stepper(self) -> Stepper:
        """A fresh one, which steps through one micro-batch, operation by operation."""
        single = self.config.batch.model_copy(update={"accumulation": 1})
        # A compiler would compile anew for every size.
        plain = self.config.speed.model_copy(update={"compile": "off", "cuda_graph": False})
        config = self.config.model_copy(update={"batch": single, "speed": plain})
        return Stepper(self.workload, config, self.device, total_steps=1000)

    def _batches(self, micro: int) -> Iterator[Any]:
        return endless(self.workload, self.config, micro)


def sizes(workload: Workload) -> tuple[int, ...]:
    """The micro-batches to record: SIZES, as far as there are so many items, or the two largest that there are."""
    items = len(cast(Any, workload.train_data))
    found = tuple(micro for micro in SIZES if micro <= items)
    if len(found) > 1:
        return found
    # Not one item beside others: batch normalisation cannot train on it.
    return (items - 1, items) if items > 2 else (items,)


def alike(trace: Callable[[int], Trace], at: Sequence[int]) -> Family:
    """The family of the first two neighbours whose traces line up, or of the last two: libraries take other ways for
    batches that are too small. Of one size alone it is the same for all. Raises what the first two recordings raise."""
    small, found = trace(at[0]), None
    if len(at) == 1:
        return fit(small, small, (at[0], at[0] + 1))
    for below, above in pairwise(at):
        begin = time.perf_counter()
        try:
            large = trace(above)
        except RuntimeError as error:
            if found is None or not is_out_of_memory(error):
                raise
            break
        found = fit(small, large, (below, above))
        if found.aligned or time.perf_counter() - begin > RECORD_S:
            break
        small = large
    assert found is not None  # `at` has two sizes or more
    return found


def items_of(workload: Workload) -> Items:
    """What keeping all of the data would take."""
    parts = (workload.train_data, workload.eval_data)
    keeps = all(can_keep(part, workload.epochs_differ) for part in parts)
    kept = sum(map(kept_bytes, parts)) if keeps else None
    return Items(kept, all(map(gathers, parts)), workload.collate is not None)


def disagreement(replayed: int, reserved: int) -> str:
    """What there is to say when a replay of recorded steps does not come to what they reserved; "" where it does."""
    if abs(replayed - reserved) <= TOLERANCE * reserved:
        return ""
    return f"the allocator here reserved {size(reserved)} for steps that its model gives {size(replayed)}"


def caveat(config: Config) -> str:
    """Why the probes of a configuration do not tell what a run of it takes; "" where they do."""
    speed = config.speed
    if speed.cuda_graph:
        return "a CUDA graph keeps a pool of its own"
    if speed.compile != "off":
        return "compiled steps fuse operations and keep pools of their own"
    return ""


def endless(workload: Workload, config: Config, micro: int, as_kept: bool = False) -> Iterator[Any]:
    """Micro-batches of a size, made in this process, one epoch after the other.

    as_kept: where the loader keeps items, a few are kept and come again and again, as that is what they cost then.
    """
    batch = config.batch.model_copy(update={"micro": micro, "accumulation": 1})
    config = config.model_copy(update={"batch": batch})
    if as_kept and config.loader.cache and not workload.epochs_differ:
        few = min(KEPT_BATCHES * micro, len(cast(Any, workload.train_data)))
        alone = config.loader.model_copy(update={**ALONE, "cache": True})
        data = Subset(workload.train_data, range(few))
        batches = Batches(data, config.model_copy(update={"loader": alone}), workload.collate)
    else:
        batches = probe_batches(workload, config)
    if not batches.per_epoch:
        raise ValueError(f"the data has fewer than {micro} items")
    epoch = 0
    while True:
        yield from batches.epoch(epoch)
        epoch += 1


def extremes(workload: Workload) -> tuple[list[int], int]:
    """(the items that make a batch as large as it can be: for each tensor of an item the longest one; how many were
    looked at). None of them where no collate function joins items of different lengths.

    The run's peak is that of the batch with them in it. Looks at items all over the data.
    """
    if workload.collate is None or workload.epochs_differ:
        return [], 0
    data = cast(Any, workload.train_data)
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
    """Micro-batches of a size that all have the items `first` in them, as far as there is room, and others."""
    if not first:
        yield from endless(workload, config, micro)
    source = probe_batches(workload, config).source
    count = len(cast(Any, workload.train_data))
    taken = set(first)
    others = (
        (place for place in cycle(range(count)) if place not in taken) if len(taken) < count else iter(())
    )
    while True:
        indices = [*first, *islice(others, max(micro - len(first), 0))][:micro]
        yield from gathered(source, iter([torch.tensor(indices)]), False)


def context_bytes(device: torch.device, free_before: int | None) -> int:
    """On a card: what this process holds beside the allocator, for the context and the libraries' own memory.

    By what was free before and is now: other processes that come or go meanwhile are in it.
    """
    if device.type != "cuda" or free_before is None:
        return 0
    taken = free_before - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)
    return max(int(taken), 0)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(psutil.Process().memory_info().rss)


def _tidy() -> None:
    """Let glibc give back what is free: the size of the model may have been chosen here, by trying larger ones."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _forget_peak() -> bool:
    """Let the kernel find the peak of this process anew; whether it does."""
    _tidy()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _forget(device: torch.device) -> None:
    """Give back what the allocator has cached, workspaces of libraries too, so that a recording begins at nothing."""
    torch.cuda.synchronize(device)
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def _nowhere(_phase: int) -> None:
    return

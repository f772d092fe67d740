"""Memory and step time on a GPU that is not in this machine, from traces of shapes alone.

A step is traced at two micro-batches, at a third to check the line. A step of very many operations loops over time: it
is traced with 3 and 4 steps of the loop, and extended to its length.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import Dataset

from ndd_engine.config import Config
from ndd_engine.hardware.gpus import GpuProfile, load
from ndd_engine.hardware.kernels import Card, Op
from ndd_engine.text import counted
from ndd_engine.train.data.item_sources import gathers
from ndd_engine.workloads.base import Stream, Workload, item_count, items_at
from ndd_engine.workloads.interface import facts
from ndd_watch import recompute
from ndd_watch.turns import Account, Blocks, CallTree, blocks_of

from .budget import IN_BF16, ROUNDED_AWAY, ROUNDS, Way, kept_in_bf16
from .estimate import Family, ItemCounts, Memory, at, fit
from .fakes import Follow, TooLongError, Traced, traced
from .launches import StepEstimate, issues, step_estimate
from .other_sizes import LENGTHS, OPS, repeated, repeated_traces, scaled
from .step_probes import alike, caveat, departs, endless, extremes, items_of, longest_first, sizes

Tell = Callable[[str], None]
# Operations of a forward pass. A longer one is taken to loop over time.
MOST_OPS = 2_000
# Steps of a loop in the trace that checks those of LENGTHS.
CHECKED = 6
# Memory of the CUDA context and libraries on a GPU that is not in this machine (measured on others: 287 to 667 MiB).
CONTEXT_BYTES = 667 << 20
# Batches of which the usual length of a loop is the mean.
_BATCHES = 8
# Seconds to time the creation of batches of one size.
_DATA_S = 0.15
# Bytes of the items that are kept for further traces.
_KEPT_BYTES = 256 << 20
# Layers of the model that times launches: fewer kernels than a GPU queues. Its passes; the first quarter is left out.
_LAYERS, _LAUNCHED = 16, 20


@dataclass(frozen=True)
class _Loop:
    """A dimension that a step loops over. leaves: (leaf of the batch, dimension); length: in the longest batch."""

    leaves: tuple[tuple[int, int], ...]
    length: int

    def cut(self, batch: Any, length: int) -> Any:
        """The batch with a loop of `length` steps."""
        leaves, spec = tree_flatten(batch)
        for leaf, dimension in self.leaves:
            whole = leaves[leaf]
            if whole.shape[dimension] < length:
                size = list(whole.shape)
                size[dimension] = length
                leaves[leaf] = whole.new_zeros(size)
            else:
                leaves[leaf] = whole.narrow(dimension, 0, length)
        return tree_unflatten(leaves, spec)

    def of(self, batch: Any) -> int:
        """Its length in a batch."""
        leaf, dimension = self.leaves[0]
        return int(tree_flatten(batch)[0][leaf].shape[dimension])


class _ReadOnce(Dataset[Any]):
    """Another dataset, of which each item is read once: shapes do not change when it is read again."""

    def __init__(self, data: Any) -> None:
        self._data, self._items, self._room = data, dict[int, Any](), _KEPT_BYTES

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        if (item := self._items.get(index)) is None:
            (item,) = items_at(self._data, [index])
            leaves = tree_leaves(item)
            size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
            # Other objects may be changed by what makes a batch of them.
            if size <= self._room and all(isinstance(leaf, (Tensor, int, float, str)) for leaf in leaves):
                self._items[index], self._room = item, self._room - size
        return tree_map(lambda leaf: leaf, item)  # new containers, of which a batch may take entries


def reading_once(workload: Workload) -> Workload:
    """The same workload for traces of shapes: no item is read, or encoded, twice."""
    data = workload.train_data
    if isinstance(data, Stream) or gathers(data):
        return workload
    copied = copy.copy(workload)
    copied.train_data = _ReadOnce(data)
    return copied


class ShapeTracer:
    """Traces the steps of a prepared workload by shapes. Raises what a step raises on fake tensors.

    leaves: (leaf of a batch, dimension) that another size of the same model loops over; tried first.
    """

    def __init__(
        self, config: Config, workload: Workload, tell: Tell, leaves: tuple[tuple[int, int], ...] = ()
    ) -> None:
        self.config, self.workload, self.tell = config, workload, tell
        self._leaves, self._sizes = leaves, sizes(workload)
        self._longest = extremes(workload)[0]
        self._known: dict[tuple[int, int | None, bool], Traced] = {}

    def _batch(self, micro: int, usual: bool = False) -> Any:
        if usual:
            return next(endless(self.workload, self.config, micro))
        return next(longest_first(self.workload, self.config, micro, self._longest))

    def _traced(self, micro: int, length: int | None = None, usual: bool = False) -> Traced:
        found = self._known.get((micro, length, usual))
        if found is None:
            batch = self._batch(micro, usual)
            looped = "" if length is None else f" and a loop of {length}"
            self.tell(f"tracing a step with micro-batch {micro}{looped}")
            if length is not None:
                assert self._loop is not None
                batch = self._loop.cut(batch, length)
            found = self._known[micro, length, usual] = traced(self.config, self.workload, batch)
        return found

    @property
    def leaves(self) -> tuple[tuple[int, int], ...]:
        """What the steps loop over, for another size of the same model; () without a loop."""
        return () if self._loop is None else self._loop.leaves

    @cached_property
    def _loop(self) -> _Loop | None:
        """The loop over time, if a step has too many operations; None if it has none that can be shortened."""
        micro = self._sizes[0]
        batch = self._batch(micro)
        if self._leaves:
            known = _Loop(self._leaves, _Loop(self._leaves, 0).of(batch))
            if (found := self._shortened(known, batch)) is not None:
                return found
        self.tell(f"tracing a step with micro-batch {micro}")
        try:
            self._known[micro, None, False] = traced(self.config, self.workload, batch, MOST_OPS)
        except TooLongError:
            return next(
                filter(None, (self._shortened(loop, batch) for loop in _candidates(batch, micro))), None
            )
        return None

    def _shortened(self, loop: _Loop, batch: Any) -> _Loop | None:
        """The loop, if a shorter one leaves fewer operations."""
        self.tell(f"looking for the loop: trying {loop.length:,} steps")
        micro = self._sizes[0]
        found: list[Traced] = []
        for length in LENGTHS:
            try:
                found.append(traced(self.config, self.workload, loop.cut(batch, length), MOST_OPS))
            except Exception:  # noqa: BLE001 (another dimension, which the model needs as it is)
                return None
        if len(found[0].micro) >= len(found[1].micro):
            return None
        self._known |= {(micro, length, False): one for length, one in zip(LENGTHS, found, strict=True)}
        return loop

    def recomputed(self, levels: dict[str, str]) -> ShapeTracer:
        """The same with levels of the model's blocks, see `memory.recompute`."""
        recompute = [f"{name}={level}" for name, level in levels.items()]
        config = self.config.changed(memory={"recompute": recompute})
        return ShapeTracer(config, self.workload, self.tell, self.leaves)

    def blocks(self) -> list[tuple[str, ...]]:
        """Blocks that can compute again, in the order of their calls: the largest, then smaller ones instead."""
        found: list[Blocks] = []

        @contextmanager
        def watch(model: nn.Module) -> Iterator[None]:
            account = Account()
            tree = CallTree(model, account)
            modules = {name: module for name, module in model.named_modules() if name}
            with recompute.watched_effects(model, modules) as effects, account:
                yield
            tree.detach()
            found.append(blocks_of(tree.root, effects))

        self.tell("looking for blocks that can compute again")
        batch = self._batch(self._sizes[0])
        if self._loop is not None:
            batch = self._loop.cut(batch, LENGTHS[0])
        traced(self.config, self.workload, batch, watch=watch)
        every = []
        for containers in found[0].containers:
            within = tuple(f"{name}." for name in containers)
            every.append((*containers, *(name for name in found[0].names if not name.startswith(within))))
        return [*every, found[0].names]

    def within(
        self, limit_bytes: int, added_bytes: int, source: str
    ) -> tuple[ShapeTracer, Memory, int, int] | None:
        """(with the fewest blocks that compute again so that the configured batch fits, its memory, how many, of how
        many); None if it does not fit with all of them."""
        batch = self.config.batch

        def fitting(names: tuple[str, ...], count: int) -> tuple[ShapeTracer, Memory] | None:
            self.tell(f"tracing a step with {counted(count, 'block')} computed again")
            tracer = self.recomputed(dict.fromkeys(names[:count], recompute.ALL))
            memory = tracer.memory(source, check=False)
            fit = memory.fit(batch.micro, batch.accumulation, limit_bytes, added_bytes)
            return (tracer, memory) if fit.fits and not fit.retries else None

        # A large block has all of its activations at once while it computes again; smaller ones need more of them.
        tried = ((names, fitting(names, len(names))) for names in self.blocks() if names)
        names, best = next(((names, one) for names, one in tried if one is not None), ((), None))
        if best is None:
            return None
        below, above = 0, len(names)
        while above - below > 1:
            middle = (above + below) // 2
            if (found := fitting(names, middle)) is not None:
                best, above = found, middle
            else:
                below = middle
        return *best, above, len(names)

    def memory(self, source: str, check: bool = True) -> Memory:
        """Memory of the longest batches. check: whether a third micro-batch has to confirm the line."""
        loop = self._loop
        if loop is None:
            at = self._sizes if check else self._sizes[:2]
            family = alike(lambda micro: self._traced(micro).trace, at, math.inf)
        else:
            self.tell(f"extending the loop to {loop.length:,} steps")
            family = self._family(loop.length)
            third = self._sizes[-1]
            if check and third not in family.at:
                recorded = self._traced(third, CHECKED).trace
                family = replace(family, nonlinear=departs(self._family(CHECKED), recorded, third))
        # The operators are not needed any more.
        family = replace(family, first=replace(family.first, labels=()))
        return Memory(family, "gpu", CONTEXT_BYTES, source, caveat=caveat(self.config))

    def _family(self, length: int) -> Family:
        """The traces of a loop of `length` steps, for any micro-batch."""
        small, large = self._sizes[0], self._sizes[:2][-1]
        short, longer = (self._traced(small, steps).trace for steps in LENGTHS)
        first, second = repeated_traces(short, longer, LENGTHS, length, self._traced(large, LENGTHS[1]).trace)
        return fit(first, second, (small, large if large > small else small + 1))

    def estimate(self, gpu: GpuProfile, micros: Sequence[int]) -> StepEstimate:
        """The step time of usual batches of these sizes."""
        pair = self._sizes[:2]
        found = [self._ops_of(micro) for micro in pair]
        whole = self._traced(pair[0], None if self._loop is None else LENGTHS[0]).update

        def of(micro: int) -> Sequence[Op]:
            if len(found) == 1:
                return found[0]
            return scaled(found[0], found[1], (pair[0], pair[1]), micro, OPS)

        points = list(micros) if len(found) > 1 else list(pair)
        self.tell("estimating the time of a step")
        config = self.config
        return step_estimate(
            [(micro, of(micro)) for micro in points],
            whole,
            Card(gpu),
            config.precision.tf32,
            launch_cost(torch.device("cuda")) if torch.cuda.is_available() else None,
        )

    def _ops_of(self, micro: int) -> Sequence[Op]:
        loop = self._loop
        if loop is None:
            return self._traced(micro, usual=bool(self._longest)).micro
        length = self._usual(loop)
        short, longer = (self._traced(self._sizes[0], steps).micro for steps in LENGTHS)
        if micro == self._sizes[0]:
            return repeated(short, longer, LENGTHS, length, OPS)
        return repeated(short, longer, LENGTHS, length, OPS, self._traced(micro, LENGTHS[1]).micro)

    def _usual(self, loop: _Loop) -> int:
        """The mean length of the loop, in batches of the configured size as far as the data has them."""
        if not self._longest:
            return loop.length
        micro = min(self.config.batch.micro, self._sizes[-1])
        batches = endless(self.workload, self.config, micro)
        return round(fmean(loop.of(next(batches)) for _ in range(_BATCHES)))


def data_s(config: Config, workload: Workload, micros: Sequence[int]) -> list[tuple[int, float]]:
    """Seconds in which this machine creates batches of these sizes, in this process.

    The time that the process computed, where that is less: others may use the cores meanwhile.
    """
    pair = sizes(workload)[:2]
    times: list[float] = []
    for micro in pair:
        batches = endless(workload, config, micro, as_kept=True)
        if not times:
            next(batches)  # the first one of a process takes longer
        end = time.perf_counter() + _DATA_S
        took: list[float] = []
        while not took or time.perf_counter() < end:
            begin, used = time.perf_counter(), time.process_time()
            next(batches)
            took.append(min(time.perf_counter() - begin, time.process_time() - used))
        times.append(median(took))
    return [(micro, at(micro, pair, times)) for micro in micros]


def launch_cost(device: torch.device) -> float:
    """How many times as long as a fast host this one takes to launch an operation on a device.

    Measured with a small model: forward and backward of tiny tensors, until all is launched.
    """
    with torch.random.fork_rng(devices=[]):
        layers = (nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(_LAYERS))
        model, x = nn.Sequential(*layers), torch.zeros(4, 32)
    with Follow() as follow:
        follow.enter("forward")
        loss = model(x).sum()
        follow.enter("backward")
        loss.backward()
    fast_s = sum(issue.host_s for issue in issues(follow.ops, Card(load()[0]), tf32=False))
    model, x = model.to(device), x.to(device)
    times = []
    for _ in range(_LAUNCHED):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        model(x).sum().backward()
        times.append(time.perf_counter() - begin)
    return median(times[len(times) // 4 :]) / fast_s


def ways_elsewhere(
    tracer: ShapeTracer,
    memory: Memory,
    gpu: GpuProfile,
    limit_bytes: int,
    added_bytes: int,
    nearest: tuple[int, int] | None,
) -> list[Way]:
    """As `budget.ways_to_fit` for a GPU that is not in this machine, with estimated times, the fastest first."""
    config, batch, found = tracer.config, tracer.config.batch, []

    def step_s(of: ShapeTracer, micro: int, times: int) -> float:
        return of.estimate(gpu, [micro]).middle.step_s(micro, times, config.loader.workers)

    if config.memory.budget is None and not config.memory.recompute:
        plan = tracer.within(limit_bytes, added_bytes, memory.source)
        if plan is not None:
            other, needs, count, blocks = plan
            note = f"about {count} of {counted(blocks, 'block')} compute again in backward"
            peak = needs.peak(batch.micro, batch.accumulation) + added_bytes
            found.append(
                Way(("memory.budget=auto",), peak, step_s(other, batch.micro, batch.accumulation), note)
            )
    if nearest is not None:
        micro, times = nearest
        sets = f"batch.micro={micro}", f"batch.accumulation={times}"
        found.append(Way(sets, memory.peak(micro, times) + added_bytes, step_s(tracer, micro, times)))

    def in_format(precision: dict[str, str], note: str) -> Iterator[Way]:
        other = ShapeTracer(config.changed(precision=precision), tracer.workload, tracer.tell, tracer.leaves)
        needs = other.memory(memory.source, check=False)
        fit = needs.fit(batch.micro, batch.accumulation, limit_bytes, added_bytes)
        if fit.fits and not fit.retries:
            names = (f"precision.{name}" for name in precision)
            sets = tuple(f"{name}=bf16" for name in names if config.value(name) != "bf16")
            yield Way(sets, fit.peak_bytes, step_s(other, batch.micro, batch.accumulation), note)

    if config.precision.amp != "fp16" and gpu.peak_tflops("bf16"):
        if config.precision.amp == "off":
            found += in_format({"amp": "bf16"}, ROUNDS)
        if config.precision.parameters == "fp32":
            with kept_in_bf16(tracer.workload.model):
                found += in_format(IN_BF16, ROUNDED_AWAY)
    return sorted(found, key=lambda way: way.step_s or math.inf)


def all_items(config: Config, shapes: Config, workload: Workload) -> tuple[int | None, ItemCounts, str]:
    """(training items, what keeping all takes, the data in words) of `config`; the workload has that of `shapes`."""
    kept, few = items_of(workload), item_count(workload.train_data)
    known = facts(config) if shapes != config else None
    if known is None:
        return few, kept, workload.describe_data()
    if few and kept.kept_bytes is not None:
        kept = replace(kept, kept_bytes=kept.kept_bytes * known.train_items // few)
    return known.train_items, kept, known.text


def _candidates(batch: Any, micro: int) -> Iterator[_Loop]:
    """The dimensions of a batch that a step may loop over: each number that is not the micro-batch."""
    found: dict[int, list[tuple[int, int]]] = {}
    for number, leaf in enumerate(tree_flatten(batch)[0]):
        for dimension, size in enumerate(leaf.shape if isinstance(leaf, Tensor) else ()):
            if size > max(LENGTHS) and (dimension or size != micro):
                found.setdefault(size, []).append((number, dimension))
    return (_Loop(tuple(places), size) for size, places in sorted(found.items()))

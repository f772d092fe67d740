"""Measures before training what it costs to make a micro-batch. Leaves no trace and never ends the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import default_collate

from ndd_engine.measure.timing import fastest
from ndd_engine.record.events import LoaderEvent
from ndd_engine.train.random_state import kept_random
from ndd_engine.workloads.base import Batch

from .loader import CPU, Batches
from .source import item_bytes

# Time limits of the measurements, in nanoseconds; each one runs at least once however long it takes.
ITEMS_NS = 40_000_000
COLLATE_NS = 30_000_000
GATHER_NS = 10_000_000
MOST_ITEMS = 64
MOST_RUNS = 5


def probe_loader(batches: Batches, sample: Batch, sample_ns: float) -> LoaderEvent:
    """What making a micro-batch costs here, after `sample` was made in `sample_ns` nanoseconds.

    Looks at a few items of the second micro-batch, so that nothing that the first one left in a cache is timed.
    Never raises an Exception: what could not be measured is null.
    """
    source, sampler = batches.source, batches.sampler
    costs = _Costs()
    with suppress(Exception), kept_random(CPU):
        indices = list(islice(sampler.tensors(), 2))[-1]
        if source.on.type == "cpu":
            if source.possible is not None:
                gather = source.possible
                costs.gather_ns = fastest(lambda: gather.batch(indices), MOST_RUNS, GATHER_NS)[0]
            items = costs.time_items(source.data, indices.tolist())
            # As many items as fit the budget, if joining were all that the sample's time went to.
            affordable = int(COLLATE_NS / max(sample_ns / sampler.micro, 1.0))
            costs.time_collate(source.collate or default_collate, items, sampler.micro, max(affordable, 1))
    return LoaderEvent(
        items=sampler.items,
        micro=sampler.micro,
        in_memory=source.possible is not None,
        encoded=source.encoded,
        epochs_differ=sampler.epochs_differ,
        batch_bytes=item_bytes(sample) or None,
        item_ns=costs.item_ns,
        item_cpu_ns=costs.item_cpu_ns,
        collate_ns=costs.collate_ns,
        gather_ns=costs.gather_ns,
        probed=costs.probed,
    )


@dataclass
class _Costs:
    """As in LoaderEvent."""

    item_ns: float | None = None
    item_cpu_ns: float | None = None
    collate_ns: float | None = None
    gather_ns: float | None = None
    probed: int = 0

    def time_items(self, data: Any, indices: Sequence[int]) -> list[Any]:
        """Some of the items at `indices`, until the budget is spent."""
        items: list[Any] = []
        begin, begin_cpu = time.perf_counter_ns(), time.thread_time_ns()
        for index in indices[:MOST_ITEMS]:
            items.append(data[index])
            if time.perf_counter_ns() - begin > ITEMS_NS:
                break
        wall, cpu = time.perf_counter_ns() - begin, time.thread_time_ns() - begin_cpu
        self.probed = len(items)
        # The two clocks are not read at the same moment.
        self.item_ns, self.item_cpu_ns = wall / len(items), min(cpu, wall) / len(items)
        return items

    def time_collate(
        self, join: Callable[[list[Any]], Batch], items: list[Any], micro: int, affordable: int
    ) -> None:
        """Joining `micro` items, some of which may be the same; fewer, and scaled, where all would take too long."""
        count = min(micro, affordable)
        batch = (items * -(-count // len(items)))[:count]
        self.collate_ns = fastest(lambda: join(batch), 2, COLLATE_NS // 2)[0] * micro / count

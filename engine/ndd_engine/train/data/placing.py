"""The end of a pass in an order that is not the engine's own, and the cost of creating a micro-batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.utils.data import default_collate

from ndd_engine.config.schema import Config
from ndd_engine.errors import TrainingError
from ndd_engine.measure.timing import fastest
from ndd_engine.record.events import LoaderEvent
from ndd_engine.text import counted
from ndd_engine.train.random_state import kept_random
from ndd_engine.workloads.base import Batch, Order, Workload, item_count
from ndd_watch.switches import same_item

from .item_sources import item_bytes
from .loader import CPU, Batches
from .order import IndexOrder, length
from .streams import StreamOrder

OwnOrder = IndexOrder | StreamOrder


def at_pass_end(own: OwnOrder | None, of_step: int) -> TypeGuard[OwnOrder]:
    """Whether no step is left of the present pass; False if its length is unknown. of_step: see Batches."""
    if own is None or own.per_pass is None:
        return False
    return own.batches // of_step == own.per_pass // of_step


def end_pass(own: OwnOrder, of_step: int) -> None:
    """Count a pass whose batches were all delivered. Raises TrainingError if it had no complete step."""
    if own.batches < of_step:
        what = counted(own.batches, "micro-batch")
        raise TrainingError(
            f"pass {own.passes + 1} over {own.order.name} has only {what}, and a step needs {of_step}: "
            "does its iteration end early, or can it be iterated only once?"
        )
    own.end_pass()


def no_step(batches: Batches, config: Config) -> str:
    """Why nothing can be trained: a pass over the data has fewer micro-batches than a step of all ranks."""
    found, instead = counted(batches.per_epoch or 0, "micro-batch"), "lower batch.micro or batch.accumulation"
    if config.parallel.ranks > 1:
        found, instead = f"{found} for each rank", f"{instead}, or train with fewer ranks"
    items = counted(config.batch.micro, "item")
    needed = f"{counted(config.batch.accumulation, 'micro-batch')} of {items}"
    return f"a pass over the training data has {found}, but a step needs {needed}: {instead}"


def cannot_load(batches: Batches, before: dict[str, Any] | None) -> str | None:
    """Why a checkpoint's position does not apply to these batches; None if it can be loaded."""
    now = batches.state()
    if before is None or now is None:
        return None
    if before["kind"] != now["kind"] or before.get("position") != now.get("position"):
        return "the order of the data cannot be continued: its state_dict is new, or is gone"
    if before["micro"] != now["micro"] and now.get("position", now["kind"]) != "anew":
        was = before["micro"]
        return f"the position in the data counts micro-batches of {was}: set batch.micro = {was}"
    if before.get("workers", 0) != now.get("workers", 0) and before.get("position") == "state":
        was = before["workers"]
        return f"each loader worker continues its own part of the stream: set loader.workers = {was}"
    return None


def ordered_steps(workload: Workload, config: Config) -> int | None:
    """Optimizer steps of an epoch of the workload in its own order; None if that is unknown."""
    items = item_count(workload.train_data)
    if items is None:
        return None
    batches = length(workload.order or Order(), items, config.batch.micro)
    return None if batches is None else batches // config.batch.accumulation


# Time limits of the measurements, in nanoseconds; each one runs at least once however long it takes.
ITEMS_NS = 40_000_000
COLLATE_NS = 30_000_000
GATHER_NS = 10_000_000
MOST_ITEMS = 64
MOST_RUNS = 5


def probe_loader(batches: Batches, sample: Batch, sample_ns: float) -> LoaderEvent:
    """Measure the cost of creating a micro-batch; `sample` is the first one, created in `sample_ns` nanoseconds.

    Uses a few items of the second micro-batch, whose items are not in a cache yet. Never raises an Exception: what
    cannot be measured is null.
    """
    source, sampler = batches.source, batches.sampler
    measured: dict[str, Any] = {}  # fields of LoaderEvent
    random = False
    if isinstance(source, StreamOrder):
        with suppress(Exception), kept_random(CPU):
            wall, cpu, count = (
                source.stream.spent
            )  # of the sample: more items would be taken from the training
            measured = {"item_ns": wall / count, "item_cpu_ns": min(cpu, wall) / count, "probed": count}
            measured["collate_ns"] = fastest(lambda: source.sample(), 2, COLLATE_NS // 2)[0]
        size = item_bytes(sample) or None
        return LoaderEvent(0, sampler.micro, False, None, True, size, stream=True, **measured)
    with suppress(Exception), kept_random(CPU):
        indices = list(islice(sampler.tensors(), 2))[-1]
        if source.on.type == "cpu":
            if (gather := source.possible) is not None:
                measured["gather_ns"] = fastest(lambda: gather.batch(indices), MOST_RUNS, GATHER_NS)[0]
            items = _time_items(source.data, indices.tolist(), measured)
            random = not same_item(torch, items[0], source.data[indices[0].item()], unknown=True)
            # As many items as fit the budget even if collating took all of the sample's time, scaled up if not all.
            affordable = int(COLLATE_NS / max(sample_ns / sampler.micro, 1.0))
            count = min(sampler.micro, max(affordable, 1))
            batch, join = (items * -(-count // len(items)))[:count], source.collate or default_collate
            joining_ns = fastest(lambda: join(batch), 2, COLLATE_NS // 2)[0]
            measured["collate_ns"] = joining_ns * sampler.micro / count
    return LoaderEvent(
        items=sampler.items,
        micro=sampler.micro,
        in_memory=source.possible is not None,
        encoded=source.encoded,
        epochs_differ=sampler.epochs_differ or random,
        batch_bytes=item_bytes(sample) or None,
        **measured,
    )


def _delay_ns() -> int | None:
    """Nanoseconds for which this thread could run and had no core, since its start; None if unknown.

    The second figure of schedstat; see the kernel's documentation of scheduler statistics.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _time_items(data: Any, indices: Sequence[int], measured: dict[str, Any]) -> list[Any]:
    """Time items at `indices` until the budget is used up, and return them."""
    items: list[Any] = []
    delayed = _delay_ns()
    begin, begin_cpu = time.perf_counter_ns(), time.thread_time_ns()
    for index in indices[:MOST_ITEMS]:
        items.append(data[index])
        if time.perf_counter_ns() - begin > ITEMS_NS:
            break
    wall, cpu = time.perf_counter_ns() - begin, time.thread_time_ns() - begin_cpu
    delayed_until = _delay_ns()
    measured["probed"] = len(items)
    if delayed is not None and delayed_until is not None:
        measured["item_delay_ns"] = min(max(delayed_until - delayed, 0), wall) / len(items)
    # The two clocks are not read at the same instant.
    measured["item_ns"], measured["item_cpu_ns"] = wall / len(items), min(cpu, wall) / len(items)
    return items

"""The place in an order that is not the engine's own: the end of a pass, whether it has a step, and whether a
checkpoint's place applies.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from ndd_engine.config.schema import Config
from ndd_engine.errors import TrainingError
from ndd_engine.text import counted
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.order import Order, item_count

from .indices import IndexOrder, length
from .loader import Batches
from .stream import StreamOrder

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

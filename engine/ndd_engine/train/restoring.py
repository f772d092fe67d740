"""What a checkpoint of a loop contains, and how it is restored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .random_state import random_state

if TYPE_CHECKING:
    from .loop import Loop


def state_of(loop: Loop) -> dict[str, Any]:
    """The contents of a checkpoint. The learning rate follows from the step, as does the engine's order."""
    return {
        "format": 1,
        "step": loop.step,
        "workload": loop.config.workload.name,
        "effective_batch": loop.config.items_per_step,
        "items": loop.batches.items,
        "data_crc": loop.batches.crc,
        "order": loop.batches.order,
        "position": loop.batches.state(),
        "seed": loop.config.run.seed,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "random": random_state(loop.stepper.device),
        **loop.callbacks.state(),
        **loop.stepper.state(),
    }


def load_state(loop: Loop, state: dict[str, Any]) -> None:
    """Restore a checkpoint, except for the random generators. Raises what Stepper.load raises."""
    loop.stepper.load(state)
    loop.batches.load(state["position"])
    loop.step = loop.stepper.training.step = int(state["step"])
    loop.callbacks.load(state)

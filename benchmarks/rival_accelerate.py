"""The training loop with Hugging Face Accelerate, as in its documentation. Requires the extra `bench`."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, __version__  # type: ignore[import-not-found]
from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-not-found]

from ndd_engine.config import Config
from ndd_engine.workloads.base import Workload

from .rival_loops import READ_EVERY, Rival

VERSION = str(__version__)
SETTINGS = (
    "model, optimizer and loader through prepare, accumulate, backward, clip_grad_norm_ and the loss read every "
    f"{READ_EVERY} steps; no tracker, no checkpoint, no progress bar"
)


class Accelerated(Rival):
    """Accelerator.prepare for model, optimizer and loader; accumulate, backward and clip_grad_norm_ through it."""

    name = "Accelerate"

    def __init__(self, config: Config, workload: Workload, device: torch.device) -> None:
        super().__init__(config, workload, device)
        # Shared by all Accelerators of a process; the next case may use a different precision or accumulation.
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator: Any = Accelerator(
            cpu=device.type == "cpu",
            mixed_precision="bf16" if config.precision.amp == "bf16" else "no",
            gradient_accumulation_steps=config.batch.accumulation,
        )
        self.prepared: Any = self.accelerator.prepare(self.model, self.optimizer, self.loader)

    def train(self, epoch: int, steps: int) -> None:
        """See Side."""
        accelerator, max_norm = self.accelerator, self.config.clip.max_norm
        model, optimizer, loader = self.prepared
        forward, loss_of = self.witness.forward, self.witness.loss
        self.order.set(epoch)
        done = 0
        while done < steps:
            for batch in loader:
                with accelerator.accumulate(model):
                    with accelerator.autocast():
                        output = forward(model, batch)
                        loss = loss_of(output, batch)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and max_norm > 0:
                        accelerator.clip_grad_norm_(model.parameters(), max_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    done += 1
                    if done % READ_EVERY == 0:
                        self.last_loss = loss.item()
                    if done == steps:
                        loader.end()  # leaves the epoch early
                        break

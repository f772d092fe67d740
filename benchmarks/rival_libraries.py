"""The same training with Lightning's Trainer and Hugging Face Accelerate, as in their documentation, all options off.

Each function imports its library, of the extra `bench`, and returns the loop.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import Tensor

from ndd_engine.config import Config
from ndd_engine.workloads.base import Workload

from .rival_loops import READ_EVERY, Rival


def lightning() -> type[Rival]:
    """One Trainer per block, with the same module, optimizer and loader."""
    from lightning import LightningModule, Trainer  # type: ignore[import-not-found]

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self, rival: Lightning) -> None:
            super().__init__()
            self.model = rival.model
            # Bypasses nn.Module.__setattr__.
            self.__dict__["rival"] = rival
            self._calls = 0

        def training_step(self, batch: Any, _index: int) -> Tensor:
            """Forward and loss."""
            rival: Lightning = self.__dict__["rival"]
            loss = rival.witness.loss(rival.witness.forward(self.model, batch), batch)
            self._calls += 1
            if self._calls % (READ_EVERY * rival.config.batch.accumulation) == 0:
                rival.last_loss = loss.item()
            return loss

        def configure_optimizers(self) -> Any:
            """The same optimizer in every block, with its state."""
            return self.__dict__["rival"].optimizer

    class Lightning(Rival):
        name = "Lightning"
        settings = (
            "automatic optimization, gradient_clip_val, accumulate_grad_batches and the loss read every "
            f"{READ_EVERY} steps in training_step; logger, checkpoints, progress bar, model summary, validation and "
            "distributed sampler off, nothing logged"
        )

        def __init__(self, config: Config, workload: Workload, device: torch.device) -> None:
            super().__init__(config, workload, device)
            # Silence advice on workers and progress; the settings are deliberate.
            logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
            warnings.filterwarnings("ignore", module=r"lightning\..*")
            self.module = Module(self)

        def train(self, epoch: int, steps: int) -> None:
            config, device = self.config, self.device
            self.order.set(epoch)
            trainer = Trainer(
                accelerator="cpu" if device.type == "cpu" else "gpu",
                devices=1 if device.type == "cpu" else [device.index or 0],
                max_epochs=-1,
                max_steps=steps,
                limit_val_batches=0,
                precision="bf16-mixed" if config.precision.amp == "bf16" else "32-true",
                gradient_clip_val=config.clip.max_norm or None,
                accumulate_grad_batches=config.batch.accumulation,
                use_distributed_sampler=False,
                logger=False,
                enable_progress_bar=False,
                enable_checkpointing=False,
                enable_model_summary=False,
                num_sanity_val_steps=0,
            )
            trainer.fit(self.module, self.loader)

    return Lightning


def accelerate() -> type[Rival]:
    """Accelerator.prepare for model, optimizer and loader; accumulate, backward and clip_grad_norm_ through it."""
    from accelerate import Accelerator  # type: ignore[import-not-found]
    from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-not-found]

    class Accelerated(Rival):
        name = "Accelerate"
        settings = (
            "model, optimizer and loader through prepare, accumulate, backward, clip_grad_norm_ and the loss read "
            f"every {READ_EVERY} steps; no tracker, no checkpoint, no progress bar"
        )

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
            accelerator, max_norm = self.accelerator, self.config.clip.max_norm
            model, optimizer, loader = self.prepared
            forward, loss_of = self.witness.forward, self.witness.loss
            self.order.set(epoch)
            done = 0
            while done < steps:
                for batch in loader:
                    with accelerator.accumulate(model):
                        with accelerator.autocast():
                            loss = loss_of(forward(model, batch), batch)
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

    return Accelerated

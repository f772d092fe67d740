"""The training loop of Lightning's Trainer, with all optional features off. Requires the extra `bench`."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from lightning import LightningModule, Trainer, __version__  # type: ignore[import-not-found]
from torch import Tensor

from ndd_engine.config import Config
from ndd_engine.workloads.base import Workload

from .rival_loops import READ_EVERY, Rival

VERSION = str(__version__)
SETTINGS = (
    "automatic optimization, gradient_clip_val, accumulate_grad_batches and the loss read every "
    f"{READ_EVERY} steps in training_step; logger, checkpoints, progress bar, model summary, validation and "
    "distributed sampler off, nothing logged"
)


class _Module(LightningModule):  # type: ignore[misc]
    def __init__(self, rival: Lightning) -> None:
        super().__init__()
        self.model = rival.model
        # Bypasses nn.Module.__setattr__.
        self.__dict__["rival"] = rival
        self._calls = 0

    def training_step(self, batch: Any, _index: int) -> Tensor:
        """Forward and loss."""
        rival: Lightning = self.__dict__["rival"]
        output = rival.witness.forward(self.model, batch)
        loss = rival.witness.loss(output, batch)
        self._calls += 1
        if self._calls % rival.read_every_calls == 0:
            rival.last_loss = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        """The same optimizer in every block, with its state."""
        rival: Lightning = self.__dict__["rival"]
        return rival.optimizer


class Lightning(Rival):
    """One Trainer per block, with the same module, optimizer and loader."""

    name = "Lightning"

    def __init__(self, config: Config, workload: Workload, device: torch.device) -> None:
        super().__init__(config, workload, device)
        # Silence advice on workers and progress; the settings are deliberate.
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=r"lightning\..*")
        self.read_every_calls = READ_EVERY * config.batch.accumulation
        self.module = _Module(self)

    def train(self, epoch: int, steps: int) -> None:
        """See Side."""
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

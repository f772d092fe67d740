"""The optimizer and the learning rate as configured."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ndd_engine.config.schema import OptimizerSection, ScheduleSection


def make_optimizer(
    config: OptimizerSection, model: nn.Module, device: torch.device, capturable: bool = False
) -> torch.optim.Optimizer:
    """The optimizer over all trainable parameters, in the configured implementation.

    capturable: the step will be captured in a CUDA graph, so the learning rate is a tensor on the device.
    Raises RuntimeError from torch if the configured implementation is not available.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = config.implementation
    if kind == "auto":
        plain = all(parameter.is_floating_point() for parameter in parameters)
        kind = "fused" if device.type in ("cuda", "cpu") and plain else "foreach"
    common: dict[str, Any] = {
        "lr": torch.tensor(config.lr, device=device) if capturable else config.lr,
        "weight_decay": config.weight_decay,
        "fused": kind == "fused",
        "foreach": kind == "foreach",
    }
    if config.name == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **common)
    adam = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    betas = (config.betas[0], config.betas[1])
    return adam(parameters, betas=betas, eps=config.eps, capturable=capturable, **common)


def learning_rate(step: int, total_steps: int, lr: float, schedule: ScheduleSection) -> float:
    """Learning rate of optimizer step `step` (0-based); depends on nothing else, so a resume needs no state."""
    if step < schedule.warmup_steps:
        return lr * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return lr
    span = max(total_steps - schedule.warmup_steps, 1)
    share = min((step - schedule.warmup_steps) / span, 1.0)
    return schedule.min_lr + (lr - schedule.min_lr) * 0.5 * (1 + math.cos(math.pi * share))

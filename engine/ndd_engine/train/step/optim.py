"""Precision, optimizer and learning rate as configured, and what became of "auto"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ndd_engine.config.schema import Config, OptimizerSection, ScheduleSection


@dataclass
class Precision:
    """How the forward pass computes. autocast None: fp32 throughout. scaler None: no loss scaling."""

    name: str
    autocast: torch.autocast | None
    scaler: torch.amp.GradScaler | None


def make_precision(config: Config, device: torch.device) -> Precision:
    """Mixed precision for the device; sets the TF32 switches on a card."""
    amp = config.precision.amp
    if amp == "auto":
        amp = "off"
        if device.type == "cuda":
            # Before compute capability 8.0 bf16 is emulated: fp16 with scaling is the fast one there.
            amp = "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.precision.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.precision.tf32
    if amp == "off":
        tf32 = (
            config.precision.tf32
            and device.type == "cuda"
            and torch.cuda.get_device_capability(device) >= (8, 0)
        )
        return Precision("tf32" if tf32 else "fp32", None, None)
    dtype = torch.bfloat16 if amp == "bf16" else torch.float16
    scaler = torch.amp.GradScaler(device.type) if amp == "fp16" else None
    return Precision(amp, torch.autocast(device.type, dtype=dtype), scaler)


def make_optimizer(
    config: OptimizerSection, model: nn.Module, device: torch.device, capturable: bool = False
) -> torch.optim.Optimizer:
    """The optimizer over all trainable parameters, in the configured implementation.

    capturable: its step will be recorded in a CUDA graph, so the learning rate is a tensor on the device.
    Raises RuntimeError from torch when an implementation is asked for and not to be had.
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
    """The rate for optimizer step `step` (0-based) of `total_steps`: a pure function, so a resume needs no state."""
    if step < schedule.warmup_steps:
        return lr * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return lr
    span = max(total_steps - schedule.warmup_steps, 1)
    share = min((step - schedule.warmup_steps) / span, 1.0)
    return schedule.min_lr + (lr - schedule.min_lr) * 0.5 * (1 + math.cos(math.pi * share))

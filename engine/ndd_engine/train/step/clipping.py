"""Gradient clipping by the global norm, also of parameters that several ranks share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients in place to a norm of at most `max_norm`; returns the norm before, a scalar on the device.

    Sharded gradients (DTensor) are measured by all ranks together, with one exchange; all ranks must call it.
    """
    parameters = list(parameters)
    gradients = [item.grad for item in parameters if item.grad is not None]
    if not any(hasattr(item, "full_tensor") for item in gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    norm = torch.nn.utils.get_total_norm(gradients)
    # Read now, not where it is recorded: not every rank records.
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm

"""What the scripts of the cases share: a small model, batches, a training, and the last word about its weights."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable
from typing import Any

import torch

torch.set_num_threads(1)
torch.manual_seed(0)
nn = torch.nn
mse = torch.nn.functional.mse_loss


class SGD(torch.optim.SGD):
    """That of torch without its wrappers for torch.compile, whose import takes longer than the rest of a case.

    Cases that make optimizers of torch themselves have the wrappers.
    """

    state_dict, load_state_dict, zero_grad, add_param_group = (
        inspect.unwrap(getattr(torch.optim.SGD, name))
        for name in ("state_dict", "load_state_dict", "zero_grad", "add_param_group")
    )
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


def net(wide: int = 16, deep: int = 1) -> Any:
    """A model of 8 numbers."""
    layers: list[Any] = [nn.Linear(8, wide), nn.Tanh()]
    for _ in range(deep - 1):
        layers += [nn.Linear(wide, wide), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(wide, 1))


def make(seed: int = 0, lr: float = 0.05) -> tuple[Any, Any]:
    """A model and its optimizer; both are the same for the same seed."""
    torch.manual_seed(seed)
    model = net()
    return model, SGD(model.parameters(), lr=lr, momentum=0.9)


def batch(size: int = 16) -> tuple[Any, Any]:
    """Inputs and their targets."""
    x = torch.randn(size, 8)
    return x, x.sum(1, keepdim=True).tanh()


def step(model: Any, optimizer: Any) -> Any:
    """One step; returns its loss."""
    x, y = batch()
    loss: Any = mse(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def train(steps: int = 30, seed: int = 0, tell: bool = True) -> Any:
    """A whole training; returns its model."""
    model, optimizer = make(seed)
    for _ in range(steps):
        step(model, optimizer)
    if tell:
        done(steps, model)
    return model


def sha(what: Any) -> str:
    """A hash of weights: of a module, or of tensors."""
    found: Iterable[Any] = what.parameters() if hasattr(what, "parameters") else what
    text = repr([each.detach().double().cpu().reshape(-1).tolist() for each in found])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def done(steps: int, what: Any) -> None:
    """The last word."""
    print("STEPS", steps, "WEIGHTS", sha(what), flush=True)

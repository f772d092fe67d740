"""Saves and restores what a forward pass that does not count changes: random generators, buffers, extra states."""

from __future__ import annotations

import copy
import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from ndd_engine.batches import expanded


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of torch's, Python's and, where it is imported, NumPy's generators, fit for a checkpoint."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss]}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [kind, keys.tolist(), int(position), int(has_gauss), float(cached)]
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `random_state` returned.

    NumPy is imported if the state has one of it: data that imports it later would draw other numbers. If the state has
    none although NumPy is imported now, its generator is seeded like torch's.
    """
    torch.set_rng_state(state["torch"].cpu())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    numpy: Any = sys.modules.get("numpy")
    if "numpy" in state:
        if numpy is None:
            with suppress(ImportError):
                numpy = importlib.import_module("numpy")
        if numpy is not None:
            numpy.random.set_state(tuple(state["numpy"]))
    elif numpy is not None:
        numpy.random.seed(torch.initial_seed() % 2**32)


def seeded_random_state(seed: int, device: torch.device) -> dict[str, Any]:
    """What `random_state` returns right after seeding torch's and Python's generators, which stay as they are."""
    version, internal, gauss = random.Random(seed).getstate()
    state = {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "python": [version, list(internal), gauss],
    }
    if device.type == "cuda":
        state["cuda"] = torch.Generator(device).manual_seed(seed).get_state()
    return state


@contextmanager
def kept_random(device: torch.device) -> Iterator[None]:
    """Restore all generators on exit, so that random numbers drawn inside leave no trace."""
    before = random_state(device)
    try:
        yield
    finally:
        restore_random_state(before, device)


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore buffers, also those that the model replaces by other tensors, and extra states on exit."""
    before = [
        (module, name, buffer, None if buffer is None or expanded(buffer) else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    extra = [
        (module, copy.deepcopy(module.get_extra_state()))
        for module in model.modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in before:
                if buffer is not None and value is not None:
                    buffer.copy_(value)
                module._buffers[name] = buffer
        for module, state in extra:
            module.set_extra_state(state)

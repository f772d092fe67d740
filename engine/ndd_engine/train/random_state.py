"""Saves and restores every random generator that a model or a dataset of this process may draw from."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


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

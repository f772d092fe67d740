"""Restores what a forward pass that does not count changes in a model: its buffers and extra states."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ndd_engine.batches import expanded


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

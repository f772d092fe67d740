"""Reads losses back from the device without waiting for it.

The loss of every step is kept as a tensor and every N steps all of them are copied to the host at once. On a GPU the
copy is asynchronous and is read when its event is done.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class LossReader:
    """Collects (step, loss) and returns them as floats some steps later, in order."""

    device: torch.device
    every: int
    extras: dict[str, float] = field(default_factory=dict)
    _steps: list[int] = field(default_factory=list)
    _losses: list[Tensor] = field(default_factory=list)
    _beside: dict[str, Tensor] = field(default_factory=dict)
    _flying: deque[tuple[list[int], list[str], Tensor, Any]] = field(default_factory=deque)

    def add(self, step: int, loss: Tensor, beside: dict[str, Tensor]) -> list[tuple[int, float]]:
        """Add the loss of optimizer step `step` (a detached scalar); returns the losses that have reached the host.

        beside: other scalars on the device; their newest values arrive in `extras`.
        """
        self._steps.append(step)
        self._losses.append(loss)
        self._beside = beside
        if len(self._losses) >= self.every:
            self._send()
        return self._arrived() if self._flying else []

    def drain(self) -> list[tuple[int, float]]:
        """Return all outstanding losses; waits for the device. Used before checkpoints and at the end."""
        self._send()
        return self._arrived(wait=True)

    def _send(self) -> None:
        if not self._losses:
            return
        packed = torch.stack([value.float() for value in (*self._losses, *self._beside.values())])
        event = None
        if self.device.type == "cuda":
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            packed = host
        self._flying.append((self._steps, list(self._beside), packed, event))
        self._steps, self._losses = [], []

    def _arrived(self, wait: bool = False) -> list[tuple[int, float]]:
        out: list[tuple[int, float]] = []
        while self._flying:
            steps, names, packed, event = self._flying[0]
            if event is not None:
                if wait:
                    event.synchronize()
                elif not event.query():
                    break
            self._flying.popleft()
            values = packed.tolist()
            out += zip(steps, values[: len(steps)], strict=True)
            self.extras.update(zip(names, values[len(steps) :], strict=True))
        return out


def first_bad(losses: list[tuple[int, float]]) -> tuple[int, float] | None:
    """The first (step, loss) that is not finite."""
    return next(((step, value) for step, value in losses if not math.isfinite(value)), None)

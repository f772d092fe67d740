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
    """Collects (step, loss) and returns them as floats some steps later, in order.

    extras: newest values of the scalars beside the loss. scalars: (name, value) of those that were logged and arrived.
    """

    device: torch.device
    every: int
    extras: dict[str, float] = field(default_factory=dict)
    scalars: list[tuple[str, float]] = field(default_factory=list)
    _steps: list[int] = field(default_factory=list)
    _losses: list[Tensor] = field(default_factory=list)
    _beside: dict[str, Tensor] = field(default_factory=dict)
    _logged: list[tuple[str, Tensor]] = field(default_factory=list)
    _flying: deque[tuple[list[int], list[str], list[str], Tensor, Any]] = field(default_factory=deque)

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

    def log(self, values: list[tuple[str, Tensor | float]]) -> None:
        """Add scalars by name; those on the device arrive together with the losses."""
        for name, value in values:
            if isinstance(value, Tensor):
                self._logged.append((name, value))
            else:
                self.scalars.append((name, value))

    def drain(self) -> list[tuple[int, float]]:
        """Return all outstanding losses; waits for the device. Used before checkpoints and at the end."""
        self._send()
        return self._arrived(wait=True)

    def _send(self) -> None:
        if not self._losses and not self._logged:
            return
        logged = [value for _, value in self._logged]
        values = (*self._losses, *self._beside.values(), *logged)
        # The call alone takes a microsecond, also where it changes nothing.
        packed = torch.stack([item if item.dtype is torch.float32 else item.float() for item in values])
        event = None
        if self.device.type == "cuda":
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            packed = host
        names = [name for name, _ in self._logged]
        self._flying.append((self._steps, list(self._beside), names, packed, event))
        self._steps, self._losses, self._logged = [], [], []

    def _arrived(self, wait: bool = False) -> list[tuple[int, float]]:
        out: list[tuple[int, float]] = []
        while self._flying:
            steps, names, logged, packed, event = self._flying[0]
            if event is not None:
                if wait:
                    event.synchronize()
                elif not event.query():
                    break
            self._flying.popleft()
            values = packed.tolist()
            out += zip(steps, values[: len(steps)], strict=True)
            last = len(values) - len(logged)
            self.extras.update(zip(names, values[len(steps) : last], strict=True))
            self.scalars += zip(logged, values[last:], strict=True)
        return out


def first_bad(losses: list[tuple[int, float]]) -> tuple[int, float] | None:
    """The first (step, loss) that is not finite."""
    return next(((step, value) for step, value in losses if not math.isfinite(value)), None)

"""Keeps something for each step, in one of many ways; knows nothing of the console. See qa/faults/script_faults.py.

Arguments: the way; bytes a step. SCRIPT_S: seconds. The line that keeps ends with "# keeps WAY". Ways that begin with
"not-" keep a limited amount.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

WAY, SIZE, SECONDS = sys.argv[1], int(float(sys.argv[2])), float(os.environ["SCRIPT_S"])
NUMBERS = max(SIZE // 4, 1)

history: list[Tensor] = []
outputs: dict[int, Tensor] = {}


class Meter:
    """Counts what it is told."""

    every: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.recent: deque[dict[str, Tensor]] = deque()
        self.buffer: dict[str, list[Tensor]] = {"scalars": []}

    def update(self, value: Tensor) -> None:
        self.values.append(value)  # keeps attribute

    def note(self, value: Tensor) -> None:
        self.recent.append({"value": value})  # keeps deque

    def write(self, value: Tensor) -> None:
        self.buffer["scalars"].append(value)  # keeps writer

    def share(self, value: Tensor) -> None:
        Meter.every.append((time.time(), value))  # keeps class


class Items(Dataset[Tensor]):
    """Keeps what it has made."""

    def __init__(self) -> None:
        self.cache: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> Tensor:
        if index not in self.cache:
            self.cache[index] = torch.ones(NUMBERS)  # keeps dataset
        return self.cache[index]


@cache  # keeps cache
def table(step: int) -> Tensor:
    return torch.ones(NUMBERS) * step


def remember(value: Tensor, seen: list[Tensor] = []) -> int:  # noqa: B006 - this is the fault
    seen.append(value)  # keeps default
    return len(seen)


def keeper() -> Callable[[Tensor], None]:
    kept: list[Tensor] = []

    def keep(value: Tensor) -> None:
        kept.append(value)  # keeps closure

    return keep


class Net(nn.Module):
    """A small model with a buffer that its forward extends."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
        self.seen: Tensor = torch.zeros(1, NUMBERS)

    def forward(self, x: Tensor) -> Tensor:
        if WAY == "buffer":
            self.seen = torch.cat([self.seen, torch.zeros(1, NUMBERS)])  # keeps buffer
        return self.inner(x)  # type: ignore[no-any-return]


def numbers(step: int) -> list[dict[str, float]]:
    return [{"step": float(step), "other": float(number)} for number in range(SIZE // 250)]


def main() -> None:
    torch.manual_seed(0)
    model, items, meter, keep = Net(), Items(), Meter(), keeper()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = next(model.parameters())
    losses: list[Tensor] = []
    views: list[Tensor] = []
    records: list[dict[str, float]] = []
    parts: set[bytes] = set()
    last: deque[Tensor] = deque(maxlen=200)
    ring: list[Tensor] = []
    step, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        loss = (model(torch.randn(256, 64)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = torch.ones(NUMBERS)
        if WAY == "local":
            losses.append(value)  # keeps local
        elif WAY == "global":
            history.append(value)  # keeps global
        elif WAY == "dict":
            outputs[step] = value  # keeps dict
        elif WAY == "attribute":
            meter.update(value)
        elif WAY == "deque":
            meter.note(value)
        elif WAY == "writer":
            meter.write(value)
        elif WAY == "class":
            meter.share(value)
        elif WAY == "dataset":
            items[step]
        elif WAY == "cache":
            table(step)
        elif WAY == "default":
            remember(value)
        elif WAY == "closure":
            keep(value)
        elif WAY == "hooks":
            model.inner.register_forward_hook(lambda *_, value=value: None)  # keeps hooks
        elif WAY == "state":
            optimizer.state[first].setdefault("old", []).append(value)  # keeps state
        elif WAY == "numbers":
            records += numbers(step)  # keeps numbers
        elif WAY == "bytes":
            parts.add(b"%020d" % step + bytes(SIZE))  # keeps bytes
        elif WAY == "view":
            views.append(value[:1])  # keeps view
        elif WAY == "not-deque":
            last.append(value)
        elif WAY == "not-freed":  # more and more, all of it freed again
            pieces = [torch.ones(NUMBERS) for _ in range(step)]
            del pieces
        elif WAY == "not-ring":
            if len(ring) < 200:
                ring.append(value)
            else:
                ring[step % 200] = value
        step += 1
        time.sleep(max(0.004, SIZE / 1e8))  # at most about 100 MB a second
    print("steps", step)


if __name__ == "__main__":
    main()

"""An ordinary training script with a function of pure Python: `python fixed_work.py KIND MILLISECONDS`.

It does the same work in every step, and writes the mean time of that to the file `milliseconds`. KIND: a plain loop,
calls of a small function, or calls of built-in ones.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

KIND, MS = sys.argv[1], float(sys.argv[2])
SECONDS = float(os.environ.get("SCRIPT_S", "1e9"))


def loop(count: int) -> float:
    total = 0.0
    for value in range(count):
        total += value * 0.5
    return total


def scaled(value: int) -> float:
    return value * 0.5 + 1


def calls(count: int) -> float:
    total = 0.0
    for value in range(count):
        total += scaled(value)
    return total


def builtins(count: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for value in range(count):
        found.setdefault(str(value % 50), []).append(value)
    return found


def timed(count: int) -> float:
    begin = time.perf_counter()
    {"loop": loop, "calls": calls, "builtins": builtins}[KIND](count)
    return time.perf_counter() - begin


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 320), nn.ReLU(), nn.Linear(320, 320), nn.ReLU(), nn.Linear(320, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x, y = torch.randn(128, 64), torch.randn(128, 1)
    count = 1000
    count = round(count * MS / 1e3 / min(timed(count) for _ in range(50)))
    spent = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        spent.append(timed(count))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    Path("milliseconds").write_text(f"{sum(spent) / len(spent) * 1e3}")


if __name__ == "__main__":
    main()

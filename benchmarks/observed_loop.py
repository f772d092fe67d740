"""An ordinary training loop for `benchmarks.observe`: trains blocks with the observer's hooks in place and taken out.

`python observed_loop.py MILLISECONDS ROUNDS SECONDS`, in a process that the observer entered, prints one JSON object.
SECONDS: of a block. With 0 rounds it trains for SECONDS, hooks in place, and prints when each step ended.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# Untimed steps after a switch: the observer arms at the first backward pass.
SETTLE = 4
# Seconds of observed training before: the observer learns what the steps call, and how often to time their phases.
WARM_S = 2.0
ORDER = (0, 1, 1, 0, 1, 0, 0, 1)


def raw_s() -> float:
    """A clock that nothing adjusts, and that the observer does not read."""
    return time.clock_gettime(time.CLOCK_MONOTONIC_RAW)


class Loop:
    """The model and its loader. width: of the layers; batch: items of a step."""

    def __init__(self, width: int, batch: int) -> None:
        torch.manual_seed(0)
        self.width, self.batch = width, batch
        self.model = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        data = TensorDataset(torch.randn(64 * batch, 64), torch.randn(64 * batch, 1))
        self.loader = DataLoader(data, batch_size=batch)
        self._batches = self._endless()
        self.loss: Any = None

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def train(self, steps: int) -> tuple[float, float]:
        """Seconds, and seconds of processor time of all threads, of one step."""
        begin, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            x, y = next(self._batches)
            self.optimizer.zero_grad()
            self.loss = ((self.model(x) - y) ** 2).mean()
            self.loss.backward()
            self.optimizer.step()
        return (time.perf_counter() - begin) / steps, (time.process_time() - used) / steps


def sized(step_s: float) -> Loop:
    """A loop whose steps take about so long on this machine."""
    width, batch = 128, 8
    while True:
        loop = Loop(width, batch)
        loop.train(20)
        found, _ = loop.train(20)
        if found >= step_s or batch >= 1 << 14:
            return loop
        # The cost of a step grows more slowly than its batch while operators are small.
        batch = min(max(int(batch * min(step_s / found, 4)), batch + 8), 1 << 14)
        width = min(width * 2, 1024) if found < step_s / 4 else width


def main() -> None:
    """Measure, and print."""
    step_s, rounds, block_s = float(sys.argv[1]) / 1e3, int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    loop = sized(step_s)
    observer: Any = sys.modules["_ndd_watch.install"].observer
    loop.train(round(WARM_S / step_s))
    kinds = list(observer.modules.hooked)
    step, _ = loop.train(20)
    steps = max(round(block_s / step), 4)
    body: dict[str, Any] = {"step_s": step, "steps": steps, "every": 1}
    if not rounds:
        body["ends"] = _ends(loop, observer, block_s)
    else:
        body["rounds"] = [_round(loop, observer, kinds, steps) for _ in range(rounds)]
        body["every"] = observer.steps.every
    print(json.dumps(body))


def _round(loop: Loop, observer: Any, kinds: list[type], steps: int) -> list[tuple[int, float, float]]:
    """Eight blocks: whether the hooks were in place, and what a step took."""
    found = []
    for on in ORDER:
        observer.stop()
        if on:
            observer.start(lambda name, then: None)  # this loop imports nothing later
            for kind in kinds:
                observer.modules.hook(kind)
        loop.train(SETTLE)
        found.append((on, *loop.train(steps)))
    return found


def _ends(loop: Loop, observer: Any, seconds: float) -> dict[int, float]:
    """Train for so long; the number of each step, as the observer counts them, and when it ended."""
    found: dict[int, float] = {}
    end_s = raw_s() + seconds
    while raw_s() < end_s:
        loop.train(1)
        found[observer.steps.done] = raw_s()
    return found


if __name__ == "__main__":
    main()

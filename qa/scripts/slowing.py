"""An ordinary training script that becomes slower with each step: `python slowing.py KIND MICROSECONDS`.

It knows nothing of the console. MICROSECONDS: roughly by how much each step takes longer than the one before. With 0 it
is the innocent twin: what would grow is limited. Two kinds look alike, and do not become slower by themselves. Of
`drifts` it is by how many percent of its usual time a step takes longer with each minute.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import deque
from pathlib import Path

import torch
from torch import Tensor, nn

KIND, US = sys.argv[1], float(sys.argv[2])
SECONDS = float(os.environ.get("SCRIPT_S", "1e9"))
WIDTH = 256
# Steps, at the beginning, that tell how long one usually takes.
USUAL = 500
HANDLER = logging.Handler()
HANDLER.emit = lambda record: time.sleep(US * 1e-6) if US else None  # type: ignore[method-assign]
LOG = logging.getLogger("train")


def is_planted(kind: str) -> bool:
    return kind == KIND and US > 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.memory: list[Tensor] = []

    def recall(self, x: Tensor) -> Tensor:
        """What it has seen, all of it in each step."""
        self.memory += [x.detach()] * max(round(US / 20), 1)
        if not US:
            del self.memory[:-4]
        return torch.cat(self.memory).mean(0)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.block:
            x = torch.relu(layer(x))
        if KIND == "concatenates":
            x = x + self.recall(x)
        state = self.cell(x, state)
        return x, state


def watch(model: Net) -> None:
    """A hook for each step, as to look at activations."""
    means: deque[float] = deque(maxlen=1)
    handles = [
        model.block[2].register_forward_hook(lambda module, given, output: means.append(output.mean().item()))
        for _ in range(max(round(US / 10), 1))
    ]
    if not US:
        handles[0].remove()


def note(model: Net) -> None:
    """Hooks that do nothing: steps do not become slower yet."""
    handles = [model.block[1].register_forward_hook(lambda *_: None) for _ in range(int(US) or 1)]
    if not US:
        handles[0].remove()


def median_loss(losses: list[float] | deque[float], loss: float) -> float:
    losses.extend([loss] * max(round(US * 4), 1))
    return sorted(losses, key=lambda value: -value)[len(losses) // 2]


def average(optimizer: torch.optim.Optimizer, parameter: Tensor) -> float:
    """Of values that the optimizer's state keeps of a parameter, all of them in each step."""
    kept: list[float] = optimizer.state[parameter].setdefault("norms", [])
    kept += [1.0] * max(round(US * 20), 10)
    if not US:
        del kept[:-10]
    return sum(value * value for value in kept)


def drift(usual_s: float, minutes: float) -> None:
    """Take as much longer as the rate asks for."""
    end = time.perf_counter() + usual_s * US / 100 * minutes
    while time.perf_counter() < end:
        pass


def save_history(history: list[dict[str, float]], loss: float) -> None:
    history.extend([{"loss": loss}] * max(round(US / 2), 1))
    if not US:
        del history[:-20]
    Path("history.json").write_text(json.dumps(history), "utf-8")


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=KIND == "piles-up")
    state = torch.zeros(64, WIDTH)
    losses: list[float] | deque[float] = deque(maxlen=2000) if KIND == "sorts" and not US else []
    history: list[dict[str, float]] = []
    begin = time.perf_counter()
    step, usual_s = 0, 0.0
    while time.perf_counter() - begin < SECONDS:
        count = 64 + step // 20 if KIND == "larger-batches" else 64
        x = torch.randn(count, WIDTH)
        if count > len(state):
            state = torch.zeros(count, WIDTH)
        if not is_planted("graph"):
            state = state.detach()
        for _ in range(int(US) if is_planted("graph") else 1):
            _, state = model(x, state)
        loss = state.square().mean()
        optimizer.zero_grad()
        if KIND == "graph":
            loss.backward(retain_graph=US > 0)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.data = parameter.data - 1e-3 * parameter.grad
        else:
            loss.backward()
            optimizer.step()
        if KIND == "hooks":
            watch(model)
        if KIND == "piles-up" and step % 8 == 0:
            note(model)
        if KIND == "sorts":
            median_loss(losses, loss.item())
        if KIND == "rewrites":
            save_history(history, loss.item())
        if KIND == "state":
            average(optimizer, model.cell.weight_hh)
        if KIND == "handlers":
            LOG.addHandler(logging.Handler())
            LOG.handlers[-1].emit = HANDLER.emit  # type: ignore[method-assign]
            LOG.warning("step %d", step)
            if not US:
                LOG.removeHandler(LOG.handlers[-1])
        if KIND == "parameters":
            for _ in range(max(round(US / 20), 1)):
                extra = nn.Parameter(torch.zeros(8))
                extra.grad = torch.zeros(8)
                optimizer.add_param_group({"params": [extra]})
                if not US:
                    optimizer.param_groups.pop()
        if KIND == "evaluates" and step % 200 == 199:
            model.eval()
            with torch.no_grad():
                for _ in range(20):
                    model(x, state)
            model.train()
        if KIND == "drifts":
            drift(usual_s, (time.perf_counter() - begin) / 60)
        step += 1
        if step == USUAL:
            usual_s = (time.perf_counter() - begin) / step


if __name__ == "__main__":
    main()

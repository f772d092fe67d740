"""Predicts sine waves with two LSTM cells and LBFGS, whose closure runs up to 20 times in a step."""

from __future__ import annotations

import sys

import torch
from ended import ended
from torch import Tensor, nn

torch.manual_seed(0)
starts = torch.randint(-80, 80, (100, 1))
waves = torch.sin((torch.arange(40) + starts) / 20.0).double()
inputs, targets = waves[3:, :-1], waves[3:, 1:]


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.LSTMCell(1, 51), nn.LSTMCell(51, 51), nn.Linear(51, 1)

    def forward(self, waves: Tensor) -> Tensor:
        h, c, h2, c2 = (torch.zeros(len(waves), 51, dtype=torch.double) for _ in range(4))
        outputs = []
        for value in waves.split(1, dim=1):
            h, c = self.first(value, (h, c))
            h2, c2 = self.second(h, (h2, c2))
            outputs.append(self.out(h2))
        return torch.cat(outputs, dim=1)


model, criterion = Sequence().double(), nn.MSELoss()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8)
steps = int(sys.argv[1])
loss = torch.zeros(())


def closure() -> Tensor:
    optimizer.zero_grad()
    error: Tensor = criterion(model(inputs), targets)
    error.backward()
    return error


for step in range(steps):
    loss = optimizer.step(closure)  # type: ignore[assignment,arg-type]
    with torch.no_grad():
        print("step", step, "test", criterion(model(waves[:3, :-1]), waves[:3, 1:]).item(), flush=True)
ended(model, steps, steps * len(inputs), loss.item())

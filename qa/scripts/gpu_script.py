"""An ordinary training script for the first checks of `make gpu`: `python gpu_script.py DEVICE WIDTH ROWS [item]`.

It trains as many steps as the file `steps` says. item: it reads the loss in each of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn


class Training:
    """A model of a few equal layers, and its steps."""

    def __init__(self, device: str, width: int) -> None:
        torch.manual_seed(0)
        self.device = device
        layers = (nn.Linear(width, width) for _ in range(4))
        self.model = nn.Sequential(*layers, nn.Linear(width, 1)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, x: Tensor) -> Tensor:
        """One step; returns its loss."""
        x = x.to(self.device, non_blocking=True)
        self.optimizer.zero_grad()
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


def main() -> None:
    device, width, rows = sys.argv[1], *map(int, sys.argv[2:4])
    left, training = int(Path("steps").read_text("utf-8")), Training(device, width)
    loader = torch.utils.data.DataLoader([torch.rand(rows, width) for _ in range(8)], batch_size=None)
    while left > 0:
        for x in loader:
            loss = training.step(x)
            left -= 1
            if "item" in sys.argv:
                loss.item()


if __name__ == "__main__":
    main()

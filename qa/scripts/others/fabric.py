"""Lightning Fabric; each item is made by many small operations."""

from __future__ import annotations

import sys

import lightning
import torch
from ended import ended
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 1900

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))
        for _ in range(6):
            x = torch.roll(x, 1, 2) * 0.5 + x * 0.5
        return x, index % 10


fabric = lightning.Fabric(accelerator="cpu", devices=1)
lightning.seed_everything(1)
fabric.launch()
model = nn.Sequential(
    nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
loader = fabric.setup_dataloaders(DataLoader(Noise(), batch_size=64, shuffle=True))
steps = items = 0
loss = torch.zeros(())
for epoch in range(int(sys.argv[1])):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        steps, items = steps + 1, items + len(x)
    fabric.print(epoch, loss.item(), flush=True)
ended(model, steps, items, loss.item())

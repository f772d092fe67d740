"""Configured by Hydra, which changes the working folder; regression on a table that fits into memory."""

from __future__ import annotations

import hydra
import torch
from ended import ended
from omegaconf import DictConfig
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(given: DictConfig) -> None:
    torch.manual_seed(given.seed)
    x = torch.randn(given.data.rows, given.data.columns)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), given.batch, shuffle=True)
    model = nn.Sequential(nn.Linear(given.data.columns, given.width), nn.GELU(), nn.Linear(given.width, 1))
    optimizer = hydra.utils.instantiate(given.optimizer, params=model.parameters())
    steps = items = 0
    loss = torch.zeros(())
    for epoch in range(given.epochs):
        for rows, sums in loader:
            loss = nn.functional.mse_loss(model(rows), sums)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps, items = steps + 1, items + len(rows)
        print("epoch", epoch, loss.item(), flush=True)
    torch.save(model.state_dict(), "model.pt")
    ended(model, steps, items, loss.item())


if __name__ == "__main__":
    main()

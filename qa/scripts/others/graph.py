"""A graph network that trains on its whole graph in each step, and evaluates after each."""

from __future__ import annotations

import sys

import torch
from ended import ended
from torch import Tensor, nn

torch.manual_seed(0)
NODES, EDGES, CLASSES = 1300, 10000, 7
x, y = torch.rand(NODES, 500), torch.randint(CLASSES, (NODES,))
adjacency = torch.zeros(NODES, NODES)
adjacency[torch.randint(NODES, (EDGES,)), torch.randint(NODES, (EDGES,))] = 1.0
adjacency += torch.eye(NODES)
adjacency /= adjacency.sum(1, keepdim=True)
known = torch.arange(NODES) < 140


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(500, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(torch.relu(adjacency @ self.first(x)), 0.5, self.training)
        return torch.log_softmax(adjacency @ self.second(x), dim=1)


model = Network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
loss = torch.zeros(())
epochs = int(sys.argv[1])
for epoch in range(epochs):
    model.train()
    optimizer.zero_grad()
    loss = nn.functional.nll_loss(model(x)[known], y[known])
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    if epoch % 100 == 0:
        print(f"epoch {epoch} loss {loss.item():.4f} accuracy {accuracy:.4f}", flush=True)
ended(model, epochs, epochs * NODES, loss.item())

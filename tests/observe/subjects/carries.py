"""Passes a state on without detaching it, and updates the parameters by hand beside an optimizer that never steps."""

import torch
from torch import nn

STEPS = 60
cell = nn.GRUCell(8, 8)
optimizer = torch.optim.SGD(cell.parameters(), lr=0.001)
state = torch.zeros(4, 8)
for _ in range(STEPS):
    state = cell(torch.randn(4, 8), state)
    loss = state.square().mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    for parameter in cell.parameters():
        parameter.data = parameter.data - 0.001 * parameter.grad
print("STEPS", STEPS)

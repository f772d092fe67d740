"""A compiled model with an argument that is a tensor. With `number`, it is a Python number that changes each step."""

import sys

import torch
from common import data, net, report

inner = net()


def forward(x, bins):
    return inner(x) * (1 + 0.001 * bins) if bins is not None else inner(x)


model = torch.compile(forward, backend="eager", dynamic=False)
optimizer = torch.optim.SGD(inner.parameters(), lr=0.01)
x, y = data(16).tensors
for step in range(40):
    bins = step if "number" in sys.argv else torch.tensor(float(step))
    loss = ((model(x, bins) - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
report(40, loss)

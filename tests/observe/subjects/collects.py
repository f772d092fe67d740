"""Many Python objects, and with `each` a garbage collection after each step."""

import gc
import sys

import torch
from common import data, net, report

kept = [{"id": number, "tags": [number]} for number in range(8_000)]
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = data(64).tensors
for step in range(80):
    loss = ((model(x) - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if "each" in sys.argv:
        gc.collect()
report(80, loss)

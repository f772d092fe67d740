"""A step of the optimizer fails, and the script goes on with the next batch."""

import torch
from common import data, net, report
from torch.utils.data import DataLoader

model = net()
optimizer = torch.optim.AdamW(model.parameters())
steps = tries = 0
for epoch in range(5):
    for x, y in DataLoader(data(), batch_size=16):
        tries += 1

        def closure():
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            if tries == 20:
                raise MemoryError("planted")
            return loss

        try:
            loss = optimizer.step(closure)
        except MemoryError:
            continue
        finally:
            optimizer.zero_grad()
        steps += 1
report(steps, loss)

import torch
from common import data, net
from torch.utils.data import DataLoader

model = net()
optimizer = torch.optim.AdamW(model.parameters())
steps = 0
for epoch in range(5):
    for x, y in DataLoader(data(), batch_size=16):
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if steps == 16:
            raise ValueError("no more")

"""Steps of 2 ms, most of which wait for data: only some of them are timed by phase."""

import time

import torch
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.ones(4)


model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x in DataLoader(Slow(), batch_size=1):
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("STEPS 1000")

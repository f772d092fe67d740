"""Trains an embedding with so many rows. With "parallel", the model is a DataParallel that knows two devices."""

import sys

import torch
from torch import nn

rows, words = int(sys.argv[1]), sys.argv[2:]
torch.manual_seed(0)
torch.set_num_threads(1)
STEPS = 60


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(rows, 8)

    def forward(self, x):
        return self.table(x).mean(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        # More modules than are heard usually.
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)], nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(self.encoder(x)).mean(1)


class Parallel(nn.DataParallel):
    """Runs where it is."""

    def forward(self, x):
        return self.module(x)


model = Net()
if "parallel" in words:
    model = Parallel(model)
    model.device_ids = [0, 1]
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(STEPS):
    for _ in range(2):  # micro-batches
        loss = model(torch.randint(rows, (4, 5))).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("STEPS", STEPS)

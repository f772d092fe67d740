"""Trains an embedding with so many rows. Words: "sparse", "tied" to the output layer, "functional" use beside it.

With "parallel", the model is a DataParallel that knows two devices, and runs where it is.
"""

import sys

import torch
from torch import nn
from torch.nn import functional

rows, words = int(sys.argv[1]), sys.argv[2:]
torch.manual_seed(0)
torch.set_num_threads(1)
STEPS = 60


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(rows, 8, sparse="sparse" in words)

    def forward(self, x):
        return self.table(x).mean(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.layers = nn.Sequential(
            *[nn.Linear(8, 8) for _ in range(20)]
        )  # more modules than are heard usually
        self.out = nn.Linear(8, rows if "tied" in words else 1, bias=False)
        if "tied" in words:
            self.out.weight = self.encoder.table.weight

    def forward(self, x):
        found = self.layers(self.encoder(x))
        if "functional" in words:
            return functional.linear(found, self.encoder.table.weight).mean(1)
        return self.out(found).mean(1)


class Parallel(nn.DataParallel):
    def forward(self, x):
        return self.module(x)


model = Net()
if "parallel" in words:
    model = Parallel(model)
    model.device_ids = [0, 1]
kind = torch.optim.SGD if "sparse" in words else torch.optim.Adam
optimizer = kind(model.parameters(), lr=0.01)
for _ in range(STEPS):
    for _ in range(2):  # micro-batches
        loss = model(torch.randint(rows, (4, 5))).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("STEPS", STEPS)

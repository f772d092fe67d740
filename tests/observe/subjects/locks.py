"""Hangs for a while in a native call that keeps the interpreter lock."""

import ctypes
import sys

import torch

SECONDS = int(sys.argv[1])


def stuck():
    ctypes.PyDLL(None).sleep(SECONDS)


model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    if step == 40:
        stuck()
    model(torch.ones(8, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("STEPS 60")

"""Passes retain_graph=True in each step, which "twice", "later", "grad", "carries" and "creates" need.

With "some" it does so in every other step only. With "wide", most of a step is its backward pass.
"""

import sys

import torch
from torch import nn

words = sys.argv[1:]
torch.manual_seed(0)
torch.set_num_threads(1)
STEPS = 120
WIDTH, ITEMS = (512, 256) if "wide" in words else (32, 4)
inner = [nn.Linear(WIDTH, WIDTH), nn.ReLU()] if "wide" in words else []
model = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), *inner, nn.Linear(WIDTH, 1))
head = nn.Linear(1, 1)
parameters = [*head.parameters()] if "later" in words else [*model.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.01)
state, encoded = torch.zeros(4, 1), None
for step in range(STEPS):
    x = torch.randn(ITEMS, 8)
    if "later" not in words or step % 3 == 0:  # the next two steps use this one's graph
        encoded = model(x)
    output = head(encoded)
    if "carries" in words:
        output = state = output + 0.5 * state
    loss = output.square().mean()
    if "creates" in words:
        loss.backward(retain_graph=True, create_graph=True)
    else:
        loss.backward(retain_graph="some" not in words or step % 2 == 0)
    if "twice" in words:
        output.abs().mean().backward()
    if "grad" in words:
        torch.autograd.grad(output.sum(), encoded)
    if "carries" not in words:
        optimizer.step()
    optimizer.zero_grad()
print("STEPS", STEPS)

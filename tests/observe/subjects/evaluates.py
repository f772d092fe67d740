"""Evaluates by hand, and collects the outputs of all batches until the end; with "fixed" only sums of them."""

import sys
import time

import torch
from common import net, report
from torch import nn

FIXED = "fixed" in sys.argv


def evaluate(model):
    model.eval()
    outputs, total = [], 0.0
    with torch.no_grad():
        for _ in range(50):
            output = model(torch.randn(512, 8))
            total += float(output.sum())
            time.sleep(0.05)
            if not FIXED:
                outputs.append(output)
    model.train()
    return total


model = nn.Sequential(net(), nn.Linear(1, 1000))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    loss = model(torch.randn(8, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 29:
        evaluate(model)
report(40, loss)

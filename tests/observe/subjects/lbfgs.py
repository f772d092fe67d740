"""The closure of its optimizer calls the model twice, each time for 20 ms. Then it does something else for 2 s."""

import time

import torch
from common import report


class Net(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)


# A single point beside the items, such as a boundary.
model, x, edge, calls = Net(8, 1), torch.randn(32, 8), torch.zeros(1, 8), 0
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)


def closure():
    global calls
    calls += 1
    optimizer.zero_grad()
    loss = (model(x) - 1).square().mean() + model(edge).square().mean()
    loss.backward()
    return loss


for step in range(15):
    loss = optimizer.step(closure)
time.sleep(2)
print("CALLS", calls)
report(15, loss)

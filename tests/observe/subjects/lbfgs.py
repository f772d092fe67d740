"""The closure of its optimizer calls the model, which takes 20 ms. Then the script does something else for 2 s."""

import time

import torch
from common import report


class Net(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)


model, x, calls = Net(8, 1), torch.randn(32, 8), 0
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)


def closure():
    global calls
    calls += 1
    optimizer.zero_grad()
    loss = (model(x) - 1).square().mean()
    loss.backward()
    return loss


for step in range(15):
    loss = optimizer.step(closure)
time.sleep(2)
print("CALLS", calls)
report(15, loss)

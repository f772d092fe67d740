"""An optimizer that calls another one, after a closure (sharpness-aware minimisation)."""

import torch
from common import data, net, report
from torch.utils.data import DataLoader


class Sharp(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05):
        super().__init__(params, {"rho": rho})
        self.base = base

    def step(self, closure):
        with torch.enable_grad():
            closure()
        moved = []
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    moved.append((p, group["rho"] * p.grad / (p.grad.norm() + 1e-12)))
            for p, by in moved:
                p.add_(by)
        self.base.zero_grad()
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for p, by in moved:
                p.sub_(by)
        self.base.step()
        return loss


model = net()
base = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = Sharp(model.parameters(), base)
steps = 0
for epoch in range(60):
    for x, y in DataLoader(data(), batch_size=16):

        def closure():
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        optimizer.zero_grad()
        steps += 1
report(steps, loss)

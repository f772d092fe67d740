import torch
from common import data, net, report

model = net(32)
optimizer = torch.optim.LBFGS(
    model.parameters(), max_iter=20, history_size=100, tolerance_grad=0, tolerance_change=0
)
x, _ = data().tensors
y = torch.randn(len(x), 1)


def closure():
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    return loss


for step in range(20):
    loss = optimizer.step(closure)
report(step + 1, loss)

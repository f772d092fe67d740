import torch
from common import data, net, report

model = net()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
x, y = data().tensors


def closure():
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    return loss


for step in range(20):
    loss = optimizer.step(closure)
report(step + 1, loss)

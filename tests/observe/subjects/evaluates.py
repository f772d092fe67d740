import torch
from common import busy, data, net, report
from torch.utils.data import DataLoader

model = net()
optimizer = torch.optim.AdamW(model.parameters())
held_out = DataLoader(data(64), batch_size=32)
steps = 0


def evaluate():
    model.eval()
    with torch.no_grad():
        for x, y in held_out:
            busy(0.01)
            model(x)
    model.train()


for epoch in range(5):
    for x, y in DataLoader(data(), batch_size=32):
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if steps % 4 == 0:
            evaluate()
    evaluate()
report(steps, loss)

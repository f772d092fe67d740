import sys

import torch
from common import data, net, report
from torch.utils.data import DataLoader

model = net(512, 2)
optimizer = torch.optim.AdamW(model.parameters())
form = sys.argv[1]
compute = model
if form == "model":
    compute = torch.compile(model, backend="aot_eager")
elif form == "place":
    model.compile(backend="aot_eager")


def loss_of(x, y):
    return ((compute(x) - y) ** 2).mean()


if form == "function":
    loss_of = torch.compile(loss_of, backend="aot_eager")
steps = 0
for epoch in range(5):
    for x, y in DataLoader(data(4096), batch_size=512):
        loss = loss_of(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
from torch._dynamo.utils import counters

print("GRAPHS", counters["stats"]["unique_graphs"], "BREAKS", sum(counters["graph_break"].values()))
report(steps, loss)

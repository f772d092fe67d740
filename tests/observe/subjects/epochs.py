"""Short epochs. With `anew`, loader workers start for each of them, and each prepares for 0.2 s."""

import sys
import time

import torch
from common import data, net, report
from torch.utils.data import DataLoader


def prepare(worker):
    time.sleep(0.2)


if __name__ == "__main__":
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = "anew" not in sys.argv
    loader = DataLoader(
        data(64), batch_size=8, num_workers=1, persistent_workers=kept, worker_init_fn=prepare
    )
    steps = 0
    for epoch in range(8):
        for x, y in loader:
            loss = ((model(x) - y) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
    report(steps, loss)

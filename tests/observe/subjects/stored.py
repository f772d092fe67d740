"""Calls the model without gradients after every fifth step, several times in a row, for what its argument names."""

import sys

import torch
from common import report
from torch import nn

KIND = sys.argv[1]
model, teacher = (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2))
train, held, pool = torch.randn(256, 64), torch.randn(4096, 64), torch.randn(64, 64)
memory = bytearray(4 * 8 * 64)
shared = torch.frombuffer(memory, dtype=torch.float32).view(8, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def slices():
    return sum(float(model(held[at : at + 256]).sum()) for at in range(0, 4096, 256))


def inference():
    with torch.inference_mode():
        return slices()


def whole():
    return sum(float(model(held).sum()) for _ in range(4))


def rollout(seen=held[:8]):
    for _ in range(6):
        seen = torch.tanh(model(seen))
    return float(seen.sum())


def rollout_in_place():  # into a tensor that is made once
    for at in range(1, 6):
        pool[at] = torch.tanh(model(pool[at - 1 : at]))[0]
    return float(pool.sum())


def rollout_elsewhere():
    for at in range(6):  # an environment writes to memory that torch knows nothing of
        memory[256 * at] = int(model(shared[at]).sum()) % 100
    return float(memory[256])


def answers(questions=256):  # labels for data that was just made
    new = torch.randn(questions, 64)
    return sum(float(model(part).sum()) for part in new.split(32))


def teaches():
    return sum(float(teacher(part).sum()) for part in train.split(32))


def noisy(same=held[:8]):  # a mean over dropout masks, of one batch
    return sum(float(model(same).sum()) for _ in range(8))


def chosen():  # the hardest of a pool, in each step
    return max(float(model(part).sum()) for part in pool.split(8))


total = 0.0
for step in range(60):
    at = step % 8 * 32
    loss = (model(train[at : at + 32]) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if KIND == "chosen" or step % 5 == 4:
        with torch.no_grad():
            total += globals()[KIND]()
print("TOTAL", total.hex())
report(60, loss)

"""What the subjects share. A subject is an ordinary training script: nothing in it knows that it is observed."""

import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)


def net(width=32, deep=0):
    inner = [layer for _ in range(deep) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), *inner, nn.Linear(width, 1))


def data(items=256):
    x = torch.randn(items, 8)
    return TensorDataset(x, x.sum(1, keepdim=True))


def busy(seconds):
    """Work of the interpreter, which never releases its lock: so much time of the processor."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        for _ in range(200):
            pass


def report(steps, loss):
    print("STEPS", steps, "LOSS", float(loss).hex(), flush=True)

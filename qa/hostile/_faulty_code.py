"""The code of awkward workloads: what a user's module may contain, and what the program has to say about it."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent, indent

START = '''
import collections, math, os, random, signal, sys, threading, time, types
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler
)

INF = math.inf
COUNT = collections.Counter()
EXTRA = {}

def training():
    """Whether an optimizer step is the caller, and not what is tried before the first one."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "eager_step":
        frame = frame.f_back
    return frame is not None

def due(at, key="calls"):
    COUNT[key] += training()
    return training() and COUNT[key] >= at

class Foo:
    pass

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.init()
    def init(self):
        pass
    def middle(self, h):
        return h
    def forward(self, x):
        return self.head(self.middle(torch.tanh(self.encoder(x))))

class Data(Dataset):
    def __init__(self, count=48):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.item(index)
    def item(self, index):
        x = torch.sin(torch.arange(4.0) * (index + 1))
        return x, x.sum()

def loss(output, batch):
    return F.mse_loss(output.squeeze(-1), batch[1])

Net = Base
'''
# The definition that the code of a part needs before it.
CODE = {
    "factory": """
def factory(settings):
    return {**dict(model=Net(), train_data=Data(), eval_data=Data(8), loss=loss), **EXTRA}
""",
    "init": "\nclass Net(Base):\n",
    "data": "\nclass Data(Data):\n",
}
CODE["middle"] = CODE["init"]
PLAIN = (("batch.micro", 2), ("batch.accumulation", 1))
PLACE = r"awkward_\d+_\d+\.py:\d+"


@dataclass(frozen=True)
class Fault:
    """Code that replaces a part of a workload that trains.

    words: a regular expression of the message; None if it has to train. repeats: whether a resumed run has to equal an
    uninterrupted one. saves: whether there is a checkpoint although the run fails. limits: of its process. stop_when:
    words in the record at which it is stopped.
    """

    name: str
    part: str
    source: str
    words: str | None = None
    settings: tuple[tuple[str, object], ...] = ()
    repeats: bool = True
    saves: bool = False
    limits: tuple[tuple[int, int], ...] = ()
    stop_when: str | None = None


def init_model(name: str, init: str, middle: str = "return h", words: str | None = None) -> Fault:
    body = f"def init(self):\n{indent(dedent(init), '    ')}\ndef middle(self, h):\n{indent(dedent(middle), '    ')}\n"
    return Fault(f"model: {name}", "init", indent(body, "    "), words)


def model_with(name: str, body: str, words: str | None = None, **more: object) -> Fault:
    return Fault(f"model: {name}", "init", indent(dedent(body), "    "), words, **more)  # type: ignore[arg-type]


def data_with(name: str, body: str, words: str | None = None, **more: object) -> Fault:
    return Fault(f"data: {name}", "data", indent(dedent(body), "    "), words, **more)  # type: ignore[arg-type]


def code(name: str, source: str, words: str | None = None, **more: object) -> Fault:
    return Fault(name, "", "\n" + dedent(source) + "\n", words, **more)  # type: ignore[arg-type]


def extra_state(value: str, words: str | None = None) -> Fault:
    body = f"""
        def get_extra_state(self):
            return {value}
        def set_extra_state(self, state):
            pass
    """
    return model_with(f"extra state {value[:40]}", body, words)

"""Modules of a user's own workload for the tests: written, prepared, and what is wrong with them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from workload_help import configured

from ndd_engine.config.schema import Config
from ndd_engine.errors import ConfigError
from ndd_engine.workloads.base import Workload
from ndd_engine.workloads.factory_data import prepare

Prepare = Callable[..., Workload]
_numbers = itertools.count()

START = """
import torch
from types import SimpleNamespace
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

class Pairs(Dataset):
    def __init__(self, count=40):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        x = torch.full((3,), float(index))
        return x, x.sum()

class Stream(IterableDataset):
    def __iter__(self):
        return iter(())

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.encoder = nn.Linear(3, width)
        self.head = nn.Linear(width, 1)
    def forward(self, x):
        return self.head(self.encoder(x).relu())

def loss(output, batch):
    return nn.functional.mse_loss(output.squeeze(1), batch[1])
"""
PLAIN = "def factory(settings):\n    return dict(model=Net(), train_data=Pairs(), loss=loss)\n"


def giving(**more: str) -> str:
    """A factory whose object has other parts, each written in Python."""
    parts = {"model": "Net()", "train_data": "Pairs()", "loss": "loss", **more}
    body = ", ".join(f"{name}={text}" for name, text in parts.items())
    return f"def factory(settings):\n    return SimpleNamespace({body})\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """module(source) writes a module into the current folder and returns its name, which no other test uses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(source: str) -> str:
        name = f"own_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(START + dedent(source), "utf-8")
        return name

    return write


@pytest.fixture
def own(module: Callable[[str], str]) -> Prepare:
    """own(source) prepares the factory of a module with that source below START. sections: of the configuration."""

    def make(
        source: str = PLAIN, options: dict[str, Any] | None = None, **sections: dict[str, Any]
    ) -> Workload:
        section = {"name": f"{module(source)}:factory", "options": options or {}}
        base = configured(section, **{"micro": 4, **sections.pop("batch", {})}).model_dump()
        changed = {name: {**base[name], **values} for name, values in sections.items()}
        return prepare(Config.model_validate({**base, **changed}))

    return make


def mistakes(own: Prepare, source: str, **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        own(source, **more)
    return [str(problem) for problem in caught.value.problems]


def line_of(source: str, text: str) -> int:
    return (START + source).splitlines().index(text) + 1

"""Workloads in fp64 whose items say who they are, for comparing several ranks with a single process."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

WIDTH, WORDS = 6, 20
# Ways to call the model: as a whole; a closure that ignores what it receives; its parts.
CALLS = ("model", "closure", "parts")
OPTIONS: dict[str, Any] = {"dropout": 0.0, "norm": False, "unused": False}


class Points(Dataset[Any]):
    """Item i is (x, y, i)."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, WIDTH, generator=draw, dtype=torch.float64)
        self.y = self.x.cumsum(1).sin()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], index


class Residual(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.linear(self.norm(x)).tanh())
        return out


class Net(nn.Module):
    """Layers that FSDP2 shards by themselves, and a head with the rest."""

    def __init__(self, dropout: float = 0.0, norm: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.rest = nn.Linear(1, 1) if unused else None
        self.layers = nn.ModuleList([Residual(dropout) for _ in range(3)])
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


def points(settings: Any) -> dict[str, Any]:
    """45 items, which no number of ranks divides."""
    model = Net(*(settings.option(name, default) for name, default in OPTIONS.items()))
    data: Any = Points(settings.option("items", 45), 1)
    how = settings.option("call", "model")
    assert how in CALLS

    def forward(given: Any, batch: Any) -> Any:
        x = batch[0].to(next(model.parameters()).dtype)
        if how == "parts":
            for layer in given.layers:
                x = layer(x)
            return given.head(given.norm(x))
        return (model if how == "closure" else given)(x)

    return {
        "model": model.double() if settings.option("double", True) else model.float(),
        "train_data": DataLoader(data, settings.micro) if settings.option("loader", False) else data,
        "eval_data": Points(settings.option("eval_items", 11), 2),
        "forward": forward,
        "loss": lambda output, batch: (output - batch[1].to(output.dtype)).square().mean(),
    }


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Residual(0.0) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


class Lines(Dataset[Any]):
    """Lines of 0 to 13 words; those of 4 items in every 16 have none."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        length = 0 if index % 16 in (4, 5, 6, 7) else 1 + index * 7 % 13
        return torch.arange(1, 1 + length) % (WORDS - 1) + 1


def join(items: list[Tensor]) -> Tensor:
    padded: Tensor = pad_sequence([*items, torch.zeros(1, dtype=torch.long)], batch_first=True)[:-1]
    return padded


def lines(settings: Any) -> dict[str, Any]:
    """A loss that is a mean over words, so that it is NaN for a micro-batch without any."""
    return {
        "model": Words().double(),
        "train_data": Lines(),
        "eval_data": Lines(),
        "shuffle": False,
        "collate": join,
        "loss": lambda output, words: F.cross_entropy(output.flatten(0, 1), words.flatten(), ignore_index=0),
        "weight": lambda words: (words != 0).sum(),
    }


class Shuffled(IterableDataset[Any]):
    """The points in an order that it draws from the global generators while it is read; its state is what is left."""

    def __init__(self, count: int) -> None:
        self.points, self.left = Points(count, 1), list[int]()

    def __iter__(self) -> Any:
        self.left = self.left or list(range(len(self.points)))
        while self.left:
            yield self.points[self.left.pop(int(torch.randint(len(self.left), ())))]

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = list(state["left"])


def stream(settings: Any) -> dict[str, Any]:
    return {**points(settings), "train_data": Shuffled(45)}


def optimizing(settings: Any) -> dict[str, Any]:
    parts = points(settings)
    return {**parts, "optimizer": torch.optim.SGD(parts["model"].parameters(), lr=settings.optimizer.lr)}


class Average:
    """The mean of the weights over the steps, and the losses that its process has seen."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: item.detach().clone() for name, item in model.named_parameters()}
        self.losses = torch.zeros(0)

    def see(self, train: Any) -> None:
        self.losses = torch.cat([self.losses, train.loss.float().reshape(1)])
        for name, item in train.model.named_parameters():
            self.weights[name].lerp_(item.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.losses = dict(state["weights"]), state["losses"]


def averaged(settings: Any) -> dict[str, Any]:
    """on_step averages the weights, on_evaluate shrinks them."""
    parts = points(settings)
    average = Average(parts["model"])

    def shrink(_metrics: Any, train: Any) -> None:
        with torch.no_grad():
            for item in train.model.parameters():
                item.mul_(0.5)

    return {**parts, "stateful": {"average": average}, "on_step": average.see, "on_evaluate": shrink}


class Begun:
    """Appends to a file how many collectives this rank has begun after each step, by their group; see `counted`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def see(self, _train: Any) -> None:
        groups = json.loads(c10d._dump_fr_trace_json(False, False)).get("pg_status") or {}
        begun = {name: int(status["last_enqueued_collective"]) for name, status in groups.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(begun) + "\n")
        time.sleep(0.01)


def counted(settings: Any) -> dict[str, Any]:
    """Steps of 10 ms, after which each rank notes its collectives in begun-RANK.jsonl of the folder of the option."""
    path = Path(settings.option("folder", ".")) / f"begun-{os.environ['RANK']}.jsonl"
    return {**points(settings), "on_step": Begun(path).see}

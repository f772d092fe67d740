"""Small models of different structure, as factories of a workload, for the benchmark of memory budgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

WIDTH, LENGTH, TOKENS, ITEMS = 64, 32, 200, 512


class Attends(nn.Module):
    """A block of a transformer. Its mask is an argument by name, and it returns a tuple."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor, *, causal: bool = True) -> tuple[Tensor, Tensor]:
        shape = x.shape[0], x.shape[1], 3, 4, WIDTH // 4
        q, k, v = self.mixed(self.first(x)).view(shape).permute(2, 0, 3, 1, 4)
        found = (
            functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            .transpose(1, 2)
            .reshape(x.shape)
        )
        x = x + self.drop(self.joined(found))
        x = x + self.drop(self.down(functional.gelu(self.up(self.second(x)))))
        return x, x.square().mean()


class Language(nn.Module):
    """A language model. shared: all layers are one. vocabulary: of a head that may dominate."""

    def __init__(
        self, layers: int = 5, dropout: float = 0.0, shared: bool = False, vocabulary: int = TOKENS
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        one = Attends(dropout)
        self.blocks = nn.ModuleList(one if shared else Attends(dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h, _ = block(h, causal=True)
        return self.head(self.norm(h))


class Residual(nn.Module):
    """Convolutions with batch normalisation, whose statistics change in forward."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.last(self.two(functional.relu(self.norm(self.one(x))))))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 10)
        self.stages = nn.ModuleList(nn.Sequential(Residual(16), Residual(16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class Skips(nn.Module):
    """A U-Net: what the way down keeps is needed late."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def double(i: int, o: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.Conv2d(o, o, 3, padding=1)
            )

        self.down = nn.ModuleList([double(3, width), double(width, 2 * width), double(2 * width, 4 * width)])
        self.middle = double(4 * width, 4 * width)
        self.up = nn.ModuleList(
            [double(8 * width, 2 * width), double(4 * width, width), double(2 * width, width)]
        )
        self.head = nn.Conv2d(width, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for stage in self.down:
            x = stage(x)
            kept.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for stage in self.up:
            x = stage(torch.cat([functional.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.head(x).mean((2, 3))


class Recurrent(nn.Module):
    """kind: of the layers. loops: whether each step of the sequence is a call."""

    def __init__(self, kind: str = "LSTM", loops: bool = False) -> None:
        super().__init__()
        self.embed, self.head, self.loops = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS), loops
        made = nn.GRUCell if loops else getattr(nn, kind)
        options = {} if loops else {"batch_first": True}
        self.layers = nn.ModuleList(made(WIDTH, WIDTH, **options) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            if not self.loops:
                h = h + layer(h)[0]
                continue
            state, outputs = torch.zeros_like(h[:, 0]), []
            for step in range(h.shape[1]):
                state = layer(h[:, step], state)
                outputs.append(state)
            h = torch.stack(outputs, 1)
        return self.head(h)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.over_tokens = nn.ModuleList(
            nn.Sequential(nn.Linear(LENGTH, 2 * LENGTH), nn.GELU(), nn.Linear(2 * LENGTH, LENGTH))
            for _ in range(4)
        )
        self.over_width = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for one, other in zip(self.over_tokens, self.over_width, strict=True):
            h = h + one(h.transpose(1, 2)).transpose(1, 2)
            h = h + other(h)
        return self.head(h)


class Counting(nn.Module):
    """Every second block has a statistic of its own, which must not be updated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.layers = nn.ModuleList(Counted(place % 2 > 0) for place in range(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h)


class Counted(nn.Module):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.up, self.down, self.counts = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), counts
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts and self.training:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)  # type: ignore[operator, union-attr]
        return self.down(torch.tanh(self.up(x)))


def _tokens(model: nn.Module, vocabulary: int = TOKENS) -> dict[str, Any]:
    """A model that predicts the next token."""
    items = torch.randint(0, vocabulary, (ITEMS, LENGTH + 1))
    return {
        "model": model,
        "train_data": TensorDataset(items[:, :-1].contiguous(), items[:, 1:].contiguous()),
        "forward": lambda module, batch: module(batch[0]),
        "loss": lambda output, batch: functional.cross_entropy(output.flatten(0, 1), batch[1].flatten()),
    }


def _images(model: nn.Module) -> dict[str, Any]:
    return {
        "model": model,
        "train_data": TensorDataset(torch.rand(ITEMS, 3, 16, 16), torch.randint(0, 10, (ITEMS,))),
        "forward": lambda module, batch: module(batch[0]),
        "loss": lambda output, batch: functional.cross_entropy(output, batch[1]),
    }


_MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "gpt": lambda: _tokens(Language()),
    "dropout": lambda: _tokens(Language(dropout=0.1)),
    "shared": lambda: _tokens(Language(shared=True)),
    "vocabulary": lambda: _tokens(Language(2, vocabulary=4000), 4000),
    "deep": lambda: _tokens(Language(12)),
    "resnet": lambda: _images(Convolutional()),
    "unet": lambda: _images(Skips()),
    "lstm": lambda: _tokens(Recurrent()),
    "gru": lambda: _tokens(Recurrent("GRU")),
    "cells": lambda: _tokens(Recurrent(loops=True)),
    "mixer": lambda: _tokens(Mixer()),
    "statistics": lambda: _tokens(Counting()),
}
MODELS = tuple(_MODELS)


def factory(settings: Any) -> dict[str, Any]:
    """The model that the setting `model` names."""
    return _MODELS[settings.options["model"]]()

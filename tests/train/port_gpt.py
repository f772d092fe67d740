"""A GPT as public training codes have it: decay groups, warm-up plus cosine, clipping. A factory and a plain loop."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WORDS, LENGTH, WIDTH, BATCH, LR, MIN_LR, WARM_UP, STEPS = 32, 12, 16, 4, 3e-3, 3e-4, 10, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.functional.dropout(self.out(mixed.transpose(1, 2).reshape(b, t, c)), 0.1, self.training)
        return x + self.mlp(self.second(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


def data() -> TensorDataset:
    text = torch.randint(0, WORDS, (96, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return TensorDataset(text[:, :-1], text[:, 1:])


def loss(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [item for item in model.parameters() if item.requires_grad]
    groups = [
        {"params": [item for item in parameters if item.dim() >= 2], "weight_decay": 0.1},
        {"params": [item for item in parameters if item.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=False)


def rate(step: int) -> float:
    if step < WARM_UP:
        return LR * (step + 1) / (WARM_UP + 1)
    share = (step - WARM_UP) / (STEPS - WARM_UP)
    return MIN_LR + 0.5 * (1 + math.cos(math.pi * share)) * (LR - MIN_LR)


def factory(settings: Any) -> dict[str, Any]:
    model = Gpt()
    return {
        "model": model, "train_data": data(), "eval_data": data(), "loss": loss,
        "optimizer": optimizer(model), "lr": rate,
    }  # fmt: skip


def plain(batches: Any, seed: int) -> list[float]:
    """The losses of the plain loop. batches: yields the batches of the run, epoch after epoch."""
    torch.manual_seed(seed)
    model = Gpt()
    steps, found = optimizer(model), []
    for step in range(STEPS):
        for group in steps.param_groups:
            group["lr"] = rate(step)
        batch = next(batches)
        value = loss(model(batch[0]), batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        steps.zero_grad(set_to_none=True)
        found.append(float(value))
    return found

"""A small training whose model does something slowly: `python planted_work.py FAULT LEVEL`; at level 0 it does not.

It knows nothing of the console. The steps of levels are long enough that the fault takes most of the model.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

FAULT, LEVEL = sys.argv[1], float(sys.argv[2])
PLANTED = LEVEL > 0
SECONDS = float(os.environ.get("SCRIPT_S", "1e9"))
WIDTH, BATCH = 64, 16


class Body(nn.Module):
    """Work that every model of this file has, (B, WIDTH) to (B, WIDTH)."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


class StepCell(nn.Module):
    """A decoder that calls its cell at each step; otherwise a fused one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.steps = Body(), int(40 * LEVEL) or 40
        self.cell, self.fused = nn.GRUCell(WIDTH, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if not PLANTED:
            out: Tensor = self.fused(x.unsqueeze(1).expand(-1, self.steps, -1))[0]
            return out[:, -1]
        state = torch.zeros_like(x)
        for _ in range(self.steps):  # fault step-cell
            state = self.cell(x, state)
        return state


class StepRaw(nn.Module):
    """A recurrence that is written out; otherwise layers that are called one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.steps = Body(), int(40 * LEVEL) or 1
        self.within, self.across = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(2))
        self.blocks = nn.ModuleList(Body(512) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if not PLANTED:
            for block in self.blocks:
                x = x + block(x)
            return x
        state = torch.zeros_like(x)
        for _ in range(self.steps):  # fault step-raw
            gate = torch.sigmoid(x @ self.within)
            state = gate * torch.tanh(x + state @ self.across) + (1 - gate) * state
        return state


class StepAttends(nn.Module):
    """A decoder that attends to its memory at each step; otherwise at all steps together."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.steps = Body(), int(24 * LEVEL) or 24
        self.query, self.cell = nn.Linear(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)

    def attend(self, queries: Tensor, memory: Tensor) -> Tensor:
        return (queries @ memory.transpose(1, 2)).softmax(2) @ memory

    def forward(self, x: Tensor) -> Tensor:
        memory = self.body(x).unsqueeze(1).expand(-1, 12, -1)
        if not PLANTED:
            return self.attend(self.query(memory.repeat(1, self.steps, 1)), memory).mean(1)
        state = (torch.zeros_like(x), torch.zeros_like(x))
        for _ in range(self.steps):  # fault step-attends
            seen = self.attend(self.query(state[0]).unsqueeze(1), memory).squeeze(1)
            state = self.cell(seen, state)
        return state[0]


class Vocabulary(nn.Module):
    """A projection onto a vocabulary, which is large."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(512), nn.Linear(WIDTH, int(16_000 * LEVEL) or 500)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x.repeat(4, 1)))  # fault vocabulary
        return found


class Tied(nn.Module):
    """The same with the weights of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.table = Body(512), nn.Embedding(int(16_000 * LEVEL) or 500, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x.repeat(4, 1)) + self.table(torch.arange(4 * BATCH))
        return hidden @ self.table.weight.T  # fault tied


class Classes(nn.Module):
    """A softmax over so many classes that it takes most of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = Body(512), nn.Parameter(torch.ones(int(19_500 * LEVEL) or 300))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x.repeat(4, 1)).mean(1, keepdim=True)
        return torch.log_softmax(hidden * self.scale, 1)  # fault classes


class Small(nn.Module):
    """Many operations on few numbers, besides a body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.count = Body(256 if PLANTED else 2048), int(16 * LEVEL) or 1
        self.scales = nn.Parameter(torch.ones(64, WIDTH))

    def mixed(self, x: Tensor) -> Tensor:
        a, b, c = x * 1.01, x + 0.1, x - 0.1
        a, b = torch.tanh(a) * b, torch.sigmoid(b) * c
        return a * 0.5 + b * 0.5 - c * 0.01 + (a - b).abs() * 0.1  # fault small-operations

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        x = self.mixed(self.mixed(self.mixed(self.mixed(x))))
        if PLANTED:
            x = self.mixed(self.mixed(self.mixed(self.mixed(self.mixed(self.mixed(x))))))
            if LEVEL > 1:
                x = self.mixed(self.mixed(self.mixed(self.mixed(self.mixed(self.mixed(x))))))
        return x


class Attention(nn.Module):
    """Attention that is written out, or without a fused kernel; otherwise with one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.body, self.way, self.length = Body(64), way, int(128 * LEVEL) or 128
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.whole = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).unsqueeze(1) + torch.linspace(0, 1, self.length).view(1, -1, 1)
        if self.way == "weights":
            return self.whole(x, x, x, need_weights=PLANTED)[0].mean(1)  # fault attention-weights
        q, k, v = self.mix(x).view(len(x), self.length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        if self.way == "dropout" or not PLANTED:
            dropout = 0.1 if PLANTED else 0.0
            out = scaled_dot_product_attention(q, k, v, dropout_p=dropout)  # fault attention-dropout
        else:
            out = (q @ k.transpose(2, 3) / 4).softmax(3) @ v  # fault attention-by-hand
        return out.transpose(1, 2).flatten(2).mean(1)


class Twice(nn.Module):
    """A module that is called twice with the same input; otherwise with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.first, self.second = (
            Body(int(1024 * LEVEL) or 1024),
            nn.Linear(WIDTH, WIDTH),
            Body(64),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(8, 1)
        found = self.first(self.encoder(x))
        return found + self.second(self.encoder(x if PLANTED else found))  # fault twice


class Frozen(nn.Module):
    """Layers before the head that no optimizer updates, with gradients; otherwise without."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Sequential(*(Body(512) for _ in range(int(3 * LEVEL) or 3))), Body(64)
        self.features.requires_grad_(PLANTED)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.features(x.repeat(4, 1)))
        return found


class Table(nn.Module):
    """An embedding with gradients for all of its rows; otherwise for those that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.table = Body(), nn.Embedding(int(40_000 * LEVEL) or 40_000, WIDTH, sparse=not PLANTED)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.randint(self.table.num_embeddings, (len(x),))
        found: Tensor = self.body(x + self.table(ids))  # fault table
        return found


class Layers(nn.Module):
    """Innocent: many different layers in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(20))
        self.body = Body(1024)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.body(x.repeat(4, 1))  # type: ignore[no-any-return]


class Chunks(nn.Module):
    """Innocent: a loop over a few large parts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body(2048)

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for part in x.repeat(64, 1).chunk(10):
            parts.append(self.body(part))  # noqa: PERF401
        return torch.cat(parts)


class Regularized(nn.Module):
    """Innocent: the same input twice, with other dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Body(1024), nn.Dropout(0.1), Body(1024))

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(4, 1)
        first, second = self.encoder(x), self.encoder(x)
        return first + (first - second).square()  # type: ignore[no-any-return]


class Unrolled(nn.Module):
    """Innocent: a fused recurrent layer and attention with a fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(WIDTH, 128, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found = self.memory(x.unsqueeze(1).expand(-1, 32, -1))[0]
        return self.layer(found).mean(1)  # type: ignore[no-any-return]


class Words(nn.Module):
    """Innocent: a vocabulary of usual size, and deep layers before it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(*(Body(1024) for _ in range(4))), nn.Linear(WIDTH, 8_000)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x.repeat(8, 1))[:BATCH])
        return found


class Shared(nn.Module):
    """Innocent: one block with shared weights, called again with what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Body(2048)

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(8, 1)
        for _ in range(4):
            x = x + self.block(x)
        return x


KINDS: dict[str, Callable[[], nn.Module]] = {
    "step-cell": StepCell, "step-raw": StepRaw, "step-attends": StepAttends, "vocabulary": Vocabulary, "tied": Tied,
    "classes": Classes, "small-operations": Small, "attention-by-hand": lambda: Attention("by-hand"),
    "attention-weights": lambda: Attention("weights"), "attention-dropout": lambda: Attention("dropout"),
    "twice": Twice, "frozen": Frozen, "table": Table, "layers": Layers, "chunks": Chunks, "regularized": Regularized,
    "unrolled": Unrolled, "words": Words, "shared": Shared,
}  # fmt: skip


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that are trained."""
    trained = model.head if isinstance(model, Frozen) else model
    return list(trained.parameters())


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x = KINDS[FAULT](), torch.randn(64, BATCH, WIDTH)
    optimizer = torch.optim.SGD(parameters(model), lr=1e-4, fused=FAULT != "table")
    begin, step = time.perf_counter(), 0
    while time.perf_counter() - begin < SECONDS:
        optimizer.zero_grad()
        loss = model(x[step % len(x)]).square().mean()
        loss.backward()
        optimizer.step()
        step += 1


if __name__ == "__main__":
    main()

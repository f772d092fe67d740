"""A recurrent language model as public training codes have it: carried state, SGD by hand, annealing on a plateau."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WORDS, LENGTH, WIDTH, BATCH, LR, CLIP, STEPS = 24, 6, 12, 4, 4.0, 0.25, 50
CHUNKS = 10  # a batch holds the same chunk of BATCH streams; an epoch has CHUNKS batches


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        out, hidden = self.lstm(self.words(x), hidden)
        return self.head(out), hidden

    def begin(self, batch: int) -> tuple[Tensor, Tensor]:
        weight = self.head.weight
        return weight.new_zeros(2, batch, WIDTH), weight.new_zeros(2, batch, WIDTH)


def data(seed: int = 5) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    text = torch.randint(0, WORDS, (BATCH * CHUNKS, LENGTH + 1), generator=draw)
    return TensorDataset(text[:, :-1], text[:, 1:])


def loss(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


class Annealing:
    """Divides the learning rate by four when the evaluation did not improve."""

    def __init__(self) -> None:
        self.lr, self.best = LR, None

    def see(self, value: float) -> None:
        if self.best is None or value < self.best:
            self.best = value
        else:
            self.lr /= 4

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def update(model: nn.Module, lr: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=-lr)


def factory(settings: Any) -> dict[str, Any]:
    model, annealing = Recurrent(), Annealing()

    def step(batch: Any, train: Any) -> Tensor:
        output, train.state = model(batch[0], train.state)
        with train.phase("loss"):
            value = loss(output, batch)
        train.backward(value)
        with train.phase("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        with train.phase("optimizer"):
            update(model, annealing.lr)
        train.log("lr", annealing.lr)
        return value

    return {
        "model": model, "train_data": data(), "eval_data": data(6), "loss": loss, "step": step, "optimizer": [],
        "state": lambda batch: model.begin(len(batch[0])),
        "forward": lambda model, batch, state: model(batch[0], state),
        "stateful": {"annealing": annealing}, "on_evaluate": lambda metrics, train: annealing.see(metrics["loss"]),
    }  # fmt: skip


def hooked(settings: Any) -> dict[str, Any]:
    """The same without a step of its own: torch's SGD and ReduceLROnPlateau do the same arithmetic."""
    model = Recurrent()
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, factor=0.25, patience=0, threshold=0.0)
    return {
        "model": model, "train_data": data(), "eval_data": data(6), "loss": loss,
        "optimizer": sgd, "scheduler": plateau,
        "state": lambda batch: model.begin(len(batch[0])),
        "forward": lambda model, batch, state: model(batch[0], state),
    }  # fmt: skip


def plain(batches: Any, seed: int) -> list[float]:
    """The losses of the plain loop. batches: yields the batches of the run, epoch after epoch."""
    torch.manual_seed(seed)
    model, annealing, found = Recurrent(), Annealing(), []
    hidden: Any = None
    for step in range(STEPS):
        if step % CHUNKS == 0:
            hidden = model.begin(BATCH)
        batch = next(batches)
        hidden = tuple(part.detach() for part in hidden)
        output, hidden = model(batch[0], hidden)
        value = loss(output, batch)
        model.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        update(model, annealing.lr)
        found.append(float(value))
        if (step + 1) % CHUNKS == 0:
            annealing.see(evaluated(model))
    return found


@torch.no_grad()
def evaluated(model: Recurrent) -> float:
    model.eval()
    total, hidden = 0.0, model.begin(BATCH)
    tokens, targets = data(6).tensors
    for start in range(0, len(tokens), BATCH):
        output, hidden = model(tokens[start : start + BATCH], hidden)
        total += float(loss(output, (None, targets[start : start + BATCH])))
    model.train()
    return total / CHUNKS

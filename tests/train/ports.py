"""Public training codes as factories, each with its plain loop: a GPT, a recurrent language model and a GAN.

A plain loop returns the losses of STEPS steps. batches: yields the batches of the run, epoch after epoch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

STEPS = 50
WORDS, WIDTH = 32, 16


def text(items: int, length: int, seed: int = 5) -> TensorDataset:
    words = torch.randint(0, WORDS, (items, length + 1), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(words[:, :-1], words[:, 1:])


def next_word(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


# A GPT: tied weights, decay groups, warm-up plus cosine, clipping.

LR, MIN_LR, WARM_UP = 3e-3, 3e-4, 10


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(12, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        logits: Tensor = self.head(self.norm(self.blocks(hidden, mask, is_causal=True)))
        return logits


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [item for item in model.parameters() if item.dim() >= 2], "weight_decay": 0.1},
        {"params": [item for item in model.parameters() if item.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=False)


def rate(step: int) -> float:
    if step < WARM_UP:
        return LR * (step + 1) / (WARM_UP + 1)
    share = (step - WARM_UP) / (STEPS - WARM_UP)
    return MIN_LR + 0.5 * (1 + math.cos(math.pi * share)) * (LR - MIN_LR)


def gpt(settings: Any) -> dict[str, Any]:
    model, data = Gpt(), text(96, 12)
    parts = {"model": model, "train_data": data, "eval_data": data, "loss": next_word}
    return {**parts, "optimizer": decaying(model), "lr": rate}


def gpt_loop(batches: Any) -> list[float]:
    model = Gpt()
    steps, found = decaying(model), []
    for step in range(STEPS):
        for group in steps.param_groups:
            group["lr"] = rate(step)
        batch = next(batches)
        value = next_word(model(batch[0]), batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        steps.zero_grad(set_to_none=True)
        found.append(float(value))
    return found


# A recurrent language model: carried state, SGD by hand, annealing when the evaluation did not improve.

CHUNKS = 10  # a batch holds the same chunk of 4 streams; an epoch has CHUNKS batches
FAST, CLIP = 4.0, 0.25


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        out, hidden = self.lstm(self.words(x), hidden)
        return self.head(out), hidden

    def begin(self, batch: int = 4) -> tuple[Tensor, Tensor]:
        weight = self.head.weight
        return weight.new_zeros(2, batch, WIDTH), weight.new_zeros(2, batch, WIDTH)

    def update(self, lr: float) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(parameter.grad, alpha=-lr)


class Annealing:
    """Divides the learning rate by four when the evaluation did not improve."""

    def __init__(self) -> None:
        self.lr, self.best = FAST, math.inf

    def see(self, value: float) -> None:
        if value < self.best:
            self.best = value
        else:
            self.lr /= 4

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def carried(model: Recurrent) -> dict[str, Any]:
    return {
        "model": model, "train_data": text(40, 6), "eval_data": text(40, 6, seed=6), "loss": next_word,
        "state": lambda batch: model.begin(len(batch[0])),
        "forward": lambda model, batch, state: model(batch[0], state),
    }  # fmt: skip


def recurrent(settings: Any) -> dict[str, Any]:
    model, annealing = Recurrent(), Annealing()

    def step(batch: Any, train: Any) -> Tensor:
        output, train.state = model(batch[0], train.state)
        with train.phase("loss"):
            value = next_word(output, batch)
        train.backward(value)
        with train.phase("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        with train.phase("optimizer"):
            model.update(annealing.lr)
        return value

    own = {"step": step, "optimizer": [], "stateful": {"annealing": annealing}}
    return {**carried(model), **own, "on_evaluate": lambda metrics, train: annealing.see(metrics["loss"])}


def recurrent_torch(settings: Any) -> dict[str, Any]:
    """The same without a step of its own: torch's SGD and ReduceLROnPlateau do the same arithmetic."""
    model = Recurrent()
    sgd = torch.optim.SGD(model.parameters(), lr=FAST)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, factor=0.25, patience=0, threshold=0.0)
    return {**carried(model), "optimizer": sgd, "scheduler": plateau}


def recurrent_loop(batches: Any) -> list[float]:
    model, annealing, found = Recurrent(), Annealing(), []
    hidden: Any = None
    for step in range(STEPS):
        if step % CHUNKS == 0:
            hidden = model.begin()
        batch = next(batches)
        output, hidden = model(batch[0], tuple(part.detach() for part in hidden))
        value = next_word(output, batch)
        model.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        model.update(annealing.lr)
        found.append(float(value))
        if (step + 1) % CHUNKS == 0:
            annealing.see(evaluated(model))
    return found


@torch.no_grad()
def evaluated(model: Recurrent) -> float:
    model.eval()
    total, hidden = 0.0, model.begin()
    tokens, targets = text(40, 6, seed=6).tensors
    for start in range(0, len(tokens), 4):
        output, hidden = model(tokens[start : start + 4], hidden)
        total += float(next_word(output, (None, targets[start : start + 4])))
    model.train()
    return total / CHUNKS


# A GAN: two models, two optimizers, labels smoothed, an average of the generator.


def pair() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer], AveragedModel]:
    generator = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    critic = nn.Sequential(nn.Linear(2, WIDTH), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
    made = {"generator": generator, "critic": critic}
    average = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    adam = {
        name: torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.999))
        for name, model in made.items()
    }
    return made, adam, average.requires_grad_(False)


def circle() -> TensorDataset:
    angle = torch.rand(120, generator=torch.Generator().manual_seed(5)) * 6.3
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1))


def judged(output: Tensor, real: bool) -> Tensor:
    target = torch.full_like(output, 0.9 if real else 0.0)
    return nn.functional.binary_cross_entropy_with_logits(output, target)


def gan(settings: Any) -> dict[str, Any]:
    made, adam, average = pair()
    generator, critic = made["generator"], made["critic"]

    def step(batch: Any, train: Any) -> dict[str, Tensor]:
        (real,) = batch
        fake = generator(torch.randn(len(real), 6, device=train.device))
        output_real, output_fake = critic(real), critic(fake.detach())
        with train.phase("loss"):
            of_critic = judged(output_real, True) + judged(output_fake, False)
        train.backward(of_critic)
        train.update("critic")
        with train.phase("forward"):
            output = critic(fake)
        with train.phase("loss"):
            of_generator = judged(output, True)
        train.backward(of_generator)
        adam["generator"].step()
        average.update_parameters(generator)
        return {"loss": of_critic + of_generator, "critic": of_critic, "generator": of_generator}

    def eval_step(model: Any, batch: Any) -> dict[str, Tensor]:
        output = model["critic"](batch[0])
        return {"loss": judged(output, True), "real": output.sigmoid().mean()}

    models = {**made, "average": average}
    return {"model": models, "train_data": circle(), "step": step, "eval_step": eval_step, "optimizer": adam}


def gan_loop(batches: Any) -> list[float]:
    made, adam, average = pair()
    generator, critic = made["generator"], made["critic"]
    found = []
    for _ in range(STEPS):
        (real,) = next(batches)
        fake = generator(torch.randn(len(real), 6))
        adam["critic"].zero_grad()
        of_critic = judged(critic(real), True) + judged(critic(fake.detach()), False)
        of_critic.backward()
        adam["critic"].step()
        adam["generator"].zero_grad()
        of_generator = judged(critic(fake), True)
        of_generator.backward()
        adam["generator"].step()
        average.update_parameters(generator)
        found.append(float(of_critic + of_generator))
    return found

"""An example workload: replace the model and the data with your own. It runs as it is:

    ndd-console train --workload my_workload:factory --max-steps 20
    ndd-console train --workload my_workload:factory --set run.epochs=5 --set workload.options.width=64

or with a configuration file, `ndd-console train my_workload.toml`:

    [workload]
    name = "my_workload:factory"
    [workload.options]
    width = 64
    [run]
    epochs = 5
    [batch]
    micro = 64
    sequence = 128

`ndd-console check --workload my_workload:factory --set run.epochs=5` estimates memory and time.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ndd_engine.workloads import Settings

SHAPES = 3  # sine, triangle, square


class Waves(Dataset[tuple[Tensor, int]]):
    """Noisy waves. An item is (wave (sequence,) float32, index of its shape).

    An item depends only on the seed and its index, so that a resumed run sees the same data. The class is at the top
    level of the module, so that loader workers (loader.workers = 4) can import it.
    """

    def __init__(self, count: int, sequence: int, seed: int, noise: float) -> None:
        self.count, self.sequence, self.seed, self.noise = count, sequence, seed, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        turns, phase = torch.rand(2, generator=draw).tolist()
        angle = torch.linspace(0, (2 + 4 * turns) * 2 * math.pi, self.sequence) + phase * 2 * math.pi
        sine = angle.sin()
        shape = index % SHAPES
        wave = (sine, sine.asin() * (2 / math.pi), sine.sign())[shape]
        return wave + self.noise * torch.randn(self.sequence, generator=draw), shape


class Classifier(nn.Module):
    """(B, sequence) -> (B, SHAPES) logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(1, width, 9, padding=4), nn.GELU(), nn.Conv1d(width, width, 9, stride=4), nn.GELU()
        )
        self.head = nn.Linear(width, SHAPES)

    def forward(self, waves: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(waves.unsqueeze(1))
        logits: Tensor = self.head(hidden.mean(dim=2))
        return logits


class Accuracy:
    """The metric of an evaluation. Values stay on the device until `result`."""

    def __init__(self) -> None:
        self.right: list[Tensor] = []

    def update(self, output: Tensor, batch: list[Tensor], loss: Tensor) -> None:
        self.right.append((output.argmax(dim=1) == batch[1]).float())

    def result(self) -> dict[str, float]:
        return {"accuracy": float(torch.cat(self.right).mean())}


def samples(model: nn.Module) -> list[str]:
    """Texts to show after each evaluation (key v): what the model takes some waves for."""
    device = next(model.parameters()).device
    waves = Waves(3, 128, 0, 0.0)
    shapes = model(torch.stack([waves[index][0] for index in range(3)]).to(device)).argmax(dim=1)
    return [f"wave of shape {index}: taken for {shape}" for index, shape in enumerate(shapes.tolist())]


def loss(output: Tensor, batch: list[Tensor]) -> Tensor:
    """The mean loss of a batch, a scalar. Tensors used in addition to the batch must be on output.device."""
    return nn.functional.cross_entropy(output.float(), batch[1])


def factory(settings: Settings) -> SimpleNamespace:
    """Builds the model and its data. See Settings for sequence, micro, seed, data, size and options."""
    width = settings.option("width", 32)
    noise = settings.option("noise", 0.3)
    model = Classifier(width)
    return SimpleNamespace(
        # Required. Items are collated to batches as by torch's DataLoader.
        model=model,
        train_data=Waves(6000, settings.sequence, settings.seed, noise),
        loss=loss,
        # Optional. Without eval_data, the last 10 % of train_data are kept for evaluation; without forward, the model
        # is called with the batch, or with its first element if it is a tuple or list.
        eval_data=Waves(600, settings.sequence, settings.seed + 1, noise),
        forward=lambda model, batch: model(batch[0]),
        metric=Accuracy,
        better="higher",
        item="wave",
        token="sample",
        tokens_per_item=settings.sequence,
        parts={"encoder": model.encoder, "head": model.head},  # timed separately within forward
        describe_model=f"convolutions of width {width}",
        samples=samples,
        # More, see docs/own-model.md; anything that would have no effect is an error:
        #   optimizer=torch.optim.SGD(model.parameters(), lr=settings.optimizer.lr, momentum=0.9)
        #   lr=lambda step: …           or scheduler=torch.optim.lr_scheduler.…(optimizer)
        #   on_step=lambda train: …     train.step, train.log(name, value), train.stop(reason)
        #   on_evaluate=lambda metrics, train: …
        #   on_checkpoint=lambda path, train: …
        #   state=lambda batch: …       carried from batch to batch
        #   step=lambda batch, train: … instead of forward, loss, backward and the update, e.g. for a GAN
    )

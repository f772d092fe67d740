"""A GAN as public training codes have it: two models, two optimizers, labels smoothed, an average of the generator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

NOISE, WIDTH, BATCH, STEPS = 6, 16, 8, 50


def models() -> dict[str, nn.Module]:
    generator = nn.Sequential(nn.Linear(NOISE, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    critic = nn.Sequential(nn.Linear(2, WIDTH), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
    return {"generator": generator, "discriminator": critic}


def averaged(generator: nn.Module) -> AveragedModel:
    return AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True).requires_grad_(
        False
    )


def optimizers(made: dict[str, nn.Module]) -> dict[str, torch.optim.Optimizer]:
    return {
        name: torch.optim.Adam(made[name].parameters(), lr=2e-3, betas=(0.5, 0.999))
        for name in ("generator", "discriminator")
    }


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    angle = torch.rand(120, generator=draw) * 6.3
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1))


def judged(output: Tensor, real: bool) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(
        output, torch.full_like(output, 0.9 if real else 0.0)
    )


def factory(settings: Any) -> dict[str, Any]:
    made = models()
    average = averaged(made["generator"])
    by_name = optimizers(made)
    generator, discriminator = made["generator"], made["discriminator"]

    def step(batch: Any, train: Any) -> dict[str, Tensor]:
        (real,) = batch
        fake = generator(torch.randn(len(real), NOISE, device=train.device))
        output_real, output_fake = discriminator(real), discriminator(fake.detach())
        with train.phase("loss"):
            of_critic = judged(output_real, True) + judged(output_fake, False)
        train.backward(of_critic)
        train.update("discriminator")
        with train.phase("forward"):
            output = discriminator(fake)
        with train.phase("loss"):
            of_generator = judged(output, True)
        train.backward(of_generator)
        by_name["generator"].step()
        average.update_parameters(generator)
        return {"loss": of_critic + of_generator, "critic": of_critic, "generator": of_generator}

    def eval_step(model: Any, batch: Any) -> dict[str, Tensor]:
        output = model["discriminator"](batch[0])
        return {"loss": judged(output, True), "real": output.sigmoid().mean()}

    return {
        "model": {**made, "average": average}, "train_data": data(), "step": step, "eval_step": eval_step,
        "optimizer": by_name, "parts": {"generator": generator},
    }  # fmt: skip


def plain(batches: Any, seed: int) -> list[float]:
    """The losses of the plain loop. batches: yields the batches of the run, epoch after epoch."""
    torch.manual_seed(seed)
    made, found = models(), []
    average = averaged(made["generator"])
    by_name = optimizers(made)
    generator, discriminator = made["generator"], made["discriminator"]
    for _ in range(STEPS):
        (real,) = next(batches)
        fake = generator(torch.randn(len(real), NOISE))
        by_name["discriminator"].zero_grad()
        of_critic = judged(discriminator(real), True) + judged(discriminator(fake.detach()), False)
        of_critic.backward()
        by_name["discriminator"].step()
        by_name["generator"].zero_grad()
        of_generator = judged(discriminator(fake), True)
        of_generator.backward()
        by_name["generator"].step()
        average.update_parameters(generator)
        found.append(float(of_critic + of_generator))
    return found

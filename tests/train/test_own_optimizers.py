"""Runs with a factory's own optimizers and schedulers, and what older checkpoints and other settings do to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from train_help import EVERY_STEP, Result, Trainer, Written, resumed

from ndd_engine.config import read
from ndd_engine.predict.fakes import traced
from ndd_engine.train.step.optimizers import decay_groups
from ndd_engine.workloads.factory_data import prepare

SOURCE = """
import torch
from torch import nn
from torch.optim import *
from torch.optim.lr_scheduler import *
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(9, 4, sparse=True), nn.LayerNorm(4), nn.Linear(4, 1)
    def forward(self, x):
        return self.head(self.norm(self.table(x)))

def loss(output, batch):
    return nn.functional.mse_loss(output.squeeze(-1), batch[1])

def parts(model, **more):
    x = torch.arange(40) % 9
    return dict(model=model, train_data=TensorDataset(x, x.sin()), loss=loss, **more)
"""
SETS = ("batch.micro=4", "run.threads=1", "checkpoint.every_epochs=0", *EVERY_STEP)


@pytest.fixture
def own(written: Written) -> Written:
    """own(body) writes a factory with this body, in which `model` is the model."""

    def sets(body: str) -> tuple[str, ...]:
        lines = "\n    ".join(["model = Net()", *body.splitlines()])
        return (*written(f"{SOURCE}\ndef factory(settings):\n    {lines}\n"), *SETS)

    return sets


def rates(result: Result) -> list[float]:
    return [round(float(window.lr or 0), 6) for window in result.windows if window.steps]


DENSE = "model.table.sparse = False\n"
SCHEDULERS = (
    "OneCycleLR(sgd, 0.05, total_steps=30)",
    "SequentialLR(sgd, [LinearLR(sgd, 0.1, 1.0, 4), ExponentialLR(sgd, 0.9)], [4])",
    "LambdaLR(sgd, lambda step: 1 / (1 + step))",
    "[StepLR(sgd, 2, 0.5)]",
)


@pytest.mark.long
@pytest.mark.parametrize(
    "scheduler", [pytest.param(SCHEDULERS[0], marks=pytest.mark.promise), *SCHEDULERS[1:]]
)
def test_schedulers_step_and_resume(trainer: Trainer, own: Written, scheduler: str) -> None:
    body = f"{DENSE}sgd = SGD(model.parameters(), 0.1, momentum=0.9)\nscheduler = {scheduler}\n"
    sets = own(f"{body}return parts(model, optimizer=sgd, scheduler=scheduler)")
    result = resumed(trainer, sets, 11, 23)
    parameter = torch.nn.Parameter(torch.zeros(1))
    scope: dict[str, Any] = {"sgd": torch.optim.SGD([parameter], 0.1, momentum=0.9)}
    made = eval(scheduler, {**vars(torch.optim.lr_scheduler), **scope})
    expected = []
    for _ in range(23):
        scope["sgd"].step()
        (made[0] if isinstance(made, list) else made).step()
        expected.append(round(scope["sgd"].param_groups[0]["lr"], 6))
    assert rates(result) == expected


@pytest.mark.long
def test_a_scheduler_of_epochs(trainer: Trainer, own: Written) -> None:
    body = f"{DENSE}sgd = SGD(model.parameters(), 0.1)\n"
    more = 'optimizer=sgd, scheduler=StepLR(sgd, 1, 0.5), scheduler_every="epoch"'
    result = resumed(trainer, own(f"{body}return parts(model, {more})"), 11, 23)
    assert rates(result) == [0.1] * 8 + [0.05] * 9 + [0.025] * 6


@pytest.mark.long
def test_several_optimizers_all_step(trainer: Trainer, own: Written) -> None:
    body = (
        "rest = [*model.norm.parameters(), *model.head.parameters()]\n"
        "both = {'sparse': SparseAdam(model.table.parameters(), 0.01), 'dense': NAdam(rest, 0.02)}\n"
    )
    sets = (*own(f"{body}return parts(model, optimizer=both)"), "schedule.warmup_steps=5")
    result = resumed(trainer, sets, 11, 23)
    assert result.state(23)["optimizer"].keys() == {"sparse", "dense"}
    assert rates(result)[:6] == [0.002, 0.004, 0.006, 0.008, 0.01, 0.01]
    second = result.state(23)["optimizer"]["dense"]["param_groups"][0]["lr"]
    assert second == 0.02
    assert min(result.losses.values()) < 0.8 * result.losses[1]


@pytest.mark.long
def test_lr_may_know_the_number_of_steps(trainer: Trainer, own: Written) -> None:
    sets = own(f"{DENSE}return parts(model, lr=lambda step, total: 0.1 * (1 - step / total))")
    assert rates(trainer.train(*sets, "run.max_steps=4")) == [0.1, 0.075, 0.05, 0.025]
    wrong = trainer.train(*own(f"{DENSE}return parts(model, lr=lambda step: -step)"), "run.max_steps=4")
    assert wrong.end.status == "failed" and "lr(1)" in wrong.end.reason


@pytest.mark.long
def test_a_changed_option_takes_effect_on_resume_unless_a_scheduler_continues(
    trainer: Trainer, own: Written
) -> None:
    body = f"{DENSE}sgd = SGD(model.parameters(), settings.optimizer.lr, momentum=0.9)\n"
    first = trainer.train(*own(f"{body}return parts(model, optimizer=sgd)"), "run.max_steps=3")
    again = trainer.train("run.max_steps=6", "optimizer.lr=0.5", resume=first)
    assert rates(again)[-3:] == [0.5] * 3
    sets = own(f"{body}return parts(model, optimizer=sgd, scheduler=StepLR(sgd, 2))")
    first = trainer.train(*sets, "run.max_steps=3")
    refused = trainer.train("run.max_steps=6", "optimizer.lr=0.5", resume=first)
    assert refused.end.status == "failed" and "initial_lr" in refused.end.reason


def test_decay_spares_biases_and_norms(own: Written) -> None:
    config = read(None, [*own(f"{DENSE}return parts(model)"), "run.max_steps=3"]).resolve()
    model = prepare(config).model
    decayed, spared = decay_groups(model)
    assert [tuple(item.shape) for item in decayed["params"]] == [(9, 4), (1, 4)]
    assert [tuple(item.shape) for item in spared["params"]] == [(4,), (4,), (1,)]
    assert spared["weight_decay"] == 0
    assert "weight_decay" not in decayed


MIXED = """
def step(batch, train):
    with train.phase("forward"):
        value = loss(model(batch[0]), batch)
        kinds.append(model.head(torch.ones(1, 4)).dtype)
    train.backward(value)
    train.update()
    return value
kinds = []
return parts(model, step=step, on_step=lambda train: train.log("half", float(kinds[-1] == torch.float16)))
"""


@pytest.mark.long
def test_a_step_with_the_configured_optimizer_scales_its_loss(trainer: Trainer, own: Written) -> None:
    sets = (*own(DENSE + MIXED), "precision.amp=fp16", "clip.max_norm=1.0")
    result = resumed(trainer, sets, 11, 23)
    windows = [window for window in result.windows if window.steps]
    assert {window.loss_scale for window in windows} <= {
        2.0**power for power in range(17)
    }  # halved on overflow
    assert any(window.grad_norm for window in windows)
    assert dict(result.snapshot.scalars)["half"][-1][1] == 1.0


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("step=lambda batch, train: None", "NoneType"),
        ("step=lambda batch, train: train.phase('walk').__enter__()", "'walk'"),
        ("step=lambda batch, train: train.update('x')", "'x'"),
        ("state=lambda batch: 0, forward=lambda model, batch, state: model(batch[0])", "state"),
    ],
)
def test_mistakes_in_a_step_are_named(trainer: Trainer, own: Written, body: str, named: str) -> None:
    end = trainer.train(*own(f"{DENSE}return parts(model, {body})"), "run.max_steps=3").end
    assert end.status == "failed" and named in end.reason


def test_a_step_cannot_be_traced_for_an_absent_gpu(own: Written) -> None:
    from ndd_engine.errors import UsageError

    sets = own(f"{DENSE}return parts(model, step=lambda batch, train: 0.0)")
    config = read(None, [*sets, "run.max_steps=3"]).resolve()
    with pytest.raises(UsageError, match="own step"):
        traced(config, prepare(config), 8)

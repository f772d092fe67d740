"""Optimizers, schedules, steps and callbacks of a factory: what is read, and what is refused and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from own_help import MakeConfig, Prepare, giving, mistakes

from ndd_engine.config.schema import Config
from ndd_engine.errors import ConfigError
from ndd_engine.workloads.own import Own
from ndd_engine.workloads.registry import prepare

NET = "def factory(settings):\n    net = Net()\n    {body}\n    return dict(model=net, train_data=Pairs(), {parts})\n"
SGD = "optimizer=torch.optim.SGD(net.parameters(), lr=0.1)"


def source(parts: str, body: str = "pass") -> str:
    return NET.format(parts=parts, body=body)


def refused(module: Any, make_config: MakeConfig, text: str, **sections: dict[str, Any]) -> list[str]:
    base = make_config({"name": f"{module(text)}:factory", "options": {}}, micro=4).model_dump()
    config = Config.model_validate({
        **base, **{name: {**base[name], **section} for name, section in sections.items()}
    })  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        prepare(config)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ("loss=loss, optimizer='adam'", "optimizer: is a str; allowed: a torch.optim.Optimizer, or a dict or list of"),
        ("loss=loss, optimizer={'a': 3}", "optimizer[a]: is an int; allowed: a torch.optim.Optimizer"),
        ("loss=loss, optimizer=[]", "optimizer: is empty, so nothing would be trained"),
        (
            "loss=loss, optimizer=torch.optim.SGD(net.head.parameters(), lr=1)",
            "optimizer: has not all trainable parameters: encoder.weight and 1 more would not be trained; add them, "
            "or call requires_grad_(False) on them",
        ),
        (
            "loss=loss, optimizer=torch.optim.SGD([*net.parameters(), *Net().parameters()], lr=1)",
            "optimizer: holds 4 parameters that are not in the model, so they would be neither moved nor saved; return "
            "several models as one",
        ),
        ("loss=loss, optimizer=torch.optim.LBFGS(net.parameters())", "LBFGS evaluates the model several times in one"),
        ("loss=loss, lr=0.1", "lr: is a float; allowed: a function lr(step) or lr(step, total_steps)"),
        ("loss=loss, lr=lambda a, b, c: 1", "lr: cannot be called as lr(step, total_steps)"),
        ("loss=loss, scheduler_every='step'", "scheduler_every: is not used without scheduler"),
        (
            "loss=loss, scheduler=torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net.parameters(), lr=1), 2)",
            "scheduler: belongs to an optimizer that the factory does not return; return the optimizer",
        ),
        (f"loss=loss, {SGD}, scheduler=3", "scheduler: is an int; allowed: a scheduler of torch.optim.lr_scheduler"),
        ("loss=loss, optimiser=3", "optimiser: is no part of a workload, so it would not be used; did you mean optim"),
        ("loss=loss, xyz=3", "xyz: is no part of a workload, so it would not be used; remove it; the parts are model,"),
        ("step=lambda batch, train: None", "eval_step: is missing: with step and without loss, nothing can be"),
        (
            "step=lambda batch, train: None, eval_step=lambda model, batch: 0, loss=loss",
            "loss: is not used with step and eval_step; remove it",
        ),
        (
            "loss=loss, eval_step=lambda model, batch: 0, metric=lambda: None",
            "metric: is not used with eval_step, which returns the values itself; remove it",
        ),
        ("loss=loss, stateful={'a': 3}", "stateful[a]: is an int; allowed: an object with state_dict() and load_state"),
        ("loss=loss, on_step=3", "on_step: is an int; allowed: a function on_step(train)"),
        ("loss=loss, on_evaluate=lambda: 0", "on_evaluate: cannot be called as on_evaluate(metrics, train)"),
        ("loss=loss, state=lambda batch: 0, forward=lambda m, b: 0", "forward: cannot be called as forward(model, ba"),
        (f"loss=loss, {SGD}, lr=lambda step: 1, scheduler=scheduler", "lr: is not used with scheduler, which sets"),
    ],
)  # fmt: skip
def test_what_would_have_no_effect_is_refused(own: Prepare, parts: str, words: str) -> None:
    body = "pass"
    if "scheduler=scheduler" in parts:
        body = "sgd = torch.optim.SGD(net.parameters(), lr=1); scheduler = torch.optim.lr_scheduler.StepLR(sgd, 2)"
        parts = parts.replace(SGD, "optimizer=sgd")
    found = mistakes(own, source(parts, body))
    assert any(words in text for text in found), found


@pytest.mark.parametrize(
    ("parts", "sections", "words"),
    [
        (
            f"loss=loss, {SGD}", {"optimizer": {"lr": 0.5}},
            "optimizer.lr = 0.5: is not used, because the factory returns its own optimizer; read it in the factory as "
            "settings.optimizer.lr, or remove it",
        ),
        ("loss=loss, lr=lambda step: 1", {"schedule": {"kind": "cosine"}}, 'schedule.kind = "cosine": is not used'),
        ("step=lambda b, t: 0, loss=loss", {"speed": {"compile": "default"}}, "speed.compile"),
        (
            "step=lambda b, t: 0, loss=loss", {"batch": {"accumulation": 2}},
            "batch.accumulation = 2: is not used, because the factory returns its own step, which receives one batch "
            "per optimizer step; allowed: 1; set batch.micro to 8, and split the batch in the step if it does not fit",
        ),
        (
            "loss=loss, optimizer=sgd, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)",
            {"evaluate": {"every_epochs": 0}},
            "scheduler: steps after evaluations, but no evaluations are configured; set evaluate.every_epochs",
        ),
        (
            "loss=loss, optimizer=sgd, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, 'max')", {},
            'scheduler: has mode "max", but the metric improves as "min"',
        ),
        (
            "loss=loss, optimizer=sgd, scheduler_every='epoch', scheduler="
            "torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)", {},
            'scheduler_every = "epoch": a ReduceLROnPlateau needs a metric',
        ),
    ],
)  # fmt: skip
def test_settings_without_effect_are_refused(
    module: Any, make_config: MakeConfig, parts: str, sections: Any, words: str
) -> None:
    text = source(parts, "sgd = torch.optim.SGD(net.parameters(), lr=0.1)")
    found = refused(module, make_config, text, **sections)
    assert any(words in line for line in found), found


def test_settings_that_the_factory_reads_are_used(module: Any, make_config: MakeConfig) -> None:
    text = source("loss=loss, optimizer=torch.optim.SGD(net.parameters(), lr=settings.optimizer.lr)")
    base = make_config({"name": f"{module(text)}:factory", "options": {}}, micro=4).model_dump()
    config = Config.model_validate({**base, "optimizer": {"lr": 0.25}})
    workload = prepare(config)
    assert isinstance(workload, Own)
    assert workload.training.optimizers is not None
    assert workload.training.optimizers[""].param_groups[0]["lr"] == 0.25
    with pytest.raises(ConfigError, match="lrr is not a key of \\[optimizer\\]"):
        prepare(
            make_config({"name": f"{module(text.replace('.lr)', '.lrr)'))}:factory", "options": {}}, micro=4)
        )


def test_several_models_are_one_module_dict(own: Prepare) -> None:
    workload = own(
        giving(
            model="dict(first=Net(), second=Net())", forward="lambda model, batch: model['first'](batch[0])"
        )
    )
    assert isinstance(workload.model, torch.nn.ModuleDict)
    assert workload.describe_model().startswith("first, second: ")
    found = mistakes(own, giving(model="{'keys': Net()}"))
    assert "model: is a dict; allowed: a torch.nn.Module, or a dict of them" in found[0]

"""Optimizers, schedules, steps and callbacks of a factory: what is read, and what is refused and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from own_help import MakeConfig, Prepare, giving, mistakes

from ndd_engine.config.schema import Config
from ndd_engine.errors import ConfigError
from ndd_engine.workloads.factory_data import prepare

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


# A part, and what the message begins with.
@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ("loss=loss, optimizer='adam'", "optimizer: is a str"),
        ("loss=loss, optimizer={'a': 3}", "optimizer[a]: is an int"),
        ("loss=loss, optimizer=[]", "optimizer: is empty"),
        ("loss=loss, optimizer=torch.optim.SGD(net.head.parameters(), lr=1)", "encoder.weight and 1 more"),
        (
            "loss=loss, optimizer=torch.optim.SGD([*net.parameters(), *Net().parameters()], lr=1)",
            "holds 4 parameters",
        ),
        ("loss=loss, optimizer=torch.optim.LBFGS(net.parameters())", "LBFGS"),
        ("loss=loss, lr=0.1", "lr: is a float"),
        ("loss=loss, lr=lambda a, b, c: 1", "lr: cannot be called as lr(step, total_steps)"),
        ("loss=loss, scheduler_every='step'", "scheduler_every"),
        (
            "loss=loss, scheduler=torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net.parameters(), lr=1), 2)",
            "scheduler",
        ),
        (f"loss=loss, {SGD}, scheduler=3", "scheduler: is an int"),
        ("loss=loss, optimiser=3", "did you mean optim"),
        ("loss=loss, xyz=3", "xyz"),
        ("step=lambda batch, train: None", "eval_step: is missing"),
        ("step=lambda batch, train: None, eval_step=lambda model, batch: 0, loss=loss", "loss"),
        ("loss=loss, eval_step=lambda model, batch: 0, metric=lambda: None", "metric"),
        ("loss=loss, stateful={'a': 3}", "stateful[a]: is an int"),
        ("loss=loss, on_step=3", "on_step: is an int"),
        ("loss=loss, on_evaluate=lambda: 0", "on_evaluate(metrics, train)"),
        ("loss=loss, state=lambda batch: 0, forward=lambda m, b: 0", "forward(model, ba"),
        (f"loss=loss, {SGD}, lr=lambda step: 1, scheduler=scheduler", "lr: is not used"),
    ],
)
def test_what_would_have_no_effect_is_refused(own: Prepare, parts: str, named: str) -> None:
    body = "pass"
    if "scheduler=scheduler" in parts:
        body = "sgd = torch.optim.SGD(net.parameters(), lr=1); scheduler = torch.optim.lr_scheduler.StepLR(sgd, 2)"
        parts = parts.replace(SGD, "optimizer=sgd")
    found = mistakes(own, source(parts, body))
    assert any(named in text for text in found), found


PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"


@pytest.mark.parametrize(
    ("parts", "sections", "named"),
    [
        (f"loss=loss, {SGD}", {"optimizer": {"lr": 0.5}}, "optimizer.lr = 0.5"),
        ("loss=loss, lr=lambda step: 1", {"schedule": {"kind": "cosine"}}, "schedule.kind"),
        ("step=lambda b, t: 0, loss=loss", {"speed": {"compile": "default"}}, "speed.compile"),
        ("step=lambda b, t: 0, loss=loss", {"batch": {"accumulation": 2}}, "batch.accumulation = 2"),
        (
            f"loss=loss, optimizer=sgd, scheduler={PLATEAU}(sgd)",
            {"evaluate": {"every_epochs": 0}},
            "evaluate.every_epochs",
        ),
        (f"loss=loss, optimizer=sgd, scheduler={PLATEAU}(sgd, 'max')", {}, '"max"'),
        (
            f"loss=loss, optimizer=sgd, scheduler_every='epoch', scheduler={PLATEAU}(sgd)",
            {},
            "scheduler_every",
        ),
    ],
)
def test_settings_without_effect_are_refused(
    module: Any, make_config: MakeConfig, parts: str, sections: Any, named: str
) -> None:
    text = source(parts, "sgd = torch.optim.SGD(net.parameters(), lr=0.1)")
    found = refused(module, make_config, text, **sections)
    assert any(named in line for line in found), found


def test_settings_that_the_factory_reads_are_used(module: Any, make_config: MakeConfig) -> None:
    text = source("loss=loss, optimizer=torch.optim.SGD(net.parameters(), lr=settings.optimizer.lr)")
    base = make_config({"name": f"{module(text)}:factory", "options": {}}, micro=4).model_dump()
    config = Config.model_validate({**base, "optimizer": {"lr": 0.25}})
    workload = prepare(config)
    assert workload.training.optimizers is not None
    assert workload.training.optimizers[""].param_groups[0]["lr"] == 0.25
    with pytest.raises(ConfigError, match="lrr"):
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
    assert "is a dict" in found[0]

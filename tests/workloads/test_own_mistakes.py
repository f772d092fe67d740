"""A user's own workload: mistakes in its module, in what its factory gives and in settings are told, with location."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from own_help import PLAIN, START, Prepare, giving, line_of, mistakes
from torch.utils.data import default_collate

from ndd_engine.config import read
from ndd_engine.config.schema import Config
from ndd_engine.errors import ConfigError, TrainingError
from ndd_engine.workloads.factory_data import prepare
from ndd_engine.workloads.interface import problems

# Mistakes that show without importing the module.


def told(name: str) -> str:
    config = read(None, ["run.epochs=1"], name).resolve()
    return "\n".join(map(str, problems(config, "here")))


def test_the_module_is_looked_through_and_not_imported(module: Callable[[str], str], tmp_path: Path) -> None:
    name = module("raise RuntimeError('imported')\n" + PLAIN)
    assert told(f"{name}:factory") == ""
    assert name not in sys.modules
    assert "factory?" in (text := told(f"{name}:factroy")) and f"{name}.py" in text and "Net" in text
    assert f"{name}?" in told(f"{name}x:factory")
    assert f" {name}:factory" in told(f"{name}.py:factory")
    missing = told("no_such_thing_at_all:factory")
    assert str(tmp_path) in missing and "workload.path" in missing and "workload.name" in missing
    assert "a standard" in told("random:factory")


def test_packages_and_names_bound_in_every_way(module: Callable[[str], str], tmp_path: Path) -> None:
    name = module("if True:\n    factory = None\nfrom os import path as second\n(third, *fourth) = 1, 2\n")
    assert not any(told(f"{name}:{bound}") for bound in ("factory", "second", "third", "fourth", "Net"))
    assert told(f"{module('from math import *')}:anything") == ""
    (tmp_path / "pack" / "inner").mkdir(parents=True)
    (tmp_path / "pack" / "inner" / "zoo.py").write_text("def make(settings): ...\n")
    assert told("pack.inner.zoo:make") == ""
    assert "pack.inner.zoo?" in told("pack.inner.zo:make")
    assert "pack.outer" in told("pack.outer.zoo:make")
    assert "a folder" in told("pack.inner:make")


@pytest.mark.parametrize("content", [b"x = 1\ndef factory(settings:\n", b"x = 1\n\xff\n", b"x\x00"])
def test_source_that_is_not_python(module: Callable[[str], str], tmp_path: Path, content: bytes) -> None:
    name = module("")
    (tmp_path / f"{name}.py").write_bytes(content)
    assert f"{name}.py" in (text := told(f"{name}:factory")) and "Python" in text


# Mistakes in what the factory gives.


def test_everything_that_is_missing_or_wrong_is_told_at_once(own: Prepare) -> None:
    source = (
        "def factory(settings):\n"
        "    return SimpleNamespace(net=Net(), train_data=iter([]), eval_data={}, loss=3, better='up', metric=len,\n"
        "        forward=lambda batch: batch, item=5, token='word', parts=[1], epochs_differ=1, notes=[2],\n"
        "        eval_dat=1)\n"
    )
    found = mistakes(own, source)
    line = line_of(source, "def factory(settings):")
    assert all(f".py:{line}: " in text for text in found)
    keys = [text.split(": ")[1] for text in found]
    for key in ("model", "train_data", "eval_data", "loss", "better = \"up\"", "metric", "forward", "item",
                "tokens_per_item", "parts", "epochs_differ", "notes"):  # fmt: skip
        assert key in keys, (key, found)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("def factory(settings):\n    Net()\n", "None"),
        ("def factory(settings):\n    return Net()\n", "the model"),
        ("def factory(settings):\n    return Net(), Pairs(), loss\n", "a tuple"),
        ("def factory(settings):\n    return Net\n", "the class Net"),
        ("async def factory(settings):\n    return Net\n", "a coroutine"),
        ("def factory():\n    return Net()\n", "0 positional"),
        ("factory = 3\n", "an int"),
        (giving(model="nn.ReLU()"), "trainable"),
        (giving(model="nn.LazyLinear(3)"), "no shape"),
        (giving(loss="nn.MSELoss()"), "batch[1]"),
        (giving(loss="lambda output: output"), "loss(output, batch)"),
        (giving(train_data="[]"), "train_data"),
        (giving(train_data="Pairs(1)"), "evaluation"),
        (giving(train_data="Pairs(3)"), "4 items"),
        (giving(eval_dta="1", eval_data="3"), "__len__"),
        (giving(eval_datta="Pairs(8)"), "eval_data?"),
        (giving(parts="{'x': nn.Linear(1, 1)}"), "parts[x]"),
        (giving(tokens_per_item="-1"), "above 0"),
        (giving(alternatives="{'no-cause': ('workload.options.pad=full', 'pad')}"), "'no-cause'"),
        (giving(alternatives="{'recompile': ('pad', 'pad all batches')}"), "'recompile'"),
        (giving(train_data="[object()] * 9"), "collate"),
        (giving(train_data="[torch.ones(i + 1) for i in range(9)]"), "collate"),
        (giving(train_data="['a'] * 9"), "no tensor"),
        (giving(train_data="Pairs()", collate="lambda items: SimpleNamespace(x=1)"), "SimpleNamespace"),
        (giving(epochs_differ="True"), "second epoch"),
        (giving(eval_data="DataLoader(Pairs(), collate_fn=list)"), "collate"),
    ],
)
def test_each_mistake_names_itself(own: Prepare, source: str, named: str) -> None:
    text = "\n".join(mistakes(own, source))
    assert named in text, text
    assert ".py:" in text or "workload: " in text


LOADER = "DataLoader(Pairs(), batch_size=4, {})"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("num_workers=3", "loader.workers is 0"),
        ("pin_memory=True", "loader.pin_memory is false"),
        ("num_workers=2, prefetch_factor=7", "loader.prefetch"),
        ("num_workers=2, timeout=9", "loader.timeout_s is 120"),
        ("num_workers=2, multiprocessing_context='fork'", '"fork"'),
        ("in_order=False", "in_order"),
        ("pin_memory_device='cuda:1'", "pin_memory_device"),
    ],
)
def test_an_argument_of_a_loader_that_is_not_used_is_refused(
    own: Prepare, arguments: str, named: str
) -> None:
    found = mistakes(own, giving(train_data=LOADER.format(arguments)))
    assert any(named in text and "train_data" in text and ".py:" in text for text in found), found


def test_persistent_workers_are_refused_only_where_they_contradict(own: Prepare) -> None:
    loader = LOADER.format("num_workers=1, persistent_workers=True")
    assert own(giving(train_data=loader), loader={"workers": 1}).order is not None
    text = "\n".join(mistakes(own, giving(train_data=loader), loader={"workers": 1, "persistent": False}))
    assert "persistent_workers" in text and "loader.persistent" in text


NUMBERS = """
class Numbers(IterableDataset):
    def __iter__(self):
        return ((torch.ones(3), torch.ones(())) for _ in range(9))
"""


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"train_data": "DataLoader(Pairs(), batch_size=16)"}, "batch.micro is 4"),
        ({"train_data": "DataLoader(Pairs())"}, "batch_size: is 1"),
        ({"train_data": "DataLoader(Pairs(), batch_size=None)"}, "batch_size: is None"),
        ({"train_data": "DataLoader(Stream(), batch_size=4)"}, "eval_data"),
        ({"train_data": "Stream()"}, "IterableDataset"),
        (
            {
                "train_data": "DataLoader(Pairs(), sampler=WeightedRandomSampler([1.0] * 40, 40), batch_size=4)"
            },
            "sampler",
        ),
        ({"shuffle": "False", "sampler": "[1, 2]"}, "sampler: shuffle"),
        ({"sampler": "[1]", "batch_sampler": "[[1]]"}, "batch_sampler"),
        ({"shuffle": "1"}, "shuffle: is an int"),
        ({"sampler": "7"}, "sampler: is an int"),
        (
            {"sampler": "[1]", "train_data": "DataLoader(Pairs(), batch_size=4)", "eval_data": "Pairs(8)"},
            "DataLoader",
        ),
        ({"shuffle": "True", "train_data": "Stream()", "eval_data": "Pairs(8)"}, "IterableDataset"),
        ({"train_data": "Stream()", "eval_data": "Pairs(8)"}, "__iter__"),
        ({"epochs_differ": "True", "train_data": "Numbers()", "eval_data": "Pairs(8)"}, "epochs_differ"),
    ],
)
def test_an_order_that_cannot_be_used_is_refused(own: Prepare, parts: dict[str, str], named: str) -> None:
    found = mistakes(own, NUMBERS + giving(**parts))
    assert any(named in text for text in found), found


@pytest.mark.parametrize(
    "setting", [{"cache": True}, {"placement": "device"}, {"fetch": "batch"}, {"shuffle": True}]
)
def test_a_setting_that_cannot_apply_to_a_stream_is_refused(own: Prepare, setting: dict[str, object]) -> None:
    found = mistakes(own, NUMBERS + giving(train_data="Numbers()", eval_data="Pairs(8)"), loader=setting)
    assert any(f"loader.{next(iter(setting))} = " in text for text in found), found


@pytest.mark.parametrize(
    ("source", "line", "expected"),
    [
        ("import no_such_package\n" + PLAIN, "import no_such_package", "No module named 'no_such_package'"),
        ("def factory(settings):\n    return {}['x']\n", "    return {}['x']", "KeyError: 'x'"),
        ("def factory(settings):\n    Net(2)(torch.ones(5))\n", "        return self.head(self.encoder(x).relu())",
         "the factory failed: RuntimeError"),
        ("raise SystemExit(2)\n" + PLAIN, "raise SystemExit(2)", 'if __name__ == "__main__"'),
        ("class Bad(Pairs):\n    def __getitem__(self, index):\n        return open('nowhere')\n"
         + giving(train_data="Bad()"),
         "        return open('nowhere')", "train_data[0] failed: FileNotFoundError"),
    ],
)  # fmt: skip
def test_what_the_users_code_raises_is_one_line_with_its_place(
    own: Prepare, source: str, line: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        own(source)
    text = str(caught.value)
    assert "\n" not in text and f".py:{line_of(source, line)}: " in text and expected in text, text
    assert caught.value.__cause__ is not None  # for the log
    assert caught.value.exit_status == 2


def test_items_that_are_drawn_anew_each_time_are_told(own: Prepare) -> None:
    source = "class Random(Pairs):\n    def __getitem__(self, index):\n        return torch.rand(3), torch.rand(())\n"
    notes = own(source + giving(train_data="Random()")).notes()
    assert any("different" in note for note in notes)
    assert not any("different" in note for note in own().notes())
    nan = (
        "class Nan(Pairs):\n    def __getitem__(self, index):\n        return torch.tensor([torch.nan]), 0\n"
    )
    assert not any("different" in note for note in own(nan + giving(train_data="Nan()")).notes())


def test_data_that_no_worker_can_have_is_refused_before_it_is_sent(own: Prepare) -> None:
    local = (
        "def factory(settings):\n    class Local(Pairs): pass\n"
        "    return dict(model=Net(), train_data=Local(), loss=loss)\n"
    )
    (text,) = mistakes(own, local, loader={"workers": 2})
    assert "loader.workers" in text and "Local" in text
    assert own(local) is not None  # without workers it may be
    (text,) = mistakes(own, giving(collate="lambda items: items[0]"), loader={"eval_workers": 1})
    assert "loader.eval_workers" in text and "lambda" in text
    assert own(loader={"workers": 2}) is not None


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("lambda output, batch: output.squeeze(1) - batch[1]", "shape (2,)"),
        ("lambda output, batch: 3.0", "a float"),
        ("lambda output, batch: output.detach().mean()", "parameters"),
    ],
)
def test_a_loss_that_cannot_be_trained_on(own: Prepare, loss: str, expected: str) -> None:
    workload = own(giving(loss=loss))
    batch = default_collate([workload.train_data[0], workload.train_data[1]])
    with pytest.raises(TrainingError) as caught:
        workload.loss(workload.forward(workload.model, batch), batch)
    assert expected in str(caught.value) and ".py:" in str(caught.value)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [("list", "no update"), ("lambda: Wrong()", "by name")],
)
def test_a_metric_that_is_none(own: Prepare, metric: str, expected: str) -> None:
    source = "class Wrong:\n    def update(self, *_): ...\n    def result(self):\n        return [1]\n"
    workload = own(source + giving(metric=metric))
    with pytest.raises(TrainingError) as caught:
        workload.metric().result()
    assert expected in str(caught.value)


def test_another_module_of_that_name_is_not_taken_for_it(
    module: Callable[[str], str], tmp_path: Path
) -> None:
    name = module(PLAIN)
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{name}.py").write_text(START + PLAIN)
    config = {"run": {"epochs": 1}, "workload": {"name": f"{name}:factory"}, "batch": {"micro": 4}}
    prepare(Config.model_validate(config))
    config["workload"] = {"name": f"{name}:factory", "path": [str(other)]}
    with pytest.raises(ConfigError, match="already"):
        prepare(Config.model_validate(config))


def test_a_factory_reports_mistakes_of_its_settings_together(own: Prepare) -> None:
    source = (
        "def factory(settings):\n"
        "    settings.progress('looking')\n"
        "    settings.problems.add('workload.options.width', 'is odd', settings.option('width', 1), 'even')\n"
        "    settings.problems.stop(f'{settings.micro * settings.accumulation * settings.ranks} at once')\n"
    )
    first, second = mistakes(own, source, options={"width": 3}, batch={"accumulation": 2})
    assert "workload.options.width = 3" in first and "is odd" in first and "even" in first
    assert 'workload.data = "builtin"' in second and "8 at once" in second


NET = "def factory(settings):\n    net = Net()\n    {body}\n    return dict(model=net, train_data=Pairs(), {parts})\n"
SGD = "optimizer=torch.optim.SGD(net.parameters(), lr=0.1)"


def source(parts: str, body: str = "pass") -> str:
    return NET.format(parts=parts, body=body)


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


PLATEAU = "loss=loss, optimizer=sgd, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau"


@pytest.mark.parametrize(
    ("parts", "sections", "named"),
    [
        (f"loss=loss, {SGD}", {"optimizer": {"lr": 0.5}}, "optimizer.lr = 0.5"),
        ("loss=loss, lr=lambda step: 1", {"schedule": {"kind": "cosine"}}, "schedule.kind"),
        ("step=lambda b, t: 0, loss=loss", {"speed": {"compile": "default"}}, "speed.compile"),
        ("step=lambda b, t: 0, loss=loss", {"batch": {"accumulation": 2}}, "batch.accumulation = 2"),
        (f"{PLATEAU}(sgd)", {"evaluate": {"every_epochs": 0}}, "evaluate.every_epochs"),
        (f"{PLATEAU}(sgd, 'max')", {}, '"max"'),
        (f"{PLATEAU}(sgd), scheduler_every='epoch'", {}, "scheduler_every"),
    ],
)
def test_settings_without_effect_are_refused(own: Prepare, parts: str, sections: Any, named: str) -> None:
    found = mistakes(own, source(parts, "sgd = torch.optim.SGD(net.parameters(), lr=0.1)"), **sections)
    assert any(named in line for line in found), found


def test_settings_that_the_factory_reads_are_used(own: Prepare) -> None:
    text = source("loss=loss, optimizer=torch.optim.SGD(net.parameters(), lr=settings.optimizer.lr)")
    workload = own(text, optimizer={"lr": 0.25})
    assert workload.training.optimizers is not None
    assert workload.training.optimizers[""].param_groups[0]["lr"] == 0.25
    with pytest.raises(ConfigError, match="lrr"):
        own(text.replace(".lr)", ".lrr)"))


def test_several_models_are_one_module_dict(own: Prepare) -> None:
    forward = "lambda model, batch: model['first'](batch[0])"
    workload = own(giving(model="dict(first=Net(), second=Net())", forward=forward))
    assert isinstance(workload.model, torch.nn.ModuleDict)
    assert workload.describe_model().startswith("first, second: ")
    found = mistakes(own, giving(model="{'keys': Net()}"))
    assert "is a dict" in found[0]

"""A user's own workload: what a factory may give, what is decided for it, and every mistake in one message."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from ndd_engine.config import read, to_toml
from ndd_engine.config.schema import Config
from ndd_engine.errors import ConfigError, TrainingError
from ndd_engine.record.rundir import new_run_dir
from ndd_engine.workloads.base import MeanLoss, batch_size
from ndd_engine.workloads.facts import problems
from ndd_engine.workloads.own import Own
from ndd_engine.workloads.registry import prepare

MakeConfig = Callable[..., Config]
Prepare = Callable[..., Own]
_numbers = itertools.count()

START = """
import torch
from types import SimpleNamespace
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

class Pairs(Dataset):
    def __init__(self, count=40):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        x = torch.full((3,), float(index))
        return x, x.sum()

class Stream(IterableDataset):
    def __iter__(self):
        return iter(())

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.encoder = nn.Linear(3, width)
        self.head = nn.Linear(width, 1)
    def forward(self, x):
        return self.head(self.encoder(x).relu())

def loss(output, batch):
    return nn.functional.mse_loss(output.squeeze(1), batch[1])
"""
PLAIN = "def factory(settings):\n    return dict(model=Net(), train_data=Pairs(), loss=loss)\n"


def giving(**more: str) -> str:
    """A factory whose object has other parts, each written in Python."""
    parts = {"model": "Net()", "train_data": "Pairs()", "loss": "loss", **more}
    body = ", ".join(f"{name}={text}" for name, text in parts.items())
    return f"def factory(settings):\n    return SimpleNamespace({body})\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """module(source) writes a module into the current folder and returns its name, which no other test uses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(source: str) -> str:
        name = f"own_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(START + dedent(source), "utf-8")
        return name

    return write


@pytest.fixture
def own(module: Callable[[str], str], make_config: MakeConfig) -> Prepare:
    """own(source) prepares the factory of a module with that source below START."""

    def make(
        source: str = PLAIN, options: dict[str, Any] | None = None, loader: Any = None, **batch: int
    ) -> Own:
        section = {"name": f"{module(source)}:factory", "options": options or {}}
        config = make_config(section, **{"micro": 4, **batch})
        if loader is not None:
            config = Config.model_validate({**config.model_dump(), "loader": loader})
        workload = prepare(config)
        assert isinstance(workload, Own)
        return workload

    return make


def mistakes(own: Prepare, source: str, **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        own(source, **more)
    return [str(problem) for problem in caught.value.problems]


def line_of(source: str, text: str) -> int:
    return (START + source).splitlines().index(text) + 1


# What may be given.


@pytest.mark.parametrize(
    "source",
    [
        PLAIN,
        giving(),
        "class factory:\n    def __init__(self, settings):\n"
        "        self.model, self.train_data = Net(), Pairs()\n"
        "    def loss(self, output, batch):\n        return loss(output, batch)\n",
    ],
)
def test_a_dict_a_namespace_or_an_object_will_do(own: Prepare, source: str) -> None:
    workload = own(source)
    batch = default_collate([workload.train_data[0], workload.train_data[1]])
    output = workload.forward(workload.model, batch)
    assert torch.equal(output, workload.model(batch[0]))
    value = workload.loss(output, batch)
    value.backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(value, ((output.squeeze(1) - batch[1]) ** 2).mean())
    assert all(parameter.grad is not None for parameter in workload.model.parameters())
    assert "2 Linear" in workload.describe_model()


def test_the_end_is_kept_for_evaluation_and_said(own: Prepare) -> None:
    workload = own(giving(train_data="Pairs(45)"))
    train, evaluation = workload.train_data, workload.eval_data
    assert len(train) == 41 and len(evaluation) == 4  # type: ignore[arg-type]
    assert [float(evaluation[index][0][0]) for index in range(4)] == [41, 42, 43, 44]
    assert "the last 4 of 45 items are kept for evaluation" in " ".join(workload.notes())
    assert "41 items a pass, 4 to evaluate" in workload.describe_data()
    given = own(giving(eval_data="Pairs(7)"))
    assert len(given.train_data) == 40 and len(given.eval_data) == 7  # type: ignore[arg-type]
    assert "kept for evaluation" not in " ".join(given.notes())


def test_tensors_make_the_same_batch_in_one_gather(own: Prepare) -> None:
    data = "TensorDataset(torch.arange(60.).view(20, 3), torch.arange(20.))"
    workload = own(giving(train_data=data))
    for part in (workload.train_data, workload.eval_data):
        indices = torch.tensor([1, 0])
        one_by_one = default_collate([part[1], part[0]])
        at_once = part.batch(indices)  # type: ignore[attr-defined]
        assert type(at_once) is type(one_by_one)
        assert all(map(torch.equal, at_once, one_by_one))
    assert float(workload.eval_data[0][1]) == 18
    assert workload.train_data.nbytes == 18 * 4 * 4  # type: ignore[attr-defined]


def test_a_part_of_data_that_gathers_or_changes_each_epoch_asks_for_the_right_items(own: Prepare) -> None:
    source = (
        "class Asked(Dataset):\n    nbytes = 80\n"
        "    def __len__(self):\n        return 20\n"
        "    def __getitem__(self, index):\n        return torch.full((3,), float(index)), torch.tensor(0.)\n"
        "    def batch(self, indices):\n"
        "        return [indices.float().unsqueeze(1).expand(-1, 3), torch.zeros(len(indices))]\n"
        "    def to(self, device):\n        return self\n"
    )
    workload = own(source + giving(train_data="Asked()", epochs_differ="True"))
    train, evaluation = workload.train_data, workload.eval_data
    assert len(train) == 18 and len(evaluation) == 2  # type: ignore[arg-type]
    assert [float(train[index][0][0]) for index in (0, 17, 18, 36)] == [0, 17, 20, 40]
    assert float(evaluation[1][0][0]) == 19
    assert evaluation.batch(torch.tensor([0, 1]))[0][:, 0].tolist() == [18, 19]  # type: ignore[attr-defined]


def test_a_loader_is_taken_apart(own: Prepare) -> None:
    source = "def join(items):\n    return [torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])]\n"
    loader = "DataLoader(Pairs(), batch_size=16, num_workers=3, shuffle=True, collate_fn=join)"
    workload = own(source + giving(train_data=loader, eval_data="DataLoader(Pairs(8), collate_fn=join)"))
    assert len(workload.train_data) == 40 and workload.collate is not None  # type: ignore[arg-type]
    notes = " ".join(workload.notes())
    assert "batch_size 16 (batch.micro is 4)" in notes and "num_workers 3 (loader.workers is 0)" in notes
    plain = own(giving(train_data="DataLoader(Pairs(), batch_size=4, shuffle=True)"))
    assert plain.collate is None and "do not count" not in " ".join(plain.notes())


@pytest.mark.parametrize(
    ("item", "call"),
    [
        ("{'x': torch.ones(3)}", "Net()(**batch)"),
        ("torch.ones(3)", "Net()(batch)"),
        ("(torch.ones(3), 1)", "Net()(batch[0])"),
    ],
)
def test_the_model_is_called_by_the_kind_of_batch(own: Prepare, item: str, call: str) -> None:
    source = f"class Some(Pairs):\n    def __getitem__(self, index):\n        return {item}\n"
    workload = own(source + giving(train_data="Some()", loss="lambda output, batch: output.mean()"))
    batch = default_collate([workload.train_data[0], workload.train_data[1]])
    expected = workload.model(torch.ones(2, 3))
    assert torch.equal(workload.forward(workload.model, batch), expected), call


def test_own_forward_metric_words_and_parts(own: Prepare) -> None:
    source = (
        "class Worst:\n    def __init__(self):\n        self.worst = 0.0\n"
        "    def update(self, output, batch, loss):\n        self.worst = max(self.worst, float(loss))\n"
        "    def result(self):\n        return {'worst': torch.tensor(self.worst)}\n"
        "def factory(settings):\n    model = Net()\n"
        "    return SimpleNamespace(model=model, train_data=Pairs(), loss=loss, metric=Worst, better='lower',\n"
        "        forward=lambda model, batch: model(2 * batch[0]), item='pair', token='number', tokens_per_item=3,\n"
        "        parts={'encoder': model.encoder, 'both': [model.encoder, model.head]},\n"
        "        describe_model='a net', describe_data=lambda: 'some pairs', notes=['look\\x1b[2J here'])\n"
    )
    workload = own(source)
    batch = default_collate([workload.train_data[0], workload.train_data[1]])
    output = workload.forward(workload.model, batch)
    assert torch.equal(output, workload.model(2 * batch[0]))
    metric = workload.metric()
    for value in (torch.tensor(3.0), torch.tensor(1.0)):
        metric.update(output, batch, value)
    assert metric.result() == {"worst": 3.0, "loss": 2.0}
    assert list(metric.result()) == ["worst", "loss"]  # the user's own is the headline
    assert (workload.item, workload.token, workload.tokens_per_item) == ("pair", "number", 3.0)
    assert workload.describe_model() == "a net" and workload.describe_data() == "some pairs"
    assert "look\\x1b[2J here" in workload.notes()
    assert set(workload.parts) == {"encoder", "both"}
    assert isinstance(own().metric(), MeanLoss)


def test_what_the_mean_loss_weighs_batches_by(own: Prepare) -> None:
    """Text in a batch comes through default_collate as a list of texts."""
    source = (
        "class Named(Pairs):\n    def __getitem__(self, index):\n"
        "        x, y = super().__getitem__(index)\n        return {'name': 'a', 'x': x, 'y': y}\n"
    )
    workload = own(
        source
        + giving(
            train_data="Named()",
            forward="lambda model, batch: model(batch['x'])",
            loss="lambda output, batch: loss(output, [0, batch['y']])",
        )
    )
    metric = workload.metric()
    for count, value in ((3, 1.0), (1, 5.0)):
        batch = default_collate([workload.train_data[0]] * count)
        metric.update(None, batch, torch.tensor(value))
    assert metric.result() == {"loss": 2.0}
    assert batch_size({"scale": torch.tensor(2.0), "x": (torch.ones(4, 3), torch.ones(5))}) == 4


def test_weights_depend_on_the_seed_alone(own: Prepare) -> None:
    source = "torch.randn(7)\n" + PLAIN  # what a module draws when it is imported must not count
    name_and_weights = []
    for _ in range(2):
        torch.manual_seed(99)
        workload = own(source)
        again = prepare(
            Config.model_validate(
                {"run": {"epochs": 1}, "workload": {"name": workload.name}, "batch": {"micro": 4}}
            )
        )
        name_and_weights += [workload.model.state_dict(), again.model.state_dict()]
    first = name_and_weights[0]
    assert all(torch.equal(first[key], other[key]) for other in name_and_weights for key in first)


# Options.


def test_options_reach_the_factory_and_unused_ones_are_told(own: Prepare) -> None:
    source = giving(model="Net(settings.option('width', 4))", item="settings.options.get('word', 'pair')")
    workload = own(source, options={"width": 9, "hiden": 3})
    assert workload.model.encoder.out_features == 9 and workload.item == "pair"  # type: ignore[union-attr]
    notes = " ".join(workload.notes())
    assert "Option hiden was not used by the factory; it asked for width, word." in notes
    assert "width was not used" not in notes
    close = own(source, options={"widht": 9})
    assert "(did you mean width?)" in " ".join(close.notes())
    everything = own(giving(model="Net(**settings.options)"), options={"width": 2})
    assert "not used" not in " ".join(everything.notes())


@pytest.mark.parametrize(
    ("default", "value", "allowed"),
    [
        ("4", "wide", "a whole number"),
        ("4", 2.5, "a whole number"),
        ("4", True, "a whole number"),
        ("0.5", "x", "a number"),
        ("'a'", 3, "text"),
        ("False", 1, "true or false"),
        ("(1,)", 5, "a list"),
    ],
)
def test_an_option_of_another_kind_is_refused(own: Prepare, default: str, value: Any, allowed: str) -> None:
    (text,) = mistakes(
        own, giving(item=f"str(settings.option('width', {default}))"), options={"width": value}
    )
    assert "workload.options.width" in text and allowed in text


def test_options_of_a_kind_that_fits(own: Prepare) -> None:
    source = giving(
        notes="[repr([settings.option('a', 0.5), settings.option('b', (1,)), settings.option('c')])]"
    )
    assert "[2.0, (3, 4), {'d': 1}]" in own(source, options={"a": 2, "b": [3, 4], "c": {"d": 1}}).notes()


def test_options_and_path_survive_the_written_toml(tmp_path: Path) -> None:
    sets = [
        "workload.options.width=64",
        'workload.options.name="a \\u001b"',
        "workload.options.deep.list=[1, [2.5]]",
    ]
    config = read(None, [*sets, "run.epochs=1", "workload.size=big"], "some.where:factory").resolve()
    text = to_toml(config)
    assert "[workload.options]" in text and "width = 64" in text
    path = tmp_path / "elsewhere" / "config.toml"
    path.parent.mkdir()
    path.write_text(text, "utf-8")
    again = read(path).resolve()
    assert again == config
    assert read(path, ["workload.options.width=3"]).resolve().workload.options["width"] == 3  # type: ignore[union-attr]
    inline = tmp_path / "inline.toml"
    inline.write_text('[run]\nepochs = 1\n[workload]\nname = "a:b"\noptions = {width = 5}\n')
    found: Any = read(inline).resolve().workload
    assert found.options == {"width": 5} and found.path == [str(tmp_path), str(Path.cwd())]


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ("workload.options.rate=inf", "rate is not a finite number"),
        ("workload.size=auto", 'size "auto" is for the built-in workloads'),
        ("workload.optoins.width=3", "did you mean options?"),
        ("workload.options=3", "a table of keys"),
    ],
)
def test_mistakes_in_the_section(sets: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(None, [sets, "run.epochs=1"], "a:b").resolve()
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a b:c", "package.module:factory"),
        ("a:", "package.module:factory"),
        ("src/net.py:make", "did you mean src.net:make?"),
        ("a:b:c", "package.module:factory"),
        ("\x1b[2J:c", "\\x1b"),
    ],
)
def test_names_that_are_none(name: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(None, ["run.epochs=1"], name).resolve()
    assert expected in str(caught.value) and "\x1b" not in str(caught.value)


# Mistakes that show without importing the module.


def told(name: str) -> str:
    config = read(None, ["run.epochs=1"], name).resolve()
    return "\n".join(map(str, problems(config, "here")))


def test_the_module_is_looked_through_and_not_imported(module: Callable[[str], str], tmp_path: Path) -> None:
    name = module("raise RuntimeError('imported')\n" + PLAIN)
    assert told(f"{name}:factory") == ""
    assert name not in sys.modules
    assert "did you mean factory?" in (text := told(f"{name}:factroy"))
    assert f"{name}.py has no factroy" in text and "Net" in text
    assert f"did you mean {name}?" in told(f"{name}x:factory")
    assert f"write it without .py: {name}:factory" in told(f"{name}.py:factory")
    missing = told("no_such_thing_at_all:factory")
    assert str(tmp_path) in missing and "workload.path" in missing
    assert "here: workload.name" in missing
    assert "is the name of a module of Python itself" in told("random:factory")


def test_packages_and_names_bound_in_every_way(module: Callable[[str], str], tmp_path: Path) -> None:
    name = module("if True:\n    factory = None\nfrom os import path as second\n(third, *fourth) = 1, 2\n")
    assert not any(told(f"{name}:{bound}") for bound in ("factory", "second", "third", "fourth", "Net"))
    assert told(f"{module('from math import *')}:anything") == ""
    (tmp_path / "pack" / "inner").mkdir(parents=True)
    (tmp_path / "pack" / "inner" / "zoo.py").write_text("def make(settings): ...\n")
    assert told("pack.inner.zoo:make") == ""
    assert "did you mean pack.inner.zoo?" in told("pack.inner.zo:make")
    assert "there is no module pack.outer" in told("pack.outer.zoo:make")
    assert "is a folder, not a module" in told("pack.inner:make")


@pytest.mark.parametrize("content", [b"x = 1\ndef factory(settings:\n", b"x = 1\n\xff\n", b"x\x00"])
def test_source_that_is_not_python(module: Callable[[str], str], tmp_path: Path, content: bytes) -> None:
    name = module("")
    (tmp_path / f"{name}.py").write_bytes(content)
    assert f"{name}.py" in (text := told(f"{name}:factory")) and "is not valid Python" in text


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
    text = "\n".join(found)
    assert "model: is missing" in text
    assert "no __len__ and no __getitem__" in text and "is an int; allowed: a function" in text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def factory(settings):\n    Net()\n", "nothing (is a return missing?)"),
        ("def factory(settings):\n    return Net()\n", "the model alone"),
        ("def factory(settings):\n    return Net(), Pairs(), loss\n", "gave a tuple"),
        ("def factory(settings):\n    return Net\n", "the class Net"),
        ("async def factory(settings):\n    return Net\n", "a coroutine"),
        ("def factory():\n    return Net()\n", "takes 0 positional arguments"),
        ("factory = 3\n", "is an int, not a function or class"),
        (giving(model="nn.ReLU()"), "ReLU has no parameter that can be trained"),
        (giving(model="nn.LazyLinear(3)"), "has no shape yet"),
        (giving(loss="nn.MSELoss()"), "lambda output, batch: nn.MSELoss()(output, batch[1])"),
        (giving(loss="lambda output: output"), "cannot be called as loss(output, batch)"),
        (giving(train_data="[]"), "train_data: is empty"),
        (giving(train_data="Pairs(1)"), "none can be kept for evaluation"),
        (giving(train_data="Pairs(3)"), "one optimizer step takes 4 items"),
        (giving(eval_dta="1", eval_data="3"), "an int has no __len__"),
        (giving(parts="{'x': nn.Linear(1, 1)}"), "parts[x]: is not a part of the model"),
        (giving(tokens_per_item="-1"), "a number above 0"),
        (giving(train_data="[object()] * 9"), "give collate"),
        (giving(train_data="[torch.ones(i + 1) for i in range(9)]"), "give collate"),
        (giving(train_data="['a'] * 9"), "holds no tensor"),
        (
            giving(train_data="Pairs()", collate="lambda items: SimpleNamespace(x=1)"),
            "holds a SimpleNamespace",
        ),
        (giving(epochs_differ="True"), "item 0 of the second epoch"),
        (giving(eval_data="DataLoader(Pairs(), collate_fn=list)"), "collated in different ways"),
    ],
)
def test_each_mistake_names_itself(own: Prepare, source: str, expected: str) -> None:
    text = "\n".join(mistakes(own, source))
    assert expected in text, text
    assert ".py:" in text or "workload: " in text


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        ("DataLoader(Pairs(), sampler=WeightedRandomSampler([1.0] * 40, 40))", "WeightedRandomSampler"),
        ("DataLoader(Pairs(), batch_sampler=[[0, 1], [2]])", "a batch_sampler of its own"),
        ("DataLoader(Pairs(), batch_size=None)", "makes whole batches"),
        ("DataLoader(Stream())", "Stream is an IterableDataset"),
        ("Stream()", "Stream is an IterableDataset"),
    ],
)
def test_an_order_that_cannot_be_resumed_is_refused(own: Prepare, loader: str, expected: str) -> None:
    (text,) = mistakes(own, giving(train_data=loader))
    assert expected in text and "train_data" in text and "a map-style dataset" in text


def test_a_name_that_nothing_reads_is_told(own: Prepare) -> None:
    notes = " ".join(own(giving(eval_datta="Pairs(8)")).notes())
    assert "also gave eval_datta, which is not used (did you mean eval_data?)" in notes


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


def test_control_characters_of_foreign_text_are_escaped(own: Prepare) -> None:
    text = "\n".join(mistakes(own, "def factory(settings):\n    raise ValueError('a\\x1b[2J\\nb')\n"))
    assert "\x1b" not in text and "\\x1b" in text


def test_items_that_are_drawn_anew_each_time_are_told(own: Prepare) -> None:
    source = "class Random(Pairs):\n    def __getitem__(self, index):\n        return torch.rand(3), torch.rand(())\n"
    notes = " ".join(own(source + giving(train_data="Random()")).notes())
    assert "another item each time" in notes
    assert "another item" not in " ".join(own().notes())
    nan = (
        "class Nan(Pairs):\n    def __getitem__(self, index):\n        return torch.tensor([torch.nan]), 0\n"
    )
    assert "another item" not in " ".join(own(nan + giving(train_data="Nan()")).notes())


def test_data_that_no_worker_can_have_is_refused_before_it_is_sent(own: Prepare) -> None:
    local = (
        "def factory(settings):\n    class Local(Pairs): pass\n"
        "    return dict(model=Net(), train_data=Local(), loss=loss)\n"
    )
    (text,) = mistakes(own, local, loader={"workers": 2})
    assert "loader.workers = 2" in text and "Local" in text and "top of the module" in text
    assert own(local) is not None  # without workers it may be
    (text,) = mistakes(own, giving(collate="lambda items: items[0]"), loader={"eval_workers": 1})
    assert "loader.eval_workers = 1" in text and "lambda" in text
    assert own(loader={"workers": 2}) is not None


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("lambda output, batch: output.squeeze(1) - batch[1]", "shape (2,): take its mean()"),
        ("lambda output, batch: 3.0", "gave a float"),
        ("lambda output, batch: output.detach().mean()", "does not depend on the model's parameters"),
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
    [("list", "no update and no result"), ("lambda: Wrong()", "must give numbers by name")],
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
    with pytest.raises(ConfigError, match="already the name of another module"):
        prepare(Config.model_validate(config))


@pytest.mark.parametrize(
    ("workload", "name"),
    [
        ("my_workload:factory", "my_workload-001"),
        ("a.b.net:make", "net-001"),
        ("_über:f", "ber-001"),
        ("ndd", "ndd-001"),
    ],
)
def test_the_run_is_named_after_the_module(tmp_path: Path, workload: str, name: str) -> None:
    assert new_run_dir(tmp_path, None, workload).name == name
    assert new_run_dir(tmp_path, None, workload).name == name.replace("001", "002")

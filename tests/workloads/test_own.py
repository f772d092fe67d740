"""A user's own workload: what a factory may give, its options, and how it is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_help import PLAIN, Prepare, giving, mistakes
from torch.utils.data import default_collate
from workload_help import configured

from ndd_engine.config import read, to_toml
from ndd_engine.errors import ConfigError
from ndd_engine.workloads.base import MeanLoss
from ndd_engine.workloads.factory_data import prepare

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
    assert any("4 of 45 items" in note for note in workload.notes())
    given = own(giving(eval_data="Pairs(7)"))
    assert len(given.train_data) == 40 and len(given.eval_data) == 7  # type: ignore[arg-type]
    assert not any("evaluation" in note for note in given.notes())


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
    loader = "DataLoader(Pairs(), batch_size=4, shuffle=True, collate_fn=join)"
    workload = own(source + giving(train_data=loader, eval_data="DataLoader(Pairs(8), collate_fn=join)"))
    assert len(workload.train_data) == 40 and workload.collate is not None  # type: ignore[arg-type]
    assert workload.order is not None and workload.order.shuffle
    plain = own(giving(train_data="DataLoader(Pairs(), batch_size=4)"))
    assert plain.collate is None and plain.order is not None and not plain.order.shuffle


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
    assert any("\\x1b[2J" in note for note in workload.notes())
    assert set(workload.parts) == {"encoder", "both"}
    assert isinstance(own().metric(), MeanLoss)


def test_weights_depend_on_the_seed_alone(own: Prepare) -> None:
    source = "torch.randn(7)\n" + PLAIN  # what a module draws when it is imported must not count
    found = []
    for _ in range(2):
        torch.manual_seed(99)
        workload = own(source)
        again = prepare(configured({"name": workload.name}, micro=4))
        found += [workload.model.state_dict(), again.model.state_dict()]
    assert all(torch.equal(found[0][key], other[key]) for other in found for key in found[0])


# Options.


def test_options_reach_the_factory_and_unused_ones_are_refused(own: Prepare) -> None:
    source = giving(model="Net(settings.option('width', 4))", item="settings.options.get('word', 'pair')")
    workload = own(source, options={"width": 9})
    assert workload.model.encoder.out_features == 9 and workload.item == "pair"  # type: ignore[union-attr]
    (unused,) = mistakes(own, source, options={"width": 9, "shape": 3})
    assert "options.shape = 3" in unused and "width, word" in unused
    (close,) = mistakes(own, source, options={"widht": 9})
    assert close.endswith("width?")
    own(giving(model="Net(**settings.options)"), options={"width": 2})


@pytest.mark.parametrize(
    ("default", "value"),
    [("4", "wide"), ("4", 2.5), ("4", True), ("0.5", "x"), ("'a'", 3), ("False", 1), ("(1,)", 5)],
)
def test_an_option_of_another_kind_is_refused(own: Prepare, default: str, value: Any) -> None:
    source = giving(item=f"str(settings.option('width', {default}))")
    (text,) = mistakes(own, source, options={"width": value})
    assert "workload.options.width" in text and "allowed: " in text


def test_options_of_a_kind_that_fits(own: Prepare) -> None:
    source = giving(
        notes="[repr([settings.option('a', 0.5), settings.option('b', (1,)), settings.option('c')])]"
    )
    assert repr([2.0, (3, 4), {"d": 1}]) in own(source, options={"a": 2, "b": [3, 4], "c": {"d": 1}}).notes()


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
    ("name", "sets", "expected"),
    [
        ("a:b", ["workload.options.rate=inf"], "finite"),
        ("a:b", ["workload.optoins.width=3"], "options?"),
        ("a:b", ["workload.options=3"], "workload.options"),
        ("a b:c", [], "a b:c"),
        ("a:", [], "a:"),
        ("src/net.py:make", [], "src.net:make?"),
        ("a:b:c", [], "a:b:c"),
        ("\x1b[2J:c", [], "\\x1b"),
    ],
)
def test_mistakes_in_the_section(name: str, sets: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(None, [*sets, "run.epochs=1"], name).resolve()
    assert expected in str(caught.value) and "\x1b" not in str(caught.value)

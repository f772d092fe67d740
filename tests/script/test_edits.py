"""Edits of the user's file: minimal, at the right call, and never where there is a doubt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.records import run_event
from torch.utils.data import DataLoader

from ndd_engine.errors import UsageError
from ndd_engine.record.file import load_state
from ndd_engine.run import Run
from ndd_engine.script.command import Command
from ndd_engine.script.edits import edit_of, with_arguments, with_cached_items, with_statement
from ndd_engine.script.script_run import Script, ScriptRequest
from ndd_watch.changes import OF_SCRIPTS, TABLE, Argument

SCRIPT = """import torch as th
from torch.utils.data import DataLoader

# Umlauts count as more than one byte: äöü
train = DataLoader(data("ä"), batch_size=8, num_workers=0)  # ours
valid = DataLoader(
    data("valid"),
    batch_size=8,
)
optimizer = th.optim.AdamW(model.parameters(), lr=1e-3)
"""


@pytest.mark.parametrize(
    ("line", "arguments", "expected"),
    [
        (5, {"num_workers": 4}, 'DataLoader(data("ä"), batch_size=8, num_workers=4)  # ours'),
        (5, {"pin_memory": True}, 'DataLoader(data("ä"), batch_size=8, num_workers=0, pin_memory=True)  # ours'),
        (5, {"num_workers": 2, "persistent_workers": True},
         'DataLoader(data("ä"), batch_size=8, num_workers=2, persistent_workers=True)  # ours'),
        (6, {"num_workers": 4}, "    batch_size=8, num_workers=4,\n)"),
        (8, {"num_workers": 4}, "    batch_size=8, num_workers=4,\n)"),
    ],
)  # fmt: skip
def test_arguments_of_a_loader(line: int, arguments: dict[str, Any], expected: str) -> None:
    found = with_arguments(SCRIPT, line, ("DataLoader",), arguments)
    assert found is not None and expected in found
    compile(found, "script", "exec")
    assert len(found.splitlines()) == len(SCRIPT.splitlines())


@pytest.mark.parametrize(
    ("script", "line", "expected"),
    [
        (
            "train = DataLoader(self.data, batch_size=8)\n",
            1,
            "train = DataLoader([self.data[i] for i in range(len(self.data))], batch_size=8)\n",
        ),
        # The data has no name.
        (
            "DataLoader(Files('ä', 1))",
            1,
            "dataset = Files('ä', 1)\nDataLoader([dataset[i] for i in range(len(dataset))])",
        ),
        (
            "def made(dataset):\n\treturn None, DataLoader(\n\t\tFiles(\n1), 2)\n",
            2,
            "def made(dataset):\n\tdataset2 = Files(\n1)\n\treturn None, DataLoader(\n"
            "\t\t[dataset2[i] for i in range(len(dataset2))], 2)\n",
        ),
        # It is made more than once, perhaps never, or behind another statement.
        ("for epoch in range(9):\n    for x in DataLoader(data):\n        pass\n", 2, None),
        ("a = [DataLoader(Files(i)) for i in range(2)]", 1, None),
        ("a = DataLoader(Files()) if train else None", 1, None),
        ("a = lambda: DataLoader(Files())", 1, None),
        ("train(); a = DataLoader(Files())", 1, None),
        ("with DataLoader(Files()) as a: pass", 1, None),
        ("DataLoader(a + b)", 1, None),
    ],
)
def test_items_are_cached_where_the_loader_is_made_once(script: str, line: int, expected: str | None) -> None:
    assert with_cached_items(script, line) == expected


@pytest.mark.parametrize(
    ("script", "edited"),
    [
        (SCRIPT, False),
        ("a, b = DataLoader(x), DataLoader(y)\n", False),
        ("def (", False),
        ("DataLoader(*parts, batch_size=8)\n", False),
        ("DataLoader(parts, **more)\n", True),
        ("DataLoader(parts, **more, **most)\n", False),
        ("DataLoader(parts, **more, num_workers=1, **most)\n", True),
    ],
)
def test_no_edit_without_a_single_call(script: str, edited: bool) -> None:
    assert (with_arguments(script, 1, ("DataLoader",), {"num_workers": 4}) is not None) == edited


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize(
    "made",
    [
        "DataLoader(data, sampler=s, **kwargs)",
        "DataLoader(data, **{'num_workers': 1, 'persistent_workers': True, 'prefetch_factor': 4})",
        "DataLoader(data, num_workers=1, persistent_workers=True, prefetch_factor=4, **{})",
        "DataLoader(data, 8, False, None, None, 1)",
        "DataLoader(data, 8, False, None, None, 1, None, False, True, prefetch_factor=4)",
        "DataLoader(data, num_workers=1)",
        "DataLoader(data, **(kwargs or {}))",
        "DataLoader(data)",
    ],
)
def test_an_edited_loader_is_made_with_its_argument_given_once(made: str, count: int) -> None:
    (given,) = [row.edit for row in TABLE.values() if row.key == "loader.workers"]
    assert isinstance(given, Argument)
    text = with_arguments(f"loader = {made}\n", 1, ("DataLoader",), given.given(count))
    names: dict[str, Any] = {
        "DataLoader": DataLoader, "data": [1, 2, 3], "s": [2, 1, 0], "kwargs": {"num_workers": 1, "batch_size": 2},
    }  # fmt: skip
    assert text is not None
    exec(text, names)
    assert names["loader"].num_workers == count


def test_where_no_edit_is_safe_the_argument_and_its_place_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\nloader = DataLoader(*parts)\n")
    found = edit_of({"script": {"loader": [str(path), 2]}}, {"loader.workers": 2}, "cpu", path)
    assert found.path is None
    (advice,) = found.advice
    assert "num_workers=2" in advice and f"{path}:2" in advice


def test_a_diff_that_is_applied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    seen = {"script": {"loader": [str(path), 5], "optimizer": [str(path), 10]}}
    changes = {"loader.workers": 4, "optimizer.implementation": "fused", "precision.amp": "bf16"}
    edit = edit_of(seen, changes, "cpu", path)
    assert edit.path == path
    # What takes more than an argument is described.
    (advice,) = edit.advice
    assert "torch.bfloat16" in advice
    # Files are named as patch does.
    assert edit.diff[0] == f"--- a{path}"
    monkeypatch.chdir(tmp_path)
    assert edit.diff[:2] == ["--- a/train.py", "+++ b/train.py"]
    added = {line[1:] for line in edit.diff[2:] if line.startswith("+")}
    assert added == set(edit.after.splitlines()) - set(SCRIPT.splitlines())
    assert ["num_workers=4" in line or "fused=True" in line for line in added] == [True, True]
    edit.apply()
    assert path.read_text() == edit.after
    with pytest.raises(UsageError, match=path.name):  # it has changed meanwhile
        edit.apply()


def test_every_optimizer_is_edited(tmp_path: Path) -> None:
    path = tmp_path / "gan.py"
    path.write_text("critic = Adam(\n    c.parameters(),\n)\ngenerator = Adam(g.parameters())\n")
    seen = {"script": {"optimizer": [str(path), 1], "optimizers": [[str(path), 1], [str(path), 4]]}}
    edit = edit_of(seen, {"optimizer.implementation": "fused"}, "cpu", path)
    expected = path.read_text().replace("parameters()", "parameters(), fused=True")
    assert edit.after == expected
    seen["script"]["optimizers"][1] = ["elsewhere.py", 4]
    assert edit_of(seen, {"optimizer.implementation": "fused"}, "cpu", path).path is None


def test_a_statement_does_not_move_the_calls_below_it(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    changes = {"run.threads": 2, "optimizer.implementation": "fused"}
    edit = edit_of({"script": {"optimizer": [str(path), 10]}}, changes, "cpu", path)
    assert "set_num_threads(2)" in edit.after and "lr=1e-3, fused=True" in edit.after and not edit.advice


def test_without_a_place_it_is_described(tmp_path: Path) -> None:
    changes = {"loader.workers": 2, "run.threads": 1, "loader.cache": True}
    edit = edit_of({"script": {"loader": None}}, changes, "cpu", None)
    assert edit.path is None and not edit.diff
    workers, cache, threads = edit.advice
    assert "num_workers=2" in workers and "range(len(data))" in cache
    assert threads == "torch.set_num_threads(1)"


THREADS, FLAG = "{torch}.set_num_threads({value})", "{torch}.backends.cudnn.benchmark = {value}"


@pytest.mark.parametrize(
    ("script", "statement", "value", "expected"),
    [
        # After the import of torch, under the name that it has.
        ("import torch as th\n\nx = 1\n", THREADS, 2, "import torch as th\nth.set_num_threads(2)\n\nx = 1\n"),
        ("from torch import nn\n", THREADS, 1, None),
        # What the script does itself is replaced, unless it does it twice.
        (
            "import torch\ntorch.set_num_threads(args.threads)\n",
            THREADS,
            2,
            "import torch\ntorch.set_num_threads(2)\n",
        ),
        (
            "import torch\nif wide:\n    torch.set_num_threads(int(os.environ['N']))\n",
            THREADS,
            2,
            "import torch\nif wide:\n    torch.set_num_threads(2)\n",
        ),
        ("import torch\ncudnn.benchmark = False\n", FLAG, True, "import torch\ncudnn.benchmark = True\n"),
        ("import torch\ncudnn.benchmark = False\n" * 2, FLAG, True, None),
    ],
)
def test_a_statement_is_added_or_replaced(
    script: str, statement: str, value: object, expected: str | None
) -> None:
    assert with_statement(script, statement, value) == expected


def test_a_run_in_a_scratch_copy_names_the_files_of_the_script(tmp_path: Path) -> None:
    # `tune -- COMMAND` observes in such a copy, which is gone when it prints the edit.
    own, scratch = tmp_path / "own", tmp_path / "scratch"
    own.mkdir()
    (own / "train.py").write_text("")
    command = Command((sys.executable, "train.py"), own)
    script = Script(ScriptRequest(command, tmp_path / "runs", screen=True, folder=scratch))
    run = Run.open(script)
    script.put(run_event(config={"script": {"loader": [str(scratch / "train.py"), 5]}}))
    run.close()
    recorded = load_state(run.directory).run
    assert recorded is not None and recorded.config["script"]["loader"] == [str(own / "train.py"), 5]


MODEL = """import torch as th

model = Net(3)
optimizer = th.optim.SGD(
    model.parameters(), lr=0.1,
)  # ours
loader = DataLoader(data, batch_size=8)
"""


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({"speed.compile": "default"}, ["model.compile()"]),
        ({"speed.compile": "reduce-overhead"}, ['model.compile(mode="reduce-overhead")']),
        ({"speed.channels_last": True}, ["model.to(memory_format=th.channels_last)"]),
    ],
)
def test_statements_about_the_model_follow_its_optimizer(
    tmp_path: Path, changes: dict[str, Any], added: list[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(MODEL)
    # An edit below it, and one above it, find their places as well.
    seen = {"script": {"optimizer": [str(path), 4], "loader": [str(path), 7]}}
    edit = edit_of(seen, {"run.threads": 2, "loader.workers": 3, **changes}, "cpu", path)
    lines = MODEL.replace("batch_size=8", "batch_size=8, num_workers=3").splitlines()
    assert edit.after.splitlines() == [lines[0], "th.set_num_threads(2)", *lines[1:6], *added, lines[6]]
    assert not edit.advice and set(edit.made) == {"run.threads", "loader.workers", *changes}


@pytest.mark.parametrize(
    "text",
    [
        "import torch\noptimizer = torch.optim.SGD(parameters, lr=0.1)\n",
        "import torch\noptimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)\n",
        "import torch\ntrain(torch.optim.SGD(model.parameters()))\n",
        "import torch\nx = 1; optimizer = torch.optim.SGD(model.parameters())\n",
        "import torch\noptimizer = torch.optim.SGD(model.parameters()); train()\n",
        "import torch\noptimizer = torch.optim.SGD(make().parameters())\n",
    ],
)
@pytest.mark.parametrize("key", ["speed.compile", "speed.channels_last"])
def test_a_statement_about_the_model_is_described_where_there_is_a_doubt(
    tmp_path: Path, text: str, key: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    value = "default" if key == "speed.compile" else True
    edit = edit_of({"script": {"optimizer": [str(path), 2]}}, {key: value}, "cpu", path)
    assert edit.path is None and len(edit.advice) == 1


def test_every_change_has_an_edit_or_says_what_to_do_by_hand() -> None:
    """With no known place, each of them is described."""
    values: dict[str, Any] = {"precision.amp": "bf16", "speed.attention": "math", "speed.compile": "default"}
    values |= {"optimizer.implementation": "fused", "loader.fetch": "auto"}
    for key in OF_SCRIPTS:
        edit = edit_of({"script": {}}, {key: values.get(key, True)}, "cpu", None)
        assert edit.path is None and len(edit.advice) == 1 and edit.advice[0], key

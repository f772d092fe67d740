"""Edits of the user's file: minimal, at the right call, and never where there is a doubt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ndd_engine.errors import UsageError
from ndd_engine.script.edits import edit_of, with_arguments, with_cached_items, with_statement

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


def test_items_are_cached_where_the_loader_is_made_once() -> None:
    script = "train = DataLoader(self.data, batch_size=8)\n"
    found = with_cached_items(script, 1)
    assert found == "train = DataLoader([self.data[i] for i in range(len(self.data))], batch_size=8)\n"
    loop = "for epoch in range(9):\n    for x in DataLoader(data):\n        pass\n"
    assert with_cached_items(loop, 2) is None and with_cached_items("DataLoader(Files())", 1) is None
    seen = {"script": {"loader": None}}
    assert "for i in range(len(data))" in edit_of(seen, {"loader.cache": True}, "cpu", None).advice[0]


def test_no_edit_without_a_single_call() -> None:
    assert with_arguments(SCRIPT, 1, ("DataLoader",), {"num_workers": 4}) is None
    both = "a, b = DataLoader(x), DataLoader(y)\n"
    assert with_arguments(both, 1, ("DataLoader",), {"num_workers": 4}) is None
    assert with_arguments("def (", 1, ("DataLoader",), {"num_workers": 4}) is None
    assert with_arguments("DataLoader(*parts, **more)\n", 1, ("DataLoader",), {"num_workers": 4}) is not None


def test_a_statement_follows_the_import_of_torch() -> None:
    found = with_statement(SCRIPT, "{torch}.set_num_threads({value})", 2)
    assert found is not None and found.splitlines()[:2] == ["import torch as th", "th.set_num_threads(2)"]
    assert with_statement("from torch import nn\n", "{torch}", 1) is None


def test_a_diff_that_is_applied_once(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    seen = {"script": {"loader": [str(path), 5], "optimizer": [str(path), 10]}}
    changes = {"loader.workers": 4, "optimizer.implementation": "fused", "precision.amp": "bf16"}
    edit = edit_of(seen, changes, "cpu", path)
    assert edit.path == path and "num_workers=4" in edit.after and "lr=1e-3, fused=True)" in edit.after
    assert edit.advice == (
        'run the forward pass and the loss under torch.autocast("cpu", dtype=torch.bfloat16)',
    )
    assert any(line.startswith("+train = DataLoader") for line in edit.diff)
    edit.apply()
    assert path.read_text() == edit.after
    with pytest.raises(UsageError, match="has changed since it was read"):
        edit.apply()


def test_every_optimizer_is_edited(tmp_path: Path) -> None:
    path = tmp_path / "gan.py"
    path.write_text("critic = Adam(\n    c.parameters(),\n)\ngenerator = Adam(g.parameters())\n")
    seen = {"script": {"optimizer": [str(path), 1], "optimizers": [[str(path), 1], [str(path), 4]]}}
    edit = edit_of(seen, {"optimizer.implementation": "fused"}, "cpu", path)
    assert edit.after == path.read_text().replace("parameters()", "parameters(), fused=True")
    seen["script"]["optimizers"][1] = ["elsewhere.py", 4]
    assert edit_of(seen, {"optimizer.implementation": "fused"}, "cpu", path).path is None


def test_without_a_place_it_is_described(tmp_path: Path) -> None:
    edit = edit_of({"script": {}}, {"loader.workers": 2, "run.threads": 1}, "cpu", None)
    assert edit.path is None and not edit.diff
    assert edit.advice == ("make the DataLoader with num_workers=2", "torch.set_num_threads(1)")


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("torch.set_num_threads(args.threads)", "torch.set_num_threads(2)"),
        (
            "if wide:\n    torch.set_num_threads(int(os.environ['N']))",
            "if wide:\n    torch.set_num_threads(2)",
        ),
    ],
)
def test_a_setting_that_the_script_makes_itself_is_replaced(line: str, changed: str) -> None:
    found = with_statement(f"import torch\n{line}\n", "{torch}.set_num_threads({value})", 2)
    assert found == f"import torch\n{changed}\n"


def test_a_flag_that_the_script_sets_is_replaced_unless_it_sets_it_twice() -> None:
    statement, text = "{torch}.backends.cudnn.benchmark = {value}", "import torch\ncudnn.benchmark = False\n"
    assert with_statement(text, statement, True) == "import torch\ncudnn.benchmark = True\n"
    assert with_statement(text * 2, statement, True) is None


def test_the_diff_names_files_as_patch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    edit = edit_of({"script": {"loader": [str(path), 5]}}, {"loader.workers": 4}, "cpu", path)
    assert edit.diff[0] == f"--- a{path}"
    monkeypatch.chdir(tmp_path)
    assert edit.diff[:2] == ["--- a/train.py", "+++ b/train.py"]

"""Edits of the user's file: minimal, at the right call or around the loop, and never where there is a doubt."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.records import run_event
from torch.utils.data import DataLoader

from ndd_engine.errors import UsageError
from ndd_engine.record.file import load_state
from ndd_engine.run.run import Run
from ndd_engine.script.command import Command
from ndd_engine.script.edits import (
    edit_of,
    with_argument_of_copies,
    with_arguments,
    with_cached_items,
    with_collections,
    with_context,
    with_statement,
)
from ndd_engine.script.script_run import Script, ScriptRequest
from ndd_watch.changes import OF_SCRIPTS, TABLE, Argument

# Calls: arguments of loaders and optimizers.

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
    ("script", "edited"),
    [
        (SCRIPT, False),  # no call is in its first line
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
        "DataLoader(data, 8, False, None, None, 1, None, False, True, prefetch_factor=4)",
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


MADE = "def made():\n    return DataLoader(data, 4)\n"
CACHED = MADE.replace("data,", "[data[i] for i in range(len(data))],")


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
            "def made(dataset):\n\treturn None, DataLoader(\n\t\tFiles('ä',\n1), 2)\n",
            2,
            "def made(dataset):\n\tdataset2 = Files('ä',\n1)\n\treturn None, DataLoader(\n"
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
        # A loop calls the function, directly or through another one.
        (f"{MADE}for epoch in range(9):\n    for x in made(): pass\n", 2, None),
        (f"{MADE}def epoch():\n    for x in made(): pass\nwhile True:\n    epoch()\n", 2, None),
        (f"{MADE}for x in made(): pass\n", 2, f"{CACHED}for x in made(): pass\n"),
    ],
)
def test_items_are_cached_where_the_loader_is_made_once(script: str, line: int, expected: str | None) -> None:
    assert with_cached_items(script, line) == expected


def test_every_optimizer_is_edited(tmp_path: Path) -> None:
    path = tmp_path / "gan.py"
    path.write_text("critic = Adam(\n    c.parameters(),\n)\ngenerator = Adam(g.parameters())\n")
    seen = {"script": {"optimizer": [str(path), 1], "optimizers": [[str(path), 1], [str(path), 4]]}}
    edit = edit_of(seen, {"optimizer.implementation": "fused"}, "cpu", path)
    assert edit.after == path.read_text().replace("parameters()", "parameters(), fused=True")
    seen["script"]["optimizers"][1] = ["elsewhere.py", 4]
    assert edit_of(seen, {"optimizer.implementation": "fused"}, "cpu", path).path is None


# Statements: about torch after its import, about the model after its optimizer.

THREADS, FLAG = "{torch}.set_num_threads({value})", "{torch}.backends.cudnn.benchmark = {value}"


@pytest.mark.parametrize(
    ("script", "statement", "value", "expected"),
    [
        # After the import of torch, under the name that it has.
        ("import torch as th\n\nx = 1\n", THREADS, 2, "import torch as th\nth.set_num_threads(2)\n\nx = 1\n"),
        ("from torch import nn\n", THREADS, 1, None),
        # What the script does itself is replaced, unless it does it twice.
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


MODEL = """import torch as th

model = Net(3)
optimizer = th.optim.SGD(
    model.parameters(), lr=0.1,
)  # ours
loader = DataLoader(data, batch_size=8)
"""


@pytest.mark.parametrize(
    ("key", "value", "added"),
    [
        ("speed.compile", "default", "model.compile()"),
        ("speed.compile", "reduce-overhead", 'model.compile(mode="reduce-overhead")'),
        ("speed.channels_last", True, "model.to(memory_format=th.channels_last)"),
    ],
)
def test_statements_about_the_model_follow_its_optimizer(
    tmp_path: Path, key: str, value: object, added: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(MODEL)
    # An edit below it, and one above it, find their places as well.
    seen = {"script": {"optimizer": [str(path), 4], "loader": [str(path), 7]}}
    edit = edit_of(seen, {"run.threads": 2, "loader.workers": 3, key: value}, "cpu", path)
    lines = MODEL.replace("batch_size=8", "batch_size=8, num_workers=3").splitlines()
    assert edit.after.splitlines() == [lines[0], "th.set_num_threads(2)", *lines[1:6], added, lines[6]]
    assert not edit.advice and set(edit.made) == {"run.threads", "loader.workers", key}


@pytest.mark.parametrize(
    "text",
    [
        "optimizer = torch.optim.SGD(parameters, lr=0.1)\n",
        "optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)\n",
        "train(torch.optim.SGD(model.parameters()))\n",
        "x = 1; optimizer = torch.optim.SGD(model.parameters())\n",
        "optimizer = torch.optim.SGD(model.parameters()); train()\n",
        "optimizer = torch.optim.SGD(make().parameters())\n",
    ],
)
@pytest.mark.parametrize(("key", "value"), [("speed.compile", "default"), ("speed.channels_last", True)])
def test_a_statement_about_the_model_is_described_where_there_is_a_doubt(
    tmp_path: Path, text: str, key: str, value: object
) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"import torch\n{text}")
    edit = edit_of({"script": {"optimizer": [str(path), 2]}}, {key: value}, "cpu", path)
    assert edit.path is None and len(edit.advice) == 1


# The loop: around its forward pass, of its copies, after its step.

LOOP = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
net = nn.Linear(4, 1)
loader = DataLoader(TensorDataset(torch.ones(64, 4), torch.ones(64, 1)), batch_size=8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    net.train()
    for x, y in loader:
        x, y = x.to("cpu"), y.to("cpu")
        optimizer.zero_grad()

        # The loss.
        out = net(
            x,
        )
        loss = nn.functional.mse_loss(out, y)
        loss.backward()
        optimizer.step()  # one step
print(loss.item(), out.dtype)
"""
AUTOCAST = '{torch}.autocast("cpu", dtype={torch}.bfloat16)'
IN_CONTEXT: Any = partial(with_context, model="net", context=AUTOCAST)
COPYING: Any = partial(with_argument_of_copies, argument="non_blocking=True")
COLLECTING: Any = partial(with_collections, every=4)


@pytest.fixture
def printed() -> Iterator[Callable[[str], str]]:
    """Runs a script in this process, and returns what it prints."""
    threads, callbacks = torch.get_num_threads(), list(gc.callbacks)

    def run(text: str) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
        return out.getvalue()

    yield run
    torch.set_num_threads(threads)
    gc.callbacks[:] = callbacks
    gc.enable()


def test_forward_and_loss_run_under_autocast() -> None:
    edited = IN_CONTEXT(LOOP)
    assert (
        """
        # The loss.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net(
                x,
            )
            loss = nn.functional.mse_loss(out, y)
        loss.backward()
"""
        in edited
    )
    assert edited.count("\n") == LOOP.count("\n") + 1
    tabs = "import torch as t\nfor x in data:\n\ta = f(x)\n\tloss = net.loss(x)\n\tloss.backward()\n"
    within = '\ta = f(x)\n\twith t.autocast("cpu", dtype=t.bfloat16):\n\t\tloss = net.loss(x)\n\tloss.back'
    assert within in IN_CONTEXT(tabs)


def test_copies_of_what_the_loop_reads_do_not_wait(printed: Callable[[str], str]) -> None:
    edited = COPYING(LOOP)
    assert edited == LOOP.replace('to("cpu")', 'to("cpu", non_blocking=True)')
    assert printed(edited) == printed(LOOP)
    batches = (
        "for batch in loader:\n"
        "    batch = {key: value.cuda() for key, value in batch.items()}\n"
        "    weight = weights.to(device)\n"
        "    loss = net(batch['x'].to(\n        device,\n    ))\n"
        "    loss.backward()\n"
    )
    edited = COPYING(batches)
    assert "value.cuda(non_blocking=True) for" in edited and "device, non_blocking=True)" in edited
    assert "weights.to(device)" in edited
    compile(edited, "edited", "exec")


def test_garbage_is_collected_every_so_many_steps(printed: Callable[[str], str]) -> None:
    edited = COLLECTING(LOOP)
    after = "optimizer.step()  # one step\n        if next(gc_steps) % 4 == 0:\n            gc.collect()\n"
    assert after in edited
    told = (
        "import gc as own\nprint(own.isenabled())\nown.callbacks.append(lambda phase, info: print(phase))\n"
    )
    words = printed(edited.replace("net = nn.Linear", told + "net = nn.Linear", 1)).split()
    assert words[0] == "False" and words.count("stop") == 4


@pytest.mark.parametrize(
    ("edit", "old", "new"),
    [
        (IN_CONTEXT, "loss.backward()", "if epoch:\n            loss.backward()\n        loss.backward()"),
        (IN_CONTEXT, "out = net(", "a = 1; out = net("),
        (IN_CONTEXT, "out = net(", "other = torch.autocast\n        out = net("),
        (IN_CONTEXT, "x,\n        )", "x,\n        )\n        text = '''\n  a'''"),
        (IN_CONTEXT, "import torch\n", "from torch import *\n"),
        (IN_CONTEXT, "net(\n", "model(\n"),
        (IN_CONTEXT, "loss = nn", "optimizer.step()\n        loss = nn"),
        (COPYING, 'to("cpu"),', 'to("cpu", non_blocking=False),'),
        (COPYING, 'to("cpu"),', "to(**options),"),
        (COPYING, 'to("cpu"),', 'to("cpu", torch.float32),'),
        (COPYING, 'x, y = x.to("cpu"), y.to("cpu")', "pass"),
        (COPYING, "    for x, y in loader:", "    while True:"),
        (COLLECTING, "optimizer.step()  #", "optimizer.step(); a = 1  #"),
        (COLLECTING, "import torch\n", "import torch, gc\n"),
        (COLLECTING, "import torch\n", "from torch import *\n"),
    ],
)
def test_a_loop_is_not_edited_where_there_is_a_doubt(
    edit: Callable[[str], str | None], old: str, new: str
) -> None:
    assert old in LOOP and edit(LOOP) is not None
    assert edit(LOOP.replace(old, new, 1)) is None


@pytest.mark.parametrize(
    ("edit", "old", "new"),
    [
        # What follows the pass on its line stays with it.
        (IN_CONTEXT, "loss.backward()", "loss.backward(); seen = True"),
        (COLLECTING, "optimizer.step()", "if epoch: optimizer.step()"),
    ],
)
def test_a_loop_with_other_statements_is_edited(edit: Callable[[str], str], old: str, new: str) -> None:
    compile(edit(LOOP.replace(old, new, 1)), "edited", "exec")


def of_loop(folder: Path, changes: dict[str, Any], device: str) -> Any:
    path = folder / "train.py"
    path.write_text(LOOP)
    place = [str(path), LOOP.splitlines().index("optimizer = torch.optim.SGD(net.parameters(), lr=0.1)") + 1]
    seen = {"script": {"optimizer": place, "optimizers": [place], "main": str(path)}}
    return edit_of(seen, changes, device, path)


def test_all_of_them_together_train(tmp_path: Path, printed: Callable[[str], str]) -> None:
    changes = {
        "precision.amp": "bf16", "speed.attention": "math", "loader.non_blocking": True, "run.gc_every_steps": 5,
        "speed.compile": "off", "run.threads": 1,
    }  # fmt: skip
    edit = of_loop(tmp_path, changes, "cpu")
    assert set(edit.made) == set(changes) - {"speed.compile"}
    assert "bfloat16" not in printed(LOOP) and "bfloat16" in printed(edit.after)
    assert edit.after.count("with torch.") == 2 and "set_num_threads(1)" in edit.after


def test_fp16_is_described_since_it_needs_a_scaler(tmp_path: Path) -> None:
    edit = of_loop(tmp_path, {"precision.amp": "fp16"}, "cuda:0")
    (advice,) = edit.advice
    assert edit.path is None and 'torch.autocast("cuda", dtype=torch.float16)' in advice
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


# The file: a diff, or what to do by hand.


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


def test_every_change_has_an_edit_or_says_what_to_do_by_hand(tmp_path: Path) -> None:
    """With no known place, each of them is described."""
    values: dict[str, Any] = {"precision.amp": "bf16", "speed.attention": "math", "speed.compile": "default"}
    values |= {
        "optimizer.implementation": "fused",
        "loader.fetch": "auto",
        "loader.workers": 2,
        "run.threads": 1,
    }
    advice = {}
    for key in OF_SCRIPTS:
        edit = edit_of({"script": {}}, {key: values.get(key, True)}, "cpu", None)
        assert edit.path is None and not edit.diff
        (advice[key],) = edit.advice
    assert all(advice.values()) and advice["run.threads"] == "torch.set_num_threads(1)"
    assert "num_workers=2" in advice["loader.workers"] and "range(len(data))" in advice["loader.cache"]
    # With a place where no edit is safe, it is named.
    path = tmp_path / "train.py"
    path.write_text("import torch\nloader = DataLoader(*parts)\n")
    edit = edit_of({"script": {"loader": [str(path), 2]}}, {"loader.workers": 2}, "cpu", path)
    (text,) = edit.advice
    assert edit.path is None and "num_workers=2" in text and f"{path}:2" in text


@pytest.mark.parametrize(
    ("body", "line", "named"),
    [
        ("    kw = {'num_workers': 0}\n    return DataLoader(data, **kw)\n", 3, "kw ({}:2)"),
        ("    kw = {}\n    return DataLoader(data, num_workers=0, **kw)\n", 3, ""),
        ("    return DataLoader(data, **other.options)\n", 2, "other.options ({}:2)"),
    ],
)
def test_a_dictionary_of_arguments_is_named_where_it_is_made(
    tmp_path: Path, body: str, line: int, named: str
) -> None:
    """Another num_workers beside it would be given twice, which is a TypeError."""
    path = tmp_path / "train.py"
    path.write_text(f"def make(data):\n{body}")
    seen = {"script": {"loader": [str(path), line]}}
    edit = edit_of(seen, {"loader.workers": 1}, "cpu", path, described=True)
    (text,) = edit.advice
    assert ("num_workers=1" in text) == (not named) and f"{path}:{line}" in text
    assert not named or f'set "num_workers": 1 in {named.format(path)}' in text


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

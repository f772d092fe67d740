"""Edits of the training loop: around its forward pass, of its copies, after its step; never where there is a doubt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ndd_engine.script.edits import edit_of, with_argument_of_copies, with_collections, with_context

SCRIPT = """import torch
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
print(float(loss), out.dtype)
"""
AUTOCAST = '{torch}.autocast("cpu", dtype={torch}.bfloat16)'


def ran(text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def seen(path: Path) -> dict[str, object]:
    line = SCRIPT.splitlines().index("optimizer = torch.optim.SGD(net.parameters(), lr=0.1)") + 1
    return {"script": {"optimizer": [str(path), line], "optimizers": [[str(path), line]], "main": str(path)}}


@pytest.mark.long
def test_forward_and_loss_run_under_autocast(tmp_path: Path) -> None:
    edited = with_context(SCRIPT, "net", AUTOCAST)
    assert edited is not None
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
    assert edited.count("\n") == SCRIPT.count("\n") + 1
    assert "bfloat16" not in ran(SCRIPT) and "bfloat16" in ran(edited)


def test_a_context_that_indents_by_tabs() -> None:
    script = "import torch as t\nfor x in data:\n\ta = f(x)\n\tloss = net.loss(x)\n\tloss.backward()\n"
    edited = with_context(script, "net", AUTOCAST)
    assert edited is not None
    assert (
        '\ta = f(x)\n\twith t.autocast("cpu", dtype=t.bfloat16):\n\t\tloss = net.loss(x)\n\tloss.back'
        in edited
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("loss.backward()", "loss.backward(); seen = True"),
        (
            "loss.backward()",
            "if epoch:\n            loss.backward()\n        else:\n            loss.backward()",
        ),
        ("out = net(", "a = 1; out = net("),
        ("out = net(", "other = torch.autocast\n        out = net("),
        ("x,\n        )", "x,\n        )\n        text = '''\n  a'''"),
        ("import torch\n", "from torch import *\n"),
        ("net(\n", "model(\n"),
        ("loss = nn", "optimizer.step()\n        loss = nn"),
    ],
)
def test_no_context_where_there_is_a_doubt(old: str, new: str) -> None:
    expected = "backward(); seen" in new  # what follows the pass on its line stays with it
    assert (with_context(SCRIPT.replace(old, new, 1), "net", AUTOCAST) is not None) is expected


@pytest.mark.long
def test_copies_of_what_the_loop_reads_do_not_wait() -> None:
    edited = with_argument_of_copies(SCRIPT, "non_blocking=True")
    assert edited == SCRIPT.replace('to("cpu")', 'to("cpu", non_blocking=True)')
    assert ran(edited) == ran(SCRIPT)
    batches = (
        "for batch in loader:\n"
        "    batch = {key: value.cuda() for key, value in batch.items()}\n"
        "    weight = weights.to(device)\n"
        "    loss = net(batch['x'].to(\n        device,\n    ))\n"
        "    loss.backward()\n"
    )
    edited = with_argument_of_copies(batches, "non_blocking=True")
    assert edited is not None
    assert "value.cuda(non_blocking=True) for" in edited and "device, non_blocking=True)" in edited
    assert "weights.to(device)" in edited
    compile(edited, "edited", "exec")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('to("cpu"),', 'to("cpu", non_blocking=False),'),
        ('to("cpu"),', "to(**options),"),
        ('to("cpu"),', 'to("cpu", torch.float32),'),
        ('x, y = x.to("cpu"), y.to("cpu")', "pass"),
        ("    for x, y in loader:", "    while True:"),
    ],
)
def test_no_edit_of_copies_where_there_is_a_doubt(old: str, new: str) -> None:
    assert with_argument_of_copies(SCRIPT.replace(old, new, 1), "non_blocking=True") is None


@pytest.mark.long
def test_garbage_is_collected_every_so_many_steps() -> None:
    edited = with_collections(SCRIPT, 4)
    assert edited is not None
    assert (
        "optimizer.step()  # one step\n        if next(gc_steps) % 4 == 0:\n            gc.collect()\n"
        in edited
    )
    told = (
        "import gc as own\nprint(own.isenabled())\nown.callbacks.append(lambda phase, info: print(phase))\n"
    )
    at = edited.replace("net = nn.Linear", told + "net = nn.Linear", 1)
    printed = ran(at).split()
    # The interpreter's own collections at its end come after the last line of the script.
    assert printed[0] == "False" and printed[1 : printed.index("torch.float32") - 1].count("stop") == 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("optimizer.step()", "if epoch: optimizer.step()"),
        ("optimizer.step()  #", "optimizer.step(); a = 1  #"),
        ("import torch\n", "import torch, gc\n"),
        ("import torch\n", "from torch import *\n"),
    ],
)
def test_no_collections_where_there_is_a_doubt(old: str, new: str) -> None:
    edited = with_collections(SCRIPT.replace(old, new, 1), 4)
    assert edited is None or "if epoch" in new
    if edited is not None:
        compile(edited, "edited", "exec")


@pytest.mark.long
def test_all_of_them_together_train(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    changes = {
        "precision.amp": "bf16", "speed.attention": "math", "loader.non_blocking": True, "run.gc_every_steps": 5,
        "speed.compile": "off", "run.threads": 1,
    }  # fmt: skip
    edit = edit_of(seen(path), changes, "cpu", path)
    assert set(edit.made) == set(changes) - {"speed.compile"}
    assert "bfloat16" in ran(edit.after)
    assert edit.after.count("with torch.") == 2 and "set_num_threads(1)" in edit.after


def test_fp16_is_described_since_it_needs_a_scaler(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    edit = edit_of(seen(path), {"precision.amp": "fp16"}, "cuda:0", path)
    assert edit.path is None and edit.advice == (
        'run the forward pass and the loss under torch.autocast("cuda", dtype=torch.float16)',
    )
    assert os.listdir(tmp_path) == ["train.py"]  # noqa: PTH208

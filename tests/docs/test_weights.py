"""docs/weights.md: its examples train, resume, and their weights load in plain torch."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ndd_engine.train.checkpoint import CheckpointStore
from tests.cli.program import environment, run
from tests.waiting import LIMIT_S

PAGE = (Path(__file__).parents[2] / "docs" / "weights.md").read_text("utf-8")
FEW = shlex.split("--headless --set run.threads=1 --set batch.micro=100 --set checkpoint.every_steps=5")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, body in re.findall(r'```python title="(\w+\.py)"\n(.*?)```', PAGE, re.DOTALL):
        (tmp_path / name).write_text(body)
    return tmp_path


def command(starts: str) -> list[str]:
    """The arguments of the page's command that begins so."""
    lines = re.findall(r"^ndd-console (.*)$", PAGE, re.MULTILINE)
    return shlex.split(next(line for line in lines if line.startswith(starts)))


def ran(*arguments: str, folder: Path) -> str:
    done = run(*arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def python(code: str, folder: Path) -> str:
    """What a program without ndd-console prints: the line of the page, after the model of the example."""
    begin = "import sys, torch\nfrom torch import nn\nfrom pretrained import Net\nmodel = Net(outputs=1)\n"
    end = "\nassert not any(name.startswith('ndd') for name in sys.modules)\nprint(model(torch.ones(1, 8)).item())"
    done = subprocess.run(
        [sys.executable, "-c", begin + code + end], cwd=folder, env=environment(PYTHONPATH=""), capture_output=True,
        text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def weights(folder: Path, run_name: str, step: int) -> dict[str, Any]:
    store = CheckpointStore(folder / "runs" / run_name / "checkpoints", 9)
    return store.load(next(saved for saved in store.all() if saved.step == step))


@pytest.fixture
def trained(folder: Path) -> None:
    """The page's first run has ended; it begins without weights."""
    train = command("train --workload pretrained")[:-2]
    ran(*train, "--run", "my-run", "--max-steps", "10", *FEW, folder=folder)


@pytest.mark.long
def test_every_way_to_load_weights_loads_the_same(folder: Path, trained: None) -> None:
    ran(*command("export my-run --checkpoint best"), folder=folder)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (exported,) = [block for block in blocks if '"weights.pt"' in block]
    (checkpoint,) = [block for block in blocks if "step-00001200" in block]
    one = python(exported, folder)
    assert one == python(checkpoint.replace("step-00001200", "step-00000010"), folder)
    assert one != python("", folder)
    if importlib.util.find_spec("safetensors") is not None:
        printed = ran(*command("export my-run -o weights.safetensors"), folder=folder)
        (line,) = [block for block in blocks if "load_model" in block]
        assert printed.strip() == line.strip().replace('"', "'")
        assert python("import safetensors.torch\n" + line, folder) == one


@pytest.mark.slow
@pytest.mark.long
def test_exported_weights_start_a_run_and_frozen_ones_stay(folder: Path, trained: None) -> None:
    ran(*command("export my-run --checkpoint best"), folder=folder)
    start = [part.replace("pretrained:", "frozen:") for part in command("train --workload pretrained")]
    ran(*start, "--run", "frozen", "--max-steps", "6", *FEW, folder=folder)
    before, after = weights(folder, "my-run", 10), weights(folder, "frozen", 6)
    assert torch.equal(before["model"]["body.0.weight"], after["model"]["body.0.weight"])
    assert not torch.equal(before["model"]["head.weight"], after["model"]["head.weight"])
    assert len(after["optimizer"]["state"]) == 2  # of the head only
    ran("train", "--resume", "frozen", "--headless", "--max-steps", "9", folder=folder)
    assert torch.equal(
        before["model"]["body.0.weight"], weights(folder, "frozen", 9)["model"]["body.0.weight"]
    )


@pytest.mark.slow
def test_the_average_is_that_of_the_weights_after_each_step_and_resumes(folder: Path) -> None:
    train = [part for part in command("train --workload averaged") if part != "--run"][:-1]
    sets = ("checkpoint.every_steps=1", "checkpoint.keep=99", "workload.options.ema_decay=0.5")
    more = [word for value in sets for word in ("--set", value)]
    ran(*train, "--run", "averaged", "--max-steps", "6", *FEW, *more, folder=folder)
    expected = None
    for step in range(1, 7):
        now = weights(folder, "averaged", step)["model"]["body.0.weight"]
        expected = now if expected is None else 0.5 * expected + 0.5 * now
    average = weights(folder, "averaged", 6)["stateful"]["ema"]["module.body.0.weight"]
    assert expected is not None and torch.allclose(average, expected, atol=1e-6)
    ran("train", "--resume", "averaged", "--headless", "--max-steps", "9", folder=folder)
    ran(*train, "--run", "whole", "--max-steps", "9", *FEW, *more, folder=folder)
    one, other = (weights(folder, name, 9)["stateful"]["ema"] for name in ("averaged", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()
    ran(*command("export averaged --module ema"), folder=folder)
    loaded = torch.load(folder / "ema.pt", weights_only=True)
    assert torch.equal(loaded["body.0.weight"], one["module.body.0.weight"])
    assert loaded.keys() == weights(folder, "averaged", 9)["model"].keys()

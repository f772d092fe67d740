"""The examples in --help: their commands, options and values exist, and each of them runs.

Those that train or measure run with less: `LESS` follows the example on its command line, and the last option counts.
"""

from __future__ import annotations

import gzip
import os
import pickle
import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import torch

from ndd_console.cli import COMMANDS, cli
from ndd_engine.config import read
from ndd_engine.hardware.named_gpus import gpu_named
from ndd_engine.trial.claims import chosen
from tests.cli.program import call, run
from tests.recordings.snapshots import History
from tests.trial.written_runs import steady, windows, write_run

EXAMPLES = list(
    dict.fromkeys(
        line
        for name in ("", *COMMANDS)
        for command in [cli.get_command(click.Context(cli), name) if name else cli]
        for line in re.findall(r"^  ndd-console (.+?)(?:   .*)?$", (command and command.epilog) or "", re.M)
        if "COMMAND" not in line
    )
)
# Those that start no training and read nothing but the files of `written`.
QUICK = ("gpu", "log", "runs", "--runs", "compare", "report", "config", "scaffold", "attach", "claims --list",
         "trace", "memory")  # fmt: skip
LESS = {
    "train": "--set workload.size=tiny --set run.threads=1 --max-steps 4",
    "train --workload": "--set run.threads=1 --max-steps 4",
    "train --resume": "--max-steps 1204",
    "check": "--set workload.size=tiny --set batch.micro=16",
    "wizard": "--size tiny --no-verify",
    "wizard --workload": "",
    "try": "--budget 2 --set workload.size=tiny --set run.threads=1",
    "try last": "--budget 2",
    "try chartext-001": "--budget 2",
    "try train-001": "--budget 2",
    "try --set loader.workers=4 --": "",
    "tune": "--budget 2 --only pin-memory",
    "tune --run": "--budget 2",
    "tune --": "--budget 2 --only workers",
    "scaling": "--budget 2 --ranks 1,2",
    "claims": "--budget 1",
    "runs delete": "--yes",
}
# One of each kind begins in `make test-all`; the others need runs first, or do what tests of their command do.
SOON = ("check run.toml", "try --set loader.workers=4", "tune run.toml -o tuned.toml")
# The script's Python is this one.
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
# What an example needs that is an extra.
EXTRAS = {"tensorboard": ("tensorboard", "wandb"), "safetensors": ("safetensors",)}
TOML = """
[workload]
name = "chartext"
size = "tiny"
[run]
max_steps = 4
threads = 1
[batch]
micro = 16
"""
SCRIPT = """
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
size = parser.parse_args().batch_size
torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.rand(4000, 8)
for batch, target in DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=size):
    loss = nn.functional.mse_loss(model(batch), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def written(folder: Path) -> None:
    """What the examples read: recorded runs, traces and memory snapshots."""
    for place, name in enumerate(("baseline", "candidate", "lr-2", "lr-4", "lr-8", "chartext-001")):
        steps = write_run(folder / "runs" / name, windows(steady(20, 1.0, seed=place)))
        steps.console_log.write_text("a line\n")
    (folder / "models").mkdir()
    traces = folder / "traces"
    traces.mkdir()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.nn.Linear(64, 64)(torch.rand(8, 64)).sum().backward()
    profiler.export_chrome_trace(str(folder / "rank0.json"))
    trace = (folder / "rank0.json").read_bytes()
    for path in (folder / "rank1.json", traces / "rank0.json"):
        path.write_bytes(trace)
    (folder / "trace.json.gz").write_bytes(gzip.compress(trace))
    history = History()
    history.alloc(1 << 20)
    snapshot = pickle.dumps(history.body())
    (folder / "snapshot.pickle").write_bytes(snapshot)
    (folder / "snapshot.pickle.gz").write_bytes(gzip.compress(snapshot))


def less(example: str) -> list[str]:
    """The words of the example, with options that let it end soon. The command of a script stays last."""
    key = max((key for key in LESS if f"{example} ".startswith(f"{key} ")), key=len, default="")
    words, more = shlex.split(example), shlex.split(LESS.get(key, ""))
    place = words.index("--") if "--" in words else len(words)
    return [*words[:place], *more, *words[place:]]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration and a script."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "run.toml").write_text(TOML)
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").write_text("")
    for place in (folder, folder / "my_package"):
        (place / "train.py").write_text(SCRIPT)
    return folder


@pytest.fixture(scope="module")
def trained(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a workload and runs."""
    folder = tmp_path_factory.mktemp("trained") / "examples"
    shutil.copytree(project, folder)
    own = ("--set", "run.threads=1", "--set", "batch.micro=4", "--set", "batch.sequence=32",
           "--set", "workload.options.width=2", "--set", "checkpoint.every_steps=600", "--set", "checkpoint.keep=9",
           "--set", "evaluate.every_steps=600", "--max-steps", "1200")  # fmt: skip
    for words in (
        ("scaffold", "my_workload.py"),
        ("train", "--workload", "my_workload:factory", "--run", "baseline", *own),
        ("train", "run.toml", "--run", "chartext-001"),
        ("run", "--headless", "--", "python", "train.py"),
    ):
        done = run(*words, folder=folder, timeout=300, PATH=PATH)
        assert done.returncode == 0, done.stderr
    return folder


def test_every_command_has_examples() -> None:
    assert set(SOON) < set(EXAMPLES)
    assert {line.split()[0] for line in EXAMPLES if not line.startswith("--")} == {*COMMANDS} - {"completion"}


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_has_valid_options_and_values(example: str, tmp_path: Path) -> None:
    with cli.make_context("ndd-console", shlex.split(example)) as context:
        name, command, rest = cli.resolve_command(context, [*context._protected_args, *context.args])
        assert name is not None and command is not None
        given = command.make_context(name, rest, parent=context).params
    if given.get("sets"):
        read(None, given["sets"]).resolve()
    if given.get("gpu"):
        gpu_named(given["gpu"])
    if name == "claims":
        assert chosen(given["ids"])


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(line, marks=[pytest.mark.long] if line.startswith("memory") else [])
        for line in EXAMPLES
        if line.startswith(QUICK)
    ],
)
def test_a_quick_example_runs(example: str, tmp_path: Path) -> None:
    written(tmp_path)
    done = call(*less(example), folder=tmp_path)
    assert done.returncode == 0, done.stderr


def ran(example: str, folder: Path) -> None:
    done = run(*less(example), folder=folder, timeout=1700, PATH=PATH)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.long
@pytest.mark.budget(60)
@pytest.mark.parametrize("example", SOON)
def test_an_example_runs(example: str, project: Path, tmp_path: Path) -> None:
    ran(example, shutil.copytree(project, tmp_path / "copy"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "example", [line for line in EXAMPLES if not line.startswith(QUICK) and line not in SOON]
)
def test_an_example_beside_recorded_runs_runs(example: str, trained: Path, tmp_path: Path) -> None:
    if not all(find_spec(need) for word, needs in EXTRAS.items() if word in example for need in needs):
        pytest.skip("it needs an extra")
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("control.sock", "*.lock"))
    if "--run baseline" in example:  # a run of this name begins
        shutil.rmtree(folder / "runs" / "baseline")
    ran(example, folder)

"""Exported weights: what plain torch and safetensors load, which checkpoint, and what is refused."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train_help import EVERY_STEP, Result, Trainer

from ndd_engine.errors import CheckpointError, UsageError
from ndd_engine.record.rundir import RunDir
from ndd_engine.train import checkpoint as export_module
from ndd_engine.train.checkpoint import CheckpointStore, export

OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.norm(self.body(self.embed(x))))

def factory(settings):
    x = torch.randint(7, (64,), generator=torch.Generator().manual_seed(0))
    return {
        "model": Net(), "train_data": TensorDataset(x), "forward": lambda model, batch: model(batch[0]),
        "loss": lambda out, batch: nn.functional.cross_entropy(out, batch[0]),
    }
"""
OUR = (
    "run.max_steps=6",
    "batch.micro=8",
    "run.threads=1",
    "evaluate.every_steps=2",
    "checkpoint.every_steps=2",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Result, Any]]:
    """A finished run of an own model with tied weights, and the module of its factory."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "export_workload.py").write_text(OWN)
    path = [*sys.path]
    sets = ("workload.name=export_workload:factory", f'workload.path=["{folder}"]', *OUR, *EVERY_STEP)
    result = Trainer(folder / "runs", folder).train(*sets)
    assert result.end.status == "done", result.end
    yield result, sys.modules["export_workload"]
    sys.path[:] = path


@pytest.fixture
def own(finished: tuple[Result, Any], tmp_path: Path) -> tuple[Result, Any]:
    """A copy of that run, and the module."""
    result, module = finished
    shutil.copytree(result.directory.path, tmp_path / "run")
    return Result(RunDir(tmp_path / "run")), module


def trained(result: Result, module: Any, step: int) -> nn.Module:
    """The model with the weights of a checkpoint."""
    model: nn.Module = module.Net()
    model.load_state_dict(result.state(step)["model"])
    return model.eval()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_another_program_computes_the_same_with_exported_weights(
    own: tuple[Result, Any], tmp_path: Path, suffix: str
) -> None:
    result, module = own
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    done = export(result.directory, path)
    assert done.saved.step == 6 and done.bytes == path.stat().st_size
    model = module.Net()
    if suffix == ".pt":
        model.load_state_dict(torch.load(path, weights_only=True))
    else:
        assert dict(done.tied) == {"head.weight": "embed.weight"}
        assert safetensors.load_model(model, path) == (set(), [])
    x = torch.arange(7)
    expected = trained(result, module, 6)(x)
    assert torch.equal(model.eval()(x), expected)
    assert model.head.weight is model.embed.weight
    assert not torch.equal(module.Net().eval()(x), expected)


def test_the_checkpoint_is_the_latest_the_best_or_a_named_one(
    own: tuple[Result, Any], tmp_path: Path
) -> None:
    result, _ = own
    every = CheckpointStore(result.directory.checkpoints, 9).all()
    best = min((saved for saved in every if saved.metric is not None), key=lambda saved: saved.metric or 0.0)
    for wanted, step in (("best", best.step), ("4", 4), ("step-00000004", 4), ("latest", 6)):
        assert export(result.directory, tmp_path / f"{wanted}.pt", wanted).saved.step == step
    with pytest.raises(UsageError, match="2, 4, 6"):
        export(result.directory, tmp_path / "none.pt", "5")
    assert not (tmp_path / "none.pt").exists()


def test_the_prefixes_of_torch_compile_are_removed() -> None:
    model, wrapped = (nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3))) for _ in range(2))
    names = list(model.state_dict())
    wrapped[1] = torch.compile(wrapped[1])  # type: ignore[assignment]
    plain, renamed = export_module.without_compiler(torch.compile(wrapped).state_dict())  # type: ignore[attr-defined]
    assert list(plain) == names and renamed == len(names)
    model.load_state_dict(plain)
    assert plain._metadata["0"]["version"] == 2 and "1.0" in plain._metadata  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="ambiguous"):
        export_module.without_compiler({"a._orig_mod.w": torch.ones(1), "a.w": torch.ones(1)})


def test_one_module_is_exported_by_its_name(own: tuple[Result, Any], tmp_path: Path) -> None:
    result, _ = own
    assert export(result.directory, tmp_path / "norm.pt", module="norm").module == "norm"
    norm = nn.BatchNorm1d(4)
    norm.load_state_dict(torch.load(tmp_path / "norm.pt", weights_only=True))
    assert torch.equal(norm.running_mean, result.state(6)["model"]["norm.running_mean"])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="body, norm"):
        export(result.directory, tmp_path / "x.pt", module="gen")


def test_an_average_is_exported_as_the_weights_of_the_model(own: tuple[Result, Any], tmp_path: Path) -> None:
    result, module = own
    ema = torch.optim.swa_utils.AveragedModel(module.Net())
    stateful = {"ema": ema.state_dict(), "sampler": {"place": 3}}
    store = CheckpointStore(result.directory.checkpoints, 9)
    store.save(7, {**result.state(6), "stateful": stateful}, None, True)
    export(result.directory, tmp_path / "ema.pt", module="ema")
    model = module.Net()
    model.load_state_dict(torch.load(tmp_path / "ema.pt", weights_only=True))
    assert torch.equal(model.body.weight, ema.module.body.weight)
    with pytest.raises(UsageError, match="norm, head, ema"):
        export(result.directory, tmp_path / "x.pt", module="sampler")


def test_an_existing_file_is_replaced_only_on_request(own: tuple[Result, Any], tmp_path: Path) -> None:
    result, _ = own
    path = tmp_path / "weights.pt"
    path.write_text("mine")
    with pytest.raises(UsageError, match="--force"):
        export(result.directory, path)
    assert path.read_text() == "mine"
    export(result.directory, path, force=True)
    assert "embed.weight" in torch.load(path, weights_only=True)


def test_what_cannot_be_written_is_one_line_and_leaves_nothing(
    own: tuple[Result, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, _ = own
    with pytest.raises(UsageError, match=r"\.safetensors"):
        export(result.directory, tmp_path / "weights.onnx")
    with pytest.raises(UsageError, match=str(tmp_path / "no")):
        export(result.directory, tmp_path / "no" / "weights.pt")
    with monkeypatch.context() as patched, pytest.raises(UsageError, match=r"ndd-console\[safetensors\]"):
        patched.setattr("importlib.util.find_spec", lambda name: None)
        export(result.directory, tmp_path / "weights.safetensors")
    (tmp_path / "full.pt").write_text("before")

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left"):
        export(result.directory, tmp_path / "full.pt", force=True)
    assert (tmp_path / "full.pt").read_text() == "before"
    assert not list(tmp_path.glob(".ndd-*"))


def test_a_damaged_or_missing_checkpoint_is_an_error(own: tuple[Result, Any], tmp_path: Path) -> None:
    result, _ = own
    newest = result.directory.checkpoints / "step-00000006" / "__0_0.distcp"
    newest.write_bytes(newest.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="step-00000006/__0_0"):
        export(result.directory, tmp_path / "x.pt")
    shutil.rmtree(result.directory.checkpoints)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        export(result.directory, tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()

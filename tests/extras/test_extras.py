"""Every extra of pyproject.toml: `make test-extras` installs it, and its real packages do what they are used for.

Without the packages, the tests are skipped; with REQUIRE_EXTRAS set, as in `make test-extras`, that is a failure. The
loggers and the export have further tests in tests/train: test_scalars, test_loggers, test_export.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
EXTRAS: dict[str, list[str]] = tomli.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
TESTS = (
    "tests/train/test_scalars.py",
    "tests/train/test_loggers.py",
    "tests/train/test_export.py",
)


def need(package: str) -> None:
    """Skip, or fail with REQUIRE_EXTRAS, if a distribution is not installed."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        text = f"{package} is not installed: make test-extras"
        if os.environ.get("REQUIRE_EXTRAS"):
            pytest.fail(text)
        pytest.skip(text)


def requirement(line: str) -> tuple[str, list[tuple[str, tuple[int, ...]]]]:
    """ "name>=1.2,<3" as its name and limits."""
    name = re.match(r"[A-Za-z0-9._-]+", line)
    assert name is not None
    limits = re.findall(r"(>=|<=|==|<|>)\s*([0-9.]+)", line)
    return name[0], [(sign, tuple(map(int, version.split(".")))) for sign, version in limits]


def installed(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", metadata.version(package))[:3])


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_installed_versions_are_those_that_the_extra_allows(extra: str) -> None:
    for line in EXTRAS[extra]:
        name, limits = requirement(line)
        need(name)
        for sign, limit in limits:
            has = installed(name)[: len(limit)] if sign == "==" else installed(name)
            good = {
                ">=": has >= limit,
                "<": has < limit,
                "==": has == limit,
                "<=": has <= limit,
                ">": has > limit,
            }
            assert good[sign], f"{line}: {metadata.version(name)} is installed"


def test_the_makefile_installs_every_extra() -> None:
    line = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("EXTRAS ?="))
    assert sorted(line.removeprefix("EXTRAS ?=").strip().split(",")) == sorted(EXTRAS)
    target = (ROOT / "Makefile").read_text().partition("\ntest-extras:")[2].partition("\n\n")[0]
    assert all(path in target for path in TESTS)


def test_the_message_for_a_missing_extra_names_one_that_exists() -> None:
    named: set[str] = set()
    for folder in ("engine", "tui"):
        for path in (ROOT / folder).rglob("*.py"):
            named |= set(re.findall(r"ndd-console\[([\w-]+)\]", path.read_text("utf-8")))
    assert named and named <= set(EXTRAS)


def test_tensorboard_reads_what_torch_writes(tmp_path: Path) -> None:
    need("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))  # type: ignore[no-untyped-call]
    writer.add_scalar("loss", 0.5, 3)  # type: ignore[no-untyped-call]
    writer.close()  # type: ignore[no-untyped-call]
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(item.step, item.value) for item in read.Scalars("loss")] == [(3, 0.5)]


def test_safetensors_keeps_tied_weights(tmp_path: Path) -> None:
    need("safetensors")
    import safetensors.torch as safe

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    safe.save_model(model, str(tmp_path / "x.safetensors"))
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    other[1].weight = other[0].weight
    assert safe.load_model(other, tmp_path / "x.safetensors") == (set(), [])
    assert torch.equal(other[1].weight, model[0].weight)


def test_wandb_and_mlflow_are_the_packages_that_the_loggers_use() -> None:
    """What the loggers do with them: tests/train/test_loggers.py."""
    need("wandb")
    need("mlflow-skinny")
    from ndd_engine.config import read
    from ndd_engine.train import loggers

    config = read(None, ("log.wandb=offline", "log.mlflow=mlflow.db", "log.tensorboard=true")).resolve()
    assert list(loggers.missing(config)) == []


@pytest.mark.long
def test_mkdocs_builds_the_documentation(tmp_path: Path) -> None:
    need("mkdocs")
    need("mkdocs-material")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "weights.html").exists() and (tmp_path / "site" / "loggers.html").exists()


def test_accelerate_trains() -> None:
    need("accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    accelerator.backward(model(torch.ones(4, 2)).square().mean())
    optimizer.step()
    assert not torch.equal(before, model.weight)


def test_lightning_trains(tmp_path: Path) -> None:
    need("lightning")
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Net()
    before = model.net.weight.detach().clone()
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader([torch.ones(2) for _ in range(4)]))
    assert not torch.equal(before, model.net.weight)


@pytest.mark.parametrize("program", ["ruff", "mypy", "lint-imports"])
def test_the_development_tools_start(program: str) -> None:
    need({"lint-imports": "import-linter"}.get(program, program))
    path = shutil.which(program, path=str(Path(sys.executable).parent)) or shutil.which(program)
    if path is None and not os.environ.get("REQUIRE_EXTRAS"):
        pytest.skip(f"{program} is installed elsewhere")
    assert path is not None
    assert subprocess.run([path, "--help"], capture_output=True, check=False, timeout=60).returncode == 0

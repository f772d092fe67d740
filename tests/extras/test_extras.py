"""Every extra of pyproject.toml is installed by `make test-extras`, in a version that it allows.

Without the packages, the tests are skipped; with REQUIRE_EXTRAS set, as in `make test-extras`, that is a failure. What
the packages are used for has tests beside this one and in tests/train: test_loggers, test_export, test_order.
"""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

import pytest
import tomli

ROOT = Path(__file__).parents[2]
EXTRAS: dict[str, list[str]] = tomli.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
TESTS = ("tests/train/test_loggers.py", "tests/train/test_export.py", "tests/train/test_order.py")


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


def test_wandb_and_mlflow_are_the_packages_that_the_loggers_use() -> None:
    """What the loggers do with them: tests/train/test_loggers.py."""
    need("wandb")
    need("mlflow-skinny")
    from ndd_engine.config import read
    from ndd_engine.train import loggers

    config = read(None, ("log.wandb=offline", "log.mlflow=mlflow.db", "log.tensorboard=true")).resolve()
    assert list(loggers.missing(config.log)) == []

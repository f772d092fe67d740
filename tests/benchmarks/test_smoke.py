"""Every benchmark starts and ends; its figures are those of a busy machine, and are not looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.__main__ import NAMES

ROOT = Path(__file__).parents[2]
# Needs Lightning and Accelerate, which the tests do without.
OWN_ENVIRONMENT = "rivals"
# A screen and a script. The others are slow.
OFTEN = {"screen", "observe"}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow)
        for name in NAMES
        if name != OWN_ENVIRONMENT
    ],
)
@pytest.mark.budget(30)
def test_a_benchmark_starts_and_ends(name: str, tmp_path: Path) -> None:
    result = tmp_path / "result.txt"
    command = [sys.executable, "-m", "benchmarks", name, "--smoke", "-o", str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert result.read_text("utf-8").startswith("== ")
    assert "failed" not in done.stdout


@pytest.mark.long
def test_a_python_that_does_not_exist_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks", "observe", "--traceml", "/no/python"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "/no/python" in done.stderr and "Traceback" not in done.stderr

"""Every benchmark starts and ends, on whatever machine, within a budget of processor time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.__main__ import NAMES, main

ROOT = Path(__file__).parents[2]
# Needs Lightning and Accelerate, which the tests do without.
OWN_ENVIRONMENT = "rivals"
# Processor seconds of a benchmark, from the start of its process to its end. Those in MORE prepare several models, or
# start further programs, scripts or ranks. Each of these processes imports torch and trains, which takes 2 to 4.
SECONDS, MORE_SECONDS = 5, 15
MORE = {
    "screen", "keys", "best", "budgets", "budget_times", "wizard", "steps", "observe", "leaks", "others",
    "script_faults", "workers", "grid", "script_null", "ranks_faults", "ranks_late", "ranks_loop", "ranks_memory",
}  # fmt: skip


def _marked(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.budget(MORE_SECONDS if name in MORE else SECONDS))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [_marked(name) for name in NAMES if name != OWN_ENVIRONMENT])
def test_a_benchmark_starts_and_ends(name: str, tmp_path: Path) -> None:
    result = tmp_path / "result.txt"
    command = [sys.executable, "-m", "benchmarks", name, "--smoke", "-o", str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert result.read_text("utf-8").startswith("== ")
    assert "failed" not in done.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("observe", "--traceml", "/no/python"), ("/no/python",)),
        (("script_faults", "--only", "gremlins"), ("gremlins", "hangs")),
    ],
)
def test_a_python_or_a_case_that_does_not_exist_is_refused(
    words: tuple[str, ...],
    named: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    with pytest.raises(SystemExit, match="2"):
        main()
    told = capsys.readouterr().err
    assert all(each in told for each in named)

"""Every benchmark starts and ends, on whatever machine; and all sides of whole runs take turns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from benchmarks.__main__ import NAMES
from benchmarks.common import Options
from benchmarks.whole_runs import SIDES, measure

ROOT = Path(__file__).parents[2]
# Needs Lightning and Accelerate, which the tests do without.
OWN_ENVIRONMENT = "rivals"
# Processor seconds of a benchmark, from the start of its process to its end; and of those that prepare several models,
# or start further programs, scripts or ranks.
SECONDS, MORE_SECONDS = 5, 15
MORE = {
    "screen", "keys", "best", "budgets", "wizard", "steps", "observe", "power", "leaks", "others", "script_faults",
    "workers", "script_null", "ranks_faults", "ranks_late", "ranks_loop", "ranks_memory",
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


@pytest.mark.long
def test_a_python_that_does_not_exist_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks", "observe", "--traceml", "/no/python"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "/no/python" in done.stderr and "Traceback" not in done.stderr


TRACEML = f"""#!/bin/sh
shift
script=$1
while [ "$1" != --args ]; do shift; done
shift
exec {sys.executable} "$script" "$@"
"""
MODULE = """
from contextlib import nullcontext as trace_step
def init(mode):
    if FAILS:
        raise SystemExit("no traceml")
"""


def environment(folder: Path, fails: bool) -> str:
    """A Python with a stand-in for traceml, which observes nothing."""
    (folder / "packages").mkdir()
    (folder / "packages" / "traceml_ai.py").write_text(f"FAILS = {fails}\n{MODULE}")
    lines = f"#!/bin/sh\nPYTHONPATH={folder / 'packages'}:$PYTHONPATH exec "
    for name, text in (
        ("python", f'{lines}{sys.executable} "$@"\n'),
        ("traceml", TRACEML.replace("exec ", f"PYTHONPATH={folder / 'packages'} exec ")),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return str(folder / "python")


@pytest.mark.slow
def test_all_sides_take_turns(tmp_path: Path) -> None:
    before = {*psutil.Process().children(recursive=True)}
    table = measure(Options(effort="smoke", traceml=environment(tmp_path, False)))
    assert [row[1] for row in table.rows] == [*SIDES[1:]]
    assert all(row[2].endswith(" of 2") for row in table.rows)
    assert {*psutil.Process().children(recursive=True)} <= before


@pytest.mark.slow
def test_a_side_that_fails_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    before = {*psutil.Process().children(recursive=True)}
    with pytest.raises(RuntimeError, match=r"(?s)traceml run: its process ended with status 1: .*no traceml"):
        measure(Options(effort="smoke", traceml=environment(tmp_path, True)))
    assert {*psutil.Process().children(recursive=True)} <= before

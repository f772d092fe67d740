"""The comparison of observers by blocks: all sides take turns, none is left, and a side that fails is named."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
from benchmarks.common import Options
from benchmarks.whole_runs import BLOCKS, LAUNCHES, SIDES, measure

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


def test_there_are_thirty_blocks() -> None:
    assert LAUNCHES * BLOCKS == 30


@pytest.mark.long
@pytest.mark.budget(60)
def test_all_sides_take_turns(tmp_path: Path) -> None:
    before = {*psutil.Process().children(recursive=True)}
    table = measure(Options(effort="smoke", traceml=environment(tmp_path, False)))
    assert [row[1] for row in table.rows] == [*SIDES[1:]]
    assert all(row[2].endswith(" of 2") for row in table.rows)
    assert {*psutil.Process().children(recursive=True)} <= before


@pytest.mark.slow
def test_a_side_that_fails_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    before = {*psutil.Process().children(recursive=True)}
    with pytest.raises(RuntimeError, match="traceml run: its process ended with status 1: no traceml"):
        measure(Options(effort="smoke", traceml=environment(tmp_path, True)))
    assert {*psutil.Process().children(recursive=True)} <= before

"""Whole runs of a script against traceml: what the table says of planted times; a Python that does not exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.common import Table
from benchmarks.whole_runs import COLUMNS, SIDES, Measured, _rows

ROOT = Path(__file__).parents[2]


def test_each_run_is_compared_with_the_bare_one_of_its_round() -> None:
    factors = dict(zip(SIDES, (1.0, 1.0, 1.02, 1.4), strict=True))
    rounds = [
        {
            side: Measured(speed * factor, speed * factor, 3 + factor, 0.5, 0.0)
            for side, factor in factors.items()
        }
        for speed in (0.001, 0.002, 0.0005, 0.001, 0.003, 0.001)  # a machine whose speed changes
    ]
    table = Table("", COLUMNS)
    _rows(table, rounds)
    found = {row[1]: row for row in table.rows}
    assert [found[side][3] for side in SIDES[1:]] == ["+0.00 %", "+2.00 %", "+40.00 %"]
    assert found["traceml run"][4] == "+40.00 to +40.00 %"


@pytest.mark.long
def test_a_python_that_does_not_exist_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "observe", "--traceml", "/no/python"], cwd=ROOT, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "--traceml /no/python" in done.stderr and "Traceback" not in done.stderr

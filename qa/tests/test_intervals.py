"""The benchmark of intervals: its simulation covers, and its table counts real trials correctly."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.common import Options

from qa.faults.null import Null
from qa.trials import intervals


def test_the_simulated_tables_have_a_row_for_a_noise_model() -> None:
    switched, cheap, few_pairs, tuning = intervals.measure(Options("smoke"))
    for table in (switched, cheap, few_pairs, tuning):
        assert [row[0] for row in table.rows] == list(intervals.MODELS)[:1]
    assert all(float(row[7]) == 0 for row in switched.rows)
    assert all(float(row[7]) >= 4 for row in cheap.rows) and all(float(row[7]) < 4 for row in few_pairs.rows)


def test_real_trials_are_counted_by_workload() -> None:
    nulls = [
        Null(0, "eeg", "no difference", 1.0, 0.99, 1.01, 40.0),
        Null(1, "chartext", "faster", 1.05, 1.03, 1.07, 30.0),
        Null(2, "eeg", "inconclusive", 1.0, 0.96, 1.04, 60.0),
        Null(3, "summarise", "failed: no memory", None, None, None, 0.0),
    ]
    table = intervals.real_table(nulls, "pairs of processes")
    rows = {row[0]: row for row in table.rows}
    assert rows["eeg"][1:7] == ("2", "2 of 2", "0", "0", "1", "1")
    assert rows["all"][1:8] == ("4", "2 of 3", "1", "0", "1", "1", "1")
    assert "intervals that contain 1: 2 of 3 (66.7%" in table.notes[0] and "not reached" in table.notes[0]
    assert "inconclusive: 1 of 4 (25.0%" in table.notes[1] and table.notes[1].endswith("30%: reached")


def test_real_trials_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, int, bool, float]] = []

    def run(folder: Path, count: int, resume: bool, budget_s: float, both: bool) -> list[Null]:
        calls.append((folder, count, resume, budget_s))
        pairs = Null(0, "eeg", "no difference", 1.0, 0.99, 1.01, 40.0, restarts=True)
        return [pairs, Null(1, "eeg", "faster", 1.1, 1.05, 1.15, 20.0, restarts=False)]

    monkeypatch.setattr(intervals, "run", run)
    together, pairs = intervals._real(3, str(tmp_path))
    assert together.rows[-1][1:5] == ("1", "0 of 1", "1", "0") and "one process" in together.title
    assert pairs.rows[-1][1:6] == ("1", "1 of 1", "0", "0", "1")
    assert calls == [(tmp_path, 3, True, 60.0)]

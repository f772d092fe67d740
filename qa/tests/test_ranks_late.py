"""The check of slow ranks can fail: by another clock, by the phase, and it plants what its table says."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest

from ndd_engine.record.event import RanksEvent
from qa.ranks.late import CLOSE, FOLDER, SHOWN, STRATEGIES, by_second_clock, cases

STEP_NS = 50_000_000


def windows(factor: float = 1.0) -> list[RanksEvent]:
    """Of ten steps each. factor: of what was measured to what a step took."""
    each = [0.0, 0.0, 0.8 * factor * STEP_NS / 1e3, 0.0, 0.0]
    waited = round(STEP_NS * factor)
    return [
        RanksEvent(
            step, 10, 2, 1, "ddp", 10 * STEP_NS, waited, waited, 0, {"forward": each, "own": each}, {}, []  # type: ignore[arg-type]
        )
        for step in range(10, 60, 10)
    ]  # fmt: skip


@pytest.mark.parametrize("factor", [1.0, 0.99, 1.02])
def test_a_sum_that_is_not_the_time_of_the_steps_is_told(factor: float) -> None:
    # The wall time in the record is the same in all of them: it would not tell.
    ends = [[STEP_NS * (number + 1) + offset for number in range(60)] for offset in (0, 700)]
    found = by_second_clock(windows(factor), ends)
    assert found == pytest.approx(factor)
    assert (abs(factor - 1) <= CLOSE) is (factor == 1.0)


def test_without_whole_windows_there_is_no_sum() -> None:
    assert by_second_clock(windows()[:1], [[1, 2, 3]]) is None


def test_every_phase_is_planted_on_both_ranks_with_both_strategies() -> None:
    planted = {(case.strategy, case.rank, case.phase) for case in cases(quick=False)}
    phases = {"data_wait", "forward", "backward", "optimizer", *SHOWN}
    assert planted == {
        (strategy, rank, phase) for strategy in STRATEGIES for rank in (0, 1) for phase in phases
    }


def test_reading_takes_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("late_rank", FOLDER / "late_rank.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds + 80e-6  # what a sleep takes longer

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    steps = 40
    for _ in range(steps * module.MICRO):
        module.read(0.005 / module.MICRO)
    assert now[0] / steps == pytest.approx(0.005, rel=0.01)
    assert Path(module.__file__).name == "late_rank.py"

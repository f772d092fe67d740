"""Idle time on the screen: method, causes, age of a profiler capture; and the key that starts one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ndd_console.view.blocks import idle_heading, idle_rows
from ndd_engine.record.figures import GRAPH_REASON, LOWER_BOUND
from ndd_engine.record.snapshot import Idle, Snapshot

from .fakes import ended, snapshot

CAUSES = (("waiting for data", 0.57), ("launch gaps", 0.04), ("synchronising", 0.02))


def block(shot: Snapshot, width: int = 34, count: int = 6) -> list[str]:
    return ["".join(text for text, _ in row).rstrip() for row in idle_rows(shot, width, count)]


@pytest.mark.parametrize(
    ("cuda", "method", "heading", "narrow"),
    [
        (True, "kernels", "GPU idle 63 % (kernels)", "GPU idle 63 % (kernels)"),
        (False, "operators", "compute idle 63 % (operators)", "idle 63 % (operators)"),
    ],
)
def test_a_capture_shows_its_method_and_its_step(cuda: bool, method: str, heading: str, narrow: str) -> None:
    shot = snapshot(cuda, idle=Idle(0.63, method, CAUSES, step=4_200))
    assert idle_heading(shot, 40) == heading
    assert idle_heading(shot, 26) == narrow
    rows = block(shot)
    assert [row.split("  ")[0] for row in rows[:3]] == [cause for cause, _ in CAUSES]
    assert rows[0].endswith("57 %") and rows[3].endswith("4,200")
    # The causes come first where there is little room.
    assert len(block(shot, count=3)) == 3
    assert "measured" not in "".join(block(shot, count=3))


def test_a_step_without_idle_time_has_no_causes_and_still_an_age() -> None:
    assert [row[-6:] for row in block(snapshot(idle=Idle(0.0, "kernels", (), step=7)))] == ["step 7"]


def test_a_lower_bound_is_marked() -> None:
    shot = snapshot(idle=Idle(0.1, "events", (("waiting for data", 0.1),), LOWER_BOUND))
    assert ">10 % (events)" in idle_heading(shot, 40)
    assert " ".join(block(shot)[1:]) == LOWER_BOUND


def test_unknown_idle_time_names_the_key_that_measures_it() -> None:
    idle = Idle(None, "events", (), GRAPH_REASON)
    assert " ".join(block(snapshot(idle=idle))).endswith("press k")
    # Not for a run that has ended.
    assert "press" not in " ".join(block(replace(ended("done", "all steps done"), idle=idle)))

"""A finding in words: the block of pages and reports, and the line of logs."""

from __future__ import annotations

import pytest

from ndd_console.words.blocks import COMMAND, PLACE
from ndd_console.words.finding import choices, event_line, finding_line, urgent_line, verdict
from ndd_engine.diagnose import Change, Evidence, Finding
from ndd_engine.record.events import FindingEvent, MarkEvent

HOIST = Change("Hoist it.", (), "m.py:3 in f")
WORKERS = Change("Load with workers.", ("loader.workers=4", "run.name=a b"))
FINDING = Finding(
    "few-workers", "the GPU waits 57 % of each step", (Evidence("waiting 31 ms", "host clock"),), "likely", 0.57, 2.33,
    (HOIST, WORKERS),
)  # fmt: skip


def test_the_block_has_evidence_changes_places_and_commands() -> None:
    block = verdict(FINDING, "my run", main=True)
    assert block.title == FINDING.title and block.ceiling == "at most 2.3x"
    assert block.tone == "warn" and block.main
    assert block.badges == ("too few loader workers", "likely", "costs up to 57 % of the time")
    assert block.rows == (
        ("evidence", "waiting 31 ms (host clock)"),
        ("try", "Hoist it."),
        (PLACE, "m.py:3 in f"),
        ("try", "Load with workers."),
        (COMMAND, "ndd-console try 'my run' --set loader.workers=4 --set 'run.name=a b'"),
    )
    assert COMMAND not in dict(verdict(FINDING).rows)


def test_a_change_that_is_not_worthwhile_is_no_warning() -> None:
    why = "the run ends before it pays off"
    block = verdict(Finding("optimizer", "the optimizer", (), "certain", leave=why))
    assert block.tone == "" and block.rows == (("leave as is", why),)
    assert verdict(Finding("healthy", "no bottleneck", (), "certain")).tone == "good"


@pytest.mark.parametrize(
    ("changes", "tail"),
    [
        ((), ""),
        ((HOIST,), "; Hoist it (m.py:3 in f)"),
        ((WORKERS,), "; try loader.workers=4 run.name=a b"),
        ((HOIST, WORKERS), "; Hoist it (m.py:3 in f); or try loader.workers=4 run.name=a b"),
        ((WORKERS, HOIST), "; try loader.workers=4 run.name=a b"),
    ],
)
def test_the_line_names_the_change_to_try(changes: tuple[Change, ...], tail: str) -> None:
    finding = Finding("few-workers", "waiting", (), "likely", 0.5, 2.0, changes)
    event = FindingEvent(9, finding.cause, finding.title, False, finding)
    assert finding_line(finding) == event_line(event) == f"finding: waiting, at most 2.0x{tail}"
    setting, other = choices(finding)
    assert setting == (WORKERS if WORKERS in changes else None)
    assert other == (HOIST if changes[:1] == (HOIST,) else None)


def test_the_line_names_the_steps_from_which_a_change_pays_off() -> None:
    changes = (HOIST, Change("use fewer threads", ("run.threads=1",)))
    finding = Finding("threads", "others use 1 core", (), "likely", changes=changes, from_steps=1200)
    assert finding_line(finding).endswith("; or for a run of 1,200 steps and more, try run.threads=1")


def test_the_line_of_a_finding_that_is_cleared_or_too_short() -> None:
    assert event_line(FindingEvent(9, "tf32", "TF32 is off", True)) == "finding cleared: TF32 is off"
    assert event_line(FindingEvent(9, "too-short", "too short")) == ""


def test_the_end_of_an_observation_is_told_at_once() -> None:
    ended = MarkEvent(
        "warning", 3, "the observation ended at step 3: ValueError: odd", {"observed": "no more"}
    )
    assert urgent_line(ended) == ended.text
    assert not urgent_line(MarkEvent("note", 3, "not timed: f", {"observed": "in part"}))
    assert not urgent_line(MarkEvent("warning", 3, "something else"))

"""Findings are recorded when they appear, change and disappear; noise at a threshold does not make them flap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from train_help import EVERY_STEP, OWN, Trainer, Written, spoiled

from ndd_engine.diagnose import Change, Finding
from ndd_engine.diagnose.rules import FindingWatch
from ndd_engine.record.events import FindingEvent, MarkEvent
from ndd_engine.record.file import Recorder
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.record.state import RunState

EMPTY = RunState().snapshot()


def finding(cause: str, ceiling: float | None = 1.5) -> Finding:
    return Finding(cause, f"{cause} makes steps slower", (), "likely", ceiling=ceiling)


def told(*looks: Sequence[Finding]) -> list[list[tuple[str, bool]]]:
    """The result of each check: (cause, gone)."""
    script = iter(looks)
    watch = FindingWatch(lambda _: next(script))
    return [[(event.cause, event.gone) for event in watch(EMPTY, False)] for _ in looks]


A = [finding("gc")]
SHORT, HEALTHY = [finding("too-short")], [finding("healthy", None)]
BEGINS, ENDS, FINE = ("gc", False), ("gc", True), ("healthy", False)


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        # When it held twice, and when it was absent twice; never what comes and goes with the noise.
        ([A, A, A, [], A, [], [], []], [[], [BEGINS], [], [], [], [], [ENDS], []]),
        ([A, [], A, [], A, []], [[]] * 6),
        # "Too short" is not told, "healthy" only as the verdict.
        ([SHORT, SHORT], [[], []]),
        ([A + HEALTHY, A + HEALTHY], [[], [BEGINS]]),
        ([HEALTHY] * 3 + [A] * 2 + [HEALTHY] * 2, [[], [FINE], [], [], [BEGINS], [], [FINE, ENDS]]),
    ],
)
def test_a_finding_is_told_when_it_held_twice_and_when_it_was_absent_twice(
    looks: list[list[Finding]], expected: list[list[tuple[str, bool]]]
) -> None:
    assert told(*looks) == expected


def trying(sets: str) -> Finding:
    return replace(finding("gc"), changes=(Change("collect less often", (sets,)),))


OFTEN, RARELY = trying("run.gc_every_steps=50"), trying("run.gc_every_steps=500")


@pytest.mark.parametrize(
    ("looks", "places"),
    [
        ([finding("gc", at) for at in (1.5, 1.5, 1.9, 2.1, 1.9, 2.1, 2.1, None, None)], [1, 6, 8]),
        ([OFTEN, OFTEN, RARELY, RARELY, RARELY], [1, 3]),
    ],
)
def test_a_finding_whose_ceiling_moves_much_or_whose_advice_changes_is_told_again(
    looks: list[Finding], places: list[int]
) -> None:
    assert [place for place, each in enumerate(told(*([look] for look in looks))) if each] == places


def test_rules_that_fail_are_told_once_and_lose_no_event(tmp_path: Path) -> None:
    def derive(_snapshot: Snapshot, _last: bool) -> list[FindingEvent]:
        raise ValueError("a rule is wrong")

    path = tmp_path / "events.jsonl"
    recorder = Recorder(path, None, None, derive, 0.0)
    recorder.start()
    for step in range(3):
        recorder.put(MarkEvent("note", step, ""))
    recorder.close()
    assert len(recorder.errors) == 1 and "ValueError" in recorder.errors[0]
    assert recorder.snapshot().warnings == 1
    assert len(path.read_bytes().splitlines()) == 3


def test_a_run_records_its_findings_before_its_end(trainer: Trainer, written: Written) -> None:
    # An evaluation after every other step takes most of the time.
    sets = (*written(spoiled(loss="time.sleep(0.0 if output.requires_grad else 0.03)")), *OWN, *EVERY_STEP)
    result = trainer.train(*sets, "run.max_steps=60", "evaluate.every_steps=2")
    kinds = [event.type for event in result.events]
    found = [event for event in result.events if isinstance(event, FindingEvent)]
    assert "evaluation" in [event.cause for event in found]
    assert kinds[-1] == "end"
    event = next(event for event in found if event.cause == "evaluation")
    assert event.finding is not None and event.finding.title == event.text and event.finding.evidence

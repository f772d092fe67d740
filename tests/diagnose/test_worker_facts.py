"""Waiting for data with what is known from inside the workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planted_runs import cores, healthy, script

from ndd_engine.diagnose.finding import Change
from ndd_engine.diagnose.view import View
from ndd_engine.diagnose.worker_facts import ranked
from ndd_engine.record.worker_events import WorkerFigures, WorkersEvent

MS = 1e6
DECODE = ("/home/u/clips.py", 14, "Clips.decode", 64, 0.74, 0.74, {"computes": 0.74})
COLLATE = ("/x/site-packages/torch/collate.py", 9, "default_collate", 8, 0.9, 0.9, {"computes": 0.9})


def told(**changes: Any) -> WorkersEvent:
    """Two workers that are busy, and one function that takes most of their time."""
    one = WorkerFigures(0, 11, 1, 300, 2400, 80 * MS, 9 * MS, (5 * MS, 6 * MS, 7 * MS), idle_ns=1 * MS)
    event = WorkersEvent(
        200, [one, replace(one, number=1)], 20, [DECODE], [], [78 * MS + number * 2e5 for number in range(20)]
    )
    return replace(event, **changes)


def waits(event: WorkersEvent | None) -> Any:
    after = {} if event is None else {6: [event]}
    return script(None, {"workers": 2}, phases=healthy(data_wait=20.0), after=after, host=cores(4.0, 1.0))


def words(finding: Any) -> str:
    return " | ".join(
        [finding.title, *(one.text for one in finding.evidence), *(one.text for one in finding.changes)]
    )


def test_the_function_in_the_worker_is_named_with_its_place() -> None:
    found = waits(told()).named("data-wait")
    assert "clips.py:14 in Clips.decode takes 74 %" in words(found)
    assert any(change.where and "clips.py:14" in change.where for change in found.changes)
    assert "be enough" in words(found)


def test_workers_that_wait_for_the_training_are_not_accused() -> None:
    idle = [replace(one, idle_ns=200 * MS) for one in told().workers]
    assert "Clips.decode" not in words(waits(told(workers=idle)).named("data-wait"))


def test_code_of_the_user_comes_before_that_of_a_library() -> None:
    mine = (*DECODE[:4], 0.3, 0.3, {"sleeps": 0.3})
    found = words(waits(told(functions=[COLLATE, mine])).named("data-wait"))
    assert "Clips.decode takes 30 % " in found and "default_collate" not in found


def test_what_cannot_be_told_is_not_said() -> None:
    assert "not known" in words(waits(None).named("data-wait"))
    assert "clips" not in words(waits(told(functions=[])).named("data-wait"))


def test_slow_items_and_slow_workers_are_told() -> None:
    first, second = told().workers
    slow = replace(first, item_ns=(1 * MS, 2 * MS, 60 * MS), slow=[(61_000_000, "77")])
    assert " 77 (61 ms)" in words(waits(told(workers=[slow, second])).named("data-wait"))
    uneven = replace(first, batch_ns=240 * MS)
    assert "worker 0 takes 3.0 times" in words(waits(told(workers=[uneven, second])).named("data-wait"))


def test_changes_are_ranked_by_what_is_predicted() -> None:
    view = View(waits(told()).snapshot())
    order = ranked(view, [
        Change("order", ("loader.in_order=false",)), Change("cache", ("loader.cache=true",)),
        Change("more", ("loader.workers=4",)),
    ])  # fmt: skip
    assert [change.text.partition(" (")[0] for change in order] == ["more", "cache", "order"]
    assert "predicted" in order[0].text and "or nothing" in order[2].text


def test_more_workers_are_proposed_where_they_wait_and_fewer_are_not() -> None:
    sleeps = (*DECODE[:4], 0.9, 0.9, {"sleeps": 0.9})
    one = told(workers=told().workers[:1], functions=[sleeps])
    found = script(
        None, {"workers": 1}, phases=healthy(data_wait=80.0), after={6: [one]}, host=cores(2.0, 1.9)
    )
    changes = found.named("data-wait").changes
    assert changes[0].sets[0].startswith("loader.workers=") and changes[0].sets[0] > "loader.workers=1"
    assert all(change.sets[:1] != ("loader.workers=0",) for change in changes)

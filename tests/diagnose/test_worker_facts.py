"""Waiting for data with what is known from inside the workers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from planted_runs import cores, healthy, script

from ndd_engine.diagnose.finding import Change
from ndd_engine.diagnose.view import View
from ndd_engine.diagnose.worker_facts import predictions, ranked, workers_figures
from ndd_engine.record.worker_events import WorkerFigures, WorkersEvent

MS = 1e6
DECODE = ("/home/u/clips.py", 14, "Clips.decode", 64, 0.74, 0.74, {"computes": 0.74})
COLLATE = ("/x/site-packages/torch/collate.py", 9, "default_collate", 8, 0.9, 0.9, {"computes": 0.9})


def told(**changes: Any) -> WorkersEvent:
    """Two workers that are busy, and one function that takes most of their time."""
    one = WorkerFigures(0, 11, 1, 300, 2400, 80 * MS, 70 * MS, (5 * MS, 6 * MS, 7 * MS), idle_ns=1 * MS)
    event = WorkersEvent(
        200, [one, replace(one, number=1)], 20, [DECODE], [], [78 * MS + number * 2e5 for number in range(20)]
    )
    return replace(event, **changes)


def waits(event: WorkersEvent | None, **more: Any) -> Any:
    after = {} if event is None else {6: [event]}
    phases = healthy(data_wait=20.0)
    host = cores(4.0, 1.0, usable=8.0)
    return script(
        None, {"workers": 2}, phases=phases, after=after, host=host, run={"usable_cores": 8.0}, **more
    )


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


def test_what_is_not_scheduled_is_not_accused() -> None:
    """Batches take long for the load by others; those that compute or wait for themselves take as long."""

    def judged(cpu_ms: float, kind: str, others: float = 1.2, late: float | None = None) -> str:
        some = [replace(one, cpu_ns=cpu_ms * MS, late=late) for one in told().workers]
        functions = [(*DECODE[:4], 0.95, 0.95, {kind: 0.95})] if kind else []
        event = told(workers=some, functions=functions)
        programs = [{"pid": 7, "name": "stress", "cores": others}] if others else []
        found = script(
            None, {"workers": 2}, phases=healthy(data_wait=20.0), after={6: [event]},
            host=cores(0.8 + others, 0.8, neighbours=programs),
        )  # fmt: skip
        return " | ".join(words(one) for one in found.found() if one.cause == "data-wait")

    assert judged(2.0, "computes") == ""
    # It computes, sleeps, or reads by itself.
    assert "Clips.decode" in judged(70.0, "computes")
    assert "Clips.decode" in judged(2.0, "sleeps") and "Clips.decode" in judged(2.0, "storage")
    # With no other programs the wait stays, but no function has taken that time.
    alone = judged(2.0, "computes", 0.0)
    assert alone and "Clips.decode" not in alone
    # Without a profile.
    assert judged(2.0, "", late=0.95) == "" and judged(2.0, "", late=0.05) and judged(2.0, "")


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
    some = [replace(one, idle_ns=10 * MS) for one in told().workers]
    view = View(waits(told(workers=some)).snapshot())
    order = ranked(view, [
        Change("order", ("loader.in_order=false",)), Change("cache", ("loader.cache=true",)),
        Change("more", ("loader.workers=4",)),
    ])  # fmt: skip
    assert [change.text.partition(" (")[0] for change in order] == ["more", "cache", "order"]
    assert "predicted" in order[0].text and "or nothing" in order[2].text


def test_changes_that_gain_more_together_are_one_change() -> None:
    changes = [Change("order", ("loader.in_order=false",)), Change("more", ("loader.workers=4",))]
    idle = [replace(one, idle_ns=40 * MS) for one in told().workers]
    tail = told(batch_quantiles_ns=[12 * MS] * 18 + [400 * MS] * 2, workers=idle)
    first, *_ = ranked(View(waits(tail).snapshot()), changes)
    assert {"loader.in_order=false", "loader.workers=4"} <= {*first.sets} and "predicted" in first.text
    # Another order of batches that all take the same time brings nothing beside more workers.
    even = told(workers=idle)
    assert all(len(change.sets) == 1 for change in ranked(View(waits(even).snapshot()), changes))


def test_more_workers_are_proposed_where_they_wait_and_fewer_are_not() -> None:
    sleeps = (*DECODE[:4], 0.9, 0.9, {"sleeps": 0.9})
    one = told(workers=told().workers[:1], functions=[sleeps])
    found = script(
        None, {"workers": 1}, phases=healthy(data_wait=80.0), after={6: [one]}, host=cores(2.0, 1.9)
    )
    changes = found.named("data-wait").changes
    assert changes[0].sets[0].startswith("loader.workers=") and changes[0].sets[0] > "loader.workers=1"
    assert all(change.sets[:1] != ("loader.workers=0",) for change in changes)


def test_workers_that_work_all_the_time_are_not_to_load_further_ahead() -> None:
    """Four workers in order: of each four batches three are there when the first one comes."""
    changes = [Change("ahead", ("loader.prefetch=8",)), Change("order", ("loader.in_order=false",))]

    def texts(idle_ns: float) -> str:
        event = told(workers=[replace(one, idle_ns=idle_ns) for one in told().workers])
        found = ranked(View(waits(event).snapshot()), changes)
        return " ".join(change.text for change in found)

    assert "ahead" not in texts(0.0) and "order" not in texts(0.0)
    assert "ahead" in texts(40 * MS) and "order" in texts(40 * MS)


RECEIVED = {"batches": 50, "behind_ns": round(50 * 6 * MS), "receive_ns": round(50 * 0.1 * MS), "pin_ns": 0}


def test_waiting_behind_an_earlier_batch_is_told_with_what_another_order_would_bring() -> None:
    even = waits(told(), window={"received": RECEIVED})
    found = words(even.named("data-wait"))
    assert "later batch" in found and "predicted" in found
    # Batches that take the same time gain nothing by another order: the change comes last, or not at all.
    assert not any(
        "in_order" in "".join(one.sets) and "little" not in one.text
        for one in even.named("data-wait").changes
    )
    assert "receiving" not in found
    slow = waits(told(), window={"received": {**RECEIVED, "behind_ns": 0, "receive_ns": round(50 * 9 * MS)}})
    assert re.search(r"receiving\D+9", words(slow.named("data-wait")))


def test_each_setting_that_can_be_played_is_predicted() -> None:
    idle = [replace(one, idle_ns=40 * MS) for one in told().workers]
    tail = told(batch_quantiles_ns=[12 * MS] * 18 + [400 * MS] * 2, workers=idle)
    snapshot = waits(tail).snapshot()
    rows = {change.sets: each for change, each in predictions(View(snapshot))}
    order = list(rows.values())
    assert order == sorted(order)
    assert {("loader.in_order=false",), ("loader.prefetch=8",), ("loader.workers=1",)} <= rows.keys()
    assert rows["loader.in_order=false",] < rows["loader.workers=1",]
    found = workers_figures(snapshot)
    assert found is not None
    assert {*found["predicted"][0]} == {"sets", "batch_ns"}
    # Workers that work all the time make no more in another order.
    busy = waits(replace(tail, workers=told().workers)).snapshot()
    assert ("loader.in_order=false",) not in {change.sets for change, _ in predictions(View(busy))}


def test_where_workers_restart_keeping_them_comes_first_with_more_of_them_if_these_are_too_few() -> None:
    sleeps = (*DECODE[:4], 0.9, 0.9, {"sleeps": 0.9})

    def changes(batch_ms: float, wait_ms: float) -> list[tuple[str, ...]]:
        made = [batch_ms * MS] * 20
        one = told(workers=told().workers[:1], functions=[sleeps], batch_quantiles_ns=made)
        phases = {**healthy(data_wait=wait_ms), "data_wait/first_batch": 0.8 * wait_ms}
        found = script(
            None, {"workers": 1, "persistent": False}, phases=phases, after={6: [one]}, host=cores(2.0, 1.9),
            window={"passes": 2},
        ).verdict()  # fmt: skip
        assert found.cause == "worker-restart"
        return [change.sets for change in found.changes]

    enough = changes(5, 80.0)
    assert enough[0] == ("loader.persistent=true",)
    assert not any("loader.workers" in one for sets in enough for one in sets)
    both, alone, *_ = changes(400, 300.0)
    assert alone == ("loader.persistent=true",)
    assert both[0] == alone[0] and both[1].startswith("loader.workers=")


def test_a_cache_keeps_workers_where_joining_its_items_takes_long() -> None:
    """Each step would join them by itself; workers do so beside it."""
    alone = Change("cache, and load in the training process", ("loader.cache=true", "loader.workers=0"))

    def first(collate_ms: float, send_ms: float = 0.1, persistent: bool = True) -> Change:
        some = [
            replace(one, collate_ns=collate_ms * MS, send_ns=send_ms * MS, cpu_ns=60 * MS)
            for one in told().workers
        ]
        event = told(workers=some, batch_quantiles_ns=[60 * MS] * 20)
        found = script(
            None, {"workers": 1, "persistent": persistent}, phases=healthy(data_wait=20.0), after={6: [event]},
            host=cores(4.0, 1.0),
        )  # fmt: skip
        return ranked(View(found.snapshot()), [alone])[0]

    assert first(0.01).sets == alone.sets
    slow = first(8.0)
    assert slow.sets == ("loader.cache=true",)  # one worker is enough
    assert first(80.0).sets[1] > "loader.workers=1"
    assert "training process" not in slow.text and "join" in slow.text
    assert "loader.persistent=true" in first(8.0, persistent=False).sets
    # Sending takes even longer than joining.
    assert "loader.workers=0" in first(8.0, send_ms=200.0).sets

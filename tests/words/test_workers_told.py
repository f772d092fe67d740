"""Loader workers in words: what they do when they hang, and how they died."""

from __future__ import annotations

from dataclasses import replace

from ndd_console.words.workers import are_known, busy_bars, ends_table, facts, workers_blocks
from ndd_engine.diagnose.view import View
from ndd_engine.record.event import DeathEvent, Event, StallEvent
from ndd_engine.record.events import WindowEvent
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.record.state import RunState
from ndd_engine.record.worker_events import WorkerFigures, WorkersEvent

ONE = WorkerFigures(1, 4712, 1, 40, 320, 2e6, 1e6, (1e5, 2e5, 3e5))
DEATH = DeathEvent(12, 4711, "loader worker 1", "SIGKILL", 1 << 20, None, None, "batch 9 (items 3, 4)")
STALL = StallEvent(12, 9.0, "storage", "no progress", processes=[
    "the main process (pid 4700), state S, poll", "loader worker 2 (pid 4712), state D, read of /data/x: load (a.py:3)",
])  # fmt: skip


def after(*events: Event) -> Snapshot:
    state = RunState()
    for second, event in enumerate(events):
        state.fold(float(second), event)
    return state.snapshot()


def told(snapshot: Snapshot) -> str:
    return " | ".join(" ".join(row) for block in ends_table(snapshot) for row in block.rows)  # type: ignore[union-attr]


def test_a_worker_that_died_is_told_although_it_had_told_nothing() -> None:
    snapshot = after(DEATH)
    assert are_known(snapshot) and "hang or died" in workers_blocks(snapshot)[0].title  # type: ignore[union-attr]
    assert "loader worker 1 (pid 4711) was killed by SIGKILL at step 12" in told(snapshot)
    assert "items 3, 4" in told(snapshot)


def test_a_worker_that_hangs_is_told_with_its_batch_and_what_it_waits_for() -> None:
    doing = "batch 9 for 31 s (items 3, 4); it sleeps in time.sleep"
    slow = WorkerFigures(1, 4712, 1, 40, 320, 2e6, 1e6, (1e5, 2e5, 3e5), doing=doing)
    assert f"worker 1 (pid 4712) makes {doing}" in told(after(WorkersEvent(12, [slow])))
    assert "read of /data/x: load (a.py:3)" in told(after(WorkersEvent(12, [ONE]), STALL))


def test_workers_that_work_and_children_of_another_kind_are_not_told() -> None:
    other = DeathEvent(12, 4711, "child process", "SIGKILL")
    assert told(after(WorkersEvent(12, [ONE]), other)) == ""
    assert not are_known(after(other))


def test_what_the_training_does_with_a_batch_is_a_mean_of_all_windows() -> None:
    received = {"batches": 4, "behind_ns": 8_000_000, "receive_ns": 2_000_000, "pin_ns": 0}
    window = WindowEvent(4, 0, 4, 4, 4, 32, 0, 10**9, None, None, None, {}, received=received)
    rows = dict(facts(View(after(WorkersEvent(12, [ONE]), window, window))).rows)
    assert (
        rows["training"] == "receiving a batch takes 0.5 ms; it waits 2 ms a batch while a later one is ready"
    )
    pinned = after(WorkersEvent(12, [ONE]), WindowEvent(
        4, 0, 4, 4, 4, 32, 0, 10**9, None, None, None, {}, received={**received, "pin_ns": 12_000_000},
    ))  # fmt: skip
    assert "pinning it in another thread 3 ms" in dict(facts(View(pinned)).rows)["training"]
    assert "training" not in dict(facts(View(after(WorkersEvent(12, [ONE])))).rows)


def test_times_of_items_that_are_read_together_are_said_to_be_means() -> None:
    slow = replace(ONE, slow=[(3_000_000, "3, 4, ...")])

    def notes(one: WorkerFigures) -> str:
        return " ".join(
            getattr(block, "note", "") for block in workers_blocks(after(WorkersEvent(12, [one])))
        )

    assert "mean time" in notes(slow)
    assert "mean time" not in notes(replace(slow, collate_ns=1e5))


def test_a_worker_is_told_with_its_items_a_second() -> None:
    idle = replace(ONE, number=2, idle_ns=6e6)
    texts = [row[2] for row in busy_bars([ONE, idle]).rows]
    assert "4,000 items/s" in texts[0] and "1,000 items/s" in texts[1]

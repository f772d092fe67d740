"""Python's garbage collections are timed, and run on the configured schedule; the defaults are restored afterwards."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.tiers import few
from train_help import EVERY_STEP, OWN, Trainer, Written, spoiled

from ndd_engine.run import StopNow
from ndd_engine.train.step.stepper import Stepper
from ndd_watch.slowing import Garbage

LONG = ("run.epochs=100", "evaluate.every_epochs=0", "evaluate.at_end=false", "checkpoint.every_epochs=0")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    callbacks = list(gc.callbacks)
    yield
    assert gc.callbacks == callbacks and gc.isenabled()
    gc.unfreeze()


@pytest.mark.long
def test_collections_are_counted_and_timed() -> None:
    heap = [[number] for number in range(300_000)]  # makes a collection long enough to be seen
    garbage = Garbage()
    garbage.begin()
    begin = time.perf_counter_ns()
    gc.collect()
    gc.collect()
    wall = time.perf_counter_ns() - begin
    pauses = garbage.take()
    garbage.end()
    assert pauses.number >= 2 and 0 < pauses.longest_ns <= pauses.ns <= wall
    assert pauses.ns > wall / 2
    assert garbage.take().number == 0
    gc.collect()
    assert garbage.take().number == 0  # stopped
    garbage.end()
    del heap


CYCLES = "for _ in range(2_000): node = []; node.append(node)"


def test_a_run_that_collects_at_chosen_steps_says_so_and_leaves_the_rest_to_python_again(
    trainer: Trainer, written: Written
) -> None:
    sets = (*written(spoiled(loss=CYCLES)), *OWN, *LONG, *EVERY_STEP)
    result = trainer.train(*sets, "run.max_steps=60", "run.gc_every_steps=20")
    collected = [window.step for window in result.windows if window.gc_count]
    assert collected == [20, 40, 60]
    assert all("other" in window.phases for window in result.windows if window.gc_count)
    totals = result.snapshot.totals
    assert totals.gc_count >= 3 and totals.gc_ns is not None
    assert 0 < totals.gc_max_ns <= totals.gc_ns < totals.wall_ns
    event = result.settings["run.gc_every_steps"]
    assert (event.requested, event.applied, event.in_effect) == ("20", "20", True)


@pytest.mark.long
@pytest.mark.parametrize("ending", few(["done", "failed", "killed"], 1))
def test_what_a_run_froze_is_collected_again_after_its_end(
    trainer: Trainer, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.unfreeze()
    frozen = []
    plain = Stepper.step

    def step(self: Stepper, *arguments: Any) -> Any:
        frozen.append(gc.get_freeze_count())
        if len(frozen) == 5 and ending != "done":
            raise StopNow if ending == "killed" else RuntimeError("broken")
        return plain(self, *arguments)

    monkeypatch.setattr(Stepper, "step", step)
    result = trainer.train(*trainer.ndd, "run.max_steps=10", "run.gc_every_steps=20")
    assert result.end.status == {"killed": "stopped"}.get(ending, ending)
    assert frozen[4] > 10_000
    assert gc.get_freeze_count() == 0

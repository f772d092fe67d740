"""The plan of the runs: equal items, whole epochs and periods where they fit, an error else; and what is switched.

Periods of step times are found where long steps recur, and not where steps only vary.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from ndd_engine.config import Config, read
from ndd_engine.trial.blocks import (
    BlockPlan,
    BlocksDoNotFitError,
    SidePace,
    can_switch,
    lead,
    needs_epochs,
    never_happens,
    period,
    plan_blocks,
    plan_pairs,
    plan_switches,
    switched_off,
)
from ndd_engine.trial.estimates import ENOUGH, Usual
from ndd_engine.trial.outcome import differences, period_of, recurs, undecided


def config(*sets: str) -> Config:
    return read(sets=sets, workload="eeg").resolve()


def test_both_sides_train_as_many_items_in_blocks_of_a_second_or_so() -> None:
    plan = plan_blocks(SidePace(16, 100_000, 0.010), SidePace(64, 25_000, 0.020), 50.0, False, start_s=4.0)
    assert plan.within
    assert plan.steps[0] * 16 == pytest.approx(plan.steps[1] * 64, rel=0.05)
    assert 0.3 <= plan.block_s <= 2.0
    pairs, blocks = plan_pairs(50.0, 4.0, plan.abba_s)
    assert pairs >= 4 and blocks >= 2 and pairs * blocks * plan.abba_s + (pairs - 1) * 4.0 <= 50


@pytest.mark.parametrize(
    ("step_s", "loads", "gpu", "run_s"),
    [
        (0.005, False, False, 0.040),  # shorter than other work on the machine
        (0.100, False, False, 0.200),  # two steps
        (0.005, True, False, 0.500),  # the batches in stock must not hide the wait
        (0.005, False, True, 0.250),  # a run ends by waiting for the device
    ],
)
def test_runs_of_one_process_that_switches(step_s: float, loads: bool, gpu: bool, run_s: float) -> None:
    side = SidePace(16, 100_000, step_s)
    plan = plan_switches(side, side, 50.0, False, loads, gpu)
    assert plan.within and plan.block_s == pytest.approx(run_s, rel=0.1)
    assert plan.lead(0) * step_s <= max(step_s, 0.010)


def test_short_epochs_are_taken_whole_on_both_sides() -> None:
    plan = plan_blocks(SidePace(16, 25, 0.010), SidePace(50, 8, 0.020), 50.0, False)
    assert not plan.within
    assert plan.steps[0] % 25 == 0 and plan.steps[1] % 8 == 0
    assert plan.steps[0] * 16 == pytest.approx(plan.steps[1] * 50, rel=0.3)


def test_a_block_in_the_middle_of_an_epoch_has_room_in_it() -> None:
    side = SidePace(1, 40, 0.4)  # an epoch takes 16 s, of which not enough fit
    plan = plan_blocks(side, side, 60.0, False)
    assert plan.within
    assert plan.steps[0] + lead(0.4) < 40


def test_an_epoch_that_was_seen_to_be_too_long_is_not_tried_again() -> None:
    side = SidePace(16, 100, 0.010)
    assert not plan_blocks(side, side, 60.0, False).within
    assert plan_blocks(side, side, 60.0, False, whole=False).within
    with pytest.raises(BlocksDoNotFitError, match=r"1\.0 s"):
        plan_blocks(side, side, 30.0, True, whole=False)


def test_what_recurs_lies_in_a_block_in_whole_periods() -> None:
    plan = plan_blocks(SidePace(16, 10_000, 0.010, 50), SidePace(16, 10_000, 0.010, 20), 50.0, False)
    assert plan.steps[0] % 50 == 0 and plan.steps[1] % 20 == 0
    with pytest.raises(BlocksDoNotFitError, match=r"50\.0 s") as caught:
        plan_blocks(SidePace(16, 10_000, 0.010, 5000), SidePace(16, 10_000, 0.010, 20), 50.0, False)
    assert caught.value.needed_s >= 8 * 50


def test_steps_that_take_too_long_are_refused_with_what_would_be_needed() -> None:
    with pytest.raises(BlocksDoNotFitError, match=r"5\.0 s") as caught:
        plan_blocks(SidePace(1, 1000, 5.0), SidePace(1, 1000, 1.0), 30.0, False)
    assert 40 <= caught.value.needed_s <= 50


def test_evaluations_and_checkpoints_are_off_unless_they_are_the_question() -> None:
    off = switched_off(["loader.workers"])
    assert off["evaluate"] == {"at_end": False, "every_steps": 0, "every_epochs": 0}
    assert off["checkpoint"]["every_minutes"] == 0.0
    assert off["log"]["profile_every_s"] == 0.0
    assert switched_off(["evaluate.every_epochs"])["evaluate"] == {"at_end": False}
    assert switched_off(["loader.eval_workers"])["evaluate"] == {"at_end": False}
    assert switched_off(["checkpoint.every_steps"])["checkpoint"] == {"at_end": False, "every_minutes": 0.0}
    assert switched_off(["checkpoint.every_minutes"])["checkpoint"] == {"at_end": False}
    assert switched_off(["log.profile_every_s"])["log"]["profile_every_s"] == 0.0


def test_the_period_is_that_of_what_is_changed() -> None:
    def steps(changed: str, *sets: str) -> int:
        return period(config(*sets), [changed], 20, 0.1, 60.0)

    evaluated = ("evaluate.every_steps=30", "evaluate.every_epochs=1")
    assert steps("loader.workers", *evaluated) == 1
    assert steps("evaluate.batches", *evaluated) == 60
    assert steps("evaluate.batches", "evaluate.every_steps=1", "evaluate.every_epochs=1") == 20
    assert steps("checkpoint.keep", "checkpoint.every_epochs=2") == 40
    assert steps("run.gc_every_steps", "run.gc_every_steps=7") == 7
    assert steps("log.every_steps", "log.every_steps=5") == 5


def test_checkpoints_by_the_clock_count_where_they_are_the_question() -> None:
    def steps(changed: str, minutes: float) -> int:
        made = config(f"checkpoint.every_minutes={minutes}", "checkpoint.every_epochs=0")
        return period(made, [changed], 20, 0.1, 60.0)

    assert steps("checkpoint.every_minutes", 0.1) == 60  # 6 s
    assert steps("checkpoint.every_minutes", 0.001) == 10  # a window of the record is a second
    assert steps("checkpoint.every_minutes", 10.0) == 1  # not in this trial
    assert steps("checkpoint.keep", 0.1) == 1


OFF = ("evaluate.every_epochs=0", "checkpoint.every_epochs=0", "checkpoint.every_minutes=0.0")
KEPT = ("loader.workers=2", "loader.persistent=true")


@pytest.mark.parametrize(
    ("sets", "changed", "epochs_known", "never"),
    [
        (OFF, "loader.workers", True, False),
        (OFF, "log.profile_every_s", True, True),
        (OFF, "evaluate.batches", True, True),
        (OFF, "checkpoint.keep", True, True),
        # Without the length of an epoch there is only what recurs by steps.
        (KEPT, "loader.persistent", False, True),
        (KEPT, "evaluate.batches", False, True),
        (KEPT, "checkpoint.keep", False, True),
        (("evaluate.every_steps=5",), "evaluate.batches", False, False),
    ],
)
def test_what_never_happens_cannot_be_measured(
    sets: tuple[str, ...], changed: str, epochs_known: bool, never: bool
) -> None:
    assert bool(never_happens(config(*sets), config(*sets), [changed], epochs_known)) == never


def test_what_happens_on_one_side_can_be_measured() -> None:
    assert never_happens(config(*OFF), config(), ["evaluate.every_epochs"]) == ""


def test_steps_of_unknown_epochs_can_be_planned() -> None:
    unknown = SidePace(16, 0, 0.010)
    assert min(plan_blocks(unknown, unknown, 50.0, False, start_s=4.0).steps) > 10


def test_keeping_workers_only_shows_where_epochs_begin() -> None:
    none, some, kept = (config(*sets) for sets in ((), KEPT[:1], KEPT))
    assert needs_epochs(some, kept, ["loader.persistent"])
    assert not needs_epochs(none, kept, ["loader.workers", "loader.persistent"])
    assert not needs_epochs(none, some, ["loader.workers"])


# Which changes one process switches between.


@pytest.mark.parametrize(
    ("base", "change", "switched"),
    [
        ("", "loader.workers=2 loader.prefetch=4", True),
        ("", "loader.pin_memory=true", True),
        ("", "loader.non_blocking=false", True),
        ("", "loader.fetch=item", True),
        ("", "precision.amp=bf16 precision.tf32=false", True),
        ("", "speed.attention=math", True),
        ("", "run.threads=1", True),
        ("", "run.gc_every_steps=100", True),
        ("", "log.every_steps=1 log.window_s=0.0", True),
        # Everything else takes processes of its own.
        ("", "batch.micro=8", False),
        ("", "optimizer.implementation=loop", False),
        ("", "speed.compile=default", False),
        ("", "speed.channels_last=true", False),
        ("", "speed.cudnn_benchmark=true", False),
        ("", "loader.cache=true", False),
        ("", "loader.placement=device", False),
        ("", "checkpoint.every_steps=10", False),
        ("", "evaluate.every_steps=10", False),
        ("", "log.kernels_every=10", False),
        ("", "loader.workers=2 batch.micro=8", False),
        # Compiled code and encoded data stay what they are.
        ("speed.compile=default", "precision.amp=bf16", False),
        ("speed.compile=default", "loader.workers=2", True),
        ("loader.cache=true", "loader.pin_memory=true", False),
        ("loader.cache=true", "precision.amp=bf16", True),
    ],
)
def test_only_what_needs_no_new_model_is_switched_in_one_process(
    base: str, change: str, switched: bool
) -> None:
    sides = [
        Config.model_validate({"workload": {"name": "chartext"}, "run": {"epochs": 1}} | sections(text))
        for text in (base, f"{base} {change}")
    ]
    for one, other in (sides, reversed(sides)):
        assert can_switch((one, other), differences(one, other)) == switched


def sections(text: str) -> dict[str, dict[str, object]]:
    """The sections of a file with these settings."""
    found: dict[str, dict[str, object]] = {}
    for name, value in (word.split("=") for word in text.split()):
        section, key = name.split(".")
        with suppress(ValueError):
            value = json.loads(value)
        found.setdefault(section, {"epochs": 1} if section == "run" else {})[key] = value
    return found


@pytest.mark.parametrize(("start_s", "pairs"), [(4.0, ENOUGH), (25.0, 2), (60.0, 1)])
def test_a_single_pair_is_planned_only_where_no_other_fits(start_s: float, pairs: int) -> None:
    """It cannot tell a gain of 5 %, however well the machine is known."""
    found, _ = plan_pairs(60.0 - 2.0, start_s, 2.2, Usual(0.003**2, 40.0))
    assert found >= pairs if pairs == ENOUGH else found == pairs


# Periods of step times.

draws = random.Random(3)


def noisy(length: float) -> float:
    return length * draws.lognormvariate(0.0, 0.1)


@pytest.mark.parametrize(
    ("length", "period"),
    [
        (lambda step: 300.0 if step % 16 == 0 else 5.0, 16),
        (lambda step: 300.0 if step % 320 == 7 else 5.0, 320),
        (lambda step: 9.0 if step % 2 else 5.0, 2),  # two optimizers in turn
        (lambda step: 40.0 if step % 5 == 1 else 5.0 + step % 5, 5),
        (lambda step: draws.uniform(100, 900) if step % 16 == 0 else 5.0, 16),
    ],
)
def test_a_period_is_found(length: Callable[[int], float], period: int) -> None:
    lengths = [noisy(length(step)) for step in range(4 * period + 60)]
    assert period_of(lengths) == period and not undecided(lengths)


@pytest.mark.parametrize(
    "length",
    [
        lambda step: 5.0,
        lambda step: 5.0 + step / 50,  # they become slower
        lambda step: 500.0 if step == 20 else 5.0,
        lambda step: draws.paretovariate(1.5),
        lambda step: 30.0 if draws.random() < 0.1 else 5.0,
    ],
)
def test_steps_that_only_vary_have_none(length: Callable[[int], float]) -> None:
    found = [period_of([noisy(length(step)) for step in range(count)]) for count in (12, 48, 200, 1000)]
    assert found == [1] * 4


def test_more_steps_are_wanted_until_long_ones_have_recurred() -> None:
    lengths = [300.0 if step % 30 == 0 else 5.0 for step in range(80)]
    assert undecided(lengths) and recurs(lengths) and period_of(lengths) == 1
    lengths += [300.0 if step % 30 == 0 else 5.0 for step in range(80, 120)]
    assert not undecided(lengths) and period_of(lengths) == 30
    assert undecided([5.0] * 20) and not undecided([5.0] * 50)
    assert period_of([]) == 1 and not recurs([])


@pytest.mark.parametrize(
    ("steps", "periods", "shorter"),
    [
        ((625, 625), (1, 1), (156, 156)),
        ((400, 100), (1, 1), (100, 25)),  # of a batch that is four times as large
        ((160, 160), (16, 16), (32, 32)),
        ((48, 48), (16, 16), None),
        ((3, 3), (1, 1), None),
    ],
)
def test_shorter_runs_are_of_as_many_items_and_of_whole_periods(
    steps: tuple[int, int], periods: tuple[int, int], shorter: tuple[int, int] | None
) -> None:
    found = BlockPlan(steps, (0.01, 0.01), False).shorter(periods)
    assert (found and found.steps) == shorter

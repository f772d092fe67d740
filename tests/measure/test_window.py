"""The figures of a window."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from ndd_engine.measure.window import StepKinds, Window

NAMES = ["forward", "other"]
US = 1_000


def shares(rows: list[list[int]], wholes: list[int]) -> dict[str, float]:
    window = Window(
        NAMES, 0, [[ns * US for ns in row] for row in rows], [0, 0], wholes=[ns * US for ns in wholes]
    )
    phases = window.phases()
    total = sum(phase["host_ns"] for phase in phases.values())
    assert total == sum(map(sum, window.rows)) + sum(window.wholes)
    return {name: phase["host_ns"] / total for name, phase in phases.items()}


def test_whole_steps_have_the_phases_of_timed_ones() -> None:
    assert shares([[150, 50]] * 7, [200] * 3000) == pytest.approx({"forward": 0.75, "other": 0.25}, abs=1e-3)
    assert shares([], [200] * 10) == {"other": 1.0}
    assert shares([[0, 0], [150, 50]], [200] * 10)["forward"] == pytest.approx(0.75)


def test_a_timed_step_that_was_interrupted_does_not_decide_about_all() -> None:
    """One of seven steps of 0.25 ms waited 35 ms for a core: it stands for steps that took as long."""
    rows = [*[[200, 50]] * 6, [200, 35_000]]
    assert shares(rows, [250] * 4000)["other"] < 0.25
    # The other of its kind were long as well.
    assert shares(rows, [*[250] * 2000, *[35_200] * 20])["other"] > 0.6


def test_long_steps_of_the_script_itself_keep_their_part() -> None:
    """Every eighth step takes 16 ms outside the model, the others 1 ms."""
    rows = [*[[900, 100]] * 7, [900, 15_100]]
    wholes = [*[1_000] * 700, *[16_000] * 100]
    assert shares(rows, wholes)["other"] == pytest.approx((70 + 1510) / 2300, rel=0.01)


def test_what_happens_in_each_sixteenth_step_only_has_its_part() -> None:
    """A rollout of 30 ms before 16 updates of 1 ms. Three of 199 steps of a window are timed, most of them short."""
    random, kinds, told, true = Random(0), StepKinds(), Counter[str](), Counter[str]()
    for number in range(60):
        first = number * 199
        steps = [[900, 30_100 if (first + step) % 16 == 0 else 100] for step in range(199)]
        timed = set(random.sample(range(199), 3))
        rows = [[ns * US for ns in step] for place, step in enumerate(steps) if place in timed]
        wholes = [sum(step) * US for place, step in enumerate(steps) if place not in timed]
        phases = Window(NAMES, 0, rows, [0, 0], wholes=wholes, kinds=kinds).phases()
        if number >= 10:  # until then, one of the long ones was timed
            told.update({name: phase["host_ns"] for name, phase in phases.items()})
            true.update(
                forward=sum(step[0] for step in steps) * US, other=sum(step[1] for step in steps) * US
            )
    assert told["other"] / told.total() == pytest.approx(true["other"] / true.total(), abs=0.01)

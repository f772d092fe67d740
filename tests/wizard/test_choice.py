"""The recommendation: the present configuration is measured, too, and noise leads to no recommendation."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from situations import BASE, situation
from test_verify import STEP_S, FakeSide, _sides  # noqa: F401  the fixture installs the fake processes

from ndd_engine.wizard.planner import present_batch, unprobed_present
from ndd_engine.wizard.proposals import Answers, Batch, Measured, Proposal
from ndd_engine.wizard.session import (
    Choice,
    ProposalSet,
    choose,
    comparison,
    listed,
    to_verify,
    verify,
    with_present,
)

BUDGET_S = 60.0
Noise = Callable[[int], float]


def row(micro: int, present: bool = False) -> Proposal:
    return replace(
        BASE,
        batch=Batch(micro, 1),
        memory_bytes=100,
        free_bytes=1000,
        given=(f"batch.micro={micro}",) if present else None,
    )


def measured(
    step_s: dict[int, float], present: int, noise: Noise, budget_s: float = BUDGET_S
) -> tuple[Choice, list[Proposal]]:
    """The choice among micro-batches with these true step times, on a machine with this noise."""
    given = Answers()
    FakeSide.now_s = 0.0
    FakeSide.noise = staticmethod(lambda micro: noise(micro) * step_s[micro] / STEP_S[micro])  # type: ignore[assignment]
    rows = [row(micro, micro == present) for micro in step_s]
    there = situation(gpu=None)
    found = verify(there, given, rows, budget_s, lambda *_: None, threading.Event(), FakeSide.clock)
    return choose(found, given), found


def quiet(_micro: int) -> float:
    return 1.0


def noisy(seed: int, spread: float) -> Noise:
    source = random.Random(seed)
    return lambda _micro: source.lognormvariate(0.0, spread)


# True items per second: 2 -> 20, 4 -> 12, 8 -> 10: the present one is 1.67 times as fast as the next.
PRESENT_BEST = {2: 0.1, 4: 0.333, 8: 0.8}
# True items per second: 2 -> 20, 4 -> 40.
OTHER_BEST = {2: 0.1, 4: 0.1, 8: 0.8}


def test_a_quiet_machine_leads_to_the_fastest() -> None:
    choice, found = measured(OTHER_BEST, 2, quiet)
    assert choice.best is not None and choice.best.batch.micro == 4
    assert choice.found is not None and choice.found.low > 1.9
    assert "2.00x" in choice.text and "2.00x" in comparison(choice.best, found)
    assert listed(found, Answers(), choice)[0].batch.micro == 4


@pytest.mark.parametrize("step_s", [PRESENT_BEST, {2: 0.1, 4: 0.1999, 8: 0.8}], ids=["fastest", "equal"])
def test_the_present_configuration_stays_unless_another_is_faster(step_s: dict[int, float]) -> None:
    choice, _ = measured(step_s, 2, quiet)
    assert choice.best is not None and choice.best.present, choice.text


@pytest.mark.parametrize("spread", [0.3, 0.7, 1.5])
def test_a_noisy_machine_never_leads_to_a_slower_configuration(spread: float) -> None:
    undecided = 0
    for seed in range(200):
        choice, found = measured(PRESENT_BEST, 2, noisy(seed, spread))
        assert choice.best is None or choice.best.present, (seed, choice.text)
        if choice.best is None:
            undecided += 1
            assert listed(found, Answers(), choice)[0].present and "--budget" in choice.text
    assert undecided


def test_a_noisy_machine_is_measured_for_longer_until_the_difference_is_clear() -> None:
    rounds, clear = [], 0
    for seed in range(30):
        choice, found = measured({2: 0.1, 4: 0.15, 8: 0.8}, 2, noisy(seed, 0.12), budget_s=200.0)
        present = next(one.measured for one in found if one.present)
        assert present is not None
        rounds.append(len(present.rounds_s))
        if choice.best is not None:
            assert choice.best.batch.micro == 4
            clear += 1
    assert max(rounds) > 6
    assert clear > 3


def test_a_slow_first_round_leaves_time_to_compare() -> None:
    choice, found = measured({2: 0.1, 4: 0.1, 8: 20.0, 16: 20.0}, 2, quiet, budget_s=48.0)
    assert choice.best is not None and choice.best.batch.micro == 4, choice.text
    slow = next(one.measured for one in found if one.batch.micro == 8)
    assert slow is not None and len(slow.rounds_s) == 1


def test_the_end_of_the_budget_is_named() -> None:
    choice, _ = measured({2: 5.0, 4: 5.0, 8: 5.0}, 2, lambda _micro: 3.0)
    assert choice.best is None and "--budget" in choice.text


def test_a_present_configuration_that_fails_is_replaced() -> None:
    FakeSide.dies = 2
    choice, _ = measured(OTHER_BEST, 2, quiet)
    assert choice.best is not None and choice.best.batch.micro == 4
    assert "out of memory" in choice.text


def results(present_s: Sequence[float], other_s: Sequence[float], **changes: object) -> list[Proposal]:
    rounds = ((0.1, 0.1, *present_s), (0.1, 0.1, *other_s))
    rows = (row(8, True), replace(row(8), batch=Batch(16, 1)))
    found = [
        replace(one, measured=Measured(seconds[-1], 100 * (1 + place), rounds_s=seconds))
        for place, (one, seconds) in enumerate(zip(rows, rounds, strict=True))
    ]
    return [replace(found[0], **changes), found[1]]  # type: ignore[arg-type]


def test_limits_that_exclude_the_present_configuration_allow_a_slower_one() -> None:
    four = (0.1, 0.1, 0.1, 0.1)
    slower = tuple(value * 4 for value in four)
    choice = choose(results(four, slower, allowed=False), Answers())
    assert choice.best is not None and not choice.best.present
    assert "0.50x" in choice.text and "0.50x" in comparison(choice.best, results(four, slower))
    wild = (0.1, 0.5, 0.05, 0.9)
    assert choose(results(four, wild, allowed=False), Answers()).best is None


def test_low_memory_accepts_a_little_less_speed() -> None:
    four = (0.1, 0.1, 0.1, 0.1)
    rows = results(four, [value * 2 * 1.1 for value in four])
    lean = [
        replace(one, measured=replace(one.measured, memory_bytes=kept))
        for one, kept in zip(rows, (900, 90), strict=True)
        if one.measured
    ]
    assert choose(lean, Answers(goal="low-memory")).best == lean[1]
    assert choose(lean, Answers()).best == lean[0]


def test_the_present_configuration_is_always_measured() -> None:
    there = situation(gpu=None)
    present = unprobed_present(there, Answers(workload="chartext", sets=("workload.size=tiny",)))
    assert present is not None and present.sets() == () and present.batch == present_batch(there.config)
    others = tuple(row(micro) for micro in (2, 4, 8, 16, 32, 64, 128))
    proposed = ProposalSet(there, (), (*others, present))
    chosen = to_verify(proposed, Answers())
    assert chosen[0] is present and len(chosen) == 6
    assert with_present(others[:1], proposed) == [present, others[0]]
    assert with_present([present], proposed) == [present]


def test_the_size_auto_is_measured_as_it_was_chosen() -> None:
    there = situation(gpu=None)
    present = unprobed_present(there, Answers(workload="chartext", sets=("workload.size=auto",)))
    assert present is not None and "workload.size=tiny" in present.sets()
    assert not unprobed_present(situation(), Answers(workload="chartext"))

"""Verification by successive halving with fake processes, and the recommendation: noise leads to none."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from situations import BASE, OPENED, situation

from ndd_engine.child import ChildError
from ndd_engine.trial.outcome import SideFacts
from ndd_engine.wizard import session as module
from ndd_engine.wizard.planner import present_batch, unprobed_present
from ndd_engine.wizard.proposals import Answers, Batch, Measured, Proposal
from ndd_engine.wizard.session import (
    Choice,
    ProposalSet,
    best_measured,
    by_measured,
    choose,
    comparison,
    listed,
    to_verify,
    verify,
    with_present,
)

ROOM = 1000
STEP_S = {2: 0.5, 4: 0.6, 8: 0.7, 16: 5.0}  # 8 has the highest throughput


class FakeSide:
    """A process that trains instantly. open: the current ones; most: the maximum at one time."""

    open: set[FakeSide]
    most: int
    steps: dict[int, list[int]]
    dies: int | None
    now_s: float  # time on the machine: what was trained
    noise: Callable[[int], float]  # factor on the time of a block, by micro-batch

    @classmethod
    def clock(cls) -> float:
        return cls.now_s

    def __init__(self, spec: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        assert not environment  # the same environment as in training
        sets = dict(item.split("=") for item in spec["sets"])
        self.micro = int(sets["batch.micro"])
        self.facts = SideFacts(peak_bytes=self.micro * 10)
        FakeSide.open.add(self)
        FakeSide.most = max(FakeSide.most, len(FakeSide.open))

    def prepare(self, _limit_s: float, _tick: Any) -> None:
        if self.micro == FakeSide.dies:
            raise ChildError("oom", "the step does not fit")

    def train(self, steps: int, _limit_s: float, tick: Any, **_: Any) -> tuple[float, int]:
        tick(None)
        FakeSide.steps.setdefault(self.micro, []).append(steps)
        seconds = steps * STEP_S[self.micro] * FakeSide.noise(self.micro)
        FakeSide.now_s += min(seconds, 4.0)
        return seconds, steps

    def learn(self, _tick: Any) -> None:
        return

    def close(self) -> None:
        FakeSide.open.discard(self)


@pytest.fixture(autouse=True)
def _sides(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSide.open, FakeSide.most, FakeSide.steps, FakeSide.dies = set(), 0, {}, None
    FakeSide.now_s, FakeSide.noise = 0.0, staticmethod(lambda _micro: 1.0)
    monkeypatch.setattr(module, "SideProcess", FakeSide)


def proposals(memory: int) -> list[Proposal]:
    return [
        replace(BASE, batch=Batch(micro, 1), memory_bytes=memory, free_bytes=ROOM) for micro in sorted(STEP_S)
    ]


def race(
    rows: list[Proposal], budget_s: float = 600.0, stop: threading.Event | None = None
) -> list[Proposal]:
    there = situation(gpu=None)
    return verify(
        there, Answers(), rows, budget_s, lambda *_: None, stop or threading.Event(), FakeSide.clock
    )


def test_faster_proposals_advance() -> None:
    found = race(proposals(100))
    assert [one.measured.step_s for one in found if one.measured] == pytest.approx(list(STEP_S.values()))
    # A warm-up and one block per round; the two best take part in all rounds.
    assert {micro: len(steps) for micro, steps in FakeSide.steps.items()} == {2: 2, 4: 7, 8: 7, 16: 2}
    spreads = [one.measured.spread for one in found if one.measured]
    assert spreads[0] is None and spreads[1:3] == pytest.approx([0.0, 0.0])
    assert not FakeSide.open


def test_a_machine_that_slows_down_favours_neither_finalist(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = 0

    def train(self: FakeSide, steps: int, *_: Any, **__: Any) -> tuple[float, int]:
        nonlocal blocks
        blocks += 1
        return steps * self.micro * 0.1 * 1.05**blocks, steps  # equal throughput

    monkeypatch.setattr(FakeSide, "train", train)
    found = race(proposals(100))
    known = {one.batch.micro: one.measured for one in found}
    best = [micro for micro, one in known.items() if one is not None and len(one.rounds_s) == 6]
    assert len(best) == 2
    rates = [micro / one.step_s for micro in best if (one := known[micro]) is not None and one.step_s]
    assert rates[0] == pytest.approx(rates[1], rel=0.01)


@pytest.mark.parametrize(("memory", "most"), [(100, 4), (400, 2), (900, 1)])
def test_waiting_processes_make_room_for_the_next(memory: int, most: int) -> None:
    found = race(proposals(memory))
    assert FakeSide.most == most
    assert all(one.measured is not None and one.measured.step_s is not None for one in found)
    assert not FakeSide.open


def test_a_proposal_of_unknown_memory_is_measured_alone() -> None:
    race([replace(one, memory_bytes=None) for one in proposals(1)])
    assert FakeSide.most == 1


def test_out_of_memory_is_a_result_and_the_others_continue() -> None:
    FakeSide.dies = 8
    found = {one.batch.micro: one.measured for one in race(proposals(100))}
    assert found[8] is not None and found[8].step_s is None
    assert "out of memory" in found[8].verdict
    assert found[4] is not None and found[4].step_s == pytest.approx(0.6)
    assert not FakeSide.open


def test_a_failure_in_a_later_round_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = FakeSide.train

    def train(self: FakeSide, *given: Any, **named: Any) -> tuple[float, int]:
        if self.micro == 8 and len(FakeSide.steps.get(8, [])) == 3:
            raise ChildError("oom", "a longer batch does not fit")
        return plain(self, *given, **named)

    monkeypatch.setattr(FakeSide, "train", train)
    found = race(proposals(100))
    died = next(one for one in found if one.batch.micro == 8)
    assert "a longer batch" in died.failed
    best = best_measured(found, Answers())
    assert best is not None and best.batch.micro != 8


@pytest.mark.parametrize("after", [0, 2, 5])
def test_stopping_keeps_the_results(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    stop = threading.Event()
    plain, blocks = FakeSide.train, 0

    def train(self: FakeSide, *given: Any, **named: Any) -> tuple[float, int]:
        nonlocal blocks
        blocks += 1
        if blocks > after:
            stop.set()
        return plain(self, *given, **named)

    monkeypatch.setattr(FakeSide, "train", train)
    found = race(proposals(100), stop=stop)
    known = [one.measured for one in found if one.measured]
    # Each has two blocks in the first round: a warm-up and a measurement.
    assert [one.step_s is not None for one in known] == [index < after // 2 for index in range(4)]
    assert all(one.step_s is not None or one.verdict == "not measured" for one in known)
    assert not any(one.failed for one in found)
    assert not FakeSide.open


def test_proposals_over_the_limit_come_last() -> None:
    def seen(micro: int, step_s: float | None, memory: int | None) -> Proposal:
        verdict = "measured" if step_s else "out of memory: the step does not fit"
        return replace(
            BASE, batch=Batch(micro, 1), free_bytes=ROOM, measured=Measured(step_s, memory, verdict)
        )

    over, within, failed = seen(8, 0.1, ROOM + 1), seen(4, 0.1, ROOM), seen(2, None, None)
    assert best_measured([over, within, failed], Answers()) == within
    assert best_measured([over, failed], Answers()) == over and over.over_bytes == 1
    assert best_measured([failed], Answers()) is None
    assert by_measured([failed, over, within], Answers()) == [within, over, failed]
    faster = seen(16, 0.2, ROOM)
    assert by_measured([within, failed, faster], Answers()) == [faster, within, failed]
    assert failed.failed and not within.failed


def test_on_a_gpu_the_context_is_included(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSide, "learn", lambda self, _tick: setattr(self.facts, "reserved_bytes", 70))
    there = situation(gpu=None, opened=replace(OPENED, context_bytes=500))
    found = verify(there, Answers(), proposals(100)[:1], 60.0, lambda *_: None, threading.Event())
    assert found[0].measured is not None and found[0].measured.memory_bytes == 570


# The recommendation.


BUDGET_S = 60.0
Noise = Callable[[int], float]


def row(micro: int, present: bool = False) -> Proposal:
    given = (f"batch.micro={micro}",) if present else None
    return replace(BASE, batch=Batch(micro, 1), memory_bytes=100, free_bytes=ROOM, given=given)


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
    for seed in range(80):
        choice, found = measured(PRESENT_BEST, 2, noisy(seed, spread))
        assert choice.best is None or choice.best.present, (seed, choice.text)
        if choice.best is None:
            undecided += 1
            assert listed(found, Answers(), choice)[0].present and "--budget" in choice.text
    assert undecided
    choice, _ = measured({2: 5.0, 4: 5.0, 8: 5.0}, 2, lambda _micro: 3.0)  # the budget ends
    assert choice.best is None and "--budget" in choice.text


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

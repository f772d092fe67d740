"""Simulated trials: the decisions of a real one, with processes and blocks drawn from a noise model."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import fmean

from ndd_engine.trial.blocks import (
    BLOCKS,
    FEWEST_ABBA,
    LEAST_S,
    OVERHEAD,
    SHORT_S,
    STEPS_ENOUGH,
    SWITCH_S,
    plan_pairs,
)
from ndd_engine.trial.estimates import (
    ENOUGH,
    Call,
    Estimate,
    OneProcess,
    Replicates,
    Usual,
    abba_log_ratio,
    judged,
    over,
    pooled,
)

# Rates of a segment in the order of an ABBA block (0: baseline) and of its reverse.
ORDERS = ((0, 1, 1, 0), (1, 0, 0, 1))


# What both sides differ by in one process, as a share of what two processes differ by; an assumption.
TOGETHER = 0.1


@dataclass(frozen=True)
class Noise:
    """Noise of log-rates, as standard deviations.

    process: of the log-ratio of a pair of processes. block: of an ABBA block with segments of SHORT_S. heavy: whether
    both follow Student's t with 3 degrees of freedom. trend: of both sides per second of a pair's life, fading.
    wander: of the speed of the machine, first-order autoregressive over segments with correlation 0.98.
    """

    process: float = 0.01
    block: float = 0.015
    heavy: bool = False
    trend: float = 0.0
    wander: float = 0.0


MODELS = {
    "processes 0.5 %, blocks 0.5 %": Noise(0.005, 0.005),
    "processes 1 %, blocks 1 %": Noise(0.01, 0.01),
    "processes 1 %, blocks 2 %": Noise(0.01, 0.02),
    "processes 1.5 %, blocks 3 %": Noise(0.015, 0.03),
    "drift": Noise(0.01, 0.01, trend=0.01, wander=0.03),
    "heavy tails": Noise(0.01, 0.015, heavy=True),
}


@dataclass(frozen=True)
class Course:
    """What the time of a trial goes to, in seconds. start_s: of a pair of processes. step_s: of a step."""

    budget_s: float = 60.0
    start_s: float = 5.0
    step_s: float = 0.01


@dataclass(frozen=True)
class Outcome:
    """The result of one simulated trial. covered: whether the interval contains the true ratio.

    between: what its pairs differ by, for `History`.
    """

    verdict: Call
    covered: bool
    found: Estimate
    seconds: float
    between: Usual | None = None


class Machine:
    """A simulated machine. gain: the true ratio. random: its source."""

    def __init__(self, noise: Noise, gain: float, source: random.Random) -> None:
        self.noise, self.gain, self.random = noise, math.log(gain), source
        self._speed = 0.0
        self._age = 0.0
        self._offset = 0.0
        self._trends = (0.0, 0.0)

    def start(self, together: bool = False) -> None:
        """A new pair of processes, or one process for both sides, which differ by a fraction of that."""
        noise = self.noise
        self._offset = self._draw(noise.process * (TOGETHER if together else 1))
        self._age = 0.0
        trend = self._draw(noise.trend)
        self._trends = (trend, trend if together else self._draw(noise.trend))

    def block(self, order: Sequence[int], segment_s: float) -> float:
        """The log-ratio of an ABBA block."""
        noise = self.noise
        rates: tuple[list[float], list[float]] = ([], [])
        for side in order:
            self._age += segment_s
            self._speed = 0.98 * self._speed + self._draw(noise.wander * math.sqrt(1 - 0.98**2))
            # The variance of a block is that of a segment: the mean of two differences.
            own = self._draw(noise.block * math.sqrt(SHORT_S / segment_s))
            late = self._trends[side] * math.exp(-self._age / 3)
            value = self._speed + own + late + side * (self.gain + self._offset)
            rates[side].append(math.exp(value))
        (a1, a2), (b1, b2) = rates
        return abba_log_ratio(a1, b1, b2, a2)

    def _draw(self, sd: float) -> float:
        if not sd:
            return 0.0
        if not self.noise.heavy:
            return self.random.gauss(0, sd)
        # Student's t with 3 degrees of freedom has the variance 3.
        square = self.random.gammavariate(1.5, 2.0)
        return sd * self.random.gauss(0, 1) / math.sqrt(square)


def trial(machine: Machine, course: Course, usual: Usual | None = None) -> Outcome:
    """A trial in pairs of processes, as trial.run_trial."""
    spent = course.start_s
    least_s = BLOCKS * OVERHEAD * max(LEAST_S, course.step_s)
    pairs, blocks = plan_pairs(course.budget_s - spent, course.start_s, least_s, usual)
    abba_s = least_s
    if pairs:
        # Longer segments instead of more blocks.
        longer = min(blocks / 2, 2 * SHORT_S / LEAST_S) if blocks > 2 else 1.0
        abba_s = least_s * longer
        pairs, blocks = plan_pairs(course.budget_s - spent, course.start_s, abba_s, usual)
    replicates = Replicates(usual, pairs < ENOUGH)
    verdict: Call | None = None
    for number in range(1000):
        replicates.begin()
        machine.start()
        for _ in range(blocks):
            replicates.add(machine.block(ORDERS[number % 2], abba_s / BLOCKS / OVERHEAD))
            spent += abba_s
            if replicates.few_pairs and replicates.early() is not None:
                break
        if (verdict := replicates.early()) is not None:
            break
        blocks = min(blocks, round((course.budget_s - spent - course.start_s) / abba_s))
        if blocks < FEWEST_ABBA:
            if len(replicates.pairs) < ENOUGH:
                for _ in range(int((course.budget_s - spent) / abba_s)):
                    replicates.add(machine.block(ORDERS[number % 2], abba_s / BLOCKS / OVERHEAD))
                    spent += abba_s
            break
        spent += course.start_s
    found = replicates.estimate()
    assert found is not None
    covered, between = _covers(found, machine), replicates.between()
    return Outcome(verdict or replicates.last(), covered, found, spent, between)


def switched_trial(machine: Machine, course: Course) -> Outcome:
    """A trial in one process that switches between both sides."""
    segment_s = max(SWITCH_S, STEPS_ENOUGH * course.step_s)
    spent, abba_s = course.start_s, BLOCKS * OVERHEAD * segment_s
    machine.start(together=True)
    blocks = OneProcess()
    verdict: Call | None = None
    for order in cycle(ORDERS):
        blocks.add(machine.block(order, segment_s))
        spent += abba_s
        if (verdict := blocks.early()) is not None or spent + abba_s > course.budget_s:
            break
    found = blocks.estimate()
    assert found is not None
    return Outcome(verdict or blocks.last(), _covers(found, machine), found, spent)


def _covers(found: Estimate, machine: Machine) -> bool:
    return found.low <= math.exp(machine.gain) <= found.high


def rates(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Shares of the verdicts and of intervals that contain the truth; mean seconds and pairs."""
    count = len(outcomes)
    shares = {
        name: sum(one.verdict == name for one in outcomes) / count
        for name in ("faster", "slower", "no difference", "inconclusive")
    }
    return {
        **shares,
        "covered": sum(one.covered for one in outcomes) / count,
        "seconds": fmean(one.seconds for one in outcomes),
        "pairs": fmean(one.found.pairs for one in outcomes),
    }


def simulate(
    noise: Noise,
    gain: float,
    count: int,
    course: Course | None = None,
    seed: int = 13,
    earlier: int = 0,
    switched: bool = False,
) -> list[Outcome]:
    """`count` independent trials, in pairs of processes or in one process (switched).

    earlier: trials with cheap starts from which a machine knows its processes.
    """
    source = random.Random(seed)
    course = course or Course()
    if switched:
        return [switched_trial(Machine(noise, gain, source), course) for _ in range(count)]

    def usual() -> Usual | None:
        known = (trial(Machine(noise, 1.0, source), Course(start_s=3.0)).between for _ in range(earlier))
        return pooled([one for one in known if one is not None]) if earlier else None

    found: list[Outcome] = []
    for number in range(count):
        if number % 20 == 0:
            learned = usual()  # another machine
        found.append(trial(Machine(noise, gain, source), course, learned))
    return found


def ladder(noise: Noise, settings: int, source: random.Random, course: Course | None = None) -> int:
    """How many of so many null settings a tuning run keeps, as trial.tuning: trial, then confirmation."""
    course = course or Course()
    kept: Estimate | None = None
    count = 0
    for _ in range(settings):
        if trial(Machine(noise, 1.0, source), course).verdict != "faster":
            continue
        total = trial(Machine(noise, 1.0, source), course).found
        added = total if kept is None else over(total, kept)
        if judged(added.ratio, added.low, added.high) == "faster":
            kept, count = total, count + 1
    return count

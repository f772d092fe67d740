"""A trial: candidate vs. baseline on this machine, in ABBA blocks of one process or of several pairs of processes.

One process switches between both sides where the change allows it. Otherwise each side has a process of its own, and
pairs of them are started again and again. The candidate of the first pair is prepared first and alone, so
that an out-of-memory error is its own; the baseline's process only imports meanwhile. If both do not fit into memory at
once, only one process is open at a time.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from itertools import count, cycle
from typing import Self

from ndd_engine.child import StoppedError
from ndd_engine.config import Draft, read
from ndd_engine.errors import UsageError
from ndd_engine.hardware.load import LoadWatch
from ndd_engine.record.events import TrialEvent
from ndd_engine.text import duration
from ndd_engine.train.request import preflight
from ndd_watch.changes import LOADER, switched_by

from .blocks import (
    FEWEST_ABBA,
    BlockPlan,
    BlocksDoNotFitError,
    SidePace,
    plan_blocks,
    plan_pairs,
    plan_switches,
)
from .estimates import DIFFERENT, ENOUGH, FLOOR, OneProcess, Replicates, Usual, abba_log_ratio
from .outcome import PairVariances, differences, result
from .pausing import alone
from .sides import ESTIMATE_S, SIDES, Budget, OwnSides, SideFailedError, Sides, Tell
from .trial_request import MEASURING, Progress, TrialRequest

# Share of a compilation that further processes save by reading the caches; an estimate, for planning only.
CACHED = 0.6
# The largest budget that an inconclusive result recommends, as a multiple of its own.
MOST_TIMES = 20
# Ratios up to this count as similar sides, from which the usual difference between processes is learned.
SIMILAR = 1.25
# Sides in the order of the runs of a block, alternating between pairs.
ORDERS = ((0, 1, 1, 0), (1, 0, 0, 1))


class NotMeasurableError(Exception):
    """Nothing can be measured; the message says why."""


def drafts(request: TrialRequest) -> tuple[Draft, Draft]:
    """(baseline, candidate). Raises UsageError if the request cannot be tried, ConfigError for mistakes in either."""
    if not request.sets:
        raise UsageError(
            "no settings to try: add --set KEY=VALUE (the length of the run applies to both sides of a trial)"
        )
    if not request.budget_s > 0:
        raise UsageError(f"--budget {request.budget_s:g}: allowed: more than 0 seconds")
    of = request.base
    base = read(of.config, of.sets, of.workload)
    change = read(of.config, (*of.sets, *request.sets), of.workload)
    configs = [preflight(draft, use_torch=False) for draft in (base, change)]
    if base.size == change.size and configs[0] == configs[1]:
        raise UsageError(f"{', '.join(request.sets)}: already set in {of.name}; there is nothing to compare")
    return base, change


def check(request: TrialRequest) -> dict[str, tuple[object, object]]:
    """The keys that differ, with both values. Raises UsageError if the request cannot be tried."""
    base, change = drafts(request)
    return differences(base.resolve(), change.resolve())


def run_trial(request: TrialRequest, tell: Tell, stop: threading.Event | None = None) -> TrialEvent:
    """Measure candidate vs. baseline. Failures of either are results; mistakes in the request raise UsageError.

    tell: called on this thread, a few times per second. stop: set it to end early with what is known. Waits while
    another trial measures on the same device; this does not count towards the budget. Does not pause or record
    anything, see `pausing` and `store`. Leaves no process and no file behind.
    """
    base, change = drafts(request)

    def waiting(text: str) -> None:
        tell(Progress(text, 0.0, request.budget_s))

    configs = base.resolve(), change.resolve()
    device, ranks = configs[0].run.device, max(config.parallel.ranks for config in configs)
    with alone(device, waiting, stop, ranks=ranks, what=request.title):
        sides = OwnSides(request, (base, change), Budget(request.budget_s, tell, stop))
        with Trial(request, sides) as trial:
            return trial.run()


class Trial:
    """A trial in progress. sides: what is compared; they know the budget."""

    def __init__(self, request: TrialRequest, sides: Sides) -> None:
        self.request = request
        self._sides, self._budget = sides, sides.budget
        self._exclusive = False
        self._history = PairVariances()
        self._load = LoadWatch()
        # Seconds to start a pair of processes, and of a block.
        self._start_s = self._abba_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sides.clean_up()

    def run(self) -> TrialEvent:
        """Measure and return the result."""
        try:
            verdict, reason = self._measure()
        except StoppedError:
            verdict, reason = "stopped", "stopped before there was a result"
        except NotMeasurableError as error:
            verdict, reason = "inconclusive", str(error)
        except (BlocksDoNotFitError, SideFailedError) as error:
            verdict, reason = self._interrupted(error)
        self._sides.speeds()
        facts = self._sides.facts
        found = self._replicates.estimate()
        return result(
            self.request, verdict, reason, found, (facts[0], facts[1]), self._sides.changed, self._budget.elapsed_s,
            self._sides.note, self._sides.doubt, self._load.taken(),
        )  # fmt: skip

    def _measure(self) -> tuple[str, str]:
        self._sides.choose()
        if not self._sides.switches or self.request.restarts:
            return self._in_pairs()
        try:
            return self._in_one_process()
        except SideFailedError as error:
            if error.kind == "late" or (error.kind == "ended" and self._replicates.blocks):
                raise
            first = error
        # Processes of their own show which side fails, and may have enough memory.
        self._sides.close()
        self._sides.forget()
        try:
            return self._in_pairs()
        except (SideFailedError, BlocksDoNotFitError) as error:
            if isinstance(error, SideFailedError) and error.kind != "late":
                raise
            raise first from None  # the rest of the budget was too short to find out

    def _in_one_process(self) -> tuple[str, str]:
        """Blocks of one process that switches between both sides."""
        sides = self._sides
        base_s, change_s = sides.open_one()
        plan = self._plan_switches(base_s, change_s)
        self._budget.replicates = OneProcess()
        fresh = True
        for order in cycle(ORDERS):
            try:
                self._blocks(order, plan, 1)
            except SideFailedError as error:
                if error.kind != "ended" or (fresh and not self._replicates.blocks):
                    raise
                if fresh:
                    break
                sides.close()
                sides.open_one()
                fresh = True
                continue
            fresh = False
            if self._budget.left_s < self._abba_s or self._clear():
                break
        sides.learn()
        return self._verdict()

    def _in_pairs(self) -> tuple[str, str]:
        """Blocks of several pairs of processes."""
        plan, blocks = self._first_pair()
        for number in count(1):
            self._replicates.begin()
            try:
                self._pair(number, plan, blocks)
            except SideFailedError as error:
                # Where a script comes to its end, the blocks before that count, and another pair follows.
                if error.kind != "ended" or not self._replicates.current:
                    self._replicates.abandon()
                    if error.kind == "oom" and self._sides.count > 1 and not self._exclusive:
                        self._separate()
                        continue
                    if error.kind not in ("late", "ended") or not self._replicates.blocks:
                        raise
                    break  # what was measured so far counts
            if self._clear():
                break
            # A smaller pair is better than none.
            blocks = min(blocks, round((self._budget.left_s - self._start_s) / self._abba_s))
            if blocks < FEWEST_ABBA:
                self._use_rest(number, plan)
                break
        if (blocks := self._replicates.blocks) < FEWEST_ABBA:
            text = f"the budget is enough for {blocks} of at least {FEWEST_ABBA} ABBA blocks"
            raise BlocksDoNotFitError(text, self._start_s + FEWEST_ABBA * plan.abba_s)
        found, between = self._replicates.estimate(), self._replicates.between()
        # A large effect also scales the differences between processes.
        if between is not None and found is not None and max(found.ratio, 1 / found.ratio) < SIMILAR:
            self._history.add(self._sides.machine, between)
        return self._verdict()

    def _clear(self) -> bool:
        """Whether the result is clear before the budget is spent. Call it at the end of a pair."""
        replicates, within = self._replicates, self.request.within
        if within is None:
            return replicates.early() is not None
        found = replicates.estimate()
        return (
            found is not None and len(replicates.pairs) >= ENOUGH and found.high <= found.ratio * (1 + within)
        )

    def _verdict(self) -> tuple[str, str]:
        """(verdict, reason) of what was measured."""
        verdict, found = self._replicates.last(), self._replicates.estimate()
        if verdict in DIFFERENT and found is not None and self._sides.contradicts(found):
            text = "the mean speeds of both sides do not show the difference, since runs of a side differ too much"
            return "inconclusive", f"{text}; raise --budget"
        if verdict != "inconclusive":
            return verdict, ""
        noisy = f"too noisy to resolve a difference of {FLOOR * 100:.0f} %"
        times = self._replicates.needed()
        if times is None:
            return verdict, f"{noisy}; raise --budget"
        # Setup of the first pair included, which further time does not repeat.
        needed_s = self._budget.elapsed_s * times
        return verdict, f"{noisy}; {self._more(max(needed_s, self.request.budget_s * 1.2))}"

    def _more(self, needed_s: float) -> str:
        """The advice to raise the budget to so many seconds."""
        most_s = MOST_TIMES * self.request.budget_s
        if needed_s > most_s:
            return f"raise --budget above {most_s:g}"
        seconds = needed_s * 1.1
        return (
            f"raise --budget to about {math.ceil(seconds / 10) * 10 if seconds > 20 else math.ceil(seconds)}"
        )

    def _interrupted(self, error: BlocksDoNotFitError | SideFailedError) -> tuple[str, str]:
        """Where a process had no time left to start, or its script came to its end, the blocks before that count."""
        harmless = isinstance(error, BlocksDoNotFitError) or error.kind in ("late", "ended")
        if harmless and (found := self._verdict())[0] != "inconclusive":
            return found
        if isinstance(error, SideFailedError):
            return self._failed(error)
        return "inconclusive", f"{error}; {self._more((self._budget.elapsed_s + error.needed_s) * 1.2)}"

    def _failed(self, error: SideFailedError) -> tuple[str, str]:
        if error.kind == "late":
            setup = self._sides.facts[error.index].prepare_s is None
            why = f"setup took more than {self._budget.elapsed_s:.0f} s" if setup else str(error)
            return "inconclusive", f"{why}; raise --budget above {self.request.budget_s:g}"
        if error.kind == "ended":
            return "inconclusive", f"{error} before enough was measured; let it train for longer"
        if error.index == 0:
            return "failed", f"the baseline itself fails: {error}"
        return ("out of memory" if error.kind == "oom" else "failed"), str(error)

    @property
    def _replicates(self) -> Replicates:
        """What was measured so far."""
        return self._budget.replicates

    # Planning.

    def _plan_switches(self, base_s: float, change_s: float) -> BlockPlan:
        """The runs of one process that switches between both sides. base_s, change_s: seconds of a step."""
        by_epochs, budget = self._sides.by_epochs, self._budget
        loads = bool(switched_by(LOADER) & set(self._sides.changed))
        gpu = self._sides.facts[0].device.startswith("cuda")
        base, change = self._paces(base_s, change_s)
        plan = plan_switches(base, change, budget.left_s, by_epochs, loads, gpu)
        if plan.within or by_epochs:
            return plan
        paces, _ = self._timed(plan, base, change)
        return plan_switches(*paces, budget.left_s, by_epochs, loads, gpu)

    def _plan_pairs(self, base_s: float, change_s: float, usual: Usual) -> BlockPlan:
        """The runs of pairs of processes. usual: see `plan_pairs`."""
        base, change = self._paces(base_s, change_s)
        by_epochs, budget = self._sides.by_epochs, self._budget
        plan = plan_blocks(base, change, budget.left_s, by_epochs, True, self._start_s, usual)
        if plan.within or self._exclusive or by_epochs:
            return plan
        paces, whole = self._timed(plan, base, change)
        return plan_blocks(*paces, budget.left_s, by_epochs, whole, self._start_s, usual)

    def _paces(self, base_s: float, change_s: float) -> tuple[SidePace, SidePace]:
        if missing := self._sides.never_happens():
            raise NotMeasurableError(missing)
        if unlike := self._sides.compare_items():
            raise NotMeasurableError(unlike)
        if self._budget.left_s < self._budget.budget_s / 10:
            enough_s = FEWEST_ABBA * 4 * max(base_s, change_s, ESTIMATE_S)
            took = duration(self._budget.elapsed_s)
            text = f"starting both sides, warming up and timing their first steps took {took}"
            raise BlocksDoNotFitError(text, enough_s)
        base, change = self._pace(0, base_s), self._pace(1, change_s)
        if self._sides.by_epochs:
            # The first estimate does not show the cost of the start of an epoch.
            return self._over_epoch(0, base), self._over_epoch(1, change)
        return base, change

    def _pace(self, index: int, step_s: float) -> SidePace:
        facts = self._sides.facts[index]
        return SidePace(
            facts.items_per_step, facts.steps_per_epoch, step_s, self._sides.period(index, step_s)
        )

    def _over_epoch(self, index: int, pace: SidePace) -> SidePace:
        """The pace over a whole epoch, its start included; unchanged if an epoch takes too long."""
        limit_s = self._budget.left_s / (FEWEST_ABBA * 2)
        seconds, steps = self._sides.train(index, pace.per_epoch, "timing a whole epoch", until_s=limit_s)
        return replace(pace, step_s=seconds / steps) if steps == pace.per_epoch else pace

    def _timed(
        self, plan: BlockPlan, base: SidePace, change: SidePace
    ) -> tuple[tuple[SidePace, SidePace], bool]:
        """The paces over a whole run each, which show the cost of periodic events, and whether the runs fit."""
        paces, whole = [], True
        for index, pace in enumerate((base, change)):
            limit_s = self._budget.left_s / (FEWEST_ABBA * 4)
            seconds, steps = self._sides.train(
                index, plan.steps[index], "timing a whole run", plan, until_s=limit_s
            )
            all_of = steps == plan.steps[index]
            whole = whole and all_of
            paces.append(replace(pace, step_s=max(seconds / steps, 0 if all_of else pace.step_s)))
        return (paces[0], paces[1]), whole

    # Pairs.

    def _first_pair(self) -> tuple[BlockPlan, int]:
        """Start the first pair, and plan: (the runs of a block, blocks per pair)."""
        begin = self._budget.elapsed_s
        sides = self._sides
        sides.open(1, 0)
        change_s = sides.prepare(1)
        try:
            base_s = sides.prepare(0)
        except SideFailedError as error:
            if error.kind != "oom" or sides.count < 2:
                raise
            self._separate()
            sides.open(0)
            base_s = sides.prepare(0)
        cached_s = CACHED * sum(side.compile_s or 0.0 for side in sides.facts)
        self._start_s = max(self._budget.elapsed_s - begin - cached_s, 0.0)
        usual = self._history.usual(self._sides.machine)
        plan = self._plan_pairs(base_s, change_s, usual)
        pairs, blocks = plan_pairs(self._budget.left_s, self._start_s, plan.abba_s, usual)
        self._budget.replicates = Replicates(usual, pairs < ENOUGH)
        self._abba_s = plan.abba_s
        return plan, max(blocks, FEWEST_ABBA)

    def _separate(self) -> None:
        """Both do not fit at once: from here on only one process is open at a time."""
        self._exclusive = True
        self._budget.replicates = Replicates(self._replicates.usual, self._replicates.few_pairs)
        self._sides.forget()
        self._sides.close()

    def _pair(self, number: int, plan: BlockPlan, blocks: int) -> None:
        """Measure the blocks of a pair of processes. number: from 1."""
        order = ORDERS[(number - 1) % 2]
        if self._exclusive:
            self._in_turn(order[:2], plan, blocks)
            return
        sides, begin = self._sides, self._budget.elapsed_s
        if number > 1:
            sides.close()
            # In the first pair, the candidate is prepared first.
            first = 1 if number % 2 else 0
            sides.open(first, 1 - first)
            for index in (first, 1 - first):
                sides.prepare(index)
            self._start_s = self._budget.elapsed_s - begin
        self._blocks(order, plan, blocks)
        sides.learn()

    def _use_rest(self, number: int, plan: BlockPlan) -> None:
        """With few pairs, measure further blocks of the last one where no other pair fits."""
        few = len(self._replicates.pairs) < ENOUGH
        if few and not self._exclusive and self._sides.count == len(SIDES):
            self._blocks(ORDERS[(number - 1) % 2], plan, int(self._budget.left_s / self._abba_s))

    def _blocks(self, order: tuple[int, ...], plan: BlockPlan, blocks: int) -> None:
        """Measure ABBA blocks of the current pair, fewer if the budget ends or the result is clear."""
        sides, replicates, begin = self._sides, self._replicates, self._budget.elapsed_s
        for done in range(1, blocks + 1):
            rates: tuple[list[float], list[float]] = ([], [])
            for index in order:
                rates[index].append(sides.segment(index, plan))
            (a1, a2), (b1, b2) = rates
            replicates.add(abba_log_ratio(a1, b1, b2, a2))
            self._abba_s = (self._budget.elapsed_s - begin) / done
            self._budget.progress(MEASURING)
            over = self._budget.left_s < 0 and done >= FEWEST_ABBA
            if over or (replicates.few_pairs and self._clear()):
                break

    def _in_turn(self, order: tuple[int, ...], plan: BlockPlan, blocks: int) -> None:
        """A pair with one process at a time; drifts cancel between pairs, whose order alternates."""
        sides, begin, measured_s = self._sides, self._budget.elapsed_s, 0.0
        known_s = self._start_s if sides.count else 0.0  # one of them has started before
        rates: dict[int, list[float]] = {}
        for index in order:
            if not sides.is_open(index):
                sides.close()
                sides.open(index)
                sides.prepare(index)
            ready = self._budget.elapsed_s
            rates[index] = [sides.segment(index, plan) for _ in range(2 * blocks)]
            sides.learn()
            measured_s += self._budget.elapsed_s - ready
            sides.close(index)
        self._start_s = max(self._budget.elapsed_s - begin - measured_s, known_s)
        for a1, b1, b2, a2 in zip(rates[0][::2], rates[1][::2], rates[1][1::2], rates[0][1::2], strict=True):
            self._replicates.add(abba_log_ratio(a1, b1, b2, a2))
        self._budget.progress(MEASURING)

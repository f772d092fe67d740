"""A trial: candidate vs. baseline on this machine, in ABBA blocks of one process or of several pairs of processes.

One process switches between both sides where the change allows it. Otherwise each side has a process of its own, and
pairs of them are started again and again. The candidate of the first pair is prepared first and alone, so
that an out-of-memory error is its own; the baseline's process only imports meanwhile. If both do not fit into memory at
once, only one process is open at a time.
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Self

from ndd_engine.child import StoppedError, Tick, ticker
from ndd_engine.config import Draft, read
from ndd_engine.errors import UsageError
from ndd_engine.record.events import TrialEvent

from .blocks import FEWEST_ABBA, BlockPlan, BlocksDoNotFitError, can_switch, plan_pairs
from .drafts import drafts
from .estimates import ENOUGH, FLOOR, OneProcess, Replicates, abba_log_ratio
from .history import History
from .outcome import differences, result
from .pausing import alone
from .planning import NotMeasurableError, Planner
from .request import MEASURING, Base, Progress, TrialRequest
from .sides import SIDES, SideFailedError, Sides

Tell = Callable[[Progress], None]

# Interval of progress reports.
TELL_S = 0.5
# Share of a compilation that further processes save by reading the caches; an estimate, for planning only.
CACHED = 0.6
# The largest budget that an inconclusive result recommends, as a multiple of its own.
MOST_TIMES = 20
# Ratios up to this count as similar sides, from which the usual difference between processes is learned.
SIMILAR = 1.25
# Sides in the order of the runs of a block, alternating between pairs.
ORDERS = ((0, 1, 1, 0), (1, 0, 0, 1))


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
    with alone(device, waiting, stop, ranks=ranks), Trial(request, base, change, tell, stop) as trial:
        return trial.run()


class Trial:
    """A trial in progress. base, change: the drafts of both sides."""

    def __init__(
        self, request: TrialRequest, base: Draft, change: Draft, tell: Tell, stop: threading.Event | None
    ) -> None:
        self.request = request
        self._begin = time.monotonic()
        self._tell, self._stop = tell, stop
        self._drafts = (base, change)
        self._chosen: tempfile.TemporaryDirectory[str] | None = None
        self._learn_difference()
        self._sides = self._make_sides(request.base)
        self._exclusive = False
        self._history = History()
        self._replicates = Replicates()
        # Seconds to start a pair of processes, and of a block.
        self._start_s = self._abba_s = 0.0
        self._stage = "starting"
        self._told_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sides.clean_up()
        if self._chosen is not None:
            self._chosen.cleanup()

    def run(self) -> TrialEvent:
        """Measure and return the result."""
        try:
            verdict, reason = self._measure()
        except StoppedError:
            verdict, reason = "stopped", "stopped before there was a result"
        except NotMeasurableError as error:
            verdict, reason = "inconclusive", str(error)
        except BlocksDoNotFitError as error:
            verdict, reason = (
                "inconclusive",
                f"{error}; {self._more((self._elapsed_s + error.needed_s) * 1.2)}",
            )
        except SideFailedError as error:
            verdict, reason = self._failed(error)
        self._sides.speeds()
        facts = self._sides.facts
        found = self._replicates.estimate()
        return result(
            self.request, verdict, reason, found, (facts[0], facts[1]), self._changed, self._elapsed_s,
            self._sides.note,
        )  # fmt: skip

    def _measure(self) -> tuple[str, str]:
        self._choose()
        if self._switches() and not self.request.restarts:
            try:
                return self._in_one_process()
            except SideFailedError as error:
                if error.kind == "late":
                    raise
                # Processes of their own show which side fails, and may have enough memory.
                self._sides.close()
                self._sides.forget()
        return self._in_pairs()

    def _switches(self) -> bool:
        """Whether one process can switch between both sides."""
        return can_switch(self._configs, self._changed)

    def _in_one_process(self) -> tuple[str, str]:
        """Blocks of one process that switches between both sides."""
        sides = self._sides
        base_s, change_s = sides.open_one()
        plan = self._planner().switches(base_s, change_s)
        self._replicates = OneProcess()
        for order in cycle(ORDERS):
            self._blocks(order, plan, 1)
            if self._left_s < self._abba_s or self._clear():
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
                self._replicates.abandon()
                if error.kind == "oom" and self._sides.count > 1 and not self._exclusive:
                    self._separate()
                    continue
                if error.kind != "late" or not self._replicates.blocks:
                    raise
                break  # what was measured so far counts
            if self._clear():
                break
            # A smaller pair is better than none.
            blocks = min(blocks, round((self._left_s - self._start_s) / self._abba_s))
            if blocks < FEWEST_ABBA:
                self._use_rest(number, plan)
                break
        if (blocks := self._replicates.blocks) < FEWEST_ABBA:
            text = f"the budget is enough for {blocks} of at least {FEWEST_ABBA} ABBA blocks"
            raise BlocksDoNotFitError(text, self._start_s + FEWEST_ABBA * plan.abba_s)
        found, between = self._replicates.estimate(), self._replicates.between()
        # A large effect also scales the differences between processes.
        if between is not None and found is not None and max(found.ratio, 1 / found.ratio) < SIMILAR:
            self._history.add(self._machine, between)
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
        verdict = self._replicates.last()
        if verdict != "inconclusive":
            return verdict, ""
        noisy = f"too noisy to resolve a difference of {FLOOR * 100:.0f} %"
        times = self._replicates.needed()
        if times is None:
            return verdict, f"{noisy}; raise --budget"
        # Setup of the first pair included, which further time does not repeat.
        needed_s = self._elapsed_s * times
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

    def _failed(self, error: SideFailedError) -> tuple[str, str]:
        if error.kind == "late":
            setup = self._sides.facts[error.index].prepare_s is None
            why = f"setup took more than {self._elapsed_s:.0f} s" if setup else str(error)
            return "inconclusive", f"{why}; raise --budget above {self.request.budget_s:g}"
        if error.index == 0:
            return "failed", f"the baseline itself fails: {error}"
        return ("out of memory" if error.kind == "oom" else "failed"), str(error)

    # Configurations.

    def _learn_difference(self) -> None:
        base, change = (draft.resolve() for draft in self._drafts)
        self._configs = (base, change)
        self._changed = list(differences(base, change))

    @property
    def _machine(self) -> str:
        """What processes differ on: the device, with several ranks also their number."""
        name = self._sides.facts[0].device_name
        ranks = max(config.parallel.ranks for config in self._configs)
        return f"{name}, {ranks} ranks" if name and ranks > 1 else name

    def _make_sides(self, base: Base) -> Sides:
        def tick(stage: str) -> Tick:
            self._stage = stage
            return self._tick()

        request = self.request
        return Sides(base, request.sets, self._changed, request.budget_s, lambda: self._left_s, tick)

    def _choose(self) -> None:
        """Choose the size "auto" once, so that all processes have the same."""
        if self._drafts[0].size != "auto":
            return
        found = self._sides.choose()
        self._chosen = tempfile.TemporaryDirectory(prefix="ndd-trial-")
        path = Path(self._chosen.name, "base.toml")
        path.write_text(found, encoding="utf-8")
        self._drafts = (read(path), read(path, self.request.sets))
        self._learn_difference()
        if not self._changed:
            raise UsageError(
                f"{', '.join(self.request.sets)}: {self.request.base.name} already resolves to this on this machine; "
                "there is nothing to compare"
            )
        self._sides.clean_up()
        self._sides = self._make_sides(replace(self.request.base, config=path, workload=None, sets=()))

    # Progress.

    def _tick(self) -> Tick:
        def tell(stage: str) -> None:
            if stage != self._stage or self._elapsed_s - self._told_s >= TELL_S:
                self._progress(stage)

        self._progress()
        return ticker(self._stage, tell, self._stop)

    def _progress(self, stage: str | None = None) -> None:
        self._stage = stage if stage is not None else self._stage
        self._told_s = self._elapsed_s
        found = self._replicates.estimate()
        numbers = {"ratio": found.ratio, "low": found.low, "high": found.high} if found is not None else {}
        blocks, pairs = self._replicates.blocks, self._replicates.processes
        self._tell(
            Progress(self._stage, self._elapsed_s, self.request.budget_s, blocks, pairs=pairs, **numbers)
        )

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begin

    @property
    def _left_s(self) -> float:
        return self.request.budget_s - self._elapsed_s

    # Pairs.

    def _first_pair(self) -> tuple[BlockPlan, int]:
        """Start the first pair, and plan: (the runs of a block, blocks per pair)."""
        begin = self._elapsed_s
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
        self._start_s = max(self._elapsed_s - begin - cached_s, 0.0)
        usual = self._history.usual(self._machine)
        plan = self._planner().pairs(base_s, change_s, self._start_s, usual, self._exclusive)
        pairs, blocks = plan_pairs(self._left_s, self._start_s, plan.abba_s, usual)
        self._replicates = Replicates(usual, pairs < ENOUGH)
        self._abba_s = plan.abba_s
        return plan, max(blocks, FEWEST_ABBA)

    def _planner(self) -> Planner:
        left_s, elapsed_s = (lambda: self._left_s), (lambda: self._elapsed_s)
        return Planner(self._sides, self._configs, self._changed, self.request.budget_s, left_s, elapsed_s)

    def _separate(self) -> None:
        """Both do not fit at once: from here on only one process is open at a time."""
        self._exclusive = True
        self._replicates = Replicates(self._replicates.usual, self._replicates.few_pairs)
        self._sides.forget()
        self._sides.close()

    def _pair(self, number: int, plan: BlockPlan, blocks: int) -> None:
        """Measure the blocks of a pair of processes. number: from 1."""
        order = ORDERS[(number - 1) % 2]
        if self._exclusive:
            self._in_turn(order[:2], plan, blocks)
            return
        sides, begin = self._sides, self._elapsed_s
        if number > 1:
            sides.close()
            # In the first pair, the candidate is prepared first.
            first = 1 if number % 2 else 0
            sides.open(first, 1 - first)
            for index in (first, 1 - first):
                sides.prepare(index)
            self._start_s = self._elapsed_s - begin
        self._blocks(order, plan, blocks)
        sides.learn()

    def _use_rest(self, number: int, plan: BlockPlan) -> None:
        """With few pairs, measure further blocks of the last one where no other pair fits."""
        few = len(self._replicates.pairs) < ENOUGH
        if few and not self._exclusive and self._sides.count == len(SIDES):
            self._blocks(ORDERS[(number - 1) % 2], plan, int(self._left_s / self._abba_s))

    def _blocks(self, order: tuple[int, ...], plan: BlockPlan, blocks: int) -> None:
        """Measure ABBA blocks of the current pair, fewer if the budget ends or the result is clear."""
        sides, replicates, begin = self._sides, self._replicates, self._elapsed_s
        for done in range(1, blocks + 1):
            rates: tuple[list[float], list[float]] = ([], [])
            for index in order:
                rates[index].append(sides.segment(index, plan))
            (a1, a2), (b1, b2) = rates
            replicates.add(abba_log_ratio(a1, b1, b2, a2))
            self._abba_s = (self._elapsed_s - begin) / done
            self._progress(MEASURING)
            over = self._left_s < 0 and done >= FEWEST_ABBA
            if over or (replicates.few_pairs and self._clear()):
                break

    def _in_turn(self, order: tuple[int, ...], plan: BlockPlan, blocks: int) -> None:
        """A pair with one process at a time; drifts cancel between pairs, whose order alternates."""
        sides, begin, measured_s = self._sides, self._elapsed_s, 0.0
        known_s = self._start_s if sides.count else 0.0  # one of them has started before
        rates: dict[int, list[float]] = {}
        for index in order:
            if not sides.is_open(index):
                sides.close()
                sides.open(index)
                sides.prepare(index)
            ready = self._elapsed_s
            rates[index] = [sides.segment(index, plan) for _ in range(2 * blocks)]
            sides.learn()
            measured_s += self._elapsed_s - ready
            sides.close(index)
        self._start_s = max(self._elapsed_s - begin - measured_s, known_s)
        for a1, b1, b2, a2 in zip(rates[0][::2], rates[1][::2], rates[1][1::2], rates[0][1::2], strict=True):
            self._replicates.add(abba_log_ratio(a1, b1, b2, a2))
        self._progress(MEASURING)

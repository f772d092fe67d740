"""Plans the runs of a trial from the speed of both sides, and refines the plan with further runs where it has to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ndd_engine.config import Config
from ndd_engine.text import duration
from ndd_watch.changes import LOADER, switched_by

from .blocks import (
    FEWEST_ABBA,
    BlockPlan,
    BlocksDoNotFitError,
    SidePace,
    needs_epochs,
    never_happens,
    period,
    plan_blocks,
    plan_switches,
)
from .estimates import Usual
from .sides import ESTIMATE_S, Sides


class NotMeasurableError(Exception):
    """Nothing can be measured; the message says why."""


class Planner:
    """Plans for the time left. Methods raise NotMeasurableError, BlocksDoNotFitError and what `sides` raises.

    configs: baseline and candidate, which differ in the changed keys. left_s, elapsed_s: seconds of the budget.
    """

    def __init__(
        self,
        sides: Sides,
        configs: tuple[Config, Config],
        changed: Sequence[str],
        budget_s: float,
        left_s: Callable[[], float],
        elapsed_s: Callable[[], float],
    ) -> None:
        self._sides, self._configs, self._changed = sides, configs, changed
        self._budget_s, self._left_s, self._elapsed_s = budget_s, left_s, elapsed_s
        # Whether the change acts at the start of epochs only.
        self._by_epochs = needs_epochs(*configs, changed)

    def switches(self, base_s: float, change_s: float) -> BlockPlan:
        """The runs of one process that switches between both sides. base_s, change_s: seconds of a step."""
        base, change = self._paces(base_s, change_s)
        loads = bool(switched_by(LOADER) & set(self._changed))
        gpu = self._sides.facts[0].device.startswith("cuda")
        plan = plan_switches(base, change, self._left_s(), self._by_epochs, loads, gpu)
        if plan.within or self._by_epochs:
            return plan
        paces, _ = self._timed(plan, base, change)
        return plan_switches(*paces, self._left_s(), self._by_epochs, loads, gpu)

    def pairs(
        self, base_s: float, change_s: float, start_s: float, usual: Usual, exclusive: bool
    ) -> BlockPlan:
        """The runs of pairs of processes. start_s, usual: see `plan_pairs`. exclusive: only one process is open."""
        base, change = self._paces(base_s, change_s)

        def planned(base: SidePace, change: SidePace, whole: bool = True) -> BlockPlan:
            return plan_blocks(base, change, self._left_s(), self._by_epochs, whole, start_s, usual)

        plan = planned(base, change)
        if plan.within or exclusive or self._by_epochs:
            return plan
        paces, whole = self._timed(plan, base, change)
        return planned(*paces, whole)

    def _paces(self, base_s: float, change_s: float) -> tuple[SidePace, SidePace]:
        epochs = [facts.steps_per_epoch for facts in self._sides.facts]
        if missing := never_happens(*self._configs, self._changed, all(epochs)):
            raise NotMeasurableError(missing)
        if self._left_s() < self._budget_s / 10:
            enough_s = FEWEST_ABBA * 4 * max(base_s, change_s, ESTIMATE_S)
            raise BlocksDoNotFitError(f"preparing both sides took {duration(self._elapsed_s())}", enough_s)
        base, change = self._pace(0, base_s), self._pace(1, change_s)
        if self._by_epochs:
            # The first estimate does not show the cost of the start of an epoch.
            return self._over_epoch(0, base), self._over_epoch(1, change)
        return base, change

    def _pace(self, index: int, step_s: float) -> SidePace:
        facts = self._sides.facts[index]
        recurs = period(self._configs[index], self._changed, facts.steps_per_epoch, step_s, self._budget_s)
        return SidePace(facts.items_per_step, facts.steps_per_epoch, step_s, recurs)

    def _over_epoch(self, index: int, pace: SidePace) -> SidePace:
        """The pace over a whole epoch, its start included; unchanged if an epoch takes too long."""
        limit_s = self._left_s() / (FEWEST_ABBA * 2)
        seconds, steps = self._sides.train(index, pace.per_epoch, "timing a whole epoch", until_s=limit_s)
        return replace(pace, step_s=seconds / steps) if steps == pace.per_epoch else pace

    def _timed(
        self, plan: BlockPlan, base: SidePace, change: SidePace
    ) -> tuple[tuple[SidePace, SidePace], bool]:
        """The paces over a whole run each, which show the cost of periodic events, and whether the runs fit."""
        paces, whole = [], True
        for index, pace in enumerate((base, change)):
            limit_s = self._left_s() / (FEWEST_ABBA * 4)
            seconds, steps = self._sides.train(
                index, plan.steps[index], "timing a whole run", plan, until_s=limit_s
            )
            all_of = steps == plan.steps[index]
            whole = whole and all_of
            paces.append(replace(pace, step_s=max(seconds / steps, 0 if all_of else pace.step_s)))
        return (paces[0], paces[1]), whole

"""Plans a trial: pairs of processes, ABBA blocks per pair, and their runs (equal items, periods in proportion)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ndd_engine.config import Config
from ndd_engine.text import duration
from ndd_watch.changes import AROUND, LOADER, MODEL, switched_by

from .estimates import ENOUGH, Usual, reach

# Seconds of a run: long enough to average out scheduler noise, short enough for slow drifts to cancel.
LEAST_S = 0.25
SHORT_S = 0.5
LONG_S = 2.0
# Seconds and steps of a run of one process that switches between both sides on the CPU. Other work on a machine lasts
# longer, so that it disturbs both sides alike: of runs of 0.25 s, intervals are about 1.5 times as wide.
SWITCH_S = 0.04
STEPS_ENOUGH = 2
# Minimum number of ABBA blocks per pair of processes, and the number to plan for if runs of a good length allow it.
FEWEST_ABBA = 2
GOOD_ABBA = 8
# Maximum number of pairs to plan for.
MOST_PAIRS = 16
BLOCKS = 4  # runs in an ABBA block
# Periodic events with at least so many occurrences in a run need not fit a whole number of times.
OFTEN = 20
# Overhead factor of an ABBA block: untimed lead steps, and commands.
OVERHEAD = 1.1

# Untimed steps at the start of a run, while caches evicted by the other side fill again.
LEAD_S = 0.02
LEAD_MOST = 10
# The same in one process, which keeps its model.
SWITCH_LEAD_S = 0.005


@dataclass(frozen=True)
class SidePace:
    """A side's speed. items: per step. per_epoch: steps, 0 if unknown. step_s: seconds. period: of what changes."""

    items: int
    per_epoch: int
    step_s: float
    period: int = 1


@dataclass(frozen=True)
class BlockPlan:
    """The runs of an ABBA block. steps, step_s: timed steps and seconds of a step, of (baseline, candidate).

    within: runs lie within an epoch and exclude the cost of its start; otherwise they cover whole epochs or periods.
    lead_s: seconds of untimed steps at the start of a run.
    """

    steps: tuple[int, int]
    step_s: tuple[float, float]
    within: bool
    lead_s: float = LEAD_S

    @property
    def block_s(self) -> float:
        """Seconds of a run of the slower side."""
        return max(steps * step_s for steps, step_s in zip(self.steps, self.step_s, strict=True))

    @property
    def abba_s(self) -> float:
        """Planned seconds of an ABBA block."""
        return BLOCKS * self.block_s * OVERHEAD

    def shorter(self, periods: tuple[int, int]) -> BlockPlan | None:
        """With at most a quarter of the steps, which are whole periods and as many items; None if that is not possible.

        periods: of the steps of each side.
        """
        parts = math.gcd(*self.steps)
        for part in range(parts // 4, 0, -1):
            steps = self.steps[0] // parts * part, self.steps[1] // parts * part
            if not any(count % period for count, period in zip(steps, periods, strict=True)):
                return replace(self, steps=steps, within=max(periods) == 1)
        return None

    def lead(self, index: int) -> int:
        """Untimed steps at the start of a run of a side."""
        return lead(self.step_s[index], self.lead_s)


class BlocksDoNotFitError(Exception):
    """The minimum number of ABBA blocks does not fit into the time left. needed_s: seconds that they need."""

    def __init__(self, text: str, needed_s: float) -> None:
        super().__init__(text)
        self.needed_s = needed_s


def switched_off(changed: Iterable[str]) -> dict[str, dict[str, object]]:
    """Overrides that switch off periodic work on both sides, except what the changed keys are about."""
    keys = set(changed)
    off: dict[str, dict[str, object]] = {
        "run": {"name": None},
        "evaluate": {"at_end": False},
        "checkpoint": {"at_end": False},
        "log": {
            "tensorboard": False,
            "wandb": "off",
            "mlflow": None,
            "kernels_every": 0,
            "trace": None,
        },
    }
    if not evaluates(keys):
        off["evaluate"] |= {"every_steps": 0, "every_epochs": 0}
    if not saves(keys):
        off["checkpoint"] |= {"every_steps": 0, "every_epochs": 0}
    if "checkpoint.every_minutes" not in keys:
        off["checkpoint"]["every_minutes"] = 0.0
    off["log"] = {name: value for name, value in off["log"].items() if f"log.{name}" not in keys}
    off["log"]["profile_every_s"] = 0.0  # a profiled step is part of no measurement
    return off


def evaluates(changed: Iterable[str]) -> bool:
    """Whether a change affects the evaluation."""
    return any(key.startswith(("evaluate.", "loader.eval_")) for key in changed)


def saves(changed: Iterable[str]) -> bool:
    """Whether a change affects checkpoints."""
    return any(key.startswith("checkpoint.") for key in changed)


def period(config: Config, changed: Iterable[str], per_epoch: int, step_s: float, budget_s: float) -> int:
    """The period, in steps, of what the change affects; 1 if it affects every step.

    step_s: approximate, for events that recur by the clock. Events with a period longer than the budget are ignored:
    they do not occur in a trial, and cost almost nothing.
    """
    keys = set(changed)
    found = []
    if evaluates(keys):
        found += [config.evaluate.every_steps, config.evaluate.every_epochs * per_epoch]
    if saves(keys):
        found += [config.checkpoint.every_steps, config.checkpoint.every_epochs * per_epoch]
        # Checked at the end of each window of the record.
        seconds = max(config.checkpoint.every_minutes * 60, config.log.window_s)
        if config.checkpoint.every_minutes and "checkpoint.every_minutes" in keys and seconds <= budget_s:
            found.append(math.ceil(seconds / step_s))
    if "log.every_steps" in keys:
        found.append(config.log.every_steps)
    if "log.kernels_every" in keys:
        found.append(config.log.kernels_every)
    if "run.gc_every_steps" in keys:
        found.append(config.run.gc_every_steps)
    return common(steps for steps in found if steps)


def common(periods: Iterable[int]) -> int:
    """A common multiple of the periods; a period that fits at least OFTEN times need not fit exactly."""
    result = 1
    for steps in sorted(periods):
        result = steps if steps >= OFTEN * result else math.lcm(result, steps)
    return result


def needs_epochs(base: Config, change: Config, changed: Iterable[str]) -> bool:
    """Whether the change acts only at the start of epochs, so that runs have to cover whole epochs."""
    return "loader.persistent" in changed and base.loader.workers > 0 and change.loader.workers > 0


def never_happens(base: Config, change: Config, changed: Iterable[str], epochs_known: bool = True) -> str:
    """Why a change cannot be measured because what it affects never happens on either side; "" if it does.

    epochs_known: whether the length of an epoch is known.
    """
    keys = set(changed)
    if keys == {"log.profile_every_s"}:
        return "a profiled step is part of no measurement"
    if not epochs_known and needs_epochs(base, change, keys):
        return "the length of an epoch is unknown, and the change acts only between epochs"
    if (
        not epochs_known
        and evaluates(keys)
        and not (base.evaluate.every_steps or change.evaluate.every_steps)
    ):
        return "the length of an epoch is unknown: set evaluate.every_steps to measure evaluations"
    if (
        not epochs_known
        and saves(keys)
        and not (base.checkpoint.every_steps or change.checkpoint.every_steps)
    ):
        return "the length of an epoch is unknown: set checkpoint.every_steps to measure checkpoints"
    if evaluates(keys) and not any(
        config.evaluate.every_steps or config.evaluate.every_epochs for config in (base, change)
    ):
        return "the run is only evaluated at its end: set evaluate.every_epochs to measure evaluations"
    minutes = "checkpoint.every_minutes" in keys
    if saves(keys) and not any(
        config.checkpoint.every_steps
        or config.checkpoint.every_epochs
        or (minutes and config.checkpoint.every_minutes)
        for config in (base, change)
    ):
        return (
            "the run only writes a checkpoint at its end: set checkpoint.every_epochs to measure checkpoints"
        )
    return ""


def can_switch(configs: tuple[Config, Config], changed: Iterable[str]) -> bool:
    """Whether one process can switch between the two configurations, which differ in the changed keys.

    It can if that needs no new model, optimizer, compiled code or encoded data.
    """
    keys = set(changed)
    if keys - switched_by(LOADER, MODEL, AROUND) or any(config.parallel.ranks > 1 for config in configs):
        return False
    fixed = any(config.speed.compile != "off" or config.speed.cuda_graph for config in configs)
    encoded = any(config.loader.cache or config.loader.placement == "device" for config in configs)
    return not (keys & switched_by(MODEL) and fixed) and not (keys & switched_by(LOADER) and encoded)


def plan_pairs(left_s: float, start_s: float, abba_s: float, usual: Usual | None = None) -> tuple[int, int]:
    """(pairs of processes, ABBA blocks per pair) with the narrowest expected interval; (0, 0) if nothing fits.

    left_s: seconds left, with the first pair started. start_s: to start another pair. abba_s: of a block. At least
    ENOUGH pairs if they fit, otherwise two. usual: the difference between processes.
    """
    usual = usual or Usual()
    found: list[tuple[bool, bool, float, int, int]] = []
    for pairs in range(1, MOST_PAIRS + 1):
        blocks = int((left_s - (pairs - 1) * start_s) / (pairs * abba_s))
        if blocks < FEWEST_ABBA:
            break
        # Few changes are so large that a single pair can tell.
        found.append((pairs < ENOUGH, pairs == 1, reach(usual, pairs, blocks, abba_s), pairs, blocks))
    return min(found)[3:] if found else (0, 0)


def plan_blocks(
    base: SidePace,
    change: SidePace,
    left_s: float,
    by_epochs: bool,
    whole: bool = True,
    start_s: float = 0.0,
    usual: Usual | None = None,
) -> BlockPlan:
    """Plan for the seconds left. Raises BlocksDoNotFitError.

    by_epochs: runs have to cover whole epochs. whole: they may; False after an epoch took too long. start_s, usual:
    see `plan_pairs`.
    """
    room_s = left_s / (BLOCKS * OVERHEAD)  # for one run of each ABBA block
    sides = (base, change)
    paces = [side.step_s for side in sides]
    pairs, _ = plan_pairs(left_s, start_s, BLOCKS * OVERHEAD * max(*paces, LEAST_S), usual)
    pair_s = (left_s - (pairs - 1) * start_s) / max(pairs, 1) / (BLOCKS * OVERHEAD)
    wanted_s = min(LONG_S, max(pair_s / GOOD_ABBA, min(SHORT_S, pair_s / FEWEST_ABBA)))

    def fits(plan: BlockPlan) -> bool:
        """Whether as many pairs of processes fit with these runs."""
        return plan_pairs(left_s, start_s, plan.abba_s, usual)[0] >= min(max(pairs, 1), ENOUGH)

    epochs = _blocks(sides, wanted_s, [common((side.period, side.per_epoch or 1)) for side in sides], False)
    if whole and (epochs.block_s * FEWEST_ABBA <= room_s if by_epochs else fits(epochs)):
        return epochs
    recurs = max(base.period, change.period) > 1
    found = epochs if by_epochs else _blocks(sides, wanted_s, [side.period for side in sides], not recurs)
    if (by_epochs or recurs) and not whole:
        room_s = 0.0  # tried before
    if found.block_s * FEWEST_ABBA <= room_s:
        return found
    raise _too_small(found, by_epochs, recurs)


def plan_switches(
    base: SidePace, change: SidePace, left_s: float, by_epochs: bool, loads: bool, gpu: bool = False
) -> BlockPlan:
    """Plan for one process that switches between both sides. Raises BlocksDoNotFitError.

    by_epochs: runs have to cover whole epochs. loads: both sides have loaders of their own, whose batches in stock must
    not hide the wait. gpu: a run ends by waiting for the device, which must not dominate it.
    """
    sides = (base, change)
    room_s = left_s / (BLOCKS * OVERHEAD)  # for one run of each ABBA block
    step_s = max(side.step_s for side in sides)
    least_s = SHORT_S if loads else LEAST_S if gpu else SWITCH_S
    wanted_s = min(max(least_s, STEPS_ENOUGH * step_s), room_s / GOOD_ABBA)
    recurs = max(base.period, change.period) > 1
    epochs = _blocks(sides, wanted_s, [common((side.period, side.per_epoch)) for side in sides], False)
    if by_epochs or (loads and not recurs and epochs.block_s * GOOD_ABBA <= room_s):
        found = epochs
    else:
        found = _blocks(sides, wanted_s, [side.period for side in sides], not recurs)
    if found.block_s * FEWEST_ABBA > room_s:
        raise _too_small(found, by_epochs, recurs)
    return replace(found, lead_s=SWITCH_LEAD_S)


def _too_small(plan: BlockPlan, by_epochs: bool, recurs: bool) -> BlocksDoNotFitError:
    what = "a whole epoch" if by_epochs else "a period of its steps" if recurs else "a step"
    units = FEWEST_ABBA * BLOCKS
    text = f"{what} takes {duration(plan.block_s)}, and the budget is too small for {units} of them"
    return BlocksDoNotFitError(text, FEWEST_ABBA * plan.abba_s)


def _blocks(
    sides: tuple[SidePace, SidePace], wanted_s: float, units: Sequence[int], within: bool
) -> BlockPlan:
    """As many items as the slower side trains in wanted_s, in whole units of each side, at least one."""
    items = wanted_s / max(side.step_s / side.items for side in sides)
    items = max(items, *(unit * side.items for unit, side in zip(units, sides, strict=True)))

    def steps(unit: int, side: SidePace) -> int:
        count = unit * max(round(items / (unit * side.items)), 1)
        # The untimed lead steps and the step that ends the timed ones have to fit into the epoch too.
        return (
            max(min(count, side.per_epoch - lead(side.step_s) - 1), 1) if within and side.per_epoch else count
        )

    base, change = (steps(unit, side) for unit, side in zip(units, sides, strict=True))
    return BlockPlan((base, change), (sides[0].step_s, sides[1].step_s), within)


def lead(step_s: float, lead_s: float = LEAD_S) -> int:
    """The number of untimed lead steps of a run, for this step time."""
    return min(max(math.ceil(lead_s / max(step_s, 1e-9)), 1), LEAD_MOST)

"""How long blocks are: equal items on both sides, what happens now and then in its true proportion, enough quads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ndd_engine.config import Config
from ndd_engine.text import duration

from .paired import FEWEST_ABBA

# Seconds of a block: long enough for the noise of a scheduler to average out, short enough for what drifts.
SHORT_S = 0.5
LONG_S = 2.0
# Quads that are planned for, where blocks of a good length allow it; and that whole epochs have to leave room for.
GOOD_ABBA = 12
ENOUGH_ABBA = 4
BLOCKS = 4  # in a quad
# What recurs so often in a block need not be in it a whole number of times.
OFTEN = 20
# What a quad takes beside its blocks: the steps before them, and asking.
BESIDE = 1.1

# Steps before a block's timed ones, while caches fill again that the other side has emptied.
LEAD_S = 0.02
LEAD_MOST = 10


@dataclass(frozen=True)
class SidePace:
    """A side's speed: items of a step, steps of an epoch, seconds of a step, and after how many steps things recur."""

    items: int
    per_epoch: int
    step_s: float
    period: int = 1


@dataclass(frozen=True)
class BlockPlan:
    """A block: timed steps of the present and of the change, and seconds of a step of each.

    within: blocks lie inside an epoch, so what its beginning costs is in none. Otherwise whole epochs or periods.
    """

    steps: tuple[int, int]
    step_s: tuple[float, float]
    within: bool

    @property
    def block_s(self) -> float:
        """Seconds of a block of the slower side."""
        return max(steps * step_s for steps, step_s in zip(self.steps, self.step_s, strict=True))

    @property
    def abba_s(self) -> float:
        """Seconds of a quad, as planned."""
        return BLOCKS * self.block_s * BESIDE


class BlocksDoNotFitError(Exception):
    """Three quads do not fit; the message says why. needed_s: what would have to be left for them."""

    def __init__(self, text: str, needed_s: float) -> None:
        super().__init__(text)
        self.needed_s = needed_s


def switched_off(changed: Iterable[str]) -> dict[str, dict[str, object]]:
    """What sides leave out, as overrides of the configuration: what happens now and then, unless it is the change."""
    keys = set(changed)
    off: dict[str, dict[str, object]] = {
        "run": {"name": None},
        "evaluate": {"at_end": False},
        "checkpoint": {"at_end": False},
        "log": {"tensorboard": False, "kernels_every": 0, "trace": None, "stacks_hz": 0.0},
    }
    if not evaluates(keys):
        off["evaluate"] |= {"every_steps": 0, "every_epochs": 0}
    if not saves(keys):
        off["checkpoint"] |= {"every_steps": 0, "every_epochs": 0}
    if "checkpoint.every_minutes" not in keys:
        off["checkpoint"]["every_minutes"] = 0.0
    off["log"] = {name: value for name, value in off["log"].items() if f"log.{name}" not in keys}
    return off


def evaluates(changed: Iterable[str]) -> bool:
    """Whether a change is about the evaluation."""
    return any(key.startswith(("evaluate.", "loader.eval_")) for key in changed)


def saves(changed: Iterable[str]) -> bool:
    """Whether a change is about checkpoints."""
    return any(key.startswith("checkpoint.") for key in changed)


def period(config: Config, changed: Iterable[str], per_epoch: int, step_s: float, budget_s: float) -> int:
    """After how many steps what the change is about recurs; 1 where it happens in every step.

    step_s: of a step, roughly, for what recurs by the clock. What recurs less often than the budget is long does not
    happen in a trial, and costs next to nothing.
    """
    keys = set(changed)
    found = []
    if evaluates(keys):
        found += [config.evaluate.every_steps, config.evaluate.every_epochs * per_epoch]
    if saves(keys):
        found += [config.checkpoint.every_steps, config.checkpoint.every_epochs * per_epoch]
        # Whether it is time is looked at when a window of the record is closed.
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
    """Steps that hold each period a whole number of times, or so often that a part of one does not matter."""
    result = 1
    for steps in sorted(periods):
        result = steps if steps >= OFTEN * result else math.lcm(result, steps)
    return result


def needs_epochs(base: Config, change: Config, changed: Iterable[str]) -> bool:
    """Whether what is changed only acts where an epoch begins, so that blocks have to hold whole ones."""
    return "loader.persistent" in changed and base.loader.workers > 0 and change.loader.workers > 0


def never_happens(base: Config, change: Config, changed: Iterable[str]) -> str:
    """Why a change cannot be measured at all, as what it is about happens on neither side; "" where it does."""
    keys = set(changed)
    if evaluates(keys) and not any(
        config.evaluate.every_steps or config.evaluate.every_epochs for config in (base, change)
    ):
        return "this run is evaluated at its end alone: set evaluate.every_epochs to measure them"
    minutes = "checkpoint.every_minutes" in keys
    if saves(keys) and not any(
        config.checkpoint.every_steps
        or config.checkpoint.every_epochs
        or (minutes and config.checkpoint.every_minutes)
        for config in (base, change)
    ):
        return "checkpoints are written at the end of this run alone: set checkpoint.every_epochs to measure them"
    return ""


def plan_blocks(
    base: SidePace, change: SidePace, left_s: float, by_epochs: bool, whole: bool = True
) -> BlockPlan:
    """Blocks for the seconds that are left. Raises DoesNotFitError.

    by_epochs: only whole epochs will do. whole: whole epochs may do; False when one was seen to be too long.
    """
    room_s = left_s / (BLOCKS * BESIDE)  # for one block of each quad
    wanted_s = min(LONG_S, max(room_s / GOOD_ABBA, min(SHORT_S, room_s / ENOUGH_ABBA)))
    sides = (base, change)
    epochs = _blocks(sides, wanted_s, [common((side.period, side.per_epoch)) for side in sides], False)
    if whole and epochs.block_s * (FEWEST_ABBA if by_epochs else ENOUGH_ABBA) <= room_s:
        return epochs
    recurs = max(base.period, change.period) > 1
    found = epochs if by_epochs else _blocks(sides, wanted_s, [side.period for side in sides], not recurs)
    if (by_epochs or recurs) and not whole:
        room_s = 0.0  # it was tried
    if found.block_s * FEWEST_ABBA <= room_s:
        return found
    what = "a whole epoch" if by_epochs else "what recurs" if recurs else "a step"
    blocks = FEWEST_ABBA * BLOCKS
    text = f"{what} takes {duration(found.block_s)}, and {blocks} blocks of it do not fit into what is left"
    raise BlocksDoNotFitError(text, FEWEST_ABBA * found.abba_s)


def _blocks(
    sides: tuple[SidePace, SidePace], wanted_s: float, units: Sequence[int], within: bool
) -> BlockPlan:
    """As many items as the slower side trains in wanted_s, in whole units of each side, and one at least."""
    items = wanted_s / max(side.step_s / side.items for side in sides)
    items = max(items, *(unit * side.items for unit, side in zip(units, sides, strict=True)))

    def steps(unit: int, side: SidePace) -> int:
        count = unit * max(round(items / (unit * side.items)), 1)
        # Inside an epoch there have to be the steps before the timed ones too, and the one that ends them.
        return max(min(count, side.per_epoch - lead(side.step_s) - 1), 1) if within else count

    base, change = (steps(unit, side) for unit, side in zip(units, sides, strict=True))
    return BlockPlan((base, change), (sides[0].step_s, sides[1].step_s), within)


def lead(step_s: float) -> int:
    """Steps of this length before a block's timed ones."""
    return min(max(math.ceil(LEAD_S / max(step_s, 1e-9)), 1), LEAD_MOST)

"""Engine headless vs. a hand-written loop, Lightning's Trainer and Hugging Face Accelerate, on every workload.

All train the same model from the same weights with the same loss, data order, loader arguments, optimizer (the
engine's default: fused), precision, gradient clipping and accumulation; the losses of the first steps are compared to
verify it. The learning rate is constant. Blocks of the same steps of the same epochs alternate in the order A B B A;
see rival_loops for what the time of a block includes.

- The engine is a real run as in `ndd-console train --headless`: phase clock, hooks that time the parts of forward,
  losses read every 10 steps, windows and the recorder thread, polling the control every step, and the sampler thread.
  Evaluation and checkpoints are off. Its loader fetches item by item, like the others.
- The rivals run with all optional features off; each reads the loss every 10 steps.
- "engine's own fetch" is the engine's default: for data in memory it gathers a whole batch at once. The rivals, with
  the same workload and torch's loader, have no equivalent.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from types import ModuleType

from ndd_engine.config import Config
from ndd_engine.train.prepare import seed
from ndd_engine.workloads.registry import prepare

from .common import (
    Options,
    Table,
    Target,
    as_ms,
    as_ratio,
    paired,
    say,
    statistics_cells,
    summarise,
    undisturbed,
)
from .engine import ONLY_STEPS, engine
from .loop import keep_memory
from .parity import parity
from .rival_loops import Bare, EngineSide, Rival, Side, first_losses, seconds

TITLE = "rivals: engine headless / other loops doing the same work (steps per second, neighbouring blocks)"
COLUMNS = (
    "case", "rival", "engine, ms", "rival, ms", "steps per block", "n", "min", "median", "max",
    "95 % CI of the median", "target", "by the median", "first losses",
)  # fmt: skip
BARE_TARGET = Target(0.99, at_least=True)
AHEAD = Target(1.0, at_least=True)
_SETTINGS = (*ONLY_STEPS, "schedule.kind=constant", "schedule.warmup_steps=0", "loader.workers=0")
_FP32, _BF16 = "precision.amp=off", "precision.amp=bf16"


@dataclass(frozen=True)
class Case:
    """name: in addition to the workload's. sets: the guide's settings, scaled to a fraction of a second per step.

    overhead: a short step, for which the barebones Trainer and the engine's own fetch are measured too.
    """

    workload: str
    name: str
    sets: tuple[str, ...]
    overhead: bool = False
    only_full: bool = False


CASES = (
    Case("antispoof", "tiny", ("workload.size=tiny", "workload.clips=80", _FP32)),
    Case("chartext", "mini", ("workload.size=mini", _FP32)),
    # Lightning refuses to clip gradients of a fused optimizer under autocast: all use foreach instead.
    Case(
        "chartext",
        "mini, bf16",
        ("workload.size=mini", _BF16, "optimizer.implementation=foreach"),
        only_full=True,
    ),
    Case("finetune", "tiny", ("workload.size=tiny", _FP32)),
    Case("eeg", "the guide's settings", (_FP32,), overhead=True),
    Case("summarise", "tiny", ("workload.size=tiny", _FP32)),
)


@dataclass(frozen=True)
class Effort:
    """How long to measure a ratio, and the number of losses to compare."""

    block_s: float
    pairs: int
    limit_s: float
    losses: int


def measure(options: Options) -> Table:
    """All cases in one table."""
    table = Table(TITLE, COLUMNS)
    if not keep_memory():
        table.note("this allocator cannot be configured to keep memory: ratios of the larger steps are rough")
    # The sampler samples after 0.25 s and then once per second: blocks of a second include its usual cost.
    effort = Effort(
        options.seconds(1.0, 0.25), options.repeats(8, 2), options.seconds(24.0, 3.0), options.repeats(8, 3)
    )
    if options.pairs is not None:
        effort = replace(effort, pairs=options.pairs, limit_s=math.inf)
    makers = _makers(table)
    wanted = (
        case for case in CASES if not (case.only_full and options.quick) and options.wants(case.workload)
    )
    for case in options.cases(wanted):
        say(f"rivals: {case.workload}, {case.name}")
        table.note(f"{case.workload}, {case.name}: {' '.join(case.sets)} {' '.join(_SETTINGS[-3:])}")
        try:
            _case(table, case, makers, options, effort)
        except Exception as error:  # noqa: BLE001  continue with the other cases
            table.add(f"{case.workload}, {case.name}", "failed")
            first = (str(error).splitlines() or ["no message"])[0]
            table.note(f"{case.workload}, {case.name}: {type(error).__name__}: {first}")
    return table


def _makers(table: Table) -> list[type[Rival]]:
    """The installed rivals, the bare loop first."""
    found: list[type[Rival]] = [Bare]
    for name, classes in (
        ("rival_lightning", ("Lightning", "Barebones")),
        ("rival_accelerate", ("Accelerated",)),
    ):
        module = _imported(name)
        if module is None:
            package = name.partition("_")[2]
            table.note(
                f"{package} is not installed and was skipped: install it with `make bench` or "
                "pip install -e '.[bench]'"
            )
            continue
        made = [vars(module)[each] for each in classes]
        found += made
        table.note(f"{made[0].name} {module.VERSION}: {module.SETTINGS}")
    return found


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as error:
        if error.name in ("lightning", "accelerate"):
            return None
        raise


def _case(table: Table, case: Case, makers: list[type[Rival]], options: Options, effort: Effort) -> None:
    sets = (*case.sets, *_SETTINGS, f"run.device={options.device}")
    name = f"{case.workload}, {case.name}"
    with engine(case.workload, (*sets, "loader.fetch=item")) as subject:
        config, device = subject.prepared.config, subject.prepared.device
        seed(config.run.seed)
        workload = prepare(config)
        side = EngineSide(subject)
        extras = case.overhead and not options.quick
        rivals = [maker(config, workload, device) for maker in makers if extras or not maker.extra]
        # Created before anything trains, so that all start with the same weights and random state.
        sides: list[Side] = [side, *rivals]
        losses = {each.name: _losses(each, config, effort) for each in sides}
        blocks = Blocks(effort)
        steps = blocks.steps(side)
        for rival in rivals:
            target = BARE_TARGET if isinstance(rival, Bare) else AHEAD
            same = parity(losses[side.name], losses[rival.name])
            _row(table, name, blocks, steps, side, rival, target, same)
        if extras:
            with engine(case.workload, sets) as own:
                faster = EngineSide(own)
                steps = blocks.steps(faster)
                for rival in rivals:
                    if not isinstance(rival, Bare) and not rival.extra:
                        _row(table, f"{name}, engine's own fetch", blocks, steps, faster, rival, AHEAD, "")


def _losses(side: Side, config: Config, effort: Effort) -> list[float]:
    seed(config.run.seed)
    return first_losses(side, effort.losses)


class Blocks:
    """Measures pairs of sides on the same steps of the same epochs; epochs only increase."""

    def __init__(self, effort: Effort) -> None:
        self.effort = effort
        self._epoch = 1

    def steps(self, side: Side) -> int:
        """The number of steps of a block of this side; also warms up."""
        once = min(self._one(side, 1) for _ in range(2))
        count = max(round(self.effort.block_s / 4 / once), 1)
        return max(round(self.effort.block_s / min(self._one(side, count) for _ in range(2))), 2)

    def warm_up(self, side: Side, steps: int) -> None:
        """Run an untimed block."""
        seconds(side, self._epoch, steps)

    def _one(self, side: Side, steps: int) -> float:
        return seconds(side, self._epoch, steps) / steps

    def ratios(self, baseline: Side, subject: Side, steps: int) -> tuple[list[float], str, dict[str, float]]:
        """(subject over baseline of each pair, a note on excluded pairs, median seconds of a step by side)."""
        taken: dict[str, list[float]] = {baseline.name: [], subject.name: []}
        begin = self._epoch

        def block(side: Side) -> float:
            done = taken[side.name]
            spent = seconds(side, begin + len(done), steps) / steps
            done.append(spent)
            return 1 / spent

        found = paired(
            lambda: block(baseline), lambda: block(subject), self.effort.pairs, self.effort.limit_s
        )
        self._epoch += len(found)
        values, note = undisturbed(found)
        return values, note, {name: summarise(each).median for name, each in taken.items()}


def _row(
    table: Table,
    name: str,
    blocks: Blocks,
    steps: int,
    side: Side,
    rival: Side,
    target: Target,
    same: str,
) -> None:
    blocks.warm_up(rival, steps)
    values, note, step_s = blocks.ratios(rival, side, steps)
    table.add(
        name, rival.name, as_ms(step_s[side.name] * 1e3), as_ms(step_s[rival.name] * 1e3), str(steps),
        *statistics_cells(values, as_ratio, target), same,
    )  # fmt: skip
    if note:
        table.note(f"{name}, vs. {rival.name}: {note}")

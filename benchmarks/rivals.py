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

import math
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

from ndd_engine.train.prepare import seed
from ndd_engine.workloads.factory_data import prepare

from . import rival_libraries
from .common import (
    Options,
    Table,
    Target,
    as_ms,
    as_ratio,
    compared,
    parity,
    say,
    statistics_cells,
)
from .engine import ONLY_STEPS, engine
from .loop import keep_memory
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

    overhead: a short step, for which the engine's own fetch is measured too.
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


def measure(options: Options) -> Table:
    """All cases in one table."""
    table = Table(TITLE, COLUMNS)
    if not keep_memory():
        table.note("this allocator cannot be configured to keep memory: ratios of the larger steps are rough")
    makers = _makers(table)
    for case in options.cases(case for case in CASES if not (case.only_full and options.quick)):
        say(f"rivals: {case.workload}, {case.name}")
        table.note(f"{case.workload}, {case.name}: {' '.join(case.sets)} {' '.join(_SETTINGS[-3:])}")
        try:
            _case(table, case, makers, options)
        except Exception as error:  # noqa: BLE001  continue with the other cases
            table.add(f"{case.workload}, {case.name}", "failed")
            first = (str(error).splitlines() or ["no message"])[0]
            table.note(f"{case.workload}, {case.name}: {type(error).__name__}: {first}")
    return table


def _makers(table: Table) -> list[type[Rival]]:
    """The installed rivals, the bare loop first."""
    found: list[type[Rival]] = [Bare]
    for make in (rival_libraries.lightning, rival_libraries.accelerate):
        package = make.__name__
        if find_spec(package) is None:
            how = "install it with `make bench` or pip install -e '.[bench]'"
            table.note(f"{package} is not installed and was skipped: {how}")
            continue
        found.append(make())
        table.note(f"{found[-1].name} {version(package)}: {found[-1].settings}")
    return found


def _case(table: Table, case: Case, makers: list[type[Rival]], options: Options) -> None:
    sets = (*case.sets, *_SETTINGS, f"run.device={options.device}")
    name = f"{case.workload}, {case.name}"
    with engine(case.workload, (*sets, "loader.fetch=item")) as subject:
        config, device = subject.prepared.config, subject.prepared.device
        seed(config.run.seed)
        workload = prepare(config)
        side = EngineSide(subject)
        rivals = [maker(config, workload, device) for maker in makers]
        # Created before anything trains, so that all start with the same weights and random state.
        losses: dict[str, list[float]] = {}
        for each in (side, *rivals):
            seed(config.run.seed)
            losses[each.name] = first_losses(each, options.repeats(8, 3, least=2))
        blocks = Blocks(table, name, side, options)
        for rival in rivals:
            target = BARE_TARGET if isinstance(rival, Bare) else AHEAD
            blocks.compare(rival, target, parity(losses[side.name], losses[rival.name]))
        if case.overhead and not options.quick:
            with engine(case.workload, sets) as own:
                blocks = Blocks(table, f"{name}, engine's own fetch", EngineSide(own), options)
                for rival in rivals:
                    if not isinstance(rival, Bare):
                        blocks.compare(rival, AHEAD, "")


class Blocks:
    """Compares the engine with rivals on the same steps of the same epochs, which only increase."""

    def __init__(self, table: Table, name: str, side: Side, options: Options) -> None:
        """Measures how many steps a block has; also warms up."""
        self._table, self._name, self._side, self._options = table, name, side, options
        self._epoch = 1
        # The sampler samples after 0.25 s and then once per second: blocks of a second include its usual cost.
        block_s = options.seconds(1.0, 0.25, least=0.05)
        self._steps = 1
        once = 1 / max(self._rate(side) for _ in range(2))
        self._steps = max(round(block_s / 4 / once), 1)
        self._steps = max(round(block_s * max(self._rate(side) for _ in range(2))), 2)

    def _rate(self, side: Side, later: int = 0) -> float:
        return self._steps / seconds(side, self._epoch + later, self._steps)

    def compare(self, rival: Side, target: Target, same: str) -> None:
        """A row for a rival. same: how its first losses compare."""
        self._rate(rival)  # warms up
        options, side, blocks = self._options, self._side, {rival.name: 0, self._side.name: 0}

        def block(each: Side) -> float:
            blocks[each.name] += 1
            return self._rate(each, blocks[each.name] - 1)

        pairs, limit_s = options.repeats(8, 2), options.seconds(24.0, 3.0)
        if options.pairs is not None:
            pairs, limit_s = options.pairs, math.inf
        found = compared(lambda: block(rival), lambda: block(side), pairs, limit_s)
        self._epoch += blocks[rival.name]
        self._table.add(
            self._name, rival.name, as_ms(1e3 / found.subject), as_ms(1e3 / found.baseline), str(self._steps),
            *statistics_cells(found.values, as_ratio, target), same,
        )  # fmt: skip
        if found.note:
            self._table.note(f"{self._name}, vs. {rival.name}: {found.note}")

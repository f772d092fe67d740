"""The levels of a model's blocks with which its training stays within a memory budget, and what they cost.

Steps at two small micro-batches give the bytes of each block and level by turn; a search over them proposes levels.
Each proposal is recorded like any other configuration, and counts only if that recording, replayed in the simulated
allocator, stays within the budget. Those that do are timed in turns, and the fastest is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from torch import nn

from ndd_engine.errors import said
from ndd_engine.hardware.gpus import detect_host
from ndd_engine.measure.memory import is_out_of_memory
from ndd_engine.text import counted, size
from ndd_engine.train.checkpoint_state import kept_buffers, kept_random
from ndd_engine.train.rehearsal import kept_training, time_micro
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.workloads.base import keep_in_bf16
from ndd_watch import recompute
from ndd_watch.clock import no_phase
from ndd_watch.turns import (
    Account,
    Blocks,
    CallTree,
    LevelChoice,
    Option,
    TurnTable,
    at_size,
    blocks_of,
    turns_of,
)

from .estimate import Memory, StepTime
from .step_probes import Prober, endless, longest_first, sizes

# Recordings to confirm proposals of one kind. Each corrects the next.
MOST_RECORDED = 5
# The search ends when the limits of a plan that fits and of one that does not are so close, as a share of the budget.
CLOSE = 0.002
# Steps to measure what a level costs, and turns in which the plans that fit are timed.
COST_STEPS, TURNS = 3, 3
# Nanoseconds for one plan in one turn.
TURN_NS = 200_000_000
# Settings that keep the parameters in bf16.
IN_BF16 = {"amp": "bf16", "parameters": "bf16"}
# What the precision of a way means.
ROUNDS = "bf16 rounds differently: compare the losses"
ROUNDED_AWAY = "parameters in bf16, in which small updates are rounded away: compare the losses"
# Kinds of plans: which levels they may use.
_KINDS = (
    frozenset({recompute.ALL}),
    frozenset({recompute.CHEAP}),
    frozenset({recompute.ALL, recompute.CHEAP}),
    frozenset(recompute.LEVELS),
)

Levels = dict[str, str]


@dataclass(frozen=True)
class Way:
    """A change with which a configuration fits.

    sets: its settings, as for --set. peak_bytes: predicted. step_s: seconds of a step, None if unknown. note: what
    changes in the training, "" for nothing.
    """

    sets: tuple[str, ...]
    peak_bytes: int
    step_s: float | None
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """What a budget asks for.

    levels: by block; {} if it keeps everything. memory: of this plan; None if there is no plan, and then why says why.
    peak_bytes: predicted with these levels; without a plan the least that any levels reach. micro_s: measured seconds
    of a micro-batch. plain_s: of the plain model in the same turns; None if that does not fit. blocks: how many the
    model has. refused: blocks that cannot compute twice, and why.
    """

    levels: Levels
    memory: Memory | None
    peak_bytes: int
    micro_s: float | None = None
    plain_s: float | None = None
    blocks: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    why: str = ""

    @property
    def slower(self) -> float | None:
        """Seconds of a micro-batch over those of the plain model; None if they are not known."""
        return self.micro_s / self.plain_s if self.micro_s and self.plain_s else None


class BudgetPlanner:
    """Searches levels for one configuration on its prepared workload.

    plain: the memory without levels. added_bytes: what the budget has to hold beside Memory.peak. runs_plain: whether
    the plain model fits into this machine, so that it can be timed. Within `rank_memory.pretended`.
    """

    def __init__(self, prober: Prober, plain: Memory, added_bytes: int, *, runs_plain: bool) -> None:
        self._prober, self._outside = prober, plain.outside_bytes
        self._added, self._runs_plain = added_bytes, runs_plain
        self._budget = 0
        self._micro = prober.config.batch.micro
        # Their traces match allocation by allocation.
        self._at = plain.family.at if plain.family.aligned else tuple(sizes(prober.workload)[:2])
        self._recorded: dict[tuple[tuple[str, str], ...], Memory] = {(): plain}
        # The blocks of the model, and their turns or why there are none; None before a budget needs them.
        self.measured: tuple[Blocks, TurnTable | str] | None = None

    def plan(self, budget_bytes: int) -> Plan:
        """The fastest levels that stay within a budget. Raises what a step raises."""
        self._budget = budget_bytes
        if self._peak({}) <= budget_bytes:
            return Plan({}, self._memory({}), self._peak({}))
        if self.measured is None:
            self.measured = self._measure()
        blocks, table = self.measured
        made = partial(Plan, blocks=len(blocks.names), refused=blocks.refused)
        if isinstance(table, str):
            return made({}, None, self._peak({}), why=table)
        fitting = self._fitting(table)
        if not fitting:
            least = min(self._peak(dict(levels)) for levels in self._recorded)
            rest = "parameters, gradients, optimizer state and what blocks cannot compute again"
            process = f"the process before training ({size(self._outside)}), " if self._outside else ""
            why = f"{process}{rest} take more"
            return made({}, None, least, why=why)
        levels, micro_s, plain_s = self._fastest(fitting)
        return made(levels, self._memory(levels), self._peak(levels), micro_s, plain_s)

    def _measure(self) -> tuple[Blocks, TurnTable | str]:
        """The blocks of the model and their turns, or why there are none."""
        nothing = Blocks((), (), {})
        if len(self._at) < 2:
            return nothing, "the data has too few items for two micro-batches of different sizes"
        blocks = self._blocks()
        if not blocks.names:
            why = next(iter(blocks.refused.values()), "no module of the model keeps much for backward")
            return blocks, f"no block can compute again: {why}"
        try:
            return blocks, self._table(blocks)
        except ValueError as error:
            return blocks, str(error)

    # What the blocks are, and what their levels save and cost.

    def _blocks(self) -> Blocks:
        self._prober.tell("looking for blocks that can compute again")
        modules = {name: module for name, module in self._prober.workload.model.named_modules() if name}
        with self._stepping(self._at[0], {}) as (stepper, batch):
            account = Account()
            tree = CallTree(stepper.model, account)
            try:
                with recompute.watched_effects(stepper.model, modules) as effects, account:
                    stepper.forward_backward(batch, no_phase)
            finally:
                tree.detach()
        return blocks_of(tree.root, effects)

    def _table(self, blocks: Blocks) -> TurnTable:
        """The turns at the micro-batch of the configuration. Raises ValueError if they depend on it."""
        self._prober.tell(f"measuring the memory of {counted(len(blocks.names), 'block')}")
        names = blocks.names
        table = TurnTable(self._turns({}, names))
        for level in (recompute.ALL, recompute.CHEAP, *((recompute.OFFLOAD,) if self._on_gpu else ())):
            self._add(table, level, names, names)
        for group in blocks.containers:
            self._add(table, recompute.ALL, group, names)
        return table

    def _add(self, table: TurnTable, level: str, group: Sequence[str], names: Sequence[str]) -> None:
        """Measure a level of all blocks of a group, or of each by itself where torch refuses some of them."""
        levels = dict.fromkeys(group, level)
        try:
            table.add(level, self._turns(levels, names), group, self._seconds(levels))
        except (RuntimeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            if len(group) > 1:
                for name in group:
                    self._add(table, level, (name,), names)

    def _turns(self, levels: Levels, names: Sequence[str]) -> Any:
        small, large = (turns_of(self._account(micro, levels, names)) for micro in self._at)
        return at_size(small, large, (self._at[0], self._at[1]), self._micro)

    def _account(self, micro: int, levels: Levels, names: Sequence[str]) -> Account:
        account = Account()
        with self._stepping(micro, levels) as (stepper, batch):
            if self._prober.config.batch.accumulation > 1:
                stepper.forward_backward(batch, no_phase)  # most micro-batches find gradients there
            modules = dict(stepper.model.named_modules())
            handles = [
                modules[name].register_forward_pre_hook(lambda _m, _i, name=name: account.call(name))
                for name in names
            ]
            try:
                with account:
                    stepper.forward_backward(batch, no_phase)
            finally:
                for handle in handles:
                    handle.remove()
        return account

    def _seconds(self, levels: Levels) -> dict[str, float]:
        """What each block's level costs in a micro-batch of the configuration, on the line through two sizes."""
        by_size = [self._spent(micro, levels) for micro in self._at]
        found = {}
        for name in levels:
            one, other = (spent.get(name, 0.0) for spent in by_size)
            slope = max(other - one, 0.0) / (self._at[1] - self._at[0])
            found[name] = max(other + slope * (self._micro - self._at[1]), 1e-9)
        return found

    def _spent(self, micro: int, levels: Levels) -> dict[str, float]:
        """Median seconds of the second passes of a step, by block."""
        steps = []
        with self._stepping(micro, levels) as (stepper, batch):
            try:
                for _ in range(COST_STEPS + 1):
                    recompute.spent = {}
                    stepper.forward_backward(batch, no_phase)
                    stepper.drop_gradients()
                    steps.append({name: sum(each) for name, each in recompute.spent.items()})
            finally:
                recompute.spent = None
        return {name: median(step.get(name, 0.0) for step in steps[1:]) for name in steps[-1]}

    @contextmanager
    def _stepping(self, micro: int, levels: Levels) -> Iterator[tuple[Stepper, Any]]:
        """A stepper with these levels and a batch on its device; what steps change is restored."""
        prober = self._prober.with_levels(levels)
        prober.workload.training.reset()
        stepper = prober.stepper()
        try:
            batch = stepper.moved(next(longest_first(prober.workload, prober.config, micro, prober.extremes)))
            with kept_random(stepper.device), kept_training(stepper), kept_buffers(stepper.model):
                yield stepper, batch
        finally:
            stepper.drop_gradients()
            recompute.set_levels(stepper.model, {})

    @property
    def _on_gpu(self) -> bool:
        return self._prober.device.type == "cuda"

    # Which plans stay within the budget.

    def _fitting(self, table: TurnTable) -> list[Levels]:
        """Levels that stay within the budget: of every block, and the cheapest of each kind."""
        known = frozenset(option.level for option in table.options if option.level)
        found = [levels for levels in table.everything(recompute.ALL) if self._peak(levels) <= self._budget]
        for kind in dict.fromkeys(kind & known for kind in _KINDS):
            levels = self._confirmed(table, lambda option, kind=kind: option.level in kind)  # type: ignore[misc]
            if levels is not None and levels not in found:
                found.append(levels)
        return found

    def _confirmed(self, table: TurnTable, allowed: Callable[[Option], bool]) -> Levels | None:
        """The cheapest levels whose recording stays within the budget, as far as the search finds them."""
        # The table counts bytes in use of one pass; what is around it is the difference for the plain model.
        around = self._peak({}) - table.plain.peak
        limit = float(self._budget - around)
        below: float | None = None
        above: float | None = None
        best: LevelChoice | None = None
        for _ in range(MOST_RECORDED):
            choice = table.cheapest(limit, allowed)
            if choice is None:
                if above is not None or below is not None:
                    break
                limit *= 1.05  # the table may be a little too high
                choice = table.cheapest(limit, allowed)
                if choice is None:
                    break
            over = self._peak(choice.levels) - self._budget
            if over <= 0:
                if best is None or choice.seconds < best.seconds:
                    best = choice
                below = limit
            else:
                above = limit
            if above is None:
                if over == 0 or not choice.levels:
                    break
                limit += max(-over, CLOSE * self._budget)
            elif below is None:
                limit = min(limit - over, choice.peak_bytes - 1.0)
            else:
                if above - below < CLOSE * self._budget:
                    break
                limit = (below + above) / 2
        return None if best is None else best.levels

    def _memory(self, levels: Mapping[str, str]) -> Memory:
        key = tuple(sorted(levels.items()))
        if key not in self._recorded:
            self._prober.tell(f"recording a step with {counted(len(levels), 'block')} that compute again")
            self._recorded[key] = self._prober.with_levels(dict(levels)).memory(self._outside, self._at)
        return self._recorded[key]

    def _peak(self, levels: Mapping[str, str]) -> int:
        return self._memory(levels).peak(self._micro, self._prober.config.batch.accumulation) + self._added

    # Which of them is the fastest.

    def _fastest(self, plans: list[Levels]) -> tuple[Levels, float | None, float | None]:
        """(the fastest, its seconds of a micro-batch, those of the plain model), timed in turns."""
        self._prober.tell(f"timing {counted(len(plans), 'plan')} in turns")
        every = [*plans, {}] if self._runs_plain else plans
        times: list[list[float]] = [[] for _ in every]
        try:
            with self._stepping(self._micro, {}) as (stepper, _):
                batch = stepper.moved(next(endless(self._prober.workload, self._prober.config, self._micro)))
                for turn in range(TURNS + 1):
                    for place, levels in enumerate(every):
                        recompute.set_levels(stepper.model, levels)
                        spent, _runs = time_micro(stepper, batch, 10, TURN_NS if turn else 0.0)
                        if turn:  # the first one chooses kernels
                            times[place].append(spent * 1e-9)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            # The machine is fuller than it was, or the data has fewer items: the plan is what it was predicted to be.
            self._prober.tell(f"the plans could not be timed: {said(error)}")
            return plans[0], None, None
        medians = [median(each) for each in times]
        best = min(range(len(plans)), key=lambda place: medians[place])
        return plans[best], medians[best], medians[-1] if self._runs_plain else None


def ways_to_fit(
    prober: Prober,
    memory: Memory,
    time: StepTime,
    budget_bytes: int,
    added_bytes: int,
    nearest: tuple[int, int] | None,
) -> list[Way]:
    """What makes a configuration fit that does not, the fastest first.

    memory, time: of the configuration itself. nearest: the largest micro-batch that fits, and its accumulation. All
    ways keep the effective batch. Raises what a step raises.
    """
    config, on_gpu = prober.config, prober.device.type == "cuda"
    batch, found = config.batch, []
    if config.memory.budget is None and not config.memory.recompute:
        plan = BudgetPlanner(prober, memory, added_bytes, runs_plain=False).plan(budget_bytes)
        if plan.memory is not None and plan.levels:
            step_s = None if plan.micro_s is None else batch.accumulation * plan.micro_s + time.update_s
            note = f"{len(plan.levels)} of {counted(plan.blocks, 'block')} compute again in backward"
            found.append(Way(("memory.budget=auto",), plan.peak_bytes, step_s, note))
    if nearest is not None:
        micro, times = nearest
        sets = f"batch.micro={micro}", f"batch.accumulation={times}"
        step_s = time.step_s(micro, times, config.loader.workers)
        found.append(Way(sets, memory.peak(micro, times) + added_bytes, step_s))
    others: list[tuple[str, dict[str, str], str]] = [("optimizer", {"implementation": "loop"}, "")]
    if on_gpu or detect_host().bf16_units:
        if config.precision.amp == "off":
            others.append(("precision", {"amp": "bf16"}, ROUNDS))
        if config.precision.parameters == "fp32" and config.precision.amp != "fp16":
            others.append(("precision", IN_BF16, ROUNDED_AWAY))
    for section, values, note in others:
        changed = tuple(
            f"{section}.{name}={value}"
            for name, value in values.items()
            if config.value(f"{section}.{name}") != value
        )
        if not changed:
            continue
        other = prober.with_config(config.changed(**{section: values}))
        with kept_in_bf16(prober.workload.model) if "parameters" in values else nullcontext():
            fit = other.memory(memory.outside_bytes).fit(
                batch.micro, batch.accumulation, budget_bytes, added_bytes
            )
            if fit.fits and not fit.retries:
                found.append(Way(changed, fit.peak_bytes, _step_s(other), note))
    return sorted(found, key=lambda way: float("inf") if way.step_s is None else way.step_s)


@contextmanager
def kept_in_bf16(model: nn.Module) -> Iterator[None]:
    """Within it, parameters are in bf16; afterwards they are as before."""
    before = [parameter.data for parameter in model.parameters()]
    keep_in_bf16(model)
    try:
        yield
    finally:
        for parameter, data in zip(model.parameters(), before, strict=True):
            parameter.grad = None
            parameter.data = data


def _step_s(prober: Prober) -> float | None:
    """Measured seconds of a step, None if it cannot be timed on this machine."""
    config = prober.config
    timed = prober.time([config.batch.micro], float("inf"), lambda _micro: True)
    return (
        None
        if timed is None
        else timed.step_s(config.batch.micro, config.batch.accumulation, config.loader.workers)
    )

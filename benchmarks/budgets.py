"""Memory budgets: is a plan ever over its budget, does it change a gradient, and what does it cost?

Random budgets between the least that a model can be trained with and what it takes without a plan. A plan is judged
by a recording of a step at the whole micro-batch, which the simulated allocator replays with addresses in both orders.
Gradients with and without the plan are compared in the precision of the model and in fp64; those of two ranks in two
processes, on each of them.

`budget_times`: how much slower is a chosen plan than the best of all that keep or compute again (up to seven blocks)
and of 100 random ones? All that fit are timed once, and the fastest is compared with the chosen one in ABBA blocks, as
is the chosen one with itself. With `--keep DIR` each budget is measured once, also if the command is stopped and
started again.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import multiprocessing
import random
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ndd_engine.config import Config, read
from ndd_engine.files import write_text
from ndd_engine.predict.allocator import Rules
from ndd_engine.predict.budget import BudgetPlanner, Plan
from ndd_engine.predict.estimate import MANY, ONE, Memory
from ndd_engine.predict.rank_memory import pretended
from ndd_engine.predict.step_probes import Prober, endless
from ndd_engine.text import size
from ndd_engine.train.parallel.strategy import strategy_of
from ndd_engine.train.prepare import seed
from ndd_engine.train.rehearsal import time_micro
from ndd_engine.train.step.stepper import Stepper
from ndd_engine.trial.estimates import Estimate, abba_log_ratio, estimate
from ndd_engine.workloads.factory_data import prepare
from ndd_watch import recompute
from ndd_watch.clock import no_phase

from .budget_models import MODELS
from .common import Options, Table, say

CPU = torch.device("cpu")
FACTORY = "benchmarks.budget_models:factory"
SMALL = ("workload.size=tiny",)
# Workload, settings and accumulation of each case.
CASES: dict[str, tuple[str, tuple[str, ...], int]] = {
    **{name: (FACTORY, (f'workload.options.model="{name}"',), 1) for name in MODELS},
    "accumulated": (FACTORY, ('workload.options.model="gpt"',), 4),
    "bf16": (FACTORY, ('workload.options.model="gpt"', "precision.amp=bf16"), 1),
    "chartext": ("chartext", SMALL, 1),
    "ddp": (FACTORY, ('workload.options.model="gpt"', "parallel.ranks=2"), 1),
    "fsdp2": (FACTORY, ('workload.options.model="gpt"', "parallel.ranks=2", "parallel.strategy=fsdp2"), 1),
}
ONLY = tuple(CASES)
# Items of a micro-batch, and of one whose gradients are compared.
MICRO, COMPARED = 64, 8
# Blocks of which all plans are tried, and random plans.
MOST_BLOCKS, RANDOM = 7, 100


class OnGpu(Prober):
    """Recorded on the CPU, and replayed as a GPU would: reserved bytes instead of those in use."""

    def memory(self, outside_bytes: int, at: Sequence[int] = ()) -> Memory:
        return replace(super().memory(outside_bytes, at), on="gpu")


@dataclass(frozen=True)
class Judged:
    """One budget. over: whether the recorded step takes more; None without a plan."""

    plan: Plan
    over: bool | None


def measure(options: Options) -> Table:
    """20 budgets of each model; --quick 2."""
    table = Table(
        "plans for random memory budgets, by recordings of whole steps that the simulated allocator replays",
        ("model", "blocks", "budgets", "plans", "over budget", "gradients differ by", "in fp64", "slowest"),
    )  # fmt: skip
    for name in options.wanted(CASES, str):
        say(f"budgets: {name}")
        rows = _judged(name, options.repeats(20, 2))
        plans = [row.plan for row in rows if row.plan.levels]
        slower = [plan.slower for plan in plans if plan.slower]
        differences = _differences(name, [plan.levels for plan in plans])
        table.add(
            name, str(max(row.plan.blocks for row in rows)), str(len(rows)), str(len(plans)),
            str(sum(bool(row.over) for row in rows)), *(f"{one:.1g}" for one in differences),
            f"{max(slower):.2f}x" if slower else "",
        )  # fmt: skip
    return table


@dataclass(frozen=True)
class _Case:
    """A model, and the budgets between which those of the benchmark are drawn."""

    prober: OnGpu
    planner: BudgetPlanner
    accumulation: int
    least: int
    most: int


def _config(name: str) -> Config:
    workload, sets, accumulation = CASES[name]
    shape = (
        f"batch.micro={MICRO}",
        f"batch.accumulation={accumulation}",
        "run.threads=1",
        "run.max_steps=10",
    )
    return read(None, ["run.device=cpu", *shape, *sets], workload).resolve()


def _case(name: str) -> _Case:
    """Of several ranks, within `pretended`."""
    config = _config(name)
    torch.set_num_threads(1)
    seed(config.run.seed)
    prober = OnGpu(config, prepare(config, lambda _: None), CPU, lambda _: None)
    prober.warm()
    plain = prober.memory(0)
    planner = BudgetPlanner(prober, plain, 0, runs_plain=True)
    accumulation = config.batch.accumulation
    return _Case(prober, planner, accumulation, planner.plan(1).peak_bytes, plain.peak(MICRO, accumulation))


def _judged(name: str, count: int) -> list[Judged]:
    with pretended(_config(name).parallel.ranks, CPU):
        return list(_judged_on_rank(name, count))


def _judged_on_rank(name: str, count: int) -> Iterator[Judged]:
    case = _case(name)
    prober, planner = case.prober, case.planner
    draw = random.Random(name)
    for _ in range(count):
        budget = draw.randint(case.least, case.most)
        plan = planner.plan(budget)
        if plan.memory is None:
            yield Judged(plan, None)
            continue
        trace = prober.with_levels(plan.levels).trace(MICRO).until(ONE if case.accumulation == 1 else MANY)
        reserved = max(replay.peak_reserved for replay in trace.on_any_gpu(Rules.of_environment()))
        yield Judged(plan, reserved > budget)


def times(options: Options) -> Table:
    """20 budgets of each model on a single rank; --quick 1."""
    table = Table(
        "time of the chosen plan over that of the best plan that fits, in ABBA blocks",
        ("model", "budget", "plans that fit", "chosen over best", "chosen over itself"),
    )  # fmt: skip
    alone = (name for name in CASES if _config(name).parallel.ranks == 1)
    for name in options.wanted(alone, str):
        case: _Case | None = None
        for number in range(options.repeats(20, 1)):
            file = Path(options.keep, f"{name}-{number}.json") if options.keep else None
            if file is None or not file.exists():
                say(f"budget_times: {name}, budget {number + 1}")
                case = case or _case(name)
                row = _timed(case, random.Random(f"{name} {number}"), options)
                if file is not None:
                    write_text(file, json.dumps(row))
            else:
                row = json.loads(file.read_text())
            table.add(name, *row)
    return table


def _timed(case: _Case, draw: random.Random, options: Options) -> list[str]:
    budget = draw.randint(case.least, case.most)
    plan = case.planner.plan(budget)
    if not plan.levels:
        return [size(budget), "", "no plan" if plan.memory is None else "nothing to compute again", ""]
    stepper = case.prober.stepper()
    batch = next(endless(case.prober.workload, case.prober.config, MICRO))
    block_ns = options.seconds(0.2, 0.1, least=0.02) * 1e9

    def step_s(levels: dict[str, str]) -> float:
        recompute.set_levels(stepper.model, levels)
        return time_micro(stepper, batch, 1000, block_ns)[0]

    def over(levels: dict[str, str]) -> Estimate | None:
        blocks = []
        for _ in range(options.repeats(12, 4, least=2)):
            mine, theirs, again, mine_again = map(step_s, (plan.levels, levels, levels, plan.levels))
            blocks.append(abba_log_ratio(mine, theirs, again, mine_again))
        return estimate([-value for value in blocks])

    fitting = [levels for levels in _rivals(case, draw, options) if _peak(case, levels) <= budget]
    best = min([plan.levels, *fitting], key=step_s)
    words = [
        "not measured" if found is None else f"{found.ratio:.3f}x ({found.low:.3f} to {found.high:.3f})"
        for found in (over(best), over(plan.levels))
    ]
    return [size(budget), str(len(fitting)), *words]


def _rivals(case: _Case, draw: random.Random, options: Options) -> Iterator[dict[str, str]]:
    """All plans that keep or compute again, of up to MOST_BLOCKS blocks, and random ones of all levels."""
    assert case.planner.measured is not None  # a budget was planned
    names = case.planner.measured[0].names
    if len(names) <= MOST_BLOCKS and not options.smoke:
        for chosen in itertools.product(("", recompute.ALL), repeat=len(names)):
            yield {name: level for name, level in zip(names, chosen, strict=True) if level}
    levels = ("", recompute.ALL, recompute.CHEAP)
    for _ in range(options.repeats(RANDOM, 10, least=2)):
        yield {name: level for name in names if (level := draw.choice(levels))}


def _peak(case: _Case, levels: dict[str, str]) -> float:
    """Of a plan, predicted as the chosen one's; infinite where torch refuses it."""
    try:
        return case.prober.with_levels(levels).memory(0).peak(MICRO, case.accumulation)
    except RuntimeError:
        return math.inf


def _differences(name: str, plans: Sequence[dict[str, str]]) -> tuple[float, float]:
    """The largest difference of a gradient with and without a plan: in the model's precision, and in fp64."""
    ranks = _config(name).parallel.ranks
    if ranks == 1:
        return _differences_on_rank(name, plans, 0)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(ranks, context) as processes:
        found = list(processes.map(partial(_differences_on_rank, name, plans, folder=folder), range(ranks)))
    return max(one for one, _ in found), max(one for _, one in found)


def _differences_on_rank(
    name: str, plans: Sequence[dict[str, str]], rank: int, folder: str = ""
) -> tuple[float, float]:
    """folder: where several ranks meet."""
    config = _config(name)
    torch.set_num_threads(1)
    if folder:
        meet = f"file://{folder}/ranks"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=config.parallel.ranks)
    seed(config.run.seed)
    workload = prepare(config, lambda _: None)
    batches = endless(workload, config, COMPARED)
    batch = [next(batches) for _ in range(rank + 1)][-1]
    found = []
    for dtype in (None, torch.float64):
        gradients = partial(_gradients, config, workload, batch, dtype)
        plain = gradients({})
        pairs = (pair for levels in plans for pair in zip(plain, gradients(levels), strict=True))
        found.append(max((float((one - other).abs().max()) for one, other in pairs), default=0.0))
    if folder:
        dist.destroy_process_group()
    return found[0], found[1]


def _gradients(
    config: Config, workload: Any, batch: Any, dtype: torch.dtype | None, levels: dict[str, str]
) -> list[Tensor]:
    """Of a copy of the model, on several ranks this one's part. dtype: of the copy; None leaves it as it is."""
    known: dict[int, Any] = {}
    workload = workload.with_model(copy.deepcopy(workload.model, known), known)
    if dtype is not None:
        workload.model.to(dtype)
        batch = tree_map_only(
            Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, batch
        )
    config = config.changed(memory={"recompute": [f"{name}={level}" for name, level in levels.items()]})
    strategy = strategy_of(config, CPU, workload.training)
    stepper = Stepper(workload, config, CPU, total_steps=1000, strategy=strategy)
    torch.manual_seed(0)
    stepper.forward_backward(batch, no_phase)
    gradients = (item.grad for item in stepper.parameters if item.grad is not None)
    return [getattr(one, "_local_tensor", one).clone() for one in gradients]

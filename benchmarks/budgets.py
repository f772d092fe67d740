"""Memory budgets: is a plan ever over its budget, does it change a gradient, and what does it cost?

Random budgets between the least that a model can be trained with and what it takes without a plan. A plan is judged
by a recording of a step at the whole micro-batch, which the simulated allocator replays with addresses in both orders.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ndd_engine.config import read
from ndd_engine.predict.allocator import Rules
from ndd_engine.predict.budget import BudgetPlanner, Plan
from ndd_engine.predict.estimate import MANY, ONE, Memory
from ndd_engine.predict.step_probes import Prober, endless
from ndd_engine.train.checkpoint_state import kept_buffers, kept_random
from ndd_engine.train.prepare import seed
from ndd_engine.workloads.factory_data import prepare
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
}
ONLY = tuple(CASES)
MICRO = 64


class OnGpu(Prober):
    """Recorded on the CPU, and replayed as a GPU would: reserved bytes instead of those in use."""

    def memory(self, outside_bytes: int, at: Sequence[int] = ()) -> Memory:
        return replace(super().memory(outside_bytes, at), on="gpu")


@dataclass(frozen=True)
class Judged:
    """One budget. over: whether the recorded step takes more; None without a plan. differs: of gradients, at most."""

    plan: Plan
    over: bool | None
    differs: float


def measure(options: Options) -> Table:
    """20 budgets of each model; --quick 2."""
    table = Table(
        "plans for random memory budgets, by recordings of whole steps that the simulated allocator replays",
        ("model", "blocks", "budgets", "plans", "over budget", "gradients differ by", "slowest"),
    )  # fmt: skip
    for name in options.wanted(CASES, str):
        say(f"budgets: {name}")
        rows = list(_judged(name, options.repeats(20, 2)))
        plans = [row for row in rows if row.plan.levels]
        slower = [row.plan.slower for row in plans if row.plan.slower]
        table.add(
            name, str(max(row.plan.blocks for row in rows)), str(len(rows)), str(len(plans)),
            str(sum(bool(row.over) for row in rows)), f"{max((row.differs for row in plans), default=0.0):.1g}",
            f"{max(slower):.2f}x" if slower else "",
        )  # fmt: skip
    return table


def _judged(name: str, count: int) -> Iterator[Judged]:
    workload, sets, accumulation = CASES[name]
    shape = (
        f"batch.micro={MICRO}",
        f"batch.accumulation={accumulation}",
        "run.threads=1",
        "run.max_steps=10",
    )
    config = read(None, ["run.device=cpu", *shape, *sets], workload).resolve()
    torch.set_num_threads(1)
    seed(config.run.seed)
    prober = OnGpu(config, prepare(config, lambda _: None), CPU, lambda _: None)
    prober.warm()
    plain = prober.memory(0)
    most = plain.peak(MICRO, accumulation)
    planner = BudgetPlanner(prober, plain, 0, runs_plain=True)
    least = planner.plan(1).peak_bytes
    draw = random.Random(name)
    for _ in range(count):
        budget = draw.randint(least, most)
        plan = planner.plan(budget)
        if plan.memory is None:
            yield Judged(plan, None, 0.0)
            continue
        trace = prober.with_levels(plan.levels).trace(MICRO).until(ONE if accumulation == 1 else MANY)
        reserved = max(replay.peak_reserved for replay in trace.on_any_gpu(Rules.of_environment()))
        yield Judged(plan, reserved > budget, _difference(prober, plan))


def _difference(prober: Prober, plan: Plan) -> float:
    """The largest difference of a gradient with and without the plan."""
    one, other = _gradients(prober, {}), _gradients(prober, plan.levels)
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def _gradients(prober: Prober, levels: dict[str, str]) -> list[Tensor]:
    prober = prober.with_levels(levels)
    stepper = prober.stepper()
    batch = next(endless(prober.workload, prober.config, 8))
    with kept_random(CPU), kept_buffers(stepper.model):
        torch.manual_seed(0)
        stepper.forward_backward(batch, no_phase)
    found = [item.grad.clone() for item in stepper.parameters if item.grad is not None]
    stepper.drop_gradients()
    return found

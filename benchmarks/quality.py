"""Whether mixed precision affects quality: the workload's metric after the same steps, over several seeds.

For each seed, the same training (data, order, initial weights) runs in fp32 and in each mixed precision, as real runs
with an evaluation at the end. The mean difference between runs of the same seed is compared with the standard deviation
of the fp32 runs over seeds: a smaller difference is within the variation between seeds. This holds for these few steps
of a small model, not for complete trainings.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ndd_engine.errors import NddError

from .common import Options, Table, say
from .engine import trained

TITLE = "quality: metric in mixed precision - metric in fp32, vs. the spread over seeds"
COLUMNS = (
    "workload: metric", "precision", "seeds", "fp32, mean", "fp32, sd over seeds", "difference, mean", "min", "max",
    "verdict",
)  # fmt: skip
WITHIN, OUTSIDE = "within the spread", "outside the spread"
_ONLY_THE_END = (
    "run.epochs=1000000", "evaluate.every_epochs=0", "checkpoint.every_epochs=0", "checkpoint.every_minutes=0.0",
    "checkpoint.at_end=false",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A small training that makes progress within its steps.

    fp16: whether to measure fp16 on the CPU too, where it may be missing or a hundred times slower.
    """

    workload: str
    steps: int
    sets: tuple[str, ...]
    fp16: bool = True
    note: str = ""


CASES = (
    Case("eeg", 200, ("workload.samples=20000", "batch.micro=256")),
    Case(
        "antispoof", 240, ("workload.size=tiny", "workload.clips=200", "workload.eval_fraction=0.4",
                           "batch.sequence=8000", "optimizer.lr=0.003"),
        fp16=False,
        note="the guide claims an EER within 0.1 points; the resolution of the EER with 80 clips is coarser",
    ),
    Case("chartext", 300, ("workload.size=tiny", "evaluate.batches=20")),
    Case("finetune", 100, ("workload.size=tiny", "loader.cache=true")),
    Case(
        "summarise", 40, ("workload.size=tiny", "schedule.warmup_steps=10", "evaluate.batches=10",
                          "workload.summaries=0"),
        fp16=False,
        note="no summaries are generated: after so few steps their ROUGE is meaningless",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """difference: mean over seeds of (mixed - plain). spread: standard deviation of plain over seeds."""

    difference: float
    spread: float
    within: bool


def judge(plain: Sequence[float], mixed: Sequence[float]) -> Verdict:
    """Compare a metric by seed, in the same order. Raises ValueError for fewer than two seeds or unequal numbers."""
    if len(plain) < 2:
        raise ValueError("a spread needs two seeds")
    difference = statistics.mean(b - a for a, b in zip(plain, mixed, strict=True))
    spread = statistics.stdev(plain)
    return Verdict(difference, spread, abs(difference) <= spread)


def measure(options: Options) -> Table:
    """All workloads in one table."""
    table = Table(TITLE, COLUMNS)
    seeds = range(1, 1 + options.repeats(5, 3, least=2))
    for case in options.cases(CASES):
        # Fewer steps for a rough result; they are printed in the notes.
        steps = options.repeats(case.steps, max(case.steps // 4, 10), least=10)
        table.note(
            f"{case.workload}: {steps} steps, seeds {', '.join(map(str, seeds))}, {' '.join(case.sets)}"
        )
        table.note(f"{case.workload}: {case.note}" if case.note else "")
        plain = _by_seed(case, "off", steps, seeds, options)
        if isinstance(plain, str):
            table.add(case.workload, f"failed: {plain}")
            continue
        for amp in options.cases(_precisions(case, options)):
            mixed = _by_seed(case, amp, steps, seeds, options)
            if isinstance(mixed, str):
                table.add(f"{case.workload}", amp, "n/a")
                table.note(f"{case.workload} in {amp}: {mixed}")
                continue
            _rows(table, case.workload, amp, plain, mixed)
    return table


Metrics = dict[str, float]


def _precisions(case: Case, options: Options) -> tuple[str, ...]:
    fp16 = options.device.startswith("cuda") or (case.fp16 and not options.quick)
    return ("bf16", "fp16") if fp16 else ("bf16",)


def _rows(table: Table, workload: str, amp: str, plain: Sequence[Metrics], mixed: Sequence[Metrics]) -> None:
    # The main metric, and the loss if that is a different one.
    names = dict.fromkeys([next(iter(plain[0])), "loss"])
    for name in names:
        left, right = [each[name] for each in plain], [each[name] for each in mixed]
        differences = [b - a for a, b in zip(left, right, strict=True)]
        found = judge(left, right)
        table.add(
            f"{workload}: {name}", amp, str(len(left)), f"{statistics.mean(left):.4g}", f"{found.spread:.2g}",
            f"{found.difference:+.2g}", f"{min(differences):+.2g}", f"{max(differences):+.2g}",
            WITHIN if found.within else OUTSIDE,
        )  # fmt: skip


def _by_seed(case: Case, amp: str, steps: int, seeds: range, options: Options) -> list[Metrics] | str:
    """The metrics of each seed, or the error."""
    say(f"quality: {case.workload}, {'fp32' if amp == 'off' else amp}")
    sets = (
        *_ONLY_THE_END, *case.sets, *options.small(case.workload),
        f"precision.amp={amp}", f"run.max_steps={steps}", f"run.device={options.device}",
        # The guides' fp32 is without TF32; models this small are no faster with more threads.
        "precision.tf32=false", "run.threads=1",
    )  # fmt: skip
    try:
        return [metrics_at_end(case.workload, (*sets, f"run.seed={seed}")) for seed in seeds]
    except NddError as error:
        return str(error)


def metrics_at_end(workload: str, sets: Sequence[str]) -> Metrics:
    """The metrics at the end of a run, the main one first. Raises NddError if the run failed."""
    with tempfile.TemporaryDirectory(prefix="ndd-bench-") as folder:
        found = trained(workload, sets, Path(folder))
    # A run freezes its objects while it trains; many runs in one process would keep them all.
    gc.unfreeze()
    if found.end.status != "done":
        raise NddError(found.end.reason)
    done = [event for event in found.of("mark") if event["kind"] == "evaluation"]
    if not done:
        raise NddError("the run ended without an evaluation")
    return dict(done[-1]["data"]["metrics"])

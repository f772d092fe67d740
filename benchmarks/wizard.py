"""The wizard vs. measurements: its response time, the accuracy of its predictions, and the quality of its choice.

For each workload: the wizard with its default answers (goal "throughput"), timed; its verified proposals, predicted vs.
measured. Then again, and a grid of up to 20 configurations within the same limits, each measured: its choice should be
within 5 % of the fastest. The maximum of many noisy figures is biased upwards, so the two are measured against each
other in ABBA blocks. For a GPU that is not in this machine, the time to the table.

`steps`: the wizard probes once and measures later, so a change of other load or clock rates appears as an error of its
prediction. There each probe lies between two blocks of training and is compared with their mean, which leaves the
error of the prediction itself. By how much the two blocks differ shows the noise that no prediction can capture.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import fmean, median

from ndd_engine.trial.estimates import Estimate, abba_log_ratio, estimate
from ndd_engine.trial.sides import SideProcess
from ndd_engine.wizard.planner import Planner, Situation, proposals
from ndd_engine.wizard.proposals import BUDGET_S, Answers, Proposal
from ndd_engine.wizard.session import ProposalSet, best_measured, propose, side_of, to_verify, verify

from .common import Options, Table, as_percent, as_seconds, quantile, say
from .engine import BLOCK_S, step_s, warm_up

GRID = 20
ABSENT = "RTX 4070 Laptop"
GRID_S = 120.0
VERIFY_S = BUDGET_S
# For comparing the choice with the best of the grid.
ABBA_BLOCKS = 6
# Sizes suitable for few cores.
SETS: dict[str, tuple[str, ...]] = {
    "eeg": ("run.device={device}",),
    "chartext": ("run.device={device}", "workload.size=mini"),
    "antispoof": ("run.device={device}", "workload.size=tiny", "workload.clips=160", "loader.cache=true"),
    "finetune": ("run.device={device}", "workload.size=tiny", "workload.document_chars=3000"),
    "summarise": ("run.device={device}", "workload.size=tiny", "workload.pairs=800", "workload.summaries=0"),
}


@dataclass
class Outcome:
    """One workload. Seconds; errors: predicted over measured minus 1."""

    workload: str
    first_s: float = 0.0
    table_s: float = 0.0
    absent_s: float | None = None
    whole_s: float = 0.0
    step_errors: list[float] = field(default_factory=list)
    memory_errors: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    chosen: str = ""
    grid: int = 0
    over_best: Estimate | None = None


def measure(options: Options) -> list[Table]:
    """All selected workloads. --quick skips the grid."""
    outcomes = [_outcome(workload, options) for workload in options.cases(SETS)]
    table = Table(
        "the wizard: response time, accuracy and choice",
        ("workload", "first proposals", "whole table", f"for {ABSENT}", "with verification", "step: median error",
         "largest", "memory: median error", "largest", "choice", "grid", "vs. its best"),
    )  # fmt: skip
    for outcome in outcomes:
        absent = "not measured" if outcome.absent_s is None else as_seconds(outcome.absent_s)
        table.add(
            outcome.workload, as_seconds(outcome.first_s), as_seconds(outcome.table_s), absent,
            as_seconds(outcome.whole_s), *_errors(outcome.step_errors), *_errors(outcome.memory_errors),
            outcome.chosen, str(outcome.grid), _interval(outcome.over_best),
        )  # fmt: skip
    steps = [abs(error) for outcome in outcomes for error in outcome.step_errors]
    if steps:
        table.note(
            f"steps of {len(steps)} verified proposals: median error {as_percent(median(steps))} (target 5 %), p90 "
            f"{as_percent(quantile(steps, 0.9))} (target 15 %)"
        )
    spreads = [spread for outcome in outcomes for spread in outcome.spreads]
    if spreads:
        table.note(
            f"rounds of the same proposal: median difference {as_percent(median(spreads))}, maximum "
            f"{as_percent(max(spreads))} (noise of this machine)"
        )
    table.note(
        "first proposals: after loading the workload (target 10 s); whole table: from the start; "
        f"for {ABSENT}: the whole table of the workload's default size for a GPU that is not there, from the start "
        "(target 20 s); with verification: total (target 2 min)"
    )
    return [table]


def answers_of(workload: str, options: Options) -> Answers:
    """The wizard's defaults, for a size suitable for few cores."""
    sets = (*SETS[workload], *options.small(workload))
    return Answers(workload=workload, sets=tuple(item.format(device=options.device) for item in sets))


def _outcome(workload: str, options: Options) -> Outcome:
    say(f"wizard: {workload}")
    outcome = Outcome(workload)
    answers = answers_of(workload, options)
    stop = threading.Event()
    begin = time.perf_counter()
    loaded: list[float] = []

    def look(proposed: ProposalSet) -> None:
        now = time.perf_counter()
        if not proposed.rows:
            loaded.append(now)
        elif not outcome.first_s:
            outcome.first_s = now - loaded[0]
            if options.smoke:
                stop.set()

    proposed = propose(answers, silent, stop, look)
    outcome.table_s = time.perf_counter() - begin
    if not options.smoke:
        at = time.perf_counter()
        propose(Answers(workload=workload, gpu=ABSENT), silent, threading.Event())
        outcome.absent_s = time.perf_counter() - at
        begin += time.perf_counter() - at
    chosen = options.cases(to_verify(proposed, answers))
    seconds = options.seconds(VERIFY_S, VERIFY_S)
    verified = verify(proposed.situation, answers, chosen, seconds, silent, threading.Event())
    outcome.whole_s = time.perf_counter() - begin
    for one in verified:
        known = one.measured
        if known is None or known.step_s is None:
            continue
        if one.step_s:
            outcome.step_errors.append(one.step_s / known.step_s - 1)
        if known.spread is not None:
            outcome.spreads.append(known.spread)
        if one.memory_bytes and known.memory_bytes:
            outcome.memory_errors.append(one.memory_bytes / known.memory_bytes - 1)
    if not options.quick:
        _against_grid(outcome, answers)
    return outcome


def _against_grid(outcome: Outcome, answers: Answers) -> None:
    """Compare the speed of the choice with the fastest configuration of the grid."""
    stop = threading.Event()
    proposed = propose(answers, silent, stop)
    verified = verify(proposed.situation, answers, to_verify(proposed, answers), VERIFY_S, silent, stop)
    best = best_measured(verified, answers)
    if best is None:
        return
    outcome.chosen = f"{best.batch.micro} {best.model.precision}"
    fitting = [
        one
        for one in proposed.rows
        if one.fits and one.enough_steps and not one.alternative and one.key != best.key
    ]
    chosen = (
        {round(place * (len(fitting) - 1) / max(GRID - 2, 1)) for place in range(GRID - 1)} if fitting else ()
    )
    rows = [fitting[place] for place in sorted(chosen)]
    fresh = [replace(one, measured=None) for one in (best, *rows)]
    found = verify(proposed.situation, answers, fresh, GRID_S, silent, stop)
    rates = {
        one.key: one.batch.items / one.measured.step_s
        for one in found
        if one.measured is not None and one.measured.step_s is not None
    }
    outcome.grid = len(rates)
    if not rates:
        return
    fastest = max(rates, key=lambda key: rates[key])
    winner = next((one for one in rows if one.key == fastest), None)  # None: the choice itself
    outcome.over_best = Estimate(1.0, 1.0, 1.0, 0) if winner is None else _paired(answers, winner, best)


def _paired(answers: Answers, other: Proposal, mine: Proposal) -> Estimate | None:
    """Items per second of `mine` over those of `other`, in ABBA blocks."""
    sides = [side_of(answers, one) for one in (other, mine)]
    try:
        for side in sides:
            warm_up(side)

        def rate(index: int) -> float:
            return (other, mine)[index].batch.items / step_s(sides[index])

        return estimate([abba_log_ratio(rate(0), rate(1), rate(1), rate(0)) for _ in range(ABBA_BLOCKS)])
    finally:
        for side in sides:
            side.close()


def _errors(errors: Sequence[float]) -> tuple[str, str]:
    if not errors:
        return "none", ""
    return as_percent(median(map(abs, errors))), f"{max(errors, key=abs):+.1%}"


def _interval(found: Estimate | None) -> str:
    if found is None:
        return "not measured"
    if not found.blocks:
        return "is the best"
    return f"{found.ratio:.3f}x (95 % CI {found.low:.3f} to {found.high:.3f})"


def silent(_text: str, _share: float) -> None:
    """Reports no progress."""


# Step times, with probes and training in turn.


@dataclass
class Row:
    """One proposal: (predicted, measured before, measured after) seconds of a step, by round."""

    proposal: Proposal
    rounds: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def errors(self) -> list[float]:
        """Predicted over measured minus 1, of each round."""
        return [predicted / fmean(around) - 1 for predicted, *around in self.rounds]

    @property
    def error(self) -> float:
        return median(self.errors)

    @property
    def spread(self) -> float:
        """The median relative difference of the blocks around a probe."""
        return median(max(around) / min(around) - 1 for _, *around in self.rounds)


def steps(options: Options) -> list[Table]:
    """Step times predicted vs. measured, with probes and training alternating."""
    table = Table(
        "predicted vs. measured step times",
        ("workload", "proposal", "predicted (s)", "measured (s)", "error", "by round", "blocks differ by"),
    )
    rows: list[Row] = []
    for workload in options.cases(SETS):
        say(f"steps: {workload}")
        found = _rows(answers_of(workload, options), options)
        for row in found:
            batch, model = row.proposal.batch, row.proposal.model
            table.add(
                workload, f"{batch.micro} x {batch.accumulation}, {model.sequence}, {model.precision}",
                as_seconds(median(one[0] for one in row.rounds)),
                as_seconds(median(fmean(one[1:]) for one in row.rounds)), f"{row.error:+.1%}",
                f"{min(row.errors):+.1%} to {max(row.errors):+.1%}", as_percent(row.spread),
            )  # fmt: skip
        rows += found
    if rows:
        errors = [abs(row.error) for row in rows]
        single = [abs(error) for row in rows for error in row.errors]
        table.note(
            f"{len(rows)} proposals: median error {as_percent(median(errors))} (target 5 %), p90 "
            f"{as_percent(quantile(errors, 0.9))} (target 15 %); single rounds {as_percent(median(single))} and "
            f"{as_percent(quantile(single, 0.9))}"
        )
        table.note(
            f"blocks before and after a probe: median difference {as_percent(median(row.spread for row in rows))}"
        )
    return [table]


def _rows(answers: Answers, options: Options) -> list[Row]:
    """The proposals that the wizard would verify, measured."""
    with Planner(answers, silent, threading.Event()) as planner:
        situation = planner.open()
        found = tuple(options.cases(planner.probe(situation)))
        every = tuple(row for one in found for row in proposals(situation, answers, one))
        chosen = options.cases(to_verify(ProposalSet(situation, found, every), answers))
        rows: list[Row] = []
        for _, group in groupby(sorted(chosen, key=lambda one: str(one.model)), lambda one: one.model):
            rows += _model(planner, situation, answers, list(group), options)
    return rows


def _model(
    planner: Planner, situation: Situation, answers: Answers, group: Sequence[Proposal], options: Options
) -> list[Row]:
    rows, block_s = [Row(one) for one in group], options.seconds(BLOCK_S, BLOCK_S, least=0.1)
    sides: list[SideProcess] = []
    try:
        for one in group:
            side = side_of(answers, one)
            sides.append(side)
            warm_up(side, block_s)
        before = [step_s(side, block_s) for side in sides]
        for _ in range(options.repeats(5, 2)):
            probed = proposals(situation, answers, planner.probe_one(situation, group[0].model))
            predicted = {one.key: one.step_s for one in probed}
            after = [step_s(side, block_s) for side in sides]
            for row, first, last in zip(rows, before, after, strict=True):
                own = predicted[row.proposal.key]
                assert own is not None  # proposals without a prediction are not chosen
                row.rounds.append((own, first, last))
            before = after
    finally:
        for side in sides:
            side.close()
    return rows

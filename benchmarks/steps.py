"""Step times predicted by the wizard vs. measured ones, with probes and training alternating.

The wizard probes once and measures later, so a change of other load or clock rates appears as a prediction error. Here
each probe lies between two blocks of training and is compared with their mean, which leaves the error of the prediction
itself. The difference between the blocks before and after a probe shows the noise that no prediction can capture.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean, median

from ndd_engine.trial.sides import SideProcess
from ndd_engine.wizard.planner import Planner, Situation, proposals
from ndd_engine.wizard.proposals import Answers, Model, Proposal
from ndd_engine.wizard.session import ProposalSet, side_of, to_verify

from .common import Options, Table, as_percent, as_seconds, quantile, say
from .sides import BLOCK_S, step_s, warm_up
from .wizard import SETS, answers_of, silent


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


def measure(options: Options) -> list[Table]:
    """All selected workloads."""
    table = Table(
        "predicted vs. measured step times",
        ("workload", "proposal", "predicted (s)", "measured (s)", "error", "by round", "blocks differ by"),
    )
    rows: list[Row] = []
    for workload in options.cases(filter(options.wants, SETS)):
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
        for model, group in groupby(sorted(chosen, key=lambda one: str(one.model)), lambda one: one.model):
            rows += _model(planner, situation, answers, model, list(group), options)
    return rows


def _model(
    planner: Planner,
    situation: Situation,
    answers: Answers,
    model: Model,
    group: Sequence[Proposal],
    options: Options,
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
            probed = proposals(situation, answers, planner.probe_one(situation, model))
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

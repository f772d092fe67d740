"""`ndd-console scaling`."""

from __future__ import annotations

import sys
from dataclasses import replace

import click

from ndd_console.words.scaling import scaling_blocks
from ndd_engine.api.sources import baseline_of
from ndd_engine.errors import EXIT_DONE, EXIT_FAILED, UsageError
from ndd_engine.text import foreign
from ndd_engine.trial.scaling import (
    HOLDS,
    ScalingRequest,
    ScalingState,
    counts_of,
    plan,
    run_scaling,
    strategies_of,
)

from . import options
from .completion import run_names
from .printing import record, show, stoppable
from .try_ import TrialProgress


@options.command(
    "0 measured, 1 a measurement failed, 2 usage or configuration error",
    "scaling run.toml",
    "scaling chartext-001 --ranks 1,2,4 --budget 120",
    "scaling run.toml --strategy ddp,fsdp2 --hold effective",
    stops=True,
)
@click.argument("baseline", metavar="[RUN|CONFIG]", required=False, shell_complete=run_names)
@options.workload_option
@options.set_option
@click.option(
    "--ranks",
    metavar="N,N,...",
    help="Numbers of ranks; the others are compared with the smallest (default: 1, 2, 4, ... up to the number of GPUs, "
    "on a CPU up to that of cores).",
)
@click.option("--strategy", metavar="NAME,...", help="ddp, fsdp2 or both (default: as configured).")
@click.option(
    "--hold",
    type=click.Choice(HOLDS),
    help="What stays the same: the batch of a rank, so that the effective batch grows with the ranks (weak scaling), "
    "or the effective batch (strong scaling). Default: effective if batch.effective is set, otherwise rank.",
)
@options.budget_option(
    "Maximum duration of each comparison with the smallest number of ranks, setup included; it ends early once the "
    "interval is narrow.",
    120.0,
)
@options.pause_option
@options.json_option
@options.gathered
def scaling(asked: options.Asked) -> int:
    """Each number of ranks is compared with the smallest in a trial.

    Both alternate in ABBA blocks and are started several times. For each number, prints the step time, the throughput,
    the share of linear scaling with its 95 % CI, the exposed communication (exchange), the wait for slower ranks
    (skew), the peak memory of a rank, and what is lost.

    The configuration is that of RUN (`last`: the newest one), CONFIG (a TOML file) or the default workload. Evaluations
    and checkpoints are left out. A live RUN is paused during the trials; they are stored in its record. Ctrl-C stops
    early and prints the results so far.
    """
    base = baseline_of(asked.baseline, asked.workload, asked.root)
    if base.run is not None and base.run.command.exists():
        raise UsageError(
            f"{base.name} is one of a script, whose number of ranks its own command sets: start it with each number "
            "(ndd-console run -- torchrun --nproc-per-node N ...) and compare the runs"
        )
    from ndd_engine.trial.trial import held, to_pause

    base = replace(base, sets=(*base.sets, *asked.sets))
    ranks = () if asked.ranks is None else counts_of(asked.ranks)
    strategies = () if asked.strategy is None else strategies_of(asked.strategy)
    request = ScalingRequest(base, ranks, strategies, asked.hold, asked.budget)
    _, points = plan(request)  # report mistakes before anything is paused
    paused = to_pause(base, asked.root, asked.pause, max(point.ranks for point in points))
    progress = TrialProgress(sys.stderr)

    def look(state: ScalingState) -> None:
        """The batch once, then each trial, and its result when it is known. Called a few times a second."""
        texts = [foreign(row.text) for row in state.rows if row.text]
        last = len(texts) >= len(state.rows) - 1  # this result is in the table at once
        progress.results([state.batch_text, *(() if last else texts)] if state.rows else [])
        if state.progress is not None:
            progress.look(replace(state.progress, stage=f"{state.stage}: {state.progress.stage}"))

    with stoppable("the measurement") as stop, held(paused, progress.news, stop):
        state = run_scaling(request, look, stop, lambda trial: record(base.run, trial, progress.news))
    progress.finish()
    show(state.to_dict() if asked.as_json else scaling_blocks(state, asked.baseline or "CONFIG"))
    bad = state.failed or any(row.trial is not None and row.trial.verdict == "failed" for row in state.rows)
    return stop.exit_status or (EXIT_FAILED if bad else EXIT_DONE)

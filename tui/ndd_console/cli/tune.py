"""`ndd-console ladder`: the settings one on top of the other, each kept only if it measurably helps here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ndd_console.process.terminal import interactive
from ndd_console.view.interval import interval_text
from ndd_console.view.rows import cells, foreign
from ndd_engine.errors import EXIT_FAILED, UsageError
from ndd_engine.record.events import TrialEvent
from ndd_engine.record.rundir import find_run, runs_root
from ndd_engine.text import MISSING, printable, size
from ndd_engine.trial.request import Base

from .completion import run_names
from .measuring import check_writable, stoppable, write
from .options import Finite, configuration

if TYPE_CHECKING:
    from ndd_engine.trial.tuning import TuningRow, TuningState

_EVERY_S = 10.0
_HEADINGS = ("setting", "to the previous", "to the start", "peak memory", "losses", "")


@click.command()
@configuration
@click.option("--run", metavar="RUN", help="Begin with the configuration of a run.", shell_complete=run_names)
@click.option(
    "--budget", type=Finite(min=1), default=60.0, show_default=True, metavar="SECONDS",
    help="At most so long for one measurement; there are up to two a setting.",
)  # fmt: skip
@click.option("--only", multiple=True, metavar="NAME", help="Only this setting or group; may be repeated.")
@click.option("--pause", is_flag=True, help="Pause the other runs on the same device meanwhile.")
@click.option("-o", "output", type=click.Path(path_type=Path), help="Write the resulting TOML to this file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def tune(
    ctx: click.Context,
    config: Path | None,
    workload: str | None,
    sets: tuple[str, ...],
    run: str | None,
    budget: float,
    only: tuple[str, ...],
    pause: bool,
    output: Path | None,
    as_json: bool,
) -> int:
    """Try the settings that may help here one on top of the other, and keep what measurably does.

    In a terminal a screen shows how far it is. Prints a table and the resulting configuration, unless that was
    written. A live RUN is paused meanwhile. Ctrl-C stops early and prints what was measured so far.
    """
    base = _base(ctx, config, workload, sets, run)
    check_writable(output)
    from ndd_engine.trial.pausing import held, to_pause

    beside = to_pause(base, runs_root(ctx.obj["runs"]), pause)
    if not as_json and interactive():
        from ndd_console.jobs.tuning import show

        state, status, saved = show(base, budget, only, output, beside, ctx.obj["ascii"])
        if saved:
            click.echo(f"wrote {printable(saved)}", err=True)
    else:
        from ndd_engine.trial.tuning import run_tuning

        def say(line: str) -> None:
            click.echo(line, err=True)

        with stoppable("the ladder") as stop, held(beside, say, stop):
            state = run_tuning(base, budget, only, TuningProgress(say).look, stop)
        status, saved = stop.exit_status, ""
        if output is not None:
            write(output, state.toml)
            saved = str(output)
    if as_json:
        click.echo(json.dumps(state.to_dict(), indent=2, allow_nan=False))
    else:
        for line in describe(state):
            click.echo(line)
        if not saved:
            click.echo(f"\n{state.toml}", nl=False)
    return status or (EXIT_FAILED if state.stopped else 0)


def _base(
    ctx: click.Context, config: Path | None, workload: str | None, sets: tuple[str, ...], run: str | None
) -> Base:
    if run is None:
        name = (
            str(config) if config is not None else f"the workload {workload}" if workload else "the defaults"
        )
        return Base(name, config, workload, sets)
    if config is not None or workload is not None:
        raise UsageError("--run takes the configuration of a run: leave out CONFIG and --workload")
    found = find_run(runs_root(ctx.obj["runs"]), run)
    if not found.config.exists():
        raise UsageError(f"run {found.name} has no config.toml: it ended before training began")
    return Base.of_run(found, sets)


class TuningProgress:
    """Says what is new in a ladder's state through `say`, one line at a time."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._stage = ""
        self._rows: tuple[TuningRow, ...] = ()
        self._next = 0.0

    def look(self, state: TuningState) -> None:
        """Tell what changed since the last look, and how far a measurement is every few seconds."""
        rows, self._rows = self._rows, state.rows
        if not rows and state.rows:
            waiting = [row.candidate.name for row in state.rows if row.state == "waiting"]
            self._say(f"{len(waiting)} to measure: {', '.join(waiting) or 'nothing'}")
        for before, row in zip(rows, state.rows, strict=False):
            # What is skipped from the beginning is in the table.
            if before.state != row.state and row.state in ("kept", "dropped", "skipped"):
                figures = f" {_ratio(row.trial)}" if row.trial and row.trial.ratio is not None else ""
                self._say(printable(f"{row.state} {row.candidate.name}:{figures} {row.reason}"))
        now = self._clock()
        if state.stage != self._stage and not state.done:
            self._stage, self._next = state.stage, now + _EVERY_S
            self._say(printable(f"{state.stage} …"))
        elif state.progress is not None and now >= self._next:
            self._next = now + _EVERY_S
            progress = state.progress
            so_far = interval_text(progress.ratio, progress.low, progress.high)
            self._say(
                f"  {printable(progress.stage)}, {progress.elapsed_s:.0f} of at most {progress.budget_s:.0f} s"
                + (f", so far {so_far}" if so_far else "")
            )


def describe(state: TuningState) -> Iterator[str]:
    """The table, the settings that were not tried, and the result."""
    from ndd_engine.trial.tuning import NOT_ASKED

    tried = [row for row in state.rows if row.state in ("kept", "dropped")]
    grid = [_HEADINGS, *map(_cells, tried)] if tried else []
    widths = [max(cells(row[column]) for row in grid) for column in range(len(_HEADINGS))] if grid else []
    for row in grid:
        padded = (text + " " * (width - cells(text)) for text, width in zip(row, widths, strict=True))
        yield "  ".join(padded).rstrip()
    for item in state.rows:
        if item.state == "skipped" and item.reason != NOT_ASKED:
            yield f"not tried: {item.candidate.title}: {foreign(item.reason)}"
    yield foreign(state.text)


def _cells(row: TuningRow) -> tuple[str, ...]:
    trial = row.trial
    peak = size(trial.change.get("peak_bytes")) if trial else MISSING
    loss = trial.loss if trial else MISSING
    return (
        row.candidate.title, _ratio(trial), _ratio(row.to_start) if row.to_start else "", peak, foreign(loss),
        foreign(f"{row.state}: {row.reason}"),
    )  # fmt: skip


def _ratio(trial: TrialEvent | None) -> str:
    return (interval_text(trial.ratio, trial.low, trial.high) if trial else "") or MISSING

"""`ndd-console tune`."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ndd_console.process.terminal import Leash, capabilities, interactive, supervised
from ndd_console.words.trial import measurement, setting_line, to_measure_text, tuning_blocks
from ndd_engine.api.sources import baseline_of, configured_run
from ndd_engine.config import read
from ndd_engine.errors import EXIT_FAILED, UsageError
from ndd_engine.record.rundir import RunDir, find_run
from ndd_engine.train.request import preflight
from ndd_engine.trial.outcome import Base
from ndd_watch.changes import TABLE

from . import options
from .completion import run_names
from .printing import ProgressLines, check_writable, say, show, stoppable, write

if TYPE_CHECKING:
    from ndd_engine.trial.tuning import TuningRow, TuningState

# Numbers in the names stand for the counts that are tried on a machine.
ONLY = [row.tries.names for row in TABLE.values() if row.tries is not None]


@options.command(
    "0 finished, 1 stopped by an error, 2 usage or configuration error",
    "tune run.toml -o tuned.toml",
    "tune --run chartext-001 --only workers --budget 30",
    "tune -- python train.py",
    stops=True,
)
@click.argument("words", nargs=-1, metavar="[CONFIG | -- COMMAND...]", type=click.UNPROCESSED)
@options.workload_option
@options.set_option
@click.option("--run", metavar="RUN", help="Start from the configuration of a run.", shell_complete=run_names)
@options.budget_option("Maximum duration of one measurement; each setting takes up to two.")
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help=f"Try only this setting or group; repeatable. Names: {', '.join(ONLY)}.",
)
@options.pause_option
@options.side_effects_option
@options.output_option("Write the resulting TOML to this file.")
@options.json_option
@options.gathered
def tune(asked: options.Asked) -> int:
    """Each setting is measured in an A/B trial against the best configuration so far.

    Each one kept is measured again against the baseline, and dropped if that does not confirm it. Settings that change
    the training itself, such as the learning rate, are not tried.

    Shows a live screen in a terminal. Prints a table, and the resulting TOML unless it was written to a file. A live
    RUN is paused during the measurements. Ctrl-C stops early and prints the results so far.

    For a training script, given as COMMAND or by the RUN that observed it, measures the changes that need no edit of
    the script. The edit that makes what is kept is printed as a diff.
    """
    root, run, words, output = asked.root, asked.run, asked.words, asked.output
    check_names(asked.only)
    if run is not None and (words or asked.workload is not None):
        raise UsageError("--run uses the configuration of a run: omit CONFIG and --workload")
    script = None if run is None else find_run(root, run)
    if len(words) > 1 or (script is not None and script.command.exists()):
        if asked.workload is not None or asked.sets or output is not None:
            raise UsageError("a script is tuned without CONFIG, --workload, --set and -o")
        from .script_tuning import tune_script_run

        return tune_script_run(asked, script, TuningProgress(say).look)
    if asked.allow_side_effects:
        raise UsageError("--allow-side-effects is for a training script")
    if run is not None:
        base = Base.of_run(configured_run(root, run), asked.sets)
    else:
        config = Path(words[0]) if words else None
        name = str(config) if config is not None else baseline_of(None, asked.workload, root).name
        base = Base(name, config, asked.workload, asked.sets)
    # Reported before the screen opens and before a live run is paused.
    preflight(read(base.config, base.sets, base.workload), use_torch=False)
    check_writable(output)
    from ndd_engine.trial.trial import held, to_pause

    paused = to_pause(base, root, asked.pause)
    if not asked.as_json and interactive():
        return supervised(partial(_shown, asked, base, paused))
    from ndd_engine.trial.tuning import run_tuning

    with stoppable("tuning") as stop, held(paused, say, stop):
        state = run_tuning(base, asked.budget, asked.only, TuningProgress(say).look, stop)
    saved = ""
    try:
        if output is not None:
            write(output, state.toml)
            saved = str(output)
    finally:
        _print(state, asked.as_json, saved)  # also if it cannot be written: do not lose the measurements
    return stop.exit_status or (EXIT_FAILED if state.stopped else 0)


def check_names(names: Sequence[str]) -> None:
    """Raise UsageError for what no machine can try; what this one can is known later."""
    known = {name for names in ONLY for name in names.split(", ")}
    for name in names:
        if known.isdisjoint((name, re.sub(r"\d+$", "N", name))):
            raise UsageError(f"--only {name}: there is no such setting; allowed: {', '.join(ONLY)}")


def _shown(asked: options.Asked, base: Base, paused: Sequence[RunDir], leash: Leash) -> int:
    """Tune with a screen. Without `-o` a key of it writes the configuration to a new file."""
    from ndd_console.app import TuningApp
    from ndd_console.jobs.trials import TuningJob
    from ndd_console.sessions.hosting import hosted

    def sweep(tell: Callable[[TuningState], None], stop: threading.Event) -> TuningState:
        # Imports torch: only after the first paint.
        from ndd_engine.trial.trial import held
        from ndd_engine.trial.tuning import TuningState, run_tuning

        with held(paused, lambda text: tell(TuningState((), text)), stop):
            return run_tuning(base, asked.budget, asked.only, tell, stop)

    job = TuningJob(base.name, sweep, asked.output)
    status = hosted(TuningApp(job, capabilities(asked.ascii), job.start), job, leash)
    if job.error is not None:
        raise job.error
    assert job.state is not None
    if job.saved:
        say(f"wrote {job.saved}")
    _print(job.state, False, job.saved)
    return status or (EXIT_FAILED if job.state.stopped else 0)


def _print(state: TuningState, as_json: bool, saved: str) -> None:
    show(state.to_dict() if as_json else tuning_blocks(state))
    if not as_json and not saved:
        click.echo(f"\n{state.toml}", nl=False)


class TuningProgress(ProgressLines):
    """Progress of tuning in lines: each setting that is measured, and what became of it."""

    _rows: tuple[TuningRow, ...] = ()

    def look(self, state: TuningState) -> None:
        rows, self._rows = self._rows, state.rows
        if not rows and state.rows:
            self.news(to_measure_text(state.rows))
        for before, row in zip(rows, state.rows, strict=False):
            # Settings skipped from the start are in the table only.
            if before.state != row.state and row.state in ("kept", "dropped", "skipped"):
                self.news(setting_line(row))
        if state.stage != self._key and not state.done:
            self._key = state.stage
            self.news(f"{state.stage} …")
        elif state.progress is not None:
            self.update(f"  {measurement(state.progress)}")

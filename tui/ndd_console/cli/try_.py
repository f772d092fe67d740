"""`ndd-console try`."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from ndd_console.words.finding import proposed_text
from ndd_console.words.trial import edit_lines, left_out_text, measurement, trial_blocks
from ndd_engine.api.sources import baseline_of
from ndd_engine.errors import EXIT_DONE, EXIT_FAILED, UsageError
from ndd_engine.record.event import ASIDES
from ndd_engine.record.events import RunEvent, TrialEvent
from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.state import RunState
from ndd_engine.script.command import Command
from ndd_engine.script.trials import ARGUMENT, VARIABLE, is_start
from ndd_engine.text import printable
from ndd_engine.trial.outcome import Progress, TrialRequest, check_once

from . import options
from .completion import run_names
from .printing import ProgressLines, record, say, show, stoppable

# Share of the recorded time above which a trial says that it leaves evaluations and checkpoints out.
LEFT_OUT = 0.02


@options.command(
    "0 measured, whatever the verdict; 1 the trial failed, 2 usage or configuration error",
    "try --set loader.workers=4",
    "try chartext-001 --set precision.amp=bf16 --budget 120",
    "try run.toml --set batch.micro=64 --set batch.accumulation=2",
    "try last --set loader.workers=4 --apply",
    "try train-001 --arg batch-size=128",
    "try --set loader.workers=4 -- python train.py",
    stops=True,
    name="try",
)
@click.argument(
    "words", nargs=-1, metavar="[RUN|CONFIG | -- COMMAND...]", type=click.UNPROCESSED, shell_complete=run_names,
)  # fmt: skip
@options.set_option
@options.workload_option
@options.budget_option("Maximum duration, setup included; the trial ends early once the result is clear.")
@options.pause_option
@options.flag(
    "--separate-processes",
    "restarts",
    help="Measure in pairs of processes, even if one process could switch between both sides.",
)
@click.option("--cause", metavar="CAUSE", help="Finding that suggested the change, stored with the result.")
@click.option(
    "--arg", "arguments", metavar="NAME=VALUE", multiple=True,
    help="Try another argument of the script's command, e.g. batch-size=128; repeatable.",
)  # fmt: skip
@click.option(
    "--env", "variables", metavar="NAME=VALUE", multiple=True,
    help="Try another environment variable for the script; repeatable.",
)  # fmt: skip
@options.flag("--apply", help="Write the edit that makes a faster change to the script, after a question.")
@options.side_effects_option
@options.json_option
@options.gathered
def try_(asked: options.Asked) -> int:
    """The baseline is the configuration of RUN (`last`: the newest one), CONFIG (a TOML file) or the default workload.

    The candidate is the baseline with the --set values; run.epochs and run.max_steps apply to both. Both train from
    scratch and alternate in ABBA blocks, either in one process that switches between them or in several pairs of
    processes.

    Prints the speedup with its 95 % CI, peak memory, whether the losses agree, and the verdict: faster, slower, no
    difference or inconclusive.

    For the RUN of an observed script (ndd-console run), the change is applied without editing the script, in scratch
    copies of its folder. The edit that makes the change is shown as a diff. Evaluations and checkpoints are left out.
    A COMMAND is first observed in such a copy, as a new run.

    A live RUN is paused during the trial, and the result is stored in its record. Ctrl-C stops early and prints
    the result so far.
    """
    arguments = (f"{ARGUMENT}{item}" for item in asked.arguments)
    starts = (*arguments, *(f"{VARIABLE}{item}" for item in asked.variables))
    sets = (*asked.sets, *starts)
    check_once(sets)
    baseline = asked.words[0] if asked.words else None
    if len(asked.words) > 1:
        from ndd_engine.script.script_tuning import observe

        with stoppable("the trial") as stop:
            command = Command(asked.words, Path.cwd())
            baseline = observe(asked.root, command, say, stop, asked.allow_side_effects).name
        if stop.exit_status:
            return stop.exit_status
    base = baseline_of(baseline, asked.workload, asked.root)
    outside = asked.allow_side_effects
    if not sets and base.run is not None and (proposed := proposed_text(load_state(base.run).snapshot())):
        raise UsageError(f"no settings to try; the findings of {base.run.name} propose {proposed}")
    request = TrialRequest(base, sets, asked.budget, asked.cause, asked.restarts, outside)
    from ndd_engine.trial.trial import check, held, to_pause

    state = None  # of the run of an observed script
    paused: tuple[RunDir, ...] = ()
    if base.run is not None and base.run.command.exists():
        from ndd_engine.script.trials import check_script, run_script_trial, tried_run

        state = tried_run(request)
        assert state.run is not None
        check_script(request, state.run.config)
        paused = (base.run,) if base.run.live_owner() is not None else ()
        known = [trial for trial in state.trials if gained(trial, request.sets)]
        if asked.apply and not asked.as_json and known:
            say(f"{' '.join(request.sets)} was measured as faster before; it is not measured again")
            _edit(state.run, request, known[-1], asked.apply)
            return EXIT_DONE
        measure = partial(run_script_trial, request, state.run.config, state.run.device)
    elif asked.apply:
        raise UsageError("--apply edits an observed script; a configuration is written with tune -o FILE")
    elif starts or asked.allow_side_effects:
        raise UsageError("--arg, --env and --allow-side-effects are for observed scripts (ndd-console run)")
    else:
        from ndd_engine.trial.trial import run_trial

        check(request)  # report mistakes before anything is paused
        measure = partial(run_trial, request)
        paused = to_pause(base, asked.root, asked.pause)
    progress = TrialProgress(sys.stderr)
    with stoppable("the trial") as stop, held(paused, progress.news, stop):
        trial = measure(progress.look, stop)
    progress.finish()
    record(base.run, trial, progress.news)
    show(json.loads(trial.to_json(time.time())) if asked.as_json else trial_blocks(trial))
    if state is not None and not asked.as_json:
        _tell_of_script(state, request, trial, asked.apply)
    return stop.exit_status or (EXIT_FAILED if trial.verdict == "failed" else EXIT_DONE)


def _tell_of_script(state: RunState, request: TrialRequest, trial: TrialEvent, apply: bool) -> None:
    """What a trial of a script leaves out, and the edit that makes its change."""
    aside = sum(state.totals.phases.get(name, 0) for name in ASIDES)
    if any(map(is_start, request.sets)) and aside > LEFT_OUT * state.totals.wall_ns:
        say(left_out_text(aside / state.totals.wall_ns))
    if gained(trial, request.sets):
        assert state.run is not None
        _edit(state.run, request, trial, apply)
    elif apply:
        say("nothing was written: --apply needs a change that is faster")


def gained(trial: TrialEvent, sets: Sequence[str]) -> bool:
    """Whether exactly this change was measured as faster, and was in effect."""
    return trial.verdict == "faster" and sorted(trial.sets) == sorted(sets) and trial.in_effect is not False


def _edit(run: RunEvent, request: TrialRequest, trial: TrialEvent, apply: bool) -> None:
    """Show the edit that makes the change in the script; write it after a question."""
    from ndd_engine.script.trials import edit_for

    edit = edit_for(request, run, trial)
    show(edit_lines(edit))
    if edit.path is None:
        if apply:
            say("nothing was written: this change has to be made by hand")
    elif not apply:
        say("to write it, repeat the command with --apply: it asks first, and measures nothing again")
    elif not sys.stdin.isatty() or click.confirm(
        f"Write {printable(str(edit.path))}?", default=False, err=True
    ):
        edit.apply()
        say(f"wrote {edit.path}")


class TrialProgress(ProgressLines):
    """Progress of a trial: one line rewritten in place on a terminal, otherwise a line every few seconds."""

    def __init__(self, stream: Any) -> None:
        super().__init__(lambda text: click.echo(text, file=stream), lambda: self._elapsed_s)
        self._stream = stream
        self._moving = bool(stream.isatty())
        self._shown = False
        self._elapsed_s = 0.0

    def look(self, progress: Progress) -> None:
        text = printable(measurement(progress))
        if self._moving:
            width = max(shutil.get_terminal_size().columns - 1, 20)
            self._stream.write(f"\r\x1b[K{text[:width]}")
            self._stream.flush()
            self._shown = True
            return
        self._elapsed_s = progress.elapsed_s
        # Neither a part of a stage nor how long another trial has lasted is a new line.
        stage = progress.doing.partition(":")[0].partition(", for ")[0]
        self.stage((stage, progress.abba_blocks), text)

    def news(self, text: str) -> None:
        self.finish()
        super().news(text)

    def finish(self) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = False

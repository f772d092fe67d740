"""`ndd-console tune` of a training script: measures changes in scratch copies, prints the edit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ndd_console.words.trial import edit_lines, tuning_blocks
from ndd_engine.diagnose import diagnose
from ndd_engine.errors import EXIT_FAILED, UsageError
from ndd_engine.hardware.detect import detect
from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir
from ndd_engine.script.command import Command, check_contained
from ndd_engine.script.script_tuning import observe, tune_script
from ndd_engine.script.trials import run_script_trial
from ndd_engine.trial.campaign import Campaign
from ndd_engine.trial.tuning import Tuning, TuningState, place_of

from .options import Asked
from .printing import record, say, show, stoppable


def tune_script_run(asked: Asked, script: RunDir | None, look: Callable[[TuningState], None]) -> int:
    """Tune the script of a run, or the command that was given. look: gets the progress. Returns the exit status."""
    with stoppable("tuning") as stop:
        directory = script
        if directory is None:
            command = Command(asked.words, Path.cwd())
            directory = observe(asked.root, command, say, stop, asked.allow_side_effects)
        state = load_state(directory)
        if state.run is None:
            raise UsageError(f"run {directory.name} has not trained: there is nothing to tune")
        if not asked.allow_side_effects:
            check_contained(state.run.config)
        run, seen = state.run, diagnose(state.snapshot())
        campaign = Campaign(
            TuningState(), look, stop, asked.budget,
            lambda request, tell, stop: run_script_trial(request, run.config, run.device, tell, stop),
            lambda trial: record(directory, trial, say),
        )  # fmt: skip
        tuning = Tuning(campaign, asked.only, asked.allow_side_effects)
        tuned, edit = tune_script(directory, run, seen, place_of(detect(use_torch=False)), tuning)
    diff, advice = (edit.diff, edit.advice) if edit is not None else ([], ())
    if asked.as_json:
        show({**tuned.to_dict(), "diff": diff, "advice": advice})
    else:
        show(tuning_blocks(tuned))
        if edit is not None:
            show(edit_lines(edit))
    return stop.exit_status or (EXIT_FAILED if tuned.stopped else 0)

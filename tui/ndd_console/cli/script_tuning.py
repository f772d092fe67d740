"""`ndd-console tune` of a training script: observes it in a scratch copy, measures changes, prints the edit."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ndd_console.words.tuning import tuning_blocks
from ndd_engine.diagnose import diagnose
from ndd_engine.errors import EXIT_FAILED, UsageError
from ndd_engine.hardware.detect import detect
from ndd_engine.record.events import TrialEvent
from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir
from ndd_engine.run import Run
from ndd_engine.script.command import (
    OFFLINE,
    SCRATCH,
    UNWRITTEN,
    Command,
    check_contained,
    linked,
    refused_in,
    scratch,
)
from ndd_engine.script.script_run import Script, ScriptRequest
from ndd_engine.script.script_tuning import tune_script
from ndd_engine.script.trials import run_script_trial
from ndd_engine.trial.outcome import Progress, TrialRequest
from ndd_engine.trial.tuning import Tuning, place_of
from ndd_watch import LINKED

from .measuring import record, stoppable
from .options import Asked
from .printing import say, show
from .tune import TuningProgress

# How long the script is observed before its changes are measured.
OBSERVED_STEPS, OBSERVED_S, MOST_S = 60, 10.0, 60.0


def tune_script_run(asked: Asked, script: RunDir | None) -> int:
    """Tune the script of a run, or the command that was given. Returns the exit status."""
    with stoppable("tuning") as stop:
        directory = script or observed(
            asked.root, Command(asked.words, Path.cwd()), stop, asked.allow_side_effects
        )
        state = load_state(directory)
        if state.run is None:
            raise UsageError(f"run {directory.name} has not trained: there is nothing to tune")
        if not asked.allow_side_effects:
            check_contained(state.run.config)
        run, seen = state.run, diagnose(state.snapshot())

        def measure(
            request: TrialRequest, tell: Callable[[Progress], None], stop: threading.Event | None
        ) -> TrialEvent:
            trial = run_script_trial(request, run.config, run.device, tell, stop)
            if trial.verdict != "stopped":
                record(directory, trial, say)
            return trial

        look, side_effects = TuningProgress(say).look, asked.allow_side_effects
        tuning = Tuning(asked.budget, asked.only, look, stop, measure, side_effects)
        tuned, edit = tune_script(directory, run, seen, place_of(detect(use_torch=False)), tuning)
    diff, advice = (edit.diff, edit.advice) if edit is not None else ([], ())
    if asked.as_json:
        show({**tuned.to_dict(), "diff": diff, "advice": advice})
    else:
        show(tuning_blocks(tuned))
        if edit is not None:
            show(["", *diff, *(f"  {text}" for text in advice)])
    return stop.exit_status or (EXIT_FAILED if tuned.stopped else 0)


def observed(root: Path, command: Command, stop: threading.Event, outside: bool = False) -> RunDir:
    """Run the command in a scratch copy until enough of it was seen, then end it.

    outside: whether it may do what the copy does not contain. Raises UsageError if it wanted to, and may not.
    """
    command.check()
    command.check_repeatable()
    with tempfile.TemporaryDirectory(prefix=SCRATCH, ignore_cleanup_errors=True) as place:
        folder = scratch(command.folder, Path(place), root.absolute())
        os.environ.update(
            {**OFFLINE, **UNWRITTEN, LINKED: "" if outside else linked(Path(place), command.folder)}
        )
        run = Run.open(Script(ScriptRequest(command, root, screen=True, folder=folder)))
        say(f"observing {command.text} as run {run.directory.name}")
        done = threading.Event()

        def watch() -> None:
            begin = time.monotonic()
            while not done.wait(0.2):
                totals, spent_s = run.recorder.snapshot().totals, time.monotonic() - begin
                enough = totals.steps >= OBSERVED_STEPS and totals.wall_ns >= OBSERVED_S * 1e9
                if stop.is_set() or enough or spent_s > MOST_S:
                    run.control.request("kill", "observed for long enough")

        thread = threading.Thread(target=watch, name="ndd-watch", daemon=True)
        thread.start()
        try:
            run.execute()
        finally:
            done.set()
            run.close()
        if refused := refused_in(Path(place)):
            raise UsageError(refused)
    return run.directory

"""`ndd-console tune` of a training script: observes it in a scratch copy, measures changes, prints the edit."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ndd_console.words.trial import measurement
from ndd_console.words.tuning import script_blocks
from ndd_engine.diagnose import diagnose
from ndd_engine.errors import EXIT_FAILED, UsageError
from ndd_engine.hardware.detect import detect
from ndd_engine.record.events import TrialEvent
from ndd_engine.record.reader import load_state
from ndd_engine.record.rundir import RunDir
from ndd_engine.run.run import Run
from ndd_engine.script.command import Command
from ndd_engine.script.contained import OFFLINE, check_contained, check_ranks, copy
from ndd_engine.script.script_run import Script, ScriptRequest
from ndd_engine.script.tuning import Row, changes_for, tune_script
from ndd_engine.text import counted
from ndd_engine.trial.candidates import Place
from ndd_engine.trial.request import Progress

from .measuring import stoppable
from .options import Asked
from .printing import ProgressLines, say, show

# How long the script is observed before its changes are measured.
OBSERVED_STEPS, OBSERVED_S, MOST_S = 60, 10.0, 60.0


def tune_script_run(asked: Asked, script: RunDir | None) -> int:
    """Tune the script of a run, or the command that was given. Returns the exit status."""
    with stoppable("tuning") as stop:
        directory = script or observed(asked.root, Command(asked.words, Path.cwd()), stop)
        state = load_state(directory)
        if state.run is None:
            raise UsageError(f"run {directory.name} has not trained: there is nothing to tune")
        check_ranks(directory.name, state.run.config)
        if not asked.allow_side_effects:
            check_contained(state.run.config)
        place = Place.of(detect(use_torch=False))
        changes = changes_for(state.run, diagnose(state.snapshot()), place.cores, bool(place.bf16))
        say(f"{counted(len(changes), 'change')} to measure: {', '.join(' '.join(sets) for sets in changes)}")
        look, side_effects = ScriptProgress(say).look, asked.allow_side_effects
        tuned = tune_script(directory, state.run, changes, asked.budget, look, stop, side_effects)
    diff, advice = (tuned.edit.diff, tuned.edit.advice) if tuned.edit is not None else ([], ())
    if asked.as_json:
        rows = [{"sets": row.sets, "trial": _result(row.trial), "reason": row.reason} for row in tuned.rows]
        whole = _result(tuned.whole)
        show({"changes": rows, "kept": tuned.kept, "whole": whole, "diff": diff, "advice": advice})
    else:
        show(script_blocks(tuned))
        if tuned.edit is not None:
            show(["", *diff, *(f"  {text}" for text in advice)])
    return stop.exit_status or (0 if any(row.trial is not None for row in tuned.rows) else EXIT_FAILED)


def observed(root: Path, command: Command, stop: threading.Event) -> RunDir:
    """Run the command in a scratch copy until enough of it was seen, then end it."""
    command.check()
    with tempfile.TemporaryDirectory(prefix=".ndd-", ignore_cleanup_errors=True) as scratch:
        copy(command.folder, Path(scratch), root.absolute())
        os.environ.update(OFFLINE)
        run = Run.open(Script(ScriptRequest(command, root, screen=True, folder=Path(scratch))))
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
    return run.directory


class ScriptProgress(ProgressLines):
    """Each change as it is measured."""

    def look(self, rows: Sequence[Row], progress: Progress | None) -> None:
        """Called a few times a second."""
        if progress is not None:
            done = sum(row.trial is not None or bool(row.reason) for row in rows)
            name = " ".join(rows[done].sets) if done < len(rows) else "all that helped"
            self.stage((done, progress.stage.partition(":")[0]), f"{name}: {measurement(progress)}")


def _result(trial: TrialEvent | None) -> dict[str, object] | None:
    """What the JSON document says about a trial."""
    names = "verdict", "ratio", "low", "high", "text"
    return None if trial is None else {name: getattr(trial, name) for name in names}

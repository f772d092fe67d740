"""Tuning of a script: observes its command, then tries what its findings propose and what may help on this machine."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ndd_engine.diagnose import Finding
from ndd_engine.errors import UsageError
from ndd_engine.record.events import RunEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.run.run import Run
from ndd_engine.trial.outcome import Base, TrialRequest
from ndd_engine.trial.tuning import Tuning, TuningState, observed
from ndd_watch import LINKED
from ndd_watch.changes import OF_SCRIPTS, Candidate, Conditions, candidates

from .command import OFFLINE, SCRATCH, UNWRITTEN, Command, linked, refused_in, scratch
from .edits import Edit
from .script_run import Script, ScriptRequest
from .trials import changes_of, edit_for

# How long a command is observed before its changes are measured.
OBSERVED_STEPS, OBSERVED_S, MOST_S = 60, 10.0, 60.0


def observe(
    root: Path, command: Command, tell: Callable[[str], None], stop: threading.Event, outside: bool = False
) -> RunDir:
    """Run the command in a scratch copy until enough of it was seen, then end it.

    tell: receives messages for the user. stop: set it to stop early. outside: whether it may do what the copy does not
    contain. Raises UsageError if it wanted to, and may not.
    """
    command.check()
    command.check_repeatable()
    with tempfile.TemporaryDirectory(prefix=SCRATCH, ignore_cleanup_errors=True) as place:
        folder = scratch(command.folder, Path(place), root.absolute())
        alone = {**OFFLINE, **UNWRITTEN, LINKED: "" if outside else linked(Path(place), command.folder)}
        run = Run.open(Script(ScriptRequest(command, root, screen=True, folder=folder, environment=alone)))
        tell(f"observing {command.text} as run {run.directory.name}")
        begin = time.monotonic()

        def enough(snapshot: Snapshot) -> bool:
            totals = snapshot.totals
            seen = totals.steps >= OBSERVED_STEPS and totals.wall_ns >= OBSERVED_S * 1e9
            refused = bool(refused_in(Path(place)))  # of a process that the script has started
            return stop.is_set() or seen or refused or time.monotonic() - begin > MOST_S

        run.execute_until(enough)
        if refused := refused_in(Path(place)):
            raise UsageError(refused)
    return run.directory


def candidates_for(run: RunEvent, findings: Sequence[Finding], place: Conditions) -> list[Candidate]:
    """What is tried: what the findings propose first."""
    usual = {one.sets: one for one in candidates(observed(place, run.config, run.device, run.threads))}
    proposed = [item.sets for item in findings if item.sets]
    known = [sets for sets in proposed if all(item.partition("=")[0] in OF_SCRIPTS for item in sets)]
    first = {sets: usual.get(sets) or Candidate(" ".join(sets), " ".join(sets), sets) for sets in known}
    return list((first | usual).values())


def tune_script(
    directory: RunDir, run: RunEvent, findings: Sequence[Finding], place: Conditions, tuning: Tuning
) -> tuple[TuningState, Edit | None]:
    """(the result, the edit of the script that makes it; None if nothing is kept). tuning: not yet run."""
    base = Base(f"run {directory.name}", run=directory)

    def refused(kept: Sequence[str], sets: Sequence[str]) -> str:
        try:
            changes_of(TrialRequest(replace(base, sets=tuple(kept)), tuple(sets)), run.config)
        except UsageError as error:
            return str(error)
        return ""

    state = tuning.run(base, candidates_for(run, findings, place), refused)
    measured = [one for row in state.kept for one in (row.to_start, row.trial) if one is not None]
    try:
        return state, edit_for(TrialRequest(base, state.sets), run, *measured) if state.sets else None
    except UsageError as error:  # its file is gone; what was measured counts
        return state, Edit(None, "", "", (str(error),))

"""Tuning of a script: the changes that its findings propose, and those that may help on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ndd_engine.diagnose import Finding
from ndd_engine.errors import UsageError
from ndd_engine.record.events import RunEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.trial.outcome import Base, TrialRequest
from ndd_engine.trial.tuning import Tuning, TuningState, observed
from ndd_watch.changes import OF_SCRIPTS, Candidate, Place, candidates

from .edits import Edit
from .trials import changes_of, edit_for


def candidates_for(run: RunEvent, findings: Sequence[Finding], place: Place) -> list[Candidate]:
    """What is tried: what the findings propose first."""
    usual = {one.sets: one for one in candidates(observed(place, run.config, run.device, run.threads))}
    proposed = [item.sets for item in findings if item.sets]
    known = [sets for sets in proposed if all(item.partition("=")[0] in OF_SCRIPTS for item in sets)]
    first = {sets: usual.get(sets) or Candidate(" ".join(sets), " ".join(sets), sets) for sets in known}
    return list((first | usual).values())


def tune_script(
    directory: RunDir, run: RunEvent, findings: Sequence[Finding], place: Place, tuning: Tuning
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
    try:
        return state, edit_for(TrialRequest(base, state.sets), run, state.final) if state.sets else None
    except UsageError as error:  # its file is gone; what was measured counts
        return state, Edit(None, "", "", (str(error),))

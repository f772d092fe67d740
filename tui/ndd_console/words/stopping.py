"""That something is being stopped, in words."""

from __future__ import annotations

STOPPING = "stopping"
# What a run of your own model does.
AFTER_CHECKPOINT = f"{STOPPING} after a checkpoint"
RUN_STOPPING = f"{AFTER_CHECKPOINT}; press Ctrl-C again to stop immediately"
SCRIPT_STOPPING = "the script was sent Ctrl-C; press Ctrl-C again to kill it"
TUNING_STOPPING = f"{STOPPING}; results so far are kept"


def trial_stopping(pauses: bool) -> str:
    """pauses: whether a run is paused during the trial."""
    return f"{STOPPING}; the run resumes when the processes have ended" if pauses else STOPPING


def command_stopping(what: str) -> str:
    """what: "the trial"."""
    return f"{STOPPING} {what}; results so far will be printed (Ctrl-C again to quit now)"


def still_stopping(name: str, script: bool) -> str:
    """The title of the question whether to close the screen of a run that is being stopped."""
    return f"{name} is {STOPPING if script else AFTER_CHECKPOINT}."

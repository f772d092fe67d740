"""The result of a trial in words."""

from __future__ import annotations

from ndd_engine.record.events import TrialEvent

from .figures import interval_text

# verdict: style of it on a screen.
VERDICTS = {
    "faster": "good",
    "no difference": "text",
    "slower": "bad",
    "inconclusive": "warn",
    "out of memory": "bad",
    "failed": "bad",
    "stopped": "warn",
}


def trial_text(trial: TrialEvent | None) -> str:
    """ "faster 1.42x (1.35 to 1.49)"."""
    if trial is None:
        return ""
    figures = interval_text(trial.ratio, trial.low, trial.high)
    return f"{trial.verdict} {figures}".strip()

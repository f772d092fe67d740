"""Tuning in progress, and at its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ndd_engine.trial.outcome import Progress
from ndd_engine.trial.tuning import TuningRow as TuningRowView
from ndd_engine.trial.tuning import TuningState
from ndd_watch.changes import Candidate

from .fakes import trial_event


def _candidate(name: str, title: str, state: Any, **rest: Any) -> TuningRowView:
    sets = rest.pop("sets", (f"loader.{name}=true",))
    return TuningRowView(Candidate(name, title, sets, missing=rest.pop("missing", "")), state, **rest)


MEASURING = TuningState(
    (
        _candidate(
            "cache", "cache encoded items", "kept", reason="gain; breaks even after 310 steps",
            trial=trial_event(sets=["loader.cache=true"], ratio=1.62, low=1.55, high=1.7, cause=None),
            to_start=trial_event(sets=["loader.cache=true"], ratio=1.6, low=1.52, high=1.69, cause=None),
        ),
        _candidate("workers-2", "2 loader workers", "measuring", sets=("loader.workers=2",)),
        _candidate("compile", "torch.compile", "waiting", sets=("speed.compile=default",)),
        _candidate("pin-memory", "pinned memory", "skipped", reason="no CUDA GPU"),
    ),
    "measuring 2 loader workers",
    Progress("measuring", 12.0, 60.0, 3, 1.1, 0.96, 1.26),
    95.0,
)  # fmt: skip
DONE = replace(
    MEASURING,
    rows=(
        MEASURING.rows[0],
        _candidate(
            "workers-2", "2 loader workers", "dropped", reason="no difference", sets=("loader.workers=2",),
            trial=trial_event("no difference", sets=["loader.workers=2"], ratio=1.0, low=0.98, high=1.02, loss="close"),
        ),
        _candidate(
            "compile", "torch.compile", "dropped", reason="out of memory", sets=("speed.compile=default",),
            trial=trial_event("out of memory", ratio=None, low=None, high=None, loss="not comparable", change={}),
        ),
        MEASURING.rows[3],
    ),
    stage="done", progress=None, done=True, elapsed_s=312.0, toml="[loader]\ncache = true\n",
    text="1 of 3 settings that were measured help; total 1.6x (1.52 to 1.69) vs. the baseline, "
    "measured directly",
)  # fmt: skip


class FixedTuning:
    """Tuning in a fixed state."""

    name = "chartext.toml"
    saved = ""

    def __init__(self, state: TuningState) -> None:
        self.state = state

    def failed(self) -> str:
        return ""

    def save(self) -> str:
        self.saved = "tuning.toml"
        return ""

    def stop(self) -> None:
        """Nothing to stop."""

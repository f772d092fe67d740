"""What a report is about: one run's newest snapshot, what the rules say of it, and its whole record over time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ndd_console.screens.diagnosis import Diagnosis
from ndd_console.view.findings import DiagnosisResult as Told
from ndd_engine.record.derive import figures
from ndd_engine.record.reader import RunReader
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.snapshot import Snapshot

from .blocks import Time
from .collect import Collected, collect
from .plots import rising


@dataclass(frozen=True)
class Report:
    """A run as it is at `made_t` (unix seconds); it may go on after that."""

    directory: RunDir
    snapshot: Snapshot
    told: Told
    data: Collected
    made_t: float

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def time(self) -> Time:
        """The axis of all plots over time."""
        steps = rising((point.last, round(point.high)) for point in self.data.steps.points)
        return Time(self.data.x, steps, tuple(pauses(self.data)))

    def to_json(self) -> dict[str, Any]:
        """The figures of the report for programs; null is "not known"."""
        snapshot, data = self.snapshot, self.data
        whole = data.timeline.whole
        return {
            "run": self.name,
            "status": snapshot.status,
            "reason": snapshot.reason or None,
            "step": snapshot.step,
            "seconds": data.x,
            "findings": [finding.to_dict() for finding in self.told.findings],
            "figures": figures(snapshot),
            "phases_s": {name: value * 1e-9 for name, value in whole.host.items()},
            "measured_s": whole.wall_ns * 1e-9,
            "idle": {
                "share": snapshot.idle.share,
                "method": snapshot.idle.method,
                "causes": dict(snapshot.idle.causes),
            },
            "evaluations": [
                {"step": at.step, "metrics": mark.data.get("metrics"), "seconds": mark.data.get("seconds")}
                for at, mark in data.evaluations
            ],
            "trials": [
                {name: getattr(trial, name) for name in trial.__dataclass_fields__}
                for _, trial in data.trials
            ],
            "not_in_effect": [item.name for item in snapshot.settings if item.in_effect is False],
            "warnings": snapshot.warnings,
            "skipped_lines": data.skipped,
        }


def load(directory: RunDir) -> Report:
    """Read a run's record; a live one as far as it is written."""
    reader = RunReader(directory)
    reader.poll()
    snapshot = reader.snapshot()
    return Report(directory, snapshot, Diagnosis().of(snapshot), collect(directory), time.time())


def pauses(data: Collected) -> list[tuple[float, float]]:
    """Stretches (seconds of the run) in which it was paused; one that lasts ends where the record does."""
    found: list[tuple[float, float]] = []
    began: float | None = None
    for at, mark in data.marked("pause", "resume"):
        if mark.kind == "pause":
            began = at.x
        elif mark.kind == "resume" and began is not None:
            found.append((began, at.x))
            began = None
    if began is not None:
        after = next((at.x for at in data.resumed if at.x >= began), data.x)
        found.append((began, after))
    return found

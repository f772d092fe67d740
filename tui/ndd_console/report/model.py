"""The data of a report: a run's newest snapshot, its findings and its whole record over time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ndd_console.words.blocks import Block, Line, Lines, Point, Time
from ndd_console.words.diagnosis import Diagnosis
from ndd_console.words.figures import Kind
from ndd_engine.diagnose import Finding
from ndd_engine.record.event import ranks_figures
from ndd_engine.record.figures import figures
from ndd_engine.record.file import RunReader
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.snapshot import Snapshot

from .collect import History, collect
from .timeline import Slice

COLUMNS = 256  # maximum number of slices in a plot


@dataclass(frozen=True)
class Report:
    """A run as of `made_t` (unix seconds). trouble: why there are no findings, or ""."""

    directory: RunDir
    snapshot: Snapshot
    findings: tuple[Finding, ...]
    trouble: str
    data: History
    made_t: float

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def time(self) -> Time:
        """The time axis of all plots."""
        steps = sorted((point.last, round(point.high)) for point in self.data.curves["step"].points)
        return Time(self.data.x, tuple(steps), tuple(pauses(self.data)))

    @property
    def paused_s(self) -> float:
        """Seconds of all pauses."""
        return sum((end - begin for begin, end in pauses(self.data)), 0.0)

    def line(
        self, key: str, name: str, tint: str, scale: float = 1.0, band: bool = False, dots: bool = False
    ) -> Line | None:
        """A recorded curve times `scale`, or None. band: with the lowest and highest value of each point."""
        curve = self.data.curves[key]
        if curve.mean is None:
            return None
        curve_pieces = curve.pieces(self.data.x)
        band = band and any(point.count > 1 for point in curve.points)
        pieces = tuple(tuple((point.x, point.mean * scale) for point in piece) for piece in curve_pieces)
        bands = tuple(
            tuple((p.x, p.low * scale, p.high * scale) for p in piece) for piece in curve_pieces if band
        )
        return Line(name, tint, pieces, bands, dots, curve.mean * scale)

    def sliced(
        self, name: str, tint: str, mean: float, value: Callable[[Slice], float | None]
    ) -> Line | None:
        """A value of each slice as a line, cut where more than two slices have none; None without any value."""
        width, slices = self.data.timeline.slices(COLUMNS)
        values = {index: shown for index, item in slices.items() if (shown := value(item)) is not None}
        pieces: list[list[Point]] = []
        for index, shown in values.items():
            if not values.keys() & {index - 1, index - 2, index - 3}:
                pieces.append([])
            pieces[-1].append(((index + 0.5) * width, shown))
        return Line(name, tint, tuple(map(tuple, pieces)), mean=mean) if pieces else None

    def plot(
        self,
        title: str,
        kind: Kind,
        *lines: Line | None,
        unit: str = "",
        log_above: float = math.inf,
        **more: Any,
    ) -> list[Block]:
        """A plot of the lines that are not None, or []. log_above: highest to lowest value for a logarithmic axis."""
        shown = tuple(line for line in lines if line is not None)
        values = [value for line in shown for _, value in line.points]
        log = bool(values) and min(values) > 0 and max(values) > log_above * min(values)
        return [Lines(title, kind, unit, shown, self.time, log=log, **more)] if shown else []

    def to_json(self) -> dict[str, Any]:
        """The figures of the report as JSON values; null means unknown."""
        snapshot, data, idle = self.snapshot, self.data, self.snapshot.idle
        whole = data.timeline.whole
        return {
            "run": self.name,
            "status": snapshot.status,
            "reason": snapshot.reason or None,
            "step": snapshot.step,
            "whole_s": data.x,
            "preparation_s": data.preparation_s,
            "training_s": snapshot.elapsed_s,
            "paused_s": self.paused_s,
            "findings": [finding.to_dict() for finding in self.findings],
            "figures": figures(snapshot),
            "phases_s": {name: value * 1e-9 for name, value in whole.host.items()},
            "measured_s": whole.wall_ns * 1e-9,
            "ranks": None if snapshot.ranks is None else ranks_figures(snapshot.ranks),
            "idle": {"share": idle.share, "method": idle.method, "causes": dict(idle.causes)},
            "evaluations": [
                {"step": at.step, "metrics": mark.data.get("metrics"), "seconds": mark.data.get("seconds")}
                for at, mark in data.marked("evaluation")
            ],
            "scalars": {name: trend[-1][1] for name, trend in snapshot.scalars if trend},
            "samples": None if data.texts is None else {"step": data.texts.step, "texts": data.texts.texts},
            "trials": [asdict(trial) for _, trial in data.trials],
            "not_in_effect": [setting.name for setting in snapshot.settings if setting.in_effect is False],
            "warnings": snapshot.warnings,
            "skipped_lines": data.skipped,
        }


def load(directory: RunDir) -> Report:
    """Read a run's record; of a live run, what is written so far."""
    reader = RunReader(directory)
    reader.poll()
    snapshot = reader.snapshot()
    result = Diagnosis().of(snapshot)
    return Report(directory, snapshot, result.findings, result.trouble, collect(directory), time.time())


def pauses(data: History) -> list[tuple[float, float]]:
    """Pauses as (begin, end) in seconds of the run; an open one lasts until the next process or the end."""
    spans: list[tuple[float, float]] = []
    began: float | None = None
    for at, mark in data.marked("pause", "resume"):
        if mark.kind == "pause":
            began = at.x
        elif began is not None:
            spans.append((began, at.x))
            began = None
    if began is not None:
        spans.append((began, next((at.x for at in data.resumed if at.x >= began), data.x)))
    return spans

"""Compares recorded runs: what differs between them, and the ratio of their speeds with its interval.

Neighbouring windows of a run are correlated (a slow minute is sixty slow windows). They are joined into batches, and
the remaining correlation of neighbouring batches widens the interval.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from ndd_engine.child import (
    ChildError,
    ChildProcess,
    ChildServer,
    Json,
    Pipe,
    StoppedError,
    draft_of,
    spec_of,
    ticker,
)
from ndd_engine.errors import NddError, UsageError
from ndd_engine.record.event import ASIDES
from ndd_engine.record.events import (
    Event,
    MemoryEvent,
    RanksEvent,
    RunEvent,
    SampleEvent,
    WindowEvent,
)
from ndd_engine.record.figures import is_script, middle, place_in_step
from ndd_engine.record.file import EventLog, RunReader
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.script_sources import Sources, sources_of
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import printable

from .estimates import CONFIDENCE, DIFFERENT, FLOOR, Usual, interval, judged
from .outcome import PairVariances, changed_items, flatten

# Batches of a series: enough to estimate their variance, few enough to be long.
BATCHES = 30
# Minimum number of windows for an interval.
FEWEST = 4
# Limits of the warm-up: share of a series, and number of windows.
WARM_UP_SHARE = 0.25
WARM_UP_MOST = 120
_STRONGEST = 0.9  # maximum correlation; above it the correction is unreliable


@dataclass(frozen=True, slots=True)
class Stretch:
    """Items, and the nanoseconds they took."""

    items: float
    ns: float


@dataclass(frozen=True, slots=True)
class Rate:
    """Items per second of a series. error: standard error of its logarithm, None below FEWEST; df: of that error."""

    value: float
    error: float | None
    df: float
    count: int


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio; low and high at CONFIDENCE, None if unknown."""

    ratio: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def exact(cls, ratio: float) -> Interval:
        """Without uncertainty."""
        return cls(ratio, ratio, ratio)

    def map(self, change: Callable[[float], float]) -> Interval:
        """A monotonically increasing function of it."""
        low, high = (None if edge is None else change(edge) for edge in (self.low, self.high))
        return Interval(change(self.ratio), low, high)


def warm_up(stretches: Sequence[Stretch]) -> int:
    """How many stretches at the start of a process are warm-up: the first one, and further slower ones.

    The cut minimises the standard error of the mean of the rest (MSER rule of simulation output analysis).
    """
    if len(stretches) < FEWEST:
        return 0
    logs = [math.log(part.items / part.ns) for part in stretches]
    most = max(min(int(len(logs) * WARM_UP_SHARE), WARM_UP_MOST), 1)
    # Running sums from the end.
    total = square = 0.0
    best, least = 1, math.inf
    centre = fmean(logs)
    for index in range(len(logs) - 1, 0, -1):
        value = logs[index] - centre
        total, square = total + value, square + value * value
        left = len(logs) - index
        error = (square - total * total / left) / left**2
        if index <= most and error <= least:
            best, least = index, error
    return best


def rate(stretches: Sequence[Stretch]) -> Rate:
    """Total items over total time, with its error by batch means. Raises ValueError without stretches."""
    if not stretches:
        raise ValueError("nothing was measured")
    items, ns = sum(part.items for part in stretches), sum(part.ns for part in stretches)
    value = items / ns * 1e9
    if len(stretches) < FEWEST:
        return Rate(value, None, 0, len(stretches))
    batches = _batches(stretches, min(len(stretches), BATCHES))
    count = len(batches)
    # Relative deviation of each batch from the mean rate (linearised error of a ratio of two sums).
    off = [part.items * count / items - part.ns * count / ns for part in batches]
    variance = sum(value * value for value in off) / (count * (count - 1))
    correlation = _correlation(off)
    widened = (1 + correlation) / (1 - correlation)
    return Rate(value, math.sqrt(variance * widened), max(count / widened - 1, 2), len(stretches))


def spread(found: Rate) -> Interval:
    """A rate with its interval."""
    if found.error is None:
        return Interval(found.value)
    return Interval(found.value, *interval(found.value, found.error, found.df))


def ratio(b: Rate, a: Rate, between: Usual | None = None) -> Interval:
    """B over A of two independent series. between: variance of the log-ratio that the series do not show."""
    value = b.value / a.value
    if a.error is None or b.error is None:
        return Interval(value)
    parts = [(a.error**2, a.df), (b.error**2, b.df)]
    if between is not None:
        parts.append((between.variance, between.df))
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return Interval(value, value, value)
    df = variance**2 / sum(part**2 / df for part, df in parts)
    return Interval(value, *interval(value, math.sqrt(variance), df))


def _batches(stretches: Sequence[Stretch], count: int) -> list[Stretch]:
    edges = [round(index * len(stretches) / count) for index in range(count + 1)]
    return [
        Stretch(sum(part.items for part in group), sum(part.ns for part in group))
        for group in (stretches[begin:end] for begin, end in pairwise(edges))
    ]


def _correlation(off: Sequence[float]) -> float:
    """Lag-1 autocorrelation, 0.._STRONGEST, corrected for its bias in short series."""
    square = sum(value * value for value in off)
    if not square:
        return 0.0
    found = sum(first * second for first, second in pairwise(off)) / square
    return min(max(found + (1 + 4 * found) / len(off), 0.0), _STRONGEST)


# The loss at a point of training is the mean over this share of training before that point.
LOSS_SPAN = 0.1
# Single losses of scripts are taken from steps between this part of a point and the point.
LEAST_NEAR = 0.5


@dataclass(frozen=True, slots=True)
class Recorded:
    """One side of a comparison. Times are nanoseconds by the host clock, over the used windows.

    rate: items per second without evaluations and checkpoints. used, warm_up, profiled: number of windows with steps.
    phases: per optimizer step. step_p50_ns, step_p95_ns: weighted median of the windows' own quantiles. peak_bytes:
    reserved on the GPU; on the CPU, resident in the run's processes. losses: (items trained so far, mean loss of a
    window), in order; of a script, the losses at its milestones, with the items trained at their steps.
    windows: the used ones. damaged: number of damaged lines of the log. exchange_ns, skew_ns: of all ranks per
    optimizer step, None with one rank.
    """

    name: str
    run: RunEvent
    snapshot: Snapshot
    rate: Rate
    used: int
    warm_up: int
    profiled: int
    steps: int
    phases: dict[str, float]
    step_p50_ns: int | None
    step_p95_ns: int | None
    peak_bytes: int | None
    losses: tuple[tuple[int, float], ...]
    windows: tuple[WindowEvent, ...]
    damaged: int = 0
    exchange_ns: float | None = None
    skew_ns: float | None = None
    sources: Sources = field(default_factory=Sources)

    def loss_at(self, items: float) -> float | None:
        """The mean loss over the last LOSS_SPAN before so many items; None if none was recorded."""
        weighted = covered = begin = 0.0
        for end, loss in self.losses:
            # A window's loss covers everything since the previous window with a loss.
            overlap = min(end, items) - max(begin, items * (1 - LOSS_SPAN))
            if overlap > 0:
                weighted, covered = weighted + overlap * loss, covered + overlap
            begin = end
        return weighted / covered if covered else None


# Steps done, steps, exchange and skew of a window of all ranks.
_Shared = tuple[int, int, int, float]


@dataclass(slots=True)
class _Reading:
    """Collects figures from the events. segments: the windows of each process of the run."""

    run: RunEvent | None = None
    segments: list[list[WindowEvent]] = field(default_factory=lambda: [[]])
    profiled: int = 0
    peak: int | None = None
    losses: list[tuple[int, float]] = field(default_factory=list)
    ranks: list[_Shared] = field(default_factory=list)

    def take(self, event: Event) -> None:
        if isinstance(event, RunEvent):
            self.run = event
            self.segments.append([])
            if event.resumed_step is not None:
                # Steps after the checkpoint are repeated.
                trained = event.resumed_step * event.items_per_step
                self.losses = [(items, loss) for items, loss in self.losses if items <= trained]
        elif isinstance(event, WindowEvent):
            if event.profiled:
                self.profiled += 1
            else:
                self.segments[-1].append(event)
            if self.run is None:
                return
            # Scripts are asked for single losses.
            found = event.milestone_losses if is_script(self.run) else [(event.step, event.loss)]
            self.losses += [
                (step * self.run.items_per_step, loss) for step, loss in found if loss is not None
            ]
        elif isinstance(event, RanksEvent):
            if event.steps and event.world > 1:
                self.ranks.append((event.step, event.steps, event.exchange_ns, event.skew_ns))
        elif isinstance(event, MemoryEvent):
            self.peak = max(event.peak_reserved_bytes, self.peak or 0)
        elif isinstance(event, SampleEvent) and self.run is not None and self.run.device == "cpu":
            resident = event.host.get("rss_bytes")
            if resident is not None:
                self.peak = max(resident + (event.host.get("workers_rss_bytes") or 0), self.peak or 0)


def read_recorded(directory: RunDir) -> Recorded:
    """Read a run. Raises UsageError if it has no windows with steps."""
    reading, log = _Reading(), EventLog(directory.events)
    try:
        for _, event in log.new():
            reading.take(event)
    except OSError as error:
        raise UsageError(f"{printable(str(directory.events))} cannot be read: {error.strerror}") from None
    used: list[WindowEvent] = []
    cut = 0
    for segment in reading.segments:
        trained = [window for window in segment if _stretch(window) is not None]
        left_out = warm_up([part for part in map(_stretch, trained) if part is not None])
        cut += left_out
        # Windows without steps count towards the phases: an evaluation may be longer than a window.
        used += segment[segment.index(trained[left_out]) :] if trained else []
    stretches = [part for part in map(_stretch, used) if part is not None]
    if reading.run is None or not stretches:
        raise UsageError(
            f"run {printable(directory.name)} has no measured steps: it ended before its training was measured"
        )
    reader = RunReader(directory)
    reader.poll()
    steps = sum(window.steps for window in used)
    exchange_ns, skew_ns = _shared(reading.ranks, used[0].step - used[0].steps)
    return Recorded(
        name=directory.name,
        run=reading.run,
        snapshot=reader.snapshot(),
        rate=rate(stretches),
        used=len(stretches),
        warm_up=cut,
        profiled=reading.profiled,
        steps=steps,
        phases=_phases(used, steps),
        step_p50_ns=middle((one.step_p50_ns, one.steps) for one in used if one.step_p50_ns is not None),
        step_p95_ns=middle((one.step_p95_ns, one.steps) for one in used if one.step_p95_ns is not None),
        peak_bytes=reading.peak,
        losses=tuple(reading.losses),
        windows=tuple(used),
        damaged=log.damaged,
        exchange_ns=exchange_ns,
        skew_ns=skew_ns,
        sources=sources_of(directory),
    )


def _shared(windows: list[_Shared], first: int) -> tuple[float | None, float | None]:
    """Exchange and skew per step after step `first`; None without several ranks."""
    used = [window for window in windows if window[0] > first]
    steps = sum(window[1] for window in used)
    if not steps:
        return None, None
    return sum(window[2] for window in used) / steps, sum(window[3] for window in used) / steps


def _stretch(window: WindowEvent) -> Stretch | None:
    """The training in a window, None without steps."""
    outside = sum(host_ns_of(window, name) for name in ASIDES)
    trained = window.steps > 0 and window.items > 0 and window.wall_ns > outside
    return Stretch(window.items, window.wall_ns - outside) if trained else None


def _phases(windows: list[WindowEvent], steps: int) -> dict[str, float]:
    totals: dict[str, int] = {}
    for window in windows:
        for name in window.phases:
            totals[name] = totals.get(name, 0) + host_ns_of(window, name)
    return {name: total / steps for name, total in totals.items()}


def host_ns_of(window: WindowEvent, phase: str) -> int:
    """Nanoseconds of a phase by the host clock."""
    return int(window.phases.get(phase, {}).get("host_ns", 0))


# Shares of the common number of items at which losses are compared.
LOSS_POINTS = (0.25, 0.5, 0.75, 1.0)
# Difference in the cores that other processes use, from which speeds are not compared.
DISTURBED = 0.3
# Keys without influence on what is computed.
_IGNORED = frozenset({"run.name", "workload.path"})
NOT_SET = "not set"
# Keys of a comparison that are the same for all candidates.
_SHARED = ("a", "losses", "confidence")


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference. kind: "config", "version", "machine", "source", "command", "data" or "model"."""

    kind: str
    key: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class LossPoint:
    """Mean losses of every run shortly before the same number of trained items, in the order of the runs."""

    items: int
    share: float
    losses: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """B vs. A.

    speed: ratio of items per second, B over A. verdict: "faster", "slower", "same" or "inconclusive";
    "not comparable" for runs that train different workloads or models. disturbed: other processes took cores from one
    of the runs, so that there is no verdict. diff: of the source of two scripts, as lines.
    """

    a: Recorded
    b: Recorded
    speed: Interval
    verdict: str
    disturbed: bool
    differences: tuple[Difference, ...]
    unlike: tuple[str, ...]
    losses: tuple[LossPoint, ...]
    diff: tuple[str, ...] = ()

    def slower_than(self, share: float) -> str:
        """Whether B is slower by more than this share (0.05): "slower", "not slower" or "inconclusive".

        Raises UsageError if the runs train different workloads or models.
        """
        if self.verdict == "not comparable":
            what = "different workloads" if self.a.run.workload != self.b.run.workload else "different models"
            raise UsageError(f"{self.a.name} and {self.b.name} train {what}: their speeds cannot be compared")
        low, high = self.speed.low, self.speed.high
        if low is None or high is None or self.disturbed:
            return "inconclusive"
        return "slower" if high < 1 - share else "not slower" if low >= 1 - share else "inconclusive"

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "a": _side(self.a),
            "b": _side(self.b),
            "items_per_s_ratio": self.speed.ratio,
            "low": self.speed.low,
            "high": self.speed.high,
            "confidence": CONFIDENCE,
            "verdict": self.verdict,
            "differences": [asdict(item) for item in self.differences],
            "diff": list(self.diff),
            "unlike": list(self.unlike),
            "losses": [
                {"items": point.items, "a": point.losses[0], "b": point.losses[1]} for point in self.losses
            ],
        }


@dataclass(frozen=True, slots=True)
class SeveralCompared:
    """Each candidate vs. the baseline. losses: up to the number of items that every run has trained."""

    baseline: Recorded
    candidates: tuple[Comparison, ...]
    losses: tuple[LossPoint, ...]

    @property
    def sides(self) -> tuple[Recorded, ...]:
        """All runs, the baseline first."""
        return (self.baseline, *(each.b for each in self.candidates))

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "baseline": _side(self.baseline),
            "confidence": CONFIDENCE,
            "candidates": [
                {
                    ("run" if key == "b" else key): value
                    for key, value in each.to_dict().items()
                    if key not in _SHARED
                }
                for each in self.candidates
            ],
            "losses": [asdict(point) for point in self.losses],
        }


def compare(a: RunDir, b: RunDir) -> Comparison:
    """Read and compare both. Raises UsageError for a run without steps, and if both are the same run."""
    return compare_several((a, b)).candidates[0]


def compare_several(runs: Sequence[RunDir]) -> SeveralCompared:
    """Compare at least two runs, each with the first one. Raises UsageError, see `compare`."""
    for index, run in enumerate(runs):
        for other in runs[:index]:
            if run.path.resolve() == other.path.resolve():
                raise UsageError(f"{other.name} and {run.name} are the same run")
    first, *others = map(read_recorded, runs)
    found = tuple(_compared(first, other) for other in others)
    return SeveralCompared(first, found, _losses((first, *others)))


def _compared(first: Recorded, second: Recorded) -> Comparison:
    # Each run is a process of its own, and processes differ from each other.
    speed = ratio(second.rate, first.rate, PairVariances().usual(first.run.device_name))
    disturbance = _disturbance(first, second)
    verdict = "inconclusive" if disturbance else _verdict(speed)
    return Comparison(
        first,
        second,
        speed,
        verdict if _same_model(first.run, second.run) else "not comparable",
        bool(disturbance),
        tuple(_differences(first, second)),
        (*_unlike(first, second), *filter(None, [disturbance])),
        _losses((first, second)),
        tuple(first.sources.diff(second.sources)),
    )


def phase_names(sides: Iterable[Recorded]) -> list[str]:
    """The phases of all, in the order of the screen, sub-phases after their phase."""
    return sorted({name for side in sides for name in side.phases}, key=place_in_step)


def _same_model(a: RunEvent, b: RunEvent) -> bool:
    # The description of the model also names settings that are worth comparing, such as summarise's decoder.
    return (a.workload, a.parameters) == (b.workload, b.parameters)


def _verdict(speed: Interval) -> str:
    if speed.low is None or speed.high is None:
        return "inconclusive"
    if speed.low > 1 / (1 + FLOOR) and speed.high < 1 + FLOOR:
        return "same"
    found = judged(speed.ratio, speed.low, speed.high)
    return found if found in DIFFERENT else "inconclusive"


def _differences(a: Recorded, b: Recorded) -> Iterator[Difference]:
    yield from _changed("config", *(_settings(side.run) for side in (a, b)))
    yield from _changed("source", *({"commit": side.sources.commit[:12] or None} for side in (a, b)))
    yield from _changed("version", a.run.versions, b.run.versions)
    yield from _changed("machine", _machine(a), _machine(b))
    for kind in ("data", "model"):
        name = "command" if kind == "data" and is_script(a.run) else kind
        yield from _changed(name, {name: getattr(a.run, kind)}, {name: getattr(b.run, kind)})


def _settings(run: RunEvent) -> dict[str, Any]:
    """The configuration; not where things stand in a script, whose changes are in its diff."""
    return flatten({name: table for name, table in run.config.items() if name != "script"})


def _changed(kind: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for key, (one, other) in changed_items(a, b).items():
        if key not in _IGNORED:
            yield Difference(kind, key, _text(one), _text(other))


def _machine(side: Recorded) -> dict[str, Any]:
    run = side.run
    gpu = run.gpu or {}
    return {
        "host": run.host, "device": run.device_name, "driver": gpu.get("driver"), "threads": run.threads,
        "usable cores": run.usable_cores,
    }  # fmt: skip


def _unlike(a: Recorded, b: Recorded) -> Iterator[str]:
    """Why the ratio of the two runs may be misleading."""
    left, right = a.run, b.run
    if left.workload != right.workload:
        yield f"the workloads differ ({left.workload}, {right.workload}), so their items are not comparable"
    if (left.host, left.device_name) != (right.host, right.device_name):
        machines = f"{left.device_name} on {left.host}, {right.device_name} on {right.host}"
        yield f"the runs used different machines ({machines})"
    elif left.usable_cores != right.usable_cores:
        yield f"the runs had different numbers of cores ({_text(left.usable_cores)}, {_text(right.usable_cores)})"
    if left.items_per_step != right.items_per_step:
        yield (
            f"the effective batch differs ({left.items_per_step:,}, {right.items_per_step:,} items per step), which "
            "changes what is trained"
        )
    if left.parameters != right.parameters or left.model != right.model:
        yield "the models differ"
    if left.data != right.data and not is_script(left):  # of a script, it is the command
        yield "the data differ"
    for side in (a, b):
        if not side.snapshot.final:
            yield f"{side.name} is still running"


def _disturbance(a: Recorded, b: Recorded) -> str:
    """Whether other processes took cores from one of two runs on a CPU; "" otherwise or if it is unknown."""
    one, other = a.snapshot.cores, b.snapshot.cores
    if a.run.device != "cpu" or one is None or other is None or abs(one.others - other.others) < DISTURBED:
        return ""
    if not max(one, other, key=lambda use: use.others).full:
        return ""
    return f"other processes used {one.others:.1f} cores during {a.name}, {other.others:.1f} during {b.name}"


def _losses(sides: Sequence[Recorded]) -> tuple[LossPoint, ...]:
    """Losses at the same number of items, as batches may differ, where all runs recorded them."""
    if not all(side.losses for side in sides):
        return ()
    common = min(side.losses[-1][0] for side in sides)
    # Single losses of other steps differ even between identical runs.
    single = [dict(side.losses) if is_script(side.run) else None for side in sides]
    scripts = [set(read) for read in single if read is not None]
    shared = sorted(set.intersection(*scripts)) if scripts else []
    points: list[LossPoint] = []
    for share in LOSS_POINTS:
        items = round(common * share)
        if scripts:
            near = [at for at in shared if at <= items]
            # With unlike batches, few steps of both are after as many items.
            if not near or near[-1] < items * LEAST_NEAR or (points and near[-1] == points[-1].items):
                continue
            items = near[-1]
        both = zip(sides, single, strict=True)
        losses = (side.loss_at(items) if read is None else read[items] for side, read in both)
        points.append(LossPoint(items, share, tuple(losses)))
    return tuple(point for point in points if any(loss is not None for loss in point.losses))


def _text(value: object) -> str:
    """As written in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return NOT_SET if value is None else str(value)


def _side(side: Recorded) -> dict[str, Any]:
    best = side.snapshot.best
    last = side.snapshot.evaluations[-1] if side.snapshot.evaluations else None
    return {
        "run": side.name,
        "status": side.snapshot.status,
        "workload": side.run.workload,
        "device": side.run.device_name,
        "host": side.run.host,
        "items_per_step": side.run.items_per_step,
        "steps": side.steps,
        "training_s": side.snapshot.elapsed_s,
        "items_per_s": side.rate.value,
        "windows": side.used,
        "warm_up_windows": side.warm_up,
        "profiled_windows": side.profiled,
        "step_p50_ns": side.step_p50_ns,
        "step_p95_ns": side.step_p95_ns,
        "phases_ns_per_step": side.phases,
        "exchange_ns_per_step": side.exchange_ns,
        "skew_ns_per_step": side.skew_ns,
        "peak_bytes": side.peak_bytes,
        "best_evaluation": asdict(best) if best else None,
        "last_evaluation": asdict(last) if last else None,
    }


NAME = "observed"
# Training only, in windows short enough to show how much they vary.
QUIET = (
    f"run.name={NAME}", "run.max_steps=1000000000", "evaluate.at_end=false", "checkpoint.every_steps=0",
    "checkpoint.every_epochs=0", "checkpoint.every_minutes=0", "checkpoint.at_end=false", "log.window_s=0.25",
    "log.every_steps=1000", "log.profile_every_s=0", "evaluate.every_epochs=0",
)  # fmt: skip
# Time limit for preparing and the first steps: in seconds, and as a multiple of those to be observed.
PREPARE_S, PREPARE_TIMES = 300.0, 4.0


class LateError(NddError):
    """A run had no step within its time limit."""


def observe(workload: str, sets: Sequence[str], seconds: float, stop: threading.Event) -> Recorded | None:
    """Train for `seconds` after the first step and read the record; None when stopped.

    Raises LateError without a first step within PREPARE_TIMES as long, and NddError on another failure.
    """
    prepare_s = min(PREPARE_TIMES * seconds, PREPARE_S)
    spec = spec_of(None, workload, [*QUIET, *sets])
    try:
        with ChildProcess("ndd_engine.trial.compare") as child:
            tick = ticker("", lambda _: None, stop)
            child.ask({"do": "observe", "seconds": seconds, **spec}, seconds + prepare_s, tick)
            return read_recorded(RunDir(child.folder / NAME))
    except StoppedError:
        return None
    except ChildError as error:
        if error.kind == "late":
            raise LateError(f"no steps within {prepare_s:.2g} s") from None
        raise NddError(str(error)) from None


class ShortRun(ChildServer):
    """The process."""

    def __init__(self, pipe: Pipe, folder: Path) -> None:
        super().__init__(pipe, folder)
        self.commands = {"observe": self.observe}

    def observe(self, command: Json) -> Json:
        """See the function of this name."""
        from ndd_engine.run.run import Run
        from ndd_engine.train.request import RunRequest
        from ndd_engine.train.training_run import TrainingRun

        run, trained_s = Run.open(TrainingRun(RunRequest(draft_of(command), self.folder, probes=False))), None

        def enough(snapshot: Snapshot) -> bool:
            nonlocal trained_s
            if snapshot.step and trained_s is None:
                trained_s = time.monotonic()
            return trained_s is not None and time.monotonic() - trained_s >= command["seconds"]

        found = run.execute_until(enough)
        if found.status == "failed":
            raise NddError(found.reason)
        return {}


if __name__ == "__main__":
    ShortRun.main(sys.argv[1:])

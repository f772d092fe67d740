"""What a comparison needs of one recorded run, read from all of its events."""

from __future__ import annotations

from dataclasses import dataclass, field

from ndd_engine.errors import UsageError
from ndd_engine.record.events import Event, MemoryEvent, RanksEvent, RunEvent, SampleEvent, WindowEvent
from ndd_engine.record.file import EventLog, RunReader
from ndd_engine.record.ranks import ASIDES
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.text import printable

from .series import Rate, Stretch, rate, warm_up

# The loss at a point of training is the mean over this share of training before that point.
LOSS_SPAN = 0.1


@dataclass(frozen=True, slots=True)
class Recorded:
    """One side of a comparison. Times are nanoseconds by the host clock, over the used windows.

    rate: items per second without evaluations and checkpoints. used, warm_up, profiled: number of windows with steps.
    phases: per optimizer step. step_p50_ns, step_p95_ns: weighted median of the windows' own quantiles. peak_bytes:
    reserved on the GPU; on the CPU, resident in the run's processes. losses: (items trained so far, mean loss of a
    window), in order. windows: the used ones. damaged: number of damaged lines of the log. exchange_ns, skew_ns: of all
    ranks per optimizer step, None with one rank.
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
            if event.loss is not None and self.run is not None:
                self.losses.append((event.step * self.run.items_per_step, event.loss))
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
        step_p50_ns=_middle([(window.step_p50_ns, window.steps) for window in used]),
        step_p95_ns=_middle([(window.step_p95_ns, window.steps) for window in used]),
        peak_bytes=reading.peak,
        losses=tuple(reading.losses),
        windows=tuple(used),
        damaged=log.damaged,
        exchange_ns=exchange_ns,
        skew_ns=skew_ns,
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


def _middle(values: list[tuple[int | None, int]]) -> int | None:
    """The weighted median; missing values are left out."""
    known = sorted((value, weight) for value, weight in values if value is not None and weight)
    half = sum(weight for _, weight in known) / 2
    for value, weight in known:
        half -= weight
        if half <= 0:
            return value
    return None

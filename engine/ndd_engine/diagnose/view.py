"""A snapshot as the rules ask it: shares of a step with their error, settings, cores, and where the time was seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import hypot, sqrt
from pathlib import PurePath
from typing import Any

from ndd_engine.record.events import BaselineEvent
from ndd_engine.record.snapshot import PhaseShare, Snapshot
from ndd_engine.text import duration, printable

from .finding import Change, Confidence, Evidence, Finding

# What costs less of the time is not worth a word.
FLOOR = 0.05
# Standard errors that a share must be above 0, and that a bound lies above what was measured.
ERRORS = 2.0
# A bound on what is left when all of something is removed: nothing becomes infinitely fast.
LEAST_REST = 0.01
# Forward and backward this much slower than by themselves are not slow by chance.
SLOWED = 1.2
LEAST_RUNS = 2
# Cores that other processes use before they count.
OTHERS = 0.3
# Looks at the training thread, and the part of them that one function must have, before it is named.
LEAST_LOOKS = 8
LEAST_PART = 0.2

MODEL = ("forward", "loss", "backward")
CLOCK = "host clock"
BASELINE = "measured before training"
CONFIG = "configuration"
SAMPLES = "processor counters"


@dataclass(frozen=True, slots=True)
class Cost:
    """What some phases take: `ns` of an optimizer step, `share` of the time of steps (0..1), and its standard error.

    wall: share of all wall time, evaluations and checkpoints included.
    """

    ns: float
    share: float
    error: float | None
    wall: float

    @property
    def clear(self) -> bool:
        """Above the floor and above the noise; without a known noise it has to be twice the floor."""
        if self.error is None:
            return self.share >= 2 * FLOOR
        return self.share >= FLOOR and self.share >= ERRORS * self.error

    @property
    def ceiling(self) -> float:
        """Removing all of it gains at most so many times."""
        return ceiling(self.share + ERRORS * (self.error or 0.0))


@dataclass(frozen=True, slots=True)
class CodePlace:
    """Where the time of some phases was seen: the function's busiest line, and its share of `looks`."""

    line: str
    share: float
    looks: int
    own: bool

    @property
    def most(self) -> float:
        """The share that so many looks do not exclude."""
        return min(self.share + ERRORS * sqrt(self.share * (1 - self.share) / self.looks), 1.0)


NOTHING = Cost(0.0, 0.0, 0.0, 0.0)


class View:
    """One snapshot, looked at once for all rules."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        run = snapshot.run
        self.config: dict[str, Any] = run.config if run is not None and isinstance(run.config, dict) else {}
        self.card = run is not None and run.device.startswith("cuda")
        self.phases: dict[str, PhaseShare] = {phase.name: phase for phase in snapshot.phases}
        self.step_ns = snapshot.step_ns or 0.0
        self.usable = run.usable_cores if run is not None else None
        self.threads = run.threads if run is not None else None
        self.micro_steps = snapshot.micro_steps or 0.0
        self.workers: int = self.whole("loader.workers") or 0
        self.wait = self.cost("data_wait")
        self.model = self.cost(*MODEL)

    def get(self, key: str) -> Any:
        """A setting of the resolved configuration by its dotted name; None where there is none."""
        section, _, name = key.partition(".")
        table = self.config.get(section)
        return table.get(name) if isinstance(table, dict) else None

    def whole(self, key: str) -> int | None:
        """A setting that is a whole number."""
        value = self.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def cost(self, *names: str) -> Cost:
        """What phases take together, over the recent windows."""
        found = [self.phases[name] for name in names if name in self.phases]
        if not found or self.step_ns <= 0:
            return NOTHING
        errors = [phase.share_error for phase in found]
        error = None if None in errors else hypot(*(value for value in errors if value is not None))
        ns = sum(phase.host_ns for phase in found)
        return Cost(ns, min(ns / self.step_ns, 1.0), error, sum(phase.share for phase in found))

    @property
    def baseline(self) -> BaselineEvent | None:
        """A micro-batch by itself, where it was measured more than once: a single time may be any."""
        found = self.snapshot.baseline
        return found if found is not None and found.runs >= LEAST_RUNS and found.micro_ns > 0 else None

    @property
    def neighboured(self) -> bool:
        """Whether other processes are known to compute on the cores."""
        use = self.snapshot.cores
        return use is not None and sum(cores for _, _, cores in use.neighbours) >= OTHERS

    @property
    def whole_cores(self) -> int | None:
        """Cores that can be used fully, at least one."""
        return None if self.usable is None else max(int(self.usable), 1)

    @property
    def slowed(self) -> float | None:
        """Forward and backward in the run over the same by themselves before it; None where either is unknown."""
        baseline = self.baseline
        if baseline is None or not self.micro_steps or not self.model.ns:
            return None
        return self.model.ns / (baseline.micro_ns * self.micro_steps)

    def undisturbed(self, threads: int | None = None) -> float | None:
        """A step over its forward and backward alone and undisturbed: a bound for what speeds up all phases.

        threads: the bound holds for any count of them, by the fastest that was measured.
        """
        baseline = self.baseline
        if baseline is None or not self.micro_steps or not self.step_ns:
            return None
        times = [baseline.micro_ns]
        if threads is not None:
            times += [ns for _, ns in baseline.by_threads if ns > 0]
        return max(self.step_ns / (min(times) * self.micro_steps), 1.0)

    def thread_ns(self, threads: int) -> float | None:
        """A micro-batch by itself with so many threads, None where that was not measured."""
        baseline = self.baseline
        if baseline is None:
            return None
        if baseline.threads == threads:
            return baseline.micro_ns
        return next((ns for count, ns in baseline.by_threads if count == threads and ns > 0), None)

    def where(self, *phases: str) -> CodePlace | None:
        """The function that was seen most in these phases, the user's own first; None without enough looks."""
        stacks = self.snapshot.stacks
        if stacks is None:
            return None
        frames = [frame for frame in stacks.frames if str(frame[0]).partition("/")[0] in phases]
        looks = sum(frame[4] for frame in frames)
        if looks < LEAST_LOOKS:
            return None
        functions: dict[tuple[int, str, str], dict[int, int]] = {}
        for _, file, line, function, seen, own in frames:
            lines = functions.setdefault((own, file, function), {})
            lines[line] = lines.get(line, 0) + seen
        (own, file, function), lines = max(
            functions.items(), key=lambda item: (item[0][0], sum(item[1].values()))
        )
        share = sum(lines.values()) / looks
        if share < LEAST_PART:
            return None
        return CodePlace(place(file, max(lines, key=lines.__getitem__), function), share, looks, bool(own))

    def line(self, *phases: str) -> str | None:
        """The line of the user's code, or else of a library, that was seen most in these phases."""
        found = self.where(*phases)
        return found.line if found else None


def place(file: str, line: int, function: str) -> str:
    """ "model.py:12 in forward"."""
    return printable(f"{PurePath(str(file)).name}:{line} in {function}")


def ceiling(share: float) -> float:
    """Removing `share` of the time makes the rest at most so many times as fast; at least 1."""
    return 1 / max(1 - max(share, 0.0), LEAST_REST)


def percent(share: float) -> str:
    """ "57 %", and "0.4 %" where whole ones would say nothing."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 2 or not value else f"{value:.1f} %"


def times(ratio: float) -> str:
    """ "1.42x"."""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


def span(ns: float) -> str:
    """Nanoseconds for people."""
    return f"{ns / 1e3:.3g} µs" if ns < 1e6 else duration(ns * 1e-9)


def taken(cost: Cost, what: str = "") -> Evidence:
    """The evidence that some phases take so long of a step."""
    return Evidence(f"{what or 'it takes'} {span(cost.ns)} of each step, {percent(cost.share)}", CLOCK)


def finding(
    cause: str,
    title: str,
    cost: Cost,
    evidence: Iterable[Evidence | None],
    changes: Iterable[Change | None],
    confidence: Confidence = "likely",
    bound: float | None = None,
) -> Finding:
    """A finding that costs `cost`; its ceiling is at least `bound`, where removing the cause speeds up more."""
    return Finding(
        cause,
        title,
        tuple(item for item in evidence if item is not None),
        confidence,
        share=min(cost.share, 1.0),
        ceiling=max(cost.ceiling, bound or 1.0),
        changes=tuple(item for item in changes if item is not None),
    )

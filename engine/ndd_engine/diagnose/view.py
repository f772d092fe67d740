"""A snapshot as the rules need it: cost of phases with their error, settings, cores and profiled functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, hypot, sqrt
from pathlib import PurePath
from typing import Any

from ndd_engine.record.event import ASIDES, Wait
from ndd_engine.record.events import BaselineEvent, FunctionsEvent, KernelsEvent
from ndd_engine.record.snapshot import OTHERS, PhaseShare, Snapshot
from ndd_engine.text import percent, printable, span
from ndd_watch.called import logs

from .finding import Change, Confidence, Evidence, Finding

# Minimum share of the time of a finding.
FLOOR = 0.05
# Number of standard errors for the significance of a share.
ERRORS = 2.0
# Minimum part of the time that is left after removing something, so that bounds stay finite.
LEAST_REST = 0.01
# Minimum additional share to report that a cause slows other phases as well.
WIDER = 0.01
# Where less than this part of a run is steps, findings about steps name their share of the whole time as well.
NOTICED = 0.9
# From this factor on, forward and backward are significantly slower than in the baseline.
SLOWED = 1.2
LEAST_RUNS = 2
# Minimum stack samples, and minimum part of them in one function, to report it.
LEAST_LOOKS = 8
LEAST_PART = 0.2
# From this factor on, a profiled step is scaled to the time of a usual one.
DISTORTED = 1.3
# A GPU has run dry in a phase without kernels if it waits for this part of it, or of the whole step.
DRY = 0.5
DRY_STEP = 0.01

MODEL = ("forward", "loss", "backward")
COMPUTING = (*MODEL, "clip", "optimizer", "zero_grad")
# Phases in which a GPU can wait for the host, or has little to do.
BESIDE = ("data_wait", "to_device", "clip", "optimizer", "zero_grad", "log", "other")
# Those of them in which it computes nothing.
BETWEEN = ("data_wait", "to_device", "log", "other")
# The method of a wait that is a call of gc.collect.
COLLECT = "collect"
CLOCK = "host clock"
RANK_CLOCKS = "clocks of all ranks"
DEVICE = "device clock"
BASELINE = "measured before training"
CONFIG = "configuration"
SAMPLES = "CPU counters"
PROFILER = "Python profiler, one step"


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of some phases: nanoseconds per optimizer step, share of the step time (0..1) and its standard error.

    wall: share of the wall time of the run, evaluations and checkpoints included. source: which clock it is from.
    """

    ns: float
    share: float
    error: float | None
    wall: float
    source: str = CLOCK

    @property
    def clear(self) -> bool:
        """Whether the share is above the floor and the noise; if the noise is unknown, above twice the floor."""
        if self.error is None:
            return self.share >= 2 * FLOOR
        return self.share >= FLOOR and self.share >= ERRORS * self.error


@dataclass(frozen=True, slots=True)
class CodePlace:
    """The function that takes most of some phases: its line, its share of their time and the upper bound of that.

    own: whether it is the user's own. seen: how it was seen, as evidence.
    """

    line: str
    share: float
    most: float
    own: bool
    seen: Evidence


@dataclass(frozen=True, slots=True)
class SlowFunction:
    """A user's function in a step: its time outside torch and other functions of the user, and its share of the step.

    caller: the user's function that calls it, "" if there is none. phase: "" if it is unknown.
    """

    file: str
    line: int
    name: str
    calls: int
    ns: float
    share: float
    caller: str
    phase: str

    @property
    def where(self) -> str:
        """ "train.py:12 in tokenize, called by collate"."""
        called = f", called by {printable(self.caller)}" if self.caller else ""
        return place(self.file, self.line, self.name) + called

    @property
    def subject(self) -> str:
        """The same before a verb: "train.py:12 in tokenize, called by collate,"."""
        return self.where + "," * bool(self.caller)

    @property
    def taken(self) -> Evidence:
        """ "train.py:12 in tokenize takes 8.1 ms of a step"."""
        return Evidence(f"{self.subject} takes {span(self.ns)} of a step", PROFILER)


# Functions of libraries -> what a line of the user calls them by.
INDEXERS = {"_LocationIndexer.__getitem__": "iloc or loc", "_ScalarAccessIndexer.__getitem__": "iat or at"}


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """A call that is not of the user's own function: time in a step, or in an evaluation, and share of that.

    file, line, name: the user's line that calls, directly or not. phase: "" if it is unknown.
    """

    file: str
    line: int
    name: str
    function: str
    library: str
    calls: int
    ns: float
    share: float
    phase: str

    @property
    def where(self) -> str:
        """ "train.py:12 in main"."""
        return place(self.file, self.line, self.name)

    @property
    def what(self) -> str:
        """ "LightningModule.log of lightning", "print"."""
        known = self.library and not self.function.startswith(("torch.", "Tensor."))
        function = INDEXERS.get(self.function, self.function)
        return printable(function + (f" of {self.library}" if known else ""))

    @property
    def logs(self) -> bool:
        """Whether it records values or draws a progress bar."""
        return logs(self.function, self.library)


NOTHING = Cost(0.0, 0.0, 0.0, 0.0)


class View:
    """A snapshot with the values that several rules need."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        run = snapshot.run
        self.config: dict[str, Any] = run.config if run is not None and isinstance(run.config, dict) else {}
        self.gpu = run is not None and run.device.startswith("cuda")
        self.precision = run.precision if run is not None else ""
        self.phases: dict[str, PhaseShare] = {phase.name: phase for phase in snapshot.phases}
        self.step_ns = snapshot.step_ns or 0.0
        self.usable = run.usable_cores if run is not None else None
        self.threads = run.threads if run is not None else None
        self.alternatives = run.alternatives if run is not None else {}
        self.micro_steps = snapshot.micro_steps or 0.0
        self.workers: int = self.whole("loader.workers") or 0
        self.wait = self.cost("data_wait")
        self.model = self.cost(*MODEL)

    def get(self, key: str) -> Any:
        """A setting of the resolved configuration by its dotted name; None if missing."""
        section, _, name = key.partition(".")
        table = self.config.get(section)
        return table.get(name) if isinstance(table, dict) else None

    def whole(self, key: str) -> int | None:
        """An integer setting; None if missing or not an integer."""
        value = self.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def cost(self, *names: str) -> Cost:
        """Total cost of phases over the recent windows.

        A GPU runs behind the host, and a full queue makes any phase of the host look long. So what a phase beside the
        model costs there is the time that it takes on the device, waiting included, and never more than on the host.
        """
        found = [self.phases[name] for name in names if name in self.phases]
        if not found or self.step_ns <= 0:
            return NOTHING
        errors: list[float | None] = []
        sources: dict[str, None] = {}
        ns = 0.0
        for phase in found:
            cost, source = self._cost_ns(phase)
            sources[source] = None
            part = cost / phase.host_ns if phase.host_ns else 0.0
            ns += cost
            errors.append(None if phase.share_error is None else phase.share_error * part)
        error = None if None in errors else hypot(*(value for value in errors if value is not None))
        share = min(ns / self.step_ns, 1.0)
        return Cost(ns, share, error, share * self.in_steps, " and ".join(sources))

    @cached_property
    def in_steps(self) -> float:
        """Share of the wall time of the run (0..1) that steps take; evaluations and checkpoints take the rest."""
        totals = self.snapshot.totals
        return max(1 - sum(totals.share(name) for name in ASIDES), 0.0)

    def _cost_ns(self, phase: PhaseShare) -> tuple[float, str]:
        """Nanoseconds of a step, and where they are from."""
        if not self.gpu or phase.name not in BESIDE:
            return phase.host_ns, CLOCK
        if phase.device_ns is not None:
            return min(phase.host_ns, phase.device_ns), DEVICE
        # Without its clock, the GPU's idle time is an upper bound.
        if self.idle is None:
            return phase.host_ns, CLOCK
        return min(phase.host_ns, self.idle * self.step_ns), f"{CLOCK} and NVML"

    @cached_property
    def idle(self) -> float | None:
        """Share of the time (0..1) in which the GPU runs no kernel, by NVML; None if unknown and without a GPU."""
        util = (self.snapshot.gpu or {}).get("util_percent")
        return 1 - float(util) / 100 if self.gpu and util is not None else None

    @cached_property
    def clocked(self) -> bool:
        """Whether the clock of the GPU has timed phases of the steps."""
        return self.gpu and any(phase.device_ns for phase in self.phases.values())

    @cached_property
    def runs_dry(self) -> bool:
        """Whether the GPU has nothing left to do when the host begins the model, by the device clock.

        It then waits until the host launches something: in a phase without kernels, both clocks advance together.
        """
        for name in ("data_wait", "log", "other"):
            phase = self.phases.get(name)
            if phase is None or phase.device_ns is None or not phase.host_ns:
                continue
            if phase.device_ns >= min(DRY * phase.host_ns, DRY_STEP * self.step_ns):
                return True
        return False

    def exposed(self, phase: str) -> float:
        """Upper bound of the share of a step for which the GPU waits for the host in a phase; "" if that is unknown.

        0 for a phase of the model if the GPU is busy when the model begins. It may run dry later: only NVML or a
        capture can tell, see `gpu.launch_bound`.
        """
        if not self.gpu:
            return 1.0
        if phase in BESIDE and phase in self.phases:
            return self.cost(phase).share
        if self.kernels is not None:
            return min(sum(self.kernels.idle_ns.values()) / self.kernels.wall_ns, 1.0)
        if self.idle is not None:
            return self.idle
        if not self.clocked:
            return 1.0
        found = self.phases.get(phase)
        if not self.runs_dry:
            return 0.0
        if found is None or found.device_ns is None:
            return 1.0
        return min(found.host_ns, found.device_ns) / self.step_ns if self.step_ns else 0.0

    def part(self, share: float) -> Cost:
        """Cost of a share of the step time; its error is unknown."""
        return Cost(share * self.step_ns, share, None, share * self.in_steps)

    def of_wall(self, share: float) -> Cost:
        """The same of a share of the wall time of the run."""
        return Cost(share * self.step_ns, share, None, share)

    def device_cost(self, name: str) -> Cost:
        """Cost of a phase by the device clock; NOTHING without one."""
        found = self.phases.get(name)
        total = sum(
            phase.device_ns or 0.0
            for phase in self.phases.values()
            if "/" not in phase.name and phase.name not in ASIDES
        )
        if not total or found is None or found.device_ns is None:
            return NOTHING
        share = found.device_ns / total
        return Cost(found.device_ns, share, found.share_error, share * self.in_steps, DEVICE)

    @property
    def is_script(self) -> bool:
        """Whether the run is a script that is only observed."""
        return "script" in self.config

    @property
    def script(self) -> dict[str, Any]:
        """What the configuration says of an observed script; {} for a run of one's own."""
        found = self.config.get("script")
        return found if isinstance(found, dict) else {}

    @property
    def trace(self) -> dict[str, Any] | None:
        """What is known of a trace that somebody recorded: see `recordings.traces`. None for a run."""
        found = self.config.get("trace")
        return found if isinstance(found, dict) else None

    @property
    def model_takes(self) -> str:
        """The subject and the verb of a sentence about the model: "forward takes" for a trace of an inference."""
        inference = self.trace is not None and not self.cost("backward").ns
        return "forward takes" if inference else "forward and backward take"

    @property
    def loader_place(self) -> str | None:
        """Where the script makes its loader: "train.py:41"; None if that is unknown."""
        return self.script_place("loader")

    @property
    def reads_place(self) -> str | None:
        """Where the script's dataset makes an item: "data.py:12 in Clips.__getitem__"; None if that is unknown."""
        found = self.script.get("reads")
        if not isinstance(found, (list, tuple)) or len(found) != 3:
            return None
        return place(str(found[0]), int(found[1]), str(found[2]))

    def script_place(self, name: str) -> str | None:
        """What the configuration says of a place in the script: "train.py:41"; None if that is unknown."""
        found = self.script.get(name)
        if not isinstance(found, (list, tuple)) or len(found) != 2:
            return None
        return printable(f"{PurePath(str(found[0])).name}:{found[1]}")

    def script_line(self, fact: str) -> str | None:
        """The line of a script that was found in its source for a fact of its configuration; None without one."""
        script = self.config.get("script")
        file, line = script.get(fact) or ("", 0) if isinstance(script, dict) else ("", 0)
        return printable(f"{PurePath(str(file)).name}:{line}") if line else None

    @property
    def dataset(self) -> str:
        """Class of the dataset that the script's loader reads; "" if that is unknown."""
        return str(self.script.get("dataset") or "")

    @property
    def by_item(self) -> bool:
        """Whether the script's loader joins items of a dataset with an index to batches."""
        return self.script.get("by_item") is True

    @property
    def items(self) -> int | None:
        """Items of a script's dataset: as its sampler knows, or those of the passes so far; None if unknown."""
        found, totals = self.script.get("items"), self.snapshot.totals
        if isinstance(found, int):
            return found
        run = self.snapshot.run
        if not totals.passes or run is None or not run.items_per_step or not self.by_item:
            return None
        return round(totals.steps / totals.passes * run.items_per_step)

    def slowest_function(self, *phases: str) -> SlowFunction | None:
        """The user's function that takes most of a step by itself; None without a profiled step.

        phases: only a function of these phases, or one of an unknown phase; () for any.
        """
        rows = (item for item in self.functions if not phases or not item.phase or item.phase in phases)
        return next(rows, None)

    @cached_property
    def functions(self) -> tuple[SlowFunction, ...]:
        """The functions of the profiled step, longest first, scaled to the time of a usual step or phase.

        Together they take no longer than their phase, and than the step.
        """
        found = self.snapshot.functions
        if found is None or not found.wall_ns or self.step_ns <= 0:
            return ()
        usual = self._usual(found, [(row[7], row[5]) for row in found.functions])
        items = [
            SlowFunction(
                str(file), int(line), str(name), int(calls), ns, ns / self.step_ns, str(caller), str(phase)
            )
            for (file, line, name, calls, _, _, caller, phase), ns in zip(found.functions, usual, strict=True)
        ]
        return tuple(sorted(items, key=lambda item: -item.ns))

    @cached_property
    def calls(self) -> tuple[LibraryCall, ...]:
        """What lines of the user's code call in a step, longest first, scaled in the same way."""
        found = self.snapshot.functions
        if found is None or not found.wall_ns or self.step_ns <= 0:
            return ()
        usual = self._usual(found, [(row[7], row[6]) for row in found.calls])
        items = [
            LibraryCall(*row[:6], ns, ns / self.step_ns, row[7])
            for row, ns in zip(found.calls, usual, strict=True)
        ]
        return tuple(sorted(items, key=lambda item: -item.ns))

    def _usual(self, found: FunctionsEvent, rows: Sequence[tuple[str, int]]) -> list[float]:
        """Nanoseconds in a usual step of parts of the profiled one. rows: (phase, nanoseconds)."""
        sums: dict[str, int] = {}
        for phase, ns in rows:
            sums[phase] = sums.get(phase, 0) + ns
        factors = {}
        for phase, ns in sums.items():
            profiled = found.phases.get(phase, 0)
            if profiled and phase in self.phases:  # which may cost nothing: the GPU is busy meanwhile
                cost, median = self.cost(phase).ns, self.phases[phase].p50_ns or 0
                # As a part of the phase, unless a few long steps lengthen the phase more than they do the others.
                factors[phase] = min(cost, max(profiled, median) * self.stretched(phase)) / max(profiled, ns)
            else:
                distorted = found.wall_ns > DISTORTED * self.step_ns
                factors[phase] = self.step_ns / found.wall_ns if distorted else 1.0
        whole = sum(ns * factors[phase] for phase, ns in sums.items())
        all_of_it = min(self.step_ns / whole, 1.0) if whole else 1.0
        return [ns * factors[phase] * all_of_it for phase, ns in rows]

    def stretched(self, phase: str) -> float:
        """The mean of a phase over its median, the least one of the others that take a part of the step; at least 1.

        On a busy machine, all that a step does takes longer. A rollout before every 16th step lengthens one phase only.
        """
        medians = {
            one.name: one.p50_ns or 0
            for one in self.phases.values()
            if "/" not in one.name and one.name not in (*ASIDES, phase)
        }
        least = LEAST_PART * sum(medians.values())
        means = [self.phases[name].host_ns / ns for name, ns in medians.items() if ns and ns >= least]
        return max(min(means, default=1.0), 1.0)

    def called_in(self, phase: str) -> tuple[LibraryCall, ...]:
        """Where the time of a profiled evaluation or checkpoint goes, longest first: with shares of that.

        Functions of the user's own code are among them, by themselves.
        """
        found = self.snapshot.asides.get(phase)
        if found is None or not found.wall_ns:
            return ()
        items = [(*row[:6], row[6], row[7]) for row in found.calls]
        for file, line, name, calls, _, own_ns, _, inner in found.functions:
            of_library = sum(
                row[6] for row in found.calls if row[:1] == (file,) and row[2] == name and row[4] != "torch"
            )
            items.append((file, line, name, "", "", calls, max(own_ns - of_library, 0), inner))
        whole = max(found.wall_ns, sum(item[6] for item in items))
        made = (LibraryCall(*item[:6], float(item[6]), item[6] / whole, item[7]) for item in items)
        return tuple(sorted(made, key=lambda item: -item.ns))

    @cached_property
    def device_waits(self) -> list[Wait]:
        """What waited for the device in a profiled step."""
        found = self.snapshot.functions
        return [] if found is None else [wait for wait in found.waits if wait[3] != COLLECT]

    @cached_property
    def collects(self) -> list[Wait]:
        """Calls of the garbage collector in a profiled step, by the user's function that makes them."""
        found = self.snapshot.functions
        return [] if found is None else [wait for wait in found.waits if wait[3] == COLLECT]

    @cached_property
    def waits(self) -> dict[str, float]:
        """Nanoseconds of the profiled step in calls that wait for the GPU, by phase of the function that calls."""
        found = self.snapshot.functions
        spent: dict[str, float] = {}
        if found is not None:
            phases = {(row[0], row[2]): row[7] for row in found.functions}
            for file, _, name, _, _, ns in self.device_waits:
                phase = phases.get((file, name), "other")  # the loop was called before the step
                spent[phase] = spent.get(phase, 0.0) + ns
        return spent

    @property
    def waiting_line(self) -> str | None:
        """The user's function that waits longest for the device in a profiled step; None if none does."""
        if not self.device_waits:
            return None
        file, line, name, *_ = max(self.device_waits, key=lambda wait: wait[5])
        return place(file, line, name)

    @property
    def usual_model_ns(self) -> int:
        """Sum of the median times of forward, loss and backward per step; 0 if unknown."""
        return sum(self.phases[name].p50_ns or 0 for name in MODEL if name in self.phases)

    @property
    def kernels(self) -> KernelsEvent | None:
        """The newest profiler capture of kernels; None without one."""
        found = self.snapshot.kernels
        return found if found is not None and found.wall_ns and found.method == "kernels" else None

    @property
    def baseline(self) -> BaselineEvent | None:
        """The measurement of one micro-batch before training; None with fewer than LEAST_RUNS runs."""
        found = self.snapshot.baseline
        return found if found is not None and found.runs >= LEAST_RUNS and found.micro_ns > 0 else None

    @property
    def neighboured(self) -> bool:
        """Whether identified other processes use the cores."""
        use = self.snapshot.cores
        return use is not None and sum(cores for _, _, cores in use.neighbours) >= OTHERS

    @property
    def disturbed(self) -> bool:
        """Whether others use so much of full cores that it may be them for which a worker or a call takes long."""
        use = self.snapshot.cores
        return use is not None and use.shared and use.full

    @cached_property
    def collecting(self) -> float:
        """Share of the wall time of the run (0..1) in which Python collects garbage, in one thread."""
        totals = self.snapshot.totals
        return min(totals.gc_ns / totals.wall_ns, 1.0) if totals.gc_ns and totals.wall_ns else 0.0

    @property
    def crowded(self) -> bool:
        """Whether several threads wait for each other at every operator on cores that other processes use as well."""
        use = self.snapshot.cores
        several = not self.gpu and (self.threads or 1) > 1
        return several and use is not None and use.others >= OTHERS and use.full

    @property
    def whole_cores(self) -> int | None:
        """Whole usable cores, at least one; None if unknown."""
        return None if self.usable is None else max(int(self.usable), 1)

    @property
    def slowed(self) -> float | None:
        """Time of forward and backward in the run relative to the baseline; None if either is unknown."""
        baseline = self.baseline
        if baseline is None or not self.micro_steps or not self.model.ns:
            return None
        return self.model.ns / (baseline.micro_ns * self.micro_steps)

    def slowdown(self) -> float | None:
        """Share of the step (0..1) by which computing is slower than forward and backward before training.

        The optimizer and the other computing phases are assumed to be slower by the same factor. None if unknown or
        not significant.
        """
        if self.slowed is None or self.slowed < SLOWED:
            return None
        return self.cost(*COMPUTING).share * (1 - 1 / max(self.slowed, 1.0))

    def thread_ns(self, threads: int) -> float | None:
        """Baseline time of a micro-batch with this many threads; None if not measured."""
        baseline = self.baseline
        if baseline is None:
            return None
        if baseline.threads == threads:
            return baseline.micro_ns
        return next((ns for count, ns in baseline.by_threads if count == threads and ns > 0), None)

    def where(self, *phases: str) -> CodePlace | None:
        """The function that takes most of these phases, user code first; None if no profile and no samples name one."""
        found, cost = self.slowest_function(*phases), self.cost(*phases)
        if found is not None and found.phase:
            share = min(found.ns / cost.ns, 1.0) if cost.ns else 0.0
            if share >= LEAST_PART:
                where = place(found.file, found.line, found.name)
                return CodePlace(where, share, share, True, found.taken)
        # Where torch takes the time, it releases the interpreter lock: samples see its lines.
        return self._sampled(*phases)

    def _sampled(self, *phases: str) -> CodePlace | None:
        """The same by stack samples, which scripts have: the busiest line of a function."""
        stacks = self.snapshot.stacks
        if stacks is None:
            return None
        frames = [frame for frame in stacks.frames if str(frame[0]).partition("/")[0] in phases]
        looks = sum(frame[4] for frame in frames)
        if looks < LEAST_LOOKS:
            return None
        functions: dict[tuple[int, str, str], dict[int, int]] = {}
        for _, file, at, function, count, own in frames:
            lines = functions.setdefault((own, file, function), {})
            lines[at] = lines.get(at, 0) + count
        (own, file, function), lines = max(
            functions.items(), key=lambda item: (item[0][0], sum(item[1].values()))
        )
        share = sum(lines.values()) / looks
        if share < LEAST_PART:
            return None
        line = place(file, max(lines, key=lines.__getitem__), function)
        most = min(share + ERRORS * sqrt(share * (1 - share) / looks), 1.0)
        seen = f"{percent(share)} of {looks} stack samples in {' and '.join(phases)} are at {line}"
        return CodePlace(line, share, most, bool(own), Evidence(seen, "stack samples"))

    def line(self, *phases: str) -> str | None:
        """The line that takes most of these phases, user code first, or None."""
        found = self.where(*phases)
        return found.line if found else None


def place(file: str, line: int, function: str) -> str:
    """ "model.py:12 in forward"."""
    return printable(f"{PurePath(str(file)).name}:{line} in {function}")


def ceiling(share: float) -> float:
    """Maximum speedup from removing `share` (0..1) of the time: 1 / (1 - share), at least 1 and at most 100.

    The ceiling of every finding comes from here, and from the share that is shown with it.
    """
    return 1 / max(1 - max(share, 0.0), LEAST_REST)


def rounded_up(steps: float) -> int:
    """The next number of steps with two significant digits."""
    whole = max(ceil(steps), 1)
    unit = int(10 ** max(len(str(whole)) - 2, 0))
    return -(-whole // unit) * unit


def taken(cost: Cost, what: str, source: str = "") -> Evidence:
    """Evidence of the time per step; `what` is its beginning, "waiting for data takes"."""
    return Evidence(f"{what} {span(cost.ns)} of each step ({percent(cost.share)})", source or cost.source)


class FindingDraft:
    """A finding whose evidence and changes are added one by one; `done` returns it. cost: None for a hazard."""

    def __init__(
        self, cause: str, title: str, cost: Cost | None, confidence: Confidence = "likely", leave: str = ""
    ) -> None:
        self._cost = cost
        self._finding = Finding(cause, title, (), confidence, leave=leave)
        self._evidence: list[Evidence] = []
        self._changes: list[Change] = []
        self._bounded = True

    def saw(self, text: str, source: str) -> None:
        """Add evidence."""
        self._evidence.append(Evidence(text, source))

    def change(self, text: str, *sets: str, where: str | None = None) -> None:
        """Add a change to try."""
        self._changes.append(Change(text, sets, where))

    def add(self, *items: Evidence | Change | None) -> None:
        """Add evidence and changes; None is left out."""
        self._evidence += [item for item in items if isinstance(item, Evidence)]
        self._changes += [item for item in items if isinstance(item, Change)]

    def widen(self, share: float | None, title: str, why: str, source: str) -> None:
        """The cause costs up to `share` of the time, because it slows other phases as well; None or less: no change.

        title: the new title, with "{share}" for the share. why: evidence of the other cost.
        """
        if self._cost is None or share is None or share < self._cost.share + WIDER:
            return
        share = min(share, 1.0)
        grown = share / max(self._cost.share, 1e-9)
        self._cost = replace(
            self._cost, share=share, ns=self._cost.ns * grown, wall=min(self._cost.wall * grown, 1.0)
        )
        self._finding = replace(self._finding, title=title.format(share=percent(share)))
        if all(item.text != why for item in self._evidence):
            self.saw(why, source)

    def titled(self, end: str) -> None:
        """Add to the end of the title."""
        self._finding = replace(self._finding, title=self._finding.title + end)

    def unbounded(self) -> None:
        """The cost has no upper bound: no ceiling."""
        self._bounded = False

    def done(self) -> Finding:
        """The finding; its ceiling follows from its share of the wall time of the run, whatever the title says."""
        cost = self._cost
        if cost is not None and cost.wall < NOTICED * cost.share:
            self.saw(
                f"with evaluations and checkpoints, that is {percent(cost.wall)} of the whole time", CLOCK
            )
        found = replace(self._finding, evidence=tuple(self._evidence), changes=tuple(self._changes))
        if cost is None:
            return found
        share = min(cost.wall, 1.0)
        return replace(found, share=share, ceiling=ceiling(share) if self._bounded else None)

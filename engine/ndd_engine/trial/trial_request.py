"""The request for a trial, its progress, and what is measured of each side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ndd_engine.record.events import Event, Json, RanksEvent, TrialEvent, WindowEvent
from ndd_engine.record.ranks import ASIDES, EXCHANGE, SKEW
from ndd_engine.record.rundir import RunDir

# Names the folder of the trial's compiler caches, in the environment of its sides.
CACHES = "NDD_TRIAL_CACHES"
# Number of first losses that are compared between the two sides.
LOSSES = 10


@dataclass(frozen=True)
class Base:
    """The baseline: a configuration file or a workload, with overrides; `run` if it is a run's own configuration.

    name: for display, "run chartext-001" or "chartext.toml".
    """

    name: str
    config: Path | None = None
    workload: str | None = None
    sets: tuple[str, ...] = ()
    run: RunDir | None = None

    @classmethod
    def of_run(cls, run: RunDir, sets: tuple[str, ...] = ()) -> Base:
        """The resolved configuration of a run."""
        return cls(f"run {run.name}", run.config, None, sets, run)


# A trial does not depend on the length of the run; both sides need one.
LENGTH = ("run.epochs", "run.max_steps")


@dataclass(frozen=True)
class TrialRequest:
    """The candidate: "key=value" settings on top of the baseline. cause: the finding they come from, if any.

    restarts: measure in pairs of processes even if one process could switch between both sides. outside: a script may
    write outside its folder and use the network. within: end early once the interval reaches at most this share to
    either side, instead of once the verdict is clear. The length of the run
    among `sets` moves to the baseline, so that it applies to both sides.
    """

    base: Base
    sets: tuple[str, ...]
    budget_s: float = 60.0
    cause: str | None = None
    restarts: bool = False
    outside: bool = False
    within: float | None = None

    def __post_init__(self) -> None:
        length = tuple(item for item in self.sets if item.partition("=")[0].strip() in LENGTH)
        if length:
            base = replace(self.base, sets=(*self.base.sets, *length))
            object.__setattr__(self, "base", base)
            object.__setattr__(self, "sets", tuple(item for item in self.sets if item not in length))

    @property
    def title(self) -> str:
        """What is measured, for those that wait for it."""
        return f"the trial of {' '.join(self.sets)} against {self.base.name}"


# The stage in which ABBA blocks are measured.
MEASURING = "measuring"


@dataclass(frozen=True)
class Progress:
    """How far a trial is. stage: for display. abba_blocks: ABBA blocks measured, by `pairs` pairs of processes.

    ratio, low, high: so far, or None. elapsed_s: may exceed budget_s, because what was begun is finished.
    """

    stage: str
    elapsed_s: float
    budget_s: float
    abba_blocks: int = 0
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    pairs: int = 0

    @property
    def over(self) -> bool:
        """Whether the budget is spent."""
        return self.elapsed_s > self.budget_s

    @property
    def spent_s(self) -> float:
        """Seconds of the budget that are spent, at most all of them."""
        return min(self.elapsed_s, self.budget_s)

    @property
    def doing(self) -> str:
        """The stage, and that the budget is spent if it is."""
        if not self.over:
            return self.stage
        return f"budget spent, {'finishing the last block' if self.stage == MEASURING else f'still {self.stage}'}"


# Runs a trial, as trial.run_trial does.
Measure = Callable[[TrialRequest, Callable[[Progress], None], threading.Event | None], TrialEvent]


def not_in_effect(settings: Mapping[str, list[Any]]) -> list[str]:
    """The requested settings that are not in effect, with the reason. settings: as in SideFacts."""
    return [
        f"{name} is {applied} instead of {requested} ({why})"
        for name, (requested, applied, in_effect, why) in settings.items()
        if in_effect is False
    ]


# Fields of SideFacts that only the trial itself needs.
_OF_THE_PLAN = ("stock", "lengths_us", "item", "of_tokens")


@dataclass
class SideFacts:
    """What was measured of one side. Seconds and bytes.

    prepare_s: from the imports to the first step, compile_s of it compiling; warmup_s, warmup_steps: of the slower
    first steps. step_s, items_per_s: of the measured blocks. peak_bytes: allocated on the GPU; on the CPU, resident
    in the process and its loader workers; peaks: of each process of the side. settings: by name [requested, applied,
    in effect, how that was verified]. losses: of the first steps.

    stock: the number of steps whose batches the loader may make beforehand. ranks: number of ranks. With several,
    peak_bytes and reserved_bytes are those of the rank with the most, rank_peaks those of each, losses are means over
    the ranks, and findings what the diagnosis found. parts_ns: of a step, means over the ranks, see `Parts`; {}
    without a window or if one process has both sides.

    Of a script: loss_steps: the number of the step of each loss. lengths_us: of its steps so far. item: the shape of an
    item in the input of the model, None if it is not always the same; of_tokens: whether it is of whole numbers. unit:
    what an item is called, "" for an item.
    """

    device: str = ""
    device_name: str = ""
    threads: int | None = None
    items_per_step: int = 0
    steps_per_epoch: int = 0
    prepare_s: float | None = None
    compile_s: float | None = None
    warmup_s: float | None = None
    warmup_steps: int = 0
    step_s: float | None = None
    items_per_s: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    peaks: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    settings: dict[str, list[Any]] = field(default_factory=dict)
    loss_steps: list[int] = field(default_factory=list)
    lengths_us: list[int] = field(default_factory=list)
    item: list[int] | None = None
    of_tokens: bool = False
    unit: str = ""
    stock: int = 0
    ranks: int = 1
    rank_peaks: list[int] = field(default_factory=list)
    parts_ns: dict[str, float] = field(default_factory=dict)
    findings: list[Json] = field(default_factory=list)

    def to_dict(self) -> Json:
        """For the trial event."""
        body = asdict(self)
        body["not_in_effect"] = not_in_effect(body.pop("settings"))
        for name in _OF_THE_PLAN:
            del body[name]
        return body


class Parts:
    """What the steps of a side consist of, from the windows that its run records.

    The parts of a step are its phases. Of several ranks they are means over the ranks without waiting for other ranks,
    which is "exchange" and "skew": together they are the step. Events arrive on the thread of the recorder; the other
    methods may be called on any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps = 0
        self._ns: dict[str, float] = {}
        self._several = False

    def clear(self) -> None:
        """Forget the windows so far."""
        with self._lock:
            self._steps, self._ns = 0, {}

    def hear(self, event: Event) -> None:
        """An event of the run."""
        with self._lock:
            if isinstance(event, RanksEvent) and event.steps:
                if not self._several:
                    self._several, self._steps, self._ns = True, 0, {}
                means = {
                    name: column[2] * 1e3 * event.steps
                    for name, column in event.columns_us.items()
                    if name not in (*ASIDES, "own", "wait", "cpu")
                }
                self._add(event.steps, {**means, EXCHANGE: event.exchange_ns, SKEW: event.skew_ns})
            elif isinstance(event, WindowEvent) and event.steps and not self._several:
                phases = event.phases.items()
                own = {
                    name: each["host_ns"] for name, each in phases if "/" not in name and name not in ASIDES
                }
                self._add(event.steps, own)

    def per_step(self) -> dict[str, float]:
        """Nanoseconds of each part of a step; {} without a window."""
        with self._lock:
            return {name: ns / self._steps for name, ns in self._ns.items()} if self._steps else {}

    def _add(self, steps: int, found: Mapping[str, float]) -> None:
        self._steps += steps
        for name, ns in found.items():
            self._ns[name] = self._ns.get(name, 0.0) + ns

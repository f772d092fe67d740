"""Compares recorded runs: what differs between them, and the ratio of their speeds with its interval."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ndd_engine.errors import UsageError
from ndd_engine.record.events import PHASES, RunEvent
from ndd_engine.record.rundir import RunDir

from .outcome import changed_items, flatten
from .recorded import Recorded, read_recorded
from .series import Interval, ratio
from .verdict import CONFIDENCE, FLOOR

# Shares of the common number of items at which losses are compared.
LOSS_POINTS = (0.25, 0.5, 0.75, 1.0)
# Difference in the cores that other processes use, from which speeds are not compared.
DISTURBED = 0.3
# Keys without influence on what is computed.
_IGNORED = frozenset({"run.name", "workload.path"})
# Keys of a comparison that are the same for all candidates.
_SHARED = ("a", "losses", "confidence")


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference. kind: "config", "version", "machine", "data" or "model"."""

    kind: str
    key: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class LossPoint:
    """Mean losses shortly before the same number of trained items."""

    items: int
    a: float | None
    b: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """B vs. A.

    speed: ratio of items per second, B over A. verdict: "faster", "slower", "same" or "inconclusive";
    "not comparable" for runs that train different workloads or models. disturbed: other processes took cores from one
    of the runs, so that there is no verdict.
    """

    a: Recorded
    b: Recorded
    speed: Interval
    verdict: str
    disturbed: bool
    differences: tuple[Difference, ...]
    unlike: tuple[str, ...]
    losses: tuple[LossPoint, ...]

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
            "unlike": list(self.unlike),
            "losses": [asdict(point) for point in self.losses],
        }


@dataclass(frozen=True, slots=True)
class SharedLosses:
    """Mean losses of every run shortly before the same number of trained items, in the order of the runs."""

    items: int
    share: float
    losses: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class SeveralCompared:
    """Each candidate vs. the baseline. losses: up to the number of items that every run has trained."""

    baseline: Recorded
    candidates: tuple[Comparison, ...]
    losses: tuple[SharedLosses, ...]

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
    return SeveralCompared(first, found, _shared_losses((first, *others)))


def _compared(first: Recorded, second: Recorded) -> Comparison:
    speed, disturbance = ratio(second.rate, first.rate), _disturbance(first, second)
    verdict = "inconclusive" if disturbance else _verdict(speed)
    return Comparison(
        first,
        second,
        speed,
        verdict if _same_model(first.run, second.run) else "not comparable",
        bool(disturbance),
        tuple(_differences(first, second)),
        (*_unlike(first, second), *filter(None, [disturbance])),
        _losses(first, second),
    )


def phase_names(sides: Iterable[Recorded]) -> list[str]:
    """The phases of all, in the order of the screen, sub-phases after their phase."""
    rank = {name: index for index, name in enumerate(PHASES)}
    names = {name for side in sides for name in side.phases}
    return sorted(names, key=lambda name: (rank.get(name.partition("/")[0], len(rank)), name))


def _same_model(a: RunEvent, b: RunEvent) -> bool:
    # The description of the model also names settings that are worth comparing, such as summarise's decoder.
    return (a.workload, a.parameters) == (b.workload, b.parameters)


def _verdict(speed: Interval) -> str:
    if speed.low is None or speed.high is None:
        return "inconclusive"
    # Two identical runs differ by almost FLOOR.
    if speed.low > 1 - FLOOR and speed.high < 1 + FLOOR:
        return "same"
    return "faster" if speed.low > 1 else "slower" if speed.high < 1 else "inconclusive"


def _differences(a: Recorded, b: Recorded) -> Iterator[Difference]:
    yield from _changed("config", flatten(a.run.config), flatten(b.run.config))
    yield from _changed("version", a.run.versions, b.run.versions)
    yield from _changed("machine", _machine(a), _machine(b))
    for kind in ("data", "model"):
        one, other = getattr(a.run, kind), getattr(b.run, kind)
        yield from _changed(kind, {kind: one}, {kind: other})


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
            f"the effective batch differs ({left.items_per_step}, {right.items_per_step} items per step), which "
            "changes what is trained"
        )
    if left.parameters != right.parameters or left.model != right.model:
        yield "the models differ"
    if left.data != right.data:
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


def _losses(a: Recorded, b: Recorded) -> tuple[LossPoint, ...]:
    """Losses at the same number of items, as batches may differ, where both runs recorded them."""
    if not a.losses or not b.losses:
        return ()
    common = min(a.losses[-1][0], b.losses[-1][0])
    points = (
        LossPoint(round(common * share), a.loss_at(common * share), b.loss_at(common * share))
        for share in LOSS_POINTS
    )
    return tuple(point for point in points if point.a is not None or point.b is not None)


def _shared_losses(sides: Sequence[Recorded]) -> tuple[SharedLosses, ...]:
    if not all(side.losses for side in sides):
        return ()
    common = min(side.losses[-1][0] for side in sides)
    return tuple(
        SharedLosses(round(common * share), share, tuple(side.loss_at(common * share) for side in sides))
        for share in LOSS_POINTS
    )


def _text(value: object) -> str:
    """As written in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "not set" if value is None else str(value)


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

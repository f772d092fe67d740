"""The request for a trial, its progress, what is measured of each side, and the result in figures and in one sentence.

Runs are whole periods of the step times, such as of a script that plays before each 16 updates. A run with one such
long step more than another one would differ from it by more than any setting.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ndd_engine.config import Config
from ndd_engine.errors import UsageError
from ndd_engine.files import open_regular, write_text
from ndd_engine.record.event import ASIDES, EXCHANGE, SKEW
from ndd_engine.record.events import Event, Json, RanksEvent, TrialEvent, WindowEvent
from ndd_engine.record.rundir import RunDir
from ndd_engine.text import counted, duration, factor, finite, printable, size, times
from ndd_watch.changes import CACHED, TABLE

from .blocks import MOST_PAIRS
from .estimates import CONFIDENCE, DIFFERENT, FLOOR, METHOD, Estimate, Usual, pooled

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


def check_once(sets: Iterable[str]) -> None:
    """Raises UsageError if a user gives two values of one key among "key=value" settings."""
    found: dict[str, str] = {}
    for item in sets:
        key, _, value = (part.strip() for part in item.partition("="))
        if found.setdefault(key, value) != value:
            raise UsageError(
                f"{printable(key)} has two values: {printable(found[key])} and {printable(value)}"
            )


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


# Periods up to this are tried; longer ones only where long steps are so far apart.
USUAL_PERIODS = 64
# A period has to be seen so many times.
SEEN = 3
# The share of the variance that is left within the places of a period.
LEFT = 0.3
# Steps to look at before there is no period, and the least number that is enough to find one.
ENOUGH, LEAST = 48, 12
# A long step takes so many times the median; those that matter take this share of the time.
LONG, SHARE = 3.0, 0.1


def period_of(lengths: Sequence[float]) -> int:
    """The period of step times, in steps; 1 without one. lengths: of successive steps."""
    count = len(lengths)
    if count < LEAST:
        return 1
    # Of logarithms, a single disturbed step does not decide.
    logs = [math.log(max(one, 1e-9)) for one in lengths]
    mean = fmean(logs)
    total = sum((one - mean) ** 2 for one in logs) / (count - 1)
    gaps: set[int] = {later - earlier for earlier, later in pairwise(_long(lengths))}
    most = count // SEEN
    tried: list[int] = sorted(gaps.union(range(2, USUAL_PERIODS + 1)))
    for period in tried:
        if 1 < period <= most and _within(logs, period) <= LEFT * total:
            return period
    return 1


def undecided(lengths: Sequence[float]) -> bool:
    """Whether more steps are needed to tell the period."""
    return len(lengths) < ENOUGH or (period_of(lengths) == 1 and recurs(lengths))


def recurs(lengths: Sequence[float]) -> bool:
    """Whether there are long steps that matter."""
    return bool(lengths) and sum(lengths[place] for place in _long(lengths)) > SHARE * sum(lengths)


def _long(lengths: Sequence[float]) -> list[int]:
    """The places of the long steps."""
    limit = LONG * median(lengths)
    return [place for place, one in enumerate(lengths) if one > limit]


def _within(logs: Sequence[float], period: int) -> float:
    """The variance that is left within the places of a period."""
    left = 0.0
    for place in range(period):
        part = logs[place::period]
        mean = fmean(part)
        left += sum((one - mean) ** 2 for one in part)
    return left / (len(logs) - period)


# Maximum relative difference of losses that count as close.
CLOSE = 0.01
# A change of these keys changes what is trained, so that losses are not comparable, unless the table of changes has it.
_OTHER_TRAINING = ("workload.", "optimizer.", "schedule.", "clip.", "run.seed", "batch.sequence")


def differences(base: Config, change: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted keys that differ, with both values."""
    return changed_items(flatten(base.model_dump(mode="json")), flatten(change.model_dump(mode="json")))


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def changed_items(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, with both values; None where a key is missing."""
    pairs = ((key, (a.get(key), b.get(key))) for key in dict.fromkeys((*a, *b)))
    return {key: (one, other) for key, (one, other) in pairs if one != other}


def effect(facts: SideFacts, changed: Iterable[str]) -> tuple[bool | None, str]:
    """(whether the changed settings are in effect, why not), as verified by the run itself."""
    verified = {key: facts.settings[key] for key in changed if key in facts.settings}
    if missing := not_in_effect(verified):
        return False, "; ".join(missing)
    # A setting at its default has nothing to verify, but may be read back.
    known = [in_effect or requested == applied for requested, applied, in_effect, _ in verified.values()]
    return (True if known and all(known) else None), ""


def compare_losses(
    base: Sequence[float], change: Sequence[float], changed: Iterable[str], items: tuple[int, int]
) -> tuple[str, str]:
    """(same, close, differs or not comparable; why) of the first losses of both sides."""
    other = [
        key for key in changed
        if (TABLE[key].alters.other if key in TABLE else key.startswith(_OTHER_TRAINING))
    ]  # fmt: skip
    if other:
        return "not comparable", f"a different {', '.join(other)} changes what is trained"
    if items[0] != items[1]:
        return "not comparable", f"{items[1]:,} items per step instead of {items[0]:,}"
    count = min(len(base), len(change))
    if not count:
        return "not comparable", "no loss was recorded"
    steps = f"the first {count:,} losses" if count > 1 else "the first loss"
    pairs = list(zip(base[:count], change[:count], strict=True))
    if all(a == b for a, b in pairs):
        return "same", f"{steps} {'are' if count > 1 else 'is'} bitwise identical"
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return "differs", f"{steps} {'include' if count > 1 else 'is'} NaN or infinity"
    apart = max(abs(a - b) / max(abs(a), abs(b)) for a, b in pairs)
    verdict = "close" if apart <= CLOSE else "differs"
    differ = "differ" if count > 1 else "differs"
    return verdict, f"{steps} {differ} by up to {apart * 100:.2g} % (close: up to {CLOSE * 100:.0f} %)"


def same_steps(*every: SideFacts) -> list[list[float]]:
    """The first losses of each, of the same steps, as far as their steps are known."""
    if not all(facts.loss_steps for facts in every):
        return [facts.losses for facts in every]
    known = [dict(zip(facts.loss_steps, facts.losses, strict=True)) for facts in every]
    steps = sorted(set.intersection(*map(set, known)))
    return [[losses[step] for step in steps] for losses in known]


def startup_s(side: Mapping[str, Any]) -> float:
    """Seconds before training, plus the excess time of the slower first steps. side: the fields of SideFacts."""
    slow = (side.get("warmup_s") or 0.0) - side.get("warmup_steps", 0) * (side.get("step_s") or 0.0)
    return float(side["prepare_s"] + max(slow, 0.0))


def break_even(base: SideFacts, change: SideFacts) -> int | None:
    """Optimizer steps after which a candidate with a longer startup breaks even; None if it is not faster."""
    if not base.items_per_s or not change.items_per_s or base.prepare_s is None or change.prepare_s is None:
        return None
    saved_s = change.items_per_step * (1 / base.items_per_s - 1 / change.items_per_s)
    if saved_s <= 0:
        return None
    return math.ceil(max(startup_s(vars(change)) - startup_s(vars(base)), 0) / saved_s)


def _only_cached(changed: Sequence[str]) -> bool:
    """Whether a change makes each item once and alters nothing else."""
    alters = [TABLE[key].alters if key in TABLE else None for key in changed]
    return CACHED in alters and not any(one is None or one.losses for one in alters)


def result(
    request: TrialRequest,
    verdict: str,
    reason: str,
    found: Estimate | None,
    sides: tuple[SideFacts, SideFacts],
    changed: Sequence[str],
    seconds: float,
    note: str = "",
    doubt: str = "",
    load: str = "",
) -> TrialEvent:
    """The event. reason: why it is inconclusive or failed. sides: baseline, candidate. note: why losses are unknown.

    doubt: a reason why losses may differ that is not the change. load: see TrialEvent.
    """
    base, change = sides
    in_effect, why_not = effect(change, changed)
    loss, loss_text = "not comparable", note
    losses = same_steps(base, change)
    if base.losses and change.losses:
        items = (base.items_per_step, change.items_per_step)
        loss, loss_text = compare_losses(losses[0], losses[1], changed, items)
        if loss == "differs" and doubt:
            loss_text += f"; {doubt}"
        elif loss == "differs" and verdict in DIFFERENT and _only_cached(changed):
            verdict = "inconclusive"
            reason = "the losses differ: the items are not the same each time, as with random augmentation"
    event = TrialEvent(
        sets=list(request.sets),
        against=request.base.name,
        verdict=verdict,
        text="",
        ratio=found.ratio if found else None,
        low=found.low if found else None,
        high=found.high if found else None,
        confidence=CONFIDENCE,
        abba_blocks=found.blocks if found else 0,
        pairs=found.pairs if found else 0,
        df=round(found.df, 2) if found else None,
        method=found.method if found else "",
        between=found.between if found else None,
        seconds=round(seconds, 3),
        budget_s=request.budget_s,
        device=change.device_name or base.device_name,
        in_effect=in_effect,
        not_in_effect=why_not,
        loss=loss,
        loss_text=loss_text,
        break_even_steps=break_even(base, change) if verdict == "faster" else None,
        base=base.to_dict(),
        change=change.to_dict(),
        cause=request.cause,
        load=load if change.device == "cpu" and found is not None else "",
        reason=reason,
    )
    return replace(event, text=sentence(event))


def verdict_parts(event: TrialEvent) -> list[str]:
    """The verdict with its interval and reason, and under which load."""
    head = event.verdict
    if event.ratio is not None:
        head += "" if event.verdict in DIFFERENT else ":"
        head += f" {with_interval(times(event.ratio), event.confidence, event.low, event.high, factor)}"
        head += f", {counted(event.abba_blocks, 'ABBA block')} in {duration(event.seconds)}"
        if source := interval_source(event):
            head += f", {source}"
    # "out of memory on cuda:0 in forward" repeats the verdict.
    reason = event.reason
    parts = [reason if reason.startswith(head) else head + (f": {reason}" if reason else "")]
    return [*parts, under_load(event)] if event.load else parts


def sentence(event: TrialEvent) -> str:
    """The whole result in one sentence."""
    parts = verdict_parts(event)
    if event.in_effect is not None:
        parts.append(
            "the change is in effect" if event.in_effect else f"not in effect: {event.not_in_effect}"
        )
    before, after = event.base.get("peak_bytes"), event.change.get("peak_bytes")
    if before is not None and after is not None:
        same = abs(after - before) < FLOOR * before
        parts.append(
            f"peak memory {size(after)}, unchanged" if same else f"peak memory {size(before)} → {size(after)}"
        )
    if event.loss in ("same", "close"):
        parts.append("losses identical" if event.loss == "same" else "losses close")
    elif event.loss == "differs":
        parts.append(event.loss_text or "losses differ")
    if event.break_even_steps:
        parts.append(breaks_even(event.break_even_steps))
    return "; ".join(parts)


def under_load(event: TrialEvent) -> str:
    """That the ratio is one on a busy machine; "" if it is not."""
    return f"{event.load}, and on a free machine the ratio may be another" if event.load else ""


def interval_source(event: TrialEvent) -> str:
    """What the interval of a trial comes from, in words; "" if that is unknown."""
    if event.method == METHOD:
        return "both sides in one process"
    if not event.pairs:
        return ""
    text = f"interval from {counted(event.pairs, 'pair')} of processes"
    if event.between is not None:
        text += f" and the usual difference between processes, {event.between * 100:.2g} %"
    return text


def breaks_even(steps: int) -> str:
    """In words."""
    return f"breaks even after {counted(steps, 'step')}"


def with_interval(
    value: str,
    confidence: float,
    low: float | None,
    high: float | None,
    form: Callable[[float], str] = "{:.3g}".format,
) -> str:
    """ "1.42x (95 % CI 1.38 to 1.47)"; only the value if there is no interval. form: of its ends."""
    if low is None or high is None:
        return value
    return f"{value} ({confidence * 100:.0f} % CI {form(low)} to {form(high)})"


# Devices, and trials of each, that are kept.
MOST_DEVICES, MOST_TRIALS = 16, 40
_MOST_BYTES = 1 << 18
# Variances are clipped to this: more comes from a disturbed machine.
_MOST = 0.03**2


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/ndd-console, or ~/.cache/ndd-console."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if Path(named).is_absolute() else Path("~/.cache").expanduser()) / "ndd-console"


class PairVariances:
    """Variances between pairs of processes, by device. path: of the file (default: in the user's cache)."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_folder() / "processes.json"

    def usual(self, device: str) -> Usual:
        """The usual difference on a device: that of earlier trials pooled with the default."""
        return pooled(self._read().get(device, []))

    def add(self, device: str, measured: Usual) -> None:
        """Keep what a trial measured; the oldest are forgotten."""
        if not device or not math.isfinite(measured.variance):
            return
        found = self._read()
        trials = [*found.pop(device, []), _clipped(measured.variance, measured.df)][-MOST_TRIALS:]
        devices = dict([*found.items(), (device, trials)][-MOST_DEVICES:])
        body = {name: [[one.variance, one.df] for one in some] for name, some in devices.items()}
        with suppress(OSError, UsageError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps({"version": 1, "devices": body}, indent=1))

    def _read(self) -> dict[str, list[Usual]]:
        """What is plausible of the file, {} without one."""
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                body = json.loads(file.read(_MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        devices = body.get("devices") if isinstance(body, dict) else None
        if not isinstance(devices, dict):
            return {}
        known = {name: _usuals(some) for name, some in list(devices.items())[-MOST_DEVICES:]}
        return {name: some for name, some in known.items() if some}


def _usuals(entries: Any) -> list[Usual]:
    found = []
    for entry in entries[-MOST_TRIALS:] if isinstance(entries, list) else []:
        if isinstance(entry, list) and len(entry) == 2:
            value, df = map(finite, entry)
            if value is not None and df is not None and df > 0:
                found.append(_clipped(value, df))
    return found


def _clipped(variance: float, df: float) -> Usual:
    return Usual(min(max(variance, -_MOST), _MOST), min(df, float(MOST_PAIRS)))

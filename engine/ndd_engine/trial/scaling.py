"""Scaling: how much faster several ranks train than one, and where the rest of the time goes.

Each number of ranks is measured against the first in a trial of its own: both sides take turns in ABBA blocks, and
are started several times. The efficiency is the ratio of the throughputs over that of the numbers of ranks, so its
interval is that of the trial. With k times the items per rank, linear scaling needs k times the step of the first
number of ranks. What a part of the step takes beyond k times that part is lost; the parts add up to the step, and so
do these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ndd_engine.config import Config, read
from ndd_engine.errors import UsageError
from ndd_engine.hardware.detect import detect, equal_gpus
from ndd_engine.hardware.gpus import Machine, usable_threads
from ndd_engine.record.event import EXCHANGE, SKEW
from ndd_engine.record.events import TrialEvent
from ndd_engine.text import counted, factor, percent, span, times
from ndd_engine.train.request import preflight

from .campaign import Campaign, CampaignState
from .estimates import CONFIDENCE
from .outcome import Base, Measure, with_interval
from .trial import run_trial

# What stays the same for every number of ranks: the batch of a rank (weak scaling) or that of all (strong scaling).
RANK, EFFECTIVE = HOLDS = ("rank", "effective")
STRATEGIES = ("ddp", "fsdp2")


@dataclass(frozen=True, slots=True)
class Point:
    """A number of ranks with its batch. strategy: "" for a single rank, which shares nothing.

    effective: batch.effective, if the configuration sets it. several: whether strategies are compared.
    """

    ranks: int
    strategy: str
    micro: int
    accumulation: int
    effective: int | None = None
    several: bool = False

    @property
    def name(self) -> str:
        """ "1 rank", "4 ranks, fsdp2"."""
        named = self.strategy and (self.several or self.strategy != "ddp")
        return counted(self.ranks, "rank") + (f", {self.strategy}" if named else "")

    @property
    def items(self) -> int:
        """Items of one rank per optimizer step."""
        return self.micro * self.accumulation

    def settings(self) -> dict[str, str]:
        """By key, as in TOML."""
        found = {
            "parallel.ranks": str(self.ranks),
            "batch.micro": str(self.micro),
            "batch.accumulation": str(self.accumulation),
        }
        if self.effective is not None:
            found["batch.effective"] = str(self.effective)
        if self.strategy:
            found["parallel.strategy"] = self.strategy
        return found

    def sets(self, than: dict[str, str]) -> tuple[str, ...]:
        """As "key=value", without those that are the same in `than`."""
        return tuple(f"{key}={value}" for key, value in self.settings().items() if than.get(key) != value)


def counts_of(text: str) -> tuple[int, ...]:
    """The numbers of ranks in "1,2,4", ascending. Raises UsageError."""
    found: list[int] = []
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < 1:
            raise UsageError(f"--ranks {text}: allowed: numbers of ranks from 1, such as 1,2,4")
        found.append(int(word))
    if len(set(found)) < len(found):
        raise UsageError(f"--ranks {text}: each number of ranks once")
    return tuple(sorted(found))


def strategies_of(text: str) -> tuple[str, ...]:
    """The strategies in "ddp,fsdp2". Raises UsageError."""
    found = tuple(word.strip() for word in text.split(","))
    if set(found) - set(STRATEGIES) or len(set(found)) < len(found):
        raise UsageError(f"--strategy {text}: allowed: ddp, fsdp2 or ddp,fsdp2")
    return found


def counts_for(asked: Sequence[int], machine: Machine, device: str = "auto") -> tuple[int, ...]:
    """The numbers of ranks to compare: those asked for, or 1, 2, 4, … up to the GPUs or the cores of this machine.

    device: run.device as configured. Raises UsageError if the machine has not enough GPUs, or if there is nothing to
    compare.
    """
    gpu = machine.device != "cpu"
    if device.startswith("cuda:"):
        raise UsageError(f"run.device is {device}, which all ranks would share: --set run.device=auto")
    gpus = len(equal_gpus(machine))
    most = gpus if gpu else usable_threads(machine.host)
    found = tuple(asked) or tuple(dict.fromkeys((*(2**power for power in range(most.bit_length())), most)))
    if gpu and max(found) > most:
        raise UsageError(f"--ranks {max(found)}: this machine has {counted(most, 'GPU')} of one kind")
    if not asked and most == 1:
        what = "GPU" if gpu else "core"
        more = "" if gpu else "; --ranks 1,2 measures two ranks on it"
        raise UsageError(f"this machine has one {what}: there is nothing to compare{more}")
    return found


def points(
    config: Config, counts: Sequence[int], strategies: Sequence[str], hold: str | None
) -> tuple[Point, ...]:
    """What to compare; the first is what the others are compared with.

    strategies: () for the configured one. hold: RANK or EFFECTIVE; None for what the configuration holds. Raises
    UsageError.
    """
    hold = hold or held(config)
    found: list[Point] = []
    for count in counts:
        micro, accumulation = config.batch.micro, config.batch.accumulation
        if hold == EFFECTIVE:
            total = config.items_per_step
            if total % count:
                raise UsageError(
                    f"--ranks {count}: the effective batch of {total:,} cannot be shared by {count} ranks: choose "
                    "another number, or --hold rank"
                )
            each = total // count
            micro = next(size for size in range(min(config.batch.micro, each), 0, -1) if not each % size)
            accumulation = each // micro
        effective = None if config.batch.effective is None else micro * accumulation * count
        wanted = strategies or (config.parallel.strategy,)
        found += [
            Point(count, strategy, micro, accumulation, effective, len(wanted) > 1)
            for strategy in (wanted if count > 1 else ("",))
        ]
    if len(found) < 2:
        raise UsageError(f"--ranks {counts[0]}: there is nothing to compare; allowed: several, such as 1,2")
    return tuple(found)


def held(config: Config) -> str:
    """What the configuration holds: the effective batch if it is set, else the batch of a rank."""
    return RANK if config.batch.effective is None else EFFECTIVE


COMPUTATION, OPTIMIZER, DATA, OTHER = "computation", "optimizer", "data", "other"
_PART_OF = {
    "forward": COMPUTATION, "loss": COMPUTATION, "backward": COMPUTATION,
    "clip": OPTIMIZER, "optimizer": OPTIMIZER, "zero_grad": OPTIMIZER,
    "data_wait": DATA, "to_device": DATA, EXCHANGE: EXCHANGE, SKEW: SKEW,
}  # fmt: skip
# Less of a step is not worth a word.
LEAST = 0.01


@dataclass(frozen=True, slots=True)
class Lost:
    """part: what; ns: per step; share: of the step; why: the reason, if it is known."""

    part: str
    ns: float
    share: float
    why: str = ""


def lost(first: Point, base: Mapping[str, Any], point: Point, change: Mapping[str, Any]) -> tuple[Lost, ...]:
    """What is lost with `point`, the largest part first; () if the parts of a step are unknown.

    base, change: the facts of both, see SideFacts. A part that takes less than expected is negative.
    """
    gpu = str(change.get("device", "")).startswith("cuda")
    before, after = (_parts(facts.get("parts_ns") or {}, gpu) for facts in (base, change))
    step = sum(after.values())
    if not before or not step:
        return ()
    times = point.items / first.items
    found = []
    for part in {**after, **before}:
        ns = after.get(part, 0.0) - times * before.get(part, 0.0)
        found.append(Lost(part, ns, ns / step, _why(part, first, base, point, change, gpu)))
    return tuple(sorted(found, key=lambda one: -one.ns))


def in_words(parts: Sequence[Lost]) -> Iterator[str]:
    """ "lost of each step: 4.2 ms computation (21 %, …), 1.0 ms exchange (5 %)", and what is gained, if anything."""
    for word, sign in (("lost", 1), ("gained", -1)):
        named = sorted((one for one in parts if one.share * sign >= LEAST), key=lambda one: -one.ns * sign)
        texts = (
            f"{span(one.ns * sign)} {one.part} ({percent(one.share * sign)}{', ' * bool(one.why)}{one.why})"
            for one in named
        )
        if named:
            yield f"{word} of each step: {', '.join(texts)}"


def _parts(phases: Mapping[str, float], gpu: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, ns in phases.items():
        part = _PART_OF.get(name, OTHER)
        if gpu and part in (OPTIMIZER, OTHER):
            part = COMPUTATION  # the host waits for the GPU in any of them
        found[part] = found.get(part, 0.0) + ns
    return found


def _why(
    part: str, first: Point, base: Mapping[str, Any], point: Point, change: Mapping[str, Any], gpu: bool
) -> str:
    before, after = base.get("threads"), change.get("threads")
    if part == COMPUTATION and not gpu and before and after and after < before:
        return f"{after} instead of {before} threads on each rank"
    if part == OPTIMIZER and point.strategy == "ddp" and point.items < first.items:
        return "each rank updates the whole model"
    return {EXCHANGE: "not hidden by computation", SKEW: "waiting for slower ranks"}.get(part, "")


# A comparison ends early once its interval reaches at most this share to either side.
WITHIN = 0.02


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """A number of ranks. facts: what was measured, see SideFacts; {} if it was not.

    trial: against the first row; None for that row, and before it is measured. lost: what takes the time that linear
    scaling would not need.
    """

    point: Point
    facts: Mapping[str, Any] = field(default_factory=dict)
    trial: TrialEvent | None = None
    first: Point | None = None
    lost: tuple[Lost, ...] = ()

    @property
    def efficiency(self) -> tuple[float, float, float] | None:
        """Throughput over that of linear scaling: (value, low, high); None if it is unknown."""
        trial = self.trial
        if self.first is None or trial is None or trial.ratio is None:
            return None
        if trial.low is None or trial.high is None:
            return None
        share = self.first.ranks / self.point.ranks
        return trial.ratio * share, trial.low * share, trial.high * share

    @property
    def text(self) -> str:
        """The result in one sentence; "" if there is none yet."""
        trial, efficiency = self.trial, self.efficiency
        if trial is None or self.first is None:
            return ""
        if trial.ratio is None or efficiency is None:
            return f"{self.point.name}: {trial.text}"
        ratio = with_interval(times(trial.ratio), CONFIDENCE, trial.low, trial.high, factor)
        value, low, high = efficiency
        share = f"{percent(value)} of linear ({low * 100:.0f} to {high * 100:.0f} %)"
        return f"{self.point.name}: {ratio} of {self.first.name}, {share}"

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        trial, efficiency = self.trial, self.efficiency or (None, None, None)
        return {
            "ranks": self.point.ranks,
            "strategy": self.point.strategy or None,
            "micro_batch": self.point.micro,
            "accumulation": self.point.accumulation,
            "effective_batch": self.point.items * self.point.ranks,
            "threads": self.facts.get("threads"),
            "items_per_s": self.facts.get("items_per_s"),
            "step_s": self.facts.get("step_s"),
            "exchange_s": _seconds(self.facts, "exchange"),
            "skew_s": _seconds(self.facts, "skew"),
            "peak_bytes": self.facts.get("peak_bytes"),
            "rank_peak_bytes": list(self.facts.get("rank_peaks") or ()),
            "efficiency": efficiency[0],
            "efficiency_low": efficiency[1],
            "efficiency_high": efficiency[2],
            "lost": [asdict(one) for one in self.lost],
            "findings": list(self.facts.get("findings") or ()),
            "verdict": trial.verdict if trial is not None else None,
            "trial": asdict(trial) if trial is not None else None,
            "text": self.text,
        }


@dataclass(frozen=True, slots=True)
class ScalingState(CampaignState[ScalingRow]):
    """How far it is. hold: see `points`."""

    hold: str = RANK

    @property
    def batch_text(self) -> str:
        """What stays the same, in one sentence."""
        rows = [row.point for row in self.rows]
        total = ", ".join(dict.fromkeys(f"{row.items * row.ranks:,}" for row in rows))
        if self.hold == RANK:
            each = rows[0].items
            return (
                f"weak scaling: each rank trains {each:,} items per step, so the effective batch is {total}"
            )
        times_ = dict.fromkeys(
            f"{row.micro} x {row.accumulation} x {counted(row.ranks, 'rank')}" for row in rows
        )
        return f"strong scaling: the effective batch of {total} is held: {', '.join(times_)}"

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "scaling": "weak" if self.hold == RANK else "strong",
            "batch": self.batch_text,
            "confidence": CONFIDENCE,
            "device": next(
                (row.facts["device_name"] for row in self.rows if row.facts.get("device_name")), None
            ),
            "rows": [row.to_dict() for row in self.rows],
            "elapsed_s": self.elapsed_s,
            "stopped": self.stopped,
            "failed": self.failed or None,
        }


@dataclass(frozen=True, slots=True)
class ScalingRequest:
    """What to compare. counts, strategies: see `points`; (): the default. budget_s: of each comparison."""

    base: Base
    counts: tuple[int, ...] = ()
    strategies: tuple[str, ...] = ()
    hold: str | None = None
    budget_s: float = 120.0


def plan(request: ScalingRequest, machine: Machine | None = None) -> tuple[Config, tuple[Point, ...]]:
    """The configuration and what would be compared. Raises UsageError, and ConfigError with every mistake."""
    base = request.base
    draft = read(base.config, base.sets, base.workload)
    config = preflight(draft, use_torch=False)
    device = config.run.device
    counts = counts_for(request.counts, machine or detect(device, use_torch=False), device)
    found = points(config, counts, request.strategies, request.hold)
    for point in found:
        read(base.config, (*base.sets, *point.sets({})), base.workload).resolve()
    return config, found


def run_scaling(
    request: ScalingRequest,
    tell: Callable[[ScalingState], None] = lambda _state: None,
    stop: threading.Event | None = None,
    keep: Callable[[TrialEvent], None] = lambda _event: None,
    measure: Measure = run_trial,
    machine: Machine | None = None,
) -> ScalingState:
    """Measure one number of ranks after another against the first.

    stop: set it to end with what is known. keep: receives each trial. Raises UsageError for mistakes before anything
    is measured, StoppedError if stopped while the model size is chosen, and NddError if none can be chosen.
    """
    plan(request, machine)
    campaign = Campaign(ScalingState(), tell, stop, request.budget_s, measure, keep)
    base = request.base
    draft = read(base.config, (*base.sets, "parallel.ranks=1"), base.workload)
    if draft.size == "auto":  # chosen once for all numbers of ranks
        size = campaign.start_config(replace(base, sets=(*base.sets, "parallel.ranks=1")), draft)
        chosen = [f"workload.size={size.workload.size}", f"batch.micro={size.batch.micro}"]
        if size.run.threads is not None:
            chosen.append(f"run.threads={size.run.threads}")
        base = replace(base, sets=(*base.sets, *chosen))
    config, compared = plan(replace(request, base=base), machine)
    first, *others = compared
    rows = (ScalingRow(first), *(ScalingRow(point, first=first) for point in others))
    campaign.say(rows=rows, hold=request.hold or held(config))
    name = f"{base.name} on {counted(first.ranks, 'rank')}"
    start = replace(base, name=name, sets=(*base.sets, *first.sets({})), run=None)

    def one(index: int, point: Point) -> None:
        campaign.say(point.name)
        trial = campaign.trial(start, point.sets(first.settings()), within=WITHIN)
        if not campaign.state.rows[0].facts and trial.base.get("step_s") is not None:
            campaign.put(0, facts=trial.base)
        taken = lost(first, trial.base, point, trial.change)
        campaign.put(index + 1, facts=trial.change, trial=trial, lost=taken)
        unprepared = trial.verdict == "failed" and trial.base.get("prepare_s") is None
        if unprepared and "baseline itself" in trial.text:
            ranks = sorted({other.ranks for other in compared} - {first.ranks})
            more = f"; to leave it out: --ranks {','.join(map(str, ranks))}" if len(ranks) > 1 else ""
            campaign.say(failed=f"{first.name}: {trial.text}{more}")

    campaign.each(others, one)
    return campaign.state


def _seconds(facts: Mapping[str, Any], part: str) -> float | None:
    found = (facts.get("parts_ns") or {}).get(part)
    return None if found is None else found * 1e-9

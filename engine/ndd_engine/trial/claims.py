"""The guides' claims: what is compared and the claimed range, measured on this machine, with a verdict."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

import ndd_profiles
from ndd_engine.errors import NddError, UsageError
from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpus import Machine
from ndd_engine.record.event import ASIDES
from ndd_engine.record.events import TrialEvent, WindowEvent
from ndd_engine.text import duration, factor, number, printable, times
from ndd_watch.changes import Conditions

from .campaign import Campaign, CampaignState
from .compare import Interval, LateError, Recorded, Stretch, host_ns_of, observe, rate, ratio, spread
from .estimates import CONFIDENCE, Estimate, Usual, estimate, interval, joined
from .outcome import Base, Measure, PairVariances, breaks_even, startup_s, with_interval
from .trial import enough, run_trial
from .tuning import place_of

# Kinds that are measured in a trial; the others in observed runs.
TRIALS = frozenset({"speed", "epoch", "start", "memory"})


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to measure. where: how it differs from the guide's conditions, "" if it does not."""

    base: tuple[str, ...] = ()
    change: tuple[str, ...] = ()
    gpu: bool = False
    cores: int = 1
    where: str = ""

    def missing(self, place: Conditions) -> str:
        """What this machine lacks for it, "" if nothing."""
        lacking = []
        if self.gpu and not place.gpu:
            lacking.append("a CUDA GPU")
        if self.cores > place.cores:
            lacking.append(f"{self.cores} cores")
        return f"requires {' and '.join(lacking)}" if lacking else ""


@dataclass(frozen=True, slots=True)
class Part:
    """One value of a claim. See profiles/ndd_profiles/claims/guides.toml for kind, low, high, steps, phase, why."""

    variants: tuple[Variant, ...]
    name: str = ""
    kind: str = "speed"
    low: float = 0.0
    high: float = math.inf
    steps: int = 0
    phase: str = ""
    why: str = ""

    def choose(self, place: Conditions) -> tuple[Variant | None, str]:
        """(the first variant that this machine can measure, what the guide's own conditions require and it lacks)."""
        if not self.variants:
            return None, self.why
        found = next((variant for variant in self.variants if not variant.missing(place)), None)
        return found, self.variants[0].missing(place)

    @property
    def claimed(self) -> str:
        """The claimed range in words."""
        if self.kind == "whole":
            return ""
        low, high = (
            f"{edge * 100:.0f} %" if self.kind == "share" else f"{edge:.3g}x"
            for edge in (self.low, min(self.high, 1e9))
        )
        if math.isinf(self.high):
            return f"{low} or more"
        return f"{high} or less" if self.low == 0 else f"{low} to {high}"


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of a guide."""

    id: str
    guide: str
    text: str
    workload: str
    parts: tuple[Part, ...]


def claims() -> tuple[Claim, ...]:
    """All claims, in the order of the table."""
    table = ndd_profiles.read("claims", "guides")["claim"]
    return TypeAdapter(tuple[Claim, ...]).validate_python([_with_parts(entry) for entry in table])


def chosen(ids: Sequence[str]) -> tuple[Claim, ...]:
    """The claims selected by id ("N1") or by guide ("eeg"); all of them if `ids` is empty. Raises UsageError."""
    known = claims()
    if not ids:
        return known
    wanted: set[str] = set()
    for name in ids:
        found = {claim.id for claim in known if name.lower() in (claim.id.lower(), claim.guide)}
        if not found:
            guides = ", ".join(dict.fromkeys(claim.guide for claim in known))
            allowed = ", ".join(claim.id for claim in known)
            raise UsageError(
                f"unknown claim {printable(name)}; allowed: {allowed}, or all of a guide: {guides}"
            )
        wanted |= found
    return tuple(claim for claim in known if claim.id in wanted)


def _with_parts(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A part inherits the keys of its claim, a variant the settings in `sets`."""
    parts = [{**entry, **part} for part in entry.get("part", [entry])]
    for part in parts:
        part["variants"] = [
            {**variant, "base": [*part.get("sets", ()), *variant.get("base", ())]}
            for variant in part.get("variant", ())
        ]
    return {**entry, "parts": parts}


Watch = Callable[[str, Sequence[str], float, threading.Event], Recorded | None]

# Maximum number of trials of one change.
MOST_TRIALS = 3


class NotMeasuredError(Exception):
    """There is no measurement; the message says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """A measured value, with an interval if there is one. note: further information for the reader.

    depends: whether the answer changes under a condition that the note names.
    """

    value: Interval
    note: str = ""
    depends: bool = False


@dataclass
class Measurer:
    """Measures the parts of a claim; a measurement that they share is made once."""

    claim: Claim
    watch: Watch
    campaign: Campaign[ClaimsState]
    _trials: dict[Variant, list[TrialEvent]] = field(default_factory=dict)
    _runs: dict[tuple[tuple[str, ...], int], Recorded] = field(default_factory=dict)

    def part(self, part: Part, variant: Variant) -> Found:
        """Measure a part. Raises NotMeasuredError."""
        kinds: dict[str, Callable[[Part, Variant], Found]] = {
            "speed": self._speed, "epoch": self._epoch, "start": self._start, "memory": self._memory,
            "phase": self._phase, "evaluation": self._evaluation, "frequency": self._frequency, "share": self._share,
        }  # fmt: skip
        try:
            return kinds[part.kind](part, variant)
        except NddError as error:
            raise NotMeasuredError(" ".join(str(error).split())) from None

    def again(self, part: Part, variant: Variant) -> Found | None:
        """The value after one more trial, if the previous ones left enough of the budget; else None.

        A trial ends as soon as a difference is clear, which may be before its size is.
        """
        done = self._done(variant)
        left = self.campaign.budget_s - sum(trial.seconds for trial in done)
        if not done or self.campaign.stop.is_set() or len(done) >= MOST_TRIALS or left < done[-1].seconds:
            return None
        self._one_more(variant, left)
        return self.part(part, variant)

    # Trials.

    def _done(self, variant: Variant) -> list[TrialEvent]:
        """The trials of a change, however its variants are described."""
        return self._trials.setdefault(Variant(variant.base, variant.change), [])

    def _trial(self, variant: Variant) -> TrialEvent:
        done = self._done(variant)
        if not done:
            self._one_more(variant, self.campaign.budget_s)
        for trial in done:
            if trial.verdict in ("failed", "out of memory", "stopped"):
                raise NotMeasuredError(trial.text)
            if trial.in_effect is False:
                raise NotMeasuredError(f"not in effect: {trial.not_in_effect}")
        return joined(done)

    def _one_more(self, variant: Variant, budget_s: float) -> None:
        base = Base(f"{self.claim.id} baseline", None, self.claim.workload, variant.base)
        # One process cannot tell the memory and the startup of one side from those of the other.
        restarts = any(part.kind in ("memory", "start") for part in self.claim.parts)
        self.campaign.say("")
        self._done(variant).append(self.campaign.trial(base, variant.change, budget_s, restarts=restarts))

    def _speed(self, part: Part, variant: Variant) -> Found:
        return Found(_interval(self._trial(variant)))

    def _epoch(self, part: Part, variant: Variant) -> Found:
        trial = self._trial(variant)
        found = _interval(trial)
        before, after = (
            side.get("items_per_step", 0) * side.get("steps_per_epoch", 0)
            for side in (trial.base, trial.change)
        )
        if not before or not after:
            raise NotMeasuredError("the number of items per epoch is unknown")
        return Found(
            found.map(lambda speed: speed * before / after),
            f"{number(before)} and {number(after)} items per epoch",
        )

    def _start(self, part: Part, variant: Variant) -> Found:
        """The first steps including the startup, computed from the trial's measurements."""
        trial = self._trial(variant)
        found = _interval(trial)
        base, change = trial.base, trial.change
        if any(side.get(key) is None for side in (base, change) for key in ("prepare_s", "step_s")):
            raise NotMeasuredError("the startup time is unknown")
        extra = max(startup_s(change) - startup_s(base), 0.0)
        steps_s = part.steps * base["step_s"]
        note = f"over {part.steps:,} steps plus {duration(extra)} of additional startup; {times(found.ratio)} per step"
        if trial.break_even_steps:
            note += f", {breaks_even(trial.break_even_steps)}"
        over = found.map(lambda speed: float(steps_s / (extra + steps_s / speed)))
        return Found(over, note, depends=bool(trial.break_even_steps))

    def _memory(self, part: Part, variant: Variant) -> Found:
        trial = self._trial(variant)
        before, after = trial.base.get("peak_bytes"), trial.change.get("peak_bytes")
        if not before or after is None:
            raise NotMeasuredError("the peak memory is unknown")
        pairs = list(zip(trial.base.get("peaks", []), trial.change.get("peaks", []), strict=False))
        found = estimate([math.log(candidate / base) for base, candidate in pairs if base and candidate])
        if found is not None:
            return Found(_of(found), f"from {found.blocks} pairs of processes")
        # The allocator and the order of threads differ from start to start, as the speed does.
        usual = Usual()
        value = Interval(after / before, *interval(after / before, usual.sd, usual.df))
        note = (
            f"from one pair of processes, which are taken to differ by {usual.sd * 100:.2g} % in their memory"
        )
        return Found(value, note)

    # Observed runs.

    def _run(self, sets: tuple[str, ...], share: float, turn: int = 0) -> Recorded:
        """A run over `share` of the budget. turn: distinguishes runs of the same settings."""
        if (sets, turn) not in self._runs:
            self.campaign.say("observing a run")
            budget_s, stop = self.campaign.budget_s, self.campaign.stop
            try:
                run = self.watch(self.claim.workload, sets, budget_s * share, stop)
            except LateError as error:
                raise NotMeasuredError(f"{error}; {enough(budget_s)}") from None
            if run is None:
                raise NotMeasuredError("stopped before it was measured")
            self._runs[sets, turn] = run
        return self._runs[sets, turn]

    def _sides(self, variant: Variant, read: Callable[[Recorded], list[Stretch]], what: str) -> Found:
        """Candidate over baseline, from runs in the order A B B A."""
        stretches: tuple[list[Stretch], list[Stretch]] = ([], [])
        for turn, side in enumerate((0, 1, 1, 0)):
            sets = variant.base if side == 0 else (*variant.base, *variant.change)
            stretches[side].extend(read(self._run(sets, 0.25, turn)))
        if not all(stretches):
            raise NotMeasuredError(f"no {what} within {duration(self.campaign.budget_s / 4)}")
        usual = PairVariances().usual(self._run(variant.base, 0.25).run.device_name)
        # The interval of the windows lacks what the two pairs of processes differ by.
        return Found(ratio(rate(stretches[1]), rate(stretches[0]), Usual(usual.variance / 2, usual.df)))

    def _phase(self, part: Part, variant: Variant) -> Found:
        def read(run: Recorded) -> list[Stretch]:
            return [found for window in run.windows if (found := _of_phase(window, part.phase)) is not None]

        return self._sides(variant, read, part.phase)

    def _evaluation(self, part: Part, variant: Variant) -> Found:
        def read(run: Recorded) -> list[Stretch]:
            return [Stretch(1, seconds * 1e9) for seconds in _evaluations(run)[1:]]  # the first is a warm-up

        return self._sides(variant, read, "evaluation after the first")

    def _frequency(self, part: Part, variant: Variant) -> Found:
        run = self._run(variant.base, 1.0)
        done = _evaluations(run)
        if not done:
            raise NotMeasuredError(f"no evaluation within {duration(self.campaign.budget_s)}")
        step_s = run.run.items_per_step / run.rate.value
        steps_s = part.steps * step_s

        def over_half(evaluation_s: float) -> float:
            return (steps_s + evaluation_s) / (steps_s + evaluation_s / 2)

        found = estimate([math.log(seconds) for seconds in done])
        evaluation = Interval(done[0]) if found is None else _of(found)
        note = f"computed from {duration(step_s)} per step and {duration(evaluation.ratio)} per evaluation"
        return Found(evaluation.map(over_half), note)

    def _share(self, part: Part, variant: Variant) -> Found:
        run = self._run(variant.base, 1.0)
        if part.phase == "idle":
            idle = run.snapshot.idle
            if idle.share is None:
                raise NotMeasuredError(f"the idle share is unknown: {idle.reason}")
            return Found(Interval.exact(idle.share), f"method: {idle.method}")
        on_gpu = any(_device_ns(window, part.phase) is not None for window in run.windows)
        shares = [
            found for window in run.windows if (found := _share_of(window, part.phase, on_gpu)) is not None
        ]
        if not shares or not any(part.items for part in shares):
            name = part.phase.rpartition("/")[2]
            notes = [each.mark.text for each in run.snapshot.marks if name in each.mark.text]
            if notes:
                raise NotMeasuredError(notes[0][:1].lower() + notes[0][1:].removesuffix("."))
            raise NotMeasuredError(f"the phase {part.phase} did not occur")
        share = spread(rate(shares)).map(lambda value: value * 1e-9)
        return Found(share, f"by {'GPU' if on_gpu else 'host'} clock")


def _evaluations(run: Recorded) -> list[float]:
    return [item.seconds for item in run.snapshot.evaluations if item.seconds]


def _of(found: Estimate) -> Interval:
    return Interval(found.ratio, found.low, found.high)


def _interval(trial: TrialEvent) -> Interval:
    if trial.ratio is None:
        raise NotMeasuredError(trial.text.removeprefix(f"{trial.verdict}: ") or "the trial has no ratio")
    return Interval(trial.ratio, trial.low, trial.high)


def _device_ns(window: WindowEvent, phase: str) -> float | None:
    found = window.phases.get(phase, {}).get("device_ns")
    return None if found is None else float(found)


def _of_phase(window: WindowEvent, phase: str) -> Stretch | None:
    """Steps and their time in a phase, by the GPU clock if available."""
    device = _device_ns(window, phase)
    if device and window.device_steps:
        return Stretch(window.device_steps, device * window.device_steps)
    host = host_ns_of(window, phase)
    return Stretch(window.steps, host) if host and window.steps else None


def _share_of(window: WindowEvent, phase: str, on_gpu: bool) -> Stretch | None:
    """A phase's time as `items` of the step time, without evaluations and checkpoints."""
    whole = {name: body for name, body in window.phases.items() if "/" not in name and name not in ASIDES}
    if on_gpu:
        times = [body["device_ns"] for body in whole.values() if body.get("device_ns") is not None]
        part = _device_ns(window, phase)
        return None if part is None or not sum(times) else Stretch(part, sum(times))
    total = sum(body["host_ns"] for body in whole.values())
    return Stretch(host_ns_of(window, phase), total) if total and window.steps else None


Verdict = Literal[
    "confirmed", "not confirmed", "depends", "inconclusive", "not measured", "not measurable on this machine"
]
Outcome = Literal["confirmed", "not confirmed", "inconclusive", "not measured"]

# Maximum width (high over low) of an interval that overlaps the claimed range without lying in it.
NARROW = 1.25
# What a trial says of the seconds that it needs.
_BUDGET = re.compile(r"raise --budget(?: (to about|above) ([\d.]+))?")
# Outcomes under other conditions than the guide's.
ELSEWHERE = {"confirmed": "in the claimed range", "not confirmed": "outside the claimed range"}


@dataclass(frozen=True, slots=True)
class PartResult:
    """The result of one part. variant: how it was measured, or None. reason: why not measured or inconclusive.

    where: how the measurement differs from the guide's conditions, and what those require; "" if it does not.
    """

    part: Part
    outcome: Outcome
    variant: Variant | None = None
    found: Found | None = None
    where: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """A claim and its verdict."""

    claim: Claim
    verdict: Verdict
    parts: tuple[PartResult, ...]
    seconds: float
    device: str

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "id": self.claim.id,
            "guide": self.claim.guide,
            "claim": self.claim.text,
            "workload": self.claim.workload,
            "verdict": self.verdict,
            "device": self.device,
            "seconds": self.seconds,
            "parts": [_part_dict(item) for item in self.parts],
        }


@dataclass(frozen=True, slots=True)
class ClaimsState(CampaignState[ClaimResult]):
    """How far the measurement is. claim: the current one of `count`, None between two of them."""

    claim: Claim | None = None
    count: int = 0


def measurements(claim: Claim, place: Conditions) -> int:
    """How many trials and observed runs a claim takes on this machine, each up to the budget."""
    variants = [(part.kind in TRIALS, part.choose(place)[0]) for part in claim.parts]
    return len({(tried, found.base, found.change) for tried, found in variants if found is not None})


def run_claims(
    wanted: Sequence[Claim],
    budget_s: float = 60.0,
    tell: Callable[[ClaimsState], None] = lambda state: None,
    stop: threading.Event | None = None,
    measure: Measure = run_trial,
    watch: Watch = observe,
    machine: Machine | None = None,
) -> tuple[ClaimResult, ...]:
    """Measure them in order. budget_s: of each measurement. stop: set it to return what was measured so far."""
    machine = machine or detect(use_torch=False)
    place = place_of(machine)
    device = machine.chosen.name if machine.chosen is not None else machine.host.cpu
    campaign = Campaign(ClaimsState(count=len(wanted)), tell, stop, budget_s, measure)

    def one(_index: int, claim: Claim) -> None:
        campaign.say("", claim=claim)
        measurer = Measurer(claim, watch, campaign)
        begin = time.monotonic()
        parts = tuple(_measure(part, place, measurer) for part in claim.parts)
        if not campaign.stop.is_set():
            seconds = round(time.monotonic() - begin, 1)
            result = ClaimResult(claim, verdict(parts), parts, seconds, device)
            campaign.say(claim=None, rows=(*campaign.state.rows, result))

    campaign.each(wanted, one)
    return campaign.state.rows


def _measure(part: Part, place: Conditions, measurer: Measurer) -> PartResult:
    variant, missing = part.choose(place)
    if variant is None:
        return PartResult(part, "not measured", reason=missing)
    where = variant.where
    if missing:
        where += f" (the guide's configuration {missing})"
    if measurer.campaign.stop.is_set():
        return PartResult(part, "not measured", variant, where=where, reason="stopped before it was measured")
    try:
        found = measurer.part(part, variant)
        while judge(part, found)[0] == "inconclusive" and (more := measurer.again(part, variant)) is not None:
            found = more
    except NotMeasuredError as error:
        return PartResult(part, "not measured", variant, where=where, reason=str(error))
    outcome, reason = judge(part, found)
    return PartResult(part, outcome, variant, found, where, reason)


def judge(part: Part, found: Found) -> tuple[Outcome, str]:
    """Whether a measured value is in the claimed range, and why that is inconclusive."""
    value = found.value
    if value.low is None or value.high is None:
        return "inconclusive", "too few measurements for an interval"
    if value.high < part.low or value.low > part.high:
        return "not confirmed", ""
    inside = value.low >= part.low and value.high <= part.high
    if inside or value.high <= value.low * NARROW:
        return "confirmed", ""
    return "inconclusive", "the interval is too wide; raise --budget"


def verdict(parts: Sequence[PartResult]) -> Verdict:
    """The verdict on a claim: confirmed if all parts are, not confirmed if any part is not.

    "not measured": this machine could measure it, with a larger budget or without what went wrong.
    """
    measured = [item for item in parts if item.outcome in ("confirmed", "not confirmed")]
    if not measured:
        if any(item.outcome == "inconclusive" for item in parts):
            return "inconclusive"
        return "not measured" if any(item.variant for item in parts) else "not measurable on this machine"
    if any(item.where for item in measured):
        return "depends"
    if any(item.outcome == "not confirmed" for item in measured):
        return "not confirmed"
    elsewhere = any(item.found is not None and item.found.depends for item in measured)
    if len(measured) < len(parts) or elsewhere:
        return "depends"
    return "confirmed"


def headline(result: ClaimResult) -> str:
    """The verdict in words: "depends" comes with what it depends on, a measurement that needs more time with that."""
    if result.verdict in ("inconclusive", "not measured"):
        needed = next(filter(None, (_BUDGET.search(item.reason) for item in result.parts)), None)
        if needed is not None and needed[2]:
            return (
                f"{result.verdict}: needs {'about' if needed[1] == 'to about' else 'more than'} {needed[2]} s"
            )
        return result.verdict + (": needs a larger budget" if needed is not None else "")
    if result.verdict != "depends":
        return result.verdict
    if any(item.found is not None and item.where for item in result.parts):
        return "depends on the machine: measured under other conditions than in the guide"
    if any(item.found is not None and item.found.depends for item in result.parts):
        return "depends on the length of the run"
    return "depends on what was not measured"


def conditions(result: ClaimResult) -> Iterator[str]:
    """One line per part: what was measured, and the outcome. Unmeasured parts with the same reason share a line."""
    told: set[str] = set()
    for item in result.parts:
        name = f"{item.part.name}: " if item.part.name else ""
        if item.found is None:
            if item.reason not in told:
                names = [one.part.name for one in result.parts if not one.found and one.reason == item.reason]
                shared = ", ".join(filter(None, names))
                yield f"{shared}: not measured: {item.reason}" if shared else f"not measured: {item.reason}"
            told.add(item.reason)
            continue
        # Under other conditions than the guide's, the claim itself is neither confirmed nor refuted.
        words = ELSEWHERE if item.where or item.found.depends else {}
        outcome = words.get(item.outcome, item.outcome)
        line = f"{name}{shown(item.part, item.found)}, claimed {item.part.claimed}: {outcome}"
        if item.reason:
            line += f" ({item.reason})"
        for text in (f"measured with: {item.where}" if item.where else "", item.found.note):
            line += f"; {text}" if text else ""
        yield line


def shown(part: Part, found: Found) -> str:
    """A value with its interval: "1.42x (95 % CI 1.35 to 1.49)", "21.4 % (95 % CI 20.9 % to 21.9 %)"."""
    value = found.value
    percent = part.kind == "share"

    def form(figure: float) -> str:
        return f"{figure * 100:.1f} %" if percent else factor(figure)

    head = form(value.ratio) + ("" if percent else "x")
    return head if value.low == value.high else with_interval(head, CONFIDENCE, value.low, value.high, form)


def _part_dict(item: PartResult) -> dict[str, Any]:
    value = item.found.value if item.found else None
    high = item.part.high
    return {
        "name": item.part.name,
        "kind": item.part.kind,
        "claimed_low": item.part.low or None,
        "claimed_high": high if high != float("inf") else None,
        "outcome": item.outcome,
        "value": value.ratio if value else None,
        "low": value.low if value else None,
        "high": value.high if value else None,
        "where": item.where,
        "reason": item.reason,
        "note": item.found.note if item.found else "",
        "base": list(item.variant.base) if item.variant else [],
        "change": list(item.variant.change) if item.variant else [],
    }

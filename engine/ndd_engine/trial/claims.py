"""Measures the guides' claims on this machine: the ratio with its interval, and a verdict."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.gpu import Machine

from .candidates import Place
from .claims_measure import Found, Measurer, NotMeasuredError, Watch
from .claims_table import TRIALS, Claim, Part, Variant
from .outcome import with_interval
from .request import Measure, Progress
from .short_run import observe
from .trial import run_trial
from .verdict import CONFIDENCE

Verdict = Literal["confirmed", "not confirmed", "depends", "not measurable on this machine"]
Outcome = Literal["confirmed", "not confirmed", "inconclusive", "not measured"]

# Maximum width (high over low) of an interval that overlaps the claimed range without lying in it.
NARROW = 1.25
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
class ClaimsState:
    """How far the measurement is. claim: the current one, number `index` of `count`."""

    results: tuple[ClaimResult, ...]
    claim: Claim | None
    index: int
    count: int
    stage: str = ""
    progress: Progress | None = None


def measurements(claim: Claim, place: Place) -> int:
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
    stop = stop or threading.Event()
    machine = machine or detect(use_torch=False)
    place = Place.of(machine)
    device = machine.chosen.name if machine.chosen is not None else machine.host.cpu
    results: list[ClaimResult] = []
    for index, claim in enumerate(wanted):
        if stop.is_set():
            break

        def say(stage: str, progress: Progress | None, claim: Claim = claim, index: int = index) -> None:
            tell(ClaimsState(tuple(results), claim, index, len(wanted), stage, progress))

        say("", None)
        measurer = Measurer(claim, measure, watch, budget_s, stop, say)
        begin = time.monotonic()
        parts = tuple(_measure(part, place, measurer) for part in claim.parts)
        if stop.is_set():
            break
        seconds = round(time.monotonic() - begin, 1)
        results.append(ClaimResult(claim, verdict(parts), parts, seconds, device))
        tell(ClaimsState(tuple(results), None, index + 1, len(wanted)))
    return tuple(results)


def _measure(part: Part, place: Place, measurer: Measurer) -> PartResult:
    variant, missing = part.choose(place)
    if variant is None:
        return PartResult(part, "not measured", reason=missing)
    where = variant.where
    if missing:
        where += f" (the guide's configuration {missing})"
    if measurer.stop.is_set():
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
    """The verdict on a claim: confirmed if all parts are, not confirmed if any part is not."""
    measured = [item for item in parts if item.outcome in ("confirmed", "not confirmed")]
    if not measured:
        return "not measurable on this machine"
    if any(item.where for item in measured):
        return "depends"
    if any(item.outcome == "not confirmed" for item in measured):
        return "not confirmed"
    elsewhere = any(item.found is not None and item.found.depends for item in measured)
    if len(measured) < len(parts) or elsewhere:
        return "depends"
    return "confirmed"


def headline(result: ClaimResult) -> str:
    """The verdict in words: "depends" comes with what it depends on."""
    if result.verdict != "depends":
        return result.verdict
    if any(item.found is not None and item.where for item in result.parts):
        return "depends on the machine: measured under other conditions than in the guide"
    if any(item.found is not None and item.found.depends for item in result.parts):
        return "depends on the length of the run"
    return "depends on what was not measured"


def conditions(result: ClaimResult) -> Iterator[str]:
    """One line per part: what was measured, and the outcome."""
    for item in result.parts:
        name = f"{item.part.name}: " if item.part.name else ""
        if item.found is None:
            yield f"{name}not measured: {item.reason}"
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
        return f"{figure * 100:.1f} %" if percent else f"{figure:.3g}"

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

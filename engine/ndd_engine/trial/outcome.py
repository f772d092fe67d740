"""What came out of a trial, in figures and in one sentence: effect, memory, losses, break-even."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ndd_engine.config import Config
from ndd_engine.record.events import Json, TrialEvent
from ndd_engine.text import duration, number, size

from .paired import CONFIDENCE, FLOOR, Estimate
from .request import TrialRequest
from .side import SideFacts

# Losses that differ by no more than this share count as close.
CLOSE = 0.01
# A change of these keys makes another training of it, so that losses say nothing about each other.
_OTHER_TRAINING = ("workload.", "optimizer.", "schedule.", "clip.", "run.seed", "batch.sequence")
_SAME_RESULT = frozenset({"optimizer.implementation", "optimizer.set_to_none", "workload.decoder"})


def differences(base: Config, change: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted keys that differ, with both values."""
    found: dict[str, tuple[Any, Any]] = {}
    _compare("", base.model_dump(mode="json"), change.model_dump(mode="json"), found)
    return found


def _compare(prefix: str, base: Json, change: Json, found: dict[str, tuple[Any, Any]]) -> None:
    for key in dict.fromkeys((*base, *change)):
        a, b = base.get(key), change.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            _compare(f"{prefix}{key}.", a, b, found)
        elif a != b:
            found[prefix + key] = (a, b)


def effect(facts: SideFacts, changed: Iterable[str]) -> tuple[bool | None, str]:
    """(whether the changed settings took effect, why not), by what the run itself verified."""
    verified = {key: facts.settings[key] for key in changed if key in facts.settings}
    without = [
        f"{key} = {requested} is {applied} ({why})"
        for key, (requested, applied, in_effect, why) in verified.items()
        if in_effect is False
    ]
    if without:
        return False, "; ".join(without)
    # One that is left at its default has nothing to verify, but may be read back.
    told = [in_effect or requested == applied for requested, applied, in_effect, _ in verified.values()]
    return (True if told and all(told) else None), ""


def compare_losses(
    base: Sequence[float], change: Sequence[float], changed: Iterable[str], items: tuple[int, int]
) -> tuple[str, str]:
    """(same, close, differs or not comparable; how that was found) of the first losses of both sides."""
    other = [key for key in changed if key.startswith(_OTHER_TRAINING) and key not in _SAME_RESULT]
    if other:
        return "not comparable", f"with another {', '.join(other)} the losses are those of another training"
    if items[0] != items[1]:
        return "not comparable", f"a step has {items[1]:,} items instead of {items[0]:,}"
    count = min(len(base), len(change))
    if not count:
        return "not comparable", "no loss was seen"
    steps = f"the first {count} losses" if count > 1 else "the first loss"
    pairs = list(zip(base[:count], change[:count], strict=True))
    if all(a == b for a, b in pairs):
        return (
            "same",
            f"{steps} are equal to the last digit" if count > 1 else f"{steps} is equal to the last digit",
        )
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return "differs", f"among {steps} are some that are not finite"
    apart = max(abs(a - b) / max(abs(a), abs(b)) for a, b in pairs)
    verdict = "close" if apart <= CLOSE else "differs"
    return verdict, f"{steps} differ by up to {apart * 100:.2g} % (close: up to {CLOSE * 100:.0f} %)"


def break_even(base: SideFacts, change: SideFacts) -> int | None:
    """Optimizer steps of the change after which what it costs before training is repaid; None without a gain."""
    if (
        base.items_per_s is None
        or change.items_per_s is None
        or base.prepare_s is None
        or change.prepare_s is None
    ):
        return None
    saved_s = change.items_per_step * (1 / base.items_per_s - 1 / change.items_per_s)
    if saved_s <= 0:
        return None
    before = [
        side.prepare_s + max((side.warmup_s or 0) - side.warmup_steps * (side.step_s or 0), 0)
        for side in (base, change)
        if side.prepare_s is not None
    ]
    return math.ceil(max(before[1] - before[0], 0) / saved_s)


def result(
    request: TrialRequest,
    verdict: str,
    reason: str,
    found: Estimate | None,
    sides: tuple[SideFacts, SideFacts],
    changed: Sequence[str],
    seconds: float,
    quads: int,
) -> TrialEvent:
    """The event. reason: why there is no clear answer, or what failed. sides: base, change. quads: measured."""
    base, change = sides
    in_effect, not_in_effect = effect(change, changed)
    loss, loss_text = "not comparable", ""
    if base.losses and change.losses:
        items = (base.items_per_step, change.items_per_step)
        loss, loss_text = compare_losses(base.losses, change.losses, changed, items)
    event = TrialEvent(
        sets=list(request.sets),
        against=request.base.name,
        verdict=verdict,
        text="",
        ratio=found.ratio if found else None,
        low=found.low if found else None,
        high=found.high if found else None,
        confidence=CONFIDENCE,
        quads=quads,
        seconds=round(seconds, 3),
        budget_s=request.budget_s,
        device=change.device_name or base.device_name,
        in_effect=in_effect,
        not_in_effect=not_in_effect,
        loss=loss,
        loss_text=loss_text,
        break_even_steps=break_even(base, change) if verdict == "gain" else None,
        base=base.to_dict(),
        change=change.to_dict(),
        cause=request.cause,
    )
    return replace(event, text=sentence(event, reason))


def sentence(event: TrialEvent, reason: str = "") -> str:
    """The result in one sentence."""
    head = event.verdict
    if event.ratio is not None:
        assert event.low is not None and event.high is not None
        head += f"{'' if event.verdict in ('gain', 'loss') else ':'} {times(event.ratio)}x"
        head += f" ({times(event.low)} to {times(event.high)}, {event.confidence * 100:.0f} %)"
        head += f", {event.quads} quads in {duration(event.seconds)}"
    # "out of memory on cuda:0 in forward" says it already.
    parts = [reason if reason.startswith(head) else head + (f": {reason}" if reason else "")]
    if event.in_effect is not None:
        parts.append("takes effect" if event.in_effect else f"does not take effect: {event.not_in_effect}")
    before, after = event.base.get("peak_bytes"), event.change.get("peak_bytes")
    if before is not None and after is not None:
        same = abs(after - before) < FLOOR * before
        parts.append(
            f"peak memory {size(after)} as before" if same else f"peak memory {size(before)} → {size(after)}"
        )
    if event.loss in ("same", "close"):
        parts.append(f"losses {event.loss}")
    elif event.loss == "differs":
        parts.append(f"losses differ: {event.loss_text}")
    if event.break_even_steps:
        parts.append(f"repaid after {number(event.break_even_steps)} steps")
    return "; ".join(parts)


def times(ratio: float) -> str:
    """A ratio with as many digits as it is good for: 1.42, 12.3."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.3g}"

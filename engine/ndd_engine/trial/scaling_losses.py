"""What takes the time that linear scaling would not need, part by part of a step. No input, no output.

With k times the items per rank, linear scaling needs k times the step of the first number of ranks. What a part of the
step takes beyond k times that part is lost; the parts add up to the step, and so do these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ndd_engine.record.across import EXCHANGE, SKEW
from ndd_engine.text import percent, span

from .scaling_plan import Point

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

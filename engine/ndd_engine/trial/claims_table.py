"""The guides' claims: what is compared, the claimed range, and the hardware that the measurement requires."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

import ndd_profiles
from ndd_engine.errors import UsageError
from ndd_engine.text import printable

from .candidates import Place

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

    def missing(self, place: Place) -> str:
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

    def choose(self, place: Place) -> tuple[Variant | None, str]:
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

"""Compares the losses of the first steps of two runs."""

from __future__ import annotations

from collections.abc import Sequence

WHY = (
    "first losses: the largest relative difference. If the first step agrees and later ones drift apart, the cause is "
    "rounding: Adam's first steps normalise a gradient by its own magnitude"
)


def differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """Relative differences of the losses of each step. Raises ValueError for unequal numbers of losses, or none."""
    if not left:
        raise ValueError("no losses to compare")
    return [abs(a - b) / max(abs(a), 1e-12) for a, b in zip(left, right, strict=True)]


def parity(left: Sequence[float], right: Sequence[float]) -> str:
    """A table cell: "identical", or the difference of the first step and the largest one."""
    found = differences(left, right)
    if max(found) == 0:
        return "identical"
    return f"first {found[0]:.0e}, all {max(found):.0e}"

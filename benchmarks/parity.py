"""Whether two trainings compute the same: the losses of their first steps, side by side."""

from __future__ import annotations

from collections.abc import Sequence

WHY = (
    "first losses: the largest difference as a share of the loss. Where the first step agrees and later ones drift "
    "apart, rounding is at work: Adam's first steps divide a gradient by its own size, whatever that is"
)


def differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """Of losses of the same step, as a share of the left one.

    Raises ValueError when there are not as many of one as of the other, or none.
    """
    if not left:
        raise ValueError("no losses to compare")
    return [abs(a - b) / max(abs(a), 1e-12) for a, b in zip(left, right, strict=True)]


def parity(left: Sequence[float], right: Sequence[float]) -> str:
    """For a table: "identical", or the difference of the first step and the largest of all."""
    found = differences(left, right)
    if max(found) == 0:
        return "identical"
    return f"first {found[0]:.0e}, all {max(found):.0e}"

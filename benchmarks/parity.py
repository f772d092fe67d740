"""Whether two trainings compute the same: the losses of their first steps, side by side."""

from __future__ import annotations

from collections.abc import Sequence


def difference(left: Sequence[float], right: Sequence[float]) -> float:
    """The largest difference between losses of the same step, as a share of the left one.

    Raises ValueError when there are not as many of one as of the other, or none.
    """
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(left, right, strict=True))


def parity(left: Sequence[float], right: Sequence[float]) -> str:
    """For a table: "identical", or the largest difference."""
    found = difference(left, right)
    return "identical" if found == 0 else f"within {found:.1e}"

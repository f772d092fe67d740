"""Piecewise linear interpolation over the micro-batch size."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def at(micro: int, places: Sequence[int], values: Sequence[float]) -> float:
    """The value at `micro`, interpolated between its neighbours or extrapolated from the last two points.

    places: measured sizes, ascending, at least one; a single point is scaled proportionally. The result is never below
    the smallest value scaled down proportionally, since a falling line is noise.
    """
    if len(places) == 1:
        return float(values[0]) * micro / places[0]
    place = min(max(bisect_right(places, micro), 1), len(places) - 1)
    slope = (values[place] - values[place - 1]) / (places[place] - places[place - 1])
    found = values[place - 1] + slope * (micro - places[place - 1])
    return float(max(found, min(values) * min(micro / places[0], 1.0)))

"""A quantity at any micro-batch, from a few measured ones: lines between neighbours, and beyond the ends."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def at(micro: int, places: Sequence[int], values: Sequence[float]) -> float:
    """On the line between the two points around a micro-batch, or through the two at the end that it lies beyond.

    places: ascending, at least one; of one alone the quantity is in proportion. Never below what the smallest value
    gives in proportion: a line that falls is noise.
    """
    if len(places) == 1:
        return float(values[0]) * micro / places[0]
    place = min(max(bisect_right(places, micro), 1), len(places) - 1)
    slope = (values[place] - values[place - 1]) / (places[place] - places[place - 1])
    found = values[place - 1] + slope * (micro - places[place - 1])
    return float(max(found, min(values) * min(micro / places[0], 1.0)))

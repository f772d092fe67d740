"""A curve of any length, reduced to a bounded number of points."""

from __future__ import annotations

from typing import Any

CAPACITY = 256


class Trend:
    """Means of consecutive values in at most CAPACITY points: when full, adjacent points are merged."""

    __slots__ = ("_count", "_last_x", "_sum", "points", "stride")

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self.stride = 1
        self._sum = 0.0
        self._count = 0
        self._last_x = 0

    def add(self, x: int, value: float) -> None:
        """Add a value at `x` (an optimizer step); x must not decrease."""
        self._sum += value
        self._count += 1
        self._last_x = x
        if self._count == self.stride:
            self.points.append((x, self._sum / self._count))
            self._sum, self._count = 0.0, 0
            if len(self.points) >= CAPACITY:
                pairs = zip(self.points[::2], self.points[1::2], strict=True)
                self.points = [(right[0], (left[1] + right[1]) / 2) for left, right in pairs]
                self.stride *= 2

    def cut(self, x: int) -> None:
        """Remove everything after `x`: a resumed run repeats those steps."""
        self.points = [point for point in self.points if point[0] <= x]
        self._sum, self._count = 0.0, 0

    def view(self) -> tuple[tuple[int, float], ...]:
        """The points, including the incomplete last one."""
        if self._count:
            return (*self.points, (self._last_x, self._sum / self._count))
        return tuple(self.points)

    def to_dict(self) -> dict[str, Any]:
        """For a fold event."""
        return {
            "stride": self.stride,
            "points": [list(point) for point in self.points],
            "open": [self._last_x, self._sum, self._count],
        }

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Trend:
        """The reverse of to_dict."""
        trend = cls()
        trend.stride = body["stride"]
        trend.points = [(point[0], point[1]) for point in body["points"]]
        trend._last_x, trend._sum, trend._count = body["open"]
        return trend

"""Judges from the recent windows of all ranks which rank is the straggler, in which phase, and what that costs.

All ranks take the same time for a step, since they exchange data in it: a rank that works longer waits less. Ranks are
therefore compared by their own time, the wall time without waiting for others. A straggler's own time is longer than
usual by more than a share of the step, more than ranks usually differ by, and more than it varies between windows.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median
from typing import Any

# Windows that are judged, and the first ones of a run, which have start-up costs.
KEPT_WINDOWS = 16
WARM_UP = 2
# If these have no straggler, more of them show smaller delays; not of many ranks, since rank 0 does this as it trains.
MORE_WINDOWS = 64
MOST_RANKS_FOR_MORE = 64
# Fewer windows are not judged.
LEAST_WINDOWS = 6
# Part of the windows that is left out at each end of their order: single slow windows.
TRIMMED = 0.2
# A straggler is late by this share of a step or more (in more windows, by the other share), and by this many standard
# deviations of the ranks' own times.
LATE_SHARE = 0.04
LATE_SHARE_OF_MORE = 0.03
LATE_SPREADS = 5.5
# With fewer ranks their spread is not known.
LEAST_RANKS = 4
# With fewer ranks, one of them matters for the median: it is compared with the median of the others.
FEW_RANKS = 16
# Student's t for one in a thousand, one-sided, by degrees of freedom.
STUDENT = (
    318.0, 22.3, 10.2, 7.2, 5.9, 5.2, 4.8, 4.5, 4.3, 4.1, 4.0, 3.9, 3.9, 3.8, 3.7, 3.7, 3.7, 3.6, 3.6, 3.6,
)  # fmt: skip
# A rank that is named stays named down to this part of the thresholds.
STAYS = 0.7
# A straggler in more windows has to be one in the newest as well, from this part of the threshold on.
STILL = 0.5
# Other ranks are stragglers as well from this part of the longest delay on.
ALSO_LATE = 0.5
# The median absolute deviation of normally distributed values, as a standard deviation.
MAD_TO_SIGMA = 1.4826


class Column:
    """One figure of all ranks, nanoseconds per step."""

    __slots__ = ("middle", "values")

    def __init__(self, values: Sequence[float]) -> None:
        self.values = array("d", values)
        self.middle = median(values)

    def delay(self, rank: int) -> float:
        """The rank's value beyond the median of the others."""
        values = self.values
        if len(values) < FEW_RANKS:
            return values[rank] - median([*values[:rank], *values[rank + 1 :]])
        return values[rank] - self.middle

    def beyond(self) -> array[float]:
        """All values beyond the median of all."""
        middle = self.middle
        return array("d", [value - middle for value in self.values])


@dataclass(frozen=True, slots=True)
class Judged:
    """A window: own times and phases of all ranks, and their mean wall time in nanoseconds per step."""

    step: int
    own: Column
    phases: Mapping[str, Column]
    wall_ns: float


# A rank, by how many nanoseconds a step it is later than usual, the ceiling, and all stragglers.
Lateness = tuple[int, float, float, list[int]]


class Judge:
    """Keeps the recent windows of all ranks. hosts: the host of each rank."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = list(hosts)
        many = len(self._hosts) > MOST_RANKS_FOR_MORE
        self._windows: deque[Judged] = deque(maxlen=KEPT_WINDOWS if many else MORE_WINDOWS)
        self._beyond: deque[array[float]] = deque(maxlen=self._windows.maxlen)
        self._skipped = 0
        self._named: int | None = None
        self._since_step = 0
        self._excess: list[float] | None = None

    def add(self, window: Judged) -> None:
        """A window with steps."""
        self._excess = None
        if self._skipped < WARM_UP:
            self._skipped += 1
        else:
            self._windows.append(window)
            self._beyond.append(window.own.beyond())

    @property
    def excess(self) -> list[float]:
        """By how many nanoseconds a step each rank's own time is longer than the median; [] before the first window."""
        if self._excess is None:
            self._excess = self._excess_of(KEPT_WINDOWS)
        return self._excess

    def _excess_of(self, count: int) -> list[float]:
        newest = list(self._beyond)[-count:]
        return [trimmed_mean(values) for values in zip(*newest, strict=True)]

    def late(self, places: Callable[[int], Mapping[str, str]]) -> dict[str, Any] | None:
        """The rank that holds up the others, as record.event.Late; None if there is none, or before it is known.

        places: returns for a rank, by phase, the file, line and function that takes most of it, where they are known.
        """
        found = self._found() if len(self._windows) >= LEAST_WINDOWS and len(self._hosts) > 1 else None
        if found is None:
            self._named = None
            return None
        windows, (rank, late_ns, ceiling, also) = found
        if rank != self._named:
            self._named, self._since_step = rank, self._windows[-1].step
        phases = {
            name: trimmed_mean([window.phases[name].delay(rank) for window in windows])
            for name in windows[-1].phases
        }
        phase = max(phases, key=phases.__getitem__)
        hosts = {self._hosts[index] for index in also}
        return {
            "rank": rank,
            "host": self._hosts[rank],
            "late_ns": round(late_ns),
            "phase": phase,
            "phase_ns": round(phases[phase]),
            "ceiling": round(ceiling, 4),
            "since_step": self._since_step,
            "where": places(rank).get(phase),
            "count": len(also),
            "same_host": len(hosts) == 1 and self._hosts.count(hosts.pop()) == len(also) > 1,
        }

    def _found(self) -> tuple[Sequence[Judged], Lateness] | None:
        """The windows in which a rank is a straggler, and by how much: the newest ones, or more of them."""
        every = list(self._windows)
        newest = every[-KEPT_WINDOWS:]
        if (found := self._late(newest, self.excess, LATE_SHARE)) is not None:
            return newest, found
        if len(every) >= 2 * KEPT_WINDOWS:
            found = self._late(every, self._excess_of(MORE_WINDOWS), LATE_SHARE_OF_MORE)
            if found is not None and self._still(found[0], newest):
                return every, found
        return None

    def _late(self, windows: Sequence[Judged], mean_excess: Sequence[float], share: float) -> Lateness | None:
        """The stragglers in these windows, by at least a share of the step. mean_excess: of each rank, see `excess`."""
        excess = Column(mean_excess)
        values = excess.values
        order = sorted(range(len(values)), key=values.__getitem__)
        wall_ns = median(window.wall_ns for window in windows)
        rank, named = order[-1], self._named
        # Of several ranks that are equally late, the one that was named stays.
        if named is not None and excess.delay(named) >= STAYS * excess.delay(rank):
            rank = named
        ease = STAYS if rank == named else 1.0
        late_ns = excess.delay(rank)
        usual = values[rank] - late_ns
        least = share * wall_ns
        if len(values) >= LEAST_RANKS:
            spread = MAD_TO_SIGMA * median(abs(values[index] - usual) for index in order if index != rank)
            least = max(least, LATE_SPREADS * spread)
        if wall_ns <= 0 or late_ns <= ease * least or not _lasting(windows, rank, ease):
            return None
        bar = usual + max(ALSO_LATE * late_ns, ease * least)
        also = [index for index in order if values[index] >= bar or index == rank]
        rest = [values[index] for index in order if values[index] < bar and index != rank]
        # Without these ranks a step waits for the next slowest.
        gain = values[order[-1]] - max(rest, default=usual)
        return rank, late_ns, wall_ns / max(wall_ns - gain, 0.01 * wall_ns), also

    def _still(self, rank: int, newest: Sequence[Judged]) -> bool:
        wall_ns = median(window.wall_ns for window in newest)
        return Column(self.excess).delay(rank) > STILL * LATE_SHARE_OF_MORE * wall_ns


def _lasting(windows: Sequence[Judged], rank: int, ease: float) -> bool:
    """Whether the rank's delay is significant beside its variation between windows."""
    mean, error, freedom = trimmed([window.own.delay(rank) for window in windows])
    return mean > ease * STUDENT[min(freedom, len(STUDENT)) - 1] * error


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the largest and the smallest values."""
    cut = int(TRIMMED * len(values))
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)


def trimmed(values: Sequence[float]) -> tuple[float, float, int]:
    """The trimmed mean, its standard error and degrees of freedom (Tukey and McLaughlin, 1963). At least 3 values."""
    count = len(values)
    cut = int(TRIMMED * count)
    order = sorted(values)
    kept = order[cut : count - cut]
    clipped = [*[kept[0]] * cut, *kept, *[kept[-1]] * cut]
    mean = sum(clipped) / count
    deviation = sqrt(sum((value - mean) ** 2 for value in clipped) / (count - 1))
    error = deviation / ((1 - 2 * cut / count) * sqrt(count))
    return sum(kept) / len(kept), error, len(kept) - 1

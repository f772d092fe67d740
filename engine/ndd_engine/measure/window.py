"""The figures of a window: the time between two readings of the clock of a run of our own, or of a script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import mul

from ndd_engine.record.events import Json
from ndd_watch.clock import OTHER, PhaseClock
from ndd_watch.mapped import PHASES


@dataclass
class Window:
    """The time between two readings of a clock, in nanoseconds: of a run of our own, or of an observed script.

    rows: one list per finished step, indexed like `names`. rest: time outside finished steps. device: key and
    nanoseconds of each step that carried device events, by the index of the phases that it entered. outside: those of
    the device in evaluations. wholes: steps that were timed as a whole. Their time is shared out like that of the
    others that are about as long; `other` takes the rounding.
    """

    names: list[str]
    wall_ns: int
    rows: list[list[int]]
    rest: list[int]
    device: list[tuple[int, dict[int, float]]] = field(default_factory=list)
    outside: dict[int, float] = field(default_factory=dict)
    wholes: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, clock: PhaseClock) -> Window:
        """End the window of a loop's clock, and begin the next one."""
        rows = clock.rows
        wall_ns, rest = clock.take()
        return cls(list(clock.names), wall_ns, rows, rest, clock.gpu.take(), clock.gpu.outside())

    def figures(self) -> Json:
        """The fields of a window event that are known from the clock."""
        p50, p95, longest = _quantiles([*map(sum, self.rows), *self.wholes])
        return {
            "wall_ns": self.wall_ns, "phases": self.phases(), "step_p50_ns": p50, "step_p95_ns": p95,
            "step_max_ns": longest, "device_steps": len(self.device), "timed_steps": len(self.rows),
        }  # fmt: skip

    def phases(self) -> dict[str, Json]:
        """The `phases` field of a window event. Sub-phases also count towards their parent."""
        out: dict[str, Json] = {}
        # Steps recorded before a sub-phase was first entered are shorter.
        rest, *rows = (row + [0] * (len(self.names) - len(row)) for row in (self.rest, *self.rows))
        columns = list(zip(*rows, strict=True)) or [()] * len(self.names)
        places: dict[str, list[int]] = {}
        for index, name in enumerate(self.names):
            for key in {name, name.partition("/")[0]}:
                places.setdefault(key, []).append(index)
        left, factors = sum(self.wholes), self._factors(rows)
        for name, own in places.items():
            several = len(own) > 1
            values = [*map(sum, zip(*(columns[i] for i in own), strict=True))] if several else columns[own[0]]
            total = sum(values)
            share = left if name == PHASES[OTHER] else round(sum(map(mul, values, factors)))
            if "/" not in name:
                left -= share
            total += share + sum(rest[i] for i in own)
            outside = self.outside.get(own[0])
            if not total and outside is None:
                continue
            device = [v for _, row in self.device for i in own if (v := row.get(i)) is not None]
            on_device = sum(device) / len(self.device) if device else outside
            p50, p95, longest = _quantiles(values)
            out[name] = {
                "host_ns": total,
                "p50_ns": p50,
                "p95_ns": p95,
                "max_ns": longest,
                "device_ns": None if on_device is None else round(on_device),
            }
        return out

    def _factors(self, rows: list[list[int]]) -> list[float]:
        """For each timed step, how many times its length the whole steps took for which it stands.

        These are about as long, up to a factor of two, or else the nearest. Few steps are timed, so that one that was
        interrupted would otherwise decide about all.
        """
        lengths = [sum(row) for row in rows]
        timed: Counter[int] = Counter()
        for ns in lengths:
            timed[ns.bit_length()] += ns
        kinds: Counter[int] = Counter()
        for ns in self.wholes:
            kinds[ns.bit_length()] += ns
        whole: Counter[int] = Counter()
        for kind, ns in kinds.items():
            if timed:
                whole[min(timed, key=lambda one: (abs(one - kind), one))] += ns
        return [whole[ns.bit_length()] / max(timed[ns.bit_length()], 1) for ns in lengths]


def _quantiles(values: Iterable[int]) -> tuple[int | None, int | None, int | None]:
    """(p50, p95, max)."""
    ordered = sorted(values)
    if not ordered:
        return None, None, None
    last = len(ordered) - 1
    return ordered[len(ordered) // 2], ordered[min(int(len(ordered) * 0.95), last)], ordered[last]

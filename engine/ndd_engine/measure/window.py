"""The figures of a window: the time between two readings of the clock of a run of our own, or of a script."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ndd_engine.record.events import Json
from ndd_watch.clock import OTHER, PhaseClock
from ndd_watch.mapped import PHASES

# Timed steps of a kind that are remembered.
KEPT = 8


class StepKinds:
    """The newest timed steps of each kind, for the windows in which none of that kind was timed.

    Steps are of a kind if they are about as long, up to a factor of two. Few steps are timed: what happens in each
    sixteenth only, such as a rollout, would else be divided like the others in most windows.
    """

    def __init__(self) -> None:
        self._rows: defaultdict[int, deque[list[int]]] = defaultdict(lambda: deque(maxlen=KEPT))

    def add(self, rows: Iterable[list[int]]) -> None:
        """Timed steps of a window."""
        for row in rows:
            self._rows[sum(row).bit_length()].append(row)

    def nearest(self, kind: int) -> list[list[int]]:
        """Those of a kind, or else of the nearest one; none if no step was timed yet."""
        known = [one for one in self._rows if one]
        return list(self._rows[min(known, key=lambda one: (abs(one - kind), one))]) if known else []


@dataclass
class Window:
    """The time between two readings of a clock, in nanoseconds: of a run of our own, or of an observed script.

    rows: one list per finished step, indexed like `names`. rest: time outside finished steps. device: key and
    nanoseconds of each step that carried device events, by the index of the phases that it entered. outside: those of
    the device in evaluations. wholes: steps that were timed as a whole. Their time is shared out like that of timed
    ones that are about as long, of this window or of those before, which kinds knows; `other` takes the rounding.
    """

    names: list[str]
    wall_ns: int
    rows: list[list[int]]
    rest: list[int]
    device: list[tuple[int, dict[int, float]]] = field(default_factory=list)
    outside: dict[int, float] = field(default_factory=dict)
    wholes: list[int] = field(default_factory=list)
    kinds: StepKinds = field(default_factory=StepKinds)

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
        left, shares = sum(self.wholes), self._shares(rows)
        for name, own in places.items():
            several = len(own) > 1
            values = [*map(sum, zip(*(columns[i] for i in own), strict=True))] if several else columns[own[0]]
            total = sum(values)
            share = left if name == PHASES[OTHER] else round(sum(shares[i] for i in own))
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

    def _shares(self, rows: list[list[int]]) -> list[float]:
        """What each phase has of the steps that were timed as a whole: as of those of their kind.

        So one step that was interrupted does not decide about all.
        """
        timed, shares = defaultdict[int, list[list[int]]](list), [0.0] * len(self.names)
        for row in rows:
            timed[sum(row).bit_length()].append(row)
        self.kinds.add(rows)
        whole: Counter[int] = Counter()
        for ns in self.wholes:
            whole[ns.bit_length()] += ns
        for kind, ns in whole.items():
            like = timed.get(kind) or self.kinds.nearest(kind)
            all_ns = sum(map(sum, like))
            for row in like if all_ns else ():
                for index, part in enumerate(row):
                    shares[index] += ns * part / all_ns
        return shares


def _quantiles(values: Iterable[int]) -> tuple[int | None, int | None, int | None]:
    """(p50, p95, max)."""
    ordered = sorted(values)
    if not ordered:
        return None, None, None
    last = len(ordered) - 1
    return ordered[len(ordered) // 2], ordered[min(int(len(ordered) * 0.95), last)], ordered[last]

"""Windows of several simulated ranks, with noise, start-up costs and single slow windows, and a straggler if wanted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ndd_engine.measure.ranks import FIGURES, RanksFold
from ndd_engine.record.events import PHASES, WindowEvent
from ndd_engine.record.ranks import RanksEvent

MS = 1e6
# Milliseconds of a step without exchange.
STEP_MS = {
    "data_wait": 1.0, "to_device": 0.5, "forward": 22.0, "loss": 0.5, "backward": 40.0, "clip": 1.0, "optimizer": 4.5,
    "zero_grad": 0.2, "log": 0.1, "other": 0.3,
}  # fmt: skip
EXCHANGE_MS = 5.0
# Ranks on a host.
ON_HOST = 8
# Items of a rank in a step.
ITEMS = 16


@dataclass(frozen=True)
class Planted:
    """A run of several ranks.

    noise: least and most standard deviation of a rank's step from window to window, as a share; a rank draws its own.
    lasting: standard deviation of what ranks differ by in all windows. stalls: share of windows in which one rank is
    50 ms longer. late: ranks that take late_ms longer in `phase`; turns: instead, another rank of them in each step.
    """

    world: int
    late: tuple[int, ...] = ()
    late_ms: float = 0.0
    phase: str = "data_wait"
    noise: tuple[float, float] = (0.01, 0.03)
    lasting: float = 0.004
    stalls: float = 0.1
    turns: bool = False
    steps: int = 4
    exchange_ms: float = EXCHANGE_MS
    strategy: str = "ddp"
    places: tuple[str, ...] = ()
    on_host: int = ON_HOST

    @property
    def hosts(self) -> list[str]:
        """Of each rank."""
        return [f"node{rank // self.on_host}" for rank in range(self.world)]

    def windows(self, count: int, seed: int) -> Iterator[tuple[list[list[float]], float, float]]:
        """(rows of FIGURES, least wait, longest own time) of each window. The first one is four times as long."""
        rng = random.Random(seed)
        noise = [rng.uniform(*self.noise) for _ in range(self.world)]
        speed = [rng.gauss(1, self.lasting) for _ in range(self.world)]
        for index in range(count):
            stalled = rng.randrange(self.world) if rng.random() < self.stalls else None
            phases: list[dict[str, float]] = []
            for rank in range(self.world):
                pace = speed[rank] * rng.gauss(1, noise[rank]) * (4 if index == 0 else 1) * self.steps * MS
                row = {name: STEP_MS.get(name, 0.0) * pace * rng.gauss(1, 0.01) for name in PHASES}
                if rank in self.late:
                    row[self.phase] += self.late_ms * MS * self.steps / (len(self.late) if self.turns else 1)
                if rank == stalled:
                    row["other"] += 50 * MS
                phases.append(row)
            owns = [sum(row.values()) for row in phases]
            longest = max(owns)
            if self.turns:  # each of these ranks is the slowest in some of the steps
                longest += self.late_ms * MS * self.steps * (1 - 1 / len(self.late))
            exchange = self.exchange_ms * self.steps * MS
            yield (
                [self._figures(row, own, longest, exchange) for row, own in zip(phases, owns, strict=True)],
                exchange,
                longest,
            )

    def _figures(self, phases: dict[str, float], own: float, longest: float, exchange: float) -> list[float]:
        found: dict[str, float] = {
            **phases, "wait": exchange + longest - own, "hidden": 0.4 * exchange, "wall": longest + exchange,
            "cpu": 0.97 * own, "steps": self.steps, "loss_sum": 1.6, "loss_count": 1, "rss": 475 << 20, "allocated": -1,
        }  # fmt: skip
        return [found[name] for name in FIGURES]

    def events(self, count: int = 20, seed: int = 1) -> list[RanksEvent]:
        """The events of the fold."""
        fold = RanksFold(self.strategy, self.hosts)
        known = dict(zip(self.late, self.places, strict=False))

        def places(rank: int) -> dict[str, str]:
            return {self.phase: known[rank]} if rank in known else {}

        return [
            fold.window((index + 1) * self.steps, *window, places)
            for index, window in enumerate(self.windows(count, seed))
        ]


def named(events: Sequence[RanksEvent]) -> tuple[int, str] | None:
    """The straggler and its phase at the end, None if there is none."""
    late = events[-1].late
    return (late["rank"], late["phase"]) if late is not None else None


def beside(event: RanksEvent) -> WindowEvent:
    """The window of rank 0 over the same steps: its backward includes its waiting."""
    phases: dict[str, Any] = {
        name: {"host_ns": round(figures[2] * 1e3 * event.steps)}
        for name, figures in event.columns_us.items()
        if name in PHASES
    }
    phases["backward"]["host_ns"] += round(event.exchange_ns + event.skew_ns)
    steps, items = event.steps, ITEMS * event.world * event.steps
    times = (event.wall_ns, None, None, None)
    return WindowEvent(event.step, 0, event.step, steps, steps, items, 256 * items, *times, phases)

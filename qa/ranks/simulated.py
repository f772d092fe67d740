"""Windows of several simulated ranks, with noise, start-up costs and single slow windows, and a straggler if wanted.

`python -m benchmarks ranks_fold`: what several ranks cost the one that shows them, and how often a planted straggler is
named. The noise of a rank's step is 1 to 3 % from window to window, its share of lasting differences 0.4 %. In a tenth
of the windows one rank is 50 ms longer, and the first window is four times as long.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.common import Options, Table, as_percent, say

from ndd_engine.measure.stragglers import RankComparison
from ndd_engine.record.event import RankEvent, RanksEvent
from ndd_engine.record.events import PHASES, FunctionsEvent, WindowEvent

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

    def windows(self, count: int, seed: int, begin: int = 0) -> Iterator[list[RankEvent]]:
        """What each rank tells of each window, from a step on. The first one is four times as long."""
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
            first = begin + index * self.steps
            yield [self._told(first, rank, row) for rank, row in enumerate(self._steps(phases))]

    def _steps(self, phases: list[dict[str, float]]) -> list[tuple[dict[str, float], list[int], list[int]]]:
        """Of each rank: its phases, and the own time and the wait of each step."""
        owns = [[sum(row.values()) / self.steps] * self.steps for row in phases]
        if self.turns:  # in each step another one of these ranks has the whole delay
            for step in range(self.steps):
                for rank in self.late:
                    turn = self.late[step % len(self.late)] == rank
                    owns[rank][step] += self.late_ms * MS * (turn - 1 / len(self.late))
        longest = [max(column) for column in zip(*owns, strict=True)]
        return [
            (
                row,
                [round(own) for own in each],
                [round(most - own + self.exchange_ms * MS) for own, most in zip(each, longest, strict=True)],
            )
            for row, each in zip(phases, owns, strict=True)
        ]

    def _told(
        self, begin: int, rank: int, figures: tuple[dict[str, float], list[int], list[int]]
    ) -> RankEvent:
        phases, owns, waits = figures
        return RankEvent(
            step=begin + self.steps, begin=begin, numbers=list(range(self.steps)), own_ns=owns, wait_ns=waits,
            phases_ns={name: round(value) for name, value in phases.items()}, cpu_ns=round(0.97 * sum(owns)),
            hidden_ns=round(0.4 * self.exchange_ms * MS), rss_bytes=475 << 20,
        )  # fmt: skip

    def comparison(self) -> RankComparison:
        """That of these ranks, before their first window."""
        found = RankComparison()
        found.strategy, found.launched = self.strategy, self.world
        for rank, host in enumerate(self.hosts):
            found.join(rank, host)
        for rank, place in zip(self.late, self.places, strict=False):
            file, _, line = place.partition(":")
            number, _, name = line.partition(" ")
            row: Any = [file, int(number), name, 1, 10**9, 10**9, "", self.phase]
            found.take(rank, FunctionsEvent(0, 10**9, [row]))
        return found

    def events(self, count: int = 20, seed: int = 1) -> list[RanksEvent]:
        """The events of the comparison."""
        return compared(self.comparison(), self.windows(count, seed))


def compared(comparison: RankComparison, windows: Iterable[Sequence[RankEvent]]) -> list[RanksEvent]:
    """The events of windows of all ranks."""
    found: list[RanksEvent] = []
    for window in windows:
        for rank, event in enumerate(window):
            comparison.take(rank, event)
        for new in comparison.new():
            assert isinstance(new, RanksEvent), new
            found.append(new)
    return found


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


# The benchmark.

TITLE = "ranks_fold: comparison and judgement of all ranks (steps of 75 ms, 20 windows)"
COLUMNS = (
    "ranks", "CPU time", "recorded", "20 ms late named", "5 ms", "6 ms (8 %)", "named for noise", "runs",
)  # fmt: skip
TARGETS = "targets: at most 25 ms and 2 KiB a window; 95 % named; none named for noise"
WORLDS = (2, 8, 64, 1024)
WINDOWS = 20
LATE_PHASES = ("data_wait", "forward", "backward", "optimizer")


def measure(options: Options) -> Table:
    """One row for each number of ranks."""
    runs = options.repeats(100, 5)
    table = Table(TITLE, COLUMNS)
    for world in options.cases(WORLDS):
        say(f"  {world} ranks")
        took_ms, size = _cost(world)
        shares = [as_percent(_named(world, late_ms, runs)) for late_ms in (20.0, 5.0, 6.0)]
        false = sum(any(event.late for event in Planted(world).events(WINDOWS, seed)) for seed in range(runs))
        table.add(f"{world:,}", f"{took_ms:.1f} ms", f"{size:,} bytes", *shares, str(false), str(runs))
    table.note(TARGETS)
    return table


def _cost(world: int) -> tuple[float, int]:
    """(median CPU milliseconds of a window once the judgement is under way, bytes of its event)."""
    planted = Planted(world, late=(world // 2,), late_ms=20.0)
    comparison, times = planted.comparison(), []
    for window in planted.windows(2 * WINDOWS, 1):
        begin = time.process_time()
        (event,) = compared(comparison, [window])
        times.append(time.process_time() - begin)
    return median(times[WINDOWS:]) * 1e3, len(event.to_json(time.time()))


def _named(world: int, late_ms: float, runs: int) -> float:
    """The share of runs in which the planted rank and phase are named."""
    right = 0
    for seed in range(runs):
        rng = random.Random(seed)
        rank, phase = rng.randrange(world), rng.choice(LATE_PHASES)
        right += named(Planted(world, (rank,), late_ms, phase).events(WINDOWS, seed)) == (rank, phase)
    return right / runs

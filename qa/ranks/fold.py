"""What several ranks cost the one that shows them, and how often a planted straggler is named. Simulated windows.

The noise of a rank's step is 1 to 3 % from window to window, its share of lasting differences 0.4 %. In a tenth of the
windows one rank is 50 ms longer, and the first window is four times as long.
"""

from __future__ import annotations

import random
import time
from statistics import median

from benchmarks.common import Options, Table, as_percent, say

from .simulated import Planted, compared, named

TITLE = "ranks_fold: comparison and judgement of all ranks (steps of 75 ms, 20 windows)"
COLUMNS = (
    "ranks",
    "CPU time",
    "recorded",
    "20 ms late named",
    "5 ms",
    "6 ms (8 %)",
    "named for noise",
    "runs",
)
TARGETS = "targets: at most 25 ms and 2 KiB a window; 95 % named; none named for noise"
WORLDS = (2, 8, 64, 1024)
WINDOWS = 20
PHASES = ("data_wait", "forward", "backward", "optimizer")


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
        rank, phase = rng.randrange(world), rng.choice(PHASES)
        right += named(Planted(world, (rank,), late_ms, phase).events(WINDOWS, seed)) == (rank, phase)
    return right / runs

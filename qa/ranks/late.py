"""Plants a slow rank into real runs of two ranks: are rank and phase named at the end, and none without one?

Each case is `ndd-console train --ranks 2` of `qa/scripts/late_rank.py` on this machine. The sum of all phases,
exchange and skew is also compared with a second clock: the script writes when its steps end.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Options, Table, say
from benchmarks.engine import read_events

from ndd_engine.record.events import PHASES, RanksEvent
from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir
from qa.console import output, sets_of

TITLE = "ranks_late: one of two ranks is slow (about 75 ms a step)"
COLUMNS = ("case", "named", "later", "at most", "code", "phases and waiting / second clock", "")
FOLDER = Path(__file__).parents[1] / "scripts"
STRATEGIES = ("ddp", "fsdp2")
# Where a fault shows that is no phase: collections of Python run in forward, and on a shared core the largest phase
# grows most.
SHOWN = {"garbage": "forward", "core": "backward"}
# By how much the sum may differ from the second clock.
CLOSE = 0.005


@dataclass(frozen=True)
class Planted:
    """What is planted. phase: as in late_rank.factory; "" for nothing."""

    strategy: str
    rank: int = 0
    phase: str = ""
    ms: float = 0.0

    @property
    def name(self) -> str:
        """As a row calls it."""
        if not self.phase:
            return f"{self.strategy}: nothing"
        amount = f" {self.ms:g} ms" if self.ms else ""
        return f"{self.strategy}: {self.phase}{amount} on rank {self.rank}"


def cases(quick: bool) -> list[Planted]:
    """Those with a slow rank."""
    phases = ("data_wait", "forward", "backward", "optimizer")
    if quick:
        return [Planted("ddp", 1, "data_wait", 20.0), Planted("fsdp2", 0, "backward", 20.0)]
    found = [Planted("ddp", rank, phase, ms) for phase in phases for ms in (20.0, 5.0) for rank in (0, 1)]
    found += [Planted("fsdp2", rank, phase, 20.0) for phase in phases for rank in (0, 1)]
    found += [Planted("fsdp2", rank, phase, 5.0) for phase in phases for rank in (0, 1)]
    for strategy in STRATEGIES:
        for rank in (0, 1):
            found += [Planted(strategy, rank, "garbage", 20.0), Planted(strategy, rank, "core")]
    return found


def measure(options: Options) -> list[Table]:
    """All cases; --quick: two, and two without a slow rank."""
    seconds = options.seconds(20, 10, least=1.5)
    table, right, chosen = Table(TITLE, COLUMNS), 0, options.cases(cases(options.quick))
    sums: list[float | None] = []
    for case in chosen:
        row, named, closed = _row(case, seconds)
        good = named == (case.rank, SHOWN.get(case.phase, case.phase))
        right += good
        sums.append(closed)
        table.add(*row, "" if good else "WRONG")
    table.note(f"rank and phase right: {right} of {len(chosen)}; target: 95 %")
    near = sum(value is not None and abs(value - 1) <= CLOSE for value in sums)
    table.note(f"sum within {CLOSE:.1%} of the second clock: {near} of {len(sums)}; target: all")
    balanced = Table("no slow rank", COLUMNS)
    false, strategies = 0, options.cases(STRATEGIES)
    count = options.repeats(10, 1, least=0)  # for each strategy
    for strategy in strategies:
        for _ in range(count):
            row, named, _ = _row(Planted(strategy), seconds)
            false += named is not None
            balanced.add(*row, "" if named is None else "WRONG")
    balanced.note(f"named at the end: {false} of {count * len(strategies)}; target: none")
    return [table, balanced]


def _row(case: Planted, seconds: float) -> tuple[tuple[str, ...], tuple[int, str] | None, float | None]:
    """(cells of a row, the rank and phase named at the end, the sum of the figures by the second clock)."""
    say(f"ranks_late: {case.name}")
    with tempfile.TemporaryDirectory(prefix="ndd-late-") as folder:
        clocks = Path(folder) / "clocks"
        clocks.mkdir()
        run = _train(case, Path(folder), seconds, clocks)
        state = load_state(run)
        ranks = state.snapshot().ranks
        if ranks is None:
            raise RuntimeError(f"no windows of all ranks: {(run.console_log).read_text()[-1000:]}")
        windows = [event for _, event in read_events(run.events) if isinstance(event, RanksEvent)]
        ends = [[int(line) for line in path.read_text().splitlines()] for path in sorted(clocks.iterdir())]
        late, closed = ranks.late, by_second_clock(windows, ends)
    shown = "n/a" if closed is None else f"{closed:.2%}"
    if late is None:
        return (case.name, "none", "", "", "", shown), None, closed
    return (
        case.name, f"rank {late['rank']}, {late['phase']}", f"+{late['late_ns'] / 1e6:.1f} ms",
        f"{late['ceiling']:.2f}x", late["where"] or "", shown,
    ), (late["rank"], late["phase"]), closed  # fmt: skip


def _train(case: Planted, folder: Path, seconds: float, clocks: Path) -> RunDir:
    sets = (
        "run.name=it", "run.threads=1", "batch.micro=128", "evaluate.every_epochs=0", "evaluate.at_end=false",
        "checkpoint.every_epochs=0", "checkpoint.at_end=false", "log.window_s=0.5", "log.profile_every_s=5",
        f"parallel.strategy={case.strategy}", f"run.max_steps={seconds * 12:.0f}",
    )  # fmt: skip
    planted = {"LATE_RANK": str(case.rank), "LATE_PHASE": case.phase, "LATE_MS": f"{case.ms:g}"}
    planted["LATE_CLOCKS"] = str(clocks)
    words = ("train", "--headless", "--ranks", "2", "--workload", "late_rank:factory", *sets_of(*sets))
    output(FOLDER, "--runs", str(folder), *words, **planted)
    return RunDir(folder / "it")


def by_second_clock(windows: Sequence[RanksEvent], ends: Sequence[Sequence[int]]) -> float | None:
    """Phases, exchange and skew of all windows, over the time that the same steps took by another clock.

    ends: of each rank, nanoseconds at which its first, second, … step ended. None if no window has only whole steps.
    The wall time of a window is no such check: its `other` is what the phases leave of it.
    """
    parts = took = 0.0
    done = 0
    for window in windows:
        begin, done = done, window.step
        # Not of the first step, which the clock sees the end of only.
        if not begin or done - begin != window.steps or any(len(rank) < done for rank in ends):
            continue
        took += statistics.mean(rank[done - 1] - rank[begin - 1] for rank in ends)
        phases = sum(column[2] for name, column in window.columns_us.items() if name in PHASES)
        parts += phases * 1e3 * window.steps + window.exchange_ns + window.skew_ns
    return parts / took if took else None

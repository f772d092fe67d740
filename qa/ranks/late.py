"""Plants a slow rank into real runs of two ranks: are rank and phase named at the end, and none without one?

Each case is `ndd-console train --ranks 2` of `qa/scripts/late_rank.py` on this machine. The sum of all phases,
exchange and skew is also compared with the wall clock.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Options, Table, say
from benchmarks.engine import read_events

from ndd_engine.record.events import PHASES, RanksEvent
from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir
from qa.console import output, sets_of

TITLE = "ranks_late: one of two ranks is slow (about 75 ms a step)"
COLUMNS = ("case", "named", "later", "at most", "code", "phases and waiting / wall", "")
FOLDER = Path(__file__).parents[1] / "scripts"
STRATEGIES = ("ddp", "fsdp2")


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
    found += [Planted("ddp", 1, "garbage", 20.0), Planted("ddp", 1, "core")]
    found += [Planted("fsdp2", 1, phase, 20.0) for phase in phases]
    return found + [Planted("fsdp2", 0, phase, 5.0) for phase in phases]


def measure(options: Options) -> list[Table]:
    """All cases; --quick: two, and two without a slow rank."""
    seconds = options.seconds(20, 10, least=1.5)
    table, right, chosen = Table(TITLE, COLUMNS), 0, options.cases(cases(options.quick))
    for case in chosen:
        row, named = _row(case, seconds)
        expected = "forward" if case.phase == "garbage" else case.phase
        good = named is not None and named[0] == case.rank and (case.phase == "core" or named[1] == expected)
        right += good
        table.add(*row, "" if good else "WRONG")
    table.note(f"rank and phase right: {right} of {len(chosen)}; target: 95 %")
    balanced = Table("no slow rank", COLUMNS)
    false, strategies = 0, options.cases(STRATEGIES)
    count = options.repeats(10, 1, least=0)  # for each strategy
    for strategy in strategies:
        for _ in range(count):
            row, named = _row(Planted(strategy), seconds)
            false += named is not None
            balanced.add(*row, "" if named is None else "WRONG")
    balanced.note(f"named at the end: {false} of {count * len(strategies)}; target: none")
    return [table, balanced]


def _row(case: Planted, seconds: float) -> tuple[tuple[str, ...], tuple[int, str] | None]:
    """(cells of a row, the rank and phase named at the end)."""
    say(f"ranks_late: {case.name}")
    with tempfile.TemporaryDirectory(prefix="ndd-late-") as folder:
        run = _train(case, Path(folder), seconds)
        state = load_state(run)
        ranks = state.snapshot().ranks
        if ranks is None:
            raise RuntimeError(f"no windows of all ranks: {(run.console_log).read_text()[-1000:]}")
        late, closed = ranks.late, _closed(run)
    if late is None:
        return (case.name, "none", "", "", "", closed), None
    return (
        case.name, f"rank {late['rank']}, {late['phase']}", f"+{late['late_ns'] / 1e6:.1f} ms",
        f"{late['ceiling']:.2f}x", late["where"] or "", closed,
    ), (late["rank"], late["phase"])  # fmt: skip


def _train(case: Planted, folder: Path, seconds: float) -> RunDir:
    sets = (
        "run.name=it", "run.threads=1", "batch.micro=128", "evaluate.every_epochs=0", "evaluate.at_end=false",
        "checkpoint.every_epochs=0", "checkpoint.at_end=false", "log.window_s=0.5", "log.profile_every_s=5",
        f"parallel.strategy={case.strategy}", f"run.max_steps={seconds * 12:.0f}",
    )  # fmt: skip
    planted = {"LATE_RANK": str(case.rank), "LATE_PHASE": case.phase, "LATE_MS": f"{case.ms:g}"}
    words = ("train", "--headless", "--ranks", "2", "--workload", "late_rank:factory", *sets_of(*sets))
    output(FOLDER, "--runs", str(folder), *words, **planted)
    return RunDir(folder / "it")


def _closed(run: RunDir) -> str:
    """The part of the ranks' wall time that their phases, exchange and skew make up, over the whole run."""
    parts = wall = 0.0
    for _, event in read_events(run.events):
        if isinstance(event, RanksEvent) and event.steps:
            wall += event.wall_ns
            phases = sum(column[2] for name, column in event.columns_us.items() if name in PHASES)
            parts += phases * 1e3 * event.steps + event.exchange_ns + event.skew_ns
    return f"{parts / wall:.2%}" if wall else "n/a"

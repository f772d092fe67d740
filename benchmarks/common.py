"""Shared by all benchmarks: paired measurement, statistics, environment, targets and tables."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from ndd_engine.hardware.detect import detect
from ndd_engine.hardware.load import LoadWatch

# Maximum load by other processes, in cores, during a block; pairs above it are excluded.
FOREIGN_LIMIT = 0.10
# With fewer undisturbed pairs than this, all are used: a rough result is better than none.
FEWEST_PAIRS = 5
SMOKE_S = 0.6
SMALL = ("workload.samples=2000", "workload.hidden=[16]", "batch.micro=64", "run.threads=1")
RESULTS = Path(__file__).parent / "results"
_RESAMPLES = 4000
T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """How to measure. effort: "full", "quick" (rough results within a minute) or "smoke" (does it run at all?).

    The others are options of the command, see `__main__`; empty ones are not given.
    """

    effort: str = "full"
    device: str = "cpu"
    pairs: int | None = None
    real: int = 0
    keep: str = ""
    traceml: str = ""
    only: Sequence[str] = ()
    python: str = ""

    def wanted(self, cases: Iterable[T], name: Callable[[T], str]) -> list[T]:
        """The cases to measure: those of --only, or all; with smoke the first of them."""
        return self.cases(case for case in cases if not self.only or name(case) in self.only)

    # What smoke means: the first case, once, in blocks of SMOKE_S seconds.

    @property
    def quick(self) -> bool:
        """Whether rough results are enough; also with smoke."""
        return self.effort != "full"

    @property
    def smoke(self) -> bool:
        """Whether no result is needed."""
        return self.effort == "smoke"

    def cases(self, cases: Iterable[T]) -> list[T]:
        """The cases to measure: all, or the first."""
        return list(itertools.islice(cases, 1 if self.smoke else None))

    def small(self, workload: str) -> tuple[str, ...]:
        """With smoke, settings of the first workload that leave little to do."""
        return SMALL if self.smoke and workload == "eeg" else ()

    def repeats(self, full: int, quick: int, least: int = 1) -> int:
        """How often to measure. least: below which there is no result."""
        return {"full": full, "quick": quick, "smoke": least}[self.effort]

    def seconds(self, full: float, quick: float, least: float = SMOKE_S) -> float:
        """How long to measure. least: below which there is no result."""
        return {"full": full, "quick": quick, "smoke": least}[self.effort]


# Statistics.


@dataclass(frozen=True)
class Summary:
    """Statistics of a sample. interval: 95 % bootstrap CI of the median, None below 5 values."""

    n: int
    low: float
    median: float
    high: float
    interval: tuple[float, float] | None


def summarise(values: Sequence[float]) -> Summary:
    """Deterministic statistics. Raises ValueError without values."""
    if not values:
        raise ValueError("nothing was measured")
    interval = None
    if len(values) >= 5:
        generator = random.Random(0)
        # The percentile method commutes with the logarithm, so this is also the interval of log-ratios.
        medians = sorted(
            statistics.median(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES)
        )
        interval = (medians[int(_RESAMPLES * 0.025)], medians[int(_RESAMPLES * 0.975)])
    return Summary(len(values), min(values), statistics.median(values), max(values), interval)


def quantile(values: Sequence[float], share: float) -> float:
    """The `share` quantile (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(max(-int(-len(ordered) * share // 1), 1), len(ordered)) - 1]


PARITY = (
    "first losses: the largest relative difference. If the first step agrees and later ones drift apart, the cause is "
    "rounding: Adam's first steps normalise a gradient by its own magnitude"
)


def parity(left: Sequence[float], right: Sequence[float]) -> str:
    """Compares losses by step: "identical", or the relative difference of the first step and the largest one.

    Raises ValueError for unequal numbers of losses, or none.
    """
    if not left:
        raise ValueError("no losses to compare")
    found = [abs(a - b) / max(abs(a), 1e-12) for a, b in zip(left, right, strict=True)]
    return f"first {found[0]:.0e}, all {max(found):.0e}" if max(found) else "identical"


# Paired measurement.


@dataclass(frozen=True)
class Ratio:
    """Subject over baseline of two neighbouring blocks. foreign: the larger of cores used by other processes.

    rates: work per second of baseline and subject.
    """

    value: float
    foreign: float
    rates: tuple[float, float] = (math.nan, math.nan)


def paired(
    baseline: Callable[[], float], subject: Callable[[], float], pairs: int, limit_s: float
) -> list[Ratio]:
    """Measure in the order A B B A A B B A …; each callable runs one block and returns its rate.

    Measures up to `pairs` pairs, and at least 2; fewer than `pairs` if they do not fit into limit_s seconds.

    Comparing neighbours cancels slow drifts (other load, clock rates); alternating the order cancels drifts within a
    pair over the pairs.
    """
    watch = LoadWatch()

    def block(measure: Callable[[], float]) -> tuple[float, float]:
        watch.restart()
        return measure(), watch.foreign()

    ratios: list[Ratio] = []
    deadline = time.perf_counter() + limit_s
    for index in range(pairs):
        if index >= 2 and index % 2 == 0 and time.perf_counter() > deadline:
            break
        order = (baseline, subject) if index % 2 == 0 else (subject, baseline)
        first, second = block(order[0]), block(order[1])
        a, b = (first[0], second[0]) if index % 2 == 0 else (second[0], first[0])
        ratios.append(Ratio(b / a, max(first[1], second[1]), (a, b)))
    return ratios


def undisturbed(ratios: Sequence[Ratio]) -> tuple[list[float], str]:
    """The ratios of undisturbed pairs, and a note on excluded ones."""
    kept = [ratio.value for ratio in ratios if ratio.foreign <= FOREIGN_LIMIT]
    if len(kept) == len(ratios):
        return kept, ""
    count = f"{len(ratios) - len(kept)} of {len(ratios)} pairs"
    busy = f"used over {FOREIGN_LIMIT:.0%} of a core"
    if len(kept) >= FEWEST_PAIRS:
        return kept, f"{count} excluded: other processes {busy}"
    why = "too few are left to exclude them: repeat on a quiet machine"
    return [ratio.value for ratio in ratios], f"other processes {busy} in {count}; {why}"


@dataclass(frozen=True)
class Compared:
    """The ratios of undisturbed pairs, a note on excluded ones, and the median rates of both sides."""

    values: list[float]
    note: str
    baseline: float
    subject: float

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def compared(
    baseline: Callable[[], float], subject: Callable[[], float], pairs: int, limit_s: float
) -> Compared:
    """Measure in pairs, see `paired`, and keep those that nothing disturbed."""
    ratios = paired(baseline, subject, pairs, limit_s)
    rates = (statistics.median(ratio.rates[side] for ratio in ratios) for side in (0, 1))
    return Compared(*undisturbed(ratios), *rates)


def whole_process(argv: Sequence[str]) -> tuple[float, int]:
    """Seconds of a process from start to end, and its bytes at the peak. Raises RuntimeError if it fails."""
    begin = time.perf_counter()
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    seconds, child.returncode = time.perf_counter() - begin, os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{shlex.join(argv)} ended with status {child.returncode}")
    return seconds, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# The machine and its other load.


class Environment:
    """The environment of a benchmark: create it before, and read its lines afterwards."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._before = _load_average()
        self._date = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._watch = LoadWatch()

    def lines(self) -> list[str]:
        """Date, machine, versions, load and the command."""
        foreign = self._watch.foreign()
        return [
            f"date      {self._date}",
            f"machine   {machine()}",
            f"software  {software()}",
            f"load      average {self._before} before, {_load_average()} after; other processes used "
            f"{foreign:.2f} cores on average",
            f"command   {self._command}",
        ]


def machine() -> str:
    """CPU, usable cores and GPU, in one line."""
    found = detect(use_torch=False)
    cores = f"{found.host.usable_cpus:g} of {found.host.logical_cores} cores usable"
    gpu = found.gpus[0].name if found.gpus else "no CUDA GPU"
    return f"{found.host.cpu or platform.machine()}, {cores}, {gpu}"


def machine_slug() -> str:
    """The machine as part of a file name."""
    found = detect(use_torch=False)
    name = f"{found.gpus[0].name if found.gpus else found.host.cpu} {found.host.logical_cores} cores"
    return "-".join("".join(char if char.isalnum() else " " for char in name.lower()).split())


def software() -> str:
    """Versions that affect speed."""
    return ", ".join(
        [f"Python {platform.python_version()}"] + [f"{name} {version_of(name)}" for name in _PACKAGES]
    )


_PACKAGES = ("torch", "textual", "ndd-console")


def command_line() -> str:
    """The command line of this process."""
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _load_average() -> str:
    return f"{os.getloadavg()[0]:.2f}"


# Targets and tables.


@dataclass(frozen=True)
class Target:
    """The target of a figure. The verdict is printed, and does not affect the exit status."""

    limit: float
    at_least: bool = False

    def cells(self, value: float, shown: Callable[[float], str]) -> tuple[str, str]:
        """(the target, reached or not) for a table."""
        reached = value >= self.limit if self.at_least else value < self.limit
        sign = "≥" if self.at_least else "<"
        return f"{sign} {shown(self.limit)}", "reached" if reached else "not reached"


Cells = tuple[str, ...]


@dataclass
class Table:
    """Rows of text under columns, and notes below. The first column is of words, the others of figures.

    markdown: whether it is printed as Markdown, to be copied.
    """

    title: str
    columns: Cells
    rows: list[Cells] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    markdown: bool = False

    def add(self, *cells: str) -> None:
        """One row; missing cells at its end are empty."""
        self.rows.append(cells + ("",) * (len(self.columns) - len(cells)))

    def target(self, name: str, value: float, limit: float, shown: Callable[[float], str]) -> None:
        """A row of a table with the columns TARGETS: a figure that may be as large as its limit."""
        self.add(name, shown(value), f"≤ {shown(limit)}", "reached" if value <= limit else "NOT REACHED")

    def note(self, text: str) -> None:
        """A line below the table; empty text is left out."""
        if text and text not in self.notes:
            self.notes.append(text)

    def lines(self) -> list[str]:
        """Aligned lines, without empty columns; of Markdown with all of them."""
        if self.markdown:
            grid = [self.columns, ("---",) * len(self.columns), *self.rows]
            return [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in grid] + self._notes()
        used = [
            index for index in range(len(self.columns)) if index == 0 or any(row[index] for row in self.rows)
        ]
        grid = [[row[index] for index in used] for row in (self.columns, *self.rows)]
        widths = [max(len(row[column]) for row in grid) for column in range(len(used))]
        out = []
        for row in grid:
            figures = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            out.append("  ".join([row[0].ljust(widths[0]), *figures]).rstrip())
        out.insert(1, "  ".join("-" * width for width in widths))
        return out + self._notes()

    def _notes(self) -> list[str]:
        return [f"* {note}" for note in self.notes]


TARGETS: Cells = ("figure", "found", "target", "")
STATISTICS: Cells = ("n", "min", "median", "max", "95 % CI of the median", "target", "by the median")


def statistics_cells(
    values: Sequence[float], shown: Callable[[float], str], target: Target | None = None
) -> Cells:
    """Cells for the columns STATISTICS; the target applies to the median."""
    if not values:
        return ("0",)
    found = summarise(values)
    interval = "" if found.interval is None else " … ".join(shown(value) for value in found.interval)
    cells: Cells = (str(found.n), shown(found.low), shown(found.median), shown(found.high), interval)
    return cells + (target.cells(found.median, shown) if target is not None else ())


def report(tables: Table | Sequence[Table], environment: Environment) -> str:
    """The printed tables: title, environment, rows, notes; further tables without the environment."""
    first, *others = [tables] if isinstance(tables, Table) else tables
    lines = [f"== {first.title}", *environment.lines(), "", *first.lines(), ""]
    for table in others:
        lines += [f"-- {table.title}", "", *table.lines(), ""]
    return "\n".join(lines)


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """The option -o. name: as in the default file name."""
    parser.add_argument(
        "-o", nargs="?", const="", metavar="FILE", dest="output",
        help=f"also write the tables to FILE (default: benchmarks/results/<date>-<machine>-{name}.txt)",
    )  # fmt: skip


def write(text: str, output: str, name: str = "") -> None:
    """Write the tables to a file; to the default file for this name if output is empty."""
    path = Path(output or RESULTS / f"{time.strftime('%Y-%m-%d')}-{machine_slug()}-{name}.txt")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    say(f"wrote {path}")


def as_ratio(value: float) -> str:
    """0.9934"""
    return f"{value:.4f}"


def as_ms(value: float) -> str:
    """Milliseconds: 12.3"""
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}"


def as_seconds(value: float) -> str:
    """Seconds: 0.153"""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def as_count(value: float) -> str:
    """A whole number: 1,012"""
    return f"{value:,.0f}"


def as_percent(value: float) -> str:
    """A share as a percentage with three significant digits: 0.0123 %"""
    return f"{value * 100:.3g} %"


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def ignore(_stage: str | None) -> None:
    """Reports no progress of a child process."""

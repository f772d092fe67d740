"""Ten pipelines with a loader: how good is what a short run proposes, beside the best of all settings?

A script is observed with one worker. The first change that its findings propose is compared with the best cell of a
grid of settings, which the script measures without the console. Both are measured again in turns, since the best of
many measurements is too good.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common import Options, Table, say

from ndd_engine.text import percent
from qa.console import LIMIT_S, console, output, python_words
from qa.scripts.loader_grid import PIPELINES

TITLE = "grid: what a run proposes for its loader, beside the best of all settings"
COLUMNS = (
    "pipeline",
    "proposed",
    "predicted",
    "best of the grid",
    "cells",
    "proposed / best",
    "time / grid",
    "right",
)
SCRIPT = Path(__file__).parents[1] / "scripts" / "loader_grid.py"
ONLY = tuple(PIPELINES)
BASE = {"workers": 1}
# Seconds of a cell, and of the run that is observed.
CELL_S, RUN_S = 8.0, 12.0
# The part of the best that a proposal has to reach, and the part of the grid's time that it may take.
REACHED, TENTH = 0.95, 0.1
# Passes of more items are longer than a cell, in which a cache brings nothing.
SHORT = 1000
Settings = dict[str, Any]


def measure(options: Options) -> Table:
    """All pipelines; with --quick cells of 3 s, with --smoke two cells of the first pipeline."""
    table = Table(TITLE, COLUMNS)
    right = 0
    names = options.wanted(PIPELINES, str)
    for name in names:
        row, good = _judged(name, options)
        say(f"grid: {' | '.join(row)}")
        table.add(*row)
        right += good
    table.note(
        f"right: {right} of {len(names)}: {percent(REACHED)} of the best, in {percent(TENTH)} of the time"
    )
    table.note("time: of the run that is observed, over that of all cells, without their starts")
    return table


def cells(items: int) -> list[Settings]:
    """The settings of a grid, at most 40. items: of a pass."""
    found: list[Settings] = [{"workers": 0}]
    for workers, prefetch, in_order, persistent in product((1, 2, 3), (2, 8), (True, False), (True, False)):
        if in_order or workers > 1:  # one worker has no other order
            found.append(
                {"workers": workers, "prefetch": prefetch, "in_order": in_order, "persistent": persistent}
            )
    cached = ({"workers": workers, "cache": True, "persistent": True} for workers in range(4))
    return [*found, *cached] if items <= SHORT else found


def _judged(name: str, options: Options) -> tuple[tuple[str, ...], bool]:
    """(a row of the table, whether it is right)."""
    cell_s, run_s = options.seconds(CELL_S, 3.0, 0.4), options.seconds(RUN_S, 6.0, 3.0)
    sets, text = _proposed(name, run_s)
    grid = cells(PIPELINES[name].items)[: 2 if options.smoke else None]
    rates = _rates(name, cell_s, grid)
    best = grid[rates.index(max(rates))]
    chosen = {**BASE, **dict(_settings(sets))}
    again = _rates(name, cell_s, [best, chosen, chosen, best])
    part = 1.0 if chosen == best else mean(again[1:3]) / mean((again[0], again[3]))
    spent = run_s / (cell_s * len(grid))
    good = part >= REACHED and spent <= TENTH
    row = (
        name, " ".join(sets) or "nothing", text.rpartition("(predicted: ")[2].rstrip(")") if sets else "", _words(best),
        f"{len(grid)}", f"{part:.2f}", percent(spent), "yes" if good else "no",
    )  # fmt: skip
    return row, good


def _proposed(name: str, seconds: float) -> tuple[Sequence[str], str]:
    """The settings of the first change of the loader that a run proposes, and its text; () if there is none."""
    folder = Path(tempfile.mkdtemp(prefix="ndd-grid-"))
    try:
        shutil.copy(SCRIPT, folder)
        words = python_words(SCRIPT.name, name, f"{seconds:g}", json.dumps(BASE))
        done = console(folder, "run", "--headless", "--run", "it", "--", *words)
        if done.returncode:
            raise RuntimeError(f"{name}: status {done.returncode}: {done.stderr[-500:]}")
        findings = json.loads(output(folder, "report", "it", "--json"))["findings"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for change in (change for finding in findings for change in finding["changes"]):
        if change["sets"] and all(one.startswith("loader.") for one in change["sets"]):
            return change["sets"], change["text"]
    return (), ""


def _settings(sets: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """As the script has them: "loader.workers=2" is ("workers", 2)."""
    for one in sets:
        key, _, value = one.removeprefix("loader.").partition("=")
        if value != "none":
            yield key, json.loads(value)


def _rates(name: str, seconds: float, grid: Sequence[Settings]) -> list[float]:
    """Batches a second of each."""
    words = [sys.executable, str(SCRIPT), name, f"{seconds:g}", *map(json.dumps, grid)]
    limit_s = LIMIT_S + 2 * seconds * len(grid)
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=limit_s)
    return [float(line) for line in done.stdout.split()]


def _words(settings: Settings) -> str:
    return " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())

"""Planted pipelines with loader workers: is the function named that takes the time, and is its share right?

The functions of a pipeline measure themselves in the same run; so does the judge not depend on the machine. The twin of
a pipeline is level 0, where the training takes long and the workers have little to do.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Options, Table, say

from ndd_engine.record.file import load_state
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.worker_events import WorkersEvent
from ndd_engine.text import percent
from qa.console import console, python_words

TITLE = "workers: planted pipelines, judged by what their functions measured"
COLUMNS = (
    "pipeline",
    "level",
    "start",
    "first function",
    "share said",
    "measured",
    "points",
    "with",
    "right",
)
SCRIPT = Path(__file__).parents[1] / "scripts" / "pipelines.py"
METHODS = ("fork", "spawn", "forkserver")
SECONDS, QUICK_S = 12.0, 6.0
POINTS = 0.05
# Findings that accuse the loading of an innocent pipeline.
ACCUSED = (
    "data-wait", "slow-storage", "many-workers", "few-workers", "on-the-fly", "item-collate", "in-memory-workers",
)  # fmt: skip


@dataclass(frozen=True)
class Pipeline:
    """function: that is planted, "" where sending is. kinds: what it may be said to spend its time with."""

    name: str
    function: str
    levels: tuple[int, int]
    kinds: tuple[str, ...] = ("computes",)
    innocent: bool = False


PIPELINES = (
    Pipeline("decode", "Decode.work", (4, 16), innocent=True),
    Pipeline("regex", "Regex.work", (16, 60), innocent=True),
    Pipeline("archive", "Archive.work", (1, 4), ("computes", "storage"), innocent=True),
    Pipeline("rows", "Rows.work", (8, 30), innocent=True),
    Pipeline("documents", "Documents.work", (8, 30), innocent=True),
    Pipeline("crop", "Crop.work", (20, 80), innocent=True),
    Pipeline("lock", "Locked.work", (2, 8), ("lock", "sleeps"), innocent=True),
    Pipeline("sleep", "Sleeps.work", (2, 8), ("sleeps",), innocent=True),
    Pipeline("storage", "Stored.work", (2, 8), ("storage", "waits", "computes"), innocent=True),
    Pipeline("pickles", "", (2, 8)),
    Pipeline("shared", "joined", (4, 16), ("computes", "touches")),
    Pipeline("touch", "Touched.work", (4, 16), ("touches", "computes")),
    Pipeline("uneven", "Uneven.work", (2, 8), ("sleeps",)),
    Pipeline("compose", "Sort", (4, 16)),
    Pipeline("remote", "Remote.work", (2, 8), ("connection",), innocent=True),
)
ONLY = (*(pipeline.name for pipeline in PIPELINES), *METHODS)


def measure(options: Options) -> Table:
    """All pipelines, levels and start methods; with --quick the low level by fork, and no innocent ones.

    With --python, by fork only: one pass with another Python. --only also limits the start methods.
    """
    table = Table(TITLE, COLUMNS)
    right = runs = accused = innocents = 0
    methods = [method for method in METHODS if method in options.only] or METHODS
    if options.quick or options.python:
        methods = methods[:1]
    named = [pipeline for pipeline in PIPELINES if pipeline.name in options.only] or PIPELINES
    for pipeline in options.cases(named):
        for method in methods:
            for level in pipeline.levels[:1] if options.quick else pipeline.levels:
                row, good = _judged(pipeline, level, method, options)
                say(f"workers: {' | '.join(row)}")
                table.add(*row)
                runs, right = runs + 1, right + good
        if pipeline.innocent and "fork" in methods and not options.quick:
            row, good = _innocent(pipeline, options)
            say(f"workers: {' | '.join(row)}")
            table.add(*row)
            innocents, accused = innocents + 1, accused + (not good)
    table.note(f"right: {right} of {runs}: the function first, and its share within {percent(POINTS)}")
    if innocents:
        table.note(f"innocent pipelines that were accused: {accused} of {innocents}")
    return table


def _run(
    pipeline: Pipeline, level: int, method: str, options: Options
) -> tuple[WorkersEvent | None, Mapping[str, float], list[str]]:
    """What the workers told, what their functions measured, and causes and titles of the findings."""
    folder = Path(tempfile.mkdtemp(prefix="ndd-workers-"))
    try:
        shutil.copy(SCRIPT, folder)
        seconds = options.seconds(SECONDS, QUICK_S, QUICK_S)
        python = options.python or sys.executable
        words = python_words(SCRIPT.name, pipeline.name, str(level), method, str(seconds), python=python)
        done = console(folder, "run", "--headless", "--run", "it", "--", *words, TRUTH=str(folder))
        if done.returncode:
            raise RuntimeError(f"{pipeline.name}: status {done.returncode}: {done.stderr[-500:]}")
        truth: dict[str, float] = {}
        for path in folder.glob("truth-*.json"):
            for name, spent in json.loads(path.read_text()).items():
                truth[name] = truth.get(name, 0.0) + spent
        report = console(folder, "report", "it", "--json")
        found = [f"{one['cause']}: {one['title']}" for one in json.loads(report.stdout)["findings"]]
        return load_state(RunDir(folder / "runs" / "it")).snapshot().workers, truth, found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _judged(pipeline: Pipeline, level: int, method: str, options: Options) -> tuple[tuple[str, ...], bool]:
    """(a row of the table, whether it is right)."""
    told, truth, _ = _run(pipeline, level, method, options)
    head = pipeline.name, f"{level}", method
    if told is None:
        return (*head, "nothing was told", "", "", "", "", "no"), False
    if not pipeline.function:
        made = sum(one.batch_ns for one in told.workers)
        sent = sum(one.pickle_ns + one.send_ns for one in told.workers)
        part = sent / max(sent + made, 1.0)
        good = sent > 0.5 * made
        return (*head, "sending", percent(part), "", "", "", "yes" if good else "no"), good
    share = truth.get(pipeline.function, 0.0) / max(truth.get("ALL", 0.0), 1e-9)
    if not told.functions:
        return (*head, "no profile", "", percent(share), "", "", "no"), False
    rows = {_function(row[2]): row for row in told.functions}
    first = _function(told.functions[0][2])
    row = rows.get(pipeline.function)
    said = row[4] if row is not None else 0.0
    kind = max(row[6], key=row[6].__getitem__, default="") if row is not None else ""
    # The share of all: what waits between two items is in neither.
    good = first == pipeline.function and abs(said - share) <= POINTS and kind in pipeline.kinds
    points = f"{100 * (said - share):+.1f}"
    return (*head, first, percent(said), percent(share), points, kind, "yes" if good else "no"), good


def _innocent(pipeline: Pipeline, options: Options) -> tuple[tuple[str, ...], bool]:
    _, _, found = _run(pipeline, 0, "fork", options)
    accused = [text for text in found if text.partition(":")[0] in ACCUSED]
    row = (pipeline.name, "0", "fork", accused[0] if accused else "not accused", "", "", "", "")
    return (*row, "no" if accused else "yes"), not accused


def _function(name: str) -> str:
    """As the pipeline names it: a class of transforms by itself."""
    return name.removesuffix(".__call__").removesuffix(".forward")

"""Damaged records: one edited value, flipped bytes, cut ends, lines twice, in another order or of nonsense."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.report.report_help import whole_life
from tests.ui.fakes import MEASURED, workers_event

from ndd_console.jobs.run_sources import HomeFolder
from ndd_console.output.run_log import RunProgress
from ndd_console.render import html, text
from ndd_console.render.rows import block_rows
from ndd_console.render.text import lines
from ndd_console.report.model import load
from ndd_console.report.sections import page
from ndd_console.screens.home import entries
from ndd_console.screens.pages import own_values_lines, ranks_lines, settings_lines
from ndd_console.view.live import LiveState, live_rows
from ndd_console.view.rows import fit, width_of
from ndd_console.words.comparison import two_compared
from ndd_console.words.finding import Diagnosis, diagnosis_blocks
from ndd_console.words.run import summary
from ndd_engine.config import read
from ndd_engine.errors import NddError, UsageError
from ndd_engine.record.events import (
    DeathEvent,
    DescriptorsEvent,
    EndEvent,
    Event,
    Holder,
    HoldersEvent,
    MemoryEvent,
    NotFiniteEvent,
    SampleEvent,
    ScalarsEvent,
    StacksEvent,
    StallEvent,
    TextsEvent,
    WindowEvent,
    parse,
    writable,
)
from ndd_engine.record.figures import figures
from ndd_engine.record.file import RunReader, load_state
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.snapshot import Snapshot
from ndd_engine.record.state import RunState
from ndd_engine.run.run import Run
from ndd_engine.text import printable
from ndd_engine.train.request import RunRequest, check_resume
from ndd_engine.train.training_run import TrainingRun
from ndd_engine.trial.compare import compare
from qa.hostile._ended import clean, said
from qa.hostile._strange import NONSENSE, damaged
from qa.hostile.attempts import Attempt, Kind
from qa.ranks.simulated import Planted

# The logs to damage: of a run that was trained here, and of a run with every type of event.

SETS = (
    "workload.name=eeg", "workload.samples=400", "workload.channels=2", "workload.hidden=[8]", "batch.sequence=8",
    "batch.micro=16", "run.threads=1", "log.every_steps=1", "log.window_s=0", "run.max_steps=30",
    "evaluate.every_steps=10", "checkpoint.every_steps=10", "run.device=cpu",
)  # fmt: skip
# Of the events that are written all the time, about so many are kept: long logs take long to read 10,000 times.
_KEPT = 10
_FREQUENT = (WindowEvent, SampleEvent, MemoryEvent)


def trained(folder: Path) -> RunDir:
    """A run that was trained, evaluated, saved and captured."""
    run = Run.open(TrainingRun(RunRequest(read(sets=SETS), folder)))
    try:
        run.control.request("kernels")
        run.execute()
    finally:
        run.close()
    return _thinned(run.directory)


def written(folder: Path) -> RunDir:
    """A run on a GPU with every type of event, from events made by hand."""
    run = RunDir(folder / "written")
    run.path.mkdir(parents=True)
    life = whole_life()
    t, end = life[-1]
    assert isinstance(end, EndEvent)
    life[-1:] = [*((t, event) for event in _rarer(end.step)), (t, end)]
    run.events.write_text("".join(event.to_json(t) + "\n" for t, event in life))
    return _thinned(run)


def _rarer(step: int) -> Iterator[Event]:
    """One of each type that a run without trouble, and of one rank, does not have."""
    ranks = Planted(4, late=(1,), late_ms=20.0, places=("data.py:88 tokenise",))
    for event in ranks.events(4):
        yield replace(event, step=step)
    yield next(ranks.windows(1, 1))[0]
    yield from (MEASURED["loader"], MEASURED["baseline"])
    yield StacksEvent(step, 3, [("forward", "/home/me/net.py", 12, "Net.forward", 3, 2)])
    yield ScalarsEvent(step, {"own/recall": 0.5})
    yield TextsEvent(step, ["a generated text"])
    held = Holder(
        "list", 500, 200, 2 << 20, "tensor 512 x 1024", False, "local", "history", "train", "/home/me/train.py", 10,
        at=("/home/me/train.py", 31),
    )  # fmt: skip
    yield HoldersEvent(step, 100, 10**8, [held], [("512 x 1024 float32", 240, 480 << 20)])
    yield DescriptorsEvent(step, 700, 1024, {"file": 20}, "/tmp/part-N", "train.py:9")
    yield replace(workers_event(), step=step)
    yield NotFiniteEvent(
        step, "output", "block.3", "Linear", True, False, 0.5, "column", [3], 1, 8, 1e3, 0, 0, "/home/me/train.py", 9,
        "main",
    )  # fmt: skip
    yield DeathEvent(step, 4711, "loader worker 1", "SIGKILL", 3 << 30, 1 << 20, 1)
    yield StallEvent(
        step, 9.0, "storage", "no progress for 9 s", "check the disk", "a.py:3", ["the main process"]
    )


def _thinned(run: RunDir) -> RunDir:
    """Keep some of the frequent events, and write a fold event in the middle and one near the end."""
    items = [item for line in run.events.read_bytes().splitlines() if (item := parse(line)) is not None]
    totals, counts = Counter(type(event) for _, event in items), Counter[type]()
    kept: list[tuple[float, Event]] = []
    for t, event in items:
        kind = type(event)
        counts[kind] += 1
        if kind not in _FREQUENT or counts[kind] % max(totals[kind] // _KEPT, 1) == 0:
            kept.append((t, event))
    state = RunState()
    lines: list[str] = []
    for index, (t, event) in enumerate(kept):
        state.fold(t, event)
        lines.append(event.to_json(t))
        if index in (len(kept) // 2, len(kept) - 4):
            lines.append(state.to_line(t))
    run.events.write_text("\n".join(lines) + "\n")
    return run


# Damaging them.

_SIZES = ((80, 24), (40, 12), (160, 50), (120, 30))


@dataclass(frozen=True)
class _Log:
    """A log to damage. bodies: its parsed lines."""

    run: RunDir
    lines: tuple[bytes, ...]
    bodies: tuple[Any, ...]


def _log(run: RunDir) -> _Log:
    lines = tuple(run.events.read_bytes().splitlines())
    return _Log(run, lines, tuple(map(json.loads, lines)))


def _edited(rng: random.Random, log: _Log) -> tuple[str, list[bytes]]:
    """One value of one line of a random type is damaged."""
    kind = rng.choice(sorted({body["type"] for body in log.bodies}))
    index = rng.choice([place for place, body in enumerate(log.bodies) if body["type"] == kind])
    lines = list(log.lines)
    done, lines[index] = damaged(rng, log.bodies[index])
    return f"{log.run.name}: line {index} ({kind}) {done}", lines


def _flipped(rng: random.Random, log: _Log) -> tuple[str, list[bytes]]:
    data = bytearray(b"\n".join(log.lines))
    places = [rng.randrange(len(data)) for _ in range(rng.choice((1, 1, 3, 30)))]
    for place in places:
        data[place] ^= 1 << rng.randrange(8)
    return f"{log.run.name}: bits of bytes {places[:5]} flipped", bytes(data).split(b"\n")


def _cut(rng: random.Random, log: _Log) -> tuple[str, list[bytes]]:
    data = b"\n".join(log.lines)
    begin = rng.choice((0, 0, rng.randrange(len(data))))
    end = rng.randrange(begin, len(data))
    return f"{log.run.name}: bytes {begin} to {end} alone", data[begin:end].split(b"\n")


def _reordered(rng: random.Random, log: _Log) -> tuple[str, list[bytes]]:
    lines = list(log.lines)
    what = rng.choice(("twice", "swapped", "shuffled", "reversed", "removed", "one type"))
    first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
    if what == "twice":
        lines.insert(second, lines[first])
    elif what == "swapped":
        lines[first], lines[second] = lines[second], lines[first]
    elif what == "shuffled":
        rng.shuffle(lines)
    elif what == "reversed":
        lines.reverse()
    elif what == "removed":
        del lines[min(first, second) : max(first, second)]
    else:
        kind = log.bodies[first]["type"]
        lines = [line for line, body in zip(lines, log.bodies, strict=True) if body["type"] == kind]
    return f"{log.run.name}: lines {what} ({first}, {second})", lines


def _nonsense(rng: random.Random, log: _Log) -> tuple[str, list[bytes]]:
    lines = list(log.lines)
    for _ in range(rng.choice((1, 1, 5))):
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(NONSENSE))
    return f"{log.run.name}: nonsense inserted", lines


def _many_edits(rng: random.Random, log: _Log) -> tuple[str, list[bytes]]:
    """Several values in several lines."""
    lines = log.lines
    names = []
    for _ in range(rng.choice((2, 5))):
        name, found = _edited(rng, log)
        names.append(name)
        lines = tuple(
            new if new != old else line for new, old, line in zip(found, log.lines, lines, strict=True)
        )
    return "; ".join(names), list(lines)


_WAYS = (*[_edited] * 14, _many_edits, _flipped, _flipped, _cut, _reordered, _nonsense)


def attempts(rng: random.Random, folder: Path) -> Iterator[Attempt]:
    shutil.rmtree(folder / "runs", ignore_errors=True)
    logs = [_log(trained(folder / "runs")), _log(written(folder / "runs"))]
    bad = RunDir(folder / "runs" / "bad")
    bad.path.mkdir()
    index = 0
    while True:
        # A generator of its own: an attempt draws as many numbers as the lengths of the logs need.
        own = random.Random(rng.getrandbits(64))
        log, size = own.choice(logs), own.choice(_SIZES)
        name, lines = own.choice(_WAYS)(own, log)
        yield Attempt(name, partial(_check, bad, log, lines, size, index))
        index += 1


def _check(bad: RunDir, log: _Log, lines: list[bytes], size: tuple[int, int], index: int) -> None:
    bad.events.write_bytes(b"\n".join(lines) + b"\n")
    snapshot = _followed(bad)
    _shown(snapshot, size)
    json.dumps(writable(load(bad).to_json()), allow_nan=False)
    # The slow readers read some of the records.
    if index % 3 == 0:
        _listed(bad, log)
    if index % 8 == 1:
        _page(bad)
    if index % 30 == 2:
        clean(text.page_text(page(load(bad))))
    if index % 4 == 3:
        _compared(bad, log)
    if index % 4 == 2:
        _resumed(bad)
    if index % 60 == 5:
        _commands(bad)


def _followed(run: RunDir) -> Snapshot:
    """As `attach --headless` does."""
    said: list[str] = []
    progress = RunProgress(lambda line: said.append(printable(line)), since=0.0)
    reader = RunReader(run, progress.hear)
    reader.poll()
    snapshot = reader.snapshot()
    progress.look(snapshot)
    said += map(printable, summary(snapshot, snapshot.end, run.path))
    json.dumps(writable(figures(snapshot)), allow_nan=False)
    assert snapshot.final, "attach --headless waits for ever"
    clean("\n".join(said))
    return snapshot


def _shown(snapshot: Snapshot, size: tuple[int, int]) -> None:
    width, height = size
    found = Diagnosis().of(snapshot)
    assert not found.trouble, found.trouble
    state = LiveState("bad", snapshot.status, (("q", "quit"),), None, None, found)
    rows = live_rows(snapshot, state, width, height)
    assert len(rows) == height
    rows += settings_lines(snapshot, width)
    rows += ranks_lines(snapshot, width) if snapshot.ranks is not None else []
    rows += own_values_lines(snapshot, width)
    rows += block_rows(diagnosis_blocks(snapshot, found, "bad", False), width)
    for row in rows[:height]:
        assert width_of(row) == width
    for row in (fit(row, width) for row in rows):
        clean("".join(span for span, _ in row))


def _listed(bad: RunDir, log: _Log) -> None:
    """Every run is listed, on the home screen and by `runs`."""
    rows = HomeFolder(bad.path.parent).runs()
    assert {row.name for row in rows} == {"bad", *(each.name for each in bad.path.parent.iterdir())}
    good = next(row for row in rows if row.name == log.run.name)
    assert good.step > 0
    entries((), rows, 80)


def _page(run: RunDir) -> None:
    made = page(load(run))
    document = html.render(made)
    assert "cannot be shown" not in document
    assert "\x1b" not in document and "<script" not in document
    document.encode()


def _compared(bad: RunDir, log: _Log) -> None:
    try:
        clean("\n".join(lines(two_compared(compare(bad, log.run)))))
        json.dumps(writable(compare(log.run, bad).to_dict()), allow_nan=False)
    except UsageError:
        pass  # says why


def _resumed(run: RunDir) -> None:
    state = load_state(run)
    try:
        check_resume(run.name, state, _CONFIG, None)
    except NddError:
        pass  # says why
    state.snapshot()


_CONFIG = read(sets=SETS).resolve()
_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("attach", "bad", "--headless"), ("report", "bad", "--text"), ("report", "bad", "--json"), ("runs",),
    ("runs", "--json"),
)  # fmt: skip


def _commands(run: RunDir) -> None:
    for arguments in _COMMANDS:
        said("--runs", str(run.path.parent), *arguments).check(0, 1, 2)


KIND = Kind(
    name="damaged records",
    holds="every reader shows what is left, and no run hides another",
    full=10_000,
    short=50,
    attempts=attempts,
)

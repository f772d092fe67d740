"""Logs to damage: of a run that was trained here, and of a run with every type of event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ndd_engine.config import Draft, read
from ndd_engine.record.events import MemoryEvent, SampleEvent, WindowEvent, parse
from ndd_engine.record.fold import to_event
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.state import RunState
from ndd_engine.train.run import Run, RunRequest
from tests.report.report_help import whole_life

SETS = (
    "workload.name=ndd", "workload.samples=400", "workload.channels=2", "workload.hidden=[8]", "batch.sequence=8",
    "batch.micro=16", "run.threads=1", "log.every_steps=1", "log.window_s=0", "run.max_steps=40",
    "evaluate.every_steps=10", "checkpoint.every_steps=10", "run.device=cpu",
)  # fmt: skip
# Of the events that are written all the time, every so many are kept: many lines take long to read 10,000 times.
_EVERY = 16


def draft() -> Draft:
    """The configuration of the trained run."""
    return read(sets=SETS)


def trained(folder: Path) -> RunDir:
    """A run that was trained, evaluated, captured and ended, and resumed once."""
    run = Run.open(RunRequest(draft(), folder))
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
    run.events.write_text("".join(event.to_json(t) + "\n" for t, event in whole_life()))
    return _thinned(run)


def _thinned(run: RunDir) -> RunDir:
    """Keep some of the frequent events, and write a fold event in the middle and one near the end."""
    lines: list[str] = []
    state = RunState()
    counts: dict[type, int] = {}
    items = [item for line in run.events.read_bytes().splitlines() if (item := parse(line)) is not None]
    items = [item for item in items if item[1].type != "fold"]
    kept: list[Any] = []
    for t, event in items:
        kind = type(event)
        counts[kind] = counts.get(kind, 0) + 1
        if (
            not isinstance(event, (WindowEvent, SampleEvent, MemoryEvent))
            or counts[kind] % _EVERY == 1
            or len(items) < 120
        ):
            kept.append((t, event))
    for index, (t, event) in enumerate(kept):
        state.fold(t, event)
        lines.append(event.to_json(t))
        if index in (len(kept) // 2, len(kept) - 4):
            lines.append(to_event(state).to_json(t))
    run.events.write_text("\n".join(lines) + "\n")
    return run

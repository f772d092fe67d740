"""Logs to damage: of a run that was trained here, and of a run with every type of event."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.report.report_help import whole_life

from ndd_engine.config import Draft, read
from ndd_engine.record.events import Event, FoldEvent, MemoryEvent, SampleEvent, WindowEvent, parse
from ndd_engine.record.fold import to_event
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.state import RunState
from ndd_engine.train.run import Run, RunRequest

SETS = (
    "workload.name=eeg", "workload.samples=400", "workload.channels=2", "workload.hidden=[8]", "batch.sequence=8",
    "batch.micro=16", "run.threads=1", "log.every_steps=1", "log.window_s=0", "run.max_steps=30",
    "evaluate.every_steps=10", "checkpoint.every_steps=10", "run.device=cpu",
)  # fmt: skip
# Of the events that are written all the time, about so many are kept: long logs take long to read 10,000 times.
_KEPT = 10
_FREQUENT = (WindowEvent, SampleEvent, MemoryEvent)


def draft() -> Draft:
    """The configuration of the trained run."""
    return read(sets=SETS)


def trained(folder: Path) -> RunDir:
    """A run that was trained, evaluated, saved and captured."""
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
    items = [item for line in run.events.read_bytes().splitlines() if (item := parse(line)) is not None]
    items = [item for item in items if not isinstance(item[1], FoldEvent)]
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
            lines.append(to_event(state).to_json(t))
    run.events.write_text("\n".join(lines) + "\n")
    return run

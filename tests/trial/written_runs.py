"""Recorded runs made by hand: windows with rates that a test chooses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.records import run_event

from ndd_engine.record.events import EndEvent, Event, MarkEvent, SampleEvent, WindowEvent
from ndd_engine.record.rundir import RunDir
from tests import records

ITEMS = 16  # of a step
STEPS = 10  # of a window


def window(step: int, seconds: float, loss: float | None = None, **changes: Any) -> WindowEvent:
    """STEPS steps that end at `step`."""
    return records.window(step, STEPS, round(seconds * 1e9), loss, **changes)


def windows(times: Sequence[float], loss: float = 2.0) -> list[Event]:
    """One window for each time (seconds), with losses that fall."""
    return [window((index + 1) * STEPS, seconds, loss / (index + 1)) for index, seconds in enumerate(times)]


def steady(count: int, seconds: float, seed: int = 0, noise: float = 0.05) -> list[float]:
    """Times of windows that vary by so much."""
    draw = random.Random(seed)
    return [seconds * (1 + noise * draw.uniform(-1, 1)) for _ in range(count)]


def write_run(path: Path, events: Sequence[Event], **identity: Any) -> RunDir:
    """A finished run with these events after its identity."""
    last = max((event.step for event in events if isinstance(event, WindowEvent)), default=0)
    whole = [run_event(name=path.name, **identity), *events, EndEvent("done", "all steps are done", last, 0)]
    return records.write(RunDir(path), ((float(at), event) for at, event in enumerate(whole)))


def evaluation(step: int, **metrics: float) -> MarkEvent:
    return MarkEvent("evaluation", step, "evaluated", {"metrics": metrics, "seconds": 1.0, "better": "lower"})


def sample(rss: int, workers: int = 0) -> SampleEvent:
    return SampleEvent(None, {"rss_bytes": rss, "workers_rss_bytes": workers})

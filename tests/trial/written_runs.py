"""Recorded runs made by hand: windows with rates that a test chooses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ndd_engine.record.events import EndEvent, Event, MarkEvent, RunEvent, SampleEvent, WindowEvent
from ndd_engine.record.rundir import RunDir

ITEMS = 16  # of a step
STEPS = 10  # of a window


def run_event(**changes: Any) -> RunEvent:
    body: dict[str, Any] = {
        "name": "r", "workload": "chartext", "config": {"batch": {"micro": 16}, "loader": {"workers": 0}}, "pid": 1,
        "host": "h", "device": "cpu", "device_name": "CPU", "gpu": None, "versions": {"torch": "2.6"},
        "parameters": 10, "precision": "fp32", "item": "window", "token": None, "tokens_per_item": 0,
        "items_per_step": ITEMS, "items_per_epoch": 1600, "steps_per_epoch": 100, "epochs": 10, "total_steps": 1000,
        "model": "m", "data": "d", "usable_cores": 2.0,
    }  # fmt: skip
    return RunEvent(**{**body, **changes})


def window(step: int, seconds: float, loss: float | None = None, **changes: Any) -> WindowEvent:
    """STEPS steps that end at `step`, all of it forward unless `phases` says otherwise."""
    wall = round(seconds * 1e9)
    body: dict[str, Any] = {
        "step": step, "epoch": 0, "epoch_step": step, "steps": STEPS, "micro_steps": STEPS, "items": ITEMS * STEPS,
        "tokens": 0, "wall_ns": wall, "step_p50_ns": wall // STEPS, "step_p95_ns": wall // STEPS,
        "step_max_ns": wall // STEPS, "phases": {"forward": {"host_ns": wall, "device_ns": None}}, "loss": loss,
    }  # fmt: skip
    return WindowEvent(**{**body, **changes})


def windows(times: Sequence[float], loss: float = 2.0) -> list[Event]:
    """One window for each time (seconds), with losses that fall."""
    return [window((index + 1) * STEPS, seconds, loss / (index + 1)) for index, seconds in enumerate(times)]


def steady(count: int, seconds: float, seed: int = 0, noise: float = 0.05) -> list[float]:
    """Times of windows that vary by so much."""
    draw = random.Random(seed)
    return [seconds * (1 + noise * draw.uniform(-1, 1)) for _ in range(count)]


def write_run(path: Path, events: Sequence[Event], **identity: Any) -> RunDir:
    """A finished run with these events after its identity."""
    path.mkdir(parents=True)
    run = RunDir(path)
    last = max((event.step for event in events if isinstance(event, WindowEvent)), default=0)
    whole = [run_event(name=path.name, **identity), *events, EndEvent("done", "all steps are done", last, 0)]
    run.events.write_text("".join(event.to_json(float(at)) + "\n" for at, event in enumerate(whole)))
    return run


def evaluation(step: int, **metrics: float) -> MarkEvent:
    return MarkEvent("evaluation", step, "evaluated", {"metrics": metrics, "seconds": 1.0, "better": "lower"})


def sample(rss: int, workers: int = 0) -> SampleEvent:
    return SampleEvent(None, {"rss_bytes": rss, "workers_rss_bytes": workers})

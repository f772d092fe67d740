"""Hand-written records for the tests of the report: the whole life of a run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from ndd_console.render import html, text
from ndd_console.report.model import Report, load
from ndd_console.report.sections import page
from ndd_engine.record.events import (
    EndEvent,
    Event,
    Finding,
    FindingEvent,
    MarkEvent,
    MemoryEvent,
    RunEvent,
    StageEvent,
    TrialEvent,
    WindowEvent,
)
from ndd_engine.record.rundir import RunDir
from tests import records
from tests.ui import fakes
from tests.ui.fakes import GB, MEASURED, SETTINGS, T0, sample, work_event

PHASES = {
    "data_wait": 30.0,
    "to_device": 1.0,
    "forward": 7.0,
    "loss": 0.6,
    "backward": 12.6,
    "optimizer": 2.1,
}
CONFIG: dict[str, Any] = {
    "run": {"seed": 7, "epochs": 25},
    "batch": {"micro": 128, "accumulation": 1},
    "log": {"every_steps": 10},
}

Timed = tuple[float, Event]


def write(folder: Path, events: list[Timed], name: str = "one") -> RunDir:
    """Write a run folder with this record."""
    return records.write(RunDir(folder / name), events)


def pages(run: RunDir) -> tuple[Report, str, str]:
    """The report as data, as HTML and as text."""
    report = load(run)
    made = page(report)
    return report, html.render(made), text.page_text(made)


def run_event(cuda: bool = True, **changes: Any) -> RunEvent:
    """A run without accumulation."""
    usual = {"name": "one", "config": CONFIG, "items_per_step": 128, "items_per_epoch": 35_328}
    return fakes.run_event(cuda, **{**usual, **changes})


def window(
    step: int, steps: int = 18, wait_ms: float = 30.0, cuda: bool = True, **changes: Any
) -> WindowEvent:
    """A window of steps that each wait `wait_ms` for the loader."""
    each = {**PHASES, "data_wait": wait_ms, "other": 0.4}
    phases = {
        name: {
            "host_ns": round(value * 1e6 * steps), "p50_ns": round(value * 1e6), "p95_ns": round(value * 1.2e6),
            "max_ns": round(value * 2.5e6), "device_ns": value * 0.98e6 if cuda else None,
        }
        for name, value in each.items()
    }  # fmt: skip
    wall = sum(figures["host_ns"] or 0 for figures in phases.values())
    step_ns = round(wall / max(steps, 1))
    body: dict[str, Any] = {
        "step": step, "epoch": step // 276, "epoch_step": step % 276, "steps": steps, "micro_steps": steps,
        "items": steps * 128, "tokens": steps * 128 * 256, "wall_ns": wall, "step_p50_ns": step_ns,
        "step_p95_ns": round(step_ns * 1.2), "step_max_ns": step_ns * 3, "phases": phases,
        "loss": 1.3 + 3.1 * math.exp(-step / 800), "lr": 1e-3 * math.cos(step / 6900), "grad_norm": 0.8,
        "device_steps": 2 if cuda else 0, "gc_ns": 900_000 * steps, "gc_count": 1, "gc_max_ns": 41_000_000,
    }  # fmt: skip
    return WindowEvent(**{**body, **changes})


def evaluation(step: int, loss: float, seconds: float = 2.1) -> MarkEvent:
    data = {"metrics": {"loss": loss, "bits": loss / 0.69}, "seconds": seconds, "better": "lower"}
    return MarkEvent("evaluation", step, f"evaluation at step {step:,}: loss {loss:.3g}", data)


def evaluating(step: int, seconds: float = 2.1) -> WindowEvent:
    """The window of an evaluation, without steps."""
    took = round(seconds * 1e9)
    return window(
        step, 0, wall_ns=took, phases={"evaluate": {"host_ns": took}}, loss=None, lr=None, grad_norm=None
    )


def finding(cause: str, title: str, ceiling: float | None) -> Finding:
    return Finding(cause, title, (), "certain", None, ceiling)


def trial(
    change: str, verdict: str, interval: tuple[float, float, float] | None, text: str, **more: Any
) -> TrialEvent:
    ratio, low, high = interval or (None, None, None)
    return fakes.trial_event(verdict, sets=[change], text=text, ratio=ratio, low=low, high=high, **more)


def whole_life(cuda: bool = True) -> list[Timed]:
    """Prepare, train with a slow loader, pause, evaluate, stop, resume a day later, finish."""
    t, step = T0, 0
    out: list[Timed] = []

    def put(*events: Event) -> None:
        out.extend((t, event) for event in events)

    put(StageEvent("prepare", "importing torch"))
    t += 4
    put(run_event(cuda), *SETTINGS, work_event(cuda))
    put(MarkEvent("compile", 0, "compiled in 8.4 s (default)", {"seconds": 8.4}))
    t += 9
    for index in range(240):
        step += 18
        item = window(step, wait_ms=30 + 6 * math.sin(index / 9), cuda=cuda)
        t += item.wall_ns * 1e-9
        put(item, sample(cuda), *((_memory(index),) if cuda else ()))
        if index == 20:
            title = "input-bound: the GPU waits 57 % of each step for the loader"
            put(FindingEvent(step, "few-workers", title, False, finding("few-workers", title, 2.3)))
            put(FindingEvent(step, "gc", "collections take 2 % of the time"))
        if index == 90:
            put(FindingEvent(step, "gc", "collections take 2 % of the time", True))
            put(MarkEvent("pause", step, f"paused at step {step:,}"))
            t += 30
            put(MarkEvent("resume", step, "resumed after 30.0 s", {"seconds": 30.0}))
        if index % 48 == 47:
            t += 2.1
            put(evaluating(step), evaluation(step, 1.5 - index / 900))
            put(MarkEvent("checkpoint", step, f"checkpoint at step {step:,} (123 MiB)", {"bytes": 1}))
        if index == 100:
            put(MarkEvent("warning", step, "2 losses were not finite; the scaler skipped their steps"))
        if index == 120:
            method = "kernels" if cuda else "operators"
            put(
                replace(MEASURED["kernels"], step=step, method=method),
                replace(MEASURED["functions"], step=step),
            )
            put(trial("loader.workers=4", "faster", (2.11, 2.02, 2.2), "faster 2.11x: more workers"))
            put(trial("speed.deterministic=true", "slower", (0.83, 0.8, 0.87), "slower by 17 %"))
            put(trial("batch.micro=1024", "out of memory", None, "out of GPU memory in a test step"))
        if index == 150:
            put(EndEvent("stopped", "stopped from the console; checkpoint", step, 0, "step.pt"))
            t += 86_400
            put(StageEvent("resume", "importing torch"))
            t += 3
            put(run_event(cuda, resumed_step=step, resumed_from="step.pt"), *SETTINGS, work_event(cuda))
            t += 2
    put(EndEvent("done", f"all {step} steps are done", step, 0, f"step-{step:08d}.pt"))
    return out


def _memory(index: int) -> MemoryEvent:
    held = 5 * GB + index * 2_000_000
    return MemoryEvent(held, 7 * GB, held + GB, 7 * GB, GB, 0, 0, 8 * GB, 16 * GB, GB)

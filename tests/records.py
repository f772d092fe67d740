"""Records of runs: events with fixed figures, and what the record of a run holds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ndd_engine.record.events import Event, RunEvent, WindowEvent, parse
from ndd_engine.record.file import RunReader
from ndd_engine.record.rundir import RunDir
from ndd_engine.record.snapshot import Snapshot

CONFIG: dict[str, Any] = {
    "batch": {"micro": 16},
    "loader": {"workers": 0},
    "evaluate": {"every_steps": 0, "every_epochs": 0, "at_end": False},
    "checkpoint": {"every_steps": 0, "every_epochs": 0, "every_minutes": 0.0, "at_end": False},
}


def run_event(**changes: Any) -> RunEvent:
    """A run of 1000 steps on the CPU: 100 steps per epoch, 16 items of 64 tokens per step."""
    body: dict[str, Any] = {
        "name": "r", "workload": "chartext", "config": CONFIG, "pid": 1, "host": "h", "device": "cpu",
        "device_name": "CPU", "gpu": None, "versions": {"torch": "2.6"}, "parameters": 10, "precision": "fp32",
        "item": "segment", "token": "character", "tokens_per_item": 64, "items_per_step": 16, "items_per_epoch": 1600,
        "steps_per_epoch": 100, "epochs": 10, "total_steps": 1000, "model": "m", "data": "d", "usable_cores": 2.0,
    }  # fmt: skip
    return RunEvent(**{**body, **changes})


def phase(host_ns: int, device_ns: float | None = None, steps: int = 1) -> dict[str, float | None]:
    """A phase of equal steps. host_ns: of all of them."""
    each = host_ns // max(steps, 1)
    return {"host_ns": host_ns, "p50_ns": each, "p95_ns": each, "max_ns": each, "device_ns": device_ns}


def window(
    step: int, steps: int = 1, wall_ns: int = 100_000_000, loss: float | None = None, **changes: Any
) -> WindowEvent:
    """A window of equal steps that ends at `step`, whose whole time is forward, unless `phases` is given."""
    each = wall_ns // max(steps, 1)
    body: dict[str, Any] = {
        "step": step, "epoch": step // 100, "epoch_step": step % 100, "steps": steps, "micro_steps": steps,
        "items": steps * 16, "tokens": steps * 1024, "wall_ns": wall_ns, "step_p50_ns": each, "step_p95_ns": each,
        "step_max_ns": each, "phases": {"forward": phase(wall_ns, steps=steps)}, "loss": loss,
    }  # fmt: skip
    return WindowEvent(**{**body, **changes})


def write(run: RunDir, events: Iterable[tuple[float, Event]]) -> RunDir:
    """A run whose record has these events at these times."""
    run.path.mkdir(parents=True, exist_ok=True)
    run.events.write_text("".join(event.to_json(t) + "\n" for t, event in events), encoding="utf-8")
    return run


def events_of(run: RunDir | Path) -> list[Any]:
    """The events in the record of a run, or in the file of one. Lines that are torn are left out."""
    path = run.events if isinstance(run, RunDir) else run
    return [item[1] for item in map(parse, path.read_bytes().splitlines()) if item]


def losses_of(run: RunDir) -> dict[int, float]:
    """The last loss of each window by its step. Steps that were done twice must agree bit for bit."""
    found: dict[int, float] = {}
    for event in events_of(run):
        if isinstance(event, WindowEvent) and event.last_loss is not None:
            step, loss = event.last_loss
            assert found.setdefault(step, loss) == loss, f"step {step} was done twice with different losses"
    return found


def snapshot_of(run: RunDir) -> Snapshot:
    """The run as its record shows it."""
    reader = RunReader(run)
    reader.poll()
    return reader.snapshot()

"""Snapshots of runs with several simulated ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.simulated_ranks import Planted

from ndd_engine.diagnose import diagnose
from ndd_engine.diagnose.finding import Finding
from ndd_engine.record.events import PHASES, RanksEvent, WindowEvent
from ndd_engine.record.snapshot import Snapshot, Totals
from ndd_engine.record.state import RunState

from .fakes import CONFIG, MARKS, T0, loss_curve, rate_curve, run_event, sample, snapshot

SHARDED_FROM = 64
CODE = "text.py:88 tokenise"
# Number of ranks -> what is planted.
PLANTED = {
    2: Planted(2, late=(1,), late_ms=7.9, places=(CODE,)),
    8: Planted(8, late=(5,), late_ms=7.9, phase="backward", noise=(0.01, 0.01)),
    64: Planted(64, noise=(0.005, 0.01), strategy="fsdp2"),
    1024: Planted(1024, late=(683,), late_ms=9.0, phase="forward", noise=(0.01, 0.01), strategy="fsdp2"),
}


def window_of(event: RanksEvent) -> WindowEvent:
    """The window of rank 0 beside it."""
    phases = {
        name: {
            "host_ns": round(figures[2] * 1e3 * event.steps),
            "p50_ns": None,
            "p95_ns": None,
            "max_ns": None,
        }
        for name, figures in event.columns_us.items()
        if name in PHASES
    }
    phases["backward"]["host_ns"] += round(event.exchange_ns + event.skew_ns)
    steps, items = event.steps, 16 * event.world * event.steps
    times = (event.wall_ns, None, None, None)
    return WindowEvent(event.step, 0, event.step, steps, steps, items, 256 * items, *times, phases)


def ranks_snapshot(planted: Planted, count: int = 12, **changes: Any) -> Snapshot:
    """A run in the middle of training."""
    world = planted.world
    config = {**CONFIG, "loader": {"workers": 1}}
    config["parallel"] = {
        "ranks": world, "strategy": planted.strategy, "bucket_mb": 25.0, "compress": "off", "reshard": True,
        "reduce_dtype": "fp32", "param_dtype": "fp32",
    }  # fmt: skip
    config["batch"] = {"micro": 16, "accumulation": 1, "sequence": 256}
    config["speed"] = {"compile": "off"}
    state = RunState()
    state.fold(T0, run_event(False, name="chartext-001", config=config, threads=1, items_per_step=16 * world))
    for index, event in enumerate(planted.events(count)):
        state.fold(T0 + index, window_of(event))
        state.fold(T0 + index, event)
    state.fold(T0 + count, sample(False))
    found, usual = state.snapshot(), snapshot(False)
    figures: dict[str, Any] = {
        "step": 1_035, "epoch": 4, "left": usual.left, "elapsed_s": 231.4, "loss": 1.581, "lr": 0.002,
        "grad_norm": 2.93, "evaluations": usual.evaluations, "best": usual.best, "loss_trend": loss_curve(),
        "rate_trend": rate_curve(), "marks": MARKS[:3], "totals": Totals(10**11, 1000, 100),
    }  # fmt: skip
    return replace(found, **{**figures, **changes})


def findings_of(snapshot: Snapshot) -> tuple[Finding, ...]:
    return diagnose(snapshot)

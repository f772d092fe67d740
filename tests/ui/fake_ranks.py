"""Snapshots of runs with several simulated ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from qa.ranks.simulated import ITEMS, Planted, beside

from ndd_engine.record.snapshot import Snapshot, Totals
from ndd_engine.record.state import RunState

from .fakes import CONFIG, MARKS, T0, loss_curve, rate_curve, run_event, sample, snapshot

CODE = "text.py:88 tokenise"
# Number of ranks -> what is planted.
PLANTED = {
    2: Planted(2, late=(1,), late_ms=7.9, places=(CODE,)),
    8: Planted(8, late=(5,), late_ms=7.9, phase="backward", noise=(0.01, 0.01)),
    64: Planted(64, noise=(0.005, 0.01), strategy="fsdp2"),
    1024: Planted(1024, late=(683,), late_ms=9.0, phase="forward", noise=(0.01, 0.01), strategy="fsdp2"),
}


def ranks_snapshot(planted: Planted, count: int = 12, **changes: Any) -> Snapshot:
    """A run in the middle of training."""
    world = planted.world
    config = {**CONFIG, "loader": {"workers": 1}}
    config["parallel"] = {
        "ranks": world, "strategy": planted.strategy, "bucket_mb": 25.0, "compress": "off", "reshard": True,
        "reduce_dtype": "fp32", "param_dtype": "fp32",
    }  # fmt: skip
    config["batch"] = {"micro": ITEMS, "accumulation": 1, "sequence": 256}
    config["speed"] = {"compile": "off"}
    state = RunState()
    state.fold(
        T0, run_event(False, name="chartext-001", config=config, threads=1, items_per_step=ITEMS * world)
    )
    for index, event in enumerate(planted.events(count)):
        state.fold(T0 + index, beside(event))
        state.fold(T0 + index, event)
    state.fold(T0 + count, sample(False))
    found, usual = state.snapshot(), snapshot(False)
    figures: dict[str, Any] = {
        "step": 1_035, "epoch": 4, "left": usual.left, "elapsed_s": 231.4, "loss": 1.581, "lr": 0.002,
        "grad_norm": 2.93, "evaluations": usual.evaluations, "best": usual.best, "loss_trend": loss_curve(),
        "rate_trend": rate_curve(), "marks": MARKS[:3], "totals": Totals(10**11, 1000, 100),
    }  # fmt: skip
    return replace(found, **{**figures, **changes})


@cache
def planted_snapshot(world: int) -> Snapshot:
    """One of PLANTED."""
    return ranks_snapshot(PLANTED[world])

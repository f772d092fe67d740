"""What `check` predicts, in words."""

from __future__ import annotations

from typing import Any

import pytest

from ndd_console.words.machine import busy_cores, check_facts
from ndd_engine.record.snapshot import CoreUse

MB = 1 << 20
REPORT: dict[str, Any] = {
    "data": "400 samples", "device": "cuda:0", "device_reason": "the only GPU", "parameters": 1, "model": "mlp",
    "size": None, "predicted_bytes": {"total": 115 * MB, "activations": 115 * MB}, "micro_batch": 10,
    "effective_batch": 20, "memory_source": "a probe", "memory_reliable": True, "memory_why_not": "", "nearest": None,
    "fits": True, "available_bytes": 214 * MB, "retries": 0, "bytes_without_retries": 215 * MB, "step_s": 1.0,
    "step_measured": True, "epoch_s": 1.0, "steps_per_epoch": 1, "total_s": 1.0, "total_steps": 1, "ranks": 1,
    "sharded": None, "step_doubt": "", "busy": None, "notes": [], "advice": ["loader.workers exceeds the cores"],
}  # fmt: skip


def shown(**changes: Any) -> str:
    return "\n".join(f"{label}: {text}" for label, text in check_facts({**REPORT, **changes}).rows)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "memory: predicted 115 MiB of 214 MiB available, fits: activations 115 MiB"),
        ({"fits": False}, "DOES NOT FIT"),
        ({"fits": None, "available_bytes": None}, "of n/a available, available memory unknown"),
        ({"retries": 1}, ", fits, with retries:"),
        ({"retries": 1}, "1 allocator retry in the first steps"),
        ({"retries": 2}, "2 allocator retries in the first steps"),
        ({"nearest": (5, 4)}, "fits: --set batch.micro=5 --set batch.accumulation=4 (same effective batch)"),
        ({"epoch_s": None, "total_s": None}, "time: n/a: the length of the training data is unknown"),
        ({}, "advice: loader.workers exceeds the cores"),
        (
            {"fits": False, "sharded": {"ranks": 4, "peak_bytes": 40 * MB, "fits": True}},
            "does not fit one GPU: 115 MiB of 214 MiB; with FSDP2 on 4 ranks 40.0 MiB each: "
            "--set parallel.ranks=4 --set parallel.strategy=fsdp2",
        ),
    ],
)
def test_the_facts_say_what_fits(changes: dict[str, Any], words: str) -> None:
    assert words in shown(**changes)


def test_a_step_time_measured_beside_other_processes_is_said_to_be_uncertain() -> None:
    busy = busy_cores(CoreUse(4.0, 2.5, 1.5, 4.0, 9, ((812, "blender", 1.4),)))
    assert (busy["cores"], busy["used_by_steps"], busy["used_by_others"]) == (4.0, 2.5, 1.5)
    assert busy["processes"] == [{"pid": 812, "name": "blender", "cores": 1.4}]
    assert "low confidence: while steps were timed, other processes used 1.5 of 4 cores" in shown(busy=busy)

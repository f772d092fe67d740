"""The three answers of `check`: fits, fits with retries, does not fit."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from ndd_console.words.check import busy_cores, check_facts
from ndd_engine.config import read
from ndd_engine.predict.allocator import MIB
from ndd_engine.predict.memory import Memory
from ndd_engine.predict.outlook import Outlook
from ndd_engine.predict.steptime import StepTime, TimedBatch
from ndd_engine.predict.trace import Family, Trace
from ndd_engine.record.snapshot import CoreUse


def outlook(available_mib: int | None, kept_mib: int = 0) -> Outlook:
    """Micro-batch 10, and 10 MiB per item that are freed before 11 MiB are allocated."""
    config = read(
        None, ["workload.size=tiny", "batch.micro=10", "batch.accumulation=2"], "chartext"
    ).resolve()
    trace = Trace(((0, 0), (0, -1), (1, 0), (1, -1)))
    family = Family((4, 8), trace, ((0.0, 10.0 * MIB), (0.0, 11.0 * MIB)), aligned=True)
    return Outlook(
        config, Memory(family, "gpu", 5 * MIB, "test"),
        StepTime((TimedBatch(10, 1e-3, 1e-3, 0.0),), 0.0, on_gpu=True), 1000, 4000, 8000, kept_mib * MIB,
        None if available_mib is None else available_mib * MIB, 10, 100,
    )  # fmt: skip


def lines(found: Outlook) -> str:
    """What `check` prints."""
    report = {
        "data": "", "device": "cuda:0", "device_reason": "", "parameters": 1, "model": "", "size": None,
        "predicted_bytes": found.parts, "micro_batch": 10, "effective_batch": 20, "memory_source": "",
        "memory_reliable": True, "memory_why_not": "", "nearest": found.nearest, "fits": found.fits,
        "available_bytes": found.available_bytes, "retries": found.retries, "notes": [], "advice": [],
        "bytes_without_retries": found.fit.roomy_bytes, "step_s": 1.0, "step_measured": True, "epoch_s": 1.0,
        "steps_per_epoch": 1, "total_s": 1.0, "total_steps": 1,
        "ranks": found.config.parallel.ranks, "sharded": None if found.sharded is None else asdict(found.sharded),
        "step_doubt": found.time.doubt, "busy": None if found.busy is None else busy_cores(found.busy),
    }  # fmt: skip
    return "\n".join(" ".join(pair) for pair in check_facts(report).rows)


def test_a_step_time_measured_beside_other_processes_is_said_to_be_uncertain() -> None:
    quiet = outlook(215)
    assert "other processes" not in lines(quiet)
    found = replace(quiet, busy=CoreUse(4.0, 2.5, 1.5, 4.0, 9, ((812, "blen\x1bder", 1.4),)))
    text = (
        "low confidence: while steps were timed, other processes used 1.5 of 4 cores, blen\\x1bder the most; "
        "check again when they have ended"
    )
    assert text in lines(found)
    assert found.busy is not None
    body = busy_cores(found.busy)
    assert (body["cores"], body["used_by_steps"], body["used_by_others"]) == (4.0, 2.5, 1.5)
    assert body["processes"] == [{"pid": 812, "name": "blen\x1bder", "cores": 1.4}]


def test_plentiful_memory() -> None:
    found = outlook(215)
    assert (found.fits, found.retries, found.nearest) == (True, 0, None)
    assert found.total_bytes == found.parts["total"] == 215 * MIB
    assert ", fits:" in lines(found) and "retr" not in lines(found)


def test_what_fits_with_retries_is_shown_as_such() -> None:
    found = outlook(214)
    assert (found.fits, found.retries) == (True, 1)
    assert found.total_bytes == 115 * MIB
    assert found.nearest == (5, 4)  # the same effective batch without retries
    text = lines(found)
    assert ", fits, with retries:" in text
    assert "1 allocator retry in the first steps" in text and "215 MB would avoid that" in text
    assert "--set batch.micro=5 --set batch.accumulation=4 (same effective batch, no retries)" in text


@pytest.mark.parametrize(("available", "kept"), [(114, 0), (214, 100)])
def test_what_fails_after_a_retry_does_not_fit(available: int, kept: int) -> None:
    found = outlook(available, kept)
    assert (found.fits, found.retries) == (False, 0)
    assert found.total_bytes == (215 + kept) * MIB
    assert "DOES NOT FIT" in lines(found)


def test_unknown_memory() -> None:
    found = outlook(None)
    assert (found.fits, found.nearest) == (None, None)
    assert "available memory unknown" in lines(found)

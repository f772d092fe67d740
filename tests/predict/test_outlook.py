"""The three answers of `check`: fits, fits with retries, does not fit."""

from __future__ import annotations

import pytest

from ndd_engine.config import read
from ndd_engine.predict.allocator import MIB
from ndd_engine.predict.memory import Memory
from ndd_engine.predict.outlook import Outlook
from ndd_engine.predict.steptime import StepTime, TimedBatch
from ndd_engine.predict.trace import Family, Trace


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


def test_plentiful_memory() -> None:
    found = outlook(215)
    assert (found.fits, found.retries, found.nearest) == (True, 0, None)
    assert found.total_bytes == found.parts["total"] == 215 * MIB


def test_what_fits_with_retries_is_shown_as_such() -> None:
    found = outlook(214)
    assert (found.fits, found.retries) == (True, 1)
    assert found.total_bytes == 115 * MIB
    assert found.nearest == (5, 4)  # the same effective batch without retries


@pytest.mark.parametrize(("available", "kept"), [(114, 0), (214, 100)])
def test_what_fails_after_a_retry_does_not_fit(available: int, kept: int) -> None:
    found = outlook(available, kept)
    assert (found.fits, found.retries) == (False, 0)
    assert found.total_bytes == (215 + kept) * MIB


def test_unknown_memory() -> None:
    found = outlook(None)
    assert (found.fits, found.nearest) == (None, None)

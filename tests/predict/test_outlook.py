"""The three answers of `check`: fits, fits with retries, does not fit."""

from __future__ import annotations

from typing import Any

import pytest
from test_trace import retrying

from ndd_engine.config import read
from ndd_engine.predict.allocator import MIB
from ndd_engine.predict.estimate import StepTime, TimedBatch
from ndd_engine.predict.outlook import Outlook


def outlook(available_mib: int | None, kept_mib: int = 0) -> Outlook:
    config = read(
        None, ["workload.size=tiny", "batch.micro=10", "batch.accumulation=2"], "chartext"
    ).resolve()
    return Outlook(
        config, retrying(),
        StepTime((TimedBatch(10, 1e-3, 1e-3, 0.0),), 0.0, on_gpu=True), 1000, 4000, 8000, kept_mib * MIB,
        None if available_mib is None else available_mib * MIB, 10, 100,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("available", "kept", "fits", "retries", "total", "nearest"),
    [
        (215, 0, True, 0, 215, None),
        (214, 0, True, 1, 115, (5, 4)),  # the same effective batch without retries
        (114, 0, False, 0, 215, (5, 4)),
        (214, 100, False, 0, 315, (5, 4)),
        (None, 0, None, 0, 215, None),
    ],
)
def test_what_fits_the_memory_of_a_gpu(
    available: int | None, kept: int, fits: bool | None, retries: int, total: int, nearest: Any
) -> None:
    found = outlook(available, kept)
    assert (found.fits, found.retries, found.nearest) == (fits, retries, nearest)
    assert found.total_bytes == found.parts["total"] == total * MIB

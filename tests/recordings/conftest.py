"""Recordings from real GPUs, only where NDD_TEST_DATA points."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def gpu_data() -> Path:
    """The folder gpu/ of the test data: traces, snapshots, names."""
    folder = os.environ.get("NDD_TEST_DATA")
    if not folder or not (Path(folder) / "gpu").is_dir():
        pytest.skip("NDD_TEST_DATA does not name a folder with gpu/ (recordings from real GPUs)")
    return Path(folder) / "gpu"

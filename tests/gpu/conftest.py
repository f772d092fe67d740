"""The tests of this folder need a CUDA GPU, and are skipped with a reason without one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU: torch.cuda.is_available() is false")

"""Starts test programs under torchrun, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WORKER = Path(__file__).with_name("sharded_worker.py")


def launch(ranks: int, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the worker of the checkpoint tests with so many ranks. check: fail the test if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(WORKER), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0 or not check, done.stdout[-4000:]
    return done


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal bit for bit, with types and dtypes."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(same(one[k], other[k]) for k in one)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) and type(one) is type(other)

"""States of training, compared bit for bit; and what a checkpoint must never run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch import equal as tensors_equal


def equal(left: Any, right: Any) -> bool:
    """Whether two nested states are equal bit for bit, with their types and dtypes."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and tensors_equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    return type(left) is type(right) and bool(left == right)


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)

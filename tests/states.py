"""States of training, compared bit for bit; and what a checkpoint must never run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor, uint8
from torch import equal as tensors_equal


def equal(left: Any, right: Any) -> bool:
    """Whether two nested states are equal bit for bit, with their types and dtypes."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        alike = (left.dtype, left.shape, left.is_sparse) == (right.dtype, right.shape, right.is_sparse)
        return alike and tensors_equal(_bits(left), _bits(right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    return type(left) is type(right) and bool(left == right or (left != left and right != right))


def _bits(tensor: Tensor) -> Tensor:
    """Its bytes: values that are not numbers differ from themselves."""
    return (tensor.to_dense() if tensor.is_sparse else tensor).contiguous().view(-1).view(uint8)


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)

"""A workload of one's own that does a twentieth more of its work with more than one thread: `planted_gain:factory`.

`planted_gain:innocent` does the same work with any number. All operators are too small for a second thread, so that the
number of threads changes nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

UNITS = 20
# Operators of a unit, and the elements of each: torch uses further threads from 32,768 on.
OPERATORS, ELEMENTS = 100, 8192


class Model(nn.Module):
    """Scales its input. more: units of work that it does with several threads."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more = more
        self.scale = nn.Parameter(torch.ones(8))
        self.values = torch.ones(ELEMENTS)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(OPERATORS * (UNITS + (self.more if torch.get_num_threads() > 1 else 0))):
                self.values.mul_(1.0)
        return (x * self.scale).sum(1)


def _workload(more: int) -> dict[str, Any]:
    x = torch.rand(2048, 8)
    return {
        "model": Model(more), "train_data": TensorDataset(x, x.sum(1)),
        "loss": lambda output, batch: (output - batch[1]).square().mean(),
    }  # fmt: skip


def factory(settings: Any) -> dict[str, Any]:
    """With the planted work."""
    return _workload(1)


def innocent(settings: Any) -> dict[str, Any]:
    """Without."""
    return _workload(0)

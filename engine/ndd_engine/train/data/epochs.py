"""The order of an epoch in micro-batches, from any position on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from .indices import mixed
from .share import ALONE, Share


class EpochBatches(Sampler[list[int]]):
    """Index lists of one epoch's micro-batches; `set` chooses the epoch and the position to start at.

    The incomplete last batch is dropped, so that every step has the same shape. If epochs differ, an index also
    encodes the epoch: epoch * items + item. share: the micro-batches of this rank; positions count them alone.
    """

    def __init__(
        self,
        items: int,
        micro: int,
        seed: int,
        epochs_differ: bool = False,
        shuffle: bool = True,
        share: Share = ALONE,
    ) -> None:
        self.items, self.micro, self.seed, self.shuffle, self.share = items, micro, seed, shuffle, share
        self.epoch = 0
        self.start = 0
        self.epochs_differ = epochs_differ

    def set(self, epoch: int, start: int = 0) -> None:
        """Select the epoch (0-based) and the number of micro-batches to skip."""
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        return self.items // self.micro // self.share.of - self.start

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """The same lists as tensors (micro,) int64."""
        generator = torch.Generator().manual_seed(mixed(self.seed, self.epoch))
        order = torch.randperm(self.items, generator=generator) if self.shuffle else torch.arange(self.items)
        if self.epochs_differ:
            order += self.epoch * self.items
        rank, of, micro = self.share.rank, self.share.of, self.micro
        for index in range(self.start, self.start + max(len(self), 0)):
            begin = (index * of + rank) * micro
            yield order[begin : begin + micro]

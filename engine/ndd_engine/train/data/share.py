"""Which micro-batches belong to which rank: number g of an epoch to rank g % ranks.

There is one order of micro-batches for every number of ranks, and an optimizer step takes ranks x accumulation
neighbours of it. So a run that resumes with another number of ranks and the same product meets the same items in each
step. What does not fill a step of all ranks is left out, as in one process; torch's DistributedSampler repeats items.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """This rank's share: rank of `of` ranks."""

    rank: int = 0
    of: int = 1

    def dealt(self, batches: Iterable[T], accumulation: int) -> Iterator[T]:
        """This rank's batches of whole steps; reads those of the other ranks, too."""
        everything = iter(batches)
        group = self.of * accumulation
        while len(step := list(islice(everything, group))) == group:
            yield from step[self.rank :: self.of]


ALONE = Share()

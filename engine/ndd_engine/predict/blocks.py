"""Blocks of the simulated allocator: parts of a segment, in the order of their addresses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Pool = tuple[int, bool]  # stream, small


@dataclass(eq=False, slots=True)
class Block:
    """Part of a segment. address: orders blocks of equal size; before, after: neighbours in the segment.

    mapped: False for addresses of an expandable segment without memory. base: address of the segment. idle_since: the
    pool's count of searches when it was freed, for the garbage collection.
    """

    size: int
    address: int
    pool: Pool
    base: int
    free: bool = True
    mapped: bool = True
    before: Block | None = None
    after: Block | None = None
    idle_since: int = 0

    @property
    def expandable_size(self) -> int:
        """Its size with the addresses that follow and can be mapped."""
        return self.size + (self.after.size if self.after is not None and not self.after.mapped else 0)

    @property
    def whole(self) -> bool:
        """Whether it is the whole segment."""
        return self.before is None and self.after is None


def part(of: Block, address: int, size: int, mapped: bool = True) -> Block:
    """A new free block in the segment of another one."""
    return Block(size, address, of.pool, of.base, mapped=mapped)


def link(before: Block | None, block: Block, after: Block | None) -> None:
    """Insert a block between two neighbours."""
    block.before, block.after = before, after
    if before is not None:
        before.after = block
    if after is not None:
        after.before = block


def following(block: Block | None) -> Iterator[Block]:
    """The block and those after it, up to the first in use."""
    while block is not None and block.free:
        yield block
        block = block.after


def run(hole: Block) -> Iterator[Block]:
    """The adjacent blocks that can be used together: unmapped ones, and free ones from just before the hole on."""
    before = hole.before
    return following(before if before is not None and before.free else hole)

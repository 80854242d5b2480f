"""All visible blocks in the order in which they became visible: a list that is read in parts while it changes."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final, NamedTuple

from kvferry.pools.tiers.cached_block import BlockState, CachedBlock

_FEW: Final = 64  # dead ones that are not worth a new list


class ListPage(NamedTuple):
    """A part of the list."""

    blocks: list[CachedBlock]
    """As they are now; may be none."""
    next_position: int | None
    """Where to go on; None at the end."""


class BlockListing:
    """A block that stays is met once by whoever reads from the first part to the last, whatever comes and goes."""

    def __init__(self) -> None:
        self._blocks: list[CachedBlock] = []  # by serial; those that left stay until they are many
        self._last_serial = 0
        self._dead = 0

    def __len__(self) -> int:
        """Return how many blocks are visible."""
        return len(self._blocks) - self._dead

    def add(self, block: CachedBlock) -> None:
        """Append a block that became READY."""
        self._last_serial += 1
        block.serial = self._last_serial
        self._blocks.append(block)

    def discard(self) -> None:
        """Note that one of the blocks is READY no more."""
        self._dead += 1
        if self._dead > _FEW and 2 * self._dead > len(self._blocks):
            self._blocks = [block for block in self._blocks if block.state is BlockState.READY]
            self._dead = 0

    def page(self, position: int, limit: int) -> ListPage:
        """Return blocks after ``position``.

        Args:
            position: 0 for the first part; else the ``next_position`` of the part before.
            limit: how many to look at, at least 1: a bound on the time it takes.
        """
        start = bisect_right(self._blocks, position, key=_serial)
        seen = self._blocks[start : start + limit]
        more = start + limit < len(self._blocks)
        return ListPage([block for block in seen if block.state is BlockState.READY], seen[-1].serial if more else None)


def _serial(block: CachedBlock) -> int:
    return block.serial

"""One cached block, as the index keeps it. Its fields are the index's to change; everybody may read them."""

from __future__ import annotations

from bisect import bisect_right
from enum import Enum, auto
from typing import Final, NamedTuple, TypeAlias

from kvferry.pools.tiers.arena import Offsets
from kvferry.pools.tiers.namespaces import Namespace

Digests: TypeAlias = tuple[int, ...]
"""The XXH3-64 of each page's bytes, in order; () where checksums are off."""


class BlockState(Enum):
    """What a block's life goes through."""

    WRITING = auto()
    """Its bytes are on their way: invisible, and never evicted."""
    READY = auto()
    """Visible, in one tier at least."""
    DOOMED = auto()
    """Invisible again, but somebody still reads its bytes in the host tier."""
    GONE = auto()


class CachedBlock:
    """``block_pages`` pages under a hash. Two are never equal: the same hash may come again after this one is gone."""

    __slots__ = (
        "digests",
        "hash",
        "in_remote",
        "namespace",
        "offsets",
        "on_disk",
        "parent",
        "pins",
        "serial",
        "size_bytes",
        "state",
    )

    def __init__(self, namespace: Namespace, block_hash: bytes, parent: bytes | None, size_bytes: int) -> None:
        """Start as WRITING.

        Args:
            namespace: what it can stand for.
            block_hash: 16 bytes.
            parent: the hash of the block before it; None for the first one, or where it is not known.
            size_bytes: of all its pages, a multiple of ``namespace.block_pages``.
        """
        self.namespace = namespace
        self.hash = block_hash
        self.parent = parent
        self.size_bytes = size_bytes
        self.offsets: Offsets | None = None
        """(block_pages,) where its pages' blocks begin in the arena; None where it is not in the host tier."""
        self.digests: Digests = ()
        self.on_disk = False
        self.in_remote = False
        self.pins: dict[int, int] = {}
        """How often each holder pins it."""
        self.state = BlockState.WRITING
        self.serial = 0
        """Its place in the list of all blocks."""

    def __repr__(self) -> str:
        """Show the name's beginning and the live state; a hash says nothing of the tokens."""
        tiers = [
            name
            for name, there in (("host", self.in_host), ("disk", self.on_disk), ("remote", self.in_remote))
            if there
        ]
        return f"<CachedBlock {self.hash[:4].hex()} {self.state.name} {'+'.join(tiers) or 'nowhere'} pins={self.pins}>"

    @property
    def in_host(self) -> bool:
        """Return whether its bytes are in the host tier."""
        return self.offsets is not None

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one of its pages' blocks."""
        return self.size_bytes // self.namespace.block_pages

    @property
    def evictable(self) -> bool:
        """Return whether the host tier may give its bytes up."""
        return self.state is BlockState.READY and self.offsets is not None and not self.pins


# -- all visible blocks in the order in which they became visible: a list that is read in parts while it changes.


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

"""Cached blocks: their names, their state as the index keeps it, and the list of all visible ones.

Only the index changes a block's fields; everybody may read them.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from enum import Enum, StrEnum, auto
from typing import Final, NamedTuple, TypeAlias

import msgspec

from kvferry.pools.tiers.arena import Offsets
from kvferry.pools.tiers.reuse_policy import Place
from kvferry.protocol.ids import ModelIdentity

IDENTITY_BYTES = 16


class Namespace(NamedTuple):
    """Blocks of one namespace are interchangeable: one tenant, one model's KV, one page layout, one block size.

    It is part of every key in memory, on disk and in the store.
    ``layout_digest`` and ``identity`` are 32 hexadecimal digits each.
    """

    tenant: int
    layout_digest: str
    """The layout of a page: layers, roles, dtypes, formats, scales, and which of the model's heads it holds."""
    identity: str
    """The model whose KV it is: see ``identity_of``."""
    space: str
    block_pages: int


class BlockKey(NamedTuple):
    """One cached block: its namespace, and the 16-byte hash that the engine gave it."""

    namespace: Namespace
    hash: bytes


def identity_of(model: ModelIdentity) -> str:
    """Return a hash, 32 hexadecimal digits, of the whole model identity: name, revision, adapter and salt."""
    encoded = msgspec.json.encode([model.name, model.revision, model.adapter, model.salt])
    return hashlib.blake2b(encoded, digest_size=IDENTITY_BYTES, person=b"kvferry model").hexdigest()


Digests: TypeAlias = tuple[int, ...]
"""The XXH3-64 of each page's bytes, in order; () if checksums are off."""


class Tier(StrEnum):
    """A tier that a cached block is in."""

    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


class BlockState(Enum):
    """The states of a block."""

    WRITING = auto()
    """Its bytes are being written: invisible, and never evicted."""
    READY = auto()
    """Visible, in at least one tier."""
    DOOMED = auto()
    """Removed, but its bytes in the host tier are still pinned."""
    GONE = auto()


class CachedBlock:
    """``block_pages`` pages under a hash. Compared by identity: the hash may be stored again after this is gone."""

    __slots__ = (
        "depth",
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

    def __init__(
        self, namespace: Namespace, block_hash: bytes, parent: bytes | None, size_bytes: int, depth: int = 0
    ) -> None:
        """Start as WRITING.

        Args:
            namespace: of the block.
            block_hash: 16 bytes.
            parent: the hash of the block before it; None for the first one, or if it is not known.
            size_bytes: of all its pages, a multiple of ``namespace.block_pages``.
            depth: how many blocks are before it, as far as they are known.
        """
        self.namespace = namespace
        self.hash = block_hash
        self.parent = parent
        self.size_bytes = size_bytes
        self.depth = depth
        self.offsets: Offsets | None = None
        """``(block_pages,)``, the offsets of its pages in the arena; None if it is not in the host tier."""
        self.digests: Digests = ()
        self.on_disk = False
        self.in_remote = False
        self.pins: dict[int, int] = {}
        """Number of pins by holder."""
        self.state = BlockState.WRITING
        self.serial = 0
        """Its position in the list of all blocks."""

    def __repr__(self) -> str:
        """Show the start of the hash, which reveals no tokens, and the state."""
        where = "+".join(self.tiers) or "nowhere"
        return f"<CachedBlock {self.hash[:4].hex()} {self.state.name} {where} pins={self.pins}>"

    @property
    def key(self) -> BlockKey:
        """Return its name."""
        return BlockKey(self.namespace, self.hash)

    @property
    def place(self) -> Place:
        """Return where it is among the other blocks, for eviction."""
        return Place(self.namespace, self.hash, self.parent, self.depth)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Return the tiers that have it, the nearest first."""
        there = ((Tier.HOST, self.in_host), (Tier.DISK, self.on_disk), (Tier.REMOTE, self.in_remote))
        return tuple(tier for tier, present in there if present)

    @property
    def in_host(self) -> bool:
        """Return whether its bytes are in the host tier."""
        return self.offsets is not None

    @property
    def page_bytes(self) -> int:
        """Return the size of one of its pages in a tier."""
        return self.size_bytes // self.namespace.block_pages

    @property
    def evictable(self) -> bool:
        """Return whether the host tier may evict it."""
        return self.state is BlockState.READY and self.offsets is not None and not self.pins


_FEW: Final = 64  # up to this many dead blocks, the list is not rebuilt


class ListPage(NamedTuple):
    """A part of the list."""

    blocks: list[CachedBlock]
    """In their current state; may be empty."""
    next_position: int | None
    """Where to continue; None at the end."""


class BlockListing:
    """All visible blocks, in the order in which they became visible.

    A reader of all parts meets each block that stays exactly once, whatever else changes.
    """

    def __init__(self) -> None:
        self._blocks: list[CachedBlock] = []  # by serial; dead ones are removed once there are many
        self._last_serial = 0
        self._dead = 0

    def __len__(self) -> int:
        """Return the number of visible blocks."""
        return len(self._blocks) - self._dead

    def add(self, block: CachedBlock) -> None:
        """Append a block that became READY."""
        self._last_serial += 1
        block.serial = self._last_serial
        self._blocks.append(block)

    def discard(self) -> None:
        """Note that one of the blocks is no longer READY."""
        self._dead += 1
        if self._dead > _FEW and 2 * self._dead > len(self._blocks):
            self._blocks = [block for block in self._blocks if block.state is BlockState.READY]
            self._dead = 0

    def page(self, position: int, limit: int) -> ListPage:
        """Return blocks after ``position``.

        Args:
            position: 0 for the first part; then the ``next_position`` of the previous part.
            limit: how many blocks to look at, at least 1: bounds the time of the call.
        """
        start = bisect_right(self._blocks, position, key=_serial)
        seen = self._blocks[start : start + limit]
        more = start + limit < len(self._blocks)
        return ListPage([block for block in seen if block.state is BlockState.READY], seen[-1].serial if more else None)


def _serial(block: CachedBlock) -> int:
    return block.serial

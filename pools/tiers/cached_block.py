"""Cached blocks: their names, their state as the index keeps it, and the list of all visible ones.

Only the index changes a block's fields; everybody may read them.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from enum import Enum, StrEnum, auto
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.pools.tiers.arena import Offsets
from kvferry.pools.tiers.reuse_policy import Place
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import ModelIdentity, new_number

IDENTITY_BYTES = 16
DIGEST_BYTES: Final = 8


class Namespace(NamedTuple):
    """Blocks of one namespace are interchangeable: one tenant, one model's KV, page layout, group and block size.

    It is part of every key in memory, on disk and in the store.
    ``layout_digest`` and ``identity`` are 32 hexadecimal digits each.
    """

    tenant: int
    layout_digest: str
    """The layout of a page: layers, roles, dtypes, formats, scales, and which of the model's heads it holds."""
    identity: str
    """The model whose KV it is: see ``identity_of``."""
    group: str
    """The page space, or the group of layers in it, whose pages they are: one hash may name a block of each."""
    block_pages: int


class BlockKey(NamedTuple):
    """One cached block: its namespace, and the 16-byte hash that the engine gave it."""

    namespace: Namespace
    hash: bytes


@functools.lru_cache(maxsize=1024)
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


_HOST_ALONE: Final = (Tier.HOST,)


class BlockState(Enum):
    """The states of a block."""

    WRITING = auto()
    """Its bytes are being written: invisible, and never evicted."""
    READY = auto()
    """Visible, in at least one tier."""
    DOOMED = auto()
    """Removed, but its bytes in the host tier are still pinned."""
    GONE = auto()


NO_PINS: Final[Mapping[int, int]] = MappingProxyType({})


class CachedBlock(msgspec.Struct, eq=False, gc=False):
    """``block_pages`` pages under a hash. Compared by identity: the hash may be stored again after this is gone.

    A daemon has up to millions of them. So each takes little memory, what is one number a page is kept in bytes, and
    they are not looked at by garbage collections: a block refers to nothing that could refer to it.

    Attributes:
        namespace: of the block.
        hash: 16 bytes.
        parent: the hash of the block before it; None for the first one, or if it is not known.
        size_bytes: of all its pages, a multiple of ``namespace.block_pages``.
        depth: how many blocks are before it, as far as they are known.
        state: WRITING at first.
        pins: number of pins by holder; replaced, never changed.
        serial: its position in the list of all blocks.
    """

    namespace: Namespace
    hash: bytes
    parent: bytes | None
    size_bytes: int
    depth: int = 0
    on_disk: bool = False
    in_remote: bool = False
    pins: Mapping[int, int] = NO_PINS
    state: BlockState = BlockState.WRITING
    serial: int = 0
    _offsets: bytes | None = None
    _digests: bytes = b""

    @property
    def offsets(self) -> Offsets | None:
        """Return the offsets of its pages in the arena, ``(block_pages,)``; None if it is not in the host tier."""
        return None if self._offsets is None else np.frombuffer(self._offsets, np.int64)

    @offsets.setter
    def offsets(self, offsets: Offsets | None) -> None:
        self._offsets = None if offsets is None else offsets.tobytes()

    @property
    def digests(self) -> Digests:
        """Return the digests of its pages."""
        return struct.unpack(f"={len(self._digests) // DIGEST_BYTES}Q", self._digests)

    @digests.setter
    def digests(self, digests: Digests) -> None:
        self._digests = struct.pack(f"={len(digests)}Q", *digests)

    def __repr__(self) -> str:
        """Show the start of the hash, which reveals no tokens, and the state."""
        where = "+".join(self.tiers) or "nowhere"
        return f"<CachedBlock {self.hash[:4].hex()} {self.state.name} {where} pins={dict(self.pins)}>"

    @property
    def key(self) -> BlockKey:
        """Return its name."""
        return BlockKey(self.namespace, self.hash)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Return the tiers that have it, the nearest first."""
        if not (self.on_disk or self.in_remote):
            return () if self._offsets is None else _HOST_ALONE
        there = ((Tier.HOST, self.in_host), (Tier.DISK, self.on_disk), (Tier.REMOTE, self.in_remote))
        return tuple(tier for tier, present in there if present)

    @property
    def in_host(self) -> bool:
        """Return whether its bytes are in the host tier."""
        return self._offsets is not None

    @property
    def page_bytes(self) -> int:
        """Return the size of one of its pages in a tier."""
        return self.size_bytes // self.namespace.block_pages

    @property
    def evictable(self) -> bool:
        """Return whether the host tier may evict it."""
        return self.state is BlockState.READY and self._offsets is not None and not self.pins


def place_of(block: CachedBlock) -> Place:
    """Return where a block is among the others, for eviction."""
    return Place(block.namespace, block.hash, block.parent, block.depth)


def place_all(blocks: Sequence[CachedBlock], offsets: Offsets, digests: npt.NDArray[np.uint64] | None) -> None:
    """Give blocks of equally many pages their bytes in the arena, ``(blocks, pages)``; digests alike, or None."""
    counts = {len(blocks), len(offsets), len(blocks if digests is None else digests)}
    assert len(counts) == 1, f"places and digests of {counts} blocks"
    if not blocks:
        return
    step = offsets.shape[1] * offsets.itemsize
    places, hashed = offsets.tobytes(), b"" if digests is None else digests.tobytes()
    for number, block in enumerate(blocks):  # by their properties, one after another, it takes ten times as long
        block._offsets = places[number * step : (number + 1) * step]  # noqa: SLF001
        block._digests = hashed[number * step : (number + 1) * step]  # noqa: SLF001


def offsets_of(blocks: Sequence[CachedBlock]) -> Offsets:
    """Return the offsets of all pages of blocks that are in the host tier, one after another."""
    return np.frombuffer(b"".join([one._offsets or b"" for one in blocks]), np.int64)  # noqa: SLF001


def digests_of(blocks: Sequence[CachedBlock]) -> npt.NDArray[np.uint64]:
    """Return the digests of all pages of blocks, one after another; fewer where a block has none."""
    return np.frombuffer(b"".join([one._digests for one in blocks]), np.uint64)  # noqa: SLF001


_STRETCH: Final = 4096  # blocks of the list that are looked at to remove dead ones: a fraction of a millisecond


class ListPage(NamedTuple):
    """A part of the list."""

    blocks: list[CachedBlock]
    """In their current state; may be empty."""
    next_position: int | None
    """Where to continue; None at the end."""


class _Stretch:
    """Blocks whose serials follow each other, dead ones among them."""

    __slots__ = ("blocks", "dead")

    def __init__(self) -> None:
        self.blocks: list[CachedBlock] = []
        self.dead = 0


class BlockListing:
    """All visible blocks, in the order in which they became visible.

    A reader of all parts meets each block that stays exactly once, whatever else changes.
    """

    def __init__(self) -> None:
        self._stretches: dict[int, _Stretch] = {}  # by serial // _STRETCH
        self._numbers: list[int] = []  # their keys, ascending
        self._last_serial = self._first = new_number()
        self._count = 0

    def __len__(self) -> int:
        """Return the number of visible blocks."""
        return self._count

    def add(self, block: CachedBlock) -> None:
        """Append a block that became READY."""
        self._last_serial += 1
        block.serial = self._last_serial
        number = block.serial // _STRETCH
        stretch = self._stretches.get(number)
        if stretch is None:
            stretch = self._stretches[number] = _Stretch()
            self._numbers.append(number)
        stretch.blocks.append(block)
        self._count += 1

    def discard(self, block: CachedBlock) -> None:
        """Remove a block that is no longer READY; of its stretch, the dead are dropped once they are the most."""
        number = block.serial // _STRETCH
        stretch = self._stretches[number]
        self._count -= 1
        stretch.dead += 1
        if 2 * stretch.dead <= len(stretch.blocks):
            return
        stretch.blocks = [one for one in stretch.blocks if one.state is BlockState.READY]
        stretch.dead = 0
        if not stretch.blocks:
            del self._stretches[number]
            del self._numbers[bisect_left(self._numbers, number)]

    def page(self, position: int, limit: int) -> ListPage:
        """Return blocks after ``position``.

        Args:
            position: 0 for the first part; then the ``next_position`` of the previous part.
            limit: how many blocks to look at, at least 1: bounds the time of the call.

        Raises:
            InvalidFieldError: the position is none of this list.
        """
        if position and not self._first < position <= self._last_serial:
            raise InvalidFieldError(
                "it is a position in the list of another daemon, or of this one before its restart: begin again at 0",
                field="position",
            )
        seen: list[CachedBlock] = []
        first = bisect_left(self._numbers, (position + 1) // _STRETCH)
        for number in islice(self._numbers, first, None):
            blocks = self._stretches[number].blocks
            start = bisect_right(blocks, position, key=_serial)
            seen += blocks[start : start + limit + 1 - len(seen)]
            if len(seen) > limit:
                break
        more = len(seen) > limit
        seen = seen[:limit]
        return ListPage([block for block in seen if block.state is BlockState.READY], seen[-1].serial if more else None)


def _serial(block: CachedBlock) -> int:
    return block.serial

"""The prefix cache: LOOKUP, LOAD, STORE, UNPIN; CACHE_LIST, CACHE_PIN, CACHE_EVICT for operators; CACHE_EVENTS.

A cached block holds ``block_pages`` pages of one page space, under the 16-byte hash that the caller computes over all
tokens up to its end (see ``kvferry.clients.hashing``). Hashes travel one after another as bytes: a message names the
blocks it is about and no token.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.protocol.base import Body, PageCount
from kvferry.protocol.device_event import DeviceEvent
from kvferry.protocol.ids import MAIN, ComponentName, PoolName

HASH_BYTES = 16
MAX_HASHES = 65_536
Hashes = Annotated[bytes, Meta(max_length=HASH_BYTES * MAX_HASHES)]
"""16 bytes a block, in the order of the prompt."""

ParentHash = Annotated[bytes, Meta(max_length=HASH_BYTES)]
BlockPages = Annotated[int, Meta(ge=1, le=1024)]
LeaseNumber = Annotated[int, Meta(ge=1, lt=1 << 62)]
Position = Annotated[int, Meta(ge=0, lt=1 << 62)]
Tier = Literal["host", "disk", "remote"]


class Lookup(Body, frozen=True, kw_only=True, tag="LOOKUP"):
    """Ask how many leading ones of these blocks are cached, and pin them for this session's instance.

    Blocks of lower tiers are brought to the host tier meanwhile. The pins are a lease: they end with UNPIN, with the
    instance, or, all but those that RESTORE-class work still reads, with the daemon.
    """

    pool: PoolName
    hashes: Hashes
    space: ComponentName = MAIN
    block_pages: BlockPages = 1
    lease: LeaseNumber | None = None
    """A lease of this instance to go on from: the hashes follow its last block."""
    pin: bool = True


class Found(Body, frozen=True, kw_only=True, tag="FOUND"):
    """LOOKUP's reply: the longest prefix, in blocks, and how many of them are in which best tier.

    ``lease`` is 0 where nothing was pinned. A lease that was gone on from counts all its blocks in ``lease_blocks``.
    """

    blocks: int
    lease: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0
    lease_blocks: int = 0


class Load(Body, frozen=True, kw_only=True, tag="LOAD"):
    """Copy blocks of a lease into pages of this instance, from block ``first_block`` on, ``block_pages`` pages each.

    Answered by OPERATION_STARTED; TIER_DONE follows. A block that is gone or damaged by then is CACHE_MISS, which says
    how many blocks before it are in their pages.
    """

    lease: LeaseNumber
    pool: PoolName
    pages: PageCount
    first_block: Position = 0
    after: DeviceEvent | None = None
    """Wait for this before the pages are written."""
    unpin: bool = False
    """End the lease with this operation, however it ends: done, failed or cancelled."""

    def page_counts(self) -> tuple[int, ...]:
        """Return the one list's length."""
        return (self.pages,)


class Store(Body, frozen=True, kw_only=True, tag="STORE"):
    """Put blocks of this instance's pages into the cache: those that are not there already.

    Answered by OPERATION_STARTED; TIER_DONE follows. The pages may not be written before it. A block can be found once
    it is there as a whole.
    """

    pool: PoolName
    hashes: Hashes
    pages: PageCount
    parent: ParentHash = b""
    """The hash of the block before the first one; none: the first block begins the prompt."""
    space: ComponentName = MAIN
    block_pages: BlockPages = 1
    after: DeviceEvent | None = None
    """Wait for this before the pages are read."""

    def page_counts(self) -> tuple[int, ...]:
        """Return the one list's length."""
        return (self.pages,)


class Unpin(Body, frozen=True, kw_only=True, tag="UNPIN"):
    """End a lease of this session's instance."""

    lease: LeaseNumber


class Unpinned(Body, frozen=True, kw_only=True, tag="UNPINNED"):
    """UNPIN's reply: how many blocks the lease had."""

    blocks: int


class CachedBlockStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One cached block. ``hash`` and ``parent`` in hexadecimal digits.

    ``model`` is the label of the model whose KV it is, ``NAME@REVISION+ADAPTER``, and ``identity`` 32 hexadecimal
    digits over that and its salt: blocks of two identities never stand for each other.
    """

    hash: str
    layout_digest: str
    space: str
    block_pages: int
    size_bytes: int
    tiers: tuple[str, ...]
    parent: str = ""
    pinned_by: tuple[str, ...] = ()
    identity: str = ""
    model: str = ""


class CacheList(Body, frozen=True, kw_only=True, tag="CACHE_LIST"):
    """Ask for this tenant's cached blocks, a page of the list at a time, from ``position`` 0 on.

    Blocks come and go meanwhile: whoever applies the events from the first page's ``cursor`` on ends with the truth.
    """

    position: Position = 0
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000


class CacheListed(Body, frozen=True, kw_only=True, tag="CACHE_LISTED"):
    """CACHE_LIST's reply. ``position`` is where the list goes on; None: this was the end."""

    blocks: tuple[CachedBlockStatus, ...]
    cursor: int
    position: int | None = None


class CachePin(Body, frozen=True, kw_only=True, tag="CACHE_PIN"):
    """Keep blocks in the cache whatever happens, or no longer: of every model, layout and space that has the hash."""

    hashes: Hashes
    pinned: bool = True


class CachePinned(Body, frozen=True, kw_only=True, tag="CACHE_PINNED"):
    """CACHE_PIN's reply: how many blocks were found."""

    blocks: int


class CacheEvict(Body, frozen=True, kw_only=True, tag="CACHE_EVICT"):
    """Drop this tenant's blocks of these hashes from every tier, or all; those that are pinned stay."""

    hashes: Hashes = b""
    everything: bool = False


class CacheEvicted(Body, frozen=True, kw_only=True, tag="CACHE_EVICTED"):
    """CACHE_EVICT's reply: how many blocks are gone, and how many stay because they are pinned or being written."""

    blocks: int
    size_bytes: int
    kept: int


class CacheEvents(Body, frozen=True, kw_only=True, tag="CACHE_EVENTS"):
    """Ask for what has changed in this tenant's cache from ``cursor`` on; answered as soon as something has.

    Where nothing changes within the request's deadline the answer has no change. Cursors count from 1, which is the
    first change of all, and belong to the daemon's boot id.
    """

    cursor: Annotated[int, Meta(ge=1, lt=1 << 62)]
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000


class CacheChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Blocks that are in a tier from now on, or no longer. Of stored ones each is the parent of the next.

    ``identity`` and ``model`` as in CACHE_LIST.
    """

    kind: Literal["stored", "evicted"]
    tier: Tier
    layout_digest: str
    space: str
    block_pages: int
    hashes: bytes
    parent: bytes = b""
    identity: str = ""
    model: str = ""


class CacheChanges(Body, frozen=True, kw_only=True, tag="CACHE_CHANGES"):
    """CACHE_EVENTS's reply: the changes, and the cursor to ask with next.

    ``lost``: some from the cursor that was asked with on are not remembered any more; list the cache anew.
    """

    changes: tuple[CacheChange, ...]
    cursor: int
    lost: bool = False

"""Offload and restore: OFFLOAD, RESTORE, DROP_SNAPSHOT, SNAPSHOTS, CANCEL_OPERATION, and the event TIER_DONE.

An operation (OFFLOAD, RESTORE, STORE or LOAD) is accepted immediately and ended by one TIER_DONE.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.protocol.base import MAX_PAGE_LISTS, AnsweredBy, DeviceEvent, PageCount, PageList, ReplyBody
from kvferry.protocol.ids import MAIN, ComponentName, Hex128, PoolName

OperationNumber = Annotated[int, Meta(ge=1, lt=1 << 62)]
FewLists = Annotated[tuple[PageList, ...], Meta(max_length=MAX_PAGE_LISTS)]
SomeLists = Annotated[tuple[PageList, ...], Meta(min_length=1, max_length=MAX_PAGE_LISTS)]


class Offloading(ReplyBody, frozen=True, kw_only=True, tag="OFFLOADING"):
    """OFFLOAD's reply: the snapshot's name. The snapshot can be restored after TIER_DONE."""

    operation: int
    snapshot: str


class Offload(AnsweredBy[Offloading], frozen=True, kw_only=True, tag="OFFLOAD"):
    """Copy these pages of this session to the host tier, as a snapshot.

    Answered by OFFLOADING immediately; TIER_DONE follows. Until then the pages must not be written, or freed other than
    by ``release`` of this message.
    """

    pool: PoolName
    lists: SomeLists
    release: bool = False
    """Free the pages once they are copied; if the copy fails, the session keeps them."""
    after: DeviceEvent | None = None
    """Device event to wait for before the pages are read: the end of the kernels that fill them."""

    def page_counts(self) -> tuple[int, ...]:
        """Return each list's length."""
        return tuple([one.pages for one in self.lists])


class OperationStarted(ReplyBody, frozen=True, kw_only=True, tag="OPERATION_STARTED"):
    """The reply to RESTORE, STORE and LOAD: the checks passed, TIER_DONE follows."""

    operation: int


class Restore(AnsweredBy[OperationStarted], frozen=True, kw_only=True, tag="RESTORE"):
    """Copy a snapshot of this tenant into as many pages of this session, in a pool of the same layout.

    Answered by OPERATION_STARTED immediately; TIER_DONE follows. If a checksum is wrong, or the operation is
    stopped midway, the contents of the listed pages are undefined.
    """

    after_restart = "again"

    snapshot: Hex128
    pool: PoolName
    lists: FewLists = ()
    """As many pages for each component as the snapshot has; empty with ``allocate``."""
    allocate: bool = False
    """Let the daemon allocate the pages for this session once enough are free; TIER_DONE has their ids."""
    drop: bool = False
    """Drop the snapshot once it is restored."""
    after: DeviceEvent | None = None
    """Device event to wait for before the pages are written: the end of the kernels that still read them."""

    def page_counts(self) -> tuple[int, ...]:
        """Return each list's length."""
        return tuple([one.pages for one in self.lists])


class SnapshotDropped(ReplyBody, frozen=True, kw_only=True, tag="SNAPSHOT_DROPPED"):
    """DROP_SNAPSHOT's reply. ``deferred``: restores still read it; its memory is freed after them."""

    snapshot: str
    deferred: bool


class DropSnapshot(AnsweredBy[SnapshotDropped], frozen=True, kw_only=True, tag="DROP_SNAPSHOT"):
    """Drop a snapshot of this tenant. Running restores of it continue."""

    after_restart = "again"

    snapshot: Hex128


class SnapshotReport(ReplyBody, frozen=True, kw_only=True, tag="SNAPSHOT_REPORT"):
    """SNAPSHOTS's reply, oldest first."""

    snapshots: tuple[SnapshotStatus, ...]


class Snapshots(AnsweredBy[SnapshotReport], frozen=True, kw_only=True, tag="SNAPSHOTS"):
    """Ask for this tenant's snapshots."""

    after_restart = "again"


class SnapshotList(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One page list of a snapshot."""

    component: str
    count: int
    tokens: int | None = None


class SnapshotStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One snapshot. ``session`` is None if its session has ended: then it is dropped after a while.

    ``checksum`` is XXH3-128 over the checksums (XXH3-64) of its ``chunks`` chunks, each a page of a list; empty if the
    daemon computes none. ``state``: ``writing``, ``network`` (a transfer fills it) or ``ready``.
    """

    snapshot: str
    pool: str
    layout_digest: str
    lists: tuple[SnapshotList, ...]
    tokens: int | None
    chunks: int
    size_bytes: int
    checksum: str
    age_ms: int
    session: int | None
    state: str
    restores: int = 0
    """Number of running restores."""
    model: str = ""
    """Label of the source pool's model, ``NAME@REVISION+ADAPTER``; empty if the pool has no model identity."""


class OperationCancelled(ReplyBody, frozen=True, kw_only=True, tag="OPERATION_CANCELLED"):
    """CANCEL_OPERATION's reply. ``was_done``: the operation had already ended, or its request was refused."""

    was_done: bool


class CancelOperation(AnsweredBy[OperationCancelled], frozen=True, kw_only=True, tag="CANCEL_OPERATION"):
    """Cancel an operation of this session. Answered once no byte of it moves any more.

    Before its number is known it is named by its request, which may still wait for its event: that is CANCELLED then.
    """

    after_restart = "done"

    operation: OperationNumber | None = None
    request: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    """Without ``operation``: the id of the message that asked for it."""
    part: PageCount = 0
    """If that is a BATCH: which of its requests, counted from 0."""


# -- the prefix cache: LOOKUP, LOAD, STORE, UNPIN; CACHE_LIST, CACHE_PIN, CACHE_EVICT for operators; CACHE_EVENTS.
#
# A cached block holds ``block_pages`` pages of one group, under the 16-byte hash that the caller computes over all
# tokens up to the block's end (see ``kvferry.clients.hashing``). A *group* is a page space, or one of several groups of
# layers in it: what has a page list of its own. Blocks of several groups that end at one token have one hash. Hashes
# travel as concatenated bytes; messages carry no tokens.


HASH_BYTES = 16
MAX_HASHES = 65_536
Hashes = Annotated[bytes, Meta(max_length=HASH_BYTES * MAX_HASHES)]
"""16 bytes per block, in prompt order."""

ParentHash = Annotated[bytes, Meta(max_length=HASH_BYTES)]
BlockPages = Annotated[int, Meta(ge=1, le=1024)]
LeaseNumber = Annotated[int, Meta(ge=1, lt=1 << 62)]
Position = Annotated[int, Meta(ge=0, lt=1 << 62)]
Tier = Literal["host", "disk", "remote"]
LEASE_S = 300.0
"""How long a lease lasts after its last use: LOOKUP, LOAD with it, or the end of a LOAD."""


class Found(ReplyBody, frozen=True, kw_only=True, tag="FOUND"):
    """LOOKUP's reply: how many blocks of the prompt are cached in every group, as far as it needs them.

    ``host``, ``disk`` and ``remote`` count the blocks found, of all groups, by the tier of their fastest copy.
    ``lease`` is 0 if nothing was pinned; ``lease_blocks`` are the prompt's blocks that the lease has, including earlier
    ones.
    """

    blocks: int
    lease: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0
    lease_blocks: int = 0


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group of a LOOKUP: how many of its pages are under a hash, and which blocks a cached prefix needs of it."""

    group: ComponentName = MAIN
    block_pages: BlockPages = 1
    last: Annotated[int, Meta(ge=1, le=MAX_HASHES)] | None = None
    """So many before the prefix's end: as many as a window reaches into, 1 for a state. None: all."""


class Lookup(AnsweredBy[Found], frozen=True, kw_only=True, tag="LOOKUP"):
    """Ask how many leading blocks of this list are cached, and pin them for this session's instance.

    They end where each group has what it needs of them.

    Blocks of lower tiers are promoted to the host tier meanwhile. The pins form a lease, which ends with UNPIN, with
    the instance or with the daemon, or when it was not used for LEASE_S; each LOOKUP and LOAD with it is a use. Blocks
    that an operation still reads stay until it has ended.
    """

    after_restart = "again"

    pool: PoolName
    hashes: Hashes
    groups: Annotated[tuple[CacheGroup, ...], Meta(min_length=1, max_length=16)] = (CacheGroup(),)
    lease: LeaseNumber | None = None
    """A lease of this instance to extend: the hashes continue after its last block. All of its groups need all blocks.
    """
    pin: bool = True


class Load(AnsweredBy[OperationStarted], frozen=True, kw_only=True, tag="LOAD"):
    """Copy a group's blocks of a lease into pages of this instance, ``block_pages`` each.

    Answered by OPERATION_STARTED; TIER_DONE follows. If a block is evicted or damaged by then, the operation fails with
    CACHE_MISS; TIER_DONE gives how many blocks before it were loaded.
    """

    lease: LeaseNumber
    pool: PoolName
    pages: PageCount
    first_block: Position = 0
    """Of the prompt. Of a group that needs the last blocks alone, the lease has no earlier ones."""
    group: ComponentName = MAIN
    after: DeviceEvent | None = None
    """Device event to wait for before the pages are written."""
    unpin: bool = False
    """End the lease when this operation ends, whether it succeeds, fails or is cancelled."""

    def page_counts(self) -> tuple[int, ...]:
        """Return the one list's length."""
        return (self.pages,)


class ChainStart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where another prompt's blocks begin in the list of a STORE."""

    first: Annotated[int, Meta(ge=1, lt=MAX_HASHES)]
    parent: ParentHash = b""
    """The hash of the block before that one; empty if it begins the prompt."""


class Store(AnsweredBy[OperationStarted], frozen=True, kw_only=True, tag="STORE"):
    """Store a group's blocks of this instance's pages in the cache, except those that are cached already.

    They may be of several prompts: all of them are stored, or none.

    Answered by OPERATION_STARTED; TIER_DONE follows, before which the pages must not be written. A block can be found
    once it is complete.
    """

    pool: PoolName
    hashes: Hashes
    pages: PageCount
    parent: ParentHash = b""
    """The hash of the block before the first one; empty if the first block begins the prompt."""
    chains: Annotated[tuple[ChainStart, ...], Meta(max_length=MAX_HASHES)] = ()
    """Where the blocks of further prompts begin, in ascending order."""
    group: ComponentName = MAIN
    block_pages: BlockPages = 1
    after: DeviceEvent | None = None
    """Device event to wait for before the pages are read."""

    def page_counts(self) -> tuple[int, ...]:
        """Return the one list's length."""
        return (self.pages,)


class Unpinned(ReplyBody, frozen=True, kw_only=True, tag="UNPINNED"):
    """UNPIN's reply: the number of blocks of the lease."""

    blocks: int


class Unpin(AnsweredBy[Unpinned], frozen=True, kw_only=True, tag="UNPIN"):
    """End a lease of this session's instance."""

    after_restart = "done"

    lease: LeaseNumber


class CachedBlockStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One cached block. ``hash`` and ``parent`` are hexadecimal.

    ``model`` is the label of its model, ``NAME@REVISION+ADAPTER``; ``identity`` is 32 hexadecimal digits over the label
    and the salt. A block of one identity is never used for another.
    """

    hash: str
    layout_digest: str
    group: str
    block_pages: int
    size_bytes: int
    tiers: tuple[str, ...]
    parent: str = ""
    pinned_by: tuple[str, ...] = ()
    identity: str = ""
    model: str = ""


class CacheListed(ReplyBody, frozen=True, kw_only=True, tag="CACHE_LISTED"):
    """CACHE_LIST's reply. ``position`` is where to continue; None at the end of the list."""

    blocks: tuple[CachedBlockStatus, ...]
    cursor: int
    position: int | None = None


class CacheList(AnsweredBy[CacheListed], frozen=True, kw_only=True, tag="CACHE_LIST"):
    """Ask for this tenant's cached blocks, ``limit`` at a time, from ``position`` 0 on.

    The cache changes between requests: to end with the current state, apply CACHE_EVENTS from the ``cursor`` of the
    first reply on.
    """

    after_restart = "again"

    position: Position = 0
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000


class CachePinned(ReplyBody, frozen=True, kw_only=True, tag="CACHE_PINNED"):
    """CACHE_PIN's reply: the number of blocks found."""

    blocks: int


class CachePin(AnsweredBy[CachePinned], frozen=True, kw_only=True, tag="CACHE_PIN"):
    """Pin the blocks of all groups with these hashes against eviction, or unpin them.

    A hash names blocks only within one identity: give either the pool or the identity, as for CACHE_EVICT.
    """

    after_restart = "again"

    hashes: Hashes
    pinned: bool = True
    pool: PoolName | None = None
    identity: Hex128 | None = None


class CacheEvicted(ReplyBody, frozen=True, kw_only=True, tag="CACHE_EVICTED"):
    """CACHE_EVICT's reply: blocks and bytes dropped, and blocks kept because they are pinned or being written."""

    blocks: int
    size_bytes: int
    kept: int


class CacheEvict(AnsweredBy[CacheEvicted], frozen=True, kw_only=True, tag="CACHE_EVICT"):
    """Drop blocks of this tenant from every tier: those with these hashes, or all; pinned blocks stay.

    ``pool`` or ``identity`` says whose blocks they are; ``hashes`` need one of the two. ``everything`` without either
    drops the blocks of all models.
    """

    after_restart = "again"

    hashes: Hashes = b""
    everything: bool = False
    pool: PoolName | None = None
    """Only blocks of this pool's model identity and layout."""
    identity: Hex128 | None = None
    """Only blocks of this identity, as CACHE_LIST gives it, of every layout."""


class CacheChanges(ReplyBody, frozen=True, kw_only=True, tag="CACHE_CHANGES"):
    """CACHE_EVENTS's reply: the changes, and the cursor of the next request.

    ``lost``: some changes from the requested cursor on are no longer remembered; list the cache again.
    """

    changes: tuple[CacheChange, ...]
    cursor: int
    lost: bool = False


class CacheEvents(AnsweredBy[CacheChanges], frozen=True, kw_only=True, tag="CACHE_EVENTS"):
    """Ask for changes of this tenant's cache from ``cursor`` on; answered as soon as there is one.

    If nothing changes within the request's deadline, the reply has no changes. Cursor 1 is that of the first change;
    others come from CACHE_LISTED and CACHE_CHANGES. With one of another boot id of the daemon, changes are ``lost``.
    """

    after_restart = "absent"

    cursor: Annotated[int, Meta(ge=1, lt=1 << 62)]
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000


class CacheChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Blocks that were stored in a tier or evicted from it. Of stored blocks, each is the parent of the next.

    ``identity`` and ``model`` are as in CACHE_LIST.
    """

    kind: Literal["stored", "evicted"]
    tier: Tier
    layout_digest: str
    group: str
    block_pages: int
    hashes: bytes
    parent: bytes = b""
    identity: str = ""
    model: str = ""

"""The requests about tiers as values; see ``operations``. Hashes are joined here, and ids checked to be ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy.typing as npt

from kvferry.clients.operations import Operation, Pages, pages, reply_body
from kvferry.protocol.cache_messages import (
    HASH_BYTES,
    CacheChanges,
    CacheEvents,
    CacheEvict,
    CacheEvicted,
    CacheList,
    CacheListed,
    CachePin,
    CachePinned,
    Found,
    Load,
    Lookup,
    Store,
    Unpin,
    Unpinned,
)
from kvferry.protocol.codec import PageIds
from kvferry.protocol.event_points import EventPoint
from kvferry.protocol.tier_messages import (
    CancelWork,
    DropSnapshot,
    Offload,
    Restore,
    SnapshotDropped,
    SnapshotReport,
    Snapshots,
    WorkCancelled,
)


def joined(hashes: Sequence[bytes]) -> bytes:
    """Return block hashes as they travel.

    Raises:
        ValueError: one has not 16 bytes.
    """
    wrong = next((number for number, one in enumerate(hashes) if len(one) != HASH_BYTES), None)
    if wrong is not None:
        raise ValueError(f"hash {wrong} has {len(hashes[wrong])} bytes, not {HASH_BYTES}")
    return b"".join(hashes)


def offload_body(pool: str, lists: Sequence[Pages], after: EventPoint | None, *, release: bool) -> Offload:
    """Return an OFFLOAD's body."""
    return Offload(pool=pool, lists=tuple(one.head for one in lists), release=release, after=after)


def restore_body(
    pool: str,
    snapshot: str,
    lists: Sequence[Pages] | None,
    after: EventPoint | None,
    *,
    drop: bool,
    any_model: bool = False,
) -> Restore:
    """Return a RESTORE's body; without lists the daemon takes the pages."""
    return Restore(
        snapshot=snapshot,
        pool=pool,
        lists=tuple(one.head for one in lists or ()),
        allocate=lists is None,
        drop=drop,
        after=after,
        any_model=any_model,
    )


def store_body(
    pool: str,
    hashes: Sequence[bytes],
    ids: npt.ArrayLike,
    *,
    parent: bytes | None,
    space: str,
    block_pages: int,
    after: EventPoint | None,
) -> tuple[Store, PageIds]:
    """Return a STORE's body and its page ids."""
    array = pages(ids).ids
    body = Store(
        pool=pool,
        hashes=joined(hashes),
        pages=len(array),
        parent=parent or b"",
        space=space,
        block_pages=block_pages,
        after=after,
    )
    return body, array


def load_body(
    pool: str, lease: int, ids: npt.ArrayLike, first_block: int, after: EventPoint | None, *, unpin: bool
) -> tuple[Load, PageIds]:
    """Return a LOAD's body and its page ids."""
    array = pages(ids).ids
    body = Load(lease=lease, pool=pool, pages=len(array), first_block=first_block, after=after, unpin=unpin)
    return body, array


def lookup(
    pool: str, hashes: Sequence[bytes], space: str, block_pages: int, lease: int | None, *, pin: bool
) -> Operation[Found]:
    """Ask for the longest cached prefix."""
    body = Lookup(pool=pool, hashes=joined(hashes), space=space, block_pages=block_pages, lease=lease, pin=pin)
    return Operation(body, (), reply_body(Found))


def unpin(lease: int) -> Operation[Unpinned]:
    """End a lease."""
    return Operation(Unpin(lease=lease), (), reply_body(Unpinned))


def drop_snapshot(snapshot: str) -> Operation[SnapshotDropped]:
    """Give a snapshot up."""
    return Operation(DropSnapshot(snapshot=snapshot), (), reply_body(SnapshotDropped))


def snapshots() -> Operation[SnapshotReport]:
    """Ask for the user's snapshots."""
    return Operation(Snapshots(), (), reply_body(SnapshotReport))


def cancel_work(number: int) -> Operation[WorkCancelled]:
    """Give up a work."""
    return Operation(CancelWork(work=number), (), reply_body(WorkCancelled))


def cache_list(position: int, limit: int) -> Operation[CacheListed]:
    """Ask for a page of the list of cached blocks."""
    return Operation(CacheList(position=position, limit=limit), (), reply_body(CacheListed))


def cache_pin(hashes: Sequence[bytes], *, pinned: bool) -> Operation[CachePinned]:
    """Pin blocks by hand, or unpin them."""
    return Operation(CachePin(hashes=joined(hashes), pinned=pinned), (), reply_body(CachePinned))


def cache_evict(hashes: Sequence[bytes] | None) -> Operation[CacheEvicted]:
    """Drop blocks from every tier; None for all."""
    body = CacheEvict(hashes=joined(hashes or ()), everything=hashes is None)
    return Operation(body, (), reply_body(CacheEvicted))


def cache_events(cursor: int, limit: int) -> Operation[CacheChanges]:
    """Ask for the changes after a cursor."""
    return Operation(CacheEvents(cursor=cursor, limit=limit), (), reply_body(CacheChanges))

"""The requests about tiers as values; see ``calls``. Hashes are joined here, and ids checked to be ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy.typing as npt

from kvferry.clients.arguments import checked, page_ids, sequence, wrong_kind
from kvferry.clients.calls import IDS, Call, Pages, page_lists, reply_body
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
from kvferry.protocol.device_event import DeviceEvent
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.tier_messages import (
    CancelOperation,
    DropSnapshot,
    Offload,
    OperationCancelled,
    Restore,
    SnapshotDropped,
    SnapshotReport,
    Snapshots,
)


def joined(hashes: Sequence[bytes]) -> bytes:
    """Return block hashes as they travel.

    Raises:
        InvalidFieldError: they are no list of 16 bytes each.
    """
    every = sequence(hashes, "hashes", "hashes")
    for number, one in enumerate(every):
        if not isinstance(one, bytes):
            raise wrong_kind(one, f"hash of {HASH_BYTES} bytes", f"hashes[{number}]")
        if len(one) != HASH_BYTES:
            raise InvalidFieldError(f"{len(one)} bytes are no hash of {HASH_BYTES}", field=f"hashes[{number}]")
    return b"".join(every)


def offload_body(
    pool: str, lists: Sequence[Pages], after: DeviceEvent | None, *, release: bool
) -> tuple[Offload, list[PageIds]]:
    """Return an OFFLOAD's body and its page ids."""
    every = page_lists(lists)
    body = Offload(pool=pool, lists=tuple(one.head for one in every), release=release, after=after)
    return checked(body), [one.ids for one in every]


def restore_body(
    pool: str,
    snapshot: str,
    lists: Sequence[Pages] | None,
    after: DeviceEvent | None,
    *,
    drop: bool,
    any_model: bool = False,
) -> tuple[Restore, list[PageIds]]:
    """Return a RESTORE's body and its page ids; without lists the daemon takes the pages."""
    every = () if lists is None else page_lists(lists)
    heads = tuple(one.head for one in every)
    body = Restore(
        snapshot=snapshot,
        pool=pool,
        lists=heads,
        allocate=lists is None,
        drop=drop,
        after=after,
        any_model=any_model,
    )
    return checked(body), [one.ids for one in every]


def store_body(
    pool: str,
    hashes: Sequence[bytes],
    ids: npt.ArrayLike,
    *,
    parent: bytes | None,
    space: str,
    block_pages: int,
    after: DeviceEvent | None,
) -> tuple[Store, PageIds]:
    """Return a STORE's body and its page ids."""
    array = page_ids(ids, "ids")
    body = Store(
        pool=pool,
        hashes=joined(hashes),
        pages=len(array),
        parent=b"" if parent is None else parent,
        space=space,
        block_pages=block_pages,
        after=after,
    )
    return checked(body, IDS), array


def load_body(
    pool: str, lease: int, ids: npt.ArrayLike, first_block: int, after: DeviceEvent | None, *, unpin: bool
) -> tuple[Load, PageIds]:
    """Return a LOAD's body and its page ids."""
    array = page_ids(ids, "ids")
    body = Load(lease=lease, pool=pool, pages=len(array), first_block=first_block, after=after, unpin=unpin)
    return checked(body, IDS), array


def lookup(
    pool: str, hashes: Sequence[bytes], space: str, block_pages: int, lease: int | None, *, pin: bool
) -> Call[Found]:
    """Ask for the longest cached prefix."""
    body = Lookup(pool=pool, hashes=joined(hashes), space=space, block_pages=block_pages, lease=lease, pin=pin)
    return Call(checked(body), (), reply_body(Found))


def unpin(lease: int) -> Call[Unpinned]:
    """End a lease."""
    return Call(checked(Unpin(lease=lease)), (), reply_body(Unpinned))


def drop_snapshot(snapshot: str) -> Call[SnapshotDropped]:
    """Give a snapshot up."""
    return Call(checked(DropSnapshot(snapshot=snapshot)), (), reply_body(SnapshotDropped))


def snapshots() -> Call[SnapshotReport]:
    """Ask for the user's snapshots."""
    return Call(Snapshots(), (), reply_body(SnapshotReport))


def cancel_operation(number: int) -> Call[OperationCancelled]:
    """Give up an operation."""
    return Call(CancelOperation(operation=number), (), reply_body(OperationCancelled))


def cache_list(position: int, limit: int) -> Call[CacheListed]:
    """Ask for a page of the list of cached blocks."""
    return Call(checked(CacheList(position=position, limit=limit)), (), reply_body(CacheListed))


def cache_pin(hashes: Sequence[bytes], *, pinned: bool) -> Call[CachePinned]:
    """Pin blocks by hand, or unpin them."""
    return Call(checked(CachePin(hashes=joined(hashes), pinned=pinned)), (), reply_body(CachePinned))


def cache_evict(hashes: Sequence[bytes] | None) -> Call[CacheEvicted]:
    """Drop blocks from every tier; None for all."""
    body = CacheEvict(hashes=joined(() if hashes is None else hashes), everything=hashes is None)
    return Call(checked(body), (), reply_body(CacheEvicted))


def cache_events(cursor: int, limit: int) -> Call[CacheChanges]:
    """Ask for the changes after a cursor."""
    return Call(checked(CacheEvents(cursor=cursor, limit=limit)), (), reply_body(CacheChanges))

"""One fixed message of every type about tiers; see ``samples``."""

from __future__ import annotations

from typing import Final

from kvferry.protocol.base import DeviceEvent, PageList, ReplyBody, RequestBody
from kvferry.protocol.errors import ErrorInfo
from kvferry.protocol.events import TierDone
from kvferry.protocol.tier_messages import (
    CacheChange,
    CacheChanges,
    CachedBlockStatus,
    CacheEvents,
    CacheEvict,
    CacheEvicted,
    CacheList,
    CacheListed,
    CachePin,
    CachePinned,
    CancelOperation,
    DropSnapshot,
    Found,
    Load,
    Lookup,
    Offload,
    Offloading,
    OperationCancelled,
    OperationStarted,
    Restore,
    SnapshotDropped,
    SnapshotList,
    SnapshotReport,
    Snapshots,
    SnapshotStatus,
    Store,
    Unpin,
    Unpinned,
)

SNAPSHOT: Final = "0123456789abcdef0123456789abcdef"
HASHES: Final = bytes(range(32))
AFTER: Final = DeviceEvent(event=2, value=5)
LISTS: Final = (PageList(pages=2, tokens=200), PageList(component="swa", first_page=1, pages=1))

REQUESTS: Final[dict[str, RequestBody]] = {
    "OFFLOAD": Offload(pool="decode", lists=LISTS, release=True, after=AFTER),
    "RESTORE": Restore(snapshot=SNAPSHOT, pool="decode", lists=LISTS, drop=True, after=AFTER),
    "DROP_SNAPSHOT": DropSnapshot(snapshot=SNAPSHOT),
    "SNAPSHOTS": Snapshots(),
    "CANCEL_OPERATION": CancelOperation(operation=9),
    "LOOKUP": Lookup(pool="decode", hashes=HASHES, space="swa", block_pages=4, lease=3, pin=False),
    "LOAD": Load(lease=3, pool="decode", pages=2, first_block=5, after=AFTER, unpin=True),
    "STORE": Store(pool="decode", hashes=HASHES, pages=2, parent=HASHES[:16], space="swa", block_pages=4, after=AFTER),
    "UNPIN": Unpin(lease=3),
    "CACHE_LIST": CacheList(position=7, limit=100),
    "CACHE_PIN": CachePin(hashes=HASHES, pinned=False),
    "CACHE_EVICT": CacheEvict(hashes=HASHES, everything=True),
    "CACHE_EVENTS": CacheEvents(cursor=7, limit=100),
}
REPLIES: Final[dict[str, ReplyBody]] = {
    "OFFLOADING": Offloading(operation=9, snapshot=SNAPSHOT),
    "OPERATION_STARTED": OperationStarted(operation=9),
    "SNAPSHOT_DROPPED": SnapshotDropped(snapshot=SNAPSHOT, deferred=True),
    "SNAPSHOT_REPORT": SnapshotReport(
        snapshots=(
            SnapshotStatus(
                snapshot=SNAPSHOT,
                pool="decode",
                layout_digest="0" * 32,
                lists=(SnapshotList(component="main", count=2, tokens=200),),
                tokens=200,
                chunks=2,
                size_bytes=8192,
                checksum="f" * 32,
                age_ms=1500,
                session=1,
                state="ready",
                restores=1,
                model="Qwen/Qwen3-8B@9c925d6+sql",
            ),
        )
    ),
    "OPERATION_CANCELLED": OperationCancelled(was_done=True),
    "FOUND": Found(blocks=3, lease=3, host=1, disk=1, remote=1, lease_blocks=8),
    "UNPINNED": Unpinned(blocks=8),
    "CACHE_LISTED": CacheListed(
        blocks=(
            CachedBlockStatus(
                hash="0" * 32,
                layout_digest="0" * 32,
                space="main",
                block_pages=4,
                size_bytes=8192,
                tiers=("host", "disk"),
                parent="f" * 32,
                pinned_by=("session 1",),
                identity="1e" * 16,
                model="Qwen/Qwen3-8B@9c925d6+sql",
            ),
        ),
        cursor=12,
        position=1000,
    ),
    "CACHE_PINNED": CachePinned(blocks=2),
    "CACHE_EVICTED": CacheEvicted(blocks=2, size_bytes=8192, kept=1),
    "CACHE_CHANGES": CacheChanges(
        changes=(
            CacheChange(
                kind="stored",
                tier="host",
                layout_digest="0" * 32,
                space="main",
                block_pages=4,
                hashes=HASHES,
                parent=HASHES[:16],
                identity="1e" * 16,
                model="Qwen/Qwen3-8B@9c925d6+sql",
            ),
        ),
        cursor=12,
        lost=True,
    ),
}
TIER_DONE: Final = TierDone(
    operation=9,
    kind="restore",
    error=ErrorInfo(code="CACHE_MISS", detail="block 3 of 8 is gone", retryable=False, field="", remedy="compute it"),
    snapshot=SNAPSHOT,
    copied_pages=3,
    moved_bytes=12288,
    waited_us=1000,
    moved_us=250,
    stored=1,
    present=2,
    loaded=3,
    lists=LISTS,
)

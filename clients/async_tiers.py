"""The asynchronous client's calls about the tiers; see ``sync_tiers`` for what each means and raises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import numpy.typing as npt

from kvferry.clients import tier_operations as operations
from kvferry.clients.async_tables import AsyncTables
from kvferry.clients.connection import milliseconds
from kvferry.clients.operations import Pages
from kvferry.clients.sync_requests import DEFAULT_DEADLINE_S
from kvferry.clients.sync_tiers import LIST_LIMIT
from kvferry.protocol.cache_messages import CacheChanges, CachedBlockStatus, CacheEvicted, Found, Load, Store
from kvferry.protocol.client_works import TierWork
from kvferry.protocol.codec import PageIds
from kvferry.protocol.event_points import EventPoint
from kvferry.protocol.ids import MAIN
from kvferry.protocol.tier_messages import (
    Offload,
    Restore,
    SnapshotDropped,
    SnapshotStatus,
    TierDone,
    WorkCancelled,
)


class AsyncTiers(AsyncTables):
    """Works of the tiers, snapshots and cached blocks."""

    # -- offload and restore

    def offload(
        self,
        pool: str,
        lists: Sequence[Pages],
        *,
        release: bool = False,
        after: EventPoint | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> TierWork:
        """See ``Client.offload``."""
        body = operations.offload_body(pool, lists, after, release=release)
        return self._begin_work(body, [one.ids for one in lists], deadline_s)

    def restore(
        self,
        pool: str,
        snapshot: str,
        lists: Sequence[Pages] | None = None,
        *,
        drop: bool = False,
        any_model: bool = False,
        after: EventPoint | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> TierWork:
        """See ``Client.restore``."""
        body = operations.restore_body(pool, snapshot, lists, after, drop=drop, any_model=any_model)
        return self._begin_work(body, [one.ids for one in lists or ()], deadline_s)

    async def wait_done(self, work: TierWork, timeout_s: float = DEFAULT_DEADLINE_S) -> TierDone:
        """See ``Client.wait_done``."""
        await self._wait_until(lambda: work.is_done, timeout_s, "the end of the work")
        return work.outcome()

    async def wait_accepted(self, work: TierWork, timeout_s: float = DEFAULT_DEADLINE_S) -> TierWork:
        """See ``Client.wait_accepted``."""
        await self._wait_until(lambda: work.number is not None or work.is_done, timeout_s, "the daemon's answer")
        if work.refused is not None:
            raise work.refused
        return work

    async def cancel_work(self, work: TierWork, *, deadline_s: float = DEFAULT_DEADLINE_S) -> WorkCancelled:
        """See ``Client.cancel_work``."""
        number = (await self.wait_accepted(work)).number
        if number is None:  # answered and done at once
            return WorkCancelled(was_done=True)
        return await self.call(operations.cancel_work(number), deadline_s=deadline_s)

    async def drop_snapshot(self, snapshot: str) -> SnapshotDropped:
        """See ``Client.drop_snapshot``."""
        return await self.call(operations.drop_snapshot(snapshot))

    async def snapshots(self) -> tuple[SnapshotStatus, ...]:
        """See ``Client.snapshots``."""
        return (await self.call(operations.snapshots())).snapshots

    # -- the prefix cache

    async def lookup(
        self,
        pool: str,
        hashes: Sequence[bytes],
        *,
        space: str = MAIN,
        block_pages: int = 1,
        lease: int | None = None,
        pin: bool = True,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> Found:
        """See ``Client.lookup``."""
        operation = operations.lookup(pool, hashes, space, block_pages, lease, pin=pin)
        return await self.call(operation, deadline_s=deadline_s)

    def load(
        self,
        pool: str,
        lease: int,
        ids: npt.ArrayLike,
        *,
        first_block: int = 0,
        unpin: bool = False,
        after: EventPoint | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> TierWork:
        """See ``Client.load``."""
        body, array = operations.load_body(pool, lease, ids, first_block, after, unpin=unpin)
        return self._begin_work(body, [array], deadline_s)

    def store(
        self,
        pool: str,
        hashes: Sequence[bytes],
        ids: npt.ArrayLike,
        *,
        parent: bytes | None = None,
        space: str = MAIN,
        block_pages: int = 1,
        after: EventPoint | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> TierWork:
        """See ``Client.store``."""
        body, array = operations.store_body(
            pool, hashes, ids, parent=parent, space=space, block_pages=block_pages, after=after
        )
        return self._begin_work(body, [array], deadline_s)

    async def unpin(self, lease: int) -> int:
        """See ``Client.unpin``."""
        return (await self.call(operations.unpin(lease))).blocks

    async def cached_blocks(self) -> AsyncIterator[CachedBlockStatus]:
        """See ``Client.cached_blocks``."""
        position: int | None = 0
        while position is not None:
            listed = await self.call(operations.cache_list(position, LIST_LIMIT))
            for one in listed.blocks:
                yield one
            position = listed.position

    async def cache_events(self, cursor: int, *, limit: int = LIST_LIMIT, timeout_s: float = 1.0) -> CacheChanges:
        """See ``Client.cache_events``."""
        return await self.call(operations.cache_events(cursor, limit), deadline_s=timeout_s)

    async def cache_cursor(self) -> int:
        """See ``Client.cache_cursor``."""
        return (await self.call(operations.cache_list(0, 1))).cursor

    async def pin_cached(self, hashes: Sequence[bytes], *, pinned: bool = True) -> int:
        """See ``Client.pin_cached``."""
        return (await self.call(operations.cache_pin(hashes, pinned=pinned))).blocks

    async def evict_cached(self, hashes: Sequence[bytes] | None = None) -> CacheEvicted:
        """See ``Client.evict_cached``."""
        return await self.call(operations.cache_evict(hashes))

    def _begin_work(
        self, body: Offload | Restore | Store | Load, ids: Sequence[PageIds], deadline_s: float
    ) -> TierWork:
        work, outgoing = self._core.work(body, ids, deadline_ms=milliseconds(deadline_s))
        self._put(outgoing)
        return work

"""The asynchronous client's calls about the tiers; see ``sync_tiers`` for what each means and raises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from kvferry.clients import tier_calls as calls
from kvferry.clients.arguments import seconds
from kvferry.clients.async_tables import AsyncTables
from kvferry.clients.submissions import DEFAULT_WAIT_S
from kvferry.clients.sync_tiers import LIST_LIMIT
from kvferry.protocol.cache_messages import CacheChanges, CachedBlockStatus, CacheEvicted, Found
from kvferry.protocol.client_operations import TierOperation
from kvferry.protocol.ids import MAIN
from kvferry.protocol.tier_messages import (
    OperationCancelled,
    SnapshotDropped,
    SnapshotStatus,
    TierDone,
)


class AsyncTiers(AsyncTables):
    """Operations of the tiers, snapshots and cached blocks."""

    # -- offload and restore

    async def wait_done(self, operation: TierOperation, timeout_s: float = DEFAULT_WAIT_S) -> TierDone:
        """Wait until an operation is done and return its event.

        Raises:
            KvferryError: it failed or was refused; or DEADLINE, and it is still under way.
        """
        self._check_operation(operation)
        await self._wait_until(lambda: operation.is_done, timeout_s, "the end of the operation")
        return operation.outcome()

    async def wait_accepted(self, operation: TierOperation, timeout_s: float = DEFAULT_WAIT_S) -> TierOperation:
        """Wait until the daemon has answered the request and return the operation: an OFFLOAD's now names its snapshot.

        Raises:
            KvferryError: it was refused; or DEADLINE, and there is no answer yet.
        """
        self._check_operation(operation)
        await self._wait_until(
            lambda: operation.number is not None or operation.is_done, timeout_s, "the daemon's answer"
        )
        if operation.refused is not None:
            raise operation.refused
        return operation

    async def cancel_operation(
        self, operation: TierOperation, *, deadline_s: float | None = None
    ) -> OperationCancelled:
        """Give an operation up; returns when no byte of it can move any more.

        Raises:
            UnknownOperationError: the daemon does not know it, or its end was acknowledged before.
        """
        number = (await self.wait_accepted(operation)).number
        if number is None:  # answered and done at once
            return OperationCancelled(was_done=True)
        return await self.call(calls.cancel_operation(number), deadline_s=deadline_s)

    async def drop_snapshot(self, snapshot: str) -> SnapshotDropped:
        """Give a snapshot up; restores that are under way go on.

        Raises:
            UnknownSnapshotError: this user has none of that name.
        """
        return await self.call(calls.drop_snapshot(snapshot))

    async def snapshots(self) -> tuple[SnapshotStatus, ...]:
        """Return this user's snapshots, oldest first."""
        return (await self.call(calls.snapshots())).snapshots

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
        deadline_s: float | None = None,
    ) -> Found:
        """Return how many leading blocks are cached, and pin them: ``found.lease`` is for ``load`` and ``unpin``.

        Args:
            pool: of the layout that the blocks have, and of their model: without one this is NO_MODEL.
            hashes: 16 bytes a block, see ``block_hashes``.
            space: the page space.
            block_pages: pages of a block.
            lease: of an earlier lookup, whose blocks come before these: only the new hashes travel.
            pin: keep what is found until ``unpin`` or the session's end.
            deadline_s: for the reply; lower tiers may be asked.
        """
        call = calls.lookup(pool, hashes, space, block_pages, lease, pin=pin)
        return await self.call(call, deadline_s=deadline_s)

    async def unpin(self, lease: int) -> int:
        """End a lease; return how many blocks it had.

        Raises:
            UnknownLeaseError: this session has none of that number.
        """
        return (await self.call(calls.unpin(lease))).blocks

    async def cached_blocks(self) -> AsyncIterator[CachedBlockStatus]:
        """Yield this user's cached blocks, asking for a page of the list at a time."""
        position: int | None = 0
        while position is not None:
            listed = await self.call(calls.cache_list(position, LIST_LIMIT))
            for one in listed.blocks:
                yield one
            position = listed.position

    async def cache_events(self, cursor: int, *, limit: int = LIST_LIMIT, timeout_s: float = 1.0) -> CacheChanges:
        """Return what changed in the cache from ``cursor`` on, 1 for all: at once, or as soon as something does.

        Nothing within ``timeout_s`` is an answer without a change. Whoever joins late takes ``cache_cursor``, lists the
        blocks, and goes on from that cursor.
        """
        seconds(timeout_s, "timeout_s")
        return await self.call(calls.cache_events(cursor, limit), deadline_s=timeout_s)

    async def cache_cursor(self) -> int:
        """Return the cursor of the next change."""
        return (await self.call(calls.cache_list(0, 1))).cursor

    async def pin_cached(self, hashes: Sequence[bytes], *, pinned: bool = True) -> int:
        """Keep blocks whatever happens, or no longer; return how many were found. For operators."""
        return (await self.call(calls.cache_pin(hashes, pinned=pinned))).blocks

    async def evict_cached(self, hashes: Sequence[bytes] | None = None) -> CacheEvicted:
        """Drop blocks from every tier, by default all; pinned ones stay. For operators."""
        return await self.call(calls.cache_evict(hashes))

"""The synchronous client's calls about the tiers: offload and restore, and the prefix cache.

``offload``, ``restore``, ``store`` and ``load`` return at once; ``poll`` says when a work changed, ``wait_done`` waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvferry.clients import tier_operations as operations
from kvferry.clients.arguments import seconds
from kvferry.clients.submissions import DEFAULT_WAIT_S
from kvferry.clients.sync_tables import SyncTables
from kvferry.protocol.cache_messages import CacheChanges, CachedBlockStatus, CacheEvicted, Found
from kvferry.protocol.client_works import TierWork
from kvferry.protocol.ids import MAIN
from kvferry.protocol.tier_messages import (
    SnapshotDropped,
    SnapshotStatus,
    TierDone,
    WorkCancelled,
)

LIST_LIMIT = 1000


class SyncTiers(SyncTables):
    """Works of the tiers, snapshots and cached blocks."""

    # -- offload and restore

    def wait_done(self, work: TierWork, timeout_s: float = DEFAULT_WAIT_S) -> TierDone:
        """Wait until a work is done and return its event.

        Raises:
            KvferryError: it failed or was refused; or DEADLINE, and it is still under way.
        """
        self._check_work(work)
        self._wait_until(lambda: work.is_done, timeout_s, "the end of the work")
        return work.outcome()

    def wait_accepted(self, work: TierWork, timeout_s: float = DEFAULT_WAIT_S) -> TierWork:
        """Wait until the daemon has answered the request and return the work: an OFFLOAD's now names its snapshot.

        Raises:
            KvferryError: it was refused; or DEADLINE, and there is no answer yet.
        """
        self._check_work(work)
        self._wait_until(lambda: work.number is not None or work.is_done, timeout_s, "the daemon's answer")
        if work.refused is not None:
            raise work.refused
        return work

    def cancel_work(self, work: TierWork, *, deadline_s: float | None = None) -> WorkCancelled:
        """Give a work up; returns when no byte of it can move any more.

        Raises:
            UnknownWorkError: the daemon does not know it, or its end was acknowledged before.
        """
        number = self.wait_accepted(work).number
        if number is None:  # answered and done at once
            return WorkCancelled(was_done=True)
        return self.call(operations.cancel_work(number), deadline_s=deadline_s)

    def drop_snapshot(self, snapshot: str) -> SnapshotDropped:
        """Give a snapshot up; restores that are under way go on.

        Raises:
            UnknownSnapshotError: this user has none of that name.
        """
        return self.call(operations.drop_snapshot(snapshot))

    def snapshots(self) -> tuple[SnapshotStatus, ...]:
        """Return this user's snapshots, oldest first."""
        return self.call(operations.snapshots()).snapshots

    # -- the prefix cache

    def lookup(
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
        operation = operations.lookup(pool, hashes, space, block_pages, lease, pin=pin)
        return self.call(operation, deadline_s=deadline_s)

    def unpin(self, lease: int) -> int:
        """End a lease; return how many blocks it had.

        Raises:
            UnknownLeaseError: this session has none of that number.
        """
        return self.call(operations.unpin(lease)).blocks

    def cached_blocks(self) -> Iterator[CachedBlockStatus]:
        """Yield this user's cached blocks, asking for a page of the list at a time."""
        position: int | None = 0
        while position is not None:
            listed = self.call(operations.cache_list(position, LIST_LIMIT))
            yield from listed.blocks
            position = listed.position

    def cache_events(self, cursor: int, *, limit: int = LIST_LIMIT, timeout_s: float = 1.0) -> CacheChanges:
        """Return what changed in the cache from ``cursor`` on, 1 for all: at once, or as soon as something does.

        Nothing within ``timeout_s`` is an answer without a change. Whoever joins late takes ``cache_cursor``, lists the
        blocks, and goes on from that cursor.
        """
        seconds(timeout_s, "timeout_s")
        return self.call(operations.cache_events(cursor, limit), deadline_s=timeout_s)

    def cache_cursor(self) -> int:
        """Return the cursor of the next change."""
        return self.call(operations.cache_list(0, 1)).cursor

    def pin_cached(self, hashes: Sequence[bytes], *, pinned: bool = True) -> int:
        """Keep blocks whatever happens, or no longer; return how many were found. For operators."""
        return self.call(operations.cache_pin(hashes, pinned=pinned)).blocks

    def evict_cached(self, hashes: Sequence[bytes] | None = None) -> CacheEvicted:
        """Drop blocks from every tier, by default all; pinned ones stay. For operators."""
        return self.call(operations.cache_evict(hashes))

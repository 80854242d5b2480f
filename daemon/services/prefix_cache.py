"""STORE and LOAD of prefix cache blocks.

A STORE becomes visible as a whole or not at all. A LOAD brings the leading blocks that are intact, and reports
CACHE_MISS for the rest.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import structlog

from kvferry.daemon.control.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.services.event_rings import EventRings
from kvferry.daemon.services.lookups import Lease, Lookups
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.tiers.background import Background
from kvferry.daemon.tiers.cached_pages import hashes_of, ids_by_block, model_of, namespace_of
from kvferry.daemon.tiers.copier import BlockJob, BlockSegment
from kvferry.daemon.tiers.host_tier import OPERATIONS, HostTier
from kvferry.daemon.tiers.jobs import JobStarter
from kvferry.daemon.tiers.lower_tiers import LowerTiers
from kvferry.daemon.tiers.operations import Ending, Operation, Operations
from kvferry.daemon.tiers.page_holds import PageHold
from kvferry.pools.planning.runs import PageIds
from kvferry.pools.pool import Pool
from kvferry.pools.tiers.arena import Offsets, whole_units
from kvferry.pools.tiers.blocks import BlockLayout, BlockPages
from kvferry.pools.tiers.cached_block import CachedBlock
from kvferry.pools.tiers.namespaces import Namespace
from kvferry.protocol.cache_messages import HASH_BYTES, Load, Store
from kvferry.protocol.errors import (
    CacheMissError,
    InvalidFieldError,
    KvferryError,
    LayoutMismatchError,
    LengthMismatchError,
    ModelMismatchError,
    SnapshotDamagedError,
)
from kvferry.protocol.tier_messages import OperationStarted, TierDone

log = structlog.get_logger(__name__)


class PrefixCacheService:
    """Answers STORE and LOAD."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        pools: PoolRegistry,
        rings: EventRings,
        host: HostTier,
        operations: Operations,
        jobs: JobStarter,
        lower: LowerTiers,
        lookups: Lookups,
        counters: Counters,
    ) -> None:
        self._pools = pools
        self._host = host
        self._operations = operations
        self._jobs = jobs
        self._lower = lower
        self._lookups = lookups
        self._counters = counters
        self._background = Background("a load")
        for kind, handler in (
            ("LOAD", lambda call: rings.hold(call, expect(call, Load).after, self._load)),
            ("STORE", lambda call: rings.hold(call, expect(call, Store).after, self._store)),
        ):
            dispatcher.handle(kind, handler)

    def __repr__(self) -> str:
        """Show the block index."""
        return f"<CacheService {self._host.index!r}>"

    async def close(self) -> None:
        """Cancel the loads that wait for lower tiers."""
        await self._background.close()

    # -- STORE

    def _store(self, call: Call) -> Answer:
        body = expect(call, Store)
        pool = self._pools.get(call.session.tenant, body.pool)
        region = self._host.region
        hashes = hashes_of(body.hashes)
        layout = pool.block_layout(body.space)
        ids = ids_by_block(call.ids[0], len(hashes), body.block_pages)
        if body.parent and len(body.parent) != HASH_BYTES:
            raise InvalidFieldError(f"{len(body.parent)} bytes; a hash has {HASH_BYTES}", field="parent")
        namespace = namespace_of(pool, body.space, body.block_pages)
        self._host.know(namespace, layout.block_bytes, model_of(pool).label)
        self._operations.check(call.session)
        hold = PageHold(write=False)
        hold.add(pool.space(body.space), call.session.owner_id, call.ids[0], "pages")
        try:
            fresh, at, offsets = self._begin(namespace, hashes, body.parent or None, layout)
        except KvferryError:
            hold.release()
            raise
        segment = BlockSegment(pool.region, BlockPages(layout, ids[at].reshape(-1), offsets.reshape(-1)))
        job = BlockJob("offload", [segment], region, checksums=self._jobs.checksums)

        def finish(operation: Operation, error: KvferryError | None) -> Ending:
            hold.release()
            if error is None and fresh:
                self._commit(fresh, offsets, job)
            elif fresh:
                self._host.index.abandon(fresh)
                self._host.free(offsets.reshape(-1), layout.block_bytes)
            done = TierDone(operation=operation.number, kind="store")
            if error is not None:
                return Ending(done)
            pages = len(fresh) * body.block_pages
            moved = pages * layout.content_bytes
            return Ending(
                msgspec.structs.replace(
                    done, stored=len(fresh), present=len(hashes) - len(fresh), copied_pages=pages, moved_bytes=moved
                )
            )

        operation = self._operations.begin(call, "store", pool.name, len(fresh) * body.block_pages, finish)
        if fresh:
            self._jobs.start(operation, job)
        else:
            asyncio.get_running_loop().call_soon(self._operations.nothing_to_do, operation)
        return Answer(OperationStarted(operation=operation.number))

    def _begin(
        self, namespace: Namespace, hashes: Sequence[bytes], parent: bytes | None, layout: BlockLayout
    ) -> tuple[list[CachedBlock], list[int], Offsets]:
        """Begin the blocks that are not cached yet.

        Returns:
            The new blocks, their positions in ``hashes``, and their offsets in the host tier: (blocks, block_pages).
        """
        pages = namespace.block_pages
        begun = self._host.index.begin(namespace, hashes, parent, pages * whole_units(layout.block_bytes))
        fresh = [one.block for one in begun if one.fresh]
        at = [number for number, one in enumerate(begun) if one.fresh]
        self._host.index.touch([one.block for one in begun if not one.fresh])  # new blocks are useless without them
        try:
            offsets = self._host.reserve(namespace.tenant, len(fresh) * pages, layout.block_bytes, counted=True)
        except KvferryError:
            self._host.index.abandon(fresh)
            raise
        return fresh, at, offsets.reshape(len(fresh), pages)

    def _commit(self, fresh: list[CachedBlock], offsets: Offsets, job: BlockJob) -> None:
        digests = None
        if job.digests:
            digests = [tuple(map(int, one)) for one in job.digests[0].reshape(offsets.shape)]
        self._host.index.commit(fresh, offsets, digests)
        self._counters.add("cache.stored_blocks", len(fresh))
        self._lower.stored(fresh)

    # -- LOAD

    def _load(self, call: Call) -> Answer:
        body = expect(call, Load)
        lease = self._lookups.lease(call, body.lease)
        pool = self._pools.get(call.session.tenant, body.pool)
        _check_namespace(pool, lease.namespace)
        pages = lease.namespace.block_pages
        count, rest = divmod(len(call.ids[0]), pages)
        blocks = lease.blocks[body.first_block : body.first_block + count]
        if rest or not count or len(blocks) < count:
            raise LengthMismatchError(
                f"{len(call.ids[0])} pages; the lease has {max(0, len(lease.blocks) - body.first_block)} blocks of "
                f"{pages} pages from block {body.first_block} on",
                field="pages",
            )
        self._operations.check(call.session)
        hold = PageHold(write=True)
        hold.add(pool.space(lease.namespace.space), call.session.owner_id, call.ids[0], "pages")
        loading = _Loading(pool, lease, blocks, call.ids[0])

        def finish(operation: Operation, error: KvferryError | None) -> Ending:
            hold.release()
            if body.unpin:
                self._lookups.end(operation.session.owner_id, lease)
            return self._loaded(operation, loading, error)

        operation = self._operations.begin(call, "load", pool.name, len(call.ids[0]), finish)
        loading.holder = OPERATIONS - operation.number
        self._host.index.pin(blocks, loading.holder)
        coming = [one for one in map(self._lower.promote, blocks) if one is not None]
        if coming:
            operation.waits_for = f"{len(coming)} blocks from lower tiers"
            self._background.spawn(self._when_up(operation, loading, coming))
        else:
            self._copy(operation, loading)
        return Answer(OperationStarted(operation=operation.number))

    async def _when_up(self, operation: Operation, loading: _Loading, coming: Sequence[asyncio.Future[bool]]) -> None:
        await asyncio.gather(*coming, return_exceptions=True)
        if operation.stopped is None:
            self._copy(operation, loading)

    def _copy(self, operation: Operation, loading: _Loading) -> None:
        """Copy the leading blocks that are in the host tier."""
        there = list(itertools.takewhile(lambda one: one.in_host, loading.blocks))
        loading.there = len(there)
        namespace = loading.lease.namespace
        layout, pages = loading.pool.block_layout(namespace.space), namespace.block_pages
        offsets = [one.offsets for one in there if one.offsets is not None]
        if not offsets:
            asyncio.get_running_loop().call_soon(self._operations.nothing_to_do, operation)
            return
        segment = BlockSegment(
            loading.pool.region, BlockPages(layout, loading.ids[: len(there) * pages], np.concatenate(offsets))
        )
        known = all(one.digests for one in there) and self._jobs.checksums
        digests = [np.array([one.digests for one in there], np.uint64).reshape(-1)] if known else None
        self._jobs.start(operation, BlockJob("restore", [segment], self._host.region, digests=digests))

    def _loaded(self, operation: Operation, loading: _Loading, error: KvferryError | None) -> Ending:
        self._host.free_all(self._host.index.unpin(loading.blocks, loading.holder))
        done = TierDone(operation=operation.number, kind="load")
        if isinstance(error, SnapshotDamagedError):
            self._damaged(loading, error)
            miss = CacheMissError(f"a cached block was damaged: {error.detail}")
            return Ending(msgspec.structs.replace(done, error=miss.info()))
        if error is not None:
            return Ending(done)
        count, there = len(loading.blocks), loading.there
        pages = there * loading.lease.namespace.block_pages
        done = msgspec.structs.replace(
            done, loaded=there, copied_pages=pages, moved_bytes=pages * loading.lease.layout.content_bytes
        )
        if there < count:
            self._counters.add("cache.missed_blocks", count - there)
            miss = CacheMissError(f"block {there} of {count} is gone, or does not fit into the host tier")
            done = msgspec.structs.replace(done, error=miss.info())
        return Ending(done)

    def _damaged(self, loading: _Loading, error: SnapshotDamagedError) -> None:
        """Remove the damaged block from every tier; the page number in the error's field tells which block it is."""
        self._counters.add("cache.damaged_blocks")
        log.error(
            "a cached block was damaged in memory", cause=error.detail, remedy="check the host's memory (ECC errors)"
        )
        page = int(error.field.partition("[")[2].rstrip("]"))
        block = loading.blocks[page // loading.lease.namespace.block_pages]
        self._host.free_all(self._host.index.remove(block))
        self._lower.remove([block])


def _check_namespace(pool: Pool, namespace: Namespace) -> None:
    """Check that a lease's blocks can be loaded into a pool's pages.

    Raises:
        LayoutMismatchError: the pool has another layout.
        NoModelError: the pool was created without a model identity.
        ModelMismatchError: the pool has another model or cache identity.
    """
    ours = namespace_of(pool, namespace.space, namespace.block_pages)
    if ours.layout_digest != namespace.layout_digest:
        raise LayoutMismatchError(
            f"pool {pool.name!r} has layout {ours.layout_digest}, the lease's blocks have {namespace.layout_digest}",
            field="pool",
        )
    if ours != namespace:
        raise ModelMismatchError(
            f"pool {pool.name!r} is of {model_of(pool).label}, with cache identity {ours.identity}; the lease's blocks "
            f"have {namespace.identity}",
            field="pool",
        )


class _Loading:
    """A LOAD in progress; ``there`` counts the leading blocks that are copied."""

    def __init__(self, pool: Pool, lease: Lease, blocks: list[CachedBlock], ids: PageIds) -> None:
        self.pool = pool
        self.lease = lease
        self.blocks = blocks
        self.ids = ids
        self.holder = 0
        self.there = 0

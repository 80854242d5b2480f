"""The prefix cache: LOOKUP and UNPIN, STORE and LOAD.

A LOOKUP finds the longest cached prefix, and pins it for the instance until UNPIN or the instance's end. The blocks of
a STORE become visible in their order, once the bytes of all are there. A LOAD brings the leading blocks that are
intact, and reports CACHE_MISS for the rest. Of a long prompt some blocks are done in each turn of the loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from kvferry.daemon.control.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.sessions import SessionRegistry
from kvferry.daemon.services.event_rings import EventRings
from kvferry.daemon.services.leases import Lease, Leases
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.tiers.copier import BlockJob, BlockSegment
from kvferry.daemon.tiers.host_tier import HostTier, SpaceRequest
from kvferry.daemon.tiers.lower_tiers import Background, LowerTiers
from kvferry.daemon.tiers.operations import Ending, Holdings, Operation, Operations
from kvferry.daemon.tiers.snapshots import PageHold
from kvferry.daemon.tiers.space_waiter import SpaceWaiter
from kvferry.pools.pool import Pool
from kvferry.pools.tiers.arena import Extent, Freed, Offsets, whole_units
from kvferry.pools.tiers.blocks import BlockLayout, BlockPages
from kvferry.pools.tiers.cached_block import (
    BlockState,
    CachedBlock,
    Namespace,
    digests_of,
    identity_of,
    offsets_of,
)
from kvferry.pools.tiers.index import PinnedBlocks
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    CacheMissError,
    InvalidFieldError,
    KvferryError,
    LayoutMismatchError,
    LengthMismatchError,
    ModelMismatchError,
    NoModelError,
    SnapshotDamagedError,
)
from kvferry.protocol.events import TierDone
from kvferry.protocol.ids import ModelIdentity
from kvferry.protocol.tier_messages import (
    HASH_BYTES,
    Found,
    Load,
    Lookup,
    OperationStarted,
    Store,
    Unpin,
    Unpinned,
)

BLOCKS_AT_ONCE = 1024
"""Blocks of a request, in a turn of the loop: 1 to 4 ms. More would hold up all other engines."""

log = structlog.get_logger(__name__)


class _Chain(NamedTuple):
    """The blocks that a LOOKUP or a STORE names."""

    pool: Pool
    layout: BlockLayout
    namespace: Namespace
    hashes: list[bytes]


class _Looking:
    """A LOOKUP in progress.

    Attributes:
        lease: that it extends, if any.
        blocks: those that it has found; with ``body.pin`` each is pinned by the instance.
        host: how many of them are in the host tier, of those that were counted as used.
        disk: how many of these have their fastest copy on disk.
    """

    def __init__(self, call: Call, body: Lookup, chain: _Chain, lease: Lease | None) -> None:
        self.call = call
        self.body = body
        self.chain = chain
        self.lease = lease
        self.blocks: list[CachedBlock] = []
        self.host = self.disk = 0

    def asked(self, count: int) -> list[bytes]:
        """Return the hashes after the blocks that were found, at most so many."""
        found = len(self.blocks)
        return self.chain.hashes[found : found + count]

    @property
    def has_rest(self) -> bool:
        """Return whether not all was found."""
        return len(self.blocks) < len(self.chain.hashes)


class _Storing:
    """A STORE in progress: its new blocks, and the pages that they are copied from once they have memory.

    Attributes:
        fresh: the new blocks, as far as they have begun.
        ids: of the pages, ``(blocks, block_pages)``: of all blocks, and of the new ones once all of these have begun.
        offsets: of the memory, of the same shape; empty until there is some.
        over: how many of the new blocks are visible, or given up.
    """

    def __init__(self, pool: Pool, layout: BlockLayout, hold: PageHold, ids: PageIds) -> None:
        self.pool = pool
        self.layout = layout
        self.hold = hold
        self.fresh: list[CachedBlock] = []
        self.ids = ids
        self.offsets: Offsets = np.empty((0, ids.shape[1]), np.int64)
        self.job: BlockJob | None = None
        self.over = 0

    @property
    def space_request(self) -> SpaceRequest:
        """Return the memory that it needs."""
        return SpaceRequest(len(self.fresh) * self.ids.shape[1], self.layout.block_bytes)

    @property
    def memory(self) -> Freed:
        """Return the memory that it has for blocks that are not over."""
        return Freed(self.offsets[self.over :].reshape(-1), self.layout.block_bytes)


class PrefixCache:
    """Answers LOOKUP, UNPIN, STORE and LOAD.

    Attributes:
        leases: what LOOKUPs have pinned.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        pools: PoolRegistry,
        sessions: SessionRegistry,
        rings: EventRings,
        host: HostTier,
        operations: Operations,
        lower: LowerTiers,
        space_waiter: SpaceWaiter,
        counters: Counters,
    ) -> None:
        self._dispatcher = dispatcher
        self._space_waiter = space_waiter
        self._pools = pools
        self._sessions = sessions
        self._host = host
        self._operations = operations
        self._lower = lower
        self._counters = counters
        self.leases = Leases(host, counters)
        self._looking: dict[tuple[int, int], _Looking] = {}
        """The lookups that were not answered at once, by session and message."""
        self._abandoned: deque[_Storing] = deque()
        self._abandon_rest = host.in_turns(self._abandon_some)
        self._lookups = Background("a lookup")
        self._loads = Background("a load")
        for kind, handler in (
            ("LOOKUP", self._lookup),
            ("UNPIN", self._unpin),
            ("LOAD", rings.after(self._load)),
            ("STORE", rings.after(self._store)),
        ):
            dispatcher.handle(kind, handler)

    def __repr__(self) -> str:
        """Show the block index and the number of leases."""
        return f"<PrefixCache {self._host.index!r} {self.leases!r}>"

    @property
    def lookups(self) -> int:
        """Return how many lookups are under way."""
        return len(self._lookups)

    def pinned(self) -> Iterator[PinnedBlocks]:
        """Yield the blocks that leases and lookups pin; others may come and go meanwhile."""
        yield from self.leases.pinned()
        for looking in list(self._looking.values()):
            if looking.body.pin:
                yield PinnedBlocks(looking.call.session.owner_id, looking.blocks)

    def writing(self) -> Iterator[Sequence[CachedBlock]]:
        """Yield the blocks of STOREs that have failed, as far as these have not been given up."""
        return (storing.fresh[storing.over :] for storing in self._abandoned)

    def extents(self) -> Iterator[Extent]:
        """Yield the memory of these blocks."""
        for storing in tuple(self._abandoned):
            yield Extent(*storing.memory, "a STORE that has failed")

    async def close(self) -> None:
        """Cancel the lookups that are under way, and the loads that have not begun to copy."""
        self.leases.close()
        await self._lookups.close()
        await self._loads.close()

    def _chain(self, call: Call, body: Lookup | Store) -> _Chain:
        """Return the blocks that a request names."""
        pool = self._pools.named_by(call.session, body.pool)
        self._host.region  # noqa: B018  raises TierOffError
        hashes = hashes_of(body.hashes)
        layout = pool.block_layout(body.space)
        namespace = namespace_of(pool, body.space, body.block_pages)
        if not self._host.knows(namespace):
            self._host.know(namespace, layout.block_bytes, model_of(pool).label)
        return _Chain(pool, layout, namespace, hashes)

    # -- LOOKUP, UNPIN

    def _lookup(self, call: Call) -> Answer | None:
        body = expect(call, Lookup)
        chain = self._chain(call, body)
        lease = None
        if body.lease is not None:
            lease = self.leases.get(call.session.owner_id, body.lease)
            if lease.namespace != chain.namespace:
                raise InvalidFieldError(
                    f"lease {lease.number} has blocks of another namespace: {lease.namespace}", field="lease"
                )
        elif body.pin:
            self.leases.check_number(call.session.owner_id)
        looking = _Looking(call, body, chain, lease)
        more = self._look(looking)
        if not more and not self._lower_may_have(looking):
            self._use_some(looking, looking.blocks)
            return self._found(looking)
        self._looking[call.session.session_id, call.message_id] = looking
        self._lookups.spawn(self._look_on(looking, more=more))
        return None

    def _look(self, looking: _Looking) -> bool:
        """Find the next blocks of a lookup; return whether there may be more. Raises what ``_take`` does."""
        asked = looking.asked(BLOCKS_AT_ONCE)
        found = self._host.index.longest_prefix(looking.chain.namespace, asked)
        self._take(looking, found)
        return len(found) == len(asked) and looking.has_rest

    def _lower_may_have(self, looking: _Looking) -> bool:
        """Return whether lower tiers may have blocks that the index does not know."""
        return looking.has_rest and self._lower.may_find

    def _take(self, looking: _Looking, blocks: Sequence[CachedBlock]) -> None:
        """Pin blocks that a lookup has found, at most BLOCKS_AT_ONCE, and start their promotion.

        Raises:
            OverloadedError: the instance has reached its bound of pinned blocks.
        """
        session = looking.call.session
        if looking.body.pin:
            self.leases.check_blocks(session.owner_id, len(looking.blocks) + len(blocks))
            self._host.check_share(session.tenant, sum([one.size_bytes for one in blocks if one.evictable]))
            self._host.index.pin(blocks, session.owner_id)
            for block in blocks:
                if not block.in_host:
                    self._lower.promote(block)
        looking.blocks.extend(blocks)

    async def _look_on(self, looking: _Looking, *, more: bool) -> None:
        """Go on with a lookup, some blocks in each turn of the loop, and answer it; ``more``: in the index."""
        call = looking.call
        is_kept = False
        try:
            while more and self._is_wanted(call):
                await asyncio.sleep(0)
                more = self._look(looking)
            if self._lower_may_have(looking) and self._is_wanted(call):
                await self._look_below(looking)
            for start in reversed(range(0, len(looking.blocks), BLOCKS_AT_ONCE)):
                self._use_some(looking, looking.blocks[start : start + BLOCKS_AT_ONCE])
                await asyncio.sleep(0)
            if self._is_wanted(call):
                answer = self._found(looking)
                is_kept = looking.body.pin
                self._dispatcher.answer(call.session, call.message_id, answer)
        except KvferryError as error:
            if self._is_wanted(call):
                self._dispatcher.answer_error(call.session, call.message_id, error)
        finally:
            del self._looking[call.session.session_id, call.message_id]
            if looking.body.pin and not is_kept:
                self.leases.unpin(call.session.owner_id, looking.blocks)

    async def _look_below(self, looking: _Looking) -> None:
        """Ask lower tiers for the blocks after those that were found."""
        lease, near = looking.lease, looking.blocks
        parent = near[-1].hash if near else lease.blocks[-1].hash if lease is not None and lease.blocks else None
        rest = looking.chain.hashes[len(near) :]
        far = await self._lower.find(looking.chain.namespace, rest, parent, looking.chain.layout.block_bytes)
        gone = next((number for number, one in enumerate(near) if one.state is not BlockState.READY), None)
        if gone is not None:
            looking.blocks = near[:gone]
            if looking.body.pin:
                self.leases.unpin(looking.call.session.owner_id, near[gone:])
            return
        for start in range(0, len(far), BLOCKS_AT_ONCE):
            some = far[start : start + BLOCKS_AT_ONCE]
            ready = list(itertools.takewhile(lambda one: one.state is BlockState.READY, some))
            self._take(looking, ready)
            if len(ready) < len(some):
                return
            await asyncio.sleep(0)

    def _use_some(self, looking: _Looking, blocks: Sequence[CachedBlock]) -> None:
        """Take note that blocks were used, and in which tiers they are; those of a prompt's end come first."""
        self._host.index.touch(blocks)
        self._lower.used(blocks)
        lower = [one for one in blocks if not one.in_host]
        looking.host += len(blocks) - len(lower)
        looking.disk += sum([one.on_disk for one in lower])

    def _is_wanted(self, call: Call) -> bool:
        """Return whether a request's answer is still waited for."""
        return call.session.is_pending(call.message_id) and self._sessions.get(call.session.session_id) is not None

    def _found(self, looking: _Looking) -> Answer:
        """Make what a lookup has pinned a lease, or more of one, and return the reply.

        Raises:
            OverloadedError: the instance has reached its bound of leases or pinned blocks.
            UnknownLeaseError: the lease has ended meanwhile.
        """
        call, body, blocks, lease = looking.call, looking.body, looking.blocks, looking.lease
        owner_id = call.session.owner_id
        if lease is not None:
            self.leases.get(owner_id, lease.number)
        if body.pin:
            self.leases.check_blocks(owner_id, len(blocks))
            if lease is None:
                self.leases.check_number(owner_id)
        self._counters.add("cache.lookups")
        self._counters.add("cache.asked_blocks", len(looking.chain.hashes))
        self._counters.add("cache.hit_blocks", len(blocks))
        if body.pin and (blocks or lease is not None):
            if lease is None:
                lease = self.leases.add(owner_id, looking.chain.namespace, looking.chain.layout)
            self.leases.extend(lease, blocks)
        return Answer(
            Found(
                blocks=len(blocks),
                lease=lease.number if lease is not None else 0,
                host=looking.host,
                disk=looking.disk,
                remote=len(blocks) - looking.host - looking.disk,
                lease_blocks=len(lease.blocks) if lease is not None else 0,
            )
        )

    def _unpin(self, call: Call) -> Answer:
        lease = self.leases.get(call.session.owner_id, expect(call, Unpin).lease)
        self.leases.end(lease)
        return Answer(Unpinned(blocks=len(lease.blocks)))

    # -- STORE

    def _store(self, call: Call) -> Answer:
        body = expect(call, Store)
        pool, layout, namespace, hashes = self._chain(call, body)
        ids = ids_by_block(call.ids[0], len(hashes), body.block_pages)
        if body.parent and len(body.parent) != HASH_BYTES:
            raise InvalidFieldError(f"{len(body.parent)} bytes; a hash has {HASH_BYTES}", field="parent")
        self._operations.check(call.session)
        hold = PageHold(write=False)
        hold.add(pool.space(body.space), call.session.owner_id, call.ids[0], "pages")
        storing = _Storing(pool, layout, hold, ids)
        steps = self._begin(storing, namespace, hashes, body.parent or None)
        try:
            waits = next(steps, self) is not self
            if not waits:
                self._take_memory(storing)
            operation = self._begin_store(call, body, storing)
        except Exception:
            hold.release()
            self._abandon(storing)
            raise
        if waits:
            self._space_waiter.make(operation, steps, lambda: self._copy_in(operation, storing, takes_memory=True))
        else:
            with self._operations.guarded(operation):
                self._copy_in(operation, storing, takes_memory=False)
        return Answer(OperationStarted(operation=operation.number))

    def _begin(
        self, storing: _Storing, namespace: Namespace, hashes: Sequence[bytes], parent: bytes | None
    ) -> Iterator[None]:
        """Begin the blocks that are not cached yet, and make room for them; yield where there is more.

        Raises what ``HostTier.making_room`` does.
        """
        size_bytes = namespace.block_pages * whole_units(storing.layout.block_bytes)
        at, present = list[int](), list[CachedBlock]()
        for start in range(0, len(hashes), BLOCKS_AT_ONCE):
            if start:
                yield
            some = hashes[start : start + BLOCKS_AT_ONCE]
            before = storing.space_request
            for number, (block, is_fresh) in enumerate(
                self._host.index.begin(namespace, some, parent, size_bytes), start
            ):
                if is_fresh:
                    storing.fresh.append(block)
                    at.append(number)
                else:
                    present.append(block)
            self._host.awaits(
                namespace.tenant, SpaceRequest(storing.space_request.blocks - before.blocks, before.size_bytes)
            )
            parent = some[-1]
        storing.ids = storing.ids[at]
        for start in reversed(range(0, len(present), BLOCKS_AT_ONCE)):
            self._host.index.touch(present[start : start + BLOCKS_AT_ONCE])  # new blocks are useless without them
            if start:
                yield
        yield from self._host.making_room(namespace.tenant, [storing.space_request])

    def _begin_store(self, call: Call, body: Store, storing: _Storing) -> Operation:
        """Begin the operation of a STORE."""

        def finish(operation: Operation, error: KvferryError | None) -> Ending:
            storing.hold.release()
            if error is None:
                self._publish_some(operation, storing)
            else:
                self._abandon(storing)
            done = TierDone(operation=operation.number, kind="store")
            if error is not None:
                return Ending(done)
            stored, pages = len(storing.fresh), storing.space_request.blocks
            return Ending(
                msgspec.structs.replace(
                    done,
                    stored=stored,
                    present=len(body.hashes) // HASH_BYTES - stored,
                    copied_pages=pages,
                    moved_bytes=pages * storing.layout.content_bytes,
                )
            )

        holdings = Holdings(pages=storing.hold, memory=storing.memory, writing=storing.fresh)
        return self._operations.begin(call, "store", storing.pool.name, len(call.ids[0]), finish, holdings)

    def _take_memory(self, storing: _Storing) -> None:
        blocks, size_bytes = storing.space_request
        offsets = self._host.reserve(storing.pool.tenant, blocks, size_bytes, counted=True)
        storing.offsets = offsets.reshape(storing.ids.shape)

    def _copy_in(self, operation: Operation, storing: _Storing, *, takes_memory: bool) -> None:
        """Start the job that copies the new blocks, which are visible after it; end the operation if there are none."""
        if not storing.fresh:
            asyncio.get_running_loop().call_soon(self._operations.nothing_to_do, operation)
            return
        if takes_memory:
            self._take_memory(storing)
            operation.holdings = operation.holdings._replace(memory=storing.memory)
        segment = BlockSegment(
            storing.pool.region, BlockPages(storing.layout, storing.ids.reshape(-1), storing.offsets.reshape(-1))
        )
        storing.job = BlockJob("offload", [segment], self._host.region, checksums=self._host.checksums)
        operation.after_job = self._publish(operation, storing)
        self._operations.start(operation, storing.job)

    def _abandon(self, storing: _Storing) -> None:
        """Give up the blocks that are not visible yet, and their memory; what is much goes in the next turns."""
        self._abandoned.append(storing)
        if self._abandon_some():
            self._abandon_rest()

    def _abandon_some(self) -> bool:
        """Give up some blocks; return whether there are more."""
        storing = self._abandoned[0]
        start, size_bytes = storing.over, storing.layout.block_bytes
        some = storing.fresh[start : start + BLOCKS_AT_ONCE]
        storing.over += len(some)
        if storing.over == len(storing.fresh):
            self._abandoned.popleft()
        at = [number for number, one in enumerate(some, start) if one.state is BlockState.WRITING]
        self._host.index.abandon([storing.fresh[number] for number in at])
        if len(storing.offsets):
            self._host.arena.free(storing.offsets[at].reshape(-1), size_bytes)
        else:
            self._host.not_awaited(storing.pool.tenant, SpaceRequest(len(at) * storing.ids.shape[1], size_bytes))
        return bool(self._abandoned)

    def _publish(self, operation: Operation, storing: _Storing) -> Iterator[None]:
        """Make blocks visible whose bytes are there, in their order, all but the last ones, some in each step."""
        while len(storing.fresh) - storing.over > BLOCKS_AT_ONCE:
            self._publish_some(operation, storing)
            yield

    def _publish_some(self, operation: Operation, storing: _Storing) -> None:
        """Make the next blocks visible."""
        start, stop = storing.over, storing.over + BLOCKS_AT_ONCE
        some, offsets, job = storing.fresh[start:stop], storing.offsets, storing.job
        digests = job.digests[0].reshape(offsets.shape)[start:stop] if job is not None and job.digests else None
        self._host.index.commit(some, offsets[start:stop], digests)
        storing.over += len(some)
        operation.holdings = operation.holdings._replace(memory=storing.memory, writing=storing.fresh[stop:])
        self._counters.add("cache.stored_blocks", len(some))
        self._lower.stored(some)

    # -- LOAD

    def _load(self, call: Call) -> Answer:
        body = expect(call, Load)
        lease = self.leases.get(call.session.owner_id, body.lease)
        pool = self._pools.named_by(call.session, body.pool)
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
            self.leases.loaded(lease, ends=body.unpin)
            return self._loaded(operation, loading, error)

        holdings = Holdings(pages=hold)
        try:
            operation = self._operations.begin(call, "load", pool.name, len(call.ids[0]), finish, holdings)
        except Exception:
            hold.release()
            raise
        lease.loads += 1
        with self._operations.guarded(operation):
            if len(blocks) <= BLOCKS_AT_ONCE and all(one.in_host for one in blocks):
                self._take_up(loading, blocks)
                self._copy(operation, loading)
            else:
                self._loads.spawn(self._bring(operation, loading))
        return Answer(OperationStarted(operation=operation.number))

    async def _bring(self, operation: Operation, loading: _Loading) -> None:
        """Bring blocks of lower tiers into the host tier, some in each turn of the loop, and copy them then."""
        with self._operations.guarded(operation):
            for start in range(0, len(loading.blocks), BLOCKS_AT_ONCE):
                some = loading.blocks[start : start + BLOCKS_AT_ONCE]
                coming = [one for one in map(self._lower.promote, some) if one is not None]
                if coming:
                    operation.waits_for = f"{len(coming)} blocks from lower tiers"
                    await asyncio.gather(*coming, return_exceptions=True)
                if operation.stopped is not None or not self._take_up(loading, some):
                    break
                await asyncio.sleep(0)
            if operation.stopped is None:
                self._copy(operation, loading)

    def _take_up(self, loading: _Loading, blocks: Sequence[CachedBlock]) -> bool:
        """Have the leading blocks copied that are in the host tier, and stay there; return whether all of them are."""
        there = list(itertools.takewhile(lambda one: one.in_host, blocks))
        loading.there += len(there)
        loading.offsets.append(offsets_of(there))
        loading.digests.append(digests_of(there))
        return len(there) == len(blocks)

    def _copy(self, operation: Operation, loading: _Loading) -> None:
        """Copy the leading blocks that are in the host tier."""
        namespace = loading.lease.namespace
        layout, pages = loading.pool.block_layout(namespace.space), namespace.block_pages
        if not loading.there:
            asyncio.get_running_loop().call_soon(self._operations.nothing_to_do, operation)
            return
        offsets, digests = np.concatenate(loading.offsets), np.concatenate(loading.digests)
        segment = BlockSegment(loading.pool.region, BlockPages(layout, loading.ids[: loading.there * pages], offsets))
        known = self._host.checksums and len(digests) == len(segment.pages.ids)
        job = BlockJob("restore", [segment], self._host.region, digests=[digests] if known else None)
        self._operations.start(operation, job)

    def _loaded(self, operation: Operation, loading: _Loading, error: KvferryError | None) -> Ending:
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
    """A LOAD in progress: of the leading ``there`` blocks it is known where they are. The lease pins them."""

    def __init__(self, pool: Pool, lease: Lease, blocks: list[CachedBlock], ids: PageIds) -> None:
        self.pool = pool
        self.lease = lease
        self.blocks = blocks
        self.ids = ids
        self.there = 0
        self.offsets: list[Offsets] = []
        self.digests: list[npt.NDArray[np.uint64]] = []


def model_of(pool: Pool) -> ModelIdentity:
    """Return the model whose KV a pool's pages hold.

    Raises:
        NoModelError: the pool was created without a model.
    """
    if pool.model is None:
        raise NoModelError(
            f"pool {pool.name!r} was created without a model: its blocks could be confused with another model's",
            field="model",
        )
    return pool.model


def namespace_of(pool: Pool, space: str, block_pages: int) -> Namespace:
    """Return the namespace of a pool's blocks.

    Raises:
        NoModelError: the pool was created without a model.
        InvalidFieldError: the space's pages are of several groups, which a block's hash does not distinguish.
    """
    if any(one.group for one in pool.manifest.components if one.space == space):
        raise InvalidFieldError(
            f"pages of pool {pool.name!r} are of several groups of layers, which a block's hash does not distinguish: "
            "offload and restore them",
            field="pool",
        )
    return Namespace(pool.tenant, pool.manifest.layout_digest, identity_of(model_of(pool)), space, block_pages)


def split_hashes(joined: bytes) -> list[bytes]:
    """Return the concatenated hashes as a list.

    Raises:
        InvalidFieldError: there is none, or the length is not a multiple of HASH_BYTES.
    """
    if not joined or len(joined) % HASH_BYTES:
        raise InvalidFieldError(f"{len(joined)} bytes are not one or more hashes of {HASH_BYTES}", field="hashes")
    return cast("list[bytes]", np.frombuffer(joined, f"V{HASH_BYTES}").tolist())


def hashes_of(joined: bytes) -> list[bytes]:
    """Return the hashes of a chain as a list.

    Raises:
        InvalidFieldError: as for ``split_hashes``, or a hash occurs twice.
    """
    hashes = split_hashes(joined)
    if len(set(hashes)) < len(hashes):
        raise InvalidFieldError("a hash occurs twice, but each one covers all tokens before it", field="hashes")
    return hashes


def ids_by_block(ids: PageIds, blocks: int, block_pages: int) -> PageIds:
    """Return the page ids by block, (blocks, block_pages).

    Raises:
        LengthMismatchError: the number of ids is not ``blocks * block_pages``.
    """
    if len(ids) != blocks * block_pages:
        raise LengthMismatchError(
            f"{blocks} blocks of {block_pages} pages need {blocks * block_pages} ids, not {len(ids)}",
            field="pages",
        )
    return ids.reshape(blocks, block_pages)

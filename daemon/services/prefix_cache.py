"""The prefix cache: LOOKUP and UNPIN, STORE and LOAD.

A LOOKUP finds the longest cached prefix, and pins it for the instance until UNPIN or the instance's end. A STORE
becomes visible as a whole or not at all. A LOAD brings the leading blocks that are intact, and reports CACHE_MISS for
the rest.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import structlog

from kvferry.daemon.control.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.sessions import SessionRegistry
from kvferry.daemon.services.event_rings import EventRings
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.tiers.copier import BlockJob, BlockSegment
from kvferry.daemon.tiers.host_tier import LOOKUPS, OPERATIONS, HostTier, Want
from kvferry.daemon.tiers.lower_tiers import Background, LowerTiers
from kvferry.daemon.tiers.operations import Ending, Holdings, Operation, Operations
from kvferry.daemon.tiers.room import Room
from kvferry.daemon.tiers.snapshots import PageHold
from kvferry.pools.pool import Pool
from kvferry.pools.tiers.arena import Freed, Offsets, whole_units
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
    RETRY_LATER_MS,
    CacheMissError,
    InvalidFieldError,
    KvferryError,
    LayoutMismatchError,
    LengthMismatchError,
    ModelMismatchError,
    NoModelError,
    OverloadedError,
    SnapshotDamagedError,
    UnknownLeaseError,
)
from kvferry.protocol.events import TierDone
from kvferry.protocol.ids import ModelIdentity, new_number
from kvferry.protocol.tier_messages import (
    HASH_BYTES,
    LEASE_S,
    Found,
    Load,
    Lookup,
    OperationStarted,
    Store,
    Unpin,
    Unpinned,
)

MAX_LEASES = 4096
MAX_PINS = 1 << 20
"""Bounds of one instance; a block counts once in each lease."""

EXPIRED_AT_ONCE = 256
"""Leases, in a turn of the loop."""

UNPINNED_AT_ONCE = 1024
"""Blocks, in a turn of the loop: some 1 ms."""

log = structlog.get_logger(__name__)


class Lease(msgspec.Struct):
    """The blocks that an instance's LOOKUPs have pinned, in the order of the prompt.

    Attributes:
        number: for the engine.
        namespace: of the blocks.
        layout: of the blocks.
        blocks: pinned, each by the instance.
        owner_id: the instance.
        used_at_s: the loop's time.
        loads: LOADs of it that are under way.
    """

    number: int
    namespace: Namespace
    layout: BlockLayout
    blocks: list[CachedBlock]
    owner_id: int = 0
    used_at_s: float = 0.0
    loads: int = 0


class _Unpinning(NamedTuple):
    """The blocks of a lease or a LOAD that has ended; the first ``done`` ones are not pinned any more."""

    holder: int
    blocks: Sequence[CachedBlock]
    done: int


class _Chain(NamedTuple):
    """The blocks that a LOOKUP or a STORE names."""

    pool: Pool
    layout: BlockLayout
    namespace: Namespace
    hashes: list[bytes]


class _Storing:
    """A STORE in progress: its new blocks, and the pages that they are copied from once they have memory.

    Attributes:
        ids: of the pages, ``(blocks, block_pages)``.
        offsets: of the memory, of the same shape; empty until there is some.
    """

    def __init__(
        self, pool: Pool, layout: BlockLayout, hold: PageHold, fresh: Sequence[CachedBlock], ids: PageIds
    ) -> None:
        self.pool = pool
        self.layout = layout
        self.hold = hold
        self.fresh = fresh
        self.ids = ids
        self.offsets: Offsets = np.empty((0, ids.shape[1]), np.int64)
        self.job: BlockJob | None = None

    @property
    def want(self) -> Want:
        """Return the memory that it needs."""
        return Want(self.ids.size, self.layout.block_bytes)

    @property
    def memory(self) -> Freed:
        """Return the memory that it has."""
        return Freed(self.offsets.reshape(-1), self.layout.block_bytes)


class PrefixCache:
    """Answers LOOKUP, UNPIN, STORE and LOAD, and keeps the leases."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        pools: PoolRegistry,
        sessions: SessionRegistry,
        rings: EventRings,
        host: HostTier,
        operations: Operations,
        lower: LowerTiers,
        room: Room,
        counters: Counters,
    ) -> None:
        self._dispatcher = dispatcher
        self._room = room
        self._pools = pools
        self._sessions = sessions
        self._host = host
        self._operations = operations
        self._lower = lower
        self._counters = counters
        self._numbers = itertools.count(new_number())
        self._leases: dict[int, dict[int, Lease]] = {}
        self._leased: Counter[int] = Counter()  # blocks in the leases of each instance
        self._by_use: OrderedDict[int, Lease] = OrderedDict()  # all leases, the one used longest ago first
        self._loop = asyncio.get_running_loop()
        self._expiry: asyncio.TimerHandle | None = None
        self._looking: dict[tuple[int, int], list[CachedBlock]] = {}
        """The blocks that each lookup pins while lower tiers are asked, by session and message."""
        self._unpinning: deque[_Unpinning] = deque()
        """What leases and LOADs that have ended pin still."""
        self._unpin_rest = host.in_turns(self._unpin_some)
        self._lookups = Background("a lookup")
        self._loads = Background("a load")
        for kind, handler in (
            ("LOOKUP", self._lookup),
            ("UNPIN", self._unpin),
            ("LOAD", lambda call: rings.hold(call, expect(call, Load).after, self._load)),
            ("STORE", lambda call: rings.hold(call, expect(call, Store).after, self._store)),
        ):
            dispatcher.handle(kind, handler)

    def __repr__(self) -> str:
        """Show the block index and the number of leases."""
        return f"<PrefixCache {self._host.index!r} leases={sum(map(len, self._leases.values()))}>"

    @property
    def lookups(self) -> int:
        """Return how many lookups wait for lower tiers."""
        return len(self._lookups)

    def pinned(self) -> Iterator[PinnedBlocks]:
        """Yield the blocks that leases and lookups pin; others may come and go meanwhile."""
        for owner_id, leases in list(self._leases.items()):
            for lease in list(leases.values()):
                yield PinnedBlocks(owner_id, lease.blocks)
        for holder, blocks, done in tuple(self._unpinning):
            yield PinnedBlocks(holder, blocks[done:])
        for blocks in list(self._looking.values()):
            yield PinnedBlocks(LOOKUPS, blocks)

    async def close(self) -> None:
        """Cancel the lookups and loads that wait for lower tiers."""
        if self._expiry is not None:
            self._expiry.cancel()
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

    # -- leases

    def lease(self, call: Call, number: int) -> Lease:
        """Return a lease of the session's instance, which is used now.

        Raises:
            UnknownLeaseError: the instance has no lease of that number, or has not used it for LEASE_S.
        """
        lease = self._leases.get(call.session.owner_id, {}).get(number)
        if lease is None:
            raise UnknownLeaseError(f"this session's instance has no lease {number}", field="lease")
        self._use(lease)
        return lease

    def _use(self, lease: Lease) -> None:
        """Let a lease last from now on for LEASE_S."""
        lease.used_at_s = self._loop.time()
        self._by_use[lease.number] = lease
        self._by_use.move_to_end(lease.number)
        if self._expiry is None:
            self._expiry = self._loop.call_later(LEASE_S, self._expire)

    def _expire(self) -> None:
        """End the leases that were not used for LEASE_S, a few in a turn; one that is being loaded is used."""
        self._expiry = None
        now = self._loop.time()
        for lease in list(itertools.islice(self._by_use.values(), EXPIRED_AT_ONCE)):
            if lease.used_at_s + LEASE_S > now:
                break
            if lease.loads > 0:
                self._use(lease)
            else:
                self._end_lease(lease)
                self._counters.add("cache.expired_leases")
        oldest = next(iter(self._by_use.values()), None)
        if oldest is not None and self._expiry is None:
            self._expiry = self._loop.call_at(oldest.used_at_s + LEASE_S, self._expire)

    def _end_lease(self, lease: Lease) -> None:
        """End a lease and unpin its blocks, many in the next turns of the loop; does nothing if it has ended."""
        if self._leases.get(lease.owner_id, {}).pop(lease.number, None) is not None:
            self._leased[lease.owner_id] -= len(lease.blocks)
            self._unpin_all([lease])

    def instance_lost(self, owner_id: int) -> None:
        """End all leases of an instance."""
        self._leased.pop(owner_id, None)
        self._unpin_all(self._leases.pop(owner_id, {}).values())

    def _unpin_all(self, leases: Iterable[Lease]) -> None:
        """Unpin the blocks of leases that have ended; what is much goes in the next turns of the loop."""
        for lease in leases:
            self._by_use.pop(lease.number, None)
            self._unpinning.append(_Unpinning(lease.owner_id, lease.blocks, 0))
        if self._unpin_some():
            self._unpin_rest()

    def _unpin_some(self) -> bool:
        """Unpin some blocks of leases and LOADs that have ended; return whether there are more."""
        left = UNPINNED_AT_ONCE
        while self._unpinning and left:
            holder, blocks, done = self._unpinning.popleft()
            some = blocks[done : done + left]
            if done + len(some) < len(blocks):
                self._unpinning.appendleft(_Unpinning(holder, blocks, done + len(some)))
            self._host.free_all(self._host.index.unpin(some, holder))
            left -= len(some)
        return bool(self._unpinning)

    # -- LOOKUP, UNPIN

    def _lookup(self, call: Call) -> Answer | None:
        body = expect(call, Lookup)
        _, layout, namespace, hashes = self._chain(call, body)
        lease = None
        if body.lease is not None:
            lease = self.lease(call, body.lease)
            if lease.namespace != namespace:
                raise InvalidFieldError(
                    f"lease {lease.number} has blocks of another namespace: {lease.namespace}", field="lease"
                )
        elif body.pin:
            self._check_leases(call.session.owner_id)
        found = self._host.index.longest_prefix(namespace, hashes)
        rest = hashes[len(found) :]
        if not rest or not self._lower.may_find:
            return self._found(call, lease, Lease(0, namespace, layout, found))
        self._host.index.pin(found, LOOKUPS)  # the prefix must not be evicted meanwhile
        self._looking[call.session.session_id, call.message_id] = found
        self._lookups.spawn(self._look_below(call, lease, Lease(0, namespace, layout, found), rest))
        return None

    async def _look_below(self, call: Call, lease: Lease | None, near: Lease, rest: Sequence[bytes]) -> None:
        blocks = near.blocks
        parent = blocks[-1].hash if blocks else lease.blocks[-1].hash if lease is not None and lease.blocks else None
        try:
            far = await self._lower.find(near.namespace, rest, parent, near.layout.block_bytes)
        finally:
            del self._looking[call.session.session_id, call.message_id]
            self._host.free_all(self._host.index.unpin(blocks, LOOKUPS))
        still = list(itertools.takewhile(lambda one: one.state is BlockState.READY, [*blocks, *far]))
        if not call.session.is_pending(call.message_id) or self._sessions.get(call.session.session_id) is None:
            return
        try:
            if lease is not None:
                self.lease(call, lease.number)  # it may have ended meanwhile
            answer = self._found(call, lease, msgspec.structs.replace(near, blocks=still))
        except KvferryError as error:
            self._dispatcher.answer_error(call.session, call.message_id, error)
        else:
            self._dispatcher.answer(call.session, call.message_id, answer)

    def _found(self, call: Call, lease: Lease | None, found: Lease) -> Answer:
        """Pin the blocks found, start their promotion, and return the reply.

        Raises:
            OverloadedError: the instance has reached its bound of leases or pinned blocks.
        """
        body, blocks = expect(call, Lookup), found.blocks
        if body.pin:
            self._check_pins(call.session.owner_id, len(blocks))
            self._host.check_share(call.session.tenant, sum([one.size_bytes for one in blocks if one.evictable]))
            if lease is None:
                self._check_leases(call.session.owner_id)  # others may have been added while lower tiers were asked
        self._counters.add("cache.lookups")
        self._counters.add("cache.asked_blocks", len(body.hashes) // HASH_BYTES)
        self._counters.add("cache.hit_blocks", len(blocks))
        self._host.index.touch(blocks)
        self._lower.used(blocks)
        lower = [block for block in blocks if not block.in_host]
        host, disk = len(blocks) - len(lower), sum([block.on_disk for block in lower])
        if body.pin and (blocks or lease is not None):
            owner_id = call.session.owner_id
            self._host.index.pin(blocks, owner_id)
            if lease is None:
                lease = msgspec.structs.replace(found, number=next(self._numbers), blocks=[], owner_id=owner_id)
                self._leases.setdefault(owner_id, {})[lease.number] = lease
                self._use(lease)
            lease.blocks.extend(blocks)
            self._leased[owner_id] += len(blocks)
            for block in lower:
                self._lower.promote(block)
        return Answer(
            Found(
                blocks=len(blocks),
                lease=lease.number if lease is not None else 0,
                host=host,
                disk=disk,
                remote=len(blocks) - host - disk,
                lease_blocks=len(lease.blocks) if lease is not None else 0,
            )
        )

    def _check_leases(self, owner_id: int) -> None:
        if len(self._leases.get(owner_id, ())) >= MAX_LEASES:
            raise OverloadedError(f"the instance has {MAX_LEASES} leases: UNPIN some").after(RETRY_LATER_MS)

    def _check_pins(self, owner_id: int, more: int) -> None:
        pins = self._leased[owner_id]
        if pins + more > MAX_PINS:
            raise OverloadedError(f"the instance's leases have {pins} blocks; {more} more exceed {MAX_PINS}").after(
                RETRY_LATER_MS
            )

    def _unpin(self, call: Call) -> Answer:
        lease = self.lease(call, expect(call, Unpin).lease)
        self._end_lease(lease)
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
        storing: _Storing | None = None
        try:
            fresh, at = self._begin(namespace, hashes, body.parent or None, layout)
            storing = _Storing(pool, layout, hold, fresh, ids[at])
            self._host.awaits(namespace.tenant, storing.want)
            steps = self._host.making_room(namespace.tenant, [storing.want])
            waits = next(steps, self) is not self
            if not waits:
                self._take_memory(storing)
            operation = self._begin_store(call, body, storing)
        except Exception:
            hold.release()
            if storing is not None:
                self._abandon(storing)
            raise
        if waits:
            self._room.make(operation, steps, lambda: self._copy_in(operation, storing, takes_memory=True))
        elif fresh:
            with self._operations.guarded(operation):
                self._copy_in(operation, storing, takes_memory=False)
        else:
            asyncio.get_running_loop().call_soon(self._operations.nothing_to_do, operation)
        return Answer(OperationStarted(operation=operation.number))

    def _begin(
        self, namespace: Namespace, hashes: Sequence[bytes], parent: bytes | None, layout: BlockLayout
    ) -> tuple[list[CachedBlock], list[int]]:
        """Begin the blocks that are not cached yet; return them, and their positions in ``hashes``."""
        size_bytes = namespace.block_pages * whole_units(layout.block_bytes)
        begun = self._host.index.begin(namespace, hashes, parent, size_bytes)
        self._host.index.touch([one.block for one in begun if not one.fresh])  # new blocks are useless without them
        at = [number for number, one in enumerate(begun) if one.fresh]
        return [begun[number].block for number in at], at

    def _begin_store(self, call: Call, body: Store, storing: _Storing) -> Operation:
        """Begin the operation of a STORE."""
        asked, pages = len(body.hashes) // HASH_BYTES, len(storing.fresh) * body.block_pages

        def finish(operation: Operation, error: KvferryError | None) -> Ending:
            storing.hold.release()
            if error is None:
                self._commit(storing)
            else:
                self._abandon(storing)
            done = TierDone(operation=operation.number, kind="store")
            if error is not None:
                return Ending(done)
            stored, moved = len(storing.fresh), pages * storing.layout.content_bytes
            return Ending(
                msgspec.structs.replace(
                    done, stored=stored, present=asked - stored, copied_pages=pages, moved_bytes=moved
                )
            )

        holdings = Holdings(pages=storing.hold, memory=storing.memory, writing=storing.fresh)
        return self._operations.begin(call, "store", storing.pool.name, pages, finish, holdings)

    def _take_memory(self, storing: _Storing) -> None:
        blocks, size_bytes = storing.want
        offsets = self._host.reserve(storing.pool.tenant, blocks, size_bytes, counted=True)
        storing.offsets = offsets.reshape(storing.ids.shape)

    def _copy_in(self, operation: Operation, storing: _Storing, *, takes_memory: bool) -> None:
        """Start the job that copies the new blocks."""
        if takes_memory:
            self._take_memory(storing)
            operation.holdings = operation.holdings._replace(memory=storing.memory)
        segment = BlockSegment(
            storing.pool.region, BlockPages(storing.layout, storing.ids.reshape(-1), storing.offsets.reshape(-1))
        )
        storing.job = BlockJob("offload", [segment], self._host.region, checksums=self._host.checksums)
        self._operations.start(operation, storing.job)

    def _abandon(self, storing: _Storing) -> None:
        """Stop writing blocks, those that are not visible yet, and free their memory, if they have some."""
        at = [number for number, one in enumerate(storing.fresh) if one.state is BlockState.WRITING]
        self._host.index.abandon([storing.fresh[number] for number in at])
        if len(storing.offsets):
            self._host.arena.free(storing.offsets[at].reshape(-1), storing.layout.block_bytes)
        else:
            self._host.not_awaited(storing.pool.tenant, storing.want)

    def _commit(self, storing: _Storing) -> None:
        fresh, offsets, job = storing.fresh, storing.offsets, storing.job
        digests = job.digests[0].reshape(offsets.shape) if job is not None and job.digests else None
        self._host.index.commit(fresh, offsets, digests)
        self._counters.add("cache.stored_blocks", len(fresh))
        self._lower.stored(fresh)

    # -- LOAD

    def _load(self, call: Call) -> Answer:
        body = expect(call, Load)
        lease = self.lease(call, body.lease)
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
            lease.loads -= 1
            if body.unpin:
                self._end_lease(lease)
            elif lease.number in self._by_use:
                self._use(lease)
            return self._loaded(operation, loading, error)

        holdings = Holdings(pages=hold, pinned=blocks)
        try:
            operation = self._operations.begin(call, "load", pool.name, len(call.ids[0]), finish, holdings)
        except Exception:
            hold.release()
            raise
        lease.loads += 1
        with self._operations.guarded(operation):
            loading.holder = OPERATIONS - operation.number
            self._host.index.pin(blocks, loading.holder)
            coming = [one for one in map(self._lower.promote, blocks) if one is not None]
            if coming:
                operation.waits_for = f"{len(coming)} blocks from lower tiers"
                self._loads.spawn(self._when_up(operation, loading, coming))
            else:
                self._copy(operation, loading)
        return Answer(OperationStarted(operation=operation.number))

    async def _when_up(self, operation: Operation, loading: _Loading, coming: Sequence[asyncio.Future[bool]]) -> None:
        await asyncio.gather(*coming, return_exceptions=True)
        if operation.stopped is None:
            with self._operations.guarded(operation):
                self._copy(operation, loading)

    def _copy(self, operation: Operation, loading: _Loading) -> None:
        """Copy the leading blocks that are in the host tier."""
        there = list(itertools.takewhile(lambda one: one.in_host, loading.blocks))
        loading.there = len(there)
        namespace = loading.lease.namespace
        layout, pages = loading.pool.block_layout(namespace.space), namespace.block_pages
        if not there:
            asyncio.get_running_loop().call_soon(self._operations.nothing_to_do, operation)
            return
        segment = BlockSegment(
            loading.pool.region, BlockPages(layout, loading.ids[: len(there) * pages], offsets_of(there))
        )
        digests = digests_of(there)
        known = self._host.checksums and len(digests) == len(segment.pages.ids)
        job = BlockJob("restore", [segment], self._host.region, digests=[digests] if known else None)
        self._operations.start(operation, job)

    def _loaded(self, operation: Operation, loading: _Loading, error: KvferryError | None) -> Ending:
        if loading.holder:
            self._unpinning.append(_Unpinning(loading.holder, loading.blocks, 0))
            loading.holder = 0
            if self._unpin_some():
                self._unpin_rest()
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
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


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

"""The prefix cache: LOOKUP and UNPIN, STORE and LOAD.

A LOOKUP finds the longest prefix that is cached in all groups, and pins what they need of it for the instance until
UNPIN or the instance's end. The blocks of a STORE become visible in their order, once the bytes of all are there. A
LOAD brings the leading blocks that are intact, and reports CACHE_MISS for the rest. Of a long prompt some blocks are
done in each turn of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from kvferry.daemon.control.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.services.event_rings import EventRings
from kvferry.daemon.services.leases import GroupBlocks, Lease, Leases
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.tiers.copier import BlockJob, BlockSegment
from kvferry.daemon.tiers.host_tier import HostTier, SpaceRequest
from kvferry.daemon.tiers.lower_tiers import LowerTiers
from kvferry.daemon.tiers.operations import Operation, Operations
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
from kvferry.pools.tiers.group_prefix import longest_prefix
from kvferry.pools.tiers.index import PinnedBlocks
from kvferry.pools.tiers.stored_before import StoredBefore
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    CacheMissError,
    InvalidFieldError,
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
    CacheGroup,
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


class _Looking:
    """A LOOKUP in progress.

    Attributes:
        groups: what it has found of each; with ``body.pin`` each block is pinned by the instance.
        lease: that it extends, if any.
        parent: the hash before the first one, if it is known.
        length: how many leading blocks may still be found.
        host: how many of the blocks are in the host tier, of those that were counted as used.
        disk: how many of these have their fastest copy on disk.
        below: the numbers of blocks of the prompt that a group has in no memory, and whether one has them on no disk.
    """

    def __init__(
        self, call: Call, body: Lookup, hashes: list[bytes], groups: list[GroupBlocks], lease: Lease | None
    ) -> None:
        self.call = call
        self.body = body
        self.hashes = hashes
        self.groups = groups
        self.lease = lease
        self.parent = lease.groups[0].blocks[-1].hash if lease is not None and lease.length else None
        self.length = len(hashes)
        self.host = self.disk = 0
        self.below: dict[int, bool] = {}

    @property
    def count(self) -> int:
        """Return how many blocks it has found, of all groups."""
        return sum([len(one.blocks) for one in self.groups])

    def rest(self, group: GroupBlocks) -> list[bytes]:
        """Return the hashes after the leading blocks that were found of a group."""
        return self.hashes[len(group.blocks) : self.length]


class _Piece(NamedTuple):
    """Blocks of a STORE of which each is the parent of the next; ``first`` is the number of the first one."""

    first: int
    hashes: list[bytes]
    parent: bytes | None


class _Storing:
    """A STORE in progress: its new blocks, and the pages that they are copied from once they have memory.

    Attributes:
        blocks: how many it names.
        fresh: the new blocks, as far as they have begun.
        ids: of the pages, ``(blocks, block_pages)``: of all blocks, and of the new ones once all of these have begun.
        offsets: of the memory, of the same shape; empty until there is some.
        over: how many of the new blocks are visible, or given up.
    """

    def __init__(self, pool: Pool, layout: BlockLayout, ids: PageIds) -> None:
        self.pool = pool
        self.layout = layout
        self.blocks = len(ids)
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
        rings: EventRings,
        host: HostTier,
        operations: Operations,
        lower: LowerTiers,
        counters: Counters,
    ) -> None:
        self._pools = pools
        self._host = host
        self._operations = operations
        self._lower = lower
        self._counters = counters
        self.leases = Leases(host, counters)
        self._stored_before = StoredBefore()
        self._looking: dict[tuple[int, int], _Looking] = {}
        """The lookups that were not answered at once, by session and message."""
        self._abandoned: deque[_Storing] = deque()
        self._abandon_rest = host.in_turns(self._abandon_some)
        self._storing: dict[_Storing, str] = {}
        """The STOREs under way, and their names."""
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
        return len(self._looking)

    def pinned(self) -> Iterator[PinnedBlocks]:
        """Yield the blocks that leases and lookups pin; others may come and go meanwhile."""
        yield from self.leases.pinned()
        for looking in list(self._looking.values()):
            if looking.body.pin:
                for group in looking.groups:
                    yield PinnedBlocks(looking.call.session.owner_id, group.blocks)

    def writing(self) -> Iterator[Sequence[CachedBlock]]:
        """Yield the blocks of STOREs that are not visible yet, or of those that have failed are not given up yet."""
        return (storing.fresh[storing.over :] for storing in (*self._storing, *self._abandoned))

    def extents(self) -> Iterator[Extent]:
        """Yield the memory of these blocks."""
        for storing, name in tuple(self._storing.items()):
            yield Extent(*storing.memory, name)
        for storing in tuple(self._abandoned):
            yield Extent(*storing.memory, "a STORE that has failed")

    def close(self) -> None:
        """Take no note of the time any more."""
        self.leases.close()

    def _group(self, pool: Pool, named: CacheGroup | Store, field: str, last: int | None = None) -> GroupBlocks:
        """Return a group of a pool, without blocks; from now on the host tier knows it."""
        self._host.region  # noqa: B018  raises TierOffError
        layout = pool.block_layout(named.group, field)
        namespace = namespace_of(pool, named.group, named.block_pages)
        if not self._host.knows(namespace):
            self._host.know(namespace, layout.block_bytes, model_of(pool).label)
        return GroupBlocks(namespace, layout, last)

    # -- LOOKUP, UNPIN

    def _lookup(self, call: Call) -> Answer | Coroutine[Any, Any, Answer]:
        body = expect(call, Lookup)
        pool = self._pools.named_by(call.session, body.pool)
        hashes = hashes_of(body.hashes)
        groups = [self._group(pool, one, f"groups[{at}].group", one.last) for at, one in enumerate(body.groups)]
        if len({one.namespace.group for one in groups}) < len(groups):
            raise InvalidFieldError("a group is named twice", field="groups")
        lease = None
        if body.lease is not None:
            lease = self.leases.get(call.session.owner_id, body.lease)
            _check_extension(lease, groups)
        elif body.pin:
            self.leases.check_number(call.session.owner_id)
        looking = _Looking(call, body, hashes, groups, lease)
        if len(groups) > 1 or groups[0].last is not None:
            return self._look_on(looking)
        group = groups[0]
        if self._look(looking, group) or self._lower_may_have(looking, group):
            return self._look_on(looking)
        self._use_some(looking, group.blocks, 0)
        return self._found(looking, len(group.blocks))

    def _look(self, looking: _Looking, group: GroupBlocks) -> bool:
        """Find the next leading blocks of a group; return whether there may be more. Raises what ``_take`` does."""
        asked = looking.rest(group)[:BLOCKS_AT_ONCE]
        found = self._host.index.longest_prefix(group.namespace, asked)
        self._take(looking, group, found)
        return len(found) == len(asked) and bool(looking.rest(group))

    def _lower_may_have(self, looking: _Looking, group: GroupBlocks) -> bool:
        """Return whether lower tiers may have blocks that the index does not know."""
        return bool(looking.rest(group)) and self._lower.may_find

    def _take(self, looking: _Looking, group: GroupBlocks, blocks: Sequence[CachedBlock]) -> None:
        """Pin the next blocks that a lookup has found of a group, at most BLOCKS_AT_ONCE.

        Raises:
            OverloadedError: the instance has reached its bound of pinned blocks.
        """
        session = looking.call.session
        if looking.body.pin:
            self.leases.check_blocks(session.owner_id, looking.count + len(blocks))
            self._host.check_share(session.tenant, sum([one.size_bytes for one in blocks if one.evictable]))
            self._host.index.pin(blocks, session.owner_id)
        group.blocks.extend(blocks)

    def _give(self, looking: _Looking, group: GroupBlocks, kept: int = 0) -> None:
        """Take back what a lookup has found of a group, but the first blocks."""
        given = group.blocks[kept:]
        del group.blocks[kept:]
        if given and looking.body.pin:
            self.leases.unpin(looking.call.session.owner_id, given)

    async def _look_on(self, looking: _Looking) -> Answer:
        """Go on with a lookup, some blocks in each turn of the loop."""
        key = (looking.call.session.session_id, looking.call.message_id)
        self._looking[key] = looking
        is_kept = False
        try:
            await asyncio.sleep(0)  # what may time out, as lower tiers do, needs a task
            for group in looking.groups:
                if group.last is None:
                    await self._look_ahead(looking, group)
            await self._look_back(looking, [one for one in looking.groups if one.last is not None])
            for group in looking.groups:
                self._give(looking, group, kept=looking.length - group.first)
                for start in reversed(range(0, len(group.blocks), BLOCKS_AT_ONCE)):
                    self._use_some(looking, group.blocks[start : start + BLOCKS_AT_ONCE], group.first + start)
                    await asyncio.sleep(0)
            answer = self._found(looking, looking.length)
            is_kept = looking.body.pin
            return answer
        finally:
            del self._looking[key]
            if not is_kept:
                for group in looking.groups:
                    self._give(looking, group)

    async def _look_ahead(self, looking: _Looking, group: GroupBlocks) -> None:
        """Find the leading blocks of a group that needs all: the prefix is no longer than they reach."""
        more = self._look(looking, group)
        while more:
            await asyncio.sleep(0)
            more = self._look(looking, group)
        if self._lower_may_have(looking, group):
            await self._look_below(looking, group)
        looking.length = len(group.blocks)

    async def _look_below(self, looking: _Looking, group: GroupBlocks) -> None:
        """Ask lower tiers for the blocks after those that were found."""
        near, rest = group.blocks, looking.rest(group)
        parent = near[-1].hash if near else looking.parent
        far = await self._lower.find(group.namespace, rest, parent, group.layout.block_bytes)
        gone = next((number for number, one in enumerate(near) if one.state is not BlockState.READY), None)
        if gone is not None:
            self._give(looking, group, kept=gone)
            return
        for start in range(0, len(far), BLOCKS_AT_ONCE):
            some = far[start : start + BLOCKS_AT_ONCE]
            ready = list(itertools.takewhile(lambda one: one.state is BlockState.READY, some))
            self._take(looking, group, ready)
            if len(ready) < len(some):
                return
            await asyncio.sleep(0)

    async def _look_back(self, looking: _Looking, groups: Sequence[GroupBlocks]) -> None:
        """Find the longest prefix of which these groups have the last blocks that they need, and take those."""
        there = [await self._there(looking, one) for one in groups]
        is_taken = False
        while not is_taken:
            looking.length = longest_prefix(looking.length, [one.last or 0 for one in groups], there)
            is_taken = True
            for group, has in zip(groups, there, strict=True):
                self._give(looking, group)
                is_taken = is_taken and await self._take_last(looking, group, has)
            await asyncio.sleep(0)

    async def _there(self, looking: _Looking, group: GroupBlocks) -> npt.NDArray[np.bool_]:
        """Return which blocks of the prefix are cached, (length,)."""
        hashes, namespace, index = looking.hashes[: looking.length], group.namespace, self._host.index
        if hashes and self._lower.may_find:
            await self._lower.find(namespace, hashes, looking.parent, group.layout.block_bytes, gaps=True)
        has = np.zeros(len(hashes), np.bool_)
        for start in range(0, len(hashes), BLOCKS_AT_ONCE):
            some = hashes[start : start + BLOCKS_AT_ONCE]
            has[start : start + len(some)] = [index.get(namespace, one) is not None for one in some]
            await asyncio.sleep(0)
        return has

    async def _take_last(self, looking: _Looking, group: GroupBlocks, has: npt.NDArray[np.bool_]) -> bool:
        """Take the last blocks of the prefix; return whether all were still there, and say in ``has`` which are."""
        assert group.last is not None, group
        group.first = max(0, looking.length - group.last)
        for start in range(group.first, looking.length, BLOCKS_AT_ONCE):
            some = looking.hashes[start : min(start + BLOCKS_AT_ONCE, looking.length)]
            blocks = [self._host.index.get(group.namespace, one) for one in some]
            has[start : start + len(some)] = [one is not None for one in blocks]
            there = [one for one in blocks if one is not None]
            if len(there) < len(some):
                return False
            self._take(looking, group, there)
            await asyncio.sleep(0)
        return True

    def _use_some(self, looking: _Looking, blocks: Sequence[CachedBlock], first: int) -> None:
        """Take note that blocks of a group are used, which brings them up; those of a prompt's end come first.

        ``first``: the number of the first one in the prompt.
        """
        self._host.index.touch(blocks)
        self._lower.used(blocks)
        lower = [one for one in blocks if not one.in_host]
        looking.host += len(blocks) - len(lower)
        looking.disk += sum([one.on_disk for one in lower])
        if not lower:
            return
        for number, block in enumerate(blocks, first):
            if not block.in_host:
                looking.below[number] = looking.below.get(number, False) or not block.on_disk
        if looking.body.pin:
            for block in lower:
                self._lower.promote(block)

    def _count(self, looking: _Looking, length: int) -> None:
        """Count each block of the prompt once: where it was found, or that it was not.

        One of several groups counts where the slowest of them is; one before the first that is needed, as that one.
        """
        asked, remote = len(looking.hashes), sum(looking.below.values())
        disk = len(looking.below) - remote
        first = min((one.first for one in looking.groups), default=0)
        if first in looking.below:
            remote, disk = (remote + first, disk) if looking.below[first] else (remote, disk + first)
        self._counters.add("cache.lookups")
        self._counters.add("cache.asked_blocks", asked)
        self._counters.add("cache.hit_blocks", length)
        self._counters.add("cache.found.host", length - disk - remote)
        self._counters.add("cache.found.disk", disk)
        self._counters.add("cache.found.remote", remote)
        self._counters.add("cache.found.nowhere", asked - length)
        unbounded = length
        if length < asked:
            reaches = [self._stored_before.reach(one.namespace, looking.hashes) for one in looking.groups]
            unbounded = max(length, min(reaches))
        self._counters.add("cache.unbounded_hit_blocks", unbounded)

    def _found(self, looking: _Looking, length: int) -> Answer:
        """Make what a lookup has pinned a lease, or more of one, and return the reply.

        Raises:
            OverloadedError: the instance has reached its bound of leases or pinned blocks.
            UnknownLeaseError: the lease has ended meanwhile.
        """
        call, body, groups, lease = looking.call, looking.body, looking.groups, looking.lease
        owner_id = call.session.owner_id
        if lease is not None:
            self.leases.get(owner_id, lease.number)
        if body.pin:
            self.leases.check_blocks(owner_id, looking.count)
            if lease is None:
                self.leases.check_number(owner_id)
        self._count(looking, length)
        if body.pin and lease is not None:
            self.leases.extend(lease, groups, length)
        elif body.pin and length:
            lease = self.leases.add(owner_id, groups, length)
        return Answer(
            Found(
                blocks=length,
                lease=lease.number if lease is not None else 0,
                host=looking.host,
                disk=looking.disk,
                remote=looking.count - looking.host - looking.disk,
                lease_blocks=lease.length if lease is not None else 0,
            )
        )

    def _unpin(self, call: Call) -> Answer:
        lease = self.leases.get(call.session.owner_id, expect(call, Unpin).lease)
        self.leases.end(lease)
        return Answer(Unpinned(blocks=lease.length))

    # -- STORE

    def _store(self, call: Call) -> Answer:
        body = expect(call, Store)
        pool = self._pools.named_by(call.session, body.pool)
        group, hashes = self._group(pool, body, "group"), hashes_of(body.hashes)
        ids = ids_by_block(call.ids[0], len(hashes), body.block_pages)
        _check_chains(body, len(hashes))
        operation = self._operations.of_request(call, "store", pool.name, len(call.ids[0]))
        with contextlib.ExitStack() as holds:
            pages = holds.enter_context(operation.pages)
            pages.add(pool.space(group.layout.space), call.session.owner_id, call.ids[0], "pages")
            storing = _Storing(pool, group.layout, ids)
            holds.enter_context(self._being_stored(storing, operation.name))
            steps = self._begin(storing, group.namespace, _pieces(body, hashes))
            waits = next(steps, self) is not self
            if not waits:
                self._take_memory(storing)
            self._operations.begin(operation, holds, self._copy_in(operation, storing, steps if waits else None))
        return Answer(OperationStarted(operation=operation.number))

    @contextlib.contextmanager
    def _being_stored(self, storing: _Storing, name: str) -> Iterator[None]:
        """Give up the new blocks that are not visible where something is raised in the block."""
        self._storing[storing] = name
        try:
            yield
        except BaseException:
            self._abandon(storing)
            raise
        finally:
            del self._storing[storing]

    def _begin(self, storing: _Storing, namespace: Namespace, pieces: Iterable[_Piece]) -> Iterator[None]:
        """Begin the blocks that are not cached yet, and make room for them; yield where there is more.

        Raises what ``HostTier.making_room`` does.
        """
        size_bytes = namespace.block_pages * whole_units(storing.layout.block_bytes)
        at, present, in_turn = list[int](), list[CachedBlock](), 0
        for first, hashes, parent in pieces:
            in_turn += len(hashes)
            if in_turn > BLOCKS_AT_ONCE:
                yield
                in_turn = len(hashes)
            before = storing.space_request
            for number, (block, is_fresh) in enumerate(
                self._host.index.begin(namespace, hashes, parent, size_bytes), first
            ):
                if is_fresh:
                    storing.fresh.append(block)
                    at.append(number)
                else:
                    present.append(block)
            self._host.awaits(
                namespace.tenant, SpaceRequest(storing.space_request.blocks - before.blocks, before.size_bytes)
            )
        storing.ids = storing.ids[at]
        for start in reversed(range(0, len(present), BLOCKS_AT_ONCE)):
            self._host.index.touch(present[start : start + BLOCKS_AT_ONCE])  # new blocks are useless without them
            if start:
                yield
        yield from self._host.making_room(namespace.tenant, [storing.space_request])

    def _take_memory(self, storing: _Storing) -> None:
        blocks, size_bytes = storing.space_request
        offsets = self._host.reserve(storing.pool.tenant, blocks, size_bytes, counted=True)
        storing.offsets = offsets.reshape(storing.ids.shape)

    async def _copy_in(self, operation: Operation, storing: _Storing, steps: Iterator[None] | None) -> TierDone:
        """Copy the new blocks, once ``steps`` have made room for them, and make them visible."""
        if steps is not None:
            operation.waits_for = "room in the host tier"
            await self._host.make_room(steps)
            self._take_memory(storing)
        if storing.fresh:
            pages = BlockPages(storing.layout, storing.ids.reshape(-1), storing.offsets.reshape(-1))
            segments = [BlockSegment(storing.pool.region, pages)]
            storing.job = BlockJob("offload", segments, self._host.region, checksums=self._host.checksums)
            await self._operations.copy(operation, storing.job)
        while len(storing.fresh) - storing.over > BLOCKS_AT_ONCE:
            self._publish_some(storing)
            await asyncio.sleep(0)
        self._publish_some(storing)
        stored, copied_pages = len(storing.fresh), storing.space_request.blocks
        return msgspec.structs.replace(
            operation.done,
            stored=stored,
            present=storing.blocks - stored,
            copied_pages=copied_pages,
            moved_bytes=copied_pages * storing.layout.content_bytes,
        )

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
            self._host.free(storing.offsets[at].reshape(-1), size_bytes)
        else:
            self._host.not_awaited(storing.pool.tenant, SpaceRequest(len(at) * storing.ids.shape[1], size_bytes))
        return bool(self._abandoned)

    def _publish_some(self, storing: _Storing) -> None:
        """Make the next blocks visible."""
        start, stop = storing.over, storing.over + BLOCKS_AT_ONCE
        some, offsets, job = storing.fresh[start:stop], storing.offsets, storing.job
        digests = job.digests[0].reshape(offsets.shape)[start:stop] if job is not None and job.digests else None
        self._host.commit(some, offsets[start:stop], digests)
        storing.over += len(some)
        self._counters.add("cache.stored_blocks", len(some))
        if some:
            self._stored_before.add(some[0].namespace, [one.hash for one in some])
        self._lower.stored(some)

    # -- LOAD

    def _load(self, call: Call) -> Answer:
        body = expect(call, Load)
        lease = self.leases.get(call.session.owner_id, body.lease)
        pool = self._pools.named_by(call.session, body.pool)
        group = lease.group(body.group)
        _check_namespace(pool, group.namespace)
        if body.first_block < group.first:
            raise InvalidFieldError(
                f"{body.first_block}; of {body.group!r} the lease has the blocks from {group.first} on",
                field="first_block",
            )
        pages = group.namespace.block_pages
        count, rest = divmod(len(call.ids[0]), pages)
        first = body.first_block - group.first
        blocks = group.blocks[first : first + count]
        if rest or not count or len(blocks) < count:
            raise LengthMismatchError(
                f"{len(call.ids[0])} pages; the lease has {max(0, len(group.blocks) - first)} blocks of "
                f"{pages} pages from block {body.first_block} on",
                field="pages",
            )
        operation = self._operations.of_request(call, "load", pool.name, len(call.ids[0]))
        loading = _Loading(pool, group, blocks, call.ids[0])
        with contextlib.ExitStack() as holds:
            hold = holds.enter_context(operation.pages)
            hold.add(pool.space(group.layout.space), call.session.owner_id, call.ids[0], "pages")
            self._operations.begin(operation, holds, self._copy_up(operation, loading, lease, unpin=body.unpin))
        return Answer(OperationStarted(operation=operation.number))

    async def _copy_up(self, operation: Operation, loading: _Loading, lease: Lease, *, unpin: bool) -> TierDone:
        """Bring blocks of lower tiers into the host tier, some in each turn of the loop, and copy them then."""
        group, blocks = loading.group, loading.blocks
        with self.leases.loading(lease, ends=unpin):
            for start in range(0, len(blocks), BLOCKS_AT_ONCE):
                if start:
                    await asyncio.sleep(0)
                some = blocks[start : start + BLOCKS_AT_ONCE]
                coming = [one for one in map(self._lower.promote, some) if one is not None]
                if coming:
                    operation.waits_for = f"{len(coming)} blocks from lower tiers"
                    await asyncio.wait(coming)  # others wait for them, too: they are not cancelled with this one
                if not self._take_up(loading, some):
                    break
            if loading.there:
                await self._copy(operation, loading)
        count, there = len(blocks), loading.there
        pages = there * group.namespace.block_pages
        error = None
        if there < count:
            self._counters.add("cache.missed_blocks", count - there)
            error = CacheMissError(f"block {there} of {count} is gone, or does not fit into the host tier").info()
        moved_bytes = pages * group.layout.content_bytes
        return msgspec.structs.replace(
            operation.done, loaded=there, copied_pages=pages, moved_bytes=moved_bytes, error=error
        )

    def _take_up(self, loading: _Loading, blocks: Sequence[CachedBlock]) -> bool:
        """Have the leading blocks copied that are in the host tier, and stay there; return whether all of them are."""
        there = list(itertools.takewhile(lambda one: one.in_host, blocks))
        loading.there += len(there)
        loading.offsets.append(offsets_of(there))
        loading.digests.append(digests_of(there))
        return len(there) == len(blocks)

    async def _copy(self, operation: Operation, loading: _Loading) -> None:
        """Copy the leading blocks that are in the host tier."""
        namespace = loading.group.namespace
        layout, pages = loading.pool.block_layout(namespace.group), namespace.block_pages
        offsets, digests = np.concatenate(loading.offsets), np.concatenate(loading.digests)
        segment = BlockSegment(loading.pool.region, BlockPages(layout, loading.ids[: loading.there * pages], offsets))
        known = self._host.checksums and len(digests) == len(segment.pages.ids)
        job = BlockJob("restore", [segment], self._host.region, digests=[digests] if known else None)
        try:
            await self._operations.copy(operation, job)
        except SnapshotDamagedError as error:
            self._damaged(loading, error)
            raise CacheMissError(f"a cached block was damaged: {error.detail}") from error

    def _damaged(self, loading: _Loading, error: SnapshotDamagedError) -> None:
        """Remove the damaged block from every tier; the page number in the error's field tells which block it is."""
        self._counters.add("cache.damaged_blocks")
        log.error(
            "a cached block was damaged in memory", cause=error.detail, remedy="check the host's memory (ECC errors)"
        )
        page = int(error.field.partition("[")[2].rstrip("]"))
        block = loading.blocks[page // loading.group.namespace.block_pages]
        self._host.remove([block])
        self._lower.remove([block])


def _check_chains(body: Store, blocks: int) -> None:
    """Check where the blocks of several prompts begin.

    Raises:
        InvalidFieldError: a parent is no hash, or a chain does not begin after the one before and among the blocks.
    """
    before = 0
    for at, (first, parent) in enumerate([(0, body.parent), *((one.first, one.parent) for one in body.chains)]):
        field = f"chains[{at - 1}]." if at else ""
        if parent and len(parent) != HASH_BYTES:
            raise InvalidFieldError(f"{len(parent)} bytes; a hash has {HASH_BYTES}", field=f"{field}parent")
        if at and not before < first < blocks:
            raise InvalidFieldError(
                f"{first}; the chain before begins at {before}, and there are {blocks} blocks", field=f"{field}first"
            )
        before = first


def _pieces(body: Store, hashes: Sequence[bytes]) -> Iterator[_Piece]:
    """Yield the blocks of a STORE, chain by chain, at most BLOCKS_AT_ONCE in a piece."""
    starts = [(0, body.parent), *((one.first, one.parent) for one in body.chains)]
    for (first, before), stop in zip(starts, [*(one.first for one in body.chains), len(hashes)], strict=True):
        parent = before or None
        for start in range(first, stop, BLOCKS_AT_ONCE):
            some = list(hashes[start : min(start + BLOCKS_AT_ONCE, stop)])
            yield _Piece(start, some, parent)
            parent = some[-1]


def _check_extension(lease: Lease, groups: Sequence[GroupBlocks]) -> None:
    """Check that a lookup of these groups can extend a lease.

    Raises:
        InvalidFieldError: the lease has other groups, or not all blocks of one.
    """
    if [one.namespace for one in lease.groups] != [one.namespace for one in groups]:
        theirs = ", ".join(map(str, (one.namespace for one in lease.groups)))
        raise InvalidFieldError(f"lease {lease.number} has blocks of another namespace: {theirs}", field="lease")
    if any(one.last is not None for one in (*lease.groups, *groups)):
        raise InvalidFieldError(
            "a group that needs the last blocks alone cannot be extended: look all hashes up, without a lease",
            field="lease",
        )


def _check_namespace(pool: Pool, namespace: Namespace) -> None:
    """Check that a lease's blocks can be loaded into a pool's pages.

    Raises:
        LayoutMismatchError: the pool has another layout.
        NoModelError: the pool was created without a model identity.
        ModelMismatchError: the pool has another model or cache identity.
    """
    ours = namespace_of(pool, namespace.group, namespace.block_pages)
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

    def __init__(self, pool: Pool, group: GroupBlocks, blocks: list[CachedBlock], ids: PageIds) -> None:
        self.pool = pool
        self.group = group
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


def namespace_of(pool: Pool, group: str, block_pages: int) -> Namespace:
    """Return the namespace of a pool's blocks of one of its groups.

    Raises:
        NoModelError: the pool was created without a model.
    """
    return Namespace(pool.tenant, pool.manifest.layout_digest, identity_of(model_of(pool)), group, block_pages)


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

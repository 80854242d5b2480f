"""The host tier: its memory, the blocks in it, and eviction when it is full.

Snapshots and cached blocks share the arena. Unpinned cached blocks are evicted by the policy; everything else stays
until its owner frees it. A request that does not fit gets BUSY, with the sizes and holders of what is pinned.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import structlog

from kvferry.daemon.control.later import in_turns
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.process.access import may_see_all
from kvferry.daemon.process.memory import HostMemory
from kvferry.daemon.process.tenants import Tenants
from kvferry.daemon.process.threads import started_threads
from kvferry.daemon.tiers.kept_tier import KeptTier
from kvferry.daemon.tiers.snapshots import Snapshot
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.host.memory import kept_bytes, smallest_limit
from kvferry.pools.integrity import RESTART, Check, Problem, Walk
from kvferry.pools.tiers.arena import Arena, Extent, Freed, NotEnoughError, Offsets, whole_units
from kvferry.pools.tiers.cached_block import BlockState, CachedBlock, Digests, Namespace, Tier
from kvferry.pools.tiers.index import BlockIndex, PinnedBlocks
from kvferry.pools.tiers.journal import CacheJournal
from kvferry.pools.tiers.policies import MOST_BEHIND
from kvferry.pools.tiers.tier_record import (
    NOTHING,
    FoundBlocks,
    FoundSnapshot,
    NamespaceHead,
    SegmentHead,
    SnapshotHead,
    record_bytes,
)
from kvferry.protocol.config.schema import TiersConfig
from kvferry.protocol.config.tenants import whose
from kvferry.protocol.errors import RETRY_LATER_MS, OutOfMemoryError, OverloadedError, TierOffError
from kvferry.protocol.ids import new_number
from kvferry.protocol.session_messages import TierStatus

log = structlog.get_logger(__name__)
HOLDERS_SHOWN = 4
STRIDE_BYTES = 2 << 20
AHEAD_BYTES = 256 << 20
"""How much more memory than is in use is populated ahead of its use."""

GROW_AGAIN_S = 1.0
"""After there was too little memory, so long nobody looks whether there is enough by now."""

AGAIN_MS = 250
"""When a full tier is worth another try: operations end and leases are given up meanwhile."""

USES_AT_ONCE = 32
EVICTED_AT_ONCE = 32
"""Uses that eviction policies are told of, and blocks that are evicted ahead, in a turn of the loop: some 0.5 ms."""

ADOPTED_AT_ONCE = 256
ADOPTED_FIRST = 4096
"""Blocks that are adopted in a turn of the loop, some 2 ms, and before anything is served."""

CATCH_UP_TURNS = MOST_BEHIND // USES_AT_ONCE
"""For so many turns an operation that needs room waits for eviction policies that others' uses keep behind."""

LARGER_TIER = "ask for fewer pages at once, or raise tiers.host_bytes, and the tenant's bound (tenants.NAME.tier_bytes)"

JOURNAL_CHANGES = 1 << 16
JOURNAL_PART = 8
HASH_MEMORY_BYTES = 64
"""The journal may have an eighth as much memory as others may make the daemon keep; so much a hash takes."""

SAMPLED: Final = 16
"""Of so many blocks one is looked at for how long it stays."""

MAX_LABELS = 4096
"""Models whose labels are kept; beyond that, blocks of the oldest ones are listed without a label."""

MAX_DEMOTIONS = 4096
"""Blocks that wait to be copied to one lower tier; others are not."""

DEMOTION = -2
"""The holder of pins on blocks that are being written to a lower tier."""


class SpaceRequest(NamedTuple):
    """Blocks of one size that a request is about to ask for."""

    blocks: int
    size_bytes: int


class _Missing(NamedTuple):
    """What has to be evicted: so many bytes, of one user, or of any (None)."""

    size_bytes: int
    of: int | None


class HostTier:
    """The host tier. For the control loop. Its memory is mapped when the daemon starts and populated as it is used.

    It grows with its use, as long as the host has the memory; where it may not, it evicts as a full one does.

    Attributes:
        journal: blocks that became visible and blocks that were removed.
        index: the cached blocks of this tier and of those below; sizes are in whole allocation units of the arena.
        arena: which bytes are free.
        page_bytes: per namespace, the bytes of one page in a block, as in memory and in files.
        models: the model's label for each identity, for people.
        checksums: whether blocks get checksums.
        shares: what is kept for whom.
        rests: whether nobody gets memory: what the daemon before this one had begun may still write where no record
            says that there is something whole.
    """

    def __init__(
        self,
        config: TiersConfig,
        counters: Counters,
        memory: HostMemory,
        clock: Callable[[], float] = time.monotonic,
        call_soon: Callable[[Callable[[], None]], object] | None = None,
        kept: KeptTier | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        """Map the memory; with what an earlier daemon has left in it, ``adopt`` comes before anything else.

        Args:
            config: of all tiers.
            counters: what it counts with.
            memory: of the host.
            clock: returns seconds.
            call_soon: the loop's, by which eviction policies catch up; None: only when something is to be evicted.
            kept: memory of the configured size that outlives the daemon; None: it ends with this one.
            tenants: who shares it.
        """
        self.checksums = config.checksums
        self._counters = counters
        self._memory = memory
        self._clock = clock
        memory_bytes = smallest_limit().size_bytes
        size_bytes = config.size_bytes(memory_bytes)
        self.rests = False
        self._kept = kept
        self._is_record_full = False
        self._coming: list[tuple[FoundBlocks, int]] = []
        """The first ones of these blocks, which an earlier daemon has left, are not visible yet."""
        self.arena = Arena(0, size_bytes)
        max_hashes = kept_bytes(memory_bytes) // JOURNAL_PART // HASH_MEMORY_BYTES
        self.journal = CacheJournal(JOURNAL_CHANGES, new_number(), max_hashes)
        self.shares = (tenants or Tenants()).shares
        self._call_soon = call_soon
        self._entered_s: dict[CachedBlock, float] = {}
        """When some of the blocks came."""
        self._turn = asyncio.Lock()
        self.index = BlockIndex(
            self.journal,
            most_bytes=size_bytes,
            bounds=(tenants or Tenants()).tier_bytes,
            parts=self.shares.parts,
            policy=config.policy,
            fell_behind=self.in_turns(self._catch_up),
        )
        self.page_bytes: dict[Namespace, int] = {}
        self.models: dict[str, str] = {}
        own = None if kept is not None or not size_bytes else memory.region("host-tier", size_bytes, grows=True)
        self._region = own if kept is None else kept.region
        self._populated_bytes = 0
        self._populator = started_threads(1, "populate-tier")
        self._closing = threading.Event()
        self._too_little = ""
        self._grow_again_at = 0.0
        self._grow(AHEAD_BYTES)

    def __repr__(self) -> str:
        """Show the live counts."""
        return f"<HostTier {self.arena!r} {self.index!r}>"

    @property
    def enabled(self) -> bool:
        """Return whether a host tier is configured."""
        return self._region is not None

    @property
    def region(self) -> HostRegion:
        """Return the memory.

        Raises:
            TierOffError: no host tier is configured.
        """
        if self._region is None:
            raise TierOffError("this daemon has no host tier (tiers.host_bytes is 0)", field="tiers.host_bytes")
        return self._region

    def in_turns(self, step: Callable[[], bool]) -> Callable[[], None]:
        """See ``later.in_turns``; without a loop nothing is called."""
        return in_turns(step, self._call_soon or (lambda _call: None))

    def _catch_up(self) -> bool:
        self.index.accounts.catch_up(USES_AT_ONCE)
        return self.index.accounts.behind > 0

    def knows(self, namespace: Namespace) -> bool:
        """Return whether ``know`` has to be called no more."""
        return namespace in self.page_bytes and namespace.identity in self.models

    def know(self, namespace: Namespace, page_bytes: int, model: str) -> None:
        """Record a namespace's bytes per page and, if there is one, its model's label."""
        self.page_bytes[namespace] = page_bytes
        if model:
            self.models[namespace.identity] = model
            if len(self.models) > MAX_LABELS:
                self.models.pop(next(iter(self.models)))

    def reserve(self, tenant: int, count: int, size_bytes: int, *, counted: bool = False) -> Offsets:
        """Allocate memory for ``count`` blocks of ``size_bytes`` for a tenant: all or none, evicting where needed.

        It is charged to the tenant until ``release``, unless the index has already ``counted`` it: see ``awaits``.

        Returns:
            (count,) offsets in the arena, in bytes.

        Raises:
            OutOfMemoryError: more than the tier can ever hold, or the tenant may have.
            OverloadedError: too much is pinned, or more than the tenant's share; the detail names the holders.
        """
        wanted = count * whole_units(size_bytes)
        account = self.index.accounts[tenant]
        over_bound = self._over_bound(tenant, wanted)
        self.check_share(tenant, wanted)
        self._evict(self.index.host_victims(tenant), over_bound)
        try:
            offsets = self.arena.allocate(count, size_bytes)
        except NotEnoughError:
            fitting = self.arena.fitting(size_bytes)
            self._grow(self.arena.size_bytes + (count - fitting) * whole_units(size_bytes))
            if self.arena.fitting(size_bytes) < count:
                self._evict_for(tenant, size_bytes, wanted)
            offsets = self.arena.allocate(count, size_bytes)
        if counted:
            account.awaited_bytes -= wanted
        else:
            account.charged_bytes += wanted
        if count:
            self.populate(int(offsets[-1]) + size_bytes)
        return offsets

    def awaits(self, tenant: int, space_request: SpaceRequest) -> None:
        """Take note that blocks which the index counts have no memory yet: nobody has to make room for them but these.

        They get it by ``reserve`` with ``counted``, or ``not_awaited`` is called.
        """
        self.index.accounts[tenant].awaited_bytes += space_request.blocks * whole_units(space_request.size_bytes)

    def not_awaited(self, tenant: int, space_request: SpaceRequest) -> None:
        """Take note that they want no memory any more."""
        self.index.accounts[tenant].awaited_bytes -= space_request.blocks * whole_units(space_request.size_bytes)

    def release(self, tenant: int, offsets: Offsets, size_bytes: int) -> None:
        """Free memory that ``reserve`` has charged to a tenant."""
        self.free(offsets, size_bytes)
        self.discharge(tenant, len(offsets), size_bytes)

    def discharge(self, tenant: int, count: int, size_bytes: int) -> None:
        """Charge a tenant no more for blocks that ``reserve`` returned: they are free, or the index counts them."""
        account, charged = self.index.accounts[tenant], count * whole_units(size_bytes)
        assert charged <= account.charged_bytes, f"{charged} of {account.charged_bytes} charged bytes discharged"
        account.charged_bytes -= charged

    def free_all(self, freed: Iterable[Freed]) -> None:
        """Free memory that the index has released."""
        by_size: dict[int, list[Offsets]] = {}
        for offsets, size_bytes in freed:
            by_size.setdefault(size_bytes, []).append(offsets)
        for size_bytes, offset_arrays in by_size.items():  # one call: it costs the same for one block as for a thousand
            self.free(np.concatenate(offset_arrays), size_bytes)

    def free(self, offsets: Offsets, size_bytes: int) -> None:
        """Free memory: the next daemon must find nothing there from now on."""
        if self._kept is not None:
            self._kept.record.clear(offsets)
        self.arena.free(offsets, size_bytes)

    # -- blocks and snapshots whose bytes are whole, and which therefore outlive the daemon

    def commit(
        self, blocks: Sequence[CachedBlock], offsets: Offsets, digests: npt.NDArray[np.uint64] | None = None
    ) -> None:
        """See ``BlockIndex.commit``."""
        self.index.commit(blocks, offsets, digests)
        self._note_entered(blocks)
        self._record(blocks, offsets, digests)

    def enter(self, block: CachedBlock, offsets: Offsets, digests: Digests) -> bool:
        """See ``BlockIndex.enter_host``."""
        entered = self.index.enter_host(block, offsets, digests)
        if entered:
            self._note_entered([block])
            self._record([block], offsets[None], np.array([digests], np.uint64) if digests else None)
        return entered

    def remove(self, blocks: Iterable[CachedBlock]) -> None:
        """Remove blocks from all tiers that the index knows, and free their memory as soon as nobody reads it."""
        freed: list[Freed] = []
        for block in blocks:
            self._entered_s.pop(block, None)
            if self._kept is not None and block.offsets is not None:
                self._kept.record.clear(block.offsets)
            freed += self.index.remove(block)
        self.free_all(freed)

    def _note_entered(self, blocks: Sequence[CachedBlock]) -> None:
        if blocks:  # their serials follow each other
            self._entered_s.update(dict.fromkeys(blocks[-blocks[0].serial % SAMPLED :: SAMPLED], self._clock()))

    def _record(self, blocks: Sequence[CachedBlock], offsets: Offsets, digests: npt.NDArray[np.uint64] | None) -> None:
        """Record blocks of one namespace that are visible in the host tier now."""
        if self._kept is None or not blocks:
            return
        namespace = blocks[0].namespace
        model = self.models.get(namespace.identity, "")
        head = NamespaceHead(**namespace._asdict(), page_bytes=self.page_bytes[namespace], model=model)
        hashes, parents, depths = zip(*[(one.hash, one.parent, one.depth) for one in blocks], strict=True)
        if not self._kept.record.put_blocks(head, hashes, parents, depths, offsets, digests):
            self._not_recorded(len(blocks))

    def record_snapshot(self, snapshot: Snapshot) -> None:
        """Record a snapshot that is ready."""
        if self._kept is None:
            return
        head = SnapshotHead(
            name=snapshot.name,
            tenant=snapshot.tenant,
            owner=snapshot.owner_id,
            pool=snapshot.pool,
            model=snapshot.model,
            created_s=snapshot.created_at,
            segments=tuple(
                SegmentHead(
                    component=one.component,
                    space=one.layout.space,
                    tokens=one.tokens,
                    count=one.count,
                    block_bytes=one.layout.block_bytes,
                )
                for one in snapshot.segments
            ),
        )
        pages = [(one.offsets, one.digests) for one in snapshot.segments]
        if not self._kept.record.put_snapshot(head, snapshot.manifest, pages):
            self._not_recorded(1)

    def drop_snapshot(self, snapshot: Snapshot) -> None:
        """Take a snapshot's record away: it may still be read, and ``release`` comes later."""
        if self._kept is not None and snapshot.segments and len(snapshot.segments[0].offsets):
            self._kept.record.drop_snapshot(snapshot.segments[0].offsets)

    def _not_recorded(self, count: int) -> None:
        self._counters.add("adoption.not_kept", count)
        if not self._is_record_full:
            self._is_record_full = True
            log.warning("some snapshots or cached blocks do not outlive the daemon", cause="the tier's record is full")

    def adopt(self) -> list[FoundSnapshot]:
        """Take over what an earlier daemon has left: account for all of it, and make the blocks visible.

        Returns:
            The snapshots: each is its tenant's to ``release``.
        """
        found = NOTHING if self._kept is None else self._kept.found
        if self._kept is None or not (found.blocks or found.snapshots):
            return []
        starts, sizes = found.extents
        end = int((starts + sizes).max())
        self._grow(end)
        if self.arena.size_bytes < end:
            self._kept.record.clear(starts)
            self._counters.add("adoption.blocks_dropped", sum(len(one.hashes) for one in found.blocks))
            self._counters.add("adoption.snapshots_dropped", len(found.snapshots))
            log.warning("the host tier is begun anew", cause=self._too_little)
            return []
        self.arena.occupy(starts, sizes)
        for blocks in found.blocks:
            head = blocks.head
            self.know(head.namespace, head.page_bytes, head.model)
            self.index.accounts[head.tenant].charged_bytes += blocks.offsets.size * whole_units(head.page_bytes)
            self._coming.append((blocks, len(blocks.hashes)))
        for one in found.snapshots:
            charged = sum(len(its.offsets) * whole_units(its.head.block_bytes) for its in one.segments)
            self.index.accounts[one.head.tenant].charged_bytes += charged
        self._kept.found = NOTHING
        for _ in range(ADOPTED_FIRST // ADOPTED_AT_ONCE):
            self._adopt_some()
        self.in_turns(self._adopt_some)()
        return found.snapshots

    def _adopt_some(self) -> bool:
        """Make some more of the blocks visible that an earlier daemon has left; return whether there are more.

        The deepest come first: they are the first to be evicted.
        """
        if not self._coming:
            return False
        blocks, stop = self._coming.pop()
        start = max(0, stop - ADOPTED_AT_ONCE)
        if start:
            self._coming.append((blocks, start))
        some, head = blocks.only(np.arange(start, stop)), blocks.head
        names = zip(some.hashes, some.parents, some.depths, strict=True)
        size_bytes = head.block_pages * whole_units(head.page_bytes)
        twice = self.index.adopt_in_host(head.namespace, names, size_bytes, some.offsets, some.digests)
        self.discharge(head.tenant, some.offsets.size, head.page_bytes)
        self.free(*some.only(np.array(twice, np.int64)).pages)
        self._counters.add("adoption.blocks", stop - start - len(twice))
        return bool(self._coming)

    def _coming_extents(self) -> Iterator[Extent]:
        for blocks, stop in list(self._coming):
            yield Extent(*blocks.only(np.arange(stop)).pages, "blocks that are being adopted", blocks.head.tenant)

    # -- memory

    def status(self, snapshots: int) -> TierStatus:
        """Return the tier as STATUS shows it."""
        if not self.enabled:
            return TierStatus(tier="host", state="off", total_bytes=0, used_bytes=0)
        return TierStatus(
            tier="host",
            state="ready",
            total_bytes=self.arena.max_bytes,
            used_bytes=self.arena.used_bytes,
            pinned_bytes=self.arena.used_bytes - self.index.accounts.evictable_bytes,
            blocks=self.index.accounts.blocks,
            snapshots=snapshots,
        )

    def checks(
        self, extents: Callable[[], Iterable[Extent]], pinned: Callable[[], Iterable[PinnedBlocks]]
    ) -> Iterator[Check]:
        """Yield the checks of the memory, the index and the pins.

        Args:
            extents: what holds memory beside the cached blocks.
            pinned: what pins blocks beside operators.
        """

        def version() -> object:
            return self.arena.changes, self.index.changes

        def memory() -> Walk:
            yield from self.arena.problems()
            held = [*extents(), *self._coming_extents()]
            yield from self.arena.extent_problems(itertools.chain(self.index.extents(), held))
            charged: Counter[int] = Counter()
            for one in held:
                if one.charged_to is not None:
                    charged[one.charged_to] += len(one.offsets) * whole_units(one.size_bytes)
            for tenant, account in self.index.accounts.items():
                if account.charged_bytes != charged[tenant]:
                    yield Problem(
                        f"{whose(tenant)} is charged {account.charged_bytes} bytes, and holds {charged[tenant]}"
                    )
            taken = sum(account.taken_bytes for _, account in self.index.accounts.items())
            if taken != self.arena.used_bytes:
                yield Problem(f"tenants have {taken} bytes, {self.arena.used_bytes} are allocated")

        yield Check("the host tier's memory", memory, version, RESTART)
        yield Check("the cached blocks", self.index.problems, version, RESTART)
        yield Check("the pins of cached blocks", lambda: self.index.pin_problems(pinned()), version, RESTART)

    def populate(self, used_bytes: int) -> None:
        """Populate memory ahead of its use, on a thread: copying into memory that has no pages yet is far slower."""
        if used_bytes + AHEAD_BYTES // 2 > self.arena.size_bytes:
            self._grow(used_bytes + AHEAD_BYTES)
        start, self._populated_bytes = self._populated_bytes, self.arena.size_bytes
        if start < self._populated_bytes:
            parts = [(self.region, start, self._populated_bytes)]
            if self._kept is not None:
                parts.append((self._kept.file, *self._kept.record.range_of(start, self._populated_bytes)))
            for region, first, last in parts:
                done = self._populator.submit(self._memory.fill, region, self._closing, first, last)
                done.add_done_callback(_log_populate_failure)

    def _grow(self, wanted_bytes: int) -> None:
        """Let the arena grow to so many bytes, as far as the tier is configured so large; not without the memory."""
        wanted_bytes = min(self.arena.max_bytes, -(-wanted_bytes // STRIDE_BYTES) * STRIDE_BYTES)
        if wanted_bytes <= self.arena.size_bytes or self._clock() < self._grow_again_at:
            return
        try:
            self._memory.count_on(self.region, wanted_bytes)
            if self._kept is not None:
                self._memory.count_on(self._kept.file, record_bytes(wanted_bytes))
        except OutOfMemoryError as cause:
            if not self._too_little:
                log.warning("the host tier does not grow", size_bytes=self.arena.size_bytes, cause=cause.detail)
            self._too_little = cause.detail
            self._grow_again_at = self._clock() + GROW_AGAIN_S
        else:
            self._too_little = ""
            self.arena.grow(wanted_bytes)

    def close(self) -> None:
        """Unmap the memory, unless that outlives the daemon: then it is whose who keeps it."""
        self._closing.set()
        self._populator.shutdown(cancel_futures=True)
        if self._region is not None and self._kept is None:
            self._region.close()

    def making_room(self, tenant: int, space_requests: Sequence[SpaceRequest]) -> Iterator[None]:
        """Evict what ``reserve`` would have to evict for these blocks, a few at a time; yield where there is more.

        What others take meanwhile is evicted for, too, but no more than the tier had blocks.

        Raises:
            OutOfMemoryError, OverloadedError: as ``reserve``, for all of them together; evicts no other user's then.
        """
        accounts, turns_left = self.index.accounts, CATCH_UP_TURNS
        for _ in range(accounts.blocks // EVICTED_AT_ONCE + 1):
            missing = self._missing(tenant, space_requests)
            if missing.size_bytes <= 0:
                return
            while accounts.behind > USES_AT_ONCE and turns_left:
                turns_left -= 1
                accounts.catch_up(USES_AT_ONCE)
                yield
            if not self._evict(self.index.host_victims(missing.of), missing.size_bytes, EVICTED_AT_ONCE):
                return
            if self._missing(tenant, space_requests).size_bytes > 0:
                yield

    async def make_room(self, steps: Iterator[None]) -> None:
        """Go on with ``making_room``, a step in each turn of the loop, in turns with all others that do so.

        To evict a block takes some 15 us, and a long prompt has thousands of them: all engines would wait for that.
        """
        while True:
            async with self._turn:
                await asyncio.sleep(0)
                if next(steps, self) is self:
                    return

    def _missing(self, tenant: int, space_requests: Sequence[SpaceRequest]) -> _Missing:
        """Return what has to be evicted.

        Raises:
            OutOfMemoryError, OverloadedError: that could not be enough.
        """
        wanted = sum(blocks * whole_units(size_bytes) for blocks, size_bytes in space_requests)
        missing = self._over_bound(tenant, wanted)
        self.check_share(tenant, wanted)
        if missing > 0:
            return _Missing(missing, tenant)
        missing = self._unfitting(space_requests)
        if missing > 0:
            self._grow(self.arena.size_bytes + missing)
            missing = self._unfitting(space_requests)
        if not self._may_fit(wanted):
            raise self._short(tenant, wanted)
        return _Missing(missing, None)

    def _unfitting(self, space_requests: Sequence[SpaceRequest]) -> int:
        """Return the bytes of those of these blocks that the arena's holes do not hold, as if each size came alone."""
        lacking = [
            (blocks - self.arena.fitting(size_bytes)) * whole_units(size_bytes) for blocks, size_bytes in space_requests
        ]
        wanted = sum(blocks * whole_units(size_bytes) for blocks, size_bytes in space_requests)
        return max(0, wanted - self.arena.free_bytes, *lacking)

    def _over_bound(self, tenant: int, wanted: int) -> int:
        """Return how many bytes of a tenant's blocks have to go before it may have so many more; 0 or less: none.

        Raises:
            OutOfMemoryError: the tier can never hold them, or the tenant may never have them.
            OverloadedError: it has not so many that may go, or the memory rests.
        """
        if self.rests:
            raise OverloadedError("the daemon before this one may still write into the host tier").after(AGAIN_MS)
        account = self.index.accounts[tenant]
        most = min(account.most_bytes, self.shares.most(tenant, self.arena.max_bytes, {}))
        if wanted > most:
            raise OutOfMemoryError(
                f"{wanted} bytes are needed in the host tier, which has {self.arena.max_bytes}; {whose(tenant)} may "
                f"have {most} for one request",
                remedy=LARGER_TIER,
            )
        missing = account.taken_bytes + wanted - account.most_bytes
        if missing > account.evictable_bytes:
            why = f"{whose(tenant)} has {account.taken_bytes} of its {account.most_bytes} bytes in use"
            raise self._full(tenant, wanted, why)
        return missing

    def check_share(self, tenant: int, more_bytes: int) -> None:
        """Check that a tenant may have so much more that nobody evicts: snapshots, pinned blocks, what is written.

        Raises:
            OverloadedError: with that it would have more than its share of the tier.
        """
        pinned = {user: one.taken_bytes - one.evictable_bytes for user, one in self.index.accounts.items()}
        its = pinned.get(tenant, 0)
        size_bytes = self.arena.size_bytes if self._too_little else self.arena.max_bytes
        most = self.shares.most(tenant, size_bytes, pinned)
        if its + more_bytes > most and self._may_fit(more_bytes):  # else that is what is said
            raise self._full(tenant, more_bytes, f"{whose(tenant)} may have {most} bytes that stay, and has {its}")

    def _may_fit(self, wanted: int) -> bool:
        """Return whether all that may go would be enough."""
        return self.arena.free_bytes + self.index.accounts.evictable_bytes >= wanted

    def _evict_for(self, tenant: int, size_bytes: int, wanted: int) -> None:
        """Evict until the blocks fit; evict nothing where that could not be enough."""
        if self._may_fit(wanted):
            victims = self.index.host_victims()
            missing = wanted - self.arena.fitting(size_bytes) * whole_units(size_bytes)
            while self._evict(victims, missing):
                missing = wanted - self.arena.fitting(size_bytes) * whole_units(size_bytes)
                if missing <= 0:
                    return
        raise self._short(tenant, wanted)

    def _short(self, tenant: int, wanted: int) -> OverloadedError:
        why = f"{self.arena.free_bytes} of {self.arena.size_bytes} bytes are free"
        if self._too_little:
            why += f" and it cannot grow to its {self.arena.max_bytes} ({self._too_little})"
        return self._full(tenant, wanted, why)

    def _evict(self, victims: Iterator[CachedBlock], size_bytes: int, most: int | None = None) -> bool:
        """Evict the next victims, at most so many, until ``size_bytes`` are freed; return whether there was one."""
        freed: list[Freed] = []
        while size_bytes > 0 and len(freed) != most and (block := next(victims, None)) is not None:
            size_bytes -= block.size_bytes
            self._counters.add("tiers.host.evicted_blocks")
            if not block.on_disk and not block.in_remote:
                self._counters.add("tiers.host.lost_blocks")
            freed.append(self.index.drop_host(block))
            entered_s = self._entered_s.pop(block, None)
            if entered_s is not None:
                self._counters.observe("tiers.host.residence", self._clock() - entered_s)
        self.free_all(freed)
        return bool(freed)

    def _full(self, tenant: int, wanted: int, why: str) -> OverloadedError:
        """Name what is the tenant's own and sums of what is others': see ``may_see_all``."""
        self._counters.add("tiers.host.busy")
        shown = None if may_see_all(tenant) else tenant
        pins = self.index.pinned_by(shown)
        pinned = {f"by {holder_name(holder)}": size for holder, size in pins.items()}
        pinned["of other tenants"] = sum(self.index.pinned_by().values()) - sum(pins.values())
        charges = {user: one.charged_bytes for user, one in self.index.accounts.items()}
        charged = {f"of {whose(user)}": size for user, size in charges.items() if shown in {None, user}}
        charged["of other tenants"] = sum(charges.values()) - sum(charged.values())
        return OverloadedError(
            f"the host tier is full: {wanted} bytes are needed, {why}; snapshots and running operations use: "
            f"{_largest(charged)}; cached blocks are pinned: {_largest(pinned)}"
        ).after(RETRY_LATER_MS if self._too_little else AGAIN_MS)


class Demotions:
    """Blocks of the host tier that wait to be copied to a lower tier: in order, each once, pinned meanwhile."""

    def __init__(self, host: HostTier, tier: Tier, copy: Callable[[CachedBlock], Awaitable[None]]) -> None:
        """Have ``copy`` called for each block that still has to go down, by ``run``."""
        self._host = host
        self._tier = tier
        self._copy = copy
        self._waiting: dict[CachedBlock, None] = {}
        self.copying: tuple[CachedBlock, ...] = ()
        """The block that is being copied, and pinned."""
        self._wanted = asyncio.Event()

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiting)

    def add(self, block: CachedBlock) -> bool:
        """Queue a block that the tier does not have; False where too many wait."""
        if self._tier in block.tiers:
            return True
        if len(self._waiting) >= MAX_DEMOTIONS:
            return False
        self._waiting[block] = None
        self._wanted.set()
        return True

    async def run(self) -> None:
        """Copy what is queued, until cancelled."""
        while True:
            await self._wanted.wait()
            while self._waiting:
                block = next(iter(self._waiting))
                del self._waiting[block]
                if block.state is not BlockState.READY or not block.in_host or self._tier in block.tiers:
                    continue
                self._host.index.pin([block], DEMOTION)
                self.copying = (block,)
                try:
                    await self._copy(block)
                except Exception as cause:  # a bug with one block must not be the end of the tier
                    log.exception("copying a cached block to a lower tier failed", tier=self._tier, cause=str(cause))
                finally:
                    self.copying = ()
                    self._host.free_all(self._host.index.unpin([block], DEMOTION))
            self._wanted.clear()


def _log_populate_failure(done: Future[None]) -> None:
    if not done.cancelled() and done.exception() is not None:
        log.warning("the host tier's memory was not populated ahead of its use", cause=str(done.exception()))


def _largest(sizes: dict[str, int]) -> str:
    shown = sorted(sizes.items(), key=lambda one: -one[1])[:HOLDERS_SHOWN]
    return ", ".join(f"{size} {whose}" for whose, size in shown if size) or "nothing"


def holder_name(holder: int) -> str:
    """Return a readable name for a holder of pins."""
    if holder > 0:
        return f"instance {holder}"
    return {DEMOTION: "demotion to a lower tier"}.get(holder, "an operator (kvferry cache)")

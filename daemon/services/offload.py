"""OFFLOAD, RESTORE and the requests about snapshots: pages are copied to the host tier, and back into any pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvferry.daemon.control.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.services.event_rings import EventRings
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.tiers.copier import BlockJob, BlockSegment
from kvferry.daemon.tiers.host_tier import HostTier, SpaceRequest
from kvferry.daemon.tiers.operations import Operation, Operations
from kvferry.daemon.tiers.snapshots import (
    Snapshot,
    SnapshotRegistry,
    SnapshotSegment,
    check_layout,
    hold_pages,
    ids_for,
    new_segments,
)
from kvferry.pools.allocator import PageAllocator
from kvferry.pools.planning.manifest import space_of
from kvferry.pools.planning.page_ids import check_distinct
from kvferry.pools.planning.page_ranges import PageRange, lists_with_pages, page_ranges
from kvferry.pools.pool import Pool, check_models
from kvferry.pools.tiers.blocks import BlockPages
from kvferry.pools.tiers.tier_record import FoundSnapshot
from kvferry.protocol.base import PageList
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    CancelledError,
    EmptyPagesError,
    InternalError,
    InvalidFieldError,
    KvferryError,
    NotOwnerError,
    PoolFullError,
    UnknownPoolError,
)
from kvferry.protocol.events import TierDone
from kvferry.protocol.tier_messages import (
    DropSnapshot,
    Offload,
    Offloading,
    OperationStarted,
    Restore,
    SnapshotDropped,
    SnapshotReport,
)


class _PageQueue(NamedTuple):
    """Restores that wait for pages of a pool, in the order of their requests."""

    turn: asyncio.Lock
    freed: asyncio.Event


class OffloadService:
    """Answers the requests about snapshots.

    Attributes:
        snapshots: every snapshot of the daemon.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        pools: PoolRegistry,
        rings: EventRings,
        host: HostTier,
        operations: Operations,
        *,
        grace_s: float,
    ) -> None:
        self.snapshots = SnapshotRegistry()
        self._pools = pools
        self._host = host
        self._operations = operations
        self._grace_s = grace_s
        self._loop = asyncio.get_running_loop()
        self._queues: dict[Pool, _PageQueue] = {}
        for kind, handler in (
            ("OFFLOAD", rings.after(self._offload)),
            ("RESTORE", rings.after(self._restore)),
            ("DROP_SNAPSHOT", self._drop),
            ("SNAPSHOTS", self._list),
        ):
            dispatcher.handle(kind, handler)

    def adopt(self, found: Sequence[FoundSnapshot], owners: Collection[tuple[int, int]]) -> None:
        """Go on with snapshots of the daemon before; ``owners``: each user and instance that there is."""
        for one in found:
            its = (one.head.tenant, one.head.owner)
            snapshot = self.snapshots.adopt(one, one.head.owner if its in owners else None)
            if snapshot.owner_id is None:
                self._keep_for_a_while(snapshot)

    def instance_lost(self, owner_id: int) -> None:
        """Keep an instance's snapshots for a while: another instance of the same user may restore them."""
        for snapshot in [one for one in self.snapshots if one.owner_id == owner_id]:
            snapshot.owner_id = None
            self._keep_for_a_while(snapshot)

    def _keep_for_a_while(self, snapshot: Snapshot) -> None:
        self._loop.call_later(self._grace_s, self._drop_orphan, snapshot)

    def new_snapshot(self, call: Call, pool: Pool, lists: Sequence[PageRange]) -> Snapshot:
        """Return a new snapshot with memory for the pages of these lists.

        Raises:
            EmptyPagesError: no list has a page.
            OutOfMemoryError, OverloadedError, TierOffError: the host tier is full, busy or off.
        """
        snapshot = self._without_memory(call, pool, lists)
        self._take_memory(snapshot)
        self.snapshots.add(snapshot)
        return snapshot

    def _without_memory(self, call: Call, pool: Pool, lists: Sequence[PageRange]) -> Snapshot:
        if not lists:
            raise EmptyPagesError("no list names a page", field="lists")
        self.snapshots.check(pool.tenant)
        self._host.region  # noqa: B018  raises TierOffError
        return Snapshot(pool, call.session.owner_id, new_segments(pool, lists))

    def _take_memory(self, snapshot: Snapshot) -> None:
        """Take memory for a snapshot that has none: all that it needs, or none."""
        taken: list[SnapshotSegment] = []
        largest_first = sorted(snapshot.segments, key=lambda one: -one.layout.block_bytes)  # while the holes are large
        try:
            for segment in largest_first:
                segment.offsets = self._host.reserve(snapshot.tenant, segment.count, segment.layout.block_bytes)
                taken.append(segment)
        except KvferryError:
            for segment in taken:
                self._host.release(snapshot.tenant, segment.offsets, segment.layout.block_bytes)
                segment.offsets = segment.offsets[:0]
            raise

    def drop(self, snapshot: Snapshot) -> bool:
        """Drop a snapshot; return whether its memory is freed later, because an operation reads or writes it."""
        snapshot.dropped = True
        self._host.drop_snapshot(snapshot)
        if snapshot.readers or snapshot.state != "ready":
            return True
        self._free(snapshot)
        self.snapshots.remove(snapshot)
        return False

    async def fill(self, operation: Operation, snapshot: Snapshot, pool: Pool, ids: Sequence[PageIds]) -> TierDone:
        """Copy pages of a pool into a snapshot, inside of ``being_written``."""
        segments = _block_segments(snapshot, pool, ids)
        job = BlockJob("offload", segments, self._host.region, checksums=self._host.checksums)
        await self._operations.copy(operation, job)
        for segment, digests in zip(snapshot.segments, job.digests or [None] * len(snapshot.segments), strict=True):
            segment.digests = digests
        return _copied(operation, snapshot)

    @contextlib.contextmanager
    def being_written(self, snapshot: Snapshot) -> Iterator[None]:
        """Have a snapshot ready once the block is left, or removed with what is raised in it."""
        try:
            yield
        except BaseException as cause:
            error = cause if isinstance(cause, KvferryError) else InternalError(f"the offload failed: {cause!r}")
            self.failed(snapshot, error)
            raise
        snapshot.settle()
        if snapshot.dropped:
            self.drop(snapshot)
        else:
            self._host.record_snapshot(snapshot)

    def failed(self, snapshot: Snapshot, error: KvferryError) -> None:
        """Remove a snapshot that will never be ready."""
        snapshot.settle(error)
        self.drop(snapshot)

    # -- OFFLOAD

    def _offload(self, call: Call) -> Answer:
        body = expect(call, Offload)
        pool = self._pools.named_by(call.session, body.pool)
        if body.release and pool.registered_by is not None:
            raise InvalidFieldError(
                f"pool {pool.name!r} is registered: its engine numbers its pages itself", field="release"
            )
        lists = lists_with_pages(page_ranges(body.lists, call.ids, pool.manifest, may_end_inside=True))
        for one in lists:
            if body.release:
                check_distinct(one.ids, one.field)
        operation = self._operations.of_request(call, "offload", pool.name, sum(len(one.ids) for one in lists))
        with contextlib.ExitStack() as holds:
            hold_pages(holds.enter_context(operation.pages), pool, call.session.owner_id, lists)
            snapshot = self._without_memory(call, pool, lists)
            space_requests = [SpaceRequest(one.count, one.layout.block_bytes) for one in snapshot.segments]
            steps = self._host.making_room(pool.tenant, space_requests)
            waits = next(steps, self) is not self
            if not waits:
                self._take_memory(snapshot)
            self.snapshots.add(snapshot)
            holds.enter_context(self.being_written(snapshot))
            operation.done = msgspec.structs.replace(operation.done, snapshot=snapshot.name)
            ids = [one.ids for one in lists]
            work = self._copy_out(operation, snapshot, pool, ids, steps if waits else None, release=body.release)
            self._operations.begin(operation, holds, work)
        return Answer(Offloading(operation=operation.number, snapshot=snapshot.name))

    async def _copy_out(
        self,
        operation: Operation,
        snapshot: Snapshot,
        pool: Pool,
        ids: Sequence[PageIds],
        steps: Iterator[None] | None,
        *,
        release: bool,
    ) -> TierDone:
        """Fill a snapshot, once ``steps`` have made room for it; ``release``: and free the pages."""
        if steps is not None:
            operation.waits_for = "room in the host tier"
            await self._host.make_room(steps)
            self._take_memory(snapshot)
        done = await self.fill(operation, snapshot, pool, ids)
        if release:
            operation.pages.give_back(operation.session.owner_id)
        return done

    # -- RESTORE

    def _restore(self, call: Call) -> Answer:
        body = expect(call, Restore)
        pool = self._pools.named_by(call.session, body.pool)
        snapshot = self.snapshots.get(call.session.tenant, body.snapshot)
        check_layout(snapshot, pool.manifest, pool.name)
        check_models(snapshot.model, pool.model, f"the snapshot, of pool {snapshot.pool!r},", f"pool {pool.name!r}")
        operation = self._operations.of_request(call, "restore", pool.name, snapshot.pages)
        operation.done = msgspec.structs.replace(operation.done, snapshot=snapshot.name)
        with contextlib.ExitStack() as holds:
            ids: list[PageIds] = []
            holds.enter_context(self._being_read(snapshot, drop=body.drop))
            if body.allocate:
                _check_allocatable(body, pool, snapshot)
                holds.enter_context(_freed_unless_done(pool, call.session.owner_id, snapshot.segments, ids))
            else:
                lists = lists_with_pages(page_ranges(body.lists, call.ids, pool.manifest, may_end_inside=True))
                ids = ids_for(snapshot, lists)
                hold_pages(holds.enter_context(operation.pages), pool, call.session.owner_id, lists)
            work = self._copy_back(operation, snapshot, pool, ids, allocate=body.allocate)
            self._operations.begin(operation, holds, work)
        return Answer(OperationStarted(operation=operation.number))

    @contextlib.contextmanager
    def _being_read(self, snapshot: Snapshot, *, drop: bool) -> Iterator[None]:
        """Keep a snapshot while it is read; ``drop``: drop it once it was."""
        snapshot.readers += 1
        ends = False
        try:
            yield
            ends = drop
        finally:
            snapshot.readers -= 1
            if ends or snapshot.dropped:
                self.drop(snapshot)

    async def _copy_back(
        self, operation: Operation, snapshot: Snapshot, pool: Pool, ids: list[PageIds], *, allocate: bool
    ) -> TierDone:
        """Copy a snapshot into pages; ``allocate``: into those that it takes, and appends to ``ids``."""
        if not snapshot.settled.is_set():
            operation.waits_for = "the snapshot to be written"
            await snapshot.settled.wait()
            if snapshot.error is not None:
                raise snapshot.error
            self._check_there(pool)
        if allocate:
            await self._take_pages(operation, pool, snapshot, ids)
        segments = _block_segments(snapshot, pool, ids)
        digests = [segment.digests for segment in snapshot.segments if segment.digests is not None]
        known = digests if len(digests) == len(segments) else None
        await self._operations.copy(operation, BlockJob("restore", segments, self._host.region, digests=known))
        done = _copied(operation, snapshot)
        if not allocate:
            return done
        if operation.session.ended:  # nobody would know of the pages
            raise CancelledError("the session ended")
        operation.ids = tuple(ids)
        heads = zip(snapshot.segments, ids, strict=True)
        lists = tuple(PageList(component=segment.component, pages=len(its)) for segment, its in heads)
        return msgspec.structs.replace(done, lists=lists)

    async def _take_pages(self, operation: Operation, pool: Pool, snapshot: Snapshot, ids: list[PageIds]) -> None:
        """Allocate all pages of a restore, once there are enough, in the order of the requests for each pool."""
        queue = self._queues.setdefault(pool, _PageQueue(asyncio.Lock(), asyncio.Event()))
        operation.waits_for = f"{snapshot.pages} free pages of pool {pool.name!r}"
        async with queue.turn:
            self._check_there(pool)
            while not _allocate(operation, pool, snapshot, ids):
                queue.freed.clear()
                for allocator in pool.allocators.values():
                    allocator.when_freed(queue.freed.set)
                await queue.freed.wait()
                self._check_there(pool)

    def _check_there(self, pool: Pool) -> None:
        if not any(one is pool for one in self._pools):
            raise UnknownPoolError(f"pool {pool.name!r} was deleted", field="pool")

    # -- the rest

    def pool_removed(self, pool: Pool) -> None:
        """End the RESTOREs that wait for pages of a pool."""
        queue = self._queues.pop(pool, None)
        if queue is not None:
            queue.freed.set()  # the first one sees that it is gone, and so does each one after it

    def _drop(self, call: Call) -> Answer:
        snapshot = self.snapshots.get(call.session.tenant, expect(call, DropSnapshot).snapshot)
        return Answer(SnapshotDropped(snapshot=snapshot.name, deferred=self.drop(snapshot)))

    def _list(self, call: Call) -> Answer:
        mine = [one for one in self.snapshots if one.tenant == call.session.tenant and not one.dropped]
        return Answer(SnapshotReport(snapshots=tuple(one.status() for one in mine)))

    def _drop_orphan(self, snapshot: Snapshot) -> None:
        if snapshot.owner_id is None and not snapshot.dropped:
            self.drop(snapshot)

    def _free(self, snapshot: Snapshot) -> None:
        for segment in snapshot.segments:
            self._host.release(snapshot.tenant, segment.offsets, segment.layout.block_bytes)
        snapshot.segments = []


def _check_allocatable(body: Restore, pool: Pool, snapshot: Snapshot) -> None:
    """Check that the pool, if it were empty, had enough pages for the snapshot.

    Raises:
        InvalidFieldError: the request names pages too, or the pool is registered.
        PoolFullError: the pool has fewer pages in total.
    """
    if body.lists:
        raise InvalidFieldError("allocate=true allocates the pages: give no lists", field="lists")
    if pool.registered_by is not None:
        raise InvalidFieldError(
            f"pool {pool.name!r} is registered: its engine numbers its pages itself", field="allocate"
        )
    wanted: Counter[str] = Counter()
    for segment in snapshot.segments:
        space = space_of(pool.manifest, segment.component)
        wanted[space] += segment.count
        capacity = pool.space(space).capacity
        if wanted[space] > capacity:
            raise PoolFullError(f"{wanted[space]} pages of {space!r}; the pool has {capacity}", field="pool")


def _allocate(operation: Operation, pool: Pool, snapshot: Snapshot, ids: list[PageIds]) -> bool:
    """Allocate all pages that a restore needs, or none; return whether it has them."""
    spaces = [pool.space(space_of(pool.manifest, segment.component)) for segment in snapshot.segments]
    wanted: Counter[PageAllocator] = Counter()
    for space, segment in zip(spaces, snapshot.segments, strict=True):
        wanted[space] += segment.count
    if any(space.free_count < count for space, count in wanted.items()):
        return False
    owner = operation.session.owner_id
    for space, segment in zip(spaces, snapshot.segments, strict=True):
        ids.append(space.allocate(owner, segment.count))  # at once: what raises later has its end give them back
        operation.pages.add(space, owner, ids[-1], "pages")
    return True


@contextlib.contextmanager
def _freed_unless_done(
    pool: Pool, owner: int, segments: Sequence[SnapshotSegment], ids: Sequence[PageIds]
) -> Iterator[None]:
    """Free the pages that a restore has allocated where it fails: nobody is told of them."""
    try:
        yield
    except BaseException:
        for segment, its in zip(segments, ids, strict=False):
            with contextlib.suppress(NotOwnerError):  # an instance that has ended owns none any more
                pool.allocator_of(segment.component).free(owner, its)
        raise


def _block_segments(snapshot: Snapshot, pool: Pool, ids: Sequence[PageIds]) -> list[BlockSegment]:
    """Return the copies between a snapshot's blocks and pages of a pool, whose entries may be placed differently."""
    return [
        BlockSegment(pool.region, BlockPages(pool.block_layout(segment.layout.space), its, segment.offsets))
        for segment, its in zip(snapshot.segments, ids, strict=True)
    ]


def _copied(operation: Operation, snapshot: Snapshot) -> TierDone:
    moved = sum(segment.count * segment.layout.content_bytes for segment in snapshot.segments)
    return msgspec.structs.replace(operation.done, copied_pages=snapshot.pages, moved_bytes=moved)

"""OFFLOAD, RESTORE and the requests about snapshots: pages are copied to the host tier, and back into any pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from kvferry.daemon.control.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.services.event_rings import EventRings
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.tiers.copier import BlockJob, BlockSegment
from kvferry.daemon.tiers.host_tier import HostTier, SpaceRequest
from kvferry.daemon.tiers.operations import Ending, Holdings, Operation, Operations
from kvferry.daemon.tiers.snapshots import (
    PageHold,
    Snapshot,
    SnapshotRegistry,
    SnapshotSegment,
    check_layout,
    hold_pages,
    ids_for,
    new_segments,
)
from kvferry.daemon.tiers.space_waiter import SpaceWaiter
from kvferry.pools.allocator import PageAllocator
from kvferry.pools.planning.manifest import space_of
from kvferry.pools.planning.page_ids import check_distinct
from kvferry.pools.planning.page_ranges import PageRange, lists_with_pages, page_ranges
from kvferry.pools.pool import Pool, check_models
from kvferry.pools.tiers.blocks import BlockPages
from kvferry.protocol.base import PageList
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
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


class _Offloading:
    """An OFFLOAD in progress: the pages that it reads, and the snapshot that they fill once that has memory."""

    def __init__(self, pool: Pool, snapshot: Snapshot, ids: Sequence[PageIds], held: PageHold) -> None:
        self.pool = pool
        self.snapshot = snapshot
        self.ids = ids
        self.held = held
        self.job: BlockJob | None = None


class _Restoring:
    """A RESTORE in progress: the snapshot it reads, and the pages it writes once it has them."""

    def __init__(self, call: Call, pool: Pool, snapshot: Snapshot) -> None:
        self.call = call
        self.body = expect(call, Restore)
        self.pool = pool
        self.snapshot = snapshot
        self.ids: list[PageIds] = []
        self.hold = PageHold(write=True)
        self.reads = False


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
        space_waiter: SpaceWaiter,
        *,
        grace_s: float,
    ) -> None:
        self._space_waiter = space_waiter
        self.snapshots = SnapshotRegistry()
        self._pools = pools
        self._host = host
        self._operations = operations
        self._grace_s = grace_s
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Operation, _Restoring]] = deque()
        self._looking = False
        for kind, handler in (
            ("OFFLOAD", rings.after(self._offload)),
            ("RESTORE", rings.after(self._restore)),
            ("DROP_SNAPSHOT", self._drop),
            ("SNAPSHOTS", self._list),
        ):
            dispatcher.handle(kind, handler)

    def instance_lost(self, owner_id: int) -> None:
        """Keep an instance's snapshots for a while: another instance of the same user may restore them."""
        for snapshot in [one for one in self.snapshots if one.owner_id == owner_id]:
            snapshot.owner_id = None
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
        if snapshot.readers or snapshot.state != "ready":
            return True
        self._free(snapshot)
        self.snapshots.remove(snapshot)
        return False

    def filling(self, snapshot: Snapshot, pool: Pool, ids: Sequence[PageIds]) -> BlockJob:
        """Return a job that copies pages of a pool into a snapshot; call ``filled`` when it has ended."""
        segments = _block_segments(snapshot, pool, ids)
        return BlockJob("offload", segments, self._host.region, checksums=self._host.checksums)

    def filled(self, snapshot: Snapshot, job: BlockJob | None, error: KvferryError | None) -> None:
        """Mark a snapshot as ready when its job has ended, or remove it on ``error``."""
        if error is None and job is not None:
            for segment, digests in zip(snapshot.segments, job.digests or [None] * len(snapshot.segments), strict=True):
                segment.digests = digests
        snapshot.settle(error)
        if error is not None or snapshot.dropped:
            snapshot.state = "ready"
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
        self._operations.check(call.session)
        held = hold_pages(pool, call.session.owner_id, lists, write=False)
        try:
            snapshot = self._without_memory(call, pool, lists)
            space_requests = [SpaceRequest(one.count, one.layout.block_bytes) for one in snapshot.segments]
            steps = self._host.making_room(pool.tenant, space_requests)
            waits = next(steps, self) is not self
            if not waits:
                self._take_memory(snapshot)
            self.snapshots.add(snapshot)
        except BaseException:
            held.release()
            raise
        offloading = _Offloading(pool, snapshot, [one.ids for one in lists], held)
        try:
            operation = self._begin_offload(call, body, offloading)
        except Exception:
            held.release()
            self.filled(snapshot, None, InternalError("the offload could not begin"))
            raise
        if waits:
            self._space_waiter.make(operation, steps, lambda: self._copy_out(operation, offloading, takes_memory=True))
        else:
            with self._operations.guarded(operation):
                self._copy_out(operation, offloading, takes_memory=False)
        return Answer(Offloading(operation=operation.number, snapshot=snapshot.name))

    def _begin_offload(self, call: Call, body: Offload, offloading: _Offloading) -> Operation:
        """Begin the operation of an OFFLOAD."""
        pool, snapshot, held = offloading.pool, offloading.snapshot, offloading.held

        def finish(operation: Operation, error: KvferryError | None) -> Ending:
            if error is None and body.release:
                held.give_back(operation.session.owner_id)
            held.release()
            done = TierDone(operation=operation.number, kind="offload", snapshot=snapshot.name)
            if error is None:
                done = _copied(done, snapshot)
            self.filled(snapshot, offloading.job, error)
            return Ending(done)

        return self._operations.begin(call, "offload", pool.name, snapshot.pages, finish, Holdings(pages=held))

    def _copy_out(self, operation: Operation, offloading: _Offloading, *, takes_memory: bool) -> None:
        """Start the job that fills the snapshot."""
        if takes_memory:
            self._take_memory(offloading.snapshot)
        offloading.job = self.filling(offloading.snapshot, offloading.pool, offloading.ids)
        self._operations.start(operation, offloading.job)

    # -- RESTORE

    def _restore(self, call: Call) -> Answer:
        body = expect(call, Restore)
        pool = self._pools.named_by(call.session, body.pool)
        snapshot = self.snapshots.get(call.session.tenant, body.snapshot)
        check_layout(snapshot, pool.manifest, pool.name)
        check_models(snapshot.model, pool.model, f"the snapshot, of pool {snapshot.pool!r},", f"pool {pool.name!r}")
        restoring = _Restoring(call, pool, snapshot)
        self._operations.check(call.session)
        if body.allocate:
            self._check_allocatable(restoring)
        else:
            lists = lists_with_pages(page_ranges(body.lists, call.ids, pool.manifest, may_end_inside=True))
            restoring.ids = ids_for(snapshot, lists)
            restoring.hold = hold_pages(pool, call.session.owner_id, lists, write=True)
        try:
            operation = self._operations.begin(
                call,
                "restore",
                pool.name,
                snapshot.pages,
                lambda operation, error: self._restored(operation, restoring, error),
                Holdings(pages=restoring.hold),
            )
        except Exception:
            restoring.hold.release()
            raise
        with self._operations.guarded(operation):
            restoring.reads = True
            snapshot.readers += 1
            if snapshot.state == "ready":
                self._take_pages(operation, restoring)
            else:
                operation.waits_for = "the snapshot to be written"
                snapshot.waiting.append(lambda error: self._snapshot_settled(operation, restoring, error))
        return Answer(OperationStarted(operation=operation.number))

    def _snapshot_settled(self, operation: Operation, restoring: _Restoring, error: KvferryError | None) -> None:
        if error is not None:
            self._operations.give_up(operation, error)
        elif not any(one is restoring.pool for one in self._pools):
            self._operations.give_up(operation, _deleted(restoring.pool))
        elif operation.stopped is None:
            with self._operations.guarded(operation):
                self._take_pages(operation, restoring)

    def _check_allocatable(self, restoring: _Restoring) -> None:
        """Check that the pool, if it were empty, had enough pages for the snapshot.

        Raises:
            InvalidFieldError: the request names pages too, or the pool is registered.
            PoolFullError: the pool has fewer pages in total.
        """
        pool, snapshot = restoring.pool, restoring.snapshot
        if restoring.body.lists:
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

    def _take_pages(self, operation: Operation, restoring: _Restoring) -> None:
        """Allocate pages and start the copy, or queue behind the restores that wait for pages already."""
        if not restoring.body.allocate:
            self._copy_back(operation, restoring)
            return
        operation.waits_for = f"{restoring.snapshot.pages} free pages of pool {restoring.pool.name!r}"
        self._waiting.append((operation, restoring))
        self._look_for_pages()

    def _look_for_pages(self) -> None:
        """Allocate pages for the waiting restores, in the order of their requests for each pool."""
        self._looking = False
        full: set[Pool] = set()
        for _ in range(len(self._waiting)):
            operation, restoring = self._waiting.popleft()
            if operation.stopped is not None:
                continue
            with self._operations.guarded(operation):
                if restoring.pool in full or not self._allocate(restoring):
                    full.add(restoring.pool)
                    self._waiting.append((operation, restoring))
                    for allocator in restoring.pool.allocators.values():
                        allocator.when_freed(self._pages_freed)
                else:
                    self._copy_back(operation, restoring)

    def _pages_freed(self) -> None:
        if self._waiting and not self._looking:
            self._looking = True
            self._loop.call_soon(self._look_for_pages)

    def _allocate(self, restoring: _Restoring) -> bool:
        """Allocate all pages that a restore needs, or none; return whether it has them."""
        pool, segments = restoring.pool, restoring.snapshot.segments
        spaces = [pool.space(space_of(pool.manifest, segment.component)) for segment in segments]
        wanted: Counter[PageAllocator] = Counter()
        for space, segment in zip(spaces, segments, strict=True):
            wanted[space] += segment.count
        if any(space.free_count < count for space, count in wanted.items()):
            return False
        owner = restoring.call.session.owner_id
        for space, segment in zip(spaces, segments, strict=True):
            ids = space.allocate(owner, segment.count)
            restoring.ids.append(ids)  # at once: what raises later has its end give them back
            restoring.hold.add(space, owner, ids, "pages")
        return True

    def _copy_back(self, operation: Operation, restoring: _Restoring) -> None:
        snapshot, pool = restoring.snapshot, restoring.pool
        segments = _block_segments(snapshot, pool, restoring.ids)
        digests = [segment.digests for segment in snapshot.segments if segment.digests is not None]
        known = digests if len(digests) == len(segments) else None
        self._operations.start(operation, BlockJob("restore", segments, self._host.region, digests=known))

    def _restored(self, operation: Operation, restoring: _Restoring, error: KvferryError | None) -> Ending:
        snapshot, body = restoring.snapshot, restoring.body
        restoring.hold.release()
        done = TierDone(operation=operation.number, kind="restore", snapshot=snapshot.name)
        ids: tuple[PageIds, ...] = ()
        unheard = body.allocate and operation.session.ended  # nobody is told of the pages it allocated
        if error is None and not unheard:
            done = _copied(done, snapshot)
            if body.allocate:
                ids = tuple(restoring.ids)
                heads = zip(snapshot.segments, ids, strict=True)
                lists = tuple(PageList(component=segment.component, pages=len(its)) for segment, its in heads)
                done = msgspec.structs.replace(done, lists=lists)
        elif body.allocate:
            _free_quietly(restoring)
        snapshot.readers -= restoring.reads
        restoring.reads = False
        if (error is None and body.drop and not unheard) or snapshot.dropped:
            self.drop(snapshot)
        return Ending(done, ids)

    # -- the rest

    def pool_removed(self, pool: Pool) -> None:
        """End the RESTOREs that wait for pages of a pool."""
        for operation, restoring in list(self._waiting):
            if restoring.pool is pool:
                self._operations.give_up(operation, _deleted(pool))

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


def _deleted(pool: Pool) -> UnknownPoolError:
    return UnknownPoolError(f"pool {pool.name!r} was deleted", field="pool")


def _block_segments(snapshot: Snapshot, pool: Pool, ids: Sequence[PageIds]) -> list[BlockSegment]:
    """Return the copies between a snapshot's blocks and pages of a pool, whose entries may be placed differently."""
    return [
        BlockSegment(pool.region, BlockPages(pool.block_layout(segment.layout.space), its, segment.offsets))
        for segment, its in zip(snapshot.segments, ids, strict=True)
    ]


def _copied(done: TierDone, snapshot: Snapshot) -> TierDone:
    moved = sum(segment.count * segment.layout.content_bytes for segment in snapshot.segments)
    return msgspec.structs.replace(done, copied_pages=snapshot.pages, moved_bytes=moved)


def _free_quietly(restoring: _Restoring) -> None:
    """Free the pages that a restore allocated and nobody is told of; an instance that has ended owns none any more."""
    owner, pool = restoring.call.session.owner_id, restoring.pool
    for segment, ids in zip(restoring.snapshot.segments, restoring.ids, strict=False):
        with contextlib.suppress(NotOwnerError):
            pool.allocator_of(segment.component).free(owner, ids)

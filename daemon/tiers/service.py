"""Offload and restore: pages leave a pool for the host tier, and come back into others."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec

from kvferry.daemon.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.pool_service import PoolService
from kvferry.daemon.rooms.page_ranges import PageRange, lists_with_pages, page_ranges
from kvferry.daemon.tiers.copier import BlockJob, BlockPart
from kvferry.daemon.tiers.host_tier import HostTier
from kvferry.daemon.tiers.jobs import JobStarter
from kvferry.daemon.tiers.page_holds import hold_pages
from kvferry.daemon.tiers.snapshots import (
    Snapshot,
    SnapshotBook,
    SnapshotPart,
    check_layout,
    ids_for,
    new_parts,
    space_of,
)
from kvferry.daemon.tiers.works import Ending, Work, Works
from kvferry.pools.model_checks import check_models
from kvferry.pools.page_checks import check_distinct
from kvferry.pools.pool import Pool
from kvferry.pools.runs import PageIds
from kvferry.pools.tiers.arena import whole_grains
from kvferry.pools.tiers.blocks import BlockPages
from kvferry.protocol.base import PageList
from kvferry.protocol.errors import (
    EmptyPagesError,
    InvalidFieldError,
    KvferryError,
    NotOwnerError,
    PoolFullError,
    UnknownPoolError,
)
from kvferry.protocol.tier_messages import (
    DropSnapshot,
    Offload,
    Offloading,
    Restore,
    SnapshotDropped,
    SnapshotReport,
    TierDone,
    WorkStarted,
)


class _Restoring:
    """A RESTORE: what it reads, and the pages it writes, once it has them."""

    def __init__(self, call: Call, pool: Pool, snapshot: Snapshot) -> None:
        self.call = call
        self.body = expect(call, Restore)
        self.pool = pool
        self.snapshot = snapshot
        self.ids: list[PageIds] = []
        self.release: Callable[[], None] = lambda: None


class TierService:
    """Answers the requests about snapshots.

    Attributes:
        snapshots: all there are.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        pools: PoolService,
        host: HostTier,
        works: Works,
        jobs: JobStarter,
        *,
        grace_s: float,
    ) -> None:
        self.snapshots = SnapshotBook()
        self._pools = pools
        self._host = host
        self._works = works
        self._jobs = jobs
        self._grace_s = grace_s
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Work, _Restoring]] = deque()
        self._looking = False
        pools.on_deleted.append(self._pool_deleted)
        for kind, handler in (
            ("OFFLOAD", lambda call: pools.hold(call, expect(call, Offload).after, self._offload)),
            ("RESTORE", lambda call: pools.hold(call, expect(call, Restore).after, self._restore)),
            ("DROP_SNAPSHOT", self._drop),
            ("SNAPSHOTS", self._list),
        ):
            dispatcher.handle(kind, handler)

    def session_lost(self, session_id: int) -> None:
        """Keep what a session leaves behind for a while: another one of its user may restore it."""
        for snapshot in [one for one in self.snapshots if one.session_id == session_id]:
            snapshot.session_id = None
            self._loop.call_later(self._grace_s, self._drop_orphan, snapshot)

    def new_snapshot(self, call: Call, pool: Pool, lists: Sequence[PageRange]) -> Snapshot:
        """Return a snapshot of that many pages, with its memory.

        Raises:
            EmptyPagesError: no list has a page.
            OutOfMemoryError, OverloadedError, TierOffError: the host tier has no room.
        """
        if not lists:
            raise EmptyPagesError("no list names a page", field="lists")
        self.snapshots.check(pool.tenant)
        snapshot = Snapshot(pool, call.session.session_id, new_parts(pool, lists))
        reserved = []
        try:
            self._host.region  # noqa: B018  there may be no tier
            for part in snapshot.parts:
                part.offsets = self._host.reserve(pool.tenant, part.count, part.layout.block_bytes)
                self._host.index.accounts.charge(pool.tenant, _charge(part))
                reserved.append(part)
        except KvferryError:
            snapshot.parts = reserved
            self._free(snapshot)
            raise
        self.snapshots.add(snapshot)
        return snapshot

    def drop(self, snapshot: Snapshot) -> bool:
        """Give a snapshot up; return whether that waits for those who read or write it."""
        snapshot.dropped = True
        if snapshot.readers or snapshot.state != "ready":
            return True
        self._free(snapshot)
        self.snapshots.remove(snapshot)
        return False

    def filling(self, snapshot: Snapshot, pool: Pool, ids: Sequence[PageIds]) -> BlockJob:
        """Return a job that copies pages of a pool into a snapshot; ``filled`` has to follow when it is over."""
        parts = _block_parts(snapshot, pool, ids)
        return BlockJob("offload", parts, self._host.region, checksums=self._jobs.checksums)

    def start(self, work: Work, job: BlockJob) -> None:
        """Let a work's job run."""
        self._jobs.start(work, job)

    def filled(self, snapshot: Snapshot, job: BlockJob | None, error: KvferryError | None) -> None:
        """Take the end of ``filling``: the snapshot is ready, or gone."""
        if error is None and job is not None:
            for part, digests in zip(snapshot.parts, job.digests or [None] * len(snapshot.parts), strict=True):
                part.digests = digests
        snapshot.settle(error)
        if error is not None or snapshot.dropped:
            snapshot.state = "ready"
            self.drop(snapshot)

    # -- OFFLOAD

    def _offload(self, call: Call) -> Answer:
        body = expect(call, Offload)
        pool = self._pools.get(call.session.tenant, body.pool)
        if body.release and pool.lent_by is not None:
            raise InvalidFieldError(f"pool {pool.name!r} is lent: its engine numbers its pages itself", field="release")
        lists = lists_with_pages(page_ranges(body.lists, call.ids, pool.manifest, may_end_inside=True))
        for one in lists:
            if body.release:
                check_distinct(one.ids, one.field)
        self._works.check(call.session)
        held = hold_pages(pool, call.session.session_id, lists, write=False)
        try:
            snapshot = self.new_snapshot(call, pool, lists)
        except BaseException:
            held.release()
            raise
        job = self.filling(snapshot, pool, [one.ids for one in lists])

        def finish(work: Work, error: KvferryError | None) -> Ending:
            if error is None and body.release:
                held.give_back(work.session.session_id)
            held.release()
            done = TierDone(work=work.number, kind="offload", snapshot=snapshot.name)
            if error is None:
                done = _copied(done, snapshot)
            self.filled(snapshot, job, error)
            return Ending(done)

        work = self._works.begin(call, "offload", pool.name, snapshot.pages, finish)
        self.start(work, job)
        return Answer(Offloading(work=work.number, snapshot=snapshot.name))

    # -- RESTORE

    def _restore(self, call: Call) -> Answer:
        body = expect(call, Restore)
        pool = self._pools.get(call.session.tenant, body.pool)
        snapshot = self.snapshots.get(call.session.tenant, body.snapshot)
        check_layout(snapshot, pool.manifest, pool.name)
        if not body.any_model:
            check_models(snapshot.model, pool.model, f"the snapshot, of pool {snapshot.pool!r},", f"pool {pool.name!r}")
        restoring = _Restoring(call, pool, snapshot)
        self._works.check(call.session)
        if body.allocate:
            self._check_allocatable(restoring)
        else:
            lists = lists_with_pages(page_ranges(body.lists, call.ids, pool.manifest, may_end_inside=True))
            restoring.ids = ids_for(snapshot, lists)
            restoring.release = hold_pages(pool, call.session.session_id, lists, write=True).release
        work = self._works.begin(
            call, "restore", pool.name, snapshot.pages, lambda work, error: self._restored(work, restoring, error)
        )
        snapshot.readers += 1
        if snapshot.state == "ready":
            self._take_pages(work, restoring)
        else:
            work.waits_for = "the snapshot to be written"
            snapshot.waiting.append(lambda error: self._snapshot_settled(work, restoring, error))
        return Answer(WorkStarted(work=work.number))

    def _snapshot_settled(self, work: Work, restoring: _Restoring, error: KvferryError | None) -> None:
        if error is not None:
            self._works.stop(work, error)
        elif not any(one is restoring.pool for one in self._pools):
            self._works.stop(work, _deleted(restoring.pool))
        elif work.stopped is None:
            self._take_pages(work, restoring)

    def _check_allocatable(self, restoring: _Restoring) -> None:
        """Check that the pool could ever have the pages for the snapshot.

        Raises:
            InvalidFieldError: pages are named as well, or the pool is lent.
            PoolFullError: it has fewer pages in all.
        """
        pool, snapshot = restoring.pool, restoring.snapshot
        if restoring.body.lists:
            raise InvalidFieldError("allocate=true takes the pages itself: name none", field="lists")
        if pool.lent_by is not None:
            raise InvalidFieldError(
                f"pool {pool.name!r} is lent: its engine numbers its pages itself", field="allocate"
            )
        wanted: Counter[str] = Counter()
        for part in snapshot.parts:
            space = space_of(pool.manifest, part.component)
            wanted[space] += part.count
            capacity = pool.space(space).capacity
            if wanted[space] > capacity:
                raise PoolFullError(f"{wanted[space]} pages of {space!r}, the pool has {capacity}", field="pool")

    def _take_pages(self, work: Work, restoring: _Restoring) -> None:
        """Begin to copy, at once or after those that wait for pages already."""
        if not restoring.body.allocate:
            self._copy_back(work, restoring)
            return
        work.waits_for = f"{restoring.snapshot.pages} free pages of pool {restoring.pool.name!r}"
        self._waiting.append((work, restoring))
        self._look_for_pages()

    def _look_for_pages(self) -> None:
        """Give pages to those who wait, in their order for each pool."""
        self._looking = False
        full: set[Pool] = set()
        for _ in range(len(self._waiting)):
            work, restoring = self._waiting.popleft()
            if work.stopped is not None:
                continue
            if restoring.pool in full or not self._allocate(restoring):
                full.add(restoring.pool)
                self._waiting.append((work, restoring))
                for allocator in restoring.pool.allocators.values():
                    allocator.on_freed = self._pages_freed
            else:
                self._copy_back(work, restoring)

    def _pages_freed(self) -> None:
        if self._waiting and not self._looking:
            self._looking = True
            self._loop.call_soon(self._look_for_pages)

    def _allocate(self, restoring: _Restoring) -> bool:
        """Take all pages that a restore needs, or none."""
        pool, parts = restoring.pool, restoring.snapshot.parts
        spaces = [pool.space(space_of(pool.manifest, part.component)) for part in parts]
        wanted: dict[int, int] = {}
        for space, part in zip(spaces, parts, strict=True):
            wanted[id(space)] = wanted.get(id(space), 0) + part.count
        if any(space.free_count < wanted[id(space)] for space in spaces):
            return False
        owner = restoring.call.session.session_id
        restoring.ids = [space.allocate(owner, part.count) for space, part in zip(spaces, parts, strict=True)]
        for space, ids in zip(spaces, restoring.ids, strict=True):
            space.begin_write(owner, ids, "pages")

        def release() -> None:
            for space, ids in zip(spaces, restoring.ids, strict=True):
                space.end_write(ids)

        restoring.release = release
        return True

    def _copy_back(self, work: Work, restoring: _Restoring) -> None:
        snapshot, pool = restoring.snapshot, restoring.pool
        parts = _block_parts(snapshot, pool, restoring.ids)
        digests = [part.digests for part in snapshot.parts if part.digests is not None]
        known = digests if len(digests) == len(parts) else None
        self._jobs.start(work, BlockJob("restore", parts, self._host.region, digests=known))

    def _restored(self, work: Work, restoring: _Restoring, error: KvferryError | None) -> Ending:
        snapshot, body = restoring.snapshot, restoring.body
        restoring.release()
        done = TierDone(work=work.number, kind="restore", snapshot=snapshot.name)
        ids: tuple[PageIds, ...] = ()
        if error is None:
            done = _copied(done, snapshot)
            if body.allocate:
                ids = tuple(restoring.ids)
                heads = zip(snapshot.parts, ids, strict=True)
                lists = tuple(PageList(component=part.component, pages=len(its)) for part, its in heads)
                done = msgspec.structs.replace(done, lists=lists)
        elif body.allocate:
            _free_quietly(restoring)
        snapshot.readers -= 1
        if (error is None and body.drop) or snapshot.dropped:
            self.drop(snapshot)
        return Ending(done, ids)

    # -- the rest

    def _pool_deleted(self, pool: Pool) -> None:
        for work, restoring in list(self._waiting):
            if restoring.pool is pool:
                self._works.stop(work, _deleted(pool))

    def _drop(self, call: Call) -> Answer:
        snapshot = self.snapshots.get(call.session.tenant, expect(call, DropSnapshot).snapshot)
        return Answer(SnapshotDropped(snapshot=snapshot.name, deferred=self.drop(snapshot)))

    def _list(self, call: Call) -> Answer:
        mine = [one for one in self.snapshots if one.tenant == call.session.tenant and not one.dropped]
        return Answer(SnapshotReport(snapshots=tuple(one.status() for one in mine)))

    def _drop_orphan(self, snapshot: Snapshot) -> None:
        if snapshot.session_id is None and not snapshot.dropped:
            self.drop(snapshot)

    def _free(self, snapshot: Snapshot) -> None:
        for part in snapshot.parts:
            self._host.free(part.offsets, part.layout.block_bytes)
            self._host.index.accounts.discharge(snapshot.tenant, _charge(part))
        snapshot.parts = []


def _deleted(pool: Pool) -> UnknownPoolError:
    return UnknownPoolError(f"pool {pool.name!r} was deleted", field="pool")


def _charge(part: SnapshotPart) -> int:
    return part.count * whole_grains(part.layout.block_bytes)


def _block_parts(snapshot: Snapshot, pool: Pool, ids: Sequence[PageIds]) -> list[BlockPart]:
    """Return which pages of a pool, whose entries may lie elsewhere than the snapshot's, go with which blocks."""
    return [
        BlockPart(pool.region, BlockPages(pool.block_layout(part.layout.space), its, part.offsets))
        for part, its in zip(snapshot.parts, ids, strict=True)
    ]


def _copied(done: TierDone, snapshot: Snapshot) -> TierDone:
    moved = sum(part.count * part.layout.content_bytes for part in snapshot.parts)
    return msgspec.structs.replace(done, copied_pages=snapshot.pages, moved_bytes=moved)


def _free_quietly(restoring: _Restoring) -> None:
    """Free the pages of a restore that failed; a session that is gone has given them back by itself."""
    owner, pool = restoring.call.session.session_id, restoring.pool
    for part, ids in zip(restoring.snapshot.parts, restoring.ids, strict=False):
        with contextlib.suppress(NotOwnerError):
            pool.allocator_of(part.component).free(owner, ids)

"""Offload, restore and landings: what is held meanwhile, and what is left when they end early."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.daemon.control.dispatch import Call
from kvferry.daemon.services.receive_to_host import HostReceive
from kvferry.daemon.tiers import snapshots
from kvferry.daemon.tiers.snapshots import (
    PageHold,
    Snapshot,
    SnapshotRegistry,
    check_layout,
    hold_pages,
    ids_for,
    new_segments,
)
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.page_ranges import lists_with_pages, page_ranges
from kvferry.pools.planning.pairing import pair_entries
from kvferry.pools.pool import Pool
from kvferry.protocol import errors
from kvferry.protocol.base import PageList
from kvferry.protocol.events import Finished, Settled
from kvferry.protocol.manifests import DraftSpec, MambaSpec, PoolSpec
from kvferry.protocol.tier_messages import DropSnapshot, Offload, Offloading, SnapshotDropped, SnapshotReport, Snapshots
from kvferry.protocol.transfer_messages import Receive
from tests.kit.tiers import HYBRID, POOL, SPEC, UNIT, Engine, Harness, harness, new_pool, settle, until

pytestmark = pytest.mark.anyio
GRACE_S = 0.01
WITH_DRAFT = msgspec.structs.replace(SPEC, draft=DraftSpec(layers=1), optional_components=("draft",))
STATES = MambaSpec(state_layers=(0,), slots=3, conv_window=4, conv_channels=8, dtype="float32")


@pytest.fixture
async def tiers() -> AsyncIterator[Harness]:
    """Return services over a host tier of 32 blocks, and a pool of 15 pages for each of two users."""
    async with harness(snapshot_grace_s=GRACE_S, tenants=(1, 2)) as one:
        yield one


async def offloaded(tiers: Harness, engine: Engine, count: int, value: int = 7, **options: Any) -> str:  # noqa: ANN401
    """Return a snapshot of new pages full of a value."""
    ids = engine.allocate(count)
    engine.write(ids, value)
    made = engine.offload(ids, **options)
    await tiers.finish()
    assert engine.error(made.operation) is None
    return made.snapshot


def snapshots_of(engine: Engine) -> dict[str, str]:
    """Return the state of each snapshot of a user."""
    return {one.snapshot: one.state for one in engine.ask(Snapshots(), SnapshotReport).snapshots}


# -- offload


async def test_an_offload_that_fails_leaves_its_pages_and_ends_what_waits_for_it(
    tiers: Harness, engine: Engine
) -> None:
    made, into = engine.offload(engine.allocate(3), release=True), engine.allocate(3)
    restores = [engine.restore(made.snapshot, into), engine.restore(made.snapshot)]
    tiers.copier.end(tiers.copier.under_way[0], errors.DeadlineError("late"))
    await settle()
    assert [engine.error(one) for one in (made.operation, *restores)] == [errors.DeadlineError] * 3
    assert tiers.pool().allocator.pages_by_owner() == {engine.session.session_id: 6}
    assert snapshots_of(engine) == {}
    assert tiers.host.arena.used_bytes == tiers.pool().allocator.busy_count == 0


async def test_pages_that_two_lists_share_are_released_once_and_taken_twice(tiers: Harness, engine: Engine) -> None:
    await new_pool(tiers, "draft", WITH_DRAFT)
    await new_pool(tiers, "smaller", msgspec.structs.replace(WITH_DRAFT, tokens=20))
    ids = engine.allocate(4, "draft")
    lists = (PageList(pages=3), PageList(component="draft", pages=3))
    made = engine.ask(Offload(pool="draft", lists=lists, release=True), Offloading, ids[:3], ids[1:])
    await tiers.finish()
    assert tiers.pool("draft").allocator.idle
    with pytest.raises(errors.PoolFullError, match="6 pages of 'main'; the pool has 5"):
        engine.restore(made.snapshot, pool="smaller")


async def test_a_user_may_have_so_many_snapshots(
    tiers: Harness, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MAX_SNAPSHOTS", 2)
    ids = engine.allocate(3)
    first, _ = engine.offload(ids[:1]), engine.offload(ids[1:2])
    with pytest.raises(errors.OverloadedError, match="user 1 has 2 snapshots"):
        engine.offload(ids[2:])
    other = tiers.engine(uid=2)
    other.offload(other.allocate(1))
    await tiers.finish()
    engine.ask(DropSnapshot(snapshot=first.snapshot), SnapshotDropped)
    engine.offload(ids[2:])
    await tiers.finish()
    assert tiers.pool().allocator.busy_count == 0


# -- who may have it


async def test_another_users_snapshots_do_not_exist(tiers: Harness, engine: Engine) -> None:
    other = tiers.engine(uid=2)
    snapshot = await offloaded(tiers, engine, 2)
    assert snapshots_of(other) == {}
    with pytest.raises(errors.UnknownSnapshotError):
        other.restore(snapshot)
    with pytest.raises(errors.UnknownSnapshotError):
        other.ask(DropSnapshot(snapshot=snapshot), SnapshotDropped)
    assert snapshots_of(tiers.engine()) == {snapshot: "ready"}


async def test_what_a_session_leaves_is_kept_for_a_while(tiers: Harness, engine: Engine) -> None:
    other = tiers.engine()
    snapshot, dropped = [await offloaded(tiers, engine, 2) for _ in range(2)]
    tiers.lose(engine)
    other.ask(DropSnapshot(snapshot=dropped), SnapshotDropped)
    operation = other.restore(snapshot)
    await until(lambda: not snapshots_of(other))  # but for whoever reads it
    assert tiers.host.arena.used_bytes == 2 * UNIT
    await tiers.finish()
    assert other.error(operation) is None
    assert other.read(other.events[-1][1][0]) == [{7}, {7}]
    assert tiers.host.arena.used_bytes == 0


# -- restore


async def test_target_pages_are_written_by_nobody_else(tiers: Harness, engine: Engine) -> None:
    snapshot = await offloaded(tiers, engine, 2)
    ids = engine.allocate(2)
    operation = engine.restore(snapshot, ids)
    with pytest.raises(errors.PageBusyError):
        engine.offload(ids)
    engine.free(ids)  # deferred
    assert tiers.pool().allocator.busy_count == 2
    await tiers.finish()
    assert engine.error(operation) is None
    assert tiers.pool().allocator.pages_by_owner() == {engine.session.session_id: 2}


async def test_a_restore_that_fails_gives_its_pages_back_and_keeps_the_snapshot(tiers: Harness, engine: Engine) -> None:
    snapshot = await offloaded(tiers, engine, 3, release=True)
    operation = engine.restore(snapshot, drop=True)
    tiers.damage(tiers.copier.under_way[0].segments[0].pages.offsets[1])
    await tiers.finish()
    assert engine.error(operation) is errors.SnapshotDamagedError
    assert tiers.pool().idle
    assert snapshots_of(engine) == {snapshot: "ready"}


async def test_a_snapshot_can_be_dropped_while_it_is_written(tiers: Harness, engine: Engine) -> None:
    ids = engine.allocate(3)
    made = engine.offload(ids)
    back = engine.restore(made.snapshot)
    assert engine.ask(DropSnapshot(snapshot=made.snapshot), SnapshotDropped).deferred
    tiers.copier.finish(tiers.copier.under_way[0])
    await settle()
    done = engine.ended(made.operation)
    assert (done.copied_pages, done.moved_bytes, done.error) == (3, 3 * 192, None)
    await tiers.finish()
    assert engine.error(back) is None
    assert tiers.host.arena.used_bytes == 0


async def test_a_snapshot_that_is_dropped_while_it_is_read_is_not_left_to_the_next_daemon(
    tiers: Harness, engine: Engine
) -> None:
    made = engine.offload(engine.allocate(3))
    await tiers.finish()
    back = engine.restore(made.snapshot)
    tiers.check()
    assert engine.ask(DropSnapshot(snapshot=made.snapshot), SnapshotDropped).deferred
    tiers.check()
    await tiers.finish()
    assert engine.error(back) is None
    assert tiers.kept.is_empty


async def test_restores_get_pages_in_their_order(tiers: Harness, engine: Engine) -> None:
    other = tiers.engine()
    snapshot = await offloaded(tiers, engine, 6, release=True)
    small = await offloaded(tiers, engine, 2, release=True)
    taken = other.allocate(12)
    first, second = engine.restore(snapshot), engine.restore(small)
    assert not tiers.copier.under_way  # 3 are free, which the first one waits for as well
    other.free(taken[:3])
    await settle()
    assert len(tiers.copier.under_way) == 1
    await tiers.finish()
    assert engine.error(first) is None
    other.free(taken[3:5])
    await settle()
    await tiers.finish()
    assert engine.error(second) is None


# -- landings


def into(tiers: Harness, engine: Engine, *lists: PageList, pool: str = POOL) -> HostReceive:
    """Make room for what a transfer is to bring: four pages, or these lists."""
    body = Receive(pool=pool, request_id="0" * 32, lists=lists or (PageList(pages=4),), into="host")
    plan = tiers.host_receives.plan(body, tiers.pool(pool))
    return tiers.host_receives.make(Call(0, engine.session, body, (), 30.0), body, plan)


def ends(tiers: Harness, host_receive: HostReceive, error: errors.KvferryError | None = None) -> None:
    """Let a landing's transfer end as the book of transfers does."""
    about: Any = {"request_id": host_receive.request_id, "pool": POOL, "direction": "receive", "generation": 1}
    session_id = host_receive.session.session_id
    tiers.host_receives.on_event(session_id, Finished(**about, error=error.info() if error else None))
    tiers.host_receives.on_event(session_id, Settled(**about))


@pytest.mark.parametrize(("conv", "fits"), [((4, 8), True), ((8, 4), False)], ids=["as the pool", "another shape"])
async def test_what_lands_must_be_of_the_pools_shape(
    tiers: Harness, engine: Engine, conv: tuple[int, int], *, fits: bool
) -> None:
    theirs = manifest_of(msgspec.structs.replace(STATES, conv_window=conv[0], conv_channels=conv[1]))
    await new_pool(tiers, "states", STATES)
    component = tiers.pool("states").manifest.components[0].name
    host_receive = into(tiers, engine, PageList(component=component, pages=1, first_page=0), pool="states")
    with contextlib.nullcontext() if fits else pytest.raises(errors.GeometryMismatchError, match="shape"):
        pair_entries(theirs.entries, host_receive.pool.manifest.entries)
    tiers.host_receives.refused(host_receive, errors.CancelledError("the test is over"))


@pytest.mark.parametrize(
    ("spec", "brought"),
    [(WITH_DRAFT, PageList(pages=4)), (STATES, PageList(component="mamba", pages=2))],
    ids=["a draft", "a list that may be cut"],
)
async def test_what_no_source_has_to_fill_is_nobodys_old_bytes(
    tiers: Harness, engine: Engine, spec: PoolSpec, brought: PageList
) -> None:
    await new_pool(tiers, "another", spec)
    memory = tiers.host.region.view()
    memory[:] = 0x55  # what another user's blocks were
    host_receive = into(tiers, engine, brought, pool="another")
    may_lack = [one for one in host_receive.pool.manifest.entries if one.component != "main"]
    assert may_lack
    assert not any(memory[one.base : one.base + one.pages * one.page_bytes].any() for one in may_lack)
    tiers.host_receives.refused(host_receive, errors.CancelledError("the test is over"))


async def test_a_second_one_of_the_same_name_that_is_refused_leaves_the_first(tiers: Harness, engine: Engine) -> None:
    first, second = into(tiers, engine), into(tiers, engine)
    assert snapshots_of(engine) == {first.snapshot.name: "network", second.snapshot.name: "network"}
    tiers.host_receives.refused(second, errors.DeadlineError("TRANSFER_EXISTS"))
    ends(tiers, first)
    await tiers.finish()
    assert snapshots_of(engine) == {first.snapshot.name: "ready"}


async def test_a_network_of_more_than_there_is_is_refused_before_anything_is_made(
    tiers: Harness, engine: Engine
) -> None:
    with pytest.raises(errors.OutOfMemoryError, match="2147483647 pages are"):
        into(tiers, engine, PageList(pages=(1 << 31) - 1))
    with pytest.raises((errors.OverloadedError, errors.OutOfMemoryError)):
        into(tiers, engine, PageList(pages=32))
    tiers.check_empty()


async def test_a_registered_pools_pages_are_not_the_daemons_to_take(tiers: Harness, engine: Engine) -> None:
    snapshot = await offloaded(tiers, engine, 2)
    tiers.pool().registered_by = engine.session.session_id
    with pytest.raises(errors.InvalidFieldError, match="is registered"):
        engine.restore(snapshot)
    with pytest.raises(errors.InvalidFieldError, match="is registered"):
        engine.offload([1], release=True)
    tiers.pool().registered_by = None


# -- instances


async def test_pages_that_a_dead_session_restored_into_go_back_and_the_snapshot_stays(tiers: Harness) -> None:
    scheduler, worker = tiers.engine(instance="engine-0"), tiers.engine(instance="engine-0")
    snapshot = await offloaded(tiers, scheduler, 4)
    owned = tiers.pool().allocator.pages_by_owner()
    worker.restore(snapshot, drop=True)
    (job,) = tiers.copier.under_way
    tiers.lose(worker)
    tiers.copier.finish(job)
    await settle()
    assert tiers.pool().allocator.pages_by_owner() == owned, "nobody would know of them"
    assert snapshots_of(scheduler) == {snapshot: "ready"}
    back = scheduler.restore(snapshot, drop=True)
    await tiers.finish()
    assert scheduler.error(back) is None
    assert snapshots_of(scheduler) == {}
    tiers.lose(scheduler)
    assert tiers.pool().allocator.idle


# -- snapshots by themselves, and pages that an operation reads or writes: all or none


def pool_of(spec: PoolSpec) -> Pool:
    manifest = manifest_of(spec)
    return Pool(1, POOL, manifest, HostRegion.create(POOL, manifest.region_bytes))


def lists_of(pool: Pool, **pages: int) -> list[Any]:
    """Return page lists of so many pages a component."""
    lists = [PageList(component=name, pages=count, first_page=2 * (name == "swa")) for name, count in pages.items()]
    ids = [np.arange(1, 1 + count) for count in pages.values()]
    return lists_with_pages(page_ranges(lists, ids, pool.manifest, may_end_inside=True))


def snapshot_of(pool: Pool, tenant: int = 1, **pages: int) -> Snapshot:
    made = Snapshot(pool, 5, new_segments(pool, lists_of(pool, **pages)))
    made.tenant = tenant
    return made


def test_each_segment_needs_its_list() -> None:
    pool = pool_of(HYBRID)
    main, _ = lists_of(pool, main=3, swa=2)
    with pytest.raises(errors.UnknownComponentError, match="the snapshot has pages of 'swa'"):
        ids_for(snapshot_of(pool, main=3, swa=2), [main])


def test_a_layout_that_differs_is_named() -> None:
    made = snapshot_of(pool_of(SPEC), main=1)
    check_layout(made, manifest_of(msgspec.structs.replace(SPEC, tokens=400)), "larger")
    for layers, what in ((1, "k/1: the snapshot has this entry"), (3, "k/2: the pool has this entry")):
        with pytest.raises(errors.LayoutMismatchError, match=what):
            check_layout(made, manifest_of(msgspec.structs.replace(SPEC, layers=layers)), "other")


def test_its_checksum_is_of_all_its_blocks() -> None:
    pool, texts = pool_of(HYBRID), set()
    for last in (4, 5):
        made = snapshot_of(pool, main=3, swa=2)
        for segment, digests in zip(made.segments, ([1, 2, 3], [4, last]), strict=True):
            segment.digests = np.array(digests, np.uint64)
        assert made.status().checksum == "", "while it is written"
        made.settle()
        texts |= {made.status().checksum, made.status().checksum}
    assert {len(one) for one in texts} == {32}
    assert len(texts) == 2
    without = snapshot_of(pool, main=3, swa=2)
    without.settle()
    assert without.status().checksum == "", "where the daemon makes none"


def test_a_snapshot_of_an_earlier_daemon_is_lost_and_one_that_never_was_is_unknown() -> None:
    before, registry, mine = SnapshotRegistry(), SnapshotRegistry(), snapshot_of(pool_of(SPEC), main=1)
    before.add(mine)
    assert before.get(mine.tenant, mine.name) is mine
    with pytest.raises(errors.SnapshotLostError):
        registry.get(mine.tenant, mine.name)
    before.remove(mine)
    for registry_, name in ((before, mine.name), (registry, "0" * 32), (registry, mine.name[::-1])):
        with pytest.raises(errors.UnknownSnapshotError):
            registry_.get(mine.tenant, name)


def test_what_is_released_twice_is_released_once_and_pages_of_another_are_not_held() -> None:
    """Another reader's count must not go with it, nor are pages held that were named before those of another."""
    pool = pool_of(SPEC)
    owner, allocator = 5, pool.allocator
    assert allocator.allocate(owner, 4).tolist() == [1, 2, 3, 4]

    def held(*ids: int, write: bool = False) -> PageHold:
        hold = PageHold(write=write)
        lists = page_ranges([PageList(pages=len(ids))], [np.array(ids)], pool.manifest, may_end_inside=True)
        hold_pages(hold, pool, owner, lists)
        return hold

    first, second = held(1, 2), held(2, 3)
    first.release()
    first.release()
    assert allocator.busy_count == 2
    with pytest.raises(errors.PageBusyError):
        held(2, write=True)
    second.release()
    held(2, write=True).release()
    with pytest.raises(errors.NotOwnerError):
        held(1, 9)
    assert allocator.busy_count == 0

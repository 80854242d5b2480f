"""Snapshots by themselves: what fits them, what they say of themselves, and who is told when they are ready."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

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
from kvferry.pools.pool import Pool
from kvferry.protocol.base import PageList
from kvferry.protocol.errors import (
    LayoutMismatchError,
    NotOwnerError,
    PageBusyError,
    SnapshotLostError,
    UnknownComponentError,
    UnknownSnapshotError,
)
from kvferry.protocol.manifests import PoolSpec
from tests.kit.tiers import HYBRID, SPEC


def pool_of(spec: PoolSpec, name: str = "pool") -> Pool:
    manifest = manifest_of(spec)
    return Pool(1, name, manifest, HostRegion.create(name, manifest.region_bytes))


def lists_of(pool: Pool, **pages: int) -> list[Any]:
    """Return page lists of so many pages a component."""
    lists = [PageList(component=name, pages=count, first_page=2 * (name == "swa")) for name, count in pages.items()]
    ids = [np.arange(1, 1 + count) for count in pages.values()]
    return lists_with_pages(page_ranges(lists, ids, pool.manifest, may_end_inside=True))


def snapshot_of(pool: Pool, tenant: int = 1, **pages: int) -> Snapshot:
    made = Snapshot(pool, 5, new_segments(pool, lists_of(pool, **pages)))
    made.tenant = tenant
    return made


def test_each_segment_needs_its_list_and_each_list_its_segment() -> None:
    pool = pool_of(HYBRID)
    made, [main, swa] = snapshot_of(pool, main=3, swa=2), lists_of(pool, main=3, swa=2)
    with pytest.raises(UnknownComponentError, match="the snapshot has pages of 'swa'"):
        ids_for(made, [main])
    made.segments.pop()
    with pytest.raises(UnknownComponentError, match="the snapshot has no pages of 'swa'"):
        ids_for(made, [main, swa])


def test_a_layout_that_differs_is_named() -> None:
    made = snapshot_of(pool_of(SPEC), main=1)
    check_layout(made, manifest_of(msgspec.structs.replace(SPEC, tokens=400)), "larger")
    for changed, what in (
        ({"v_head_dim": 4}, "main/v/0: page_bytes is 32 in the snapshot, 64 in the pool"),
        ({"layers": 1}, "main/k/1: the snapshot has this entry, the pool does not"),
        ({"layers": 3}, "main/k/2: the pool has this entry, the snapshot does not"),
        ({"total_heads": 2}, "main/k/0: total_heads is 1 in the snapshot, 2 in the pool"),
    ):
        with pytest.raises(LayoutMismatchError, match=what):
            check_layout(made, manifest_of(msgspec.structs.replace(SPEC, **changed)), "other")


def test_its_checksum_is_of_all_its_blocks() -> None:
    pool = pool_of(HYBRID)
    made = snapshot_of(pool, main=3, swa=2)
    assert made.status().checksum == ""
    made.settle()
    assert made.status().checksum == ""  # where the daemon makes none
    texts = set()
    for last in (4, 5):
        made = snapshot_of(pool, main=3, swa=2)
        made.segments[0].digests = np.array([1, 2, 3], np.uint64)
        made.segments[1].digests = np.array([4, last], np.uint64)
        assert made.status().checksum == ""  # while it is written
        made.settle()
        texts.add(made.status().checksum)
        assert made.status().checksum == made.status().checksum
    assert {len(one) for one in texts} == {32}
    assert len(texts) == 2


def test_a_snapshot_of_an_earlier_daemon_is_lost_and_one_that_never_was_is_unknown() -> None:
    before, registry, mine = SnapshotRegistry(), SnapshotRegistry(), snapshot_of(pool_of(SPEC), main=1)
    before.add(mine)
    assert before.get(mine.tenant, mine.name) is mine
    with pytest.raises(SnapshotLostError):
        registry.get(mine.tenant, mine.name)
    before.remove(mine)
    for registry_, name in ((before, mine.name), (registry, "0" * 32), (registry, mine.name[::-1])):
        with pytest.raises(UnknownSnapshotError):
            registry_.get(mine.tenant, name)


# -- pages that an operation reads or writes: all or none of them, and no longer than it says.


OWNER = 5


@pytest.fixture
def pool() -> Pool:
    """Return a pool of 15 pages, of which ``OWNER`` has 1 to 4."""
    manifest = manifest_of(SPEC)
    made = Pool(1, "pool", manifest, HostRegion.create("pool", manifest.region_bytes))
    assert made.allocator.allocate(OWNER, 4).tolist() == [1, 2, 3, 4]
    return made


def held(pool: Pool, ids: list[int], *, write: bool = False) -> PageHold:
    lists = page_ranges([PageList(pages=len(ids))], [np.array(ids)], pool.manifest, may_end_inside=True)
    hold = PageHold(write=write)
    hold_pages(hold, pool, OWNER, lists)
    return hold


def test_what_is_released_twice_is_released_once(pool: Pool) -> None:
    """Another reader's count must not go with it."""
    first, second = held(pool, [1, 2]), held(pool, [2, 3])
    first.release()
    first.release()
    assert pool.allocator.busy_count == 2
    with pytest.raises(PageBusyError):
        held(pool, [2], write=True)
    second.release()
    held(pool, [2], write=True).release()
    assert pool.allocator.busy_count == 0


def test_pages_of_another_are_not_held_nor_those_named_before_them(pool: Pool) -> None:
    with pytest.raises(NotOwnerError):
        held(pool, [1, 9])
    assert pool.allocator.busy_count == 0

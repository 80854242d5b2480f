"""Pages that an operation reads or writes: all or none of them, and no longer than it says."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.daemon.tiers.snapshots import PageHold, hold_pages
from kvferry.daemon.transfer.page_ranges import page_ranges
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.layouts import manifest_of
from kvferry.pools.pool import Pool
from kvferry.protocol.base import PageList
from kvferry.protocol.errors import NotOwnerError, PageBusyError
from tests.daemon.tiers.tier_harness import SPEC

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
    return hold_pages(pool, OWNER, lists, write=write)


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

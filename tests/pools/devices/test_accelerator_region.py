"""Regions of any device against plain memory: every byte of a page moves, no other changes, whatever the staging.

On the host they are host regions; with ``--device`` they are on a device, whose work the simulator keeps in order.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.pools.planning.copies import copy_one_by_one, gather, scatter, total_segments
from kvferry.pools.planning.plan import PlanSide
from tests.kit.bytes import fill_region, read_region, write_region
from tests.kit.devices import DEVICE, new_region
from tests.kit.sides import ENTRY_BYTES, bytes_of, extents, side_of, sides

pytestmark = pytest.mark.any_device
Bytes = npt.NDArray[np.uint8]
UNTOUCHED = 0xEE


def noise(size_bytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


@given(sides(), st.data())
@example(side_of([(2, 3, 4)], 20, cut=True), None)
@example(side_of([(2, 3, 4), (3, 4, 9), (1, 1, 1)], 20, cut=False), None)
def test_gather_takes_what_the_host_takes(side: PlanSide, data: st.DataObject | None) -> None:
    first, stop = data.draw(extents(side)) if data else (0, total_segments(side))
    memory = noise(ENTRY_BYTES * len(side.base))
    expected, got = (np.zeros(bytes_of(side, first, stop), np.uint8) for _ in range(2))
    gather(side, memory.ctypes.data, first, stop, expected.ctypes.data)
    region = new_region(len(memory))
    write_region(region, memory)
    region.gather(side, first, stop, got.ctypes.data, copy_one_by_one)
    assert (got == expected).all()
    assert (read_region(region) == memory).all()


@given(sides(), st.data())
@example(side_of([(2, 3, 4)], 20, cut=True), None)
@example(side_of([(2, 3, 4), (3, 4, 9), (1, 1, 1)], 20, cut=False), None)
def test_scatter_writes_where_the_host_writes_and_nowhere_else(side: PlanSide, data: st.DataObject | None) -> None:
    first, stop = data.draw(extents(side)) if data else (0, total_segments(side))
    sent = noise(bytes_of(side, first, stop))
    expected = np.full(ENTRY_BYTES * len(side.base), UNTOUCHED, np.uint8)
    scatter(side, expected.ctypes.data, first, stop, sent.ctypes.data)
    region = new_region(len(expected))
    fill_region(region, UNTOUCHED)
    region.scatter(side, first, stop, sent.ctypes.data, copy_one_by_one)
    assert (read_region(region) == expected).all()


def test_new_memory_is_zeroed_and_its_own() -> None:
    one, other = new_region(3 << 20), new_region(5)
    assert not read_region(one).any()
    fill_region(one, 7)
    assert not read_region(other).any()
    assert one.identity != other.identity
    assert (one.device, one.size_bytes) == (DEVICE.name, 3 << 20)


def test_threads_share_one_region() -> None:
    pages, threads = 24, 4
    region = new_region(ENTRY_BYTES)
    parts = [side_of([(1, 4, 9)], pages, cut=False, ids=np.arange(1 + n, 1 + pages, threads)) for n in range(threads)]

    def work(number: int) -> bool:
        side = parts[number]
        sent = noise(bytes_of(side, 0, total_segments(side)), number)
        got = np.zeros_like(sent)
        for _ in range(5):
            region.scatter(side, 0, total_segments(side), sent.ctypes.data, copy_one_by_one)
            region.gather(side, 0, total_segments(side), got.ctypes.data, copy_one_by_one)
        return bool((got == sent).all())

    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(work, range(threads)))

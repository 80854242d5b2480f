"""Regions of any device against plain memory and plain slices: every byte moves, no other, whatever the staging.

On the host they are host regions; with ``--device`` they are on a device, whose work the simulator keeps in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.pools.devices.base import Arena, Pending
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.copies import copy_one_by_one, gather, scatter, total_segments
from kvferry.pools.planning.sides import PlanSide
from kvferry.pools.tiers.blocks import BlockPages, BlockStep, BlockSteps
from kvferry.protocol.ids import HOST
from tests.kit.blocks import UNTOUCHED, BlockHarness, harnesses
from tests.kit.bytes import fill_region, read_region, write_region
from tests.kit.devices import DEVICE, new_region
from tests.kit.sides import ENTRY_BYTES, bytes_of, extents, side_of, sides

pytestmark = pytest.mark.any_device
Bytes = npt.NDArray[np.uint8]


def noise(size_bytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


@given(sides(), st.data())
@example(side_of([(2, 3, 4)], 20, cut=True), None)
@example(side_of([(2, 3, 4), (3, 4, 9), (1, 1, 1)], 20, cut=False), None)
def test_what_the_host_takes_is_taken_and_what_it_writes_is_written_and_nothing_else(
    side: PlanSide, data: st.DataObject | None
) -> None:
    first, stop = data.draw(extents(side)) if data else (0, total_segments(side))
    memory = noise(ENTRY_BYTES * len(side.base))
    expected, got = (np.zeros(bytes_of(side, first, stop), np.uint8) for _ in range(2))
    gather(side, memory.ctypes.data, first, stop, expected.ctypes.data)
    region = new_region(len(memory))
    write_region(region, memory)
    region.gather(side, first, stop, got.ctypes.data, copy_one_by_one)
    assert (got == expected).all()
    assert (read_region(region) == memory).all()
    memory[:] = UNTOUCHED
    scatter(side, memory.ctypes.data, first, stop, got.ctypes.data)
    fill_region(region, UNTOUCHED)
    region.scatter(side, first, stop, got.ctypes.data, copy_one_by_one)
    assert (read_region(region) == memory).all()


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


STEP_BYTES = st.integers(1, 300) | st.integers(300, 40_000) | st.just(1 << 20)
MAX_UNDER_WAY = 3
MOST = 1 << 30


@pytest.fixture(params=[False, True], ids=["plain", "registered"], scope="module")
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    """Return memory for blocks, registered with the device or not; on the host that is all the same."""
    with HostRegion.create("arena", 4 << 20) as region:
        registered = request.param and DEVICE.name != HOST
        if registered:
            DEVICE.accelerator.register_host(region)
        yield region.view()
        if registered:
            with DEVICE.accelerator.calling():
                DEVICE.accelerator.unregister_host(region)


def steps_of(pages: BlockPages, step_bytes: int) -> Iterator[BlockStep]:
    steps = BlockSteps(pages.layout, 0, len(pages.ids))
    while (step := steps.take(step_bytes, MOST)) is not None:
        yield step


@given(harnesses(), STEP_BYTES, st.data())
def test_offloads_and_restores_that_interleave_put_each_byte_into_its_place_and_nowhere_else(
    arena: Arena, harness: BlockHarness, step_bytes: int, data: st.DataObject
) -> None:
    """Half of the pages go out while the others come in, begun and waited for in any order."""
    half = len(harness.pages.ids) // 2
    layout = harness.pages.layout
    leaving, coming = (
        BlockPages(layout, *(one[cut] for one in harness.pages[1:])) for cut in (slice(half), slice(half, None))
    )
    memory, region = harness.memory(), new_region(harness.manifest.region_bytes)
    write_region(region, memory)
    content = np.random.default_rng(1).integers(0, 256, len(arena), np.uint8)
    arena[:] = content
    expected = harness._replace(pages=coming).restored(memory, content)
    waiting = [(region.begin_offload, leaving, step) for step in steps_of(leaving, step_bytes)]
    waiting += [(region.begin_restore, coming, step) for step in steps_of(coming, step_bytes)]
    random = data.draw(st.randoms(use_true_random=False))
    random.shuffle(waiting)
    under_way: list[Pending] = []
    while waiting or under_way:
        if waiting and len(under_way) < MAX_UNDER_WAY:
            begin, pages, step = waiting.pop()
            under_way.append(begin(pages, step, arena))
        else:
            under_way.pop(random.randrange(len(under_way))).wait()
    assert (read_region(region) == expected).all()
    blocks = harness._replace(pages=leaving).offloaded(memory)
    for at in leaving.offsets.tolist():
        assert (arena[at : at + layout.block_bytes] == blocks[at : at + layout.block_bytes]).all()
        content[at : at + layout.block_bytes] = arena[at : at + layout.block_bytes]
    assert (arena == content).all(), "nothing but the blocks of the pages that leave"

"""Regions of any device against plain slices: steps between pages and blocks, several under way at a time.

On the host they are host regions; with ``--device`` they are on a device, whose work the simulator keeps in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.devices.base import Arena, Pending
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.tiers.blocks import BlockPages, BlockStep, BlockSteps
from kvferry.protocol.ids import HOST
from tests.kit.blocks import UNTOUCHED, BlockHarness, harnesses
from tests.kit.bytes import read_region, write_region
from tests.kit.devices import DEVICE, new_region

pytestmark = pytest.mark.any_device
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


def run(begin: Callable[[BlockPages, BlockStep, Arena], Pending], pages: BlockPages, step: int, arena: Arena) -> None:
    under_way: list[Pending] = []
    for one in steps_of(pages, step):
        under_way.append(begin(pages, one, arena))
        if len(under_way) == MAX_UNDER_WAY:
            under_way.pop(0).wait()
    for pending in under_way:
        pending.wait()


@given(harnesses(), STEP_BYTES)
def test_an_offload_puts_each_byte_into_its_block_and_nowhere_else(
    arena: Arena, harness: BlockHarness, step_bytes: int
) -> None:
    memory, region = harness.memory(), new_region(harness.manifest.region_bytes)
    write_region(region, memory)
    arena[:] = UNTOUCHED
    run(region.begin_offload, harness.pages, step_bytes, arena)
    assert (arena[: harness.arena_bytes] == harness.offloaded(memory)).all()
    assert (arena[harness.arena_bytes :] == UNTOUCHED).all()
    assert (read_region(region) == memory).all()


@given(harnesses(), STEP_BYTES)
def test_a_restore_puts_each_byte_into_its_page_and_nowhere_else(
    arena: Arena, harness: BlockHarness, step_bytes: int
) -> None:
    memory, region = harness.memory(), new_region(harness.manifest.region_bytes)
    write_region(region, memory)
    arena[:] = np.random.default_rng(1).integers(0, 256, len(arena), np.uint8)
    before = arena.copy()
    run(region.begin_restore, harness.pages, step_bytes, arena)
    assert (read_region(region) == harness.restored(memory, arena)).all()
    assert (arena == before).all()


@given(harnesses(), STEP_BYTES, st.data())
def test_offloads_and_restores_that_interleave_do_not_meet(
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

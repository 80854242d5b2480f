"""Steps of blocks where a device's regions differ: memory registered in parts, one kernel a step, a lost device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.accelerator_region import MAX_STEP_COPIES, AcceleratorRegion, RegionSegment, StagingPool
from kvferry.pools.planning.manifest import lay_out
from kvferry.pools.tiers.blocks import BlockLayout, BlockPages, BlockStep, BlockSteps
from kvferry.protocol.errors import DeviceLostError
from kvferry.protocol.manifests import Entry
from tests.cann_simulator.simulator import Simulator
from tests.kit.blocks import BlockHarness, harnesses
from tests.kit.bytes import fill_region, read_pages, write_pages
from tests.kit.devices import DEVICE

WAIT_S = 30.0
PAGES = 12
MOST = 1 << 30


@pytest.fixture
def device() -> Accelerator:
    """Return a device as a daemon of its own would have it."""
    one = Accelerator(DEVICE.name, stuck_after_s=5.0)
    one.open()
    return one


def registered_in_parts(device: Accelerator, manifest_bytes: int, starts: list[int]) -> AcceleratorRegion:
    """Return a region whose parts begin there, each mapped apart."""
    ends = [*starts[1:], manifest_bytes]
    with device.calling():
        parts = [RegionSegment(start, device.allocate(end - start)) for start, end in zip(starts, ends, strict=True)]
    return AcceleratorRegion(device, parts, manifest_bytes, StagingPool(device))


def small_pool() -> BlockPages:
    entries = [
        Entry(component="main", role=role, layer=layer, base=0, pages=PAGES, page_bytes=size)
        for role, size in (("k", 2048), ("v", 1024))
        for layer in range(6)
    ]
    layout = BlockLayout(lay_out(entries), "main")
    return BlockPages(layout, np.arange(PAGES - 1, 0, -1), np.arange(PAGES - 1) * layout.block_bytes)


def whole(pages: BlockPages) -> BlockStep:
    return BlockStep(0, len(pages.ids), 0, pages.layout.content_bytes)


@given(harnesses(), st.integers(1, 40_000), st.data())
def test_memory_in_parts_moves_each_byte_to_its_place(
    harness: BlockHarness, step_bytes: int, data: st.DataObject
) -> None:
    entries = harness.manifest.entries
    cuts = data.draw(st.sets(st.sampled_from(range(1, len(entries) + 1))))
    starts = [0, *(entries[cut].base for cut in sorted(cuts - {len(entries)}))]
    region, memory, arena = (
        registered_in_parts(DEVICE.accelerator, harness.manifest.region_bytes, starts),
        None,
        harness.arena(),
    )
    memory, every = harness.memory(), {}
    try:
        for entry in entries:
            every[entry] = np.arange(entry.pages)
            content = memory[entry.base : entry.base + entry.pages * entry.page_bytes]
            write_pages(region, [entry], every[entry], content)
        steps = BlockSteps(harness.pages.layout, 0, len(harness.pages.ids))
        while (step := steps.take(step_bytes, MOST)) is not None:
            region.begin_offload(harness.pages, step, arena).wait()
        assert (arena == harness.offloaded(memory)).all()
        arena[:] = np.random.default_rng(1).integers(0, 256, len(arena), np.uint8)
        steps = BlockSteps(harness.pages.layout, 0, len(harness.pages.ids))
        while (step := steps.take(step_bytes, MOST)) is not None:
            region.begin_restore(harness.pages, step, arena).wait()
        expected = harness.restored(memory, arena)
        for entry in entries:
            content = expected[entry.base : entry.base + entry.pages * entry.page_bytes]
            assert (read_pages(region, [entry], every[entry]) == content).all()
    finally:
        region.close()


def test_a_step_of_a_pool_in_one_part_is_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, device = small_pool(), DEVICE.accelerator
    region = registered_in_parts(device, PAGES * pages.layout.content_bytes, [0])
    taken, select = list[int](), device.torch.index_select

    def counted(view: Any, dim: int, numbers: Any, *, out: Any) -> Any:  # noqa: ANN401  tensors
        taken.append(len(numbers))
        return select(view, dim, numbers, out=out)

    monkeypatch.setattr(device.torch, "index_select", counted)
    region.begin_offload(pages, whole(pages), np.zeros(pages.total_bytes, np.uint8)).wait()
    assert taken == [pages.total_bytes // 1024], "one cell for each 1024 bytes of all pages"
    region.close()


def test_closing_waits_for_steps_that_nobody_has_waited_for_yet(simulator: Simulator) -> None:
    pages = small_pool()
    region = registered_in_parts(DEVICE.accelerator, PAGES * pages.layout.content_bytes, [0])
    fill_region(region, 7)
    arena, closed = np.zeros(pages.total_bytes, np.uint8), threading.Event()

    def close() -> None:
        region.close()
        closed.set()

    with ThreadPoolExecutor(1) as pool:
        with simulator.held():
            first = region.begin_offload(pages, whole(pages), arena)
            second = region.begin_offload(pages, whole(pages), arena)
            closing = pool.submit(close)
        first.wait()
        assert not closed.is_set(), "the second step is under way"
        second.wait()
        closing.result(WAIT_S)
    assert (arena == 7).all()


def test_a_step_on_a_device_that_hangs_loses_it(device: Accelerator, simulator: Simulator) -> None:
    pages = small_pool()
    region = registered_in_parts(device, PAGES * pages.layout.content_bytes, [0])
    arena = np.zeros(pages.total_bytes, np.uint8)
    with simulator.held():
        pending = region.begin_offload(pages, whole(pages), arena)
        with pytest.raises(DeviceLostError, match=r"not done after 5 s|has not returned"):
            pending.wait()
    with pytest.raises(DeviceLostError):
        region.begin_restore(pages, whole(pages), arena)
    DEVICE.synchronize()
    region.close()


def test_a_step_of_memory_in_parts_has_few_blocks_as_each_adds_copies() -> None:
    """Else a slow device works on one step for longer than the watchdog waits."""
    pages = small_pool()
    starts = [one.base for one in pages.layout.entries]
    apart = registered_in_parts(DEVICE.accelerator, PAGES * pages.layout.content_bytes, starts)
    joined = registered_in_parts(DEVICE.accelerator, PAGES * pages.layout.content_bytes, [0])
    assert apart.most_blocks(pages.layout) == MAX_STEP_COPIES // len(starts)
    assert joined.most_blocks(pages.layout) == PAGES, "one kernel copies all of them"
    apart.close()
    joined.close()


@pytest.fixture(autouse=True)
def _nothing_is_held(simulator: Simulator) -> Iterator[None]:
    yield
    simulator.release()

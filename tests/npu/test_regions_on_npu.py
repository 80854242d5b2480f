"""What only a device's regions do: memory in parts, stagings that are too small, closing in the midst, faults.

What happens to a device that fails is tried on an ``Accelerator`` of its own, which shares nothing with other tests.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.process.devices import Devices
from kvferry.pools.devices.accelerator import WAITING_STREAMS, Accelerator
from kvferry.pools.devices.accelerator_region import MAX_STEP_COPIES, AcceleratorRegion, RegionSegment, StagingPool
from kvferry.pools.devices.vendor import MemoryAt
from kvferry.pools.planning.copies import copy_one_by_one, total_segments
from kvferry.pools.planning.manifest import lay_out
from kvferry.pools.planning.page_ids import coalesce
from kvferry.pools.planning.plan import Plan
from kvferry.pools.planning.sides import PlanSide, entries_between
from kvferry.pools.tiers.blocks import BlockLayout, BlockPages, BlockStep, BlockSteps
from kvferry.protocol.config.schema import DevicesConfig
from kvferry.protocol.errors import DeviceLostError, OutOfMemoryError
from kvferry.protocol.manifests import Entry
from tests.cann_simulator.child import Child
from tests.cann_simulator.simulator import Simulator
from tests.kit.blocks import BlockHarness, harnesses
from tests.kit.bytes import fill_region, read_pages, read_region, write_pages
from tests.kit.devices import DEVICE, new_region
from tests.kit.sides import ENTRY_BYTES, bytes_of, side_of, sides

Bytes = npt.NDArray[np.uint8]
MIB = 1 << 20
UNTOUCHED = 0xEE
WAIT_S = 30.0
TINY_STAGING = 100
"""Less than most entries have: every copy goes in many pieces."""

PAGES = 12
MOST = 1 << 30
HANGS = r"not done after 5 s|has not returned"


@pytest.fixture
def device() -> Accelerator:
    """Return a device as a daemon of its own would have it."""
    one = Accelerator(DEVICE.name, stuck_after_s=5.0)
    one.open()
    return one


def region_on(
    device: Accelerator, size_bytes: int, staging_bytes: int = 8 * MIB, starts: tuple[int, ...] = (0,)
) -> AcceleratorRegion:
    """Return memory whose parts begin there, each mapped apart; the caller closes it."""
    ends = [*starts[1:], size_bytes]
    with device.calling():
        parts = [RegionSegment(start, device.allocate(end - start)) for start, end in zip(starts, ends, strict=True)]
    return AcceleratorRegion(device, parts, size_bytes, StagingPool(device, staging_bytes))


@pytest.fixture(scope="module", params=[DEVICE.name, "npu:1"])
def origin(request: pytest.FixtureRequest) -> Accelerator:
    """Return a device from which the run's own copies: itself, and another one."""
    one = DEVICE.accelerator if request.param == DEVICE.name else Accelerator(request.param)
    one.open()
    assert DEVICE.accelerator.reaches(one)
    return one


def noise(size_bytes: int) -> Bytes:
    return np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8)


class Copy:
    """All of a side, and its bytes in a row."""

    def __init__(self, side: PlanSide) -> None:
        self.side = side
        self.bytes = noise(bytes_of(side, 0, total_segments(side)))

    def gather(self, region: Any) -> None:  # noqa: ANN401  a region of any kind
        region.gather(self.side, 0, total_segments(self.side), self.bytes.ctypes.data, copy_one_by_one)

    def scatter(self, region: Any) -> None:  # noqa: ANN401  a region of any kind
        region.scatter(self.side, 0, total_segments(self.side), self.bytes.ctypes.data, copy_one_by_one)


# -- every byte


@given(sides(), st.sampled_from([TINY_STAGING, 8 * MIB]))
def test_copies_larger_than_a_staging_and_between_devices_move_each_byte_to_its_place(
    origin: Accelerator, side: PlanSide, staging_bytes: int
) -> None:
    theirs = side.__class__(**{name: getattr(side, name) for name in side.__struct_fields__[:-1]}, ids=side.ids[::-1])
    plan = Plan(side, theirs, coalesce(side.ids, theirs.ids), entries_between(side, theirs))
    size = ENTRY_BYTES * len(side.base)
    source, destination = (region_on(one, size, staging_bytes) for one in (origin, DEVICE.accelerator))
    plain, sent, got, arrived = new_region(size), Copy(side), Copy(side), Copy(theirs)
    try:
        for region in (source, destination, plain):
            fill_region(region, UNTOUCHED)
        for region in (source, plain):
            sent.scatter(region)
        assert (read_region(source) == read_region(plain)).all()
        got.gather(source)
        assert (got.bytes == sent.bytes).all()
        destination.copy_from(source, plan, 0, total_segments(side))
        arrived.gather(destination)
        assert (arrived.bytes == sent.bytes).all()
        fill_region(plain, UNTOUCHED)
        arrived.scatter(plain)
        assert (read_region(destination) == read_region(plain)).all()
    finally:
        source.close()
        destination.close()


def test_a_copy_that_has_no_memory_at_its_end_leaves_the_other_devices_staging(simulator: Simulator) -> None:
    here, there = Accelerator(DEVICE.name), Accelerator("npu:1")
    for one in (here, there):
        one.open()
    side = side_of([(1, 4, 9)], 20, cut=False)
    plan = Plan(side, side, coalesce(side.ids, side.ids), entries_between(side, side))
    with here.calling():
        mapped = here.allocate(2 * MIB)
    stagings = StagingPool(here)
    source = AcceleratorRegion(here, [RegionSegment(0, mapped)], ENTRY_BYTES, stagings)
    destination = region_on(there, ENTRY_BYTES, staging_bytes=256 * MIB)  # more than torch has kept of other tests
    sent, arrived = Copy(side), Copy(side)
    sent.scatter(source)
    assert len(stagings) == 1
    simulator.out_of_memory()
    try:
        with pytest.raises(OutOfMemoryError):
            destination.copy_from(source, plan, 0, total_segments(side))
    finally:
        simulator.out_of_memory(0)
    assert len(stagings) == 1
    destination.copy_from(source, plan, 0, total_segments(side))
    arrived.gather(destination)
    assert (arrived.bytes == sent.bytes).all()
    source.close()
    destination.close()


@given(harnesses(), st.integers(1, 40_000), st.data())
def test_memory_in_parts_moves_each_byte_to_its_place(
    harness: BlockHarness, step_bytes: int, data: st.DataObject
) -> None:
    entries = harness.manifest.entries
    cuts = data.draw(st.sets(st.sampled_from(range(1, len(entries) + 1))))
    starts = (0, *(entries[cut].base for cut in sorted(cuts - {len(entries)})))
    region = region_on(DEVICE.accelerator, harness.manifest.region_bytes, starts=starts)
    memory, arena = harness.memory(), harness.arena()

    def each_step(begin: Callable[[BlockPages, BlockStep, Bytes], Any]) -> None:
        steps = BlockSteps(harness.pages.layout, 0, len(harness.pages.ids))
        while (step := steps.take(step_bytes, MOST)) is not None:
            begin(harness.pages, step, arena).wait()

    try:
        for entry in entries:
            content = memory[entry.base : entry.base + entry.pages * entry.page_bytes]
            write_pages(region, [entry], np.arange(entry.pages), content)
        each_step(region.begin_offload)
        assert (arena == harness.offloaded(memory)).all()
        arena[:] = noise(len(arena))
        each_step(region.begin_restore)
        expected = harness.restored(memory, arena)
        for entry in entries:
            content = expected[entry.base : entry.base + entry.pages * entry.page_bytes]
            assert (read_pages(region, [entry], np.arange(entry.pages)) == content).all()
    finally:
        region.close()


def test_stagings_are_used_again_and_memory_goes_back_with_the_region(simulator: Simulator) -> None:
    before = simulator.memory_used(0)
    tiny = StagingPool(DEVICE.accelerator, TINY_STAGING)
    with DEVICE.accelerator.calling():
        mapped = DEVICE.accelerator.allocate(3 * MIB)
    region = AcceleratorRegion(DEVICE.accelerator, [RegionSegment(0, mapped)], 3 * MIB, tiny)
    assert simulator.memory_used(0) == before + 4 * MIB
    for _ in range(5):
        Copy(side_of([(1, 4, 9)], 20, cut=False)).gather(region)
    assert len(tiny) == 1
    used = simulator.memory_used(0)
    region.close()
    region.close()
    assert simulator.memory_used(0) == used - 4 * MIB


# -- steps of blocks


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


def test_a_step_of_a_pool_in_one_part_is_one_kernel_and_one_in_parts_has_few_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In parts each block adds copies: a slow device would work on one step for longer than the watchdog waits."""
    pages, device = small_pool(), DEVICE.accelerator
    size, starts = PAGES * pages.layout.content_bytes, tuple(one.base for one in pages.layout.entries)
    joined, apart = region_on(device, size), region_on(device, size, starts=starts)
    assert apart.most_blocks(pages.layout) == MAX_STEP_COPIES // len(starts)
    assert joined.most_blocks(pages.layout) == PAGES, "one kernel copies all of them"
    taken, select = list[int](), device.torch.index_select

    def counted(view: Any, dim: int, numbers: Any, *, out: Any) -> Any:  # noqa: ANN401  tensors
        taken.append(len(numbers))
        return select(view, dim, numbers, out=out)

    monkeypatch.setattr(device.torch, "index_select", counted)
    joined.begin_offload(pages, whole(pages), np.zeros(pages.total_bytes, np.uint8)).wait()
    assert taken == [pages.total_bytes // 1024], "one cell for each 1024 bytes of all pages"
    joined.close()
    apart.close()


# -- closing


def test_closing_waits_for_copies_and_steps_on_other_threads(simulator: Simulator) -> None:
    pages = small_pool()
    region = region_on(DEVICE.accelerator, PAGES * pages.layout.content_bytes)
    fill_region(region, 7)
    copy, arena = Copy(side_of([(1, 4, 9)], 20, cut=False)), np.zeros(pages.total_bytes, np.uint8)
    closed = threading.Event()

    def close() -> None:
        region.close()
        closed.set()

    with ThreadPoolExecutor(2) as pool:
        with simulator.held():
            first = region.begin_offload(pages, whole(pages), arena)
            second = region.begin_offload(pages, whole(pages), arena)
            copying = pool.submit(copy.gather, region)
            closing = pool.submit(close)
            assert not closed.wait(0.1), "the copy and the steps are under way"
            assert not copying.done()
        copying.exception(WAIT_S)
        first.wait()
        assert not closed.is_set(), "the second step is under way"
        second.wait()
        closing.result(WAIT_S)
    assert (arena == 7).all()


# -- what a device has, and what it has not


def test_pools_have_a_budget_in_whole_two_mebibytes() -> None:
    devices = Devices(DevicesConfig(max_fraction=0.002), _unexpected)  # 4 of 4096 MiB in units of 2 MiB: 8
    held = [devices.allocate(DEVICE.name, 1) for _ in range(4)]
    with pytest.raises(OutOfMemoryError, match=rf"needs {2 * MIB} bytes .*max_fraction.* have {8 * MIB}"):
        devices.allocate(DEVICE.name, 1)
    (shown,) = devices.status()
    assert (shown.state, shown.pool_bytes, shown.total_bytes) == ("ready", 8 * MIB, 4096 * MIB)
    held.pop().close()
    held.append(devices.allocate(DEVICE.name, 1))
    for one in held:
        one.close()
    assert [one.pool_bytes for one in devices.status()] == [0]


def _unexpected(name: str, error: DeviceLostError) -> None:
    raise AssertionError((name, error))


def test_borrowers_of_streams_share_only_when_there_are_too_many_and_then_evenly(device: Accelerator) -> None:
    users = [object() for _ in range(WAITING_STREAMS + 3)]
    with device.calling():
        streams = [device.waiting_stream(one) for one in users]
        shared = Counter(id(one) for one in streams)
        assert sorted(shared.values()) == [1] * (WAITING_STREAMS - 3) + [2] * 3
        alone = next(number for number, one in enumerate(streams) if shared[id(one)] == 1)
        device.release_stream(users[alone])
        assert device.waiting_stream(object()) is streams[alone]


def test_the_driver_knows_device_and_size() -> None:
    device = DEVICE.accelerator
    with device.calling():
        mapped = device.vendor.allocate(device.index, 4 * MIB)
        address = mapped.tensor.data_ptr()
        assert device.vendor.memory_at(address, 4 * MIB) == MemoryAt(device.index, 4 * MIB)
        assert device.vendor.memory_at(address + MIB, 4 * MIB) == MemoryAt(device.index, 3 * MIB)
        device.vendor.unmap(mapped)
        assert device.vendor.memory_at(address, MIB) == MemoryAt(None, 0)
        host = torch.zeros(MIB, dtype=torch.uint8)
        assert device.vendor.memory_at(host.data_ptr(), MIB) == MemoryAt(None, 0)


OLD_CANN = """
from kvferry.pools.devices.npu import NpuVendor
vendor = NpuVendor()
vendor.load()
block = torch.zeros(30 << 20, dtype=torch.uint8, device="npu:0")
address = block.data_ptr()
result = [list(vendor.memory_at(*one)) for one in ((address, 8), (address, 30 << 20), (address, 1 << 40), (64, 8))]
"""


def test_an_old_cann_knows_the_device_of_the_first_and_the_last_byte(tmp_path: Path) -> None:
    with Child(Simulator(tmp_path, cann="8.5.0")) as process:
        assert process.do(OLD_CANN) == [[0, 8], [0, 30 * MIB], [0, 0], [None, 0]]


# -- a device that is taken for lost


def test_a_lost_device_is_not_called_again_and_only_the_first_reason_counts(device: Accelerator) -> None:
    told: list[DeviceLostError] = []
    device.when_lost(told.append)
    region, copy = region_on(device, ENTRY_BYTES), Copy(side_of([(1, 4, 9)], 20, cut=False))
    device.lose(DeviceLostError("it burns"))
    device.lose(DeviceLostError("it still burns"))
    for call in (copy.gather, copy.scatter):
        with pytest.raises(DeviceLostError, match="it burns"):
            call(region)
    assert [one.detail for one in told] == ["it burns"]
    region.close()  # what it held is the end of the process's to give back


@pytest.mark.parametrize("what", ["copy", "step"])
def test_what_does_not_come_back_loses_the_device(device: Accelerator, simulator: Simulator, what: str) -> None:
    pages = small_pool()
    region, copy = region_on(device, PAGES * pages.layout.content_bytes), Copy(side_of([(1, 4, 9)], 20, cut=False))
    lost, arena = threading.Event(), np.zeros(pages.total_bytes, np.uint8)
    device.when_lost(lambda _error: lost.set())
    with simulator.held():
        pending = region.begin_offload(pages, whole(pages), arena) if what == "step" else None
        with pytest.raises(DeviceLostError, match=HANGS):
            pending.wait() if pending else copy.gather(region)
    with pytest.raises(DeviceLostError):
        region.begin_restore(pages, whole(pages), arena)
    assert lost.wait(WAIT_S)
    DEVICE.synchronize()


@pytest.fixture(autouse=True)
def _nothing_is_held(simulator: Simulator) -> Iterator[None]:
    yield
    simulator.release()

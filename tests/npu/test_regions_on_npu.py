"""What only a device's regions do: stagings that are too small, copies within the device, closing in the midst, faults.

What happens to a device that fails is tried on an ``Accelerator`` of its own, which shares nothing with other tests.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.process.devices import Devices
from kvferry.pools.devices.accelerator import REGION_ALIGNMENT, WAITING_STREAMS, Accelerator
from kvferry.pools.devices.accelerator_region import AcceleratorRegion, RegionSegment, StagingPool
from kvferry.pools.planning.copies import copy_one_by_one, total_segments
from kvferry.pools.planning.page_ids import coalesce
from kvferry.pools.planning.plan import Plan, PlanSide, entries_between
from kvferry.protocol.config.schema import DevicesConfig
from kvferry.protocol.errors import DeviceLostError, DeviceUnavailableError, OutOfMemoryError
from tests.cann_simulator.simulator import Simulator
from tests.kit.bytes import fill_region, read_region, write_region
from tests.kit.devices import DEVICE, new_region
from tests.kit.sides import ENTRY_BYTES, bytes_of, side_of, sides

Bytes = npt.NDArray[np.uint8]
MIB = 1 << 20
UNTOUCHED = 0xEE
WAIT_S = 30.0
TINY_STAGING = 100
"""Less than most entries have: every copy goes in many pieces."""


@pytest.fixture(scope="module")
def tiny() -> StagingPool:
    """Return stagings that hold next to nothing."""
    return StagingPool(DEVICE.accelerator, TINY_STAGING)


@pytest.fixture
def device() -> Accelerator:
    """Return a device as a daemon of its own would have it."""
    one = Accelerator(DEVICE.name, stuck_after_s=5.0)
    one.open()
    return one


def region_on(device: Accelerator, stagings: StagingPool, size_bytes: int) -> AcceleratorRegion:
    """Return memory with these stagings; whoever makes it closes it."""
    with device.calling():
        mapped = device.allocate(size_bytes)
    return AcceleratorRegion(device, [RegionSegment(0, mapped)], size_bytes, stagings)


def noise(size_bytes: int) -> Bytes:
    return np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8)


def whole(side: PlanSide) -> int:
    return bytes_of(side, 0, total_segments(side))


# -- stagings


@given(sides())
def test_a_copy_larger_than_the_staging_goes_in_pieces(side: PlanSide) -> None:
    region = region_on(DEVICE.accelerator, StagingPool(DEVICE.accelerator, TINY_STAGING), ENTRY_BYTES * len(side.base))
    reference = new_region(region.size_bytes)
    try:
        fill_region(region, UNTOUCHED)
        fill_region(reference, UNTOUCHED)
        sent, got = noise(whole(side)), np.zeros(whole(side), np.uint8)
        for one in (region, reference):
            one.scatter(side, 0, total_segments(side), sent.ctypes.data, copy_one_by_one)
        region.gather(side, 0, total_segments(side), got.ctypes.data, copy_one_by_one)
        assert (got == sent).all()
        assert (read_region(region) == read_region(reference)).all()
    finally:
        region.close()


@given(sides(), st.sampled_from([TINY_STAGING, 8 * MIB]))
def test_copies_within_a_device_move_each_byte_to_its_place(side: PlanSide, staging_bytes: int) -> None:
    pages = len(side.ids)
    theirs = side.__class__(**{name: getattr(side, name) for name in side.__struct_fields__[:-1]}, ids=side.ids[::-1])
    plan = Plan(side, theirs, coalesce(side.ids, theirs.ids), entries_between(side, theirs))
    source = region_on(DEVICE.accelerator, StagingPool(DEVICE.accelerator, staging_bytes), ENTRY_BYTES * len(side.base))
    destination = region_on(DEVICE.accelerator, StagingPool(DEVICE.accelerator, staging_bytes), source.size_bytes)
    try:
        write_region(source, noise(source.size_bytes))
        fill_region(destination, UNTOUCHED)
        sent, got = np.zeros(whole(side), np.uint8), np.zeros(whole(side), np.uint8)
        source.gather(side, 0, total_segments(side), sent.ctypes.data, copy_one_by_one)
        destination.copy_from(source, plan, 0, total_segments(side))
        destination.gather(theirs, 0, total_segments(side), got.ctypes.data, copy_one_by_one)
        assert (got == sent).all()
        expected = np.full(source.size_bytes, UNTOUCHED, np.uint8)
        plain = new_region(source.size_bytes)
        write_region(plain, expected)
        plain.scatter(theirs, 0, total_segments(side), sent.ctypes.data, copy_one_by_one)
        assert (read_region(destination) == read_region(plain)).all()
        assert pages == len(theirs.ids)
    finally:
        source.close()
        destination.close()


def test_stagings_are_used_again(tiny: StagingPool) -> None:
    region = region_on(DEVICE.accelerator, tiny, ENTRY_BYTES)
    side = side_of([(1, 4, 9)], 20, cut=False)
    got = np.zeros(whole(side), np.uint8)
    for _ in range(5):
        region.gather(side, 0, total_segments(side), got.ctypes.data, copy_one_by_one)
    assert len(tiny) == 1
    region.close()


# -- closing


def test_closing_waits_for_copies_on_other_threads(simulator: Simulator, tiny: StagingPool) -> None:
    region, side = region_on(DEVICE.accelerator, tiny, ENTRY_BYTES), side_of([(1, 4, 9)], 20, cut=False)
    got = np.ones(whole(side), np.uint8)
    closed = threading.Event()

    def close() -> None:
        region.close()
        closed.set()

    with ThreadPoolExecutor(2) as pool:
        with simulator.held():
            copying = pool.submit(region.gather, side, 0, total_segments(side), got.ctypes.data, copy_one_by_one)
            simulator.wait_until_pending(1)
            closing = pool.submit(close)
            assert not closed.wait(0.1), "the copy is under way"
            assert not copying.done()
        copying.exception(WAIT_S)
        closing.result(WAIT_S)
    assert "closed" in repr(region)


def test_memory_goes_back_with_the_region(simulator: Simulator, tiny: StagingPool) -> None:
    before = simulator.memory_used(0)
    region = region_on(DEVICE.accelerator, tiny, 3 * MIB)
    assert simulator.memory_used(0) == before + 4 * MIB
    region.close()
    region.close()
    assert simulator.memory_used(0) == before


# -- a device that has not enough


def test_out_of_memory_names_what_was_asked_for_and_what_there_is(simulator: Simulator) -> None:
    devices = Devices(DevicesConfig(max_fraction=1.0), _unexpected)
    simulator.out_of_memory(1)
    try:
        with pytest.raises(OutOfMemoryError) as refused:
            devices.allocate(DEVICE.name, 5 * MIB)
    finally:
        simulator.out_of_memory(0)
    assert f"{DEVICE.name} has" in refused.value.detail
    assert f"{5 * MIB} are needed" in refused.value.detail
    assert not devices.lost
    (shown,) = devices.status()
    assert (shown.state, shown.pool_bytes) == ("ready", 0)
    devices.allocate(DEVICE.name, 5 * MIB).close()


def test_pools_have_a_budget_in_whole_two_mebibytes() -> None:
    devices = Devices(DevicesConfig(max_fraction=0.002), _unexpected)  # 4 of 4096 MiB in units of 2 MiB: 8
    held = [devices.allocate(DEVICE.name, 1) for _ in range(4)]
    with pytest.raises(OutOfMemoryError, match=rf"needs {REGION_ALIGNMENT} bytes .*max_fraction.* have {8 * MIB}"):
        devices.allocate(DEVICE.name, 1)
    (shown,) = devices.status()
    assert (shown.state, shown.pool_bytes, shown.total_bytes) == ("ready", 8 * MIB, 4096 * MIB)
    held.pop().close()
    held.append(devices.allocate(DEVICE.name, 1))
    for one in held:
        one.close()
    assert [one.pool_bytes for one in devices.status()] == [0]


def test_borrowers_of_streams_share_only_when_there_are_too_many_and_then_evenly(device: Accelerator) -> None:
    device.open()
    users = [object() for _ in range(WAITING_STREAMS + 3)]
    with device.calling():
        streams = [device.waiting_stream(one) for one in users]
        shared = Counter(id(one) for one in streams)
        assert sorted(shared.values()) == [1] * (WAITING_STREAMS - 3) + [2] * 3
        alone = next(number for number, one in enumerate(streams) if shared[id(one)] == 1)
        device.release_stream(users[alone])
        assert device.waiting_stream(object()) is streams[alone]


def test_a_device_that_is_not_there_is_said_to_be_unavailable() -> None:
    devices = Devices(DevicesConfig(), _unexpected)
    with pytest.raises(DeviceUnavailableError, match="this host has 2 devices; npu:5 is not one of them"):
        devices.open("npu:5")
    assert [one.state for one in devices.status()] == ["unavailable: this host has 2 devices; npu:5 is not one of them"]


def _unexpected(name: str, error: DeviceLostError) -> None:
    raise AssertionError((name, error))


# -- a device that is taken for lost


def test_a_lost_device_is_not_called_again_and_only_the_first_reason_counts(device: Accelerator) -> None:
    told: list[DeviceLostError] = []
    device.when_lost(told.append)
    region = region_on(device, StagingPool(device), ENTRY_BYTES)
    side = side_of([(1, 4, 9)], 20, cut=False)
    got = np.zeros(whole(side), np.uint8)
    device.lose(DeviceLostError("it burns"))
    device.lose(DeviceLostError("it still burns"))
    for call in (region.gather, region.scatter):
        with pytest.raises(DeviceLostError, match="it burns"):
            call(side, 0, total_segments(side), got.ctypes.data, copy_one_by_one)
    assert [one.detail for one in told] == ["it burns"]
    assert "lost" in repr(device)
    region.close()  # what it held is the end of the process's to give back


def test_a_call_that_does_not_come_back_loses_the_device(device: Accelerator, simulator: Simulator) -> None:
    region, side = region_on(device, StagingPool(device), ENTRY_BYTES), side_of([(1, 4, 9)], 20, cut=False)
    got = np.zeros(whole(side), np.uint8)
    lost = threading.Event()
    device.when_lost(lambda _error: lost.set())
    with ThreadPoolExecutor(1) as pool, simulator.held():
        copying = pool.submit(region.gather, side, 0, total_segments(side), got.ctypes.data, copy_one_by_one)
        simulator.wait_until_pending(1)
        with pytest.raises(DeviceLostError, match=r"not done after 5 s|has not returned"):
            copying.result(WAIT_S)
    assert lost.wait(WAIT_S)
    DEVICE.synchronize()


@pytest.fixture(autouse=True)
def _nothing_is_held(simulator: Simulator) -> Iterator[None]:
    yield
    simulator.release()

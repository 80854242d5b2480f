"""Another process's events, seen from the daemon: done when they are, counted as often as they were recorded."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.daemon.services.event_rings import DeviceEvents
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.errors import KvferryError
from tests.cann_simulator.child import Child
from tests.cann_simulator.simulator import Simulator
from tests.kit.devices import DEVICE

COUNT = 3
WAIT_S = 30.0

PREPARED = f"""
from kvferry.pools.devices.npu import NpuVendor
vendor = NpuVendor(); vendor.load()
x = torch.zeros(1 << 16, device="npu")
made = [vendor.shared_event() for _ in range({COUNT})]
events, handles = [one for one, _ in made], [one for _, one in made]
def record(slot):
    x.add_(1); events[slot].record()
    torch.npu.current_stream().query()  # what was given to the stream before has been launched
torch.npu.synchronize()
result = [one.hex() for one in handles]
"""


class Ring:
    """A ring as the daemon has it: counters that an engine raises, and events that it records."""

    def __init__(self, engine: Child, handles: list[bytes]) -> None:
        self.engine = engine
        self.region = HostRegion.create("ring", 8 * COUNT)
        self.counters = self.region.view().view(np.int64)
        self.events = DeviceEvents(DEVICE.accelerator, handles)
        self.seen: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        self.events.start(self.region, lambda: self.seen.put(self.events.reached()))

    def record(self, slot: int) -> None:
        """Let the engine record an event, and say so."""
        self.engine.do(f"record({slot})")
        self.counters[slot] += 1
        self.events.wake()

    def next(self) -> list[int]:
        """Return what was reached when it was next looked at with news."""
        return self.seen.get(timeout=WAIT_S)

    def until(self, *reached: int) -> None:
        """Return once so much is reached."""
        while self.events.reached() != list(reached):
            self.next()


@pytest.fixture(scope="module")
def engine(simulator: Simulator) -> Iterator[Child]:
    """Return an engine's process."""
    with Child(simulator) as one:
        yield one


@pytest.fixture
def ring(engine: Child) -> Iterator[Ring]:
    """Return a new ring."""
    one = Ring(engine, [bytes.fromhex(text) for text in engine.do(PREPARED)])
    yield one
    one.events.close()


def test_nothing_is_reached_before_it_is_recorded(ring: Ring) -> None:
    assert ring.events.reached() == [0] * COUNT
    assert ring.events.slots == COUNT
    ring.events.wake()
    assert ring.seen.empty()
    assert "reached=0" in repr(ring.events)


def test_what_is_done_is_told(ring: Ring) -> None:
    ring.record(1)
    ring.until(0, 1, 0)
    ring.record(1)
    ring.record(2)
    ring.until(0, 2, 1)
    assert "reached=3" in repr(ring.events)


def test_what_is_recorded_and_not_done_is_not_told(ring: Ring, simulator: Simulator) -> None:
    with simulator.held(process=ring.engine.process.pid):
        ring.record(0)
        with pytest.raises(queue.Empty):
            ring.seen.get(timeout=0.2)
        assert ring.events.reached() == [0, 0, 0]
    ring.until(1, 0, 0)


def test_an_event_recorded_again_before_it_was_seen_counts_for_both(ring: Ring, simulator: Simulator) -> None:
    with simulator.held(process=ring.engine.process.pid):
        for _ in range(3):
            ring.record(2)
        assert ring.events.reached() == [0, 0, 0]
    ring.until(0, 0, 3)


def test_after_closing_nothing_is_told(ring: Ring) -> None:
    ring.record(0)
    ring.until(1, 0, 0)
    watching = [one for one in threading.enumerate() if one.name == "events"]
    assert watching
    ring.events.close()
    for thread in watching:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    ring.record(0)
    assert ring.events.reached() == [1, 0, 0]


@pytest.mark.parametrize("handle", [b"", b"junk", bytes(64), b"\xff" * 512])
def test_a_handle_that_is_none_costs_nobody_the_device(handle: bytes) -> None:
    with pytest.raises(KvferryError):
        DeviceEvents(DEVICE.accelerator, [handle])
    assert DEVICE.accelerator.lost is None

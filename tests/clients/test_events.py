"""An engine's event ring: steps, recording them, and transfers of a real daemon that wait for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

import numpy as np
import pytest

from kvferry.clients import Client, Transfer, calls, new_request_id, pages
from kvferry.clients.events import COUNTER_BYTES, EventRing
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.base import DeviceEvent
from kvferry.protocol.errors import ClientClosedError, InvalidFieldError
from kvferry.protocol.ids import MAIN
from kvferry.protocol.limits import EVENT_RING_SLOTS
from tests.kit.daemons import Daemon
from tests.kit.pools import SPEC

COUNT = 3


class Memory:
    """A ring's memory as the daemon sees it."""

    def __init__(self) -> None:
        self.region = HostRegion.create("ring", EVENT_RING_SLOTS * COUNTER_BYTES)
        self.eventfd = os.eventfd(0, os.EFD_NONBLOCK)

    def ring(self) -> EventRing:
        """Return an engine's end, with descriptors of its own."""
        region = HostRegion(os.dup(self.region.fd), self.region.size_bytes)
        return EventRing(region, os.dup(self.eventfd))

    @property
    def counters(self) -> list[int]:
        """Return the counters."""
        values: list[int] = self.region.view().view(np.int64).tolist()
        return values

    def wake_ups(self) -> int:
        """Return how often the daemon was woken since the last look."""
        try:
            return os.eventfd_read(self.eventfd)
        except BlockingIOError:
            return 0


@pytest.fixture
def memory() -> Iterator[Memory]:
    """Return a ring that nobody has used."""
    one = Memory()
    yield one
    one.region.close()
    os.close(one.eventfd)


# -- steps


def test_recording_stores_the_value_and_then_wakes_the_daemon(memory: Memory) -> None:
    with memory.ring() as ring:
        first, second = ring.step(0, 1), ring.step(1, 1)
        assert memory.wake_ups() == 0
        ring.record(second)
        assert (memory.counters[first.event], memory.counters[second.event]) == (0, second.value)
        assert memory.wake_ups() == 1
        ring.record(first)
        assert memory.counters[first.event] == first.value
        assert memory.wake_ups() == 1
        assert repr(ring) == "<EventRing steps=2 recorded=2>"
        with pytest.raises(InvalidFieldError, match="is at 1"):
            ring.record(first)


def test_events_are_used_again_with_a_higher_value(memory: Memory) -> None:
    with memory.ring() as ring:
        first = [ring.step(0, 1) for _ in range(EVENT_RING_SLOTS)]
        assert len({one.event for one in first}) == EVENT_RING_SLOTS
        again = ring.step(0, 1)
        assert (again.event, again.value) == (first[0].event, first[0].value + 1)
        with pytest.raises(InvalidFieldError, match="is at 0, the step's value is 2"):
            ring.record(again)
        assert memory.wake_ups() == 0
        ring.record(first[0])
        ring.record(again)
        assert memory.counters[again.event] == again.value


@pytest.mark.parametrize("event", [-1, EVENT_RING_SLOTS])
def test_a_step_of_another_ring_is_refused(memory: Memory, event: int) -> None:
    with memory.ring() as ring, pytest.raises(InvalidFieldError, match="no event") as caught:
        ring.record(DeviceEvent(event=event, value=1))
    assert caught.value.field == "step"
    assert memory.counters == [0] * EVENT_RING_SLOTS


def test_a_ring_opened_again_gives_no_step_that_is_ready_already(memory: Memory) -> None:
    with memory.ring() as ring:
        ring.record(ring.step(0, 1))
    with memory.ring() as again:
        step = again.step(0, 1)
        assert step.value > memory.counters[step.event]
        again.record(step)


def test_a_closed_ring_records_nothing(memory: Memory) -> None:
    ring = memory.ring()
    step = ring.step(0, 1)
    ring.close()
    ring.close()
    with pytest.raises(ClientClosedError, match="the event ring was closed"):
        ring.record(step)
    assert memory.counters[step.event] == 0
    assert memory.wake_ups() == 0


# -- with a daemon


class Sides:
    """A prefill and a decode client, their pools, prefill's ring and a step of it that all layers wait for."""

    def __init__(self, daemon: Daemon, name: str) -> None:
        self.source, self.destination = f"{name}-send", f"{name}-receive"
        self.prefill = Client.connect(daemon.runtime_dir, name="prefill")
        self.decode = Client.connect(daemon.runtime_dir, name="decode")
        for one in (self.source, self.destination):
            self.prefill.create_pool(one, SPEC)
        self.ring = self.prefill.open_events()
        self.step = self.ring.step(SPEC.first_layer, SPEC.layers)
        self.request_id = new_request_id()

    def send(self, client: Client | None = None) -> Transfer:
        """SEND, all layers with the step; the daemon has it when this returns."""
        one = client or self.prefill
        lists = [pages(one.allocate(self.source, COUNT))]
        transfer = one.send(self.source, self.request_id, lists, steps=[self.step])
        one.ping()
        return transfer

    def receive(self, after: DeviceEvent | None = None) -> Transfer:
        """RECEIVE; the daemon has it when this returns."""
        lists = [pages(self.decode.allocate(self.destination, COUNT))]
        transfer = self.decode.receive(self.destination, self.request_id, lists, after=after)
        self.decode.ping()
        return transfer

    def states(self) -> list[tuple[str, str]]:
        """Return the direction and state of the request's live sides."""
        live = (one for one in self.decode.status().transfers if one.request_id == self.request_id)
        return sorted((one.direction, one.state) for one in live)

    def close(self) -> None:
        """End both sessions."""
        self.ring.close()
        self.prefill.close()
        self.decode.close()


BOTH_OPEN: Final = [("receive", "open"), ("send", "open")]


@pytest.fixture
def sides(daemon: Daemon, name: str) -> Iterator[Sides]:
    """Return two clients of one daemon."""
    with contextlib.closing(Sides(daemon, name)) as both:
        yield both


def test_a_transfer_is_made_only_once_its_pages_are_in_use_no_more(sides: Sides) -> None:
    with sides.decode.open_events() as ring:
        point = ring.event()
        transfer = sides.receive(after=point)
        sides.ring.record(sides.step)  # before its SEND: it is ready at once
        sides.send()
        assert sides.states() == [("send", "open")], "the sender alone: it waits for a transfer"
        ring.record(point)
        assert sides.decode.wait_finished(transfer).error is None


def test_pages_are_free_only_once_they_are_in_use_no_more(sides: Sides) -> None:
    def free() -> int:
        return next(one.free for one in sides.decode.status().pools if one.pool == sides.destination)

    with sides.decode.open_events() as ring:
        point, ids, before = ring.event(), sides.decode.allocate(sides.destination, COUNT), free()
        pending = sides.decode.begin(calls.free(sides.destination, ids, MAIN, point))
        assert free() == before
        assert not sides.decode.is_ready(pending)
        ring.record(point)
        assert sides.decode.wait(pending).freed == COUNT


def test_a_point_that_nobody_can_reach_is_refused(sides: Sides) -> None:
    ids = sides.decode.allocate(sides.destination, COUNT)
    with pytest.raises(InvalidFieldError, match="OPEN_EVENTS first"):
        sides.decode.free(sides.destination, ids, after=DeviceEvent(event=EVENT_RING_SLOTS - 1, value=1))
    assert sides.decode.free(sides.destination, ids).freed == COUNT
    with pytest.raises(InvalidFieldError) as caught:
        sides.decode.wait_finished(sides.send(sides.decode))  # which has opened no ring
    assert caught.value.field == "steps"


@pytest.mark.parametrize("wild", [-(1 << 63), 0])
def test_wild_counters_start_nothing(sides: Sides, wild: int) -> None:
    sides.ring.counters[:] = wild
    os.eventfd_write(sides.ring.fileno(), 1)
    sides.send()
    transfer = sides.receive()
    os.eventfd_write(sides.ring.fileno(), 1)
    assert sides.states() == BOTH_OPEN
    sides.ring.counters[:] = (1 << 63) - 1
    os.eventfd_write(sides.ring.fileno(), 1)
    assert sides.decode.wait_finished(transfer).error is None


def test_a_session_that_dies_after_its_last_store_has_sent_all(sides: Sides) -> None:
    sides.send()
    transfer = sides.receive()
    sides.ring.counters[sides.step.event] = sides.step.value  # it dies before the wake-up
    sides.prefill.close()
    assert sides.decode.wait_finished(transfer).error is None

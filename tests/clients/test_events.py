"""An engine's event ring: steps, recording them, and transfers of a real daemon that wait for it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.clients import Client, calls, new_request_id, pages
from kvferry.clients.events import COUNTER_BYTES, EventRing
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.base import DeviceEvent
from kvferry.protocol.errors import ClientClosedError, InvalidFieldError
from kvferry.protocol.ids import MAIN
from kvferry.protocol.limits import EVENT_RING_SLOTS
from kvferry.protocol.transfer_messages import LayerStep
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


@pytest.fixture
def pool(client: Client, name: str) -> str:
    """Return a pool's name."""
    client.create_pool(name, SPEC)
    return name


def test_a_transfer_is_made_only_once_its_pages_are_in_use_no_more(client: Client, pool: str) -> None:
    request_id = new_request_id()
    with client.open_events() as ring:
        point, step = ring.event(), ring.step(SPEC.first_layer, SPEC.layers)
        received = client.receive(pool, request_id, [pages(client.allocate(pool, COUNT))], after=point)
        ring.record(step)  # before its SEND: it is ready at once
        client.send(pool, request_id, [pages(client.allocate(pool, COUNT))], steps=[step])
        live = [one.direction for one in client.status().transfers if one.request_id == request_id]
        assert live == ["send"], "the sender alone: it waits for a transfer"
        ring.record(point)
        assert client.wait_finished(received).error is None


def test_pages_are_free_only_once_they_are_in_use_no_more(client: Client, pool: str) -> None:
    def free() -> int:
        return next(one.free for one in client.status().pools if one.pool == pool)

    with client.open_events() as ring:
        point, ids, before = ring.event(), client.allocate(pool, COUNT), free()
        pending = client.begin(calls.free(pool, ids, MAIN, point))
        assert free() == before
        assert not client.is_ready(pending)
        ring.record(point)
        assert client.wait(pending).freed == COUNT


def test_a_point_that_nobody_can_reach_is_refused(client: Client, pool: str) -> None:
    ids = client.allocate(pool, COUNT)
    with pytest.raises(InvalidFieldError, match="OPEN_EVENTS first"):
        client.free(pool, ids, after=DeviceEvent(event=EVENT_RING_SLOTS - 1, value=1))
    step = LayerStep(first_layer=SPEC.first_layer, layers=SPEC.layers, event=0, value=1)
    with pytest.raises(InvalidFieldError) as caught:
        client.wait_finished(client.send(pool, new_request_id(), [pages(ids)], steps=[step]))
    assert caught.value.field == "steps"
    assert client.free(pool, ids).freed == COUNT

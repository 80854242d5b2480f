"""An engine's event ring: steps, recording them, and transfers of a real daemon that wait for it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.clients import Client, MhaSpec, Pages, Transfer, calls, new_request_id, pages
from kvferry.clients.events import COUNTER_BYTES, EventRing
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.base import DeviceEvent
from kvferry.protocol.errors import ClientClosedError, InvalidFieldError, PeerLostError
from kvferry.protocol.ids import MAIN
from kvferry.protocol.limits import EVENT_RING_SLOTS
from kvferry.protocol.transfer_messages import LayerStep
from tests.daemons import DaemonProcess
from tests.devices import DEVICE

pytestmark = pytest.mark.any_device

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


def test_a_step_waits_for_an_event_of_its_own(memory: Memory) -> None:
    with memory.ring() as ring:
        steps = [ring.step(layer, 2) for layer in range(0, 6, 2)]
    assert [(one.first_layer, one.layers) for one in steps] == [(0, 2), (2, 2), (4, 2)]
    assert len({(one.event, one.value) for one in steps}) == 3
    assert not any(memory.counters)


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


def test_events_are_used_again_with_a_higher_value(memory: Memory) -> None:
    with memory.ring() as ring:
        first = [ring.step(0, 1) for _ in range(EVENT_RING_SLOTS)]
        again = ring.step(0, 1)
        assert (again.event, again.value) == (first[0].event, first[0].value + 1)
        with pytest.raises(InvalidFieldError, match="is at 0, the step's value is 2"):
            ring.record(again)
        assert memory.wake_ups() == 0
        ring.record(first[0])
        ring.record(again)
        assert memory.counters[again.event] == again.value


def test_recording_twice_is_refused(memory: Memory) -> None:
    with memory.ring() as ring:
        step = ring.step(0, 1)
        ring.record(step)
        with pytest.raises(InvalidFieldError, match="is at 1"):
            ring.record(step)
        assert memory.counters[step.event] == 1


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
    """A prefill and a decode client and their pools."""

    def __init__(self, daemon: DaemonProcess, name: str, spec: MhaSpec) -> None:
        self.names = (f"{name}-send", f"{name}-receive")
        self.prefill = Client.connect(daemon.runtime_dir, name="prefill")
        self.decode = Client.connect(daemon.runtime_dir, name="decode")
        for one in self.names:
            self.prefill.create_pool(one, spec, device=DEVICE.name)

    def lists(self, client: Client, name: str) -> list[Pages]:
        """Allocate pages and name them."""
        return [pages(client.allocate(name, COUNT))]

    def send(self, request_id: str, steps: tuple[LayerStep, ...]) -> Transfer:
        """SEND in steps; the daemon has it when this returns."""
        lists = self.lists(self.prefill, self.names[0])
        send_request = self.prefill.send(self.names[0], request_id, lists, steps=steps)
        self.prefill.ping()
        return send_request

    def receive(self, request_id: str) -> Transfer:
        """RECEIVE; the daemon has it when this returns."""
        lists = self.lists(self.decode, self.names[1])
        transfer = self.decode.receive(self.names[1], request_id, lists)
        self.decode.ping()
        return transfer

    def states(self, request_id: str) -> list[str]:
        """Return the states of the request's live sides."""
        return [one.state for one in self.decode.status().transfers if one.request_id == request_id]


@pytest.fixture
def sides(daemon: DaemonProcess, name: str, spec: MhaSpec) -> Iterator[Sides]:
    """Return two clients of one daemon."""
    both = Sides(daemon, name, spec)
    yield both
    both.prefill.close()
    both.decode.close()


def test_a_transfer_ends_with_its_last_step(sides: Sides, spec: MhaSpec) -> None:
    request_id = new_request_id()
    with sides.prefill.open_events() as ring:
        steps = tuple(ring.step(layer, 1) for layer in range(spec.first_layer, spec.first_layer + spec.layers))
        sides.send(request_id, steps)
        transfer = sides.receive(request_id)
        ring.record(steps[0])
        (waiting,) = [
            one for one in sides.decode.status().transfers if one.request_id == request_id and one.direction == "send"
        ]
        assert waiting.state == "open"
        ring.record(steps[1])
        done = sides.decode.wait_finished(transfer)
        assert done.error is None
        sides.decode.wait_settled(transfer)


def test_steps_recorded_before_the_send_are_ready_at_once(sides: Sides, spec: MhaSpec) -> None:
    request_id = new_request_id()
    with sides.prefill.open_events() as ring:
        step = ring.step(spec.first_layer, spec.layers)
        ring.record(step)
        sides.send(request_id, (step,))
        transfer = sides.receive(request_id)
        assert sides.decode.wait_finished(transfer).error is None


def test_a_transfer_is_made_only_once_its_pages_are_in_use_no_more(sides: Sides, spec: MhaSpec) -> None:
    request_id = new_request_id()
    with sides.decode.open_events() as ring:
        point = ring.event()
        lists = sides.lists(sides.decode, sides.names[1])
        transfer = sides.decode.receive(sides.names[1], request_id, lists, after=point)
        with sides.prefill.open_events() as filled:
            step = filled.step(spec.first_layer, spec.layers)
            filled.record(step)
            sides.send(request_id, (step,))
        assert sides.states(request_id) == ["open"], "the sender alone: it waits for a transfer"
        ring.record(point)
        assert sides.decode.wait_finished(transfer).error is None


def test_pages_are_free_only_once_they_are_in_use_no_more(sides: Sides) -> None:
    name = sides.names[1]
    with sides.decode.open_events() as ring:
        point = ring.event()
        ids = sides.decode.allocate(name, COUNT)
        free = {one.pool: one.free for one in sides.decode.status().pools}[name]
        pending = sides.decode.begin(calls.free(name, ids, MAIN, point))
        assert {one.pool: one.free for one in sides.decode.status().pools}[name] == free
        assert not sides.decode.is_ready(pending)
        ring.record(point)
        assert sides.decode.wait(pending).freed == COUNT


def test_a_point_that_nobody_can_reach_is_refused(sides: Sides) -> None:
    ids = sides.decode.allocate(sides.names[1], COUNT)
    last = DeviceEvent(event=EVENT_RING_SLOTS - 1, value=1)
    with pytest.raises(InvalidFieldError, match="OPEN_EVENTS first"):
        sides.decode.free(sides.names[1], ids, after=last)
    assert sides.decode.free(sides.names[1], ids).freed == COUNT


def test_steps_without_a_ring_are_refused(sides: Sides) -> None:
    send_request = sides.send(new_request_id(), (LayerStep(first_layer=0, layers=1, event=0, value=1),))
    with pytest.raises(InvalidFieldError) as caught:
        sides.prefill.wait_finished(send_request)
    assert caught.value.field == "steps"


def test_a_ring_may_be_opened_twice(sides: Sides, spec: MhaSpec) -> None:
    first = sides.prefill.open_events()
    first.record(first.step(0, 1))
    second = sides.prefill.open_events()
    request_id = new_request_id()
    step = second.step(spec.first_layer, spec.layers)
    sides.send(request_id, (step,))
    transfer = sides.receive(request_id)
    assert sides.states(request_id) == ["open", "open"]
    second.record(step)
    assert sides.decode.wait_finished(transfer).error is None
    first.close()
    second.close()


@pytest.mark.parametrize("wild", [-1, -(1 << 63), 0])
def test_wild_counters_start_nothing(sides: Sides, spec: MhaSpec, wild: int) -> None:
    request_id = new_request_id()
    with sides.prefill.open_events() as ring:
        step = ring.step(spec.first_layer, spec.layers)
        ring.counters[:] = wild
        os.eventfd_write(ring.fileno(), 1)
        sides.send(request_id, (step,))
        transfer = sides.receive(request_id)
        os.eventfd_write(ring.fileno(), 1)
        assert sides.states(request_id) == ["open", "open"]
        ring.counters[:] = (1 << 63) - 1
        os.eventfd_write(ring.fileno(), 1)
        assert sides.decode.wait_finished(transfer).error is None


def test_a_lost_session_takes_its_unready_steps_with_it(daemon: DaemonProcess, sides: Sides, spec: MhaSpec) -> None:
    request_id = new_request_id()
    ring = sides.prefill.open_events()
    step = ring.step(spec.first_layer, spec.layers)
    sides.send(request_id, (step,))
    transfer = sides.receive(request_id)
    sides.prefill.close()
    with pytest.raises(PeerLostError):
        sides.decode.wait_finished(transfer)
    ring.record(step)  # nobody listens any more: it harms nobody
    ring.close()
    with Client.connect(daemon.runtime_dir) as client:
        client.ping()


def test_a_session_that_dies_after_its_last_store_has_sent_all(sides: Sides, spec: MhaSpec) -> None:
    request_id = new_request_id()
    ring = sides.prefill.open_events()
    step = ring.step(spec.first_layer, spec.layers)
    sides.send(request_id, (step,))
    transfer = sides.receive(request_id)
    ring.counters[step.event] = step.value  # it dies before the wake-up
    sides.prefill.close()
    assert sides.decode.wait_finished(transfer).error is None
    ring.close()

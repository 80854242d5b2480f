"""Event rings; and a name or number means what its maker meant, or is refused: in another session, of another pool."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.clients import Client, calls, new_request_id, pages
from kvferry.clients.events import COUNTER_BYTES, EventRing
from kvferry.clients.tables import Tables
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.base import DeviceEvent
from kvferry.protocol.errors import ClientClosedError, InvalidFieldError, PoolLostError, UnknownTablesError
from kvferry.protocol.ids import MAIN
from kvferry.protocol.limits import EVENT_RING_SLOTS
from kvferry.protocol.transfer_messages import LayerStep
from tests.kit.daemons import Daemon
from tests.kit.pools import SPEC


@pytest.fixture
def second(daemon: Daemon) -> Iterator[Client]:
    """Return the session of an instance's scheduler, beside its worker's."""
    with Client.connect(daemon.runtime_dir, name="scheduler", instance="engine") as one:
        yield one


def made_again(engine: Client, other: Client, name: str) -> None:
    """Let an engine attach a pool that another one then deletes and makes again."""
    engine.create_pool(name, SPEC)
    other.delete_pool(name)
    other.create_pool(name, SPEC)


def test_an_engine_that_maps_the_pool_of_before_is_refused(client: Client, other: Client, name: str) -> None:
    """Neither does it take pages of the new one, nor delete it, nor send of it."""
    made_again(client, other, name)
    theirs = other.allocate(name, 1)
    for call in (
        lambda: client.allocate(name, 1),
        lambda: client.delete_pool(name),
        lambda: client.wait_finished(client.send(name, new_request_id(), [pages(theirs)])),
    ):
        with pytest.raises(PoolLostError, match="made again"):
            call()
    client.attach_pool(name)
    client.free(name, client.allocate(name, 1))
    other.free(name, theirs)
    other.delete_pool(name)


def test_a_worker_that_has_ended_refuses_nothing(daemon: Daemon, second: Client, other: Client) -> None:
    with Client.connect(daemon.runtime_dir, instance="engine") as worker:
        made_again(worker, other, "ended")
    second.free("ended", second.allocate("ended", 1))
    other.delete_pool("ended")


@pytest.fixture
def pool(client: Client, name: str) -> str:
    client.create_pool(name, SPEC)
    return name


def test_a_step_of_another_sessions_ring_is_neither_recorded_nor_waited_for(
    client: Client, other: Client, pool: str
) -> None:
    ids = client.allocate(pool, 1)
    with client.open_events() as ours, other.open_events() as theirs:
        ours.record(ours.step(0, 2))
        step = theirs.step(0, 2)  # its number is that of ours
        with pytest.raises(InvalidFieldError, match="of another ring"):
            ours.record(step)
        transfer = client.send(pool, new_request_id(), [pages(ids)], steps=[step])
        with pytest.raises(InvalidFieldError, match="another event ring") as caught:
            client.wait_finished(transfer)
    assert caught.value.field == "steps"


def test_a_ring_that_is_opened_twice_makes_no_event_twice(client: Client) -> None:
    with client.open_events() as first:
        before = first.event()
        with client.open_events() as second:
            assert second.event() != before
    with client.open_events() as third:
        events = [third.record_event() for _ in range(EVENT_RING_SLOTS)]  # the slot that is never reached is left out
        assert before.event not in {one.event for one in events}


def tables(engine: Client, pool: str) -> Tables:
    """Return tables of a name that another session uses as well."""
    return engine.create_tables("graph", pool, max_batch=2, max_context_tokens=64)


def test_tables_of_another_session_are_not_taken_for_ours_of_that_name(
    client: Client, other: Client, pool: str
) -> None:
    ours, theirs = tables(client, pool), tables(other, pool)
    with pytest.raises(UnknownTablesError, match="another session's"):
        client.update_tables(theirs, [16])
    with pytest.raises(UnknownTablesError, match="another session's"), client.batched() as step:
        step.update_tables(theirs, [16])
    with pytest.raises(UnknownTablesError, match="another session's"):
        client.delete_tables(theirs)
    client.wait(client.update_tables(ours, [4], rows={0: [1]}))
    other.wait(other.update_tables(theirs, [3], rows={0: [1]}))
    client.delete_tables(ours)
    other.delete_tables(theirs)


def test_tables_that_were_made_again_are_not_those_of_before(client: Client, pool: str) -> None:
    before = tables(client, pool)
    client.delete_tables(before)
    again = tables(client, pool)
    with pytest.raises(UnknownTablesError, match="were deleted"):
        client.update_tables(before, [16])
    client.delete_tables(again)


def test_recording_stores_the_value_and_then_wakes_the_daemon(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    with client.open_events() as ring:
        monkeypatch.setattr(os, "eventfd_write", lambda *_: seen.append(ring.counters.tolist()))
        first, second = ring.step(0, 1), ring.step(1, 1)
        ring.record(second)
        assert (ring.counters[first.event], ring.counters[second.event]) == (0, second.value)
        assert seen == [ring.counters.tolist()]
        ring.record(first)
        assert ring.counters[first.event] == first.value
        assert len(seen) == 2


def test_events_are_used_again_with_a_higher_value(client: Client) -> None:
    with client.open_events() as ring:
        first = [ring.step(0, 1) for _ in range(EVENT_RING_SLOTS)]
        assert len({one.event for one in first}) == EVENT_RING_SLOTS
        again = ring.step(0, 1)
        assert (again.event, again.value) == (first[0].event, first[0].value + 1)
        with pytest.raises(InvalidFieldError, match="is at 0, the step's value is 2"):
            ring.record(again)
        assert not ring.counters.any()
        ring.record(first[0])
        ring.record(again)
        assert ring.counters[again.event] == again.value


def test_a_ring_that_another_process_has_used_gives_no_step_that_is_ready_already() -> None:
    region = HostRegion.create("ring", EVENT_RING_SLOTS * COUNTER_BYTES)
    region.view().view(np.int64)[:] = 3
    with EventRing(region, os.eventfd(0)) as ring:
        assert {ring.event().value for _ in range(EVENT_RING_SLOTS)} == {4}


def test_a_closed_ring_records_nothing(client: Client) -> None:
    ring = client.open_events()
    step = ring.step(0, 1)
    ring.close()
    ring.close()
    with pytest.raises(ClientClosedError, match="the event ring was closed"):
        ring.record(step)
    assert not ring.counters.any()


def test_a_transfer_is_made_only_once_its_pages_are_in_use_no_more(client: Client, pool: str) -> None:
    request_id = new_request_id()
    with client.open_events() as ring:
        point, step = ring.event(), ring.step(SPEC.first_layer, SPEC.layers)
        received = client.receive(pool, request_id, [pages(client.allocate(pool, 3))], after=point)
        ring.record(step)  # before its SEND: it is ready at once
        client.send(pool, request_id, [pages(client.allocate(pool, 3))], steps=[step])
        live = [one.direction for one in client.status().transfers if one.request_id == request_id]
        assert live == ["send"], "the sender alone: it waits for a transfer"
        ring.record(point)
        assert client.wait_finished(received).error is None


def test_pages_are_free_only_once_they_are_in_use_no_more(client: Client, pool: str) -> None:
    def free() -> int:
        return next(one.free for one in client.status().pools if one.pool == pool)

    with client.open_events() as ring:
        point, ids, before = ring.event(), client.allocate(pool, 3), free()
        pending = client.begin(calls.free(pool, ids, MAIN, point))
        assert free() == before
        assert not client.is_ready(pending)
        ring.record(point)
        assert client.wait(pending).freed == 3


def test_a_point_that_nobody_can_reach_is_refused(client: Client, pool: str) -> None:
    ids = client.allocate(pool, 3)
    with pytest.raises(InvalidFieldError, match="OPEN_EVENTS first"):
        client.free(pool, ids, after=DeviceEvent(event=EVENT_RING_SLOTS - 1, value=1))
    step = LayerStep(first_layer=SPEC.first_layer, layers=SPEC.layers, event=0, value=1)
    with pytest.raises(InvalidFieldError) as caught:
        client.wait_finished(client.send(pool, new_request_id(), [pages(ids)], steps=[step]))
    assert caught.value.field == "steps"
    assert client.free(pool, ids).freed == 3

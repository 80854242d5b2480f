"""A name, number or cursor means what its maker meant, or is refused: in another session, of another pool or boot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from kvferry.clients import Client, MhaSpec, new_request_id, pages
from kvferry.clients.tables import Tables
from kvferry.protocol.errors import InvalidFieldError, PoolLostError, UnknownTablesError
from kvferry.protocol.limits import EVENT_RING_SLOTS
from tests.kit.daemons import Daemon
from tests.kit.devices import DEVICE

pytestmark = pytest.mark.any_device

SPEC: Final = MhaSpec(layers=2, tokens=64, page_size=16, kv_heads=1, head_dim=8, dtype="float16")


@pytest.fixture
def second(daemon: Daemon) -> Iterator[Client]:
    """Return another session of ``first``'s instance."""
    with Client.connect(daemon.runtime_dir, name="scheduler", instance="engine") as one:
        yield one


@pytest.fixture
def first(daemon: Daemon) -> Iterator[Client]:
    """Return the session of an instance's worker."""
    with Client.connect(daemon.runtime_dir, name="worker", instance="engine") as one:
        yield one


# -- pools


def made_again(engine: Client, other: Client, name: str) -> None:
    """Let an engine attach a pool that another one then deletes and makes again."""
    engine.create_pool(name, SPEC, device=DEVICE.name)
    other.delete_pool(name)
    other.create_pool(name, SPEC, device=DEVICE.name)


def test_an_engine_that_maps_the_pool_of_before_is_refused(client: Client, other: Client) -> None:
    made_again(client, other, "again")
    with pytest.raises(PoolLostError, match="made again"):
        client.allocate("again", 1)
    client.attach_pool("again")
    client.free("again", client.allocate("again", 1))
    other.delete_pool("again")


def test_an_engine_that_maps_the_pool_of_before_does_not_delete_the_new_one(client: Client, other: Client) -> None:
    made_again(client, other, "kept")
    with pytest.raises(PoolLostError, match="made again"):
        client.delete_pool("kept")
    other.delete_pool("kept")


def test_pages_of_the_pool_of_before_are_not_sent(client: Client, other: Client) -> None:
    made_again(client, other, "sent")
    theirs = other.allocate("sent", 1)
    transfer = client.send("sent", new_request_id(), [pages(theirs)])
    with pytest.raises(PoolLostError, match="made again"):
        client.wait_finished(transfer)
    other.free("sent", theirs)
    other.delete_pool("sent")


def test_a_scheduler_that_maps_nothing_is_refused_while_its_worker_maps_the_pool_of_before(
    first: Client, second: Client, other: Client
) -> None:
    made_again(first, other, "worker")
    with pytest.raises(PoolLostError, match="'worker' of process"):
        second.allocate("worker", 1)
    first.attach_pool("worker")
    second.free("worker", second.allocate("worker", 1))
    other.delete_pool("worker")


def test_a_worker_that_has_ended_refuses_nothing(daemon: Daemon, second: Client, other: Client) -> None:
    with Client.connect(daemon.runtime_dir, instance="engine") as worker:
        made_again(worker, other, "ended")
    second.free("ended", second.allocate("ended", 1))
    other.delete_pool("ended")


# -- events


@pytest.fixture
def pool(client: Client, name: str) -> Iterator[str]:
    """Return the name of a pool that is there for a test."""
    client.create_pool(name, SPEC, device=DEVICE.name)
    yield name
    for ids in client.owned_pages(name).values():
        if len(ids):
            client.free(name, ids)
    client.delete_pool(name)


def test_pages_do_not_go_out_by_a_step_of_another_sessions_ring(client: Client, other: Client, pool: str) -> None:
    ids = client.allocate(pool, 1)
    with client.open_events() as ours, other.open_events() as theirs:
        ours.record(ours.step(0, 2))
        step = theirs.step(0, 2)  # it is not recorded, and its number is that of ours
        transfer = client.send(pool, new_request_id(), [pages(ids)], steps=[step])
        with pytest.raises(InvalidFieldError, match="another event ring") as caught:
            client.wait_finished(transfer)
    assert caught.value.field == "steps"


def test_pages_are_not_freed_by_an_event_of_another_sessions_ring(client: Client, other: Client, pool: str) -> None:
    ids = client.allocate(pool, 1)
    with client.open_events() as ours, other.open_events() as theirs:
        ours.record_event()
        with pytest.raises(InvalidFieldError, match="another event ring") as caught:
            client.free(pool, ids, after=theirs.event())
    assert caught.value.field == "after.event"


def test_a_ring_records_no_step_of_another_sessions_ring(client: Client, other: Client) -> None:
    with client.open_events() as ours, other.open_events() as theirs:
        ours.step(0, 2)
        with pytest.raises(InvalidFieldError, match="of another ring"):
            ours.record(theirs.step(0, 2))


def test_a_ring_that_is_opened_twice_makes_no_event_twice(client: Client) -> None:
    with client.open_events() as first:
        before = first.event()
        with client.open_events() as second:
            assert second.event() != before
    with client.open_events() as third:
        events = [third.record_event() for _ in range(EVENT_RING_SLOTS)]  # the slot that is never reached is left out
        assert before.event not in {one.event for one in events}


# -- graph tables


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
    client.wait(client.update_tables(ours, [16], rows={0: [1]}))
    other.wait(other.update_tables(theirs, [9], rows={0: [1]}))
    client.delete_tables(ours)
    other.delete_tables(theirs)


def test_tables_that_were_made_again_are_not_those_of_before(client: Client, pool: str) -> None:
    before = tables(client, pool)
    client.delete_tables(before)
    again = tables(client, pool)
    with pytest.raises(UnknownTablesError, match="were deleted"):
        client.update_tables(before, [16])
    client.delete_tables(again)

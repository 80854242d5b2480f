"""A name, number or cursor means what its maker meant, or is refused: in another session, of another pool or boot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.clients import Client, new_request_id, pages
from kvferry.clients.tables import Tables
from kvferry.protocol.errors import InvalidFieldError, PoolLostError, UnknownTablesError
from kvferry.protocol.limits import EVENT_RING_SLOTS
from tests.kit.daemons import Daemon
from tests.kit.pools import SPEC


@pytest.fixture
def second(daemon: Daemon) -> Iterator[Client]:
    """Return another session of ``first``'s instance."""
    with Client.connect(daemon.runtime_dir, name="scheduler", instance="engine") as one:
        yield one


# -- pools


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


# -- events


@pytest.fixture
def pool(client: Client, name: str) -> str:
    """Return a pool's name."""
    client.create_pool(name, SPEC)
    return name


def test_pages_do_not_go_out_by_a_step_of_another_sessions_ring(client: Client, other: Client, pool: str) -> None:
    ids = client.allocate(pool, 1)
    with client.open_events() as ours, other.open_events() as theirs:
        ours.record(ours.step(0, 2))
        step = theirs.step(0, 2)  # it is not recorded, and its number is that of ours
        transfer = client.send(pool, new_request_id(), [pages(ids)], steps=[step])
        with pytest.raises(InvalidFieldError, match="another event ring") as caught:
            client.wait_finished(transfer)
    assert caught.value.field == "steps"


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

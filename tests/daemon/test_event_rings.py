"""Event rings of the daemon: what engines write to them wakes it, and nothing that they write harms it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvferry.clients import AsyncClient, EventRing, Transfer, calls, new_request_id, pages
from kvferry.clients.submitting import PendingReply
from kvferry.daemon.services import event_rings
from kvferry.protocol.base import DeviceEvent
from kvferry.protocol.errors import CancelledError, InvalidFieldError, OverloadedError
from kvferry.protocol.pool_messages import Freed
from tests.kit.in_process import client_of_one

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Let the daemon block where it ends: it waits for its own threads."""


@pytest.fixture
async def daemon(anyio_backend: object) -> AsyncIterator[tuple[AsyncClient, Path]]:  # noqa: ARG001  on the test's loop
    """Return a client that has a pool of 16 pages, and where it found its daemon."""
    async with client_of_one() as one:
        yield one


@pytest.fixture
def client(daemon: tuple[AsyncClient, Path]) -> AsyncClient:
    return daemon[0]


def write(ring: EventRing, *values: int) -> None:
    """Let the first counters hold these values, and wake the daemon."""
    ring.counters[: len(values)] = values
    os.eventfd_write(ring.fileno(), 1)


async def free_after(client: AsyncClient, event: int, value: int) -> PendingReply[Freed]:
    """Have a page freed once an event has a value; the daemon knows on return."""
    pending = client.begin(
        calls.free("pool", await client.allocate("pool", 1), "main", DeviceEvent(event=event, value=value))
    )
    await client.ping()
    return pending


async def test_who_waits_for_an_event_goes_on_once_it_is_reached_in_the_order_of_coming(
    daemon: tuple[AsyncClient, Path],
) -> None:
    client, path = daemon
    ring = await client.open_events()
    ring.counters[3] = 1
    waiting = [await free_after(client, event, value) for event, value in ((2, 1), (0, 1), (1, 2), (1, 3), (3, 1))]
    assert [client.is_ready(one) for one in waiting] == [False] * 4 + [True], "what need not wait goes on at once"
    async with await AsyncClient.connect(path) as other:
        write(await other.open_events(), 9, 9, 9)
        await other.ping()
    ring.counters[:3] = 1, 2, 1
    await client.ping()
    assert not client.is_ready(waiting[0]), "nobody said so"
    write(ring, 1, 2, 1)
    for one in waiting[:3]:
        assert (await client.wait(one)).freed == 1
    assert not client.is_ready(waiting[3])
    write(await client.open_events(), 1, 3, 1)  # it is the same ring
    assert (await client.wait(waiting[3])).freed == 1
    assert ring.counters[1] == 3


async def test_requests_that_wait_for_a_sessions_events_are_bounded(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_rings, "MAX_HELD", 2)
    ring = await client.open_events()
    never = ring.event()

    async def receive() -> Transfer:
        ids = await client.allocate("pool", 1)
        receiving = client.receive("pool", new_request_id(), [pages(ids)], after=never)
        await client.ping()
        return receiving

    first, second, third = [await receive() for _ in range(3)]
    with pytest.raises(OverloadedError, match="2 requests of the session wait"):
        await client.wait_finished(third)
    assert await client.allocate("pool", 1)
    for one in (first, second):
        assert not (await client.cancel(one)).was_finished
    with pytest.raises(CancelledError):
        await client.wait_finished(first)
    assert (await receive()).refused is None, "who is given up does not count"
    ring.record(never)
    await client.ping()
    assert len((await client.status()).transfers) == 1, "nobody makes a transfer of what was given up"


# -- an engine that means harm


async def test_hostile_values_are_read_as_they_are(client: AsyncClient) -> None:
    ring = await client.open_events()
    waiting = [await free_after(client, event, 1 << 61) for event in range(5)]
    write(ring, -1, -(1 << 63), (1 << 63) - 1, 1 << 62, 0)
    for number in (2, 3):
        await client.wait(waiting[number])
    assert [client.is_ready(waiting[number]) for number in (0, 1, 4)] == [False] * 3
    ring.counters[:] = -1
    os.eventfd_write(ring.fileno(), (1 << 64) - 2 - 1)
    await client.ping()
    ring.counters[:] = 1 << 61
    os.eventfd_write(ring.fileno(), 1)
    for number in (0, 1, 4):
        await client.wait(waiting[number])


def take_wake_ups(eventfd: int) -> int:
    """Return an eventfd's count, 0 where it is none; never wait."""
    count = bytearray(8)
    try:
        os.preadv(eventfd, [count], -1, os.RWF_NOWAIT)
    except BlockingIOError:
        return 0
    return int.from_bytes(count, sys.byteorder)


async def test_an_engine_that_takes_the_wake_up_back_does_not_stop_the_loop(client: AsyncClient) -> None:
    # The flag belongs to the open file, which both share: without care, the daemon would wait for the next wake-up.
    ring, waiting = await client.open_events(), await free_after(client, 0, 7)
    eventfd = ring.fileno()
    fcntl.fcntl(eventfd, fcntl.F_SETFL, fcntl.fcntl(eventfd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    taken: list[int] = []
    first = os.eventfd(0)
    asyncio.get_running_loop().add_reader(first, lambda: taken.append(take_wake_ups(eventfd)))
    await client.ping()  # from now on the loop watches both
    os.eventfd_write(first, 1)  # it sees both at once, this one before
    write(ring, 7)
    await client.wait(waiting)
    asyncio.get_running_loop().remove_reader(first)
    os.close(first)
    assert taken[0] == 1
    again = await free_after(client, 0, 8)
    write(ring, 8)
    await client.wait(again)


# -- the session is gone


async def test_a_last_look_is_taken_when_the_session_is_lost(daemon: tuple[AsyncClient, Path]) -> None:
    client, path = daemon
    request_id = new_request_id()
    async with await AsyncClient.connect(path) as dying:
        ring = await dying.open_events()
        step = ring.step(0, 2)
        dying.send("pool", request_id, [pages(await dying.allocate("pool", 2))], steps=[step])
        await dying.ping()
        ring.counters[step.event] = step.value  # it dies between the store and the wake-up
    receiving = client.receive("pool", request_id, [pages(await client.allocate("pool", 2))])
    assert (await client.wait_finished(receiving)).pages == 2
    refused = client.send("pool", new_request_id(), [pages(await client.allocate("pool", 1))], steps=[step])
    with pytest.raises(InvalidFieldError, match="OPEN_EVENTS first") as caught:
        await client.wait_finished(refused)
    assert caught.value.field == "steps"

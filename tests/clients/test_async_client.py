"""The asynchronous client against a real daemon, on uvloop and on asyncio's loop in debug mode."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import NamedTuple

import pytest

from kvferry.clients import AsyncClient, MhaSpec, new_request_id, pages
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import ClientClosedError, DaemonLostError, DeadlineError, InvalidFieldError
from tests.daemons import DaemonProcess, running_daemon
from tests.devices import DEVICE

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops, pytest.mark.any_device]
SOON_S = 10.0


class Engine(NamedTuple):
    """A client with a pool of its own name, and pages."""

    client: AsyncClient
    pool: str
    ids: PageIds


async def engine(daemon: DaemonProcess, name: str, spec: MhaSpec, count: int = 3) -> Engine:
    """Connect an engine; the caller closes its client."""
    client = await AsyncClient.connect(daemon.runtime_dir, name=name)
    await client.create_pool(name, spec, device=DEVICE.name)
    return Engine(client, name, await client.allocate(name, count))


@pytest.mark.parametrize("session", [False, True])
async def test_no_daemon(tmp_path: Path, *, session: bool) -> None:
    with pytest.raises(DaemonLostError, match="no daemon"):
        await AsyncClient.connect(tmp_path, session=session, timeout_s=0.1)


async def test_many_transfers_at_once(daemon: DaemonProcess, name: str, spec: MhaSpec) -> None:
    prefill, decode = await engine(daemon, name, spec), await engine(daemon, name + "-decode", spec, 12)

    async def transfer(number: int) -> int | None:
        request_id, ids = new_request_id(), decode.ids[number : number + 1]
        receiving = decode.client.receive(decode.pool, request_id, [pages(ids)])
        payload = b"%d" % number
        sending = prefill.client.send(
            prefill.pool, request_id, [pages(prefill.ids[:1])], first_token=number, payload=payload
        )
        finished = await decode.client.wait_finished(receiving, SOON_S)
        await prefill.client.wait_settled(sending, SOON_S)
        assert finished.payload == payload
        return finished.first_token

    async with prefill.client, decode.client:
        assert await asyncio.gather(*(transfer(number) for number in range(12))) == list(range(12))


async def test_polling(daemon: DaemonProcess, name: str, spec: MhaSpec) -> None:
    one = await engine(daemon, name, spec)
    async with one.client as client:
        assert await client.poll() == await client.poll(0.01) == []
        receiving = client.receive(name, new_request_id(), [pages(one.ids)])
        assert await client.poll(SOON_S) == [receiving]
        assert receiving.state == "open"
        assert await client.poll() == []


async def test_requests_that_are_begun(daemon: DaemonProcess, name: str, spec: MhaSpec) -> None:
    one = await engine(daemon, name, spec)
    async with one.client as client:
        with client.batched() as step:
            freed = [step.free(name, ids) for ids in (one.ids[:1], one.ids[1:])]
        while not client.is_ready(freed[1]):
            await client.ping()
        assert client.is_ready(freed[0])
        assert [(await client.wait(one)).freed for one in reversed(freed)] == [2, 1]
        with pytest.raises(InvalidFieldError, match="keep what wait returned"):
            client.is_ready(freed[0])


async def test_waiting_has_a_deadline(daemon: DaemonProcess, name: str, spec: MhaSpec) -> None:
    decode = await engine(daemon, name, spec)
    async with decode.client as client:
        receiving = client.receive(name, new_request_id(), [pages(decode.ids)])
        with pytest.raises(DeadlineError, match="did not come within"):
            await client.wait_finished(receiving, 0.01)
        with pytest.raises(DeadlineError, match="did not come within"):
            await client.wait_settled(receiving, 0.01)
        hopeless = client.receive(name, new_request_id(), [pages(await client.allocate(name, 1))], deadline_s=0.01)
        with pytest.raises(DeadlineError, match="no SEND yet"):
            await client.wait_finished(hopeless, SOON_S)


async def test_a_cancelled_call_leaves_nothing_behind(daemon: DaemonProcess, name: str, spec: MhaSpec) -> None:
    async with await AsyncClient.connect(daemon.runtime_dir) as client:
        await client.create_pool(name, spec, device=DEVICE.name)
        waits_for_a_change = client.cache_events(await client.cache_cursor(), timeout_s=SOON_S)
        for coroutine in (client.allocate(name, 1), waits_for_a_change):
            call = asyncio.ensure_future(coroutine)
            await asyncio.sleep(0)  # it has been sent
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert "pending=0" in repr(client)
        assert (await client.allocate(name, 1)).tolist() == [2], "a late reply is not mistaken for another's"


async def test_every_wait_ends_at_once_when_the_daemon_is_killed(tmp_path: Path, spec: MhaSpec) -> None:
    with running_daemon(tmp_path) as own:
        decode = await engine(own, "decode", spec)
        async with decode.client as client:
            transfer = client.receive("decode", new_request_id(), [pages(decode.ids)])
            assert await client.poll(SOON_S) == [transfer]
            own.process.send_signal(signal.SIGSTOP)
            waits: list[Awaitable[object]] = [
                client.ping(),
                client.status(),
                client.create_pool("other", spec, device=DEVICE.name),
                client.attach_pool("decode"),
                client.delete_pool("decode"),
                client.allocate("decode", 1),
                client.free("decode", [1]),
                client.cancel(transfer),
                client.result("decode", transfer.key.request_id, "receive"),
                client.wait_finished(transfer),
                client.wait_settled(transfer),
                client.poll(SOON_S),
            ]
            waiting = [asyncio.ensure_future(one) for one in waits]
            await asyncio.sleep(0)  # all have been sent
            assert not any(one.done() for one in waiting)
            own.kill()
            async with asyncio.timeout(SOON_S):
                raised = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(one) for one in raised] == [DaemonLostError] * len(waits)
            for call in (client.ping, client.poll):
                with pytest.raises(DaemonLostError):
                    await call()
            with pytest.raises(DaemonLostError):
                client.send("decode", new_request_id(), [pages([1])])


async def test_closing_ends_every_wait(daemon: DaemonProcess, name: str, spec: MhaSpec) -> None:
    decode = await engine(daemon, name, spec)
    transfer = decode.client.receive(name, new_request_id(), [pages(decode.ids)])
    waiting = asyncio.ensure_future(decode.client.wait_finished(transfer))
    await decode.client.ping()
    decode.client.close()
    decode.client.close()
    with pytest.raises(ClientClosedError, match="while this call waited"):
        await waiting

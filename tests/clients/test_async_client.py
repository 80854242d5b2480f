"""The asynchronous client against a real daemon, on uvloop and on asyncio's loop in debug mode."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from kvferry.clients import AsyncClient, AttachedPool, KvferryError, MhaSpec, new_request_id, pages
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    CancelledError,
    ClientClosedError,
    DaemonLostError,
    DeadlineError,
    PageBusyError,
    PeerCancelledError,
    PoolFullError,
    PoolInUseError,
    UnknownPoolError,
    UnknownTransferError,
)
from tests.daemons import DaemonProcess, running_daemon
from tests.devices import DEVICE

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops, pytest.mark.any_device]
SOON_S = 10.0


class Engine(NamedTuple):
    """A client with a pool and pages."""

    client: AsyncClient
    pool: AttachedPool
    ids: PageIds


async def engine(daemon: DaemonProcess, name: str, spec: MhaSpec, *, filled: bool) -> Engine:
    """Connect an engine; the caller closes its client."""
    client = await AsyncClient.connect(daemon.runtime_dir, name=name)
    pool = await client.create_pool(name, spec, device=DEVICE.name)
    ids = await client.allocate(name, 3)
    if filled:
        for role in ("k", "v"):
            whole = pool.tensor("main", role)
            whole.copy_(torch.rand(whole.shape))
        await asyncio.get_running_loop().run_in_executor(None, DEVICE.synchronize)
    return Engine(client, pool, ids)


async def test_the_daemon(daemon: DaemonProcess) -> None:
    async with await AsyncClient.connect(daemon.runtime_dir, name="looker") as client:
        assert client.welcome is not None
        assert client.welcome.protocol == 2
        assert await client.ping() > 0
        status = await client.status()
        assert status.pid == daemon.process.pid
        assert ("looker", os.getpid()) in {(one.name, one.pid) for one in status.sessions}
        assert "session=" in repr(client)


async def test_without_a_session_one_may_look_only(daemon: DaemonProcess) -> None:
    async with await AsyncClient.connect(daemon.runtime_dir, session=False) as client:
        await client.ping()
        with pytest.raises(KvferryError, match="NO_SESSION"):
            await client.allocate("any", 1)


@pytest.mark.parametrize("session", [False, True])
async def test_no_daemon(tmp_path: Path, *, session: bool) -> None:
    with pytest.raises(DaemonLostError, match="no daemon"):
        await AsyncClient.connect(tmp_path, session=session, timeout_s=0.1)


async def test_pools_and_pages(daemon: DaemonProcess, name: str, spec: MhaSpec) -> None:
    async with await AsyncClient.connect(daemon.runtime_dir) as client:
        pool = await client.create_pool(name, spec, device=DEVICE.name)
        again = await client.attach_pool(name, pool.manifest.layout_digest)
        pool.tensor("main", "k")[0, 1] = 5
        assert float(again.tensor("main", "k").sum()) == 5 * 4 * 2 * 4
        ids = await client.allocate(name, 16)
        with pytest.raises(PoolFullError, match="0 of 16 free"):
            await client.allocate(name, 1)
        with pytest.raises(PoolInUseError):
            await client.delete_pool(name)
        assert (await client.free(name, ids)).freed == 16
        await client.delete_pool(name)
        with pytest.raises(UnknownPoolError):
            await client.attach_pool(name)


@pytest.mark.parametrize("first", ["send", "receive"])
async def test_a_transfer_in_either_order(daemon: DaemonProcess, name: str, spec: MhaSpec, first: str) -> None:
    prefill, decode = (
        await engine(daemon, name, spec, filled=True),
        await engine(daemon, name + "-decode", spec, filled=False),
    )
    request_id = new_request_id()
    async with prefill.client, decode.client:
        if first == "send":
            sending = prefill.client.send(prefill.pool.name, request_id, [pages(prefill.ids)], first_token=4)
            await prefill.client.ping()
            receiving = decode.client.receive(decode.pool.name, request_id, [pages(decode.ids[::-1])])
        else:
            receiving = decode.client.receive(decode.pool.name, request_id, [pages(decode.ids[::-1])])
            await decode.client.ping()
            sending = prefill.client.send(prefill.pool.name, request_id, [pages(prefill.ids)], first_token=4)
        finished, sent = await asyncio.gather(
            decode.client.wait_finished(receiving, SOON_S), prefill.client.wait_finished(sending, SOON_S)
        )
        assert (finished.first_token, sent.first_token) == (4, None)
        for role in ("k", "v"):
            got = decode.pool.tensor("main", role)[:, decode.ids[::-1].copy()]
            assert torch.equal(got, prefill.pool.tensor("main", role)[:, prefill.ids])
        await asyncio.gather(
            decode.client.wait_settled(receiving, SOON_S), prefill.client.wait_settled(sending, SOON_S)
        )


async def test_many_transfers_at_once(daemon: DaemonProcess, name: str, spec: MhaSpec) -> None:
    prefill, decode = (
        await engine(daemon, name, spec, filled=True),
        await engine(daemon, name + "-decode", spec, filled=False),
    )
    async with prefill.client, decode.client:
        receiving_ids = await decode.client.allocate(decode.pool.name, 12)

        async def transfer(number: int) -> int | None:
            request_id = new_request_id()
            receiving = decode.client.receive(decode.pool.name, request_id, [pages(receiving_ids[number : number + 1])])
            sending = prefill.client.send(
                prefill.pool.name, request_id, [pages(prefill.ids[:1])], first_token=number, payload=b"%d" % number
            )
            finished = await decode.client.wait_finished(receiving, SOON_S)
            await prefill.client.wait_settled(sending, SOON_S)
            assert finished.payload == b"%d" % number
            return finished.first_token

        assert await asyncio.gather(*(transfer(number) for number in range(12))) == list(range(12))


async def test_chunks(daemon: DaemonProcess, name: str, spec: MhaSpec) -> None:
    prefill, decode = (
        await engine(daemon, name, spec, filled=True),
        await engine(daemon, name + "-decode", spec, filled=False),
    )
    async with prefill.client, decode.client:
        request_id = new_request_id()
        receiving = decode.client.receive(decode.pool.name, request_id, [pages(decode.ids, tokens=9)])
        sending, *_ = [
            prefill.client.send(
                prefill.pool.name,
                request_id,
                [pages(prefill.ids[page : page + 1], first_page=page, tokens=1 if page == 2 else 4)],
                last=page == 2,
            )
            for page in range(3)
        ]
        assert (await decode.client.wait_finished(receiving, SOON_S)).pages == 3
        assert (await prefill.client.wait_finished(sending, SOON_S)).pages == 3


async def test_cancel_and_result(daemon: DaemonProcess, name: str, spec: MhaSpec) -> None:
    prefill, decode = (
        await engine(daemon, name, spec, filled=True),
        await engine(daemon, name + "-decode", spec, filled=False),
    )
    async with prefill.client, decode.client:
        request_id = new_request_id()
        receiving = decode.client.receive(decode.pool.name, request_id, [pages(decode.ids)])
        busy = decode.client.receive(decode.pool.name, new_request_id(), [pages(decode.ids)])
        with pytest.raises(PageBusyError):
            await decode.client.wait_finished(busy, SOON_S)
        sending = prefill.client.send(prefill.pool.name, request_id, [pages(prefill.ids[:1])], last=False)
        assert (await prefill.client.result(prefill.pool.name, request_id, "send")).state == "open"
        assert not (await decode.client.cancel(receiving)).was_finished
        with pytest.raises(CancelledError):
            await decode.client.wait_finished(receiving, SOON_S)
        with pytest.raises(PeerCancelledError):
            await prefill.client.wait_finished(sending, SOON_S)
        await prefill.client.wait_settled(sending, SOON_S)
        with pytest.raises(UnknownTransferError):
            await prefill.client.result(prefill.pool.name, new_request_id(), "send")


async def test_waiting_has_a_deadline(daemon: DaemonProcess, name: str, spec: MhaSpec) -> None:
    decode = await engine(daemon, name, spec, filled=False)
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
        call = asyncio.ensure_future(client.allocate(name, 1))
        await asyncio.sleep(0)  # it has been sent
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert "pending=0" in repr(client)
        assert (await client.allocate(name, 1)).tolist() == [2], "a late reply is not mistaken for another's"


async def test_every_wait_ends_at_once_when_the_daemon_is_killed(tmp_path: Path, spec: MhaSpec) -> None:
    with running_daemon(tmp_path) as own:
        decode = await engine(own, "decode", spec, filled=False)
        async with decode.client as client:
            transfer = client.receive("decode", new_request_id(), [pages(decode.ids)])
            await client.ping()
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
            ]
            waiting = [asyncio.ensure_future(one) for one in waits]
            await asyncio.sleep(0)  # all have been sent
            assert not any(one.done() for one in waiting)
            own.kill()
            async with asyncio.timeout(SOON_S):
                raised = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(one) for one in raised] == [DaemonLostError] * len(waits)
            with pytest.raises(DaemonLostError):
                await client.ping()
            with pytest.raises(DaemonLostError):
                client.send("decode", new_request_id(), [pages([1])])


async def test_closing_ends_every_wait(daemon: DaemonProcess, name: str, spec: MhaSpec) -> None:
    decode = await engine(daemon, name, spec, filled=False)
    transfer = decode.client.receive(name, new_request_id(), [pages(decode.ids)])
    waiting = asyncio.ensure_future(decode.client.wait_finished(transfer))
    await decode.client.ping()
    decode.client.close()
    decode.client.close()
    with pytest.raises(ClientClosedError, match="while this call waited"):
        await waiting

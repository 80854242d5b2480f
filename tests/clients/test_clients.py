"""Clients of both kinds against a real daemon."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import torch

from kvferry.clients import AsyncClient, Client, Transfer, new_request_id, pages
from kvferry.protocol import errors
from kvferry.protocol.limits import MAX_PAYLOAD_BYTES
from tests import kit
from tests.kit.blocking import connected
from tests.kit.daemons import Daemon
from tests.kit.devices import DEVICE
from tests.kit.pools import PAGE_BYTES, SPEC, Filled

SOON_S: Final = 10.0


@pytest.mark.parametrize(("kind", "session"), [(Client, True), (AsyncClient, False)])
def test_no_daemon(tmp_path: Path, kind: type[Client | AsyncClient], *, session: bool) -> None:
    with (
        pytest.raises(errors.DaemonLostError, match="no daemon"),
        connected(kind, tmp_path, session=session, timeout_s=0.1),
    ):
        pass


@pytest.mark.any_device
def test_a_pool_is_created_once_and_found_again(client: Client, other: Client, name: str) -> None:
    made = client.create_pool(name, SPEC, device=DEVICE.name)
    digest = made.manifest.layout_digest
    assert (made.page_size, made.manifest.pages, len(made.manifest.entries)) == (4, 17, 4)
    again = other.create_pool(name, msgspec.structs.replace(SPEC, view="fia"), device=DEVICE.name)
    attached = [client.attach_pool(name), client.attach_pool(name, digest)]
    assert [one.manifest.layout_digest for one in (again, *attached)] == [digest] * 3
    with pytest.raises(errors.LayoutMismatchError):
        client.attach_pool(name, "0" * 32)
    with pytest.raises(errors.UnknownPoolError):
        client.attach_pool(name + "x")


@pytest.mark.any_device
def test_a_deleted_pool_is_gone_but_its_mappings_stay(client: Client, name: str) -> None:
    pool = client.create_pool(name, SPEC, device=DEVICE.name)
    k = pool.tensor("main", "k")
    k.fill_(7)
    ids = client.allocate(name, 1)
    with pytest.raises(errors.PoolInUseError, match="1 pages"):
        client.delete_pool(name)
    client.free(name, ids)
    client.delete_pool(name)
    for use in (lambda: client.attach_pool(name), lambda: client.allocate(name, 1), lambda: client.delete_pool(name)):
        with pytest.raises(errors.UnknownPoolError):
            use()
    assert bool((k == 7).all())
    pool.close()
    assert not client.create_pool(name, SPEC, device=DEVICE.name).tensor("main", "k").any(), "a new pool is new memory"


@pytest.mark.any_device
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_tensors_share_the_memory(client: Client, other: Client, name: str, dtype: str) -> None:
    spec = msgspec.structs.replace(SPEC, dtype=dtype)
    paged = client.create_pool(name, spec, device=DEVICE.name)
    fia = other.create_pool(name, msgspec.structs.replace(spec, view="fia"), device=DEVICE.name)
    k, v = paged.tensor("main", "k"), paged.tensor("main", "v")
    assert (k.shape, v.shape) == ((2, 17, 4, 2, 4), (2, 17, 4, 2, 2))
    assert k.dtype == v.dtype == getattr(torch, dtype)
    ones = torch.ones(2, 4).to(k.dtype).to(k.device)
    k[1, 5, 3] = ones
    v[0, 16, 0] = ones[:, :2]
    assert fia.tensor("main", "k").shape == (2, 68, 1, 2, 4), "each engine has the view that it asked for"
    assert bool((fia.tensor("main", "k")[1, 5 * 4 + 3].float() == 1).all())
    (entry,) = [one for one in fia.manifest.entries if (one.role, one.layer) == ("k", 4)]
    row = fia.entry_tensor(entry)[5 * 4 + 3]
    row[0] = torch.zeros(2, 4).to(k.dtype).to(k.device)
    assert not k.float().any(), "what one writes the other sees"
    assert float(v.float().sum()) == 4


@pytest.mark.any_device
@pytest.mark.parametrize("first", ["send", "receive"])
def test_a_transfer_in_either_order(client: Client, other: Client, name: str, first: str) -> None:
    request_id, payload = new_request_id(), os.urandom(MAX_PAYLOAD_BYTES)
    source, destination = Filled(client, name), Filled(other, name + "-decode")
    other.allocate(destination.name, 2)
    sent, received = client.allocate(name, 3), other.allocate(destination.name, 3)[::-1].copy()
    content = source.write(sent, seed=1)

    def send() -> Transfer:
        return client.send(name, request_id, [pages(sent, tokens=10)], first_token=42, payload=payload)

    def receive() -> Transfer:
        return other.receive(destination.name, request_id, [pages(received, tokens=10)])

    if first == "send":
        sending = send()
        assert client.poll(SOON_S) == [sending]
        receiving = receive()
    else:
        receiving = receive()
        assert other.poll(SOON_S) == [receiving]
        sending = send()
    finished = other.wait_finished(receiving, SOON_S)
    assert destination.holds(received, content)
    assert (finished.first_token, finished.payload) == (42, payload)
    assert (finished.pages, finished.moved_bytes, finished.generation) == (3, 3 * PAGE_BYTES, 1)
    client.wait_settled(sending, SOON_S)
    other.wait_settled(receiving, SOON_S)
    assert client.wait_finished(sending).pages == 3
    assert client.free(name, sent).deferred == 0


CALLS: Final[tuple[Callable[[Any, Any], Any], ...]] = (
    lambda client, _: client.ping(),
    lambda client, _: client.status(),
    lambda client, _: client.create_pool("other", SPEC, device=DEVICE.name),
    lambda client, _: client.attach_pool("decode"),
    lambda client, _: client.delete_pool("decode"),
    lambda client, _: client.allocate("decode", 1),
    lambda client, _: client.free("decode", [1]),
    lambda client, transfer: client.cancel(transfer),
    lambda client, transfer: client.result("decode", transfer.key.request_id, "receive"),
    lambda client, transfer: client.wait_finished(transfer),
    lambda client, transfer: client.wait_settled(transfer),
    lambda client, _: client.poll(30),
)


@pytest.mark.any_device
def test_every_wait_ends_at_once_when_the_daemon_is_killed() -> None:
    with kit.daemon() as own, ThreadPoolExecutor(len(CALLS)) as threads, ExitStack() as stack:
        clients, transfers, memory = [], [], list[torch.Tensor]()
        for _ in CALLS:
            clients.append(client := stack.enter_context(Client.connect(own.runtime_dir, reconnect=False)))
            memory.append(client.create_pool("decode", SPEC, device=DEVICE.name).tensor("main", "k").fill_(3))
            transfers.append(client.receive("decode", new_request_id(), [pages(client.allocate("decode", 1))]))
            assert client.poll(SOON_S) == transfers[-1:]
        own.process.send_signal(signal.SIGSTOP)  # nobody gets a reply any more
        waits = [
            threads.submit(call, client, transfer)
            for call, client, transfer in zip(CALLS, clients, transfers, strict=True)
        ]
        own.kill()
        assert [type(one.exception(SOON_S)) for one in waits] == [errors.DaemonLostError] * len(CALLS)
        for client in clients:
            with pytest.raises(errors.DaemonLostError):
                client.poll(0)
        assert bool((memory[0] == 3).all()), "it stays"


@pytest.mark.anyio
@pytest.mark.both_loops
async def test_every_wait_of_a_loop_ends_at_once_when_the_daemon_is_killed() -> None:
    with kit.daemon() as own:
        async with AsyncClient.connect(own.runtime_dir, reconnect=False) as client:
            await client.create_pool("decode", SPEC, device=DEVICE.name)
            transfer = client.receive("decode", new_request_id(), [pages(await client.allocate("decode", 1))])
            assert await client.poll(SOON_S) == [transfer]
            own.process.send_signal(signal.SIGSTOP)
            waiting = [asyncio.ensure_future(call(client, transfer)) for call in CALLS]
            await asyncio.sleep(0)  # all have been sent
            assert not any(one.done() for one in waiting)
            own.kill()
            async with asyncio.timeout(SOON_S):
                raised = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(one) for one in raised] == [errors.DaemonLostError] * len(CALLS)
            for again in (client.ping, client.poll):
                with pytest.raises(errors.DaemonLostError):
                    await again()
            with pytest.raises(errors.DaemonLostError):
                client.send("decode", new_request_id(), [pages([1])])


def test_an_engine_that_never_polls_keeps_the_latest_changes(
    client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.clients.submissions.CHANGES_KEPT", 2)
    client.create_pool(name, SPEC, device=DEVICE.name)
    begun = [client.receive(name, new_request_id(), [pages([one])]) for one in client.allocate(name, 3)]
    client.status()  # answered after them
    assert client.poll(SOON_S) == begun[1:]


def test_tables_that_cannot_be_mapped_are_given_up(client: Client, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client.create_pool(name, SPEC)

    def fail(*_: object) -> None:
        raise errors.OutOfMemoryError("no address space")

    with monkeypatch.context() as patch:
        for module in ("sync_requests", "async_requests"):
            patch.setattr(f"kvferry.clients.{module}.Tables", fail)
        with pytest.raises(errors.OutOfMemoryError):
            client.create_tables("t", name, max_batch=1, max_context_tokens=16)
    client.delete_tables(client.create_tables("t", name, max_batch=1, max_context_tokens=16))


@pytest.mark.anyio
async def test_a_cancelled_call_leaves_nothing_behind(daemon: Daemon, name: str) -> None:
    async with AsyncClient.connect(daemon.runtime_dir) as client:
        await client.create_pool(name, SPEC, device=DEVICE.name)
        waits_for_a_change = client.cache_events(await client.cache_cursor(), timeout_s=SOON_S)
        for coroutine in (client.allocate(name, 1), waits_for_a_change):
            call = asyncio.ensure_future(coroutine)
            await asyncio.sleep(0)  # it has been sent
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        await client.ping()
        assert (await client.allocate(name, 1)).tolist() == [1], "a late reply is nobody's, and its page went back"
        assert "pending=0" in repr(client)

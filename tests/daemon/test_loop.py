"""The daemon put together, on the test's own loop: nothing in it may block, and it ends in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Executor

import msgspec
import pytest
import torch
from blockbuster import blockbuster_ctx

import kvferry.clients
import kvferry.daemon
from kvferry.clients import AsyncClient, new_request_id, pages
from kvferry.daemon.control import later
from kvferry.daemon.services import metrics, transfer_effects
from kvferry.daemon.transports.network_copier import NetworkCopier
from kvferry.protocol.events import Finished
from tests.kit.in_process import CONFIG, SPEC, serving
from tests.kit.network import network_memory
from tests.kit.scraping import scrape

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]
COUNT = 200
TIERS = ("copier", "host_tier", "disk_tier", "remote_tier")
ENDING = ("transports/local", "services/pools", "services/tables", *(f"tiers/{tier}" for tier in TIERS))


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> Iterator[None]:
    """Let every blocking call fail the test but those by which the daemon ends: it waits for its own threads."""
    with blockbuster_ctx(scanned_modules=[kvferry.clients, kvferry.daemon]) as blockbuster:
        for module in ENDING:
            blockbuster.functions["threading.Lock.acquire"].can_block_in(f"daemon/{module}.py", "close")
        blockbuster.functions["os.read"].can_block_in("pools/host/memory.py", "read_file")  # the kernel's own
        blockbuster.functions["os.scandir"].can_block_in("daemon/process/descriptors.py", "count_open")
        yield


async def test_a_transfer_from_beginning_to_end() -> None:
    async with serving() as (path, manager, _), await AsyncClient.connect(path) as client:
        pool = await client.create_pool("pool", SPEC)
        k = pool.tensor("main", "k")
        sent, received = await client.allocate("pool", 4), await client.allocate("pool", 4)
        k[:, sent] = torch.rand(2, 4, 4, 2, 4)
        request_id = new_request_id()
        receiving = client.receive("pool", request_id, [pages(received)])
        sending = client.send("pool", request_id, [pages(sent)], first_token=1)
        assert (await client.wait_finished(receiving)).first_token == 1
        await client.wait_settled(sending)
        assert torch.equal(k[:, received], k[:, sent])
        await client.free("pool", sent)
        await client.free("pool", received)
        await client.delete_pool("pool")
        assert manager.said == ["ready"]
    assert manager.said == ["ready", "stopping"]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("copy-", "populate"))]


async def test_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "KEPT", 0)
    async with serving() as (path, _, _), await AsyncClient.connect(path) as client:
        await client.create_pool("pool", SPEC)
        for _ in range(2):
            assert (await asyncio.to_thread(scrape, path)).sum("kvferry_pool_pages", pool="pool") == SPEC.tokens / 4


@pytest.mark.parametrize(("ends", "drain_timeout_s"), [(True, 0), (False, 10)])
async def test_all_ends_of_transfers_are_logged_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch, drain_timeout_s: float, *, ends: bool
) -> None:
    logged = list[str]()

    def log(event: Finished) -> None:
        logged.append(event.request_id)
        if len(logged) == 1:
            raise OSError  # as where the log's disk is full

    monkeypatch.setattr(transfer_effects, "log_finished", log)
    monkeypatch.setattr(later, "AT_ONCE", 1)
    service = msgspec.structs.replace(CONFIG.service, drain_timeout_s=drain_timeout_s)
    config = msgspec.structs.replace(CONFIG, service=service)
    async with serving(config) as (path, _, stopping), await AsyncClient.connect(path) as watching:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        async with await AsyncClient.connect(path) as client:
            await client.create_pool("pool", SPEC)
            for _ in range(COUNT):
                client.receive("pool", new_request_id())
            await client.ping()
            if ends:
                stopping.set()
        while not ends and len(logged) < COUNT:
            await watching.ping()
    assert len(set(logged)) == COUNT


async def test_copies_between_hosts_end_before_their_memory_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    _, network = network_memory(buffer_bytes=4096)
    order, close, unmap = list[str](), NetworkCopier.close, network.close

    async def closing(copier: NetworkCopier, waiter: Executor) -> None:
        await close(copier, waiter)
        order.append("copies ended")

    def unmapping() -> None:
        order.append("unmapped")
        unmap()

    monkeypatch.setattr(NetworkCopier, "close", closing)
    monkeypatch.setattr(network, "close", unmapping)
    async with serving(network=network):
        pass
    assert order == ["copies ended", "unmapped"]

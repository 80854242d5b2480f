"""Every request ends within its deadline, with a typed error that says whose fault it is, whatever does not answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NamedTuple

import msgspec
import pytest

from kvferry.clients import AsyncClient, ModelIdentity, pages
from kvferry.daemon.tiers.lower_tiers import LowerTiers
from kvferry.daemon.transports import local
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.plan import Blocks
from kvferry.protocol.config.schema import TiersConfig
from kvferry.protocol.errors import DeadlineError
from tests.kit.in_process import CONFIG, ON_THREADS, SPEC, serving

pytestmark = pytest.mark.anyio
DEADLINE_S: Final = 0.3
MARGIN_S: Final = 10.0
"""For a slow machine: a request that does not end never does."""
REQUEST: Final = "0123456789abcdef0123456789abcdef"
HASHES: Final = [b"0" * 16]
MODEL = ModelIdentity(name="m", revision="1")


class Hung(NamedTuple):
    """A client of a daemon in which nothing that takes time ever ends, until the gate is open."""

    client: AsyncClient
    ids: Any
    ring: Any
    copying: threading.Event
    gate: threading.Event


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Let the daemon block where it ends: it waits for its own threads."""


@pytest.fixture
async def hung(monkeypatch: pytest.MonkeyPatch, anyio_backend: object) -> AsyncIterator[Hung]:  # noqa: ARG001
    """Run the daemon, with a pool, a block and an event ring from before it hung."""
    copying, gate = threading.Event(), threading.Event()

    def stands(_blocks: Blocks) -> None:
        copying.set()
        gate.wait(MARGIN_S)

    async def asks(*_: object) -> list[object]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(local, "best_copy", lambda: stands)
    config = msgspec.structs.replace(CONFIG, tiers=TiersConfig(host_bytes=1 << 20))
    async with serving(config, tuning=ON_THREADS) as at, await AsyncClient.connect(at.path) as client:
        await client.create_pool("pool", SPEC, model=MODEL)
        ids = await client.allocate("pool", 4)
        stored = client.store("pool", HASHES, ids[:1])
        await client.wait_done(stored)
        monkeypatch.setattr(HostRegion, "populate", lambda *_: gate.wait(MARGIN_S))
        monkeypatch.setattr(LowerTiers, "may_find", True)
        monkeypatch.setattr(LowerTiers, "find", asks)
        try:
            yield Hung(client, ids, await client.open_events(), copying, gate)
        finally:
            gate.set()


async def create_pool(one: Hung) -> None:
    await one.client.create_pool("other", SPEC, deadline_s=DEADLINE_S)


async def free(one: Hung) -> None:
    await one.client.free("pool", one.ids, after=one.ring.event(), deadline_s=DEADLINE_S)


async def update_tables(one: Hung) -> None:
    tables = await one.client.create_tables("t", "pool", max_batch=1, max_context_tokens=16)
    update = one.client.update_tables(tables, [0], after=one.ring.event(), deadline_s=DEADLINE_S)
    await one.client.wait(update)


async def send(one: Hung) -> None:
    sending = one.client.send("pool", REQUEST, [pages(one.ids)], deadline_s=DEADLINE_S)
    await one.client.wait_finished(sending)


async def receive(one: Hung) -> None:
    receiving = one.client.receive("pool", REQUEST, [pages(one.ids[:2])], deadline_s=DEADLINE_S)
    one.client.send("pool", REQUEST, [pages(one.ids[2:])])
    await one.client.wait_finished(receiving)


async def receive_after(one: Hung) -> None:
    event = one.ring.event()
    receiving = one.client.receive("pool", REQUEST, [pages(one.ids)], after=event, deadline_s=DEADLINE_S)
    await one.client.wait_finished(receiving)


async def cancel(one: Hung) -> None:
    receiving = one.client.receive("pool", REQUEST, [pages(one.ids[:2])])
    one.client.send("pool", REQUEST, [pages(one.ids[2:])])
    assert await asyncio.to_thread(one.copying.wait, MARGIN_S)  # one that has not begun is cancelled at once
    await one.client.cancel(receiving, deadline_s=DEADLINE_S)


async def lookup(one: Hung) -> None:
    await one.client.lookup("pool", [*HASHES, b"1" * 16], deadline_s=DEADLINE_S)


async def load(one: Hung) -> None:
    found = await one.client.lookup("pool", HASHES)
    loading = one.client.load("pool", found.lease, one.ids[:1], after=one.ring.event(), deadline_s=DEADLINE_S)
    await one.client.wait_done(loading)


async def store(one: Hung) -> None:
    storing = one.client.store("pool", [b"2" * 16], one.ids[:1], after=one.ring.event(), deadline_s=DEADLINE_S)
    await one.client.wait_done(storing)


async def restore(one: Hung) -> None:
    offload = one.client.offload("pool", [pages(one.ids)])
    await one.client.wait_done(offload)
    await one.client.allocate("pool", 12)
    await one.client.wait_done(one.client.restore("pool", offload.snapshot, deadline_s=DEADLINE_S))


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (create_pool, "daemon"),
        (free, "caller"),
        (update_tables, "caller"),
        (send, "peer"),
        (receive, "peer"),
        (receive_after, "caller"),
        (cancel, "daemon"),
        (lookup, "daemon"),
        (load, "caller"),
        (store, "caller"),
        (restore, "daemon"),
    ],
)
async def test_what_does_not_answer_ends_a_request_at_its_deadline(
    hung: Hung, case: Callable[[Hung], Awaitable[None]], fault: str
) -> None:
    with pytest.raises(DeadlineError) as late:
        async with asyncio.timeout(MARGIN_S):
            await case(hung)
    assert late.value.fault == fault
    assert late.value.detail
    await hung.client.ping()

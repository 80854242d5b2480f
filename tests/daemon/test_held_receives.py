"""A RECEIVE into the host tier that waits for room: it has come, though it is not accepted, and what is then counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

import msgspec
import pytest

from kvferry.clients import AsyncClient, Transfer, new_request_id, pages, pages_wanted
from kvferry.daemon.tiers.host_tier import HostTier, SpaceRequest
from kvferry.protocol.config.schema import ServiceConfig, TiersConfig
from kvferry.protocol.errors import CancelledError, ShuttingDownError, TransferExistsError, UnknownPoolError
from tests.kit.in_process import CONFIG, PATIENCE_S, SPEC, Serving, serving

pytestmark = pytest.mark.anyio
WANTED = [pages_wanted(2)]


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Let calls block: a daemon that starts counts its descriptors."""


class Sides(NamedTuple):
    """A daemon in whose host tier no room is made before ``room`` is set; a client with pools for both sides."""

    serving: Serving
    room: asyncio.Event
    client: AsyncClient

    async def held(self, request_id: str) -> Transfer:
        """Ask for a RECEIVE that waits."""
        transfer = self.client.receive("decode", request_id, WANTED, into="host")
        await self.client.ping()
        assert transfer.state == "sent"
        return transfer


@pytest.fixture
async def sides(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sides]:
    """Run the daemon in this process."""
    room, real = asyncio.Event(), HostTier.making_room

    def making_room(self: HostTier, tenant: int, space_requests: Sequence[SpaceRequest]) -> Iterator[None]:
        while not room.is_set():
            yield
        yield from real(self, tenant, space_requests)

    monkeypatch.setattr(HostTier, "making_room", making_room)
    tiers, service = TiersConfig(host_bytes=4 << 20), ServiceConfig(drain_timeout_s=1)
    async with (
        serving(msgspec.structs.replace(CONFIG, tiers=tiers, service=service)) as one,
        asyncio.timeout(PATIENCE_S),
        await AsyncClient.connect(one.path) as client,
    ):
        for name in ("prefill", "decode"):
            await client.create_pool(name, SPEC)
        yield Sides(one, room, client)


async def test_a_send_that_comes_meanwhile_hears_nothing_of_the_receive_before(sides: Sides) -> None:
    client, request_id = sides.client, new_request_id()
    before = client.receive("decode", request_id, [pages(await client.allocate("decode", 2))])
    await client.cancel(before)
    await client.wait_settled(before)
    transfer = await sides.held(request_id)
    sent = client.send("prefill", request_id, [pages(await client.allocate("prefill", 2))])
    await client.ping()
    sides.room.set()
    await client.wait_finished(sent)
    assert (await client.wait_finished(transfer)).snapshot


async def test_one_that_waited_for_its_event_waits_for_room_then(sides: Sides) -> None:
    client, request_id = sides.client, new_request_id()
    ring = await client.open_events()
    event = ring.event()
    transfer = client.receive("decode", request_id, WANTED, into="host", after=event)
    sent = client.send("prefill", request_id, [pages(await client.allocate("prefill", 2))])
    await client.ping()
    ring.record(event)
    for _ in range(3):
        await client.ping()
    assert transfer.state == "sent"
    sides.room.set()
    assert (await client.wait_finished(transfer)).snapshot
    await client.wait_finished(sent)


async def test_a_second_one_of_its_key_is_refused_at_once(sides: Sides) -> None:
    client, request_id = sides.client, new_request_id()
    transfer, ids = await sides.held(request_id), await client.allocate("decode", 2)
    async with await AsyncClient.connect(sides.serving.path) as other:
        with pytest.raises(TransferExistsError, match="waits for room"):
            await other.wait_finished(other.receive("decode", request_id, [pages(ids)]))
        elsewhere = other.receive("prefill", request_id, [pages(await other.allocate("prefill", 2))])
        await other.ping()
        assert elsewhere.accepted is not None
    await client.cancel(transfer)
    with pytest.raises(CancelledError, match="room"):
        await client.wait_finished(transfer)
    assert (await client.free("decode", ids)).freed == len(ids)


@pytest.mark.parametrize("anew", [True, False])
async def test_the_pool_that_there_is_then_counts(sides: Sides, *, anew: bool) -> None:
    client, request_id = sides.client, new_request_id()
    transfer, other = await sides.held(request_id), msgspec.structs.replace(SPEC, head_dim=8)
    await client.delete_pool("decode")
    if not anew:
        sides.room.set()
        with pytest.raises(UnknownPoolError):
            await client.wait_finished(transfer)
        return
    await client.create_pool("decode", other)
    await client.create_pool("other", other)
    sides.room.set()
    sent = client.send("other", request_id, [pages(await client.allocate("other", 2))])
    await client.wait_finished(sent)
    assert (await client.wait_finished(transfer)).snapshot


async def test_a_daemon_that_ends_refuses_it(sides: Sides) -> None:
    transfer = await sides.held(new_request_id())
    sides.serving.stopping.set()
    with pytest.raises(ShuttingDownError):
        await sides.client.wait_finished(transfer)

"""A daemon in which one effect of a transfer raises: that transfer fails, and all others go on as if nothing were."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvferry.clients import AsyncClient, Transfer, new_request_id, pages
from kvferry.daemon.control import dispatch
from kvferry.daemon.peers import links as peers
from kvferry.daemon.peers.links import PeerLinks
from kvferry.daemon.services import transfer_effects
from kvferry.daemon.services.event_rings import EventRings
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.services.receive_to_host import HostReceives
from kvferry.daemon.services.tables import TableService
from kvferry.daemon.services.tiers import Tiers
from kvferry.daemon.services.transfers import TransferService
from kvferry.daemon.transfer.registry import StartOp
from kvferry.daemon.transports.local import LocalTransport, OnOpDone
from kvferry.pools.planning.coverage import Coverage
from kvferry.protocol import errors
from kvferry.protocol.codec import Frames, PageIds, encode
from kvferry.protocol.envelope import Event, Reply
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.events import Together
from tests.kit.faults import Once
from tests.kit.in_process import ON_THREADS, SPEC, client_of_one

pytestmark = pytest.mark.anyio
NOWHERE = "ipc:///nowhere/peer.sock"


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Let the daemon block where it ends: it waits for its own threads."""


@pytest.fixture
async def client(anyio_backend: object) -> AsyncIterator[AsyncClient]:  # noqa: ARG001  on the test's loop
    """Return a client of a daemon that ends in order, whatever the test did to it."""
    async with client_of_one(ON_THREADS) as (one, _):
        yield one


async def receive(client: AsyncClient, pool: str = "pool", request_id: str = "", **more: Any) -> Transfer:  # noqa: ANN401
    """Receive two new pages."""
    return client.receive(pool, request_id or new_request_id(), [pages(await client.allocate(pool, 2))], **more)


async def busy(client: AsyncClient) -> list[int]:
    """Return how many pages of each pool a transfer holds."""
    return [one.busy for one in (await client.status()).pools]


async def send(client: AsyncClient, request_id: str, **more: Any) -> Transfer:  # noqa: ANN401
    """Send two new pages."""
    return client.send("pool", request_id, [pages(await client.allocate("pool", 2))], **more)


async def test_a_copy_that_cannot_begin_fails_alone_and_gives_its_pages_back(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    start = LocalTransport.start

    def fails_at_first(self: LocalTransport, op: StartOp, on_done: OnOpDone, *reported: Callable[[], None]) -> None:
        asked.append(op.op_id)
        assert len(asked) > 1, "a bug of the transport"
        start(self, op, on_done, *reported)

    monkeypatch.setattr(LocalTransport, "start", fails_at_first)
    request_id = new_request_id()
    for name in ("one", "other"):
        await client.create_pool(name, SPEC)
    one, other = [await receive(client, name, request_id) for name in ("one", "other")]
    await client.ping()
    sending = await send(client, request_id, destinations=2)
    with pytest.raises(errors.InternalError, match="a bug of the transport"):
        await client.wait_finished(one)
    assert (await client.wait_finished(other)).pages == 2
    for transfer in (one, other):
        await client.wait_settled(transfer)
    with pytest.raises(errors.InternalError):
        await client.wait_finished(sending)
    await client.wait_settled(sending)
    assert len(asked) == 2
    assert (await client.status()).counters["transfers.effects_failed"] == 1
    assert await busy(client) == [0, 0, 0]


async def test_pages_of_a_copy_whose_transport_raised_are_held_until_it_has_ended(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[StartOp, OnOpDone]] = []
    stopped: list[int] = []

    def begins_and_fails(_self: LocalTransport, op: StartOp, on_done: OnOpDone, _reported: object) -> None:
        begun.append((op, on_done))
        raise RuntimeError("after it began")

    def stop(_self: LocalTransport, op_id: int) -> bool:
        stopped.append(op_id)
        return True

    monkeypatch.setattr(LocalTransport, "start", begins_and_fails)
    monkeypatch.setattr(LocalTransport, "stop", stop)
    receiving = await receive(client)
    sending = await send(client, receiving.key.request_id)
    for one in (receiving, sending):
        with pytest.raises(errors.InternalError, match="after it began"):
            await client.wait_finished(one)
    [(op, on_done)] = begun
    assert (stopped, receiving.settled, await busy(client)) == ([op.op_id], None, [4])
    for _ in range(2):  # the second time it is of an op that nobody knows
        on_done(op.op_id, None)
    for one in (receiving, sending):
        await client.wait_settled(one)
    assert await busy(client) == [0]


async def test_a_request_whose_peer_can_never_be_told_ends_once_and_the_daemon_lives(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = PeerLinks.connect

    def fails_later(self: PeerLinks, address: str, field: str = "address") -> object:
        if field != "address":  # as the RECEIVE is accepted
            return known(self, address, field)
        raise OSError("no link")

    monkeypatch.setattr(PeerLinks, "connect", fails_later)
    for attempt in range(1, 4):
        receiving = await receive(client, source_daemons=[NOWHERE])
        with pytest.raises(errors.InternalError, match="no link"):
            await client.wait_finished(receiving)
        await client.wait_settled(receiving)
        status = await client.status()
        assert status.counters["transfers.effects_failed"] == 2 * attempt, "once each: the announcement, and its end"
        assert ([one.busy for one in status.pools], status.transfers) == ([0], ())


@pytest.mark.parametrize("address", ["ipc:///" + "x" * 150, ""], ids=["long", "no link"])
async def test_a_source_daemon_that_cannot_be_called_refuses_the_receive(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    def no_link(_owner: PeerLinks, address: str, field: str, _guest_of: str | None) -> None:
        raise errors.InvalidFieldError(f"{address}: no socket is left", field=field)

    if not address:
        monkeypatch.setattr(peers, "PeerLink", no_link)
    for _ in range(2):
        receiving = await receive(client, source_daemons=[NOWHERE, address] if address else [NOWHERE])
        with pytest.raises(errors.InvalidFieldError) as refused:
            await client.wait_finished(receiving)
        assert refused.value.field == ("source_daemons[1]" if address else "source_daemons[0]")
    assert (await client.status()).transfers == ()
    assert await busy(client) == [0]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (transfer_effects, "count_finished"),
        (HostReceives, "on_event"),
        (dispatch, "encode"),
        (PeerLinks, "connect"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_the_end_is_told_whatever_raises_on_the_way(
    client: AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,  # noqa: ANN401
    name: str,
) -> None:
    receiving = await receive(client, deadline_s=0.2, source_daemons=[NOWHERE])
    await client.ping()
    fails = Once(getattr(owner, name))
    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(errors.DeadlineError):
        await client.wait_finished(receiving)
    await client.wait_settled(receiving)
    assert fails.calls
    assert await busy(client) == [0]


@pytest.mark.parametrize("part", [TableService, EventRings, TransferService, Tiers])
async def test_an_engines_pages_come_back_whatever_raises_at_its_end(
    client: AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    part: Any,  # noqa: ANN401
) -> None:
    path = (await client.status()).addresses[0].removeprefix("ipc://")
    async with await AsyncClient.connect(Path(path).parent) as mortal:
        await mortal.create_pool("other", SPEC)
        await mortal.allocate("other", 3)
        monkeypatch.setattr(part, "session_lost", Once(part.session_lost))
    while len((await client.status()).sessions) > 1:
        pass
    status = await client.status()
    assert status.counters["sessions.ends_failed"] == 1
    assert [one.free for one in status.pools if one.pool == "other"] == [16]


@pytest.mark.parametrize("fails", [False, True])
async def test_an_engine_hears_in_one_message_of_copies_that_end_together(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    ends: list[Callable[[KvferryError | None], None]] = []
    told: list[int] = []

    def noted(message: Event | Reply, ids: Sequence[PageIds] = ()) -> Frames:
        if isinstance(message, Event):
            told.append(len(message.body.events) if isinstance(message.body, Together) else 1)
        return encode(message, ids)

    monkeypatch.setattr(LocalTransport, "start", lambda _, op, on_done, _r: ends.append(partial(on_done, op.op_id)))
    if fails:
        monkeypatch.setattr(Coverage, "arrive", Once(Coverage.arrive))
    halves = []
    for _ in range(3):
        halves.append(await receive(client))
        halves.append(await send(client, halves[-1].key.request_id))
    await client.ping()
    monkeypatch.setattr(dispatch, "encode", noted)
    for end in ends:
        end(None)
    for half in halves:
        await client.wait_settled(half)
    assert (len(ends), told) == (3, [len(halves)]), "each by one FINISHED"
    wrong = [half for half in halves if half.error is not None]
    assert wrong == (halves[:2] if fails else [])
    assert all(isinstance(half.error, errors.InternalError) for half in wrong)
    assert (await client.status()).counters.get("transfers.bugs", 0) == fails
    assert await busy(client) == [0]


async def test_a_pool_that_cannot_be_added_is_refused_and_may_be_made_again(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PoolRegistry, "add", Once(PoolRegistry.add))
    with pytest.raises(errors.InternalError, match="could not be added"):
        await client.create_pool("other", SPEC)
    await client.create_pool("other", SPEC)
    assert len(await client.allocate("other", 16)) == 16

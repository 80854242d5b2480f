"""A daemon in which something raises, copies wrongly, stands still or waits: that ends, and all else goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pytest

from kvferry.clients import AsyncClient, ModelIdentity, SharedMemory, Transfer, new_request_id, pages, pages_wanted
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
from kvferry.daemon.tiers.host_tier import HostTier, SpaceRequest
from kvferry.daemon.tiers.lower_tiers import LowerTiers
from kvferry.daemon.transfer.registry import StartOp
from kvferry.daemon.transports import local
from kvferry.daemon.transports.local import LocalTransport, OnOpDone
from kvferry.pools.copy_kernel import Copies, CopyThreads, Gate
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.copies import copy_one_by_one
from kvferry.pools.planning.coverage import Coverage
from kvferry.pools.planning.plan import Blocks
from kvferry.protocol import errors
from kvferry.protocol.codec import Frames, PageIds, encode
from kvferry.protocol.config.schema import ServiceConfig, TiersConfig
from kvferry.protocol.envelope import Event, Reply
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.events import Together
from tests.kit.faults import Once, flip_bit
from tests.kit.in_process import CONFIG, ON_THREADS, PATIENCE_S, SPEC, Serving, client_of_one, serving

pytestmark = pytest.mark.anyio
NOWHERE = "ipc:///nowhere/peer.sock"
ALL = SPEC.tokens // SPEC.page_size


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Let the daemon block where it ends: it waits for its own threads."""


@pytest.fixture
async def client(anyio_backend: object) -> AsyncIterator[AsyncClient]:  # noqa: ARG001  on the test's loop
    """Return a client of a daemon that ends in order, whatever the test did to it."""
    async with client_of_one(ON_THREADS) as (one, _):
        yield one


async def receive(client: AsyncClient, pool: str = "pool", request_id: str = "", **more: Any) -> Transfer:  # noqa: ANN401
    return client.receive(pool, request_id or new_request_id(), [pages(await client.allocate(pool, 2))], **more)


async def busy(client: AsyncClient) -> list[int]:
    return [one.busy for one in (await client.status()).pools]


async def send(client: AsyncClient, request_id: str, **more: Any) -> Transfer:  # noqa: ANN401
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
    one, other = [await receive(client, name, request_id, destinations=2) for name in ("one", "other")]
    await client.ping()
    sending = await send(client, request_id)
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

    def fails_later(self: PeerLinks, address: str, field: str = "address", tenant: int | None = None) -> object:
        if field != "address":  # as the RECEIVE is accepted
            return known(self, address, field, tenant)
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


# -- copies that are wrong

COUNT = 4
PAGE_BYTES = SPEC.page_size * SPEC.kv_heads * SPEC.head_dim * 4


def copy_wrongly(blocks: Blocks) -> None:
    """Copy, and flip a bit of what was copied first, unless it is looked at by the way of staging."""
    copy_one_by_one(blocks)
    if len(blocks) > 1 or int(blocks[0, 2]) >= COUNT * PAGE_BYTES:
        flip_bit(int(blocks[0, 1]))


@pytest.mark.parametrize("daemons", [1, 2])
@pytest.mark.parametrize("asks", ["sender", "receiver", "nobody"])
async def test_a_wrong_byte_fails_the_transfer_where_either_side_asks(
    monkeypatch: pytest.MonkeyPatch, daemons: int, asks: str
) -> None:
    monkeypatch.setattr(local, "best_copy", lambda: copy_wrongly)
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(serving()) for _ in range(daemons)]
        prefill = await stack.enter_async_context(await AsyncClient.connect(served[0].path))
        decode = await stack.enter_async_context(await AsyncClient.connect(served[-1].path))
        await prefill.create_pool("prefill", SPEC)
        await decode.create_pool("decode", SPEC)
        ids, theirs = await prefill.allocate("prefill", COUNT), await decode.allocate("decode", COUNT)
        sources = [(await prefill.status()).addresses[0]]
        request_id = new_request_id()
        receiving = decode.receive(
            "decode", request_id, [pages(theirs)], source_daemons=sources, checksums=asks == "receiver"
        )
        sending = prefill.send("prefill", request_id, [pages(ids)], checksums=asks == "sender", payload=b"state")
        for client, transfer in ((decode, receiving), (prefill, sending)):
            if asks == "nobody":
                await client.wait_finished(transfer)
            else:
                with pytest.raises(errors.TransferFailedError, match=r"page \d+ of main.*has other bytes"):
                    await client.wait_finished(transfer)
                assert transfer.finished is not None
                assert transfer.finished.payload == b""
            await client.wait_settled(transfer)
        assert (await decode.free("decode", theirs)).deferred == 0
        assert (await prefill.free("prefill", ids)).deferred == 0


# -- copies that stall

OURS, THEIRS = 7.0, 9.0


class StallingThreads:
    """Copies the first half of what it is given, then stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._at_half, self._gate = threading.Event(), threading.Event()
        self.go_on = self._gate.set
        monkeypatch.setattr(local, "best_copy", lambda: self)

    def stands(self) -> None:
        assert self._at_half.wait(PATIENCE_S)

    def __call__(self, blocks: Blocks) -> None:
        halves = blocks.copy()
        halves[:, 2] //= 2
        copy_one_by_one(halves)
        self._at_half.set()
        assert self._gate.wait(PATIENCE_S)
        copy_one_by_one(blocks)


class StallingCopyThreads:
    """What the loop gives to the copy threads stands still in its first block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gate, submit = Gate(), CopyThreads.submit
        self._gate = gate
        self.go_on = gate.open
        gate.shut()

        def submit_gated(copy_threads: CopyThreads, copies: Copies, threads: int, token: object) -> None:
            with gate.giving_way(PATIENCE_S):
                submit(copy_threads, copies, threads, token)

        monkeypatch.setattr(CopyThreads, "submit", submit_gated)

    def stands(self) -> None:
        ends_s = time.monotonic() + PATIENCE_S
        while not self._gate.standing:
            assert time.monotonic() < ends_s


@pytest.mark.parametrize("kind", [StallingThreads, StallingCopyThreads])
@pytest.mark.parametrize("how", ["cancelled", "late", "its engine dies", "the sender gives up"])
async def test_pages_that_a_stalled_copy_still_writes_are_nobodys(
    monkeypatch: pytest.MonkeyPatch, kind: type[StallingThreads | StallingCopyThreads], how: str
) -> None:
    copy = kind(monkeypatch)
    async with (
        serving(tuning=ON_THREADS) as at,
        await AsyncClient.connect(at.path) as prefill,
        await AsyncClient.connect(at.path) as decode,
        AsyncExitStack() as stack,
    ):
        stack.callback(copy.go_on)
        source = await prefill.create_pool("prefill", SPEC)
        sent = await prefill.allocate("prefill", ALL)
        for role in ("k", "v"):
            source.tensor("main", role)[:, sent] = OURS
        engine = await AsyncClient.connect(at.path) if how == "its engine dies" else decode
        target = await decode.create_pool("decode", SPEC)
        received = await engine.allocate("decode", ALL // 2)
        request_id = new_request_id()
        receiving = engine.receive("decode", request_id, [pages(received)], deadline_s=0.3 if how == "late" else None)
        sending = prefill.send("prefill", request_id, [pages(sent[: ALL // 2])])
        await asyncio.to_thread(copy.stands)
        if how == "cancelled":
            await engine.cancel(receiving, wait=False)
        elif how == "the sender gives up":
            await prefill.cancel(sending, wait=False)
        elif how == "its engine dies":
            engine.close()
        if how != "its engine dies":
            with pytest.raises(errors.KvferryError):
                await engine.wait_finished(receiving)
            assert not receiving.is_settled
            freed = await engine.free("decode", received)
            assert (freed.freed, freed.deferred) == (0, ALL // 2)
        else:
            while len((await decode.status()).sessions) > 2:
                pass
        theirs = await decode.allocate("decode", ALL // 2)
        assert not set(theirs) & set(received)
        with pytest.raises(errors.PoolFullError):
            await decode.allocate("decode", 1)
        assert (await prefill.free("prefill", sent)).deferred == ALL // 2, "they are being read"
        copy.go_on()
        await prefill.wait_settled(sending)
        theirs = np.concatenate([theirs, await decode.allocate("decode", ALL // 2)])
        assert set(theirs) >= set(received)
        tensors = [target.tensor("main", role) for role in ("k", "v")]
        for tensor in tensors:
            tensor[:, theirs] = THEIRS
        await decode.ping()
        assert all(bool((tensor[:, theirs] == THEIRS).all()) for tensor in tensors), "a late write reached a page"


async def test_a_removed_pool_that_is_still_read_has_no_owner_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered pool ends with its session; its memory stays until the last copy out of it has ended."""
    copy = StallingThreads(monkeypatch)
    memory = SharedMemory(1 << 20)
    arrays = {("main", role): memory.array((2, ALL + 1, 4, 2, 4), "float32") for role in ("k", "v")}
    async with (
        serving(tuning=ON_THREADS) as at,
        await AsyncClient.connect(at.path) as decode,
        AsyncExitStack() as stack,
    ):
        stack.callback(copy.go_on)
        await decode.create_pool("decode", SPEC)
        request_id = new_request_id()
        decode.receive("decode", request_id, [pages(await decode.allocate("decode", 2))])
        async with await AsyncClient.connect(at.path) as prefill:
            await prefill.register_pool("prefill", SPEC, arrays, device="host")
            prefill.send("prefill", request_id, [pages([1, 2])])
            await asyncio.to_thread(copy.stands)
        while len((await decode.status()).sessions) > 1:
            pass
        verified = await decode.verify()
        assert (verified.checked["pools"], verified.findings) == (2, ()), "the removed one and its own"
        copy.go_on()
        while (await decode.verify()).checked["pools"] > 1:
            pass
        (at.path / "device-pools.json").unlink()  # why there is no such pool any more, for the next daemon


# -- what never answers

DEADLINE_S: Final = 0.3
MARGIN_S: Final = 10.0
"""For a slow machine: a request that does not end never does."""
REQUEST: Final = "0123456789abcdef0123456789abcdef"
HASHES: Final = [b"0" * 16]


class Hung(NamedTuple):
    """A client of a daemon in which nothing that takes time ever ends, until the gate is open."""

    client: AsyncClient
    ids: Any
    ring: Any
    copying: threading.Event


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
        await client.create_pool("pool", SPEC, model=ModelIdentity(name="m", revision="1"))
        ids = await client.allocate("pool", 4)
        stored = client.store("pool", HASHES, ids[:1])
        await client.wait_done(stored)
        monkeypatch.setattr(HostRegion, "populate", lambda *_: gate.wait(MARGIN_S))
        monkeypatch.setattr(LowerTiers, "may_find", True)
        monkeypatch.setattr(LowerTiers, "find", asks)
        try:
            yield Hung(client, ids, await client.open_events(), copying)
        finally:
            gate.set()


async def update_tables(one: Hung) -> None:
    tables = await one.client.create_tables("t", "pool", max_batch=1, max_context_tokens=16)
    await one.client.wait(one.client.update_tables(tables, [0], after=one.ring.event(), deadline_s=DEADLINE_S))


async def receive_and_send(one: Hung) -> None:
    receiving = one.client.receive("pool", REQUEST, [pages(one.ids[:2])], deadline_s=DEADLINE_S)
    one.client.send("pool", REQUEST, [pages(one.ids[2:])])
    await one.client.wait_finished(receiving)


async def cancel(one: Hung) -> None:
    receiving = one.client.receive("pool", REQUEST, [pages(one.ids[:2])])
    one.client.send("pool", REQUEST, [pages(one.ids[2:])])
    assert await asyncio.to_thread(one.copying.wait, MARGIN_S)  # one that has not begun is cancelled at once
    await one.client.cancel(receiving, deadline_s=DEADLINE_S)


async def load(one: Hung) -> None:
    found = await one.client.lookup("pool", HASHES)
    loading = one.client.load("pool", found.lease, one.ids[:1], after=one.ring.event(), deadline_s=DEADLINE_S)
    await one.client.wait_done(loading)


async def restore(one: Hung) -> None:
    offload = one.client.offload("pool", [pages(one.ids)])
    await one.client.wait_done(offload)
    await one.client.allocate("pool", 12)
    await one.client.wait_done(one.client.restore("pool", offload.snapshot, deadline_s=DEADLINE_S))


CASES: Final[dict[str, tuple[str, Callable[[Hung], Awaitable[object]]]]] = {
    "create": ("daemon", lambda one: one.client.create_pool("other", SPEC, deadline_s=DEADLINE_S)),
    "free": ("caller", lambda one: one.client.free("pool", one.ids, after=one.ring.event(), deadline_s=DEADLINE_S)),
    "tables": ("caller", update_tables),
    "send": (
        "peer",
        lambda one: one.client.wait_finished(one.client.send("pool", REQUEST, [pages(one.ids)], deadline_s=DEADLINE_S)),
    ),
    "receive": ("peer", receive_and_send),
    "receive after": (
        "caller",
        lambda one: one.client.wait_finished(
            one.client.receive("pool", REQUEST, [pages(one.ids)], after=one.ring.event(), deadline_s=DEADLINE_S)
        ),
    ),
    "cancel": ("daemon", cancel),
    "lookup": ("daemon", lambda one: one.client.lookup("pool", [*HASHES, b"1" * 16], deadline_s=DEADLINE_S)),
    "load": ("caller", load),
    "store": (
        "caller",
        lambda one: one.client.wait_done(
            one.client.store("pool", [b"2" * 16], one.ids[:1], after=one.ring.event(), deadline_s=DEADLINE_S)
        ),
    ),
    "restore": ("daemon", restore),
}


@pytest.mark.parametrize(("fault", "case"), CASES.values(), ids=CASES)
async def test_what_does_not_answer_ends_a_request_at_its_deadline(
    hung: Hung, fault: str, case: Callable[[Hung], Awaitable[object]]
) -> None:
    with pytest.raises(errors.DeadlineError) as late:
        async with asyncio.timeout(MARGIN_S):
            await case(hung)
    assert late.value.fault == fault
    assert late.value.detail
    await hung.client.ping()


# -- a RECEIVE into the host tier that waits for room: it has come, though it is not accepted

WANTED = [pages_wanted(2)]


class Sides(NamedTuple):
    """A daemon in whose host tier no room is made before ``room`` is set; a client with pools for both sides."""

    serving: Serving
    room: asyncio.Event
    client: AsyncClient

    async def held(self, request_id: str) -> Transfer:
        transfer = self.client.receive("decode", request_id, WANTED, into="host")
        await self.client.ping()
        assert transfer.state == "sent"
        return transfer


@pytest.fixture
async def sides(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sides]:
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
        with pytest.raises(errors.TransferExistsError, match="waits for room"):
            await other.wait_finished(other.receive("decode", request_id, [pages(ids)]))
        elsewhere = other.receive("prefill", request_id, [pages(await other.allocate("prefill", 2))])
        await other.ping()
        assert elsewhere.accepted is not None
    await client.cancel(transfer)
    with pytest.raises(errors.CancelledError, match="room"):
        await client.wait_finished(transfer)
    assert (await client.free("decode", ids)).freed == len(ids)


@pytest.mark.parametrize("anew", [True, False])
async def test_the_pool_that_there_is_then_counts(sides: Sides, *, anew: bool) -> None:
    client, request_id = sides.client, new_request_id()
    transfer, other = await sides.held(request_id), msgspec.structs.replace(SPEC, head_dim=8)
    await client.delete_pool("decode")
    if not anew:
        sides.room.set()
        with pytest.raises(errors.UnknownPoolError):
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
    with pytest.raises(errors.ShuttingDownError):
        await sides.client.wait_finished(transfer)

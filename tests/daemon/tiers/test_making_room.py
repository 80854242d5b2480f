"""What waits for room in the host tier: others go on meanwhile, and all ends as if it had been there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from kvferry.daemon.control.dispatch import Answer, Call, expect
from kvferry.daemon.process import shares
from kvferry.daemon.tiers import host_tier, snapshots
from kvferry.daemon.tiers.host_tier import HostTier
from kvferry.pools.tiers.arena import Offsets
from kvferry.protocol import errors
from kvferry.protocol.base import PageList
from kvferry.protocol.pool_messages import Allocate, Free, Freed
from kvferry.protocol.tier_messages import Offload, Offloading
from kvferry.protocol.transfer_messages import Accepted, Receive
from tests.kit.tiers import HYBRID, POOL, UNIT, Engine, Harness, harness, names, new_pool, settle, until

pytestmark = pytest.mark.anyio
ALL = (1, 2, 3, 4, 5, 6, 7, 8)


@pytest.fixture(autouse=True)
def _one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evict one block, and tell of one use, in a turn of the loop; one user may have all of a tier of few blocks."""
    monkeypatch.setattr(shares, "share", lambda _user, size, of_others: size - of_others)
    monkeypatch.setattr(host_tier, "EVICTED_AT_ONCE", 1)
    monkeypatch.setattr(host_tier, "USES_AT_ONCE", 1)
    monkeypatch.setattr(host_tier, "CATCH_UP_TURNS", 8)


@pytest.fixture
async def tiers() -> AsyncIterator[Harness]:
    """Return services over a host tier of 8 blocks."""
    async with harness(8, tenants=(1, 2)) as one:
        yield one


@pytest.fixture
async def full(tiers: Harness, engine: Engine) -> Harness:
    """Return them with a tier full of blocks."""
    await engine.stored(*ALL)
    await until(lambda: not tiers.host.index.accounts.behind)
    return tiers


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let room never be made."""

    def making_room(*_: object, **__: object) -> Iterator[None]:
        while True:
            yield

    monkeypatch.setattr(HostTier, "making_room", making_room)


def offload(engine: Engine, count: int, deadline_ms: int = 0) -> int:
    """Begin an offload of so many pages; return the operation's number."""
    return engine.offload(engine.allocate(count), deadline_ms=deadline_ms).operation


def evicted(tiers: Harness) -> int:
    return tiers.counters.snapshot().get("tiers.host.evicted_blocks", 0)


async def copies(tiers: Harness, count: int = 1) -> None:
    """Wait until so many operations copy."""
    await until(lambda: len(tiers.copier.under_way) == count)


@pytest.fixture
def receives(tiers: Harness) -> Harness:
    """Have RECEIVEs into the host tier answered, and end their transfers at once."""

    async def receive(call: Call) -> Answer:
        body, receives, pool = expect(call, Receive), tiers.host_receives, tiers.pool()
        steps = receives.making_room(receives.plan(body, pool))
        if steps is not None:
            await receives.make_room(call, steps)
        receives.refused(receives.make(call, body, receives.plan(body, pool)), errors.CancelledError("over"))
        return Answer(Accepted())

    tiers.dispatcher.handle("RECEIVE", receive)
    return tiers


def receiving(engine: Engine, count: int, number: int = 0, deadline_ms: int = 0) -> int:
    """Send a RECEIVE of so many pages into the host tier; return its message's number."""
    lists = (PageList(pages=count),)
    body = Receive(pool=POOL, request_id=f"{number:032x}", lists=lists, into="host")
    return engine.send(body, deadline_ms=deadline_ms)


@pytest.mark.parametrize(("what", "expected"), [("offload", [7, 6, 5]), ("receive", [7, 6, 5, 4])])
async def test_what_evicts_much_lets_others_go_first(
    receives: Harness, full: Harness, engine: Engine, what: str, expected: list[int]
) -> None:
    """By one block more in each turn of the loop, the last one in that in which it goes on; a receive needs a pool."""
    other, there = full.engine(), list[int]()
    number = offload(engine, 4) if what == "offload" else receiving(engine, 4)
    if what == "offload":
        assert [one.waits_for for one in full.operations.status()] == ["room in the host tier"]
    while not (full.copier.under_way or (number in engine.replies and what == "receive")):
        full.check()
        there.append(len(full.host.index))
        assert other.lookup(names(1), pin=False).blocks == 1
        await asyncio.sleep(0)
    assert there == expected
    assert len(full.host.index) == expected[-1] - 1
    full.check()
    if what == "offload":
        await full.finish()
        assert engine.error(number) is None
    else:
        assert engine.reply(number, Accepted) == Accepted()
        assert receives.host.arena.free_bytes == 5 * UNIT


async def test_a_store_keeps_its_pages_and_stores_what_they_held(full: Harness, engine: Engine) -> None:
    ids = engine.allocate(4)
    for one, number in zip(ids, (11, 12, 13, 14), strict=True):
        engine.write([one], number)
    operation = engine.store(names(11, 12, 13, 14), ids)
    assert engine.ask(Free(pool=POOL, pages=4), Freed, ids) == Freed(freed=0, deferred=4)
    with pytest.raises((errors.NotOwnerError, errors.PageBusyError)):
        engine.load(engine.lookup(names(1)).lease, ids[:1])
    assert not full.copier.under_way
    full.check()
    await copies(full)
    full.check()
    await full.finish()
    assert engine.ended(operation).stored == 4
    ids = engine.allocate(4)
    engine.load(engine.lookup(names(11, 12, 13, 14)).lease, ids)
    await full.finish()
    assert engine.read(ids) == [{11}, {12}, {13}, {14}]


async def test_what_needs_no_room_does_not_wait_for_those_who_do(full: Harness, engine: Engine) -> None:
    other = full.engine()
    first, second = engine.store(names(11, 12, 13, 14), engine.allocate(4)), other.store(names(1), other.allocate(1))
    assert evicted(full) == 1
    await until(lambda: other.done(second))
    assert not engine.done(first)
    await copies(full)
    await full.finish()
    assert engine.error(first) is None


@pytest.mark.parametrize("policy", ["lru", "reuse"])
async def test_what_a_prompt_begins_with_does_not_go_for_its_end(policy: str) -> None:
    async with harness(8, policy=policy) as tiers:
        engine = tiers.engine()
        await engine.stored(1, 2, 3, 4)
        await engine.stored(21, 22, 23, 24)
        operation = engine.store(names(1, 2, 3, 4, 5, 6, 7), engine.allocate(7))
        await copies(tiers)
        await tiers.finish()
        assert (engine.ended(operation).stored, engine.ended(operation).present) == (3, 4)
        assert evicted(tiers) == 3


@pytest.mark.parametrize("uid", [1, 2])
async def test_lookups_without_an_end_hold_nobody_up(tiers: Harness, engine: Engine, uid: int) -> None:
    other = tiers.engine(uid)
    await engine.stored(1, 2, 3, 4)
    await other.stored(5, 6, 7, 8)
    other.lookup(names(5, 6, 7), pin=False)
    operation = offload(engine, 3)
    for _ in range(30):
        if not tiers.copier.under_way:
            other.lookup(names(5, 6, 7), pin=False)
            await asyncio.sleep(0)
    assert tiers.copier.under_way
    await tiers.finish()
    assert engine.error(operation) is None


async def test_what_one_waits_for_is_not_evicted_for_others(full: Harness, engine: Engine) -> None:
    other = full.engine()
    operation = engine.store(names(*range(11, 17)), engine.allocate(6))
    assert evicted(full) == 1
    offsets = full.host.reserve(1, 1, UNIT)
    assert evicted(full) == 1
    small = offload(other, 1)
    assert evicted(full) == 2
    full.host.release(1, offsets, UNIT)
    assert len(full.copier.under_way) == 1
    full.check()
    await copies(full, 2)
    await full.finish()
    assert (engine.ended(operation).stored, other.error(small)) == (6, None)


async def test_what_cannot_be_evicts_nothing(full: Harness, engine: Engine) -> None:
    with pytest.raises(errors.OutOfMemoryError):
        offload(engine, 9)
    with pytest.raises(errors.NotOwnerError):
        engine.ask(Offload(pool=POOL, lists=(PageList(pages=3),)), Offloading, [12, 13, 14])
    engine.lookup(names(1, 2, 3, 4, 5))
    with pytest.raises(errors.OverloadedError, match="is full"):
        engine.store(names(11, 12, 13, 14), engine.allocate(4))
    assert len(full.host.index) == 8


@pytest.mark.usefixtures("endless")
async def test_a_deadline_a_session_or_the_daemon_ends_while_one_waits(receives: Harness, engine: Engine) -> None:
    dead, late, late_receive = receives.engine(), offload(engine, 1, deadline_ms=1), receiving(engine, 1, deadline_ms=1)
    dead.store(names(11), dead.allocate(1))
    receiving(dead, 1)
    await until(lambda: engine.done(late) and late_receive in engine.replies)
    assert engine.error(late) is errors.DeadlineError
    with pytest.raises(errors.DeadlineError):
        engine.reply(late_receive, Accepted)
    drained = offload(engine, 1)
    receives.lose(dead)
    receives.operations.drain()
    await receives.operations.drained()
    await settle()
    assert engine.error(drained) is errors.ShuttingDownError
    assert not list(receives.service.snapshots)
    assert not receives.host_receives.waiting()
    assert receives.host.arena.used_bytes == 0


@pytest.mark.parametrize("waits", [True, False])
async def test_a_snapshot_has_all_of_its_memory_or_none(
    tiers: Harness, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    await new_pool(tiers, "hybrid", msgspec.structs.replace(HYBRID, full_layers=(0, 2)))
    taken = [engine.send(Allocate(pool="hybrid", count=1, space=space)) for space in ("swa", "main")]
    sizes, reserve = list[int](), tiers.host.reserve

    def reserve_once(tenant: int, count: int, size_bytes: int) -> Offsets:
        sizes.append(size_bytes)
        if len(sizes) == 2:
            raise errors.OverloadedError("taken meanwhile")
        return reserve(tenant, count, size_bytes)

    monkeypatch.setattr(tiers.host, "reserve", reserve_once)
    monkeypatch.setattr(tiers.host, "making_room", lambda *_, **__: iter([None] * waits))
    lists = (PageList(component="swa", first_page=0, pages=1), PageList(pages=1))
    number = engine.send(Offload(pool="hybrid", lists=lists), *(engine.replies[one][1][0] for one in taken))
    if waits:
        operation = engine.reply(number, Offloading).operation
        await until(lambda: engine.done(operation))
        assert engine.error(operation) is errors.OverloadedError
    else:
        with pytest.raises(errors.OverloadedError):
            engine.reply(number, Offloading)
    assert sizes[0] > sizes[1]  # the holes hold large ones best while they are large
    assert not list(tiers.service.snapshots)
    assert tiers.host.arena.used_bytes == 0
    tiers.check()


@pytest.mark.usefixtures("full")
async def test_a_receive_that_cannot_be_evicts_nothing(
    receives: Harness, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as bounded:
        bounded.setattr(snapshots, "MAX_SNAPSHOTS", 0)
        with pytest.raises(errors.OverloadedError, match="snapshots"):
            engine.reply(receiving(engine, 4), Accepted)
    with pytest.raises(errors.OutOfMemoryError):
        engine.reply(receiving(engine, 8), Accepted)
    with pytest.raises(errors.EmptyPagesError):
        engine.reply(receiving(engine, 0), Accepted)
    engine.lookup(names(1, 2, 3, 4, 5))
    with pytest.raises(errors.OverloadedError, match="is full"):
        engine.reply(receiving(engine, 3), Accepted)
    assert len(receives.host.index) == 8

"""Requests that wait for room in the host tier: others are answered meanwhile, and none is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from structlog.testing import capture_logs

from kvferry.daemon.control.dispatch import Call
from kvferry.daemon.services import room
from kvferry.daemon.tiers import host_tier
from kvferry.daemon.tiers.host_tier import HostTier, Want
from kvferry.pools.tiers.arena import whole_units
from kvferry.protocol.base import PageList
from kvferry.protocol.errors import CancelledError, DeadlineError, OutOfMemoryError, OverloadedError
from kvferry.protocol.tier_messages import Offload, Offloading, OperationStarted, Store
from kvferry.protocol.transfer_messages import Receive
from tests.daemon.tiers.tier_harness import POOL, UNIT, Engine, Harness, harness, names, settle, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def tiers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    """Return services over a host tier of 8 blocks, of which one at a time is evicted ahead."""
    monkeypatch.setattr(host_tier, "EVICTED_AT_ONCE", 1)
    async with harness(8) as one:
        yield one


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let room never be made."""

    def making_room(*_: object) -> Iterator[None]:
        while True:
            yield

    monkeypatch.setattr(HostTier, "making_room", making_room)


def offload(engine: Engine, count: int, deadline_ms: int = 0) -> int:
    """Ask for an offload of so many pages; return the request's number."""
    ids = engine.allocate(count)
    return engine.send(Offload(pool=POOL, lists=(PageList(pages=count),)), ids, deadline_ms=deadline_ms)


async def answered(engine: Engine, number: int) -> None:
    await until(lambda: number in engine.replies)


async def test_an_offload_that_evicts_much_lets_others_go_first(tiers: Harness, engine: Engine) -> None:
    await engine.stored(1, 2, 3, 4, 5, 6, 7, 8)
    other = tiers.engine()
    number = offload(engine, 4)
    there = [len(tiers.host.index)]
    while number not in engine.replies:
        there.append(len(tiers.host.index))
        assert other.lookup(names(1), pin=False).blocks == 1
        await asyncio.sleep(0)
    assert there == [7, 7, 6, 5]  # by one more in each turn of the loop, the last one in that of the offload
    engine.reply(number, Offloading)
    await tiers.finish()


async def test_a_store_that_evicts_much_waits_too_and_copies_only_what_is_new(tiers: Harness, engine: Engine) -> None:
    await engine.stored(1, 2, 3, 4, 5, 6, 7, 8)
    ids = engine.allocate(4)
    number = engine.send(Store(pool=POOL, hashes=b"".join(names(1, 11, 12, 13)), pages=4), ids)
    assert number not in engine.replies
    await answered(engine, number)
    engine.reply(number, OperationStarted)
    assert tiers.host.index.accounts.blocks == 5
    await tiers.finish()
    assert engine.lookup(names(1, 11, 12, 13), pin=False).blocks == 4


async def test_a_receive_asks_for_all_that_it_takes(
    tiers: Harness, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Want]()
    monkeypatch.setattr(room.Room, "is_awaited", lambda _self, _call, _tenant, wants, _handle: asked.extend(wants))
    body = Receive(pool=POOL, request_id="a" * 32, lists=(PageList(pages=3),), into="host")
    call, pool = Call(1, engine.session, body, (), 30.0), tiers.pool()
    plan = tiers.host_receives.plan(body, pool)
    tiers.host_receives.await_room(call, pool, plan, lambda _: None)
    made = tiers.host_receives.make(call, body, pool, plan)
    assert tiers.host.arena.used_bytes == sum(one.blocks * whole_units(one.size_bytes) for one in asked)
    tiers.host_receives.refused(made, CancelledError("not wanted"))


async def test_what_needs_no_room_is_answered_at_once(tiers: Harness, engine: Engine) -> None:
    await engine.stored(1, 2, 3, 4, 5, 6, 7)
    assert offload(engine, 2) in engine.replies  # one block goes
    await tiers.finish()


async def test_those_who_wait_are_answered_in_their_order(tiers: Harness, engine: Engine) -> None:
    await engine.stored(1, 2, 3, 4, 5, 6, 7, 8)
    other = tiers.engine()
    first, second = offload(engine, 3), offload(other, 1)
    assert not engine.replies.get(first)
    await answered(other, second)
    assert first in engine.replies
    assert tiers.host.index.accounts.blocks == 4
    await tiers.finish()


async def test_what_cannot_fit_is_refused_at_once_and_evicts_nothing(tiers: Harness, engine: Engine) -> None:
    await engine.stored(1, 2, 3, 4)
    with pytest.raises(OutOfMemoryError):
        engine.reply(offload(engine, 9), Offloading)
    engine.lookup(names(1, 2, 3, 4))
    with pytest.raises(OverloadedError, match="is full"):
        engine.reply(offload(engine, 5), Offloading)
    assert len(tiers.host.index) == 4


@pytest.mark.usefixtures("endless")
async def test_a_deadline_passes_while_a_request_waits(
    tiers: Harness, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = offload(engine, 1, deadline_ms=1)
    await answered(engine, late)
    with pytest.raises(DeadlineError):
        engine.reply(late, Offloading)
    monkeypatch.setattr(HostTier, "making_room", lambda *_: iter(()))
    number = offload(engine, 1)
    await answered(engine, number)
    engine.reply(number, Offloading)
    assert len(list(tiers.service.snapshots)) == 1
    await tiers.finish()


@pytest.mark.usefixtures("endless")
async def test_a_session_ends_while_its_request_waits(
    tiers: Harness, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload(engine, 1)
    tiers.lose(engine)
    monkeypatch.setattr(HostTier, "making_room", lambda *_: iter(()))
    other = tiers.engine()
    number = offload(other, 1)
    await answered(other, number)
    other.reply(number, Offloading)
    assert len(list(tiers.service.snapshots)) == 1
    await tiers.finish()


@pytest.mark.usefixtures("endless")
async def test_those_who_wait_may_be_given_up(tiers: Harness, engine: Engine) -> None:
    first, other = offload(engine, 1), tiers.engine()
    theirs = offload(other, 1)
    assert not tiers.room.give_up(engine.session.session_id, lambda call: call.message_id != first)
    assert tiers.room.give_up(engine.session.session_id, lambda call: call.message_id == first)
    with pytest.raises(CancelledError, match="room"):
        engine.reply(first, Offloading)
    assert not tiers.room.give_up(engine.session.session_id, lambda _: True)
    await settle()
    assert theirs not in other.replies


@pytest.mark.usefixtures("endless")
async def test_so_many_may_wait(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_AWAITING_ROOM", 1)
    offload(engine, 1)
    with pytest.raises(OverloadedError, match="1 requests wait for room"):
        engine.reply(offload(engine, 1), Offloading)


async def test_a_bug_holds_nobody_up(tiers: Harness, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def making_room(*_: object) -> Iterator[None]:
        yield
        raise ZeroDivisionError

    monkeypatch.setattr(HostTier, "making_room", making_room)
    with capture_logs() as logs:
        first, second = offload(engine, 1), offload(engine, 1)
        await answered(engine, second)
    engine.reply(first, Offloading)
    engine.reply(second, Offloading)
    assert [one["event"] for one in logs if one["log_level"] == "error"] == ["making room in the host tier failed"] * 2
    await tiers.finish()


async def test_a_policy_catches_up_before_it_is_asked_for_a_victim(
    tiers: Harness, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tier, "USES_AT_ONCE", 1)
    await engine.stored(*range(1, 9))
    await until(lambda: not tiers.host.index.accounts.behind)
    assert engine.lookup(names(1, 2, 3), pin=False).blocks == 3
    number = offload(engine, 1)
    assert number not in engine.replies
    assert len(tiers.host.index) == 8
    await answered(engine, number)
    assert len(tiers.host.index) == 7
    await tiers.finish()
    assert tiers.host.arena.used_bytes == 8 * UNIT

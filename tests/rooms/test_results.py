"""Results kept until they are acknowledged, re-armed rooms and their generations."""

from __future__ import annotations

import pytest

from kvferry.daemon.rooms.results import GENERATIONS_KEPT, Generations, Results
from kvferry.daemon.rooms.sides import SideKey
from kvferry.protocol.errors import RoomExistsError, UnknownRoomError
from kvferry.protocol.events import Settled
from kvferry.protocol.room_messages import RoomResult
from tests.rooms.room_world import REQUEST, RoomWorld


@pytest.fixture
def world() -> RoomWorld:
    """Return an empty world."""
    return RoomWorld()


def key(pool: str, side: str, request: str = REQUEST) -> SideKey:
    return SideKey(7, request, pool, "send" if side == "send" else "receive")


def test_a_result_follows_its_side_and_stays_until_acknowledged(world: RoomWorld) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    with pytest.raises(UnknownRoomError):
        world.book.result(prefill, key("prefill", "send"))
    world.send(prefill, source, world.filled(source, prefill, 2))
    assert world.book.result(prefill, key("prefill", "send")) == RoomResult(state="open")
    world.receive(decode, destination, world.filled(destination, decode, 2))
    world.cancel(decode, destination, "receive")
    finished = world.book.result(prefill, key("prefill", "send"))
    assert (finished.state, finished.settled) == ("finished", None)
    assert finished.finished == world.told[prefill][0]
    world.transport.finish_all()
    settled = world.book.result(prefill, key("prefill", "send"))
    assert settled == RoomResult(state="settled", finished=finished.finished, settled=last_settled(world, prefill))
    assert world.book.results.count(prefill) == 1
    world.acknowledge(prefill, source, "send")
    with pytest.raises(UnknownRoomError):
        world.book.result(prefill, key("prefill", "send"))
    assert world.book.results.count(prefill) == 0


def last_settled(world: RoomWorld, session: int) -> Settled:
    event = world.told[session][-1]
    assert isinstance(event, Settled)
    return event


def test_results_are_the_sessions_own(world: RoomWorld) -> None:
    prefill, decode = world.session(), world.session()
    source = world.pool("prefill")
    world.send(prefill, source, world.filled(source, prefill, 2))
    with pytest.raises(UnknownRoomError):
        world.book.result(decode, key("prefill", "send"))


def test_nothing_is_kept_for_a_lost_session(world: RoomWorld) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    world.send(prefill, source, world.filled(source, prefill, 2))
    world.lose(prefill)
    world.receive(decode, destination, world.filled(destination, decode, 2))
    world.transport.finish_all()
    assert world.book.results.total == 1
    world.lose(decode)
    assert world.book.results.total == 0


def test_a_room_is_armed_again_with_the_same_pages_and_another_source(world: RoomWorld) -> None:
    first, second, decode = world.session(), world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    received = world.filled(destination, decode, 2)
    assert world.receive(decode, destination, received).generation == 1
    world.send(first, source, world.filled(source, first, 2)[:1], last=False)
    world.lose(first)
    with pytest.raises(RoomExistsError):
        world.receive(decode, destination, received)  # a byte may still land
    world.transport.finish_all()
    assert world.outcomes(decode) == ["PEER_LOST", "settled"]
    assert world.receive(decode, destination, received).generation == 2
    sent = world.filled(source, second, 2)
    world.send(second, source, sent)
    world.transport.finish_all()
    assert world.outcomes(decode) == ["PEER_LOST", "settled", "OK", "settled"]
    assert [event.generation for event in world.told[decode]] == [1, 1, 2, 2]
    assert world.content(destination, received) == world.content(source, sent)


def test_a_late_chunk_does_not_start_a_failed_hand_off_anew(world: RoomWorld) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    sent = world.filled(source, prefill, 2)
    world.receive(decode, destination, world.filled(destination, decode, 2))
    world.send(prefill, source, sent[:1], last=False)
    world.cancel(decode, destination, "receive")
    for settled in (False, True):
        if settled:
            world.transport.finish_all()
        with pytest.raises(RoomExistsError, match="failed with PEER_CANCELLED"):
            world.send(prefill, source, sent[1:], first_page=1)
    world.acknowledge(prefill, source, "send")
    world.send(prefill, source, sent)
    assert [side.side for side in world.book.sides] == ["send"]


def test_a_hand_off_that_begins_anew_drops_the_old_result(world: RoomWorld) -> None:
    decode, destination = world.session(), world.pool("decode")
    received = world.filled(destination, decode, 2)
    world.receive(decode, destination, received)
    world.cancel(decode, destination, "receive")
    world.receive(decode, destination, received)
    assert world.book.result(decode, key("decode", "receive")) == RoomResult(state="open")
    assert world.book.results.count(decode) == 1


def test_results_of_unknown_sessions_are_not_kept() -> None:
    results = Results()
    results.begin(5, key("prefill", "send"))
    results.add(5, key("prefill", "send"), RoomResult(state="settled"))
    assert (results.total, results.count(5), results.get(5, key("prefill", "send"))) == (0, 0, None)


def test_generations_count_by_session_and_room_and_are_bounded() -> None:
    generations, room = Generations(), key("decode", "receive")
    assert [generations.next(1, room), generations.next(1, room), generations.next(2, room)] == [1, 2, 1]
    generations.forget_session(1)
    assert (generations.next(1, room), generations.next(2, room)) == (1, 2)
    for number in range(GENERATIONS_KEPT):
        generations.next(3, key("decode", "receive", f"{number:032x}"))
    assert generations.next(1, room) == 1

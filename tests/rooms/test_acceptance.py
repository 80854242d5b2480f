"""What a SEND or RECEIVE must satisfy. The later message is refused; what was accepted goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvferry.protocol.errors import (
    DuplicatePageError,
    FirstTokenTwiceError,
    GeometryMismatchError,
    IncompleteError,
    KvferryError,
    LengthMismatchError,
    NotOwnerError,
    PageBusyError,
    PageGapError,
    PageOverlapError,
    RoomExistsError,
    UncoveredEntryError,
    UnexpectedSourceError,
)
from tests.rooms.room_world import PAGE_BYTES, RoomWorld, layers

pytestmark = pytest.mark.any_device


@pytest.fixture
def world() -> RoomWorld:
    """Return an empty world."""
    return RoomWorld()


@contextmanager
def refused(world: RoomWorld, error: type[KvferryError], field: str) -> Iterator[None]:
    """Expect a refusal that leaves no trace: no events, no copies, no held pages, and the same sides."""
    before = snapshot(world)
    with pytest.raises(error) as caught:
        yield
    assert caught.value.field == field
    assert snapshot(world) == before


def snapshot(world: RoomWorld) -> list[Any]:
    return [
        {session: list(events) for session, events in world.told.items()},
        dict(world.transport.under_way),
        [(pool.allocator.free_count, pool.allocator.busy_count, world.held_pages(pool)) for pool in world.pools],
        [(side.key, side.state, side.pages, side.waits_for()) for side in world.book.sides],
        [world.book.results.count(session) for session in world.told],
    ]


def ends_well(world: RoomWorld, *sessions: int) -> None:
    """Let all copies finish; everyone must have succeeded."""
    world.transport.finish_all()
    for session in sessions:
        assert world.outcomes(session) == ["OK", "settled"]


# -- chunks


def test_a_prompt_in_chunks(world: RoomWorld) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    sent, received = world.filled(source, prefill, 6), world.filled(destination, decode, 6)[::-1].copy()
    world.send(prefill, source, sent[:2], tokens=8, last=False)
    world.receive(decode, destination, received, tokens=22)
    world.send(prefill, source, sent[2:3], first_page=2, tokens=4, last=False)
    world.transport.finish_all()
    assert world.outcomes(decode) == []
    world.send(prefill, source, sent[3:], first_page=3, tokens=10, first_token=9)
    ends_well(world, prefill, decode)
    assert world.content(destination, received) == world.content(source, sent)
    assert world.finished(decode).first_token == 9
    assert (world.finished(prefill).pages, world.finished(decode).pages) == (6, 6)


@pytest.mark.parametrize("first_page", [0, 1, 3])
def test_a_chunk_must_continue_the_one_before(world: RoomWorld, first_page: int) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    sent, received = world.filled(source, prefill, 4), world.filled(destination, decode, 4)
    world.send(prefill, source, sent[:2], last=False)
    with refused(world, PageGapError, "lists[0].first_page"):
        world.send(prefill, source, sent[2:], first_page=first_page)
    world.receive(decode, destination, received)
    with refused(world, PageGapError, "lists[0].first_page"):
        world.send(prefill, source, sent[2:], first_page=first_page)
    world.send(prefill, source, sent[2:], first_page=2)
    ends_well(world, prefill, decode)


def test_a_chunk_may_not_end_inside_a_page(world: RoomWorld) -> None:
    prefill, pool = world.session(), world.pool("prefill")
    sent = world.filled(pool, prefill, 4)
    with refused(world, PageGapError, "lists[0].tokens"):
        world.send(prefill, pool, sent[:2], tokens=7, last=False)
    world.send(prefill, pool, sent[:2], tokens=8, last=False)


@pytest.mark.parametrize("tokens", [12, 17])
def test_tokens_must_fill_the_pages(world: RoomWorld, tokens: int) -> None:
    session, pool = world.session(), world.pool("prefill")
    pages = world.filled(pool, session, 4)
    for side in (world.send, world.receive):
        with refused(world, LengthMismatchError, "lists[0].tokens"):
            side(session, pool, pages, tokens=tokens)


@pytest.mark.parametrize("first", ["send", "receive"])
@pytest.mark.parametrize(("sent_tokens", "received_tokens"), [(15, 16), (16, 15), (13, 16)])
def test_both_sides_must_mean_the_same_end(
    world: RoomWorld, first: str, sent_tokens: int, received_tokens: int
) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    sent, received = world.filled(source, prefill, 4), world.filled(destination, decode, 4)
    if first == "send":
        world.send(prefill, source, sent, tokens=sent_tokens)
        with refused(world, LengthMismatchError, "lists[0].tokens"):
            world.receive(decode, destination, received, tokens=received_tokens)
        world.receive(decode, destination, received, tokens=sent_tokens)
    else:
        world.receive(decode, destination, received, tokens=received_tokens)
        with refused(world, LengthMismatchError, "lists[0].tokens"):
            world.send(prefill, source, sent, tokens=sent_tokens)
        world.send(prefill, source, sent)  # one side may leave the tokens out
    ends_well(world, prefill, decode)


@pytest.mark.parametrize("first", ["send", "receive"])
def test_more_pages_than_the_room_has(world: RoomWorld, first: str) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    sent, received = world.filled(source, prefill, 4), world.filled(destination, decode, 4)
    if first == "send":
        world.send(prefill, source, sent)
        with refused(world, LengthMismatchError, "lists[0]"):
            world.receive(decode, destination, received[:3])
        world.receive(decode, destination, received)
    else:
        world.receive(decode, destination, received[:3])
        with refused(world, LengthMismatchError, "lists[0]"):
            world.send(prefill, source, sent)
        world.send(prefill, source, sent[:3])
    ends_well(world, prefill, decode)


@pytest.mark.parametrize("first", ["send", "receive"])
def test_fewer_pages_than_the_room_has(world: RoomWorld, first: str) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    sent, received = world.filled(source, prefill, 4), world.filled(destination, decode, 4)
    if first == "send":
        world.send(prefill, source, sent[:3])
        with refused(world, IncompleteError, "lists"):
            world.receive(decode, destination, received)
        world.receive(decode, destination, received[:3])
    else:
        world.receive(decode, destination, received)
        with refused(world, IncompleteError, "lists"):
            world.send(prefill, source, sent[:3])
        world.send(prefill, source, sent[:3], last=False)
        world.send(prefill, source, sent[3:], first_page=3)
    ends_well(world, prefill, decode)


def test_a_hole_in_front_is_found_at_the_end(world: RoomWorld) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    sent, received = world.filled(source, prefill, 3), world.filled(destination, decode, 4)
    world.receive(decode, destination, received)
    world.send(prefill, source, sent[:1], first_page=1, last=False)
    with refused(world, IncompleteError, "lists"):
        world.send(prefill, source, sent[1:], first_page=2)


# -- a prefix that decode has already


@pytest.mark.parametrize("chunks", [[5], [2, 3], [1, 1, 1, 2], [3, 2]])
@pytest.mark.parametrize("first", ["send", "receive"])
def test_surplus_prefix_pages_are_skipped_and_counted(world: RoomWorld, chunks: list[int], first: str) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    sent, received = world.filled(source, prefill, 5), world.filled(destination, decode, 3)
    if first == "receive":
        world.receive(decode, destination, received, first_page=2)
    at, skipped = 0, []
    for count in chunks:
        reply = world.send(prefill, source, sent[at : at + count], first_page=at, last=at + count == 5)
        skipped.append(reply.skipped_source_pages)
        at += count
    if first == "receive":
        assert skipped == [min(2, sum(chunks[: number + 1])) for number in range(len(chunks))]
    else:
        assert world.receive(decode, destination, received, first_page=2).skipped_source_pages == 2
    ends_well(world, prefill, decode)
    assert world.content(destination, received) == world.content(source, sent[2:])
    assert world.finished(decode).skipped_source_pages == 2
    assert world.finished(prefill).skipped_source_pages == 2
    assert world.finished(decode).moved_bytes == 3 * 4 * PAGE_BYTES


def test_pages_that_decode_has_not_must_come(world: RoomWorld) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    sent, received = world.filled(source, prefill, 3), world.filled(destination, decode, 4)
    world.receive(decode, destination, received, first_page=1)
    with refused(world, IncompleteError, "lists"):
        world.send(prefill, source, sent, first_page=2)


# -- first token and payload


@pytest.mark.parametrize("first", [{"first_token": 1}, {"payload": b"x"}, {"first_token": 0}])
@pytest.mark.parametrize("second", [{"first_token": 2}, {"payload": b"y"}])
def test_one_send_of_a_request_carries_the_first_token(
    world: RoomWorld, first: dict[str, Any], second: dict[str, Any]
) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    sent, received = world.filled(source, prefill, 2), world.filled(destination, decode, 2)
    world.send(prefill, source, sent[:1], last=False, **first)
    with refused(world, FirstTokenTwiceError, "first_token"):
        world.send(prefill, source, sent[1:], first_page=1, **second)
    world.receive(decode, destination, received)
    with refused(world, FirstTokenTwiceError, "first_token"):
        world.send(prefill, source, sent[1:], first_page=1, **second)
    world.send(prefill, source, sent[1:], first_page=1)
    ends_well(world, prefill, decode)
    assert world.finished(decode).first_token == first.get("first_token")
    assert world.finished(decode).payload == first.get("payload", b"")


def stages(world: RoomWorld) -> tuple[int, int, list[Any], Any]:
    """Return a prefill and a decode session, pools of two pipeline stages, and the decode pool."""
    prefill, decode = world.session(), world.session()
    pools = [world.pool("stage0", layers(2)), world.pool("stage1", layers(1, first=2))]
    return prefill, decode, pools, world.pool("decode", layers(3))


@pytest.mark.parametrize("receive_at", [0, 1, 2])
def test_one_stage_of_a_room_carries_the_first_token(world: RoomWorld, receive_at: int) -> None:
    prefill, decode, (stage0, stage1), destination = stages(world)
    received = world.filled(destination, decode, 2)
    pages = [world.filled(stage, prefill, 2) for stage in (stage0, stage1)]
    if receive_at == 0:
        world.receive(decode, destination, received, sources=2)
    world.send(prefill, stage0, pages[0], first_token=1)
    if receive_at == 1:
        world.receive(decode, destination, received, sources=2)
    if receive_at == 2:
        world.send(prefill, stage1, pages[1], first_token=2)
        with refused(world, FirstTokenTwiceError, "request_id"):
            world.receive(decode, destination, received, sources=2)
        return
    with refused(world, FirstTokenTwiceError, "first_token"):
        world.send(prefill, stage1, pages[1], first_token=2)
    world.send(prefill, stage1, pages[1])
    world.transport.finish_all()
    assert world.finished(decode).first_token == 1


# -- several sources


@pytest.mark.parametrize("order", ["r01", "0r1", "01r", "r10", "10r", "1r0"])
def test_pipeline_stages_fill_one_room(world: RoomWorld, order: str) -> None:
    prefill, decode, pools, destination = stages(world)
    pages = [world.filled(pool, prefill, 3) for pool in pools]
    received = world.filled(destination, decode, 3)
    for step in order:
        assert world.outcomes(decode) == []
        if step == "r":
            world.receive(decode, destination, received, sources=2)
        else:
            world.send(prefill, pools[int(step)], pages[int(step)])
    world.transport.finish_all()
    assert world.outcomes(decode) == ["OK", "settled"]
    assert sorted(world.outcomes(prefill)) == ["OK", "OK", "settled", "settled"]
    got = world.content(destination, received)
    for pool, sent in zip(pools, pages, strict=True):
        for logical, content in enumerate(world.content(pool, sent)):
            assert content.items() <= got[logical].items()


@pytest.mark.parametrize("order", ["r0x", "0rx", "0xr"])
@pytest.mark.parametrize("other", ["overlapping", "incomplete", "uncovered"])
def test_stages_that_do_not_make_a_whole(world: RoomWorld, order: str, other: str) -> None:
    prefill, decode, (stage0, _), destination = stages(world)
    entries = {"overlapping": layers(2, first=1), "incomplete": layers(1, first=2), "uncovered": layers(1, first=1)}
    error = {"overlapping": PageOverlapError, "incomplete": IncompleteError, "uncovered": UncoveredEntryError}[other]
    if other == "uncovered":
        stage0 = world.pool("short", layers(1))
    stage = world.pool("other", entries[other])
    pages, more = world.filled(stage0, prefill, 3), world.filled(stage, prefill, 3)
    if other == "incomplete":
        more = more[:2]
    received = world.filled(destination, decode, 3)
    steps: dict[str, Callable[[], Any]] = {
        "r": lambda: world.receive(decode, destination, received, sources=2),
        "0": lambda: world.send(prefill, stage0, pages),
        "x": lambda: world.send(prefill, stage, more),
    }
    for step in order[:-1]:
        steps[step]()
    with refused(world, error, "lists"):
        steps[order[-1]]()


def test_more_sources_than_the_room_expects(world: RoomWorld) -> None:
    prefill, decode, (stage0, stage1), destination = stages(world)
    pages = [world.filled(stage, prefill, 2) for stage in (stage0, stage1)]
    received = world.filled(destination, decode, 2)
    third = world.pool("third", layers(3))
    more = world.filled(third, prefill, 2)
    world.receive(decode, destination, received, sources=2)
    world.send(prefill, stage0, pages[0])
    world.send(prefill, stage1, pages[1], last=False)
    with refused(world, UnexpectedSourceError, "request_id"):
        world.send(prefill, third, more)


def test_more_waiting_sends_than_the_room_expects(world: RoomWorld) -> None:
    prefill, decode, pools, destination = stages(world)
    for pool in pools:
        world.send(prefill, pool, world.filled(pool, prefill, 2))
    received = world.filled(destination, decode, 2)
    with refused(world, UnexpectedSourceError, "sources"):
        world.receive(decode, destination, received, sources=1)
    world.receive(decode, destination, received, sources=2)
    world.transport.finish_all()
    assert world.outcomes(decode) == ["OK", "settled"]


@pytest.mark.parametrize("dying", ["complete stage", "stage that has more to send"])
def test_one_stage_dies(world: RoomWorld, dying: str) -> None:
    _, decode, (stage0, stage1), destination = stages(world)
    engines = [world.session(), world.session()]
    received = world.filled(destination, decode, 2)
    world.receive(decode, destination, received, sources=2)
    world.send(engines[0], stage0, world.filled(stage0, engines[0], 2))
    pages = world.filled(stage1, engines[1], 2)
    world.send(engines[1], stage1, pages[:1], last=False)
    if dying == "complete stage":
        world.lose(engines[0])
        world.send(engines[1], stage1, pages[1:], first_page=1)
        ends_well(world, decode, engines[1])
    else:
        world.lose(engines[1])
        assert world.outcomes(decode) == ["PEER_LOST"]
        assert world.outcomes(engines[0]) == ["PEER_LOST"]
        world.transport.finish_all()
        assert world.outcomes(decode) == ["PEER_LOST", "settled"]
        assert stage1.allocator.idle


# -- several destinations


@pytest.mark.parametrize("receives_before", [0, 1, 2])
def test_two_rooms_take_the_same_pages(world: RoomWorld, receives_before: int) -> None:
    prefill, source = world.session(), world.pool("prefill")
    sent = world.filled(source, prefill, 3)
    decodes = [world.session(), world.session()]
    rooms = [world.pool(f"decode{number}") for number in range(2)]
    pages = [world.filled(room, decode, 3) for room, decode in zip(rooms, decodes, strict=True)]
    for number in range(3):
        if number == receives_before:
            world.send(prefill, source, sent, destinations=2, first_token=3)
        if number < 2:
            world.receive(decodes[number], rooms[number], pages[number])
    first, second = world.transport.under_way
    world.transport.finish(first)
    assert world.outcomes(decodes[0]) == ["OK", "settled"]
    assert world.outcomes(prefill) == []
    assert source.allocator.busy_count == 3
    world.transport.finish(second)
    ends_well(world, prefill, *decodes)
    for room, ids in zip(rooms, pages, strict=True):
        assert world.content(room, ids) == world.content(source, sent)
    assert [world.finished(decode).first_token for decode in decodes] == [3, 3]
    assert world.finished(prefill).moved_bytes == 2 * world.finished(decodes[0]).moved_bytes


def test_a_second_room_may_come_when_the_first_is_done(world: RoomWorld) -> None:
    prefill, source = world.session(), world.pool("prefill")
    sent = world.filled(source, prefill, 3)
    world.send(prefill, source, sent, destinations=2)
    for number in range(2):
        assert world.outcomes(prefill) == []
        assert source.allocator.busy_count == 3
        decode, room = world.session(), world.pool(f"decode{number}")
        received = world.filled(room, decode, 3)
        world.receive(decode, room, received)
        ends_well(world, decode)
        assert world.content(room, received) == world.content(source, sent)
    assert world.outcomes(prefill) == ["OK", "settled"]
    assert source.allocator.busy_count == 0


def test_one_of_two_rooms_dies(world: RoomWorld) -> None:
    prefill, source = world.session(), world.pool("prefill")
    sent = world.filled(source, prefill, 3)
    decodes = [world.session(), world.session()]
    rooms = [world.pool(f"decode{number}") for number in range(2)]
    world.send(prefill, source, sent[:2], destinations=2, last=False)
    for room, decode in zip(rooms, decodes, strict=True):
        world.receive(decode, room, world.filled(room, decode, 3))
    world.lose(decodes[0])
    assert world.outcomes(prefill) == []
    world.send(prefill, source, sent[2:], first_page=2)
    world.transport.finish_all()
    assert world.outcomes(decodes[1]) == ["OK", "settled"]
    assert world.outcomes(prefill) == ["PEER_LOST", "settled"]
    assert rooms[0].allocator.idle


def test_a_third_room_waits_for_another_send(world: RoomWorld) -> None:
    prefill, source = world.session(), world.pool("prefill")
    decode = world.session()
    rooms = [world.pool(f"decode{number}") for number in range(2)]
    world.send(prefill, source, world.filled(source, prefill, 2))
    for room in rooms:
        world.receive(decode, room, world.filled(room, decode, 2))
    world.transport.finish_all()
    assert world.outcomes(decode) == ["OK", "settled"]
    assert [side.pool.name for side in world.book.sides] == ["decode1"]


# -- pools that do not fit, pages that are not there


def test_pools_of_other_geometry(world: RoomWorld) -> None:
    prefill, decode = world.session(), world.session()
    source = world.pool("prefill")
    wide = [entry_with(one, page_bytes=16) for one in layers(2)]
    destination = world.pool("decode", wide)
    world.send(prefill, source, world.filled(source, prefill, 2))
    received = destination.allocator.allocate(decode, 2)
    with refused(world, GeometryMismatchError, "destination.entries[0].page_bytes"):
        world.receive(decode, destination, received)


def entry_with(entry: Any, **changes: Any) -> Any:  # noqa: ANN401  an entry and any of its fields
    return type(entry)(**{name: getattr(entry, name) for name in entry.__struct_fields__} | changes)


@pytest.mark.parametrize("first", ["send", "receive"])
def test_an_entry_without_a_partner(world: RoomWorld, first: str) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill", layers(2)), world.pool("decode", layers(3))
    sent, received = world.filled(source, prefill, 2), world.filled(destination, decode, 2)
    steps = [lambda: world.send(prefill, source, sent), lambda: world.receive(decode, destination, received)]
    if first == "receive":
        steps.reverse()
    steps[0]()
    with refused(world, UncoveredEntryError, "destination.entries"):
        steps[1]()


def test_surplus_source_entries_are_counted(world: RoomWorld) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill", layers(4)), world.pool("decode", layers(2))
    world.receive(decode, destination, world.filled(destination, decode, 2))
    reply = world.send(prefill, source, world.filled(source, prefill, 2))
    assert reply.skipped_source_entries == 4
    ends_well(world, prefill, decode)
    assert world.finished(decode).skipped_source_entries == 4


@pytest.mark.parametrize("with_draft", [False, True])
def test_draft_layers_are_optional(world: RoomWorld, *, with_draft: bool) -> None:
    prefill, decode = world.session(), world.session()
    both = [*layers(2), *layers(1, component="draft")]
    source, destination = world.pool("prefill", both if with_draft else layers(2)), world.pool("decode", both)
    sent, received = world.filled(source, prefill, 4), world.filled(destination, decode, 4)
    before = world.content(destination, received)
    world.receive(decode, destination, {"main": received[:2], "draft": received[2:]})
    world.send(prefill, source, {"main": sent[:2], "draft": sent[2:]} if with_draft else sent[:2])
    ends_well(world, prefill, decode)
    offered, got = world.content(source, sent), world.content(destination, received)
    for page in range(4):
        for name, content in got[page].items():
            arrives = name.startswith("main/") if page < 2 else with_draft and name.startswith("draft/")
            assert content == (offered if arrives else before)[page][name]


def test_pages_of_another_session(world: RoomWorld) -> None:
    prefill, decode, stranger = world.session(), world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    sent, received = world.filled(source, prefill, 2), world.filled(destination, decode, 2)
    with refused(world, NotOwnerError, "lists[0].pages"):
        world.send(stranger, source, sent)
    with refused(world, NotOwnerError, "lists[0].pages"):
        world.receive(stranger, destination, received)
    world.send(prefill, source, sent)
    with refused(world, NotOwnerError, "lists[0].pages"):
        world.receive(stranger, destination, received)
    world.receive(decode, destination, received)
    ends_well(world, prefill, decode)


def test_a_destination_page_named_twice(world: RoomWorld) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    sent, received = world.filled(source, prefill, 2), world.filled(destination, decode, 2)
    for waiting in (False, True):
        if waiting:
            world.send(prefill, source, sent)
        field = "destination_pages" if waiting else "lists[0].pages"
        with refused(world, DuplicatePageError, field):
            world.receive(decode, destination, received[[0, 0]])


def test_a_source_page_named_twice_is_read_twice(world: RoomWorld) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    sent, received = world.filled(source, prefill, 1)[[0, 0]], world.filled(destination, decode, 2)
    world.send(prefill, source, sent)
    world.receive(decode, destination, received)
    ends_well(world, prefill, decode)
    assert world.content(destination, received) == world.content(source, sent)


def test_a_refused_send_does_not_keep_the_room_from_a_right_one(world: RoomWorld) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    sent, received = world.filled(source, prefill, 3), world.filled(destination, decode, 3)
    busy = world.filled(source, prefill, 1)
    world.receive(prefill, source, busy, request="e" * 32)
    world.receive(decode, destination, received)
    with refused(world, PageBusyError, "lists[0].pages"):  # after its cells were promised
        world.send(prefill, source, np.concatenate((sent[:2], busy)))
    world.send(prefill, source, sent)
    ends_well(world, prefill, decode)


# -- request ids in use


@pytest.mark.parametrize("state", ["waiting", "under way", "finished, not settled"])
def test_a_live_duplicate(world: RoomWorld, state: str) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    sent, received = world.filled(source, prefill, 2), world.filled(destination, decode, 2)
    world.send(prefill, source, sent)
    if state != "waiting":
        world.receive(decode, destination, received)
    if state == "finished, not settled":
        world.cancel(decode, destination, "receive")
    other = world.session()
    duplicate, others = world.filled(source, prefill, 2), world.filled(source, other, 2)
    again = world.filled(destination, decode, 2)
    with refused(world, RoomExistsError, "request_id" if state.startswith("finished") else "last"):
        world.send(prefill, source, duplicate)
    with refused(world, RoomExistsError, "request_id"):
        world.send(other, source, others)
    if state != "waiting":
        with refused(world, RoomExistsError, "request_id"):
            world.receive(decode, destination, again)


def test_another_tenants_request_id(world: RoomWorld) -> None:
    prefill, stranger = world.session(), world.session()
    source, theirs = world.pool("prefill"), world.pool("prefill", tenant=8)
    world.send(prefill, source, world.filled(source, prefill, 2))
    pages = world.filled(theirs, stranger, 2)
    with refused(world, RoomExistsError, "request_id"):
        world.send(stranger, theirs, pages)
    with refused(world, RoomExistsError, "request_id"):
        world.receive(stranger, theirs, pages)
    world.receive(stranger, theirs, pages, request="f" * 32)


def test_a_request_id_may_be_used_again_after_success(world: RoomWorld) -> None:
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    sent, received = world.filled(source, prefill, 2), world.filled(destination, decode, 2)
    for generation in (1, 2, 3):
        world.fill(source, sent)
        assert world.receive(decode, destination, received).generation == generation
        world.send(prefill, source, sent)
        world.transport.finish_all()
        assert world.finished(decode).generation == generation
        assert world.content(destination, received) == world.content(source, sent)

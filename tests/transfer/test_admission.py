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
    TooLargeError,
    TransferExistsError,
    UncoveredEntryError,
    UnexpectedSourceError,
)
from kvferry.protocol.transfer_messages import MAX_CHUNKS
from tests.transfer.transfer_harness import PAGE_BYTES, TransferHarness, layers

pytestmark = pytest.mark.any_device


@pytest.fixture
def harness() -> TransferHarness:
    """Return an empty harness."""
    return TransferHarness()


@contextmanager
def refused(harness: TransferHarness, error: type[KvferryError], field: str) -> Iterator[None]:
    """Expect a refusal that leaves no trace: no events, no copies, no held pages, and the same sides."""
    before = snapshot(harness)
    with pytest.raises(error) as caught:
        yield
    assert caught.value.field == field
    assert snapshot(harness) == before


def snapshot(harness: TransferHarness) -> list[Any]:
    return [
        {session: list(events) for session, events in harness.told.items()},
        dict(harness.transport.under_way),
        [(pool.allocator.free_count, pool.allocator.busy_count, harness.held_pages(pool)) for pool in harness.pools],
        [
            (direction.key, direction.state, direction.pages, direction.waits_for())
            for direction in harness.state_machine.endpoints
        ],
        [harness.state_machine.results.count(session) for session in harness.told],
    ]


def ends_well(harness: TransferHarness, *sessions: int) -> None:
    """Let all copies finish; everyone must have succeeded."""
    harness.transport.finish_all()
    for session in sessions:
        assert harness.outcomes(session) == ["OK", "settled"]


# -- chunks


def test_the_chunks_of_a_transfer_are_bounded(harness: TransferHarness) -> None:
    prefill, source = harness.session(), harness.pool("prefill")
    for _ in range(MAX_CHUNKS):
        harness.send(prefill, source, {}, last=False)
    with pytest.raises(TooLargeError, match="larger chunks") as refused:
        harness.send(prefill, source, {})
    assert refused.value.field == "last"


def test_a_prompt_in_chunks(harness: TransferHarness) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    sent, received = harness.filled(source, prefill, 6), harness.filled(destination, decode, 6)[::-1].copy()
    harness.send(prefill, source, sent[:2], tokens=8, last=False)
    harness.receive(decode, destination, received, tokens=22)
    harness.send(prefill, source, sent[2:3], first_page=2, tokens=4, last=False)
    harness.transport.finish_all()
    assert harness.outcomes(decode) == []
    harness.send(prefill, source, sent[3:], first_page=3, tokens=10, first_token=9)
    ends_well(harness, prefill, decode)
    assert harness.content(destination, received) == harness.content(source, sent)
    assert harness.finished(decode).first_token == 9
    assert (harness.finished(prefill).pages, harness.finished(decode).pages) == (6, 6)


@pytest.mark.parametrize("first_page", [0, 1, 3])
def test_a_chunk_must_continue_the_one_before(harness: TransferHarness, first_page: int) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    sent, received = harness.filled(source, prefill, 4), harness.filled(destination, decode, 4)
    harness.send(prefill, source, sent[:2], last=False)
    with refused(harness, PageGapError, "lists[0].first_page"):
        harness.send(prefill, source, sent[2:], first_page=first_page)
    harness.receive(decode, destination, received)
    with refused(harness, PageGapError, "lists[0].first_page"):
        harness.send(prefill, source, sent[2:], first_page=first_page)
    harness.send(prefill, source, sent[2:], first_page=2)
    ends_well(harness, prefill, decode)


def test_a_chunk_may_not_end_inside_a_page(harness: TransferHarness) -> None:
    prefill, pool = harness.session(), harness.pool("prefill")
    sent = harness.filled(pool, prefill, 4)
    with refused(harness, PageGapError, "lists[0].tokens"):
        harness.send(prefill, pool, sent[:2], tokens=7, last=False)
    harness.send(prefill, pool, sent[:2], tokens=8, last=False)


@pytest.mark.parametrize("tokens", [12, 17])
def test_tokens_must_fill_the_pages(harness: TransferHarness, tokens: int) -> None:
    session, pool = harness.session(), harness.pool("prefill")
    pages = harness.filled(pool, session, 4)
    for direction in (harness.send, harness.receive):
        with refused(harness, LengthMismatchError, "lists[0].tokens"):
            direction(session, pool, pages, tokens=tokens)


@pytest.mark.parametrize("first", ["send", "receive"])
@pytest.mark.parametrize(("sent_tokens", "received_tokens"), [(15, 16), (16, 15), (13, 16)])
def test_both_sides_must_mean_the_same_end(
    harness: TransferHarness, first: str, sent_tokens: int, received_tokens: int
) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    sent, received = harness.filled(source, prefill, 4), harness.filled(destination, decode, 4)
    if first == "send":
        harness.send(prefill, source, sent, tokens=sent_tokens)
        with refused(harness, LengthMismatchError, "lists[0].tokens"):
            harness.receive(decode, destination, received, tokens=received_tokens)
        harness.receive(decode, destination, received, tokens=sent_tokens)
    else:
        harness.receive(decode, destination, received, tokens=received_tokens)
        with refused(harness, LengthMismatchError, "lists[0].tokens"):
            harness.send(prefill, source, sent, tokens=sent_tokens)
        harness.send(prefill, source, sent)  # one side may leave the tokens out
    ends_well(harness, prefill, decode)


@pytest.mark.parametrize("first", ["send", "receive"])
def test_more_pages_than_the_receive_has(harness: TransferHarness, first: str) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    sent, received = harness.filled(source, prefill, 4), harness.filled(destination, decode, 4)
    if first == "send":
        harness.send(prefill, source, sent)
        with refused(harness, LengthMismatchError, "lists[0]"):
            harness.receive(decode, destination, received[:3])
        harness.receive(decode, destination, received)
    else:
        harness.receive(decode, destination, received[:3])
        with refused(harness, LengthMismatchError, "lists[0]"):
            harness.send(prefill, source, sent)
        harness.send(prefill, source, sent[:3])
    ends_well(harness, prefill, decode)


@pytest.mark.parametrize("first", ["send", "receive"])
def test_fewer_pages_than_the_receive_has(harness: TransferHarness, first: str) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    sent, received = harness.filled(source, prefill, 4), harness.filled(destination, decode, 4)
    if first == "send":
        harness.send(prefill, source, sent[:3])
        with refused(harness, IncompleteError, "lists"):
            harness.receive(decode, destination, received)
        harness.receive(decode, destination, received[:3])
    else:
        harness.receive(decode, destination, received)
        with refused(harness, IncompleteError, "lists"):
            harness.send(prefill, source, sent[:3])
        harness.send(prefill, source, sent[:3], last=False)
        harness.send(prefill, source, sent[3:], first_page=3)
    ends_well(harness, prefill, decode)


def test_a_hole_in_front_is_found_at_the_end(harness: TransferHarness) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    sent, received = harness.filled(source, prefill, 3), harness.filled(destination, decode, 4)
    harness.receive(decode, destination, received)
    harness.send(prefill, source, sent[:1], first_page=1, last=False)
    with refused(harness, IncompleteError, "lists"):
        harness.send(prefill, source, sent[1:], first_page=2)


# -- a prefix that decode has already


@pytest.mark.parametrize("chunks", [[5], [2, 3], [1, 1, 1, 2], [3, 2]])
@pytest.mark.parametrize("first", ["send", "receive"])
def test_surplus_prefix_pages_are_skipped_and_counted(harness: TransferHarness, chunks: list[int], first: str) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    sent, received = harness.filled(source, prefill, 5), harness.filled(destination, decode, 3)
    if first == "receive":
        harness.receive(decode, destination, received, first_page=2)
    at, skipped = 0, []
    for count in chunks:
        reply = harness.send(prefill, source, sent[at : at + count], first_page=at, last=at + count == 5)
        skipped.append(reply.skipped_source_pages)
        at += count
    if first == "receive":
        assert skipped == [min(2, sum(chunks[: number + 1])) for number in range(len(chunks))]
    else:
        assert harness.receive(decode, destination, received, first_page=2).skipped_source_pages == 2
    ends_well(harness, prefill, decode)
    assert harness.content(destination, received) == harness.content(source, sent[2:])
    assert harness.finished(decode).skipped_source_pages == 2
    assert harness.finished(prefill).skipped_source_pages == 2
    assert harness.finished(decode).moved_bytes == 3 * 4 * PAGE_BYTES


def test_pages_that_decode_has_not_must_come(harness: TransferHarness) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    sent, received = harness.filled(source, prefill, 3), harness.filled(destination, decode, 4)
    harness.receive(decode, destination, received, first_page=1)
    with refused(harness, IncompleteError, "lists"):
        harness.send(prefill, source, sent, first_page=2)


# -- first token and payload


@pytest.mark.parametrize("first", [{"first_token": 1}, {"payload": b"x"}, {"first_token": 0}])
@pytest.mark.parametrize("second", [{"first_token": 2}, {"payload": b"y"}])
def test_one_send_of_a_request_carries_the_first_token(
    harness: TransferHarness, first: dict[str, Any], second: dict[str, Any]
) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    sent, received = harness.filled(source, prefill, 2), harness.filled(destination, decode, 2)
    harness.send(prefill, source, sent[:1], last=False, **first)
    with refused(harness, FirstTokenTwiceError, "first_token"):
        harness.send(prefill, source, sent[1:], first_page=1, **second)
    harness.receive(decode, destination, received)
    with refused(harness, FirstTokenTwiceError, "first_token"):
        harness.send(prefill, source, sent[1:], first_page=1, **second)
    harness.send(prefill, source, sent[1:], first_page=1)
    ends_well(harness, prefill, decode)
    assert harness.finished(decode).first_token == first.get("first_token")
    assert harness.finished(decode).payload == first.get("payload", b"")


def stages(harness: TransferHarness) -> tuple[int, int, list[Any], Any]:
    """Return a prefill and a decode session, pools of two pipeline stages, and the decode pool."""
    prefill, decode = harness.session(), harness.session()
    pools = [harness.pool("stage0", layers(2)), harness.pool("stage1", layers(1, first=2))]
    return prefill, decode, pools, harness.pool("decode", layers(3))


@pytest.mark.parametrize("receive_at", [0, 1, 2])
def test_one_stage_of_a_receive_carries_the_first_token(harness: TransferHarness, receive_at: int) -> None:
    prefill, decode, (stage0, stage1), destination = stages(harness)
    received = harness.filled(destination, decode, 2)
    pages = [harness.filled(stage, prefill, 2) for stage in (stage0, stage1)]
    if receive_at == 0:
        harness.receive(decode, destination, received, sources=2)
    harness.send(prefill, stage0, pages[0], first_token=1)
    if receive_at == 1:
        harness.receive(decode, destination, received, sources=2)
    if receive_at == 2:
        harness.send(prefill, stage1, pages[1], first_token=2)
        with refused(harness, FirstTokenTwiceError, "request_id"):
            harness.receive(decode, destination, received, sources=2)
        return
    with refused(harness, FirstTokenTwiceError, "first_token"):
        harness.send(prefill, stage1, pages[1], first_token=2)
    harness.send(prefill, stage1, pages[1])
    harness.transport.finish_all()
    assert harness.finished(decode).first_token == 1


# -- several sources


@pytest.mark.parametrize("order", ["r01", "0r1", "01r", "r10", "10r", "1r0"])
def test_pipeline_stages_fill_one_receive(harness: TransferHarness, order: str) -> None:
    prefill, decode, pools, destination = stages(harness)
    pages = [harness.filled(pool, prefill, 3) for pool in pools]
    received = harness.filled(destination, decode, 3)
    for step in order:
        assert harness.outcomes(decode) == []
        if step == "r":
            harness.receive(decode, destination, received, sources=2)
        else:
            harness.send(prefill, pools[int(step)], pages[int(step)])
    harness.transport.finish_all()
    assert harness.outcomes(decode) == ["OK", "settled"]
    assert sorted(harness.outcomes(prefill)) == ["OK", "OK", "settled", "settled"]
    got = harness.content(destination, received)
    for pool, sent in zip(pools, pages, strict=True):
        for logical, content in enumerate(harness.content(pool, sent)):
            assert content.items() <= got[logical].items()


@pytest.mark.parametrize("order", ["r0x", "0rx", "0xr"])
@pytest.mark.parametrize("other", ["overlapping", "incomplete", "uncovered"])
def test_stages_that_do_not_make_a_whole(harness: TransferHarness, order: str, other: str) -> None:
    prefill, decode, (stage0, _), destination = stages(harness)
    entries = {"overlapping": layers(2, first=1), "incomplete": layers(1, first=2), "uncovered": layers(1, first=1)}
    error = {"overlapping": PageOverlapError, "incomplete": IncompleteError, "uncovered": UncoveredEntryError}[other]
    if other == "uncovered":
        stage0 = harness.pool("short", layers(1))
    stage = harness.pool("other", entries[other])
    pages, more = harness.filled(stage0, prefill, 3), harness.filled(stage, prefill, 3)
    if other == "incomplete":
        more = more[:2]
    received = harness.filled(destination, decode, 3)
    steps: dict[str, Callable[[], Any]] = {
        "r": lambda: harness.receive(decode, destination, received, sources=2),
        "0": lambda: harness.send(prefill, stage0, pages),
        "x": lambda: harness.send(prefill, stage, more),
    }
    for step in order[:-1]:
        steps[step]()
    with refused(harness, error, "lists"):
        steps[order[-1]]()


def test_more_sources_than_the_receive_expects(harness: TransferHarness) -> None:
    prefill, decode, (stage0, stage1), destination = stages(harness)
    pages = [harness.filled(stage, prefill, 2) for stage in (stage0, stage1)]
    received = harness.filled(destination, decode, 2)
    third = harness.pool("third", layers(3))
    more = harness.filled(third, prefill, 2)
    harness.receive(decode, destination, received, sources=2)
    harness.send(prefill, stage0, pages[0])
    harness.send(prefill, stage1, pages[1], last=False)
    with refused(harness, UnexpectedSourceError, "request_id"):
        harness.send(prefill, third, more)


def test_more_waiting_sends_than_the_receive_expects(harness: TransferHarness) -> None:
    prefill, decode, pools, destination = stages(harness)
    for pool in pools:
        harness.send(prefill, pool, harness.filled(pool, prefill, 2))
    received = harness.filled(destination, decode, 2)
    with refused(harness, UnexpectedSourceError, "sources"):
        harness.receive(decode, destination, received, sources=1)
    harness.receive(decode, destination, received, sources=2)
    harness.transport.finish_all()
    assert harness.outcomes(decode) == ["OK", "settled"]


@pytest.mark.parametrize("dying", ["complete stage", "stage that has more to send"])
def test_one_stage_dies(harness: TransferHarness, dying: str) -> None:
    _, decode, (stage0, stage1), destination = stages(harness)
    engines = [harness.session(), harness.session()]
    received = harness.filled(destination, decode, 2)
    harness.receive(decode, destination, received, sources=2)
    harness.send(engines[0], stage0, harness.filled(stage0, engines[0], 2))
    pages = harness.filled(stage1, engines[1], 2)
    harness.send(engines[1], stage1, pages[:1], last=False)
    if dying == "complete stage":
        harness.lose(engines[0])
        harness.send(engines[1], stage1, pages[1:], first_page=1)
        ends_well(harness, decode, engines[1])
    else:
        harness.lose(engines[1])
        assert harness.outcomes(decode) == ["PEER_LOST"]
        assert harness.outcomes(engines[0]) == ["PEER_LOST"]
        harness.transport.finish_all()
        assert harness.outcomes(decode) == ["PEER_LOST", "settled"]
        assert stage1.allocator.idle


# -- several destinations


@pytest.mark.parametrize("receives_before", [0, 1, 2])
def test_two_receives_take_the_same_pages(harness: TransferHarness, receives_before: int) -> None:
    prefill, source = harness.session(), harness.pool("prefill")
    sent = harness.filled(source, prefill, 3)
    decodes = [harness.session(), harness.session()]
    receive_requests = [harness.pool(f"decode{number}") for number in range(2)]
    pages = [
        harness.filled(receive_request, decode, 3)
        for receive_request, decode in zip(receive_requests, decodes, strict=True)
    ]
    for number in range(3):
        if number == receives_before:
            harness.send(prefill, source, sent, destinations=2, first_token=3)
        if number < 2:
            harness.receive(decodes[number], receive_requests[number], pages[number])
    first, second = harness.transport.under_way
    harness.transport.finish(first)
    assert harness.outcomes(decodes[0]) == ["OK", "settled"]
    assert harness.outcomes(prefill) == []
    assert source.allocator.busy_count == 3
    harness.transport.finish(second)
    ends_well(harness, prefill, *decodes)
    for receive_request, ids in zip(receive_requests, pages, strict=True):
        assert harness.content(receive_request, ids) == harness.content(source, sent)
    assert [harness.finished(decode).first_token for decode in decodes] == [3, 3]
    assert harness.finished(prefill).moved_bytes == 2 * harness.finished(decodes[0]).moved_bytes


def test_a_second_receive_may_come_when_the_first_is_done(harness: TransferHarness) -> None:
    prefill, source = harness.session(), harness.pool("prefill")
    sent = harness.filled(source, prefill, 3)
    harness.send(prefill, source, sent, destinations=2)
    for number in range(2):
        assert harness.outcomes(prefill) == []
        assert source.allocator.busy_count == 3
        decode, receive_request = harness.session(), harness.pool(f"decode{number}")
        received = harness.filled(receive_request, decode, 3)
        harness.receive(decode, receive_request, received)
        ends_well(harness, decode)
        assert harness.content(receive_request, received) == harness.content(source, sent)
    assert harness.outcomes(prefill) == ["OK", "settled"]
    assert source.allocator.busy_count == 0


def test_one_of_two_receives_dies(harness: TransferHarness) -> None:
    prefill, source = harness.session(), harness.pool("prefill")
    sent = harness.filled(source, prefill, 3)
    decodes = [harness.session(), harness.session()]
    receive_requests = [harness.pool(f"decode{number}") for number in range(2)]
    harness.send(prefill, source, sent[:2], destinations=2, last=False)
    for receive_request, decode in zip(receive_requests, decodes, strict=True):
        harness.receive(decode, receive_request, harness.filled(receive_request, decode, 3))
    harness.lose(decodes[0])
    assert harness.outcomes(prefill) == []
    harness.send(prefill, source, sent[2:], first_page=2)
    harness.transport.finish_all()
    assert harness.outcomes(decodes[1]) == ["OK", "settled"]
    assert harness.outcomes(prefill) == ["PEER_LOST", "settled"]
    assert receive_requests[0].allocator.idle


def test_a_third_receive_waits_for_another_send(harness: TransferHarness) -> None:
    prefill, source = harness.session(), harness.pool("prefill")
    decode = harness.session()
    receive_requests = [harness.pool(f"decode{number}") for number in range(2)]
    harness.send(prefill, source, harness.filled(source, prefill, 2))
    for receive_request in receive_requests:
        harness.receive(decode, receive_request, harness.filled(receive_request, decode, 2))
    harness.transport.finish_all()
    assert harness.outcomes(decode) == ["OK", "settled"]
    assert [direction.pool.name for direction in harness.state_machine.endpoints] == ["decode1"]


# -- pools that do not fit, pages that are not there


def test_pools_of_other_geometry(harness: TransferHarness) -> None:
    prefill, decode = harness.session(), harness.session()
    source = harness.pool("prefill")
    wide = [entry_with(one, page_bytes=16) for one in layers(2)]
    destination = harness.pool("decode", wide)
    harness.send(prefill, source, harness.filled(source, prefill, 2))
    received = destination.allocator.allocate(decode, 2)
    with refused(harness, GeometryMismatchError, "destination.entries[0].page_bytes"):
        harness.receive(decode, destination, received)


def entry_with(entry: Any, **changes: Any) -> Any:  # noqa: ANN401  an entry and any of its fields
    return type(entry)(**{name: getattr(entry, name) for name in entry.__struct_fields__} | changes)


@pytest.mark.parametrize("first", ["send", "receive"])
def test_an_entry_without_a_partner(harness: TransferHarness, first: str) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill", layers(2)), harness.pool("decode", layers(3))
    sent, received = harness.filled(source, prefill, 2), harness.filled(destination, decode, 2)
    steps = [lambda: harness.send(prefill, source, sent), lambda: harness.receive(decode, destination, received)]
    if first == "receive":
        steps.reverse()
    steps[0]()
    with refused(harness, UncoveredEntryError, "destination.entries"):
        steps[1]()


def test_surplus_source_entries_are_counted(harness: TransferHarness) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill", layers(4)), harness.pool("decode", layers(2))
    harness.receive(decode, destination, harness.filled(destination, decode, 2))
    reply = harness.send(prefill, source, harness.filled(source, prefill, 2))
    assert reply.skipped_source_entries == 4
    ends_well(harness, prefill, decode)
    assert harness.finished(decode).skipped_source_entries == 4


@pytest.mark.parametrize("with_draft", [False, True])
def test_draft_layers_are_optional(harness: TransferHarness, *, with_draft: bool) -> None:
    prefill, decode = harness.session(), harness.session()
    both = [*layers(2), *layers(1, component="draft")]
    source, destination = harness.pool("prefill", both if with_draft else layers(2)), harness.pool("decode", both)
    sent, received = harness.filled(source, prefill, 4), harness.filled(destination, decode, 4)
    before = harness.content(destination, received)
    harness.receive(decode, destination, {"main": received[:2], "draft": received[2:]})
    harness.send(prefill, source, {"main": sent[:2], "draft": sent[2:]} if with_draft else sent[:2])
    ends_well(harness, prefill, decode)
    chunk_announced, got = harness.content(source, sent), harness.content(destination, received)
    for page in range(4):
        for name, content in got[page].items():
            arrives = name.startswith("main/") if page < 2 else with_draft and name.startswith("draft/")
            assert content == (chunk_announced if arrives else before)[page][name]


def test_pages_of_another_session(harness: TransferHarness) -> None:
    prefill, decode, stranger = harness.session(), harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    sent, received = harness.filled(source, prefill, 2), harness.filled(destination, decode, 2)
    with refused(harness, NotOwnerError, "lists[0].pages"):
        harness.send(stranger, source, sent)
    with refused(harness, NotOwnerError, "lists[0].pages"):
        harness.receive(stranger, destination, received)
    harness.send(prefill, source, sent)
    with refused(harness, NotOwnerError, "lists[0].pages"):
        harness.receive(stranger, destination, received)
    harness.receive(decode, destination, received)
    ends_well(harness, prefill, decode)


def test_a_destination_page_named_twice(harness: TransferHarness) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    sent, received = harness.filled(source, prefill, 2), harness.filled(destination, decode, 2)
    for waiting in (False, True):
        if waiting:
            harness.send(prefill, source, sent)
        field = "destination_pages" if waiting else "lists[0].pages"
        with refused(harness, DuplicatePageError, field):
            harness.receive(decode, destination, received[[0, 0]])


def test_a_source_page_named_twice_is_read_twice(harness: TransferHarness) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    sent, received = harness.filled(source, prefill, 1)[[0, 0]], harness.filled(destination, decode, 2)
    harness.send(prefill, source, sent)
    harness.receive(decode, destination, received)
    ends_well(harness, prefill, decode)
    assert harness.content(destination, received) == harness.content(source, sent)


def test_a_refused_send_does_not_keep_the_receive_from_a_right_one(harness: TransferHarness) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    sent, received = harness.filled(source, prefill, 3), harness.filled(destination, decode, 3)
    busy = harness.filled(source, prefill, 1)
    harness.receive(prefill, source, busy, request="e" * 32)
    harness.receive(decode, destination, received)
    with refused(harness, PageBusyError, "lists[0].pages"):  # after its cells were planned
        harness.send(prefill, source, np.concatenate((sent[:2], busy)))
    harness.send(prefill, source, sent)
    ends_well(harness, prefill, decode)


# -- request ids in use


@pytest.mark.parametrize("state", ["waiting", "under way", "finished, not settled"])
def test_a_live_duplicate(harness: TransferHarness, state: str) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    sent, received = harness.filled(source, prefill, 2), harness.filled(destination, decode, 2)
    harness.send(prefill, source, sent)
    if state != "waiting":
        harness.receive(decode, destination, received)
    if state == "finished, not settled":
        harness.cancel(decode, destination, "receive")
    other = harness.session()
    duplicate, others = harness.filled(source, prefill, 2), harness.filled(source, other, 2)
    again = harness.filled(destination, decode, 2)
    with refused(harness, TransferExistsError, "request_id" if state.startswith("finished") else "last"):
        harness.send(prefill, source, duplicate)
    with refused(harness, TransferExistsError, "request_id"):
        harness.send(other, source, others)
    if state != "waiting":
        with refused(harness, TransferExistsError, "request_id"):
            harness.receive(decode, destination, again)


def test_another_tenants_request_id(harness: TransferHarness) -> None:
    prefill, stranger = harness.session(), harness.session()
    source, theirs = harness.pool("prefill"), harness.pool("prefill", tenant=8)
    harness.send(prefill, source, harness.filled(source, prefill, 2))
    pages = harness.filled(theirs, stranger, 2)
    with refused(harness, TransferExistsError, "request_id"):
        harness.send(stranger, theirs, pages)
    with refused(harness, TransferExistsError, "request_id"):
        harness.receive(stranger, theirs, pages)
    harness.receive(stranger, theirs, pages, request="f" * 32)


def test_a_request_id_may_be_used_again_after_success(harness: TransferHarness) -> None:
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    sent, received = harness.filled(source, prefill, 2), harness.filled(destination, decode, 2)
    for generation in (1, 2, 3):
        harness.fill(source, sent)
        assert harness.receive(decode, destination, received).generation == generation
        harness.send(prefill, source, sent)
        harness.transport.finish_all()
        assert harness.finished(decode).generation == generation
        assert harness.content(destination, received) == harness.content(source, sent)

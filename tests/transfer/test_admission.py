"""What a SEND or RECEIVE must satisfy. The later message is refused; what was accepted goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvferry.daemon.transfer import admission
from kvferry.protocol.errors import (
    FirstTokenTwiceError,
    KvferryError,
    PageBusyError,
    PageGapError,
    TooLargeError,
    TransferExistsError,
)
from tests.kit.transfers import FIRST, ORDERS, Engine, Pair


class Refusing(Pair):
    """An engine that sends and one that receives, with six pages each."""

    def __init__(self) -> None:
        super().__init__(count=6)

    @contextmanager
    def refuses(self, error: type[KvferryError], field: str) -> Iterator[None]:
        """Expect a refusal that leaves no trace: no events, no copies, no held pages, and the same sides."""
        before = self.snapshot()
        with pytest.raises(error) as caught:
            yield
        assert caught.value.field == field
        assert self.snapshot() == before

    def snapshot(self) -> list[Any]:
        """Return all that a refusal may not change."""
        harness = self.harness
        return [
            {session: list(events) for session, events in harness.told.items()},
            dict(harness.transport.under_way),
            [(one.allocator.free_count, one.allocator.busy_count, harness.held_pages(one)) for one in harness.pools],
            [(one.key, one.state, one.pages, one.waits_for()) for one in harness.state_machine.endpoints],
            [harness.state_machine.results.count(session) for session in harness.told],
        ]


@pytest.fixture
def pair() -> Refusing:
    return Refusing()


def test_the_chunks_of_a_transfer_are_bounded(pair: Refusing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_CHUNKS", 3)
    for _ in range(3):
        pair.prefill.send(ids={}, last=False)
    with pair.refuses(TooLargeError, "last"):
        pair.prefill.send(ids={})


@pytest.mark.parametrize("first_page", [0, 1, 3])
def test_a_chunk_must_continue_the_one_before(pair: Refusing, first_page: int) -> None:
    rest = pair.prefill.pages[2:4]
    pair.prefill.send(0, 2, last=False)
    with pair.refuses(PageGapError, "lists[0].first_page"):
        pair.prefill.send(first_page, ids=rest)
    pair.decode.receive(0, 4)
    with pair.refuses(PageGapError, "lists[0].first_page"):
        pair.prefill.send(first_page, ids=rest)
    pair.prefill.send(2, 4)
    pair.end_well()


@pytest.mark.parametrize("first", [{"first_token": 1}, {"payload": b"x"}, {"first_token": 0}])
@pytest.mark.parametrize("second", [{"first_token": 2}, {"payload": b"y"}])
def test_one_send_of_a_request_carries_the_first_token(
    pair: Refusing, first: dict[str, Any], second: dict[str, Any]
) -> None:
    pair.prefill.send(0, 1, last=False, **first)
    with pair.refuses(FirstTokenTwiceError, "first_token"):
        pair.prefill.send(1, **second)
    pair.decode.receive()
    with pair.refuses(FirstTokenTwiceError, "first_token"):
        pair.prefill.send(1, **second)
    pair.prefill.send(1)
    pair.end_well()
    finished = pair.decode.finished
    assert (finished.first_token, finished.payload) == (first.get("first_token"), first.get("payload", b""))


@pytest.mark.parametrize("receives_before", [0, 1, 2])
def test_two_receives_take_the_same_pages(pair: Refusing, receives_before: int) -> None:
    decodes = [pair.decode, pair.harness.engine("second", count=6)]
    for number in range(3):
        if number == receives_before:
            pair.prefill.send(destinations=2, first_token=3)
        if number < 2:
            decodes[number].receive()
    first, second = pair.harness.transport.under_way
    pair.harness.transport.finish(first)
    assert [one.told for one in (pair.prefill, *decodes)] == ["", "OK settled", ""]
    assert pair.prefill.held == 6
    pair.harness.transport.finish(second)
    pair.end_well(pair.prefill, *decodes)
    for one in decodes:
        assert one.content == pair.prefill.content
        assert one.finished.first_token == 3
    assert pair.prefill.finished.moved_bytes == 2 * pair.decode.finished.moved_bytes


@FIRST
def test_a_receive_too_many_waits_for_another_send(pair: Refusing, first: str) -> None:
    second = pair.harness.engine("second", count=6)
    for direction in ORDERS[first]:
        for one in [pair.prefill] if direction == "send" else [pair.decode, second]:
            one.come(direction)
    pair.end_well()
    assert [one.pool for one in pair.harness.state_machine.endpoints] == [second.pool]


def test_a_source_page_named_twice_is_read_twice(pair: Refusing) -> None:
    pair.prefill.send(ids=pair.prefill.pages[[0, 0]])
    pair.decode.receive(0, 2)
    pair.end_well()
    assert pair.decode.content[:2] == [pair.prefill.content[0]] * 2


def test_a_refused_send_does_not_keep_the_receive_from_a_right_one(pair: Refusing) -> None:
    busy = pair.harness.filled(pair.prefill.pool, pair.prefill.session, 1)
    pair.prefill.receive(ids=busy, request="e" * 32)
    pair.decode.receive(0, 3)
    with pair.refuses(PageBusyError, "lists[0].pages"):  # after its cells were planned
        pair.prefill.send(ids=np.concatenate((pair.prefill.pages[:2], busy)))
    pair.prefill.send(0, 3)
    pair.end_well(pair.decode)


@pytest.mark.parametrize("state", ["waiting", "under way", "finished, not settled"])
def test_a_live_duplicate(pair: Refusing, state: str) -> None:
    prefill, decode = pair.prefill, pair.decode
    other = pair.harness.session()
    theirs = Engine(pair.harness, other, prefill.pool, pair.harness.filled(prefill.pool, other, 2))
    prefill.send(0, 2)
    if state != "waiting":
        decode.receive(0, 2)
    if state == "finished, not settled":
        decode.cancel("receive")
    with pair.refuses(TransferExistsError, "request_id" if state.startswith("finished") else "last"):
        prefill.send(2, 4)
    with pair.refuses(TransferExistsError, "request_id"):
        theirs.send()
    if state != "waiting":
        with pair.refuses(TransferExistsError, "request_id"):
            decode.receive(2, 4)


def test_another_tenants_request_id(pair: Refusing) -> None:
    theirs = pair.harness.engine("prefill", tenant=8)
    pair.prefill.send()
    for speak in (theirs.send, theirs.receive):
        with pair.refuses(TransferExistsError, "request_id"):
            speak()
    theirs.receive(request="f" * 32)

"""What a SEND or RECEIVE must satisfy. The later message is refused; what was accepted goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import pytest

from kvferry.protocol.errors import (
    DuplicatePageError,
    FirstTokenTwiceError,
    IncompleteError,
    KvferryError,
    LengthMismatchError,
    NotOwnerError,
    PageBusyError,
    PageGapError,
    TransferExistsError,
    UnexpectedSourceError,
)
from tests.kit.transfers import FIRST, ORDERS, PAGE_BYTES, Engine, Pair, layers

Said: TypeAlias = tuple[int, int | None]


class Refusing(Pair):
    """An engine that sends and one that receives, with six pages each."""

    def __init__(self) -> None:
        super().__init__(count=6)

    def arrived(self, pages: slice, of_sent: slice) -> bool:
        """Return whether pages of decode hold what these of prefill hold."""
        return self.decode.content[pages] == self.prefill.content[of_sent]

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
    """Return two engines that have not spoken."""
    return Refusing()


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


def test_a_chunk_may_not_end_inside_a_page(pair: Refusing) -> None:
    with pair.refuses(PageGapError, "lists[0].tokens"):
        pair.prefill.send(0, 2, tokens=7, last=False)
    pair.prefill.send(0, 2, tokens=8, last=False)


@pytest.mark.parametrize("tokens", [20, 25])
def test_tokens_must_fill_the_pages(pair: Refusing, tokens: int) -> None:
    for speak in (pair.prefill.send, pair.prefill.receive):
        with pair.refuses(LengthMismatchError, "lists[0].tokens"):
            speak(tokens=tokens)


@FIRST
@pytest.mark.parametrize(
    ("sent", "received", "error", "field"),
    [
        ((4, 15), (4, 16), LengthMismatchError, "lists[0].tokens"),
        ((4, 16), (4, 15), LengthMismatchError, "lists[0].tokens"),
        ((4, 13), (4, 16), LengthMismatchError, "lists[0].tokens"),
        ((4, None), (3, None), LengthMismatchError, "lists[0]"),
        ((3, None), (4, None), IncompleteError, "lists"),
    ],
)
def test_both_sides_must_mean_the_same_pages(
    pair: Refusing, first: str, sent: Said, received: Said, error: type[KvferryError], field: str
) -> None:
    """Each says how many pages, and how many tokens; a SEND after a RECEIVE may leave the tokens out."""
    speak = {"send": pair.prefill.send, "receive": pair.decode.receive}
    early, late = (speak[direction] for direction in ORDERS[first])
    (stop, tokens), (wrong_stop, wrong_tokens) = (sent, received) if first == "send" else (received, sent)
    early(stop=stop, tokens=tokens)
    with pair.refuses(error, field):
        late(stop=wrong_stop, tokens=wrong_tokens)
    late(stop=stop, tokens=tokens if first == "send" else None)
    pair.end_well()


@pytest.mark.parametrize("chunks", [[5], [2, 3], [1, 1, 1, 2], [3, 2]])
@FIRST
def test_surplus_prefix_pages_are_skipped_and_counted(pair: Refusing, chunks: list[int], first: str) -> None:
    prefill, decode = pair.prefill, pair.decode
    if first == "receive":
        decode.receive(0, 3, first_page=2)
    ends = np.cumsum(chunks).tolist()
    skipped = [
        prefill.send(end - count, end, last=end == 5).skipped_source_pages
        for count, end in zip(chunks, ends, strict=True)
    ]
    if first == "receive":
        assert skipped == [min(2, end) for end in ends]
    else:
        assert decode.receive(0, 3, first_page=2).skipped_source_pages == 2
    pair.end_well()
    assert pair.arrived(slice(3), slice(2, 5))
    assert (decode.finished.skipped_source_pages, prefill.finished.skipped_source_pages) == (2, 2)
    assert decode.finished.moved_bytes == 3 * 4 * PAGE_BYTES


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


class Stages(Refusing):
    """Two pipeline stages, of two layers and of one, and a destination of all three."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = [self.harness.engine("stage0", layers(2)), self.harness.engine("stage1", layers(1, first=2))]
        self.decode = self.harness.engine("whole", layers(3))

    def speak(self, order: str, *sends: dict[str, Any]) -> None:
        """Let the destination (r) and the stages (0 and 1) speak in this order; ``sends``: what each stage says."""
        for step in order:
            if step == "r":
                self.decode.receive(sources=2)
            else:
                self.stages[int(step)].send(**sends[int(step)])


@pytest.fixture
def staged() -> Stages:
    """Return stages that have not spoken."""
    return Stages()


@pytest.mark.parametrize("order", ["r01", "0r1", "01r", "r10", "10r", "1r0"])
def test_pipeline_stages_fill_one_receive(staged: Stages, order: str) -> None:
    for step in order:
        assert staged.decode.told == ""
        staged.speak(step, {"first_token": 7}, {})
    staged.end_well(staged.decode, *staged.stages)
    assert staged.decode.finished.first_token == 7
    for stage in staged.stages:
        pages = zip(stage.content, staged.decode.content, strict=True)
        assert all(ours.items() <= theirs.items() for ours, theirs in pages)


@pytest.mark.parametrize(("order", "field"), [("r01", "first_token"), ("0r1", "first_token"), ("01r", "request_id")])
def test_one_stage_of_a_receive_carries_the_first_token(staged: Stages, order: str, field: str) -> None:
    tokens = ({"first_token": 1}, {"first_token": 2})
    staged.speak(order[:-1], *tokens)
    with staged.refuses(FirstTokenTwiceError, field):
        staged.speak(order[-1], *tokens)


def test_more_sources_than_the_receive_expects(staged: Stages) -> None:
    third = staged.harness.engine("third", layers(3))
    staged.decode.receive(sources=2)
    staged.stages[0].send()
    staged.stages[1].send(0, 2, last=False)
    with staged.refuses(UnexpectedSourceError, "request_id"):
        third.send()


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


def test_pages_of_another_session(pair: Refusing) -> None:
    prefill, decode, stranger = pair.prefill, pair.decode, pair.harness.session()
    thieves = [Engine(pair.harness, stranger, one.pool, one.pages) for one in (prefill, decode)]
    with pair.refuses(NotOwnerError, "lists[0].pages"):
        thieves[0].send()
    for _ in range(2):
        with pair.refuses(NotOwnerError, "lists[0].pages"):
            thieves[1].receive()
        if prefill.held == 0:
            prefill.send()
    decode.receive()
    pair.end_well()


def test_a_destination_page_named_twice(pair: Refusing) -> None:
    twice = pair.decode.pages[[0, 0]]
    with pair.refuses(DuplicatePageError, "lists[0].pages"):
        pair.decode.receive(ids=twice)
    pair.prefill.send(0, 2)
    with pair.refuses(DuplicatePageError, "destination_pages"):
        pair.decode.receive(ids=twice)


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

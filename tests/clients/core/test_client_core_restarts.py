"""What becomes of a client's requests, transfers and operations when connections are lost and daemons restart."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.clients.core.client_core import MAX_CUTS, ClientCore, OtherDaemon, Outgoing, ReplyArrived, Unclaimed
from kvferry.clients.core.followed import TierOperation, Transfer
from kvferry.clients.core.held_pages import HeldPages
from kvferry.pools.layouts import manifest_of
from kvferry.protocol.base import ErrorReply, PageList, RequestBody
from kvferry.protocol.codec import IncomingRequest, decode_request, encode
from kvferry.protocol.envelope import Batch, Batched, Event, Reply
from kvferry.protocol.errors import DaemonLostError, MisuseError, NotOwnerError, StaleBootError
from kvferry.protocol.events import Finished, TierDone
from kvferry.protocol.ids import BootId
from kvferry.protocol.manifests import MhaSpec
from kvferry.protocol.pool_messages import Allocate, Allocated, DeletePool, Free, Freed, PoolCreated
from kvferry.protocol.requests import REQUESTS, request_type
from kvferry.protocol.session_messages import Ping, Pong, Status
from kvferry.protocol.tier_messages import CancelOperation, Offload, OperationStarted, Restore, Unpin
from kvferry.protocol.transfer_messages import Accepted, Cancel, Receive, Send

OLD: Final = BootId("0" * 32)
NEW: Final = BootId("f" * 32)
SECRET: Final = b"0123456789abcdef"
REQUEST: Final = "ab" * 16
DEFAULT_MS: Final = 30_000
PAGES: Final = np.array([3, 4], np.int64)
IDS: Final = (PAGES.tobytes(),)
RECEIVE: Final = Receive(request_id=REQUEST, pool="pool", lists=(PageList(pages=2),))
REFUSED: Final = ErrorReply(error=StaleBootError("for another boot").info())
ALLOCATE: Final = Allocate(pool="pool", count=2)
ONE: Final = (PageList(pages=1),)
FREE: Final = Free(pool="pool", pages=2)


@pytest.fixture
def core() -> ClientCore:
    """Return a core whose session alone owns its pages."""
    return ClientCore(OLD, SECRET, owns_alone=True)


def put(core: ClientCore, body: RequestBody, *ids: Any, at_s: float = 0.0, connected: bool = True) -> Outgoing:  # noqa: ANN401
    """Send a request."""
    return sent(core, core.request(body, ids, deadline_ms=1000), at_s, connected=connected)


def sent(core: ClientCore, outgoing: Outgoing, at_s: float = 0.0, *, connected: bool = True) -> Outgoing:
    """Note that a request was sent; return it."""
    core.sent(outgoing, at_s, connected=connected)
    return outgoing


def boot_of(core: ClientCore, outgoing: Outgoing) -> str:
    """Return which daemon a request is for, as it is sent now."""
    incoming = decode_request([bytes(frame) for frame in core.frames(outgoing)])
    assert isinstance(incoming, IncomingRequest)
    return incoming.request.boot_id


def reply(core: ClientCore, outgoing: Outgoing, body: Any, *ids: Any, boot: str = OLD) -> object:  # noqa: ANN401
    """Let a daemon answer; return the news."""
    return core.feed([bytes(frame) for frame in encode(Reply(outgoing.message_id, boot, body), ids)])


def numbers(sent: tuple[Outgoing, ...]) -> list[int]:
    return [one.message_id for one in sent]


def effects(news: tuple[Any, ...]) -> dict[int, str]:
    """Return the effects of requests that fail with STALE_BOOT, by their numbers."""
    failed = [one for one in news if isinstance(one, ReplyArrived)]
    assert all(isinstance(one.error, StaleBootError) for one in failed)
    return {one.message_id: one.error.effect for one in failed if one.error is not None}


# -- the same daemon


def test_what_has_no_reply_is_sent_again_in_order_with_the_time_that_is_left(core: ClientCore) -> None:
    first, second = put(core, Ping()), put(core, ALLOCATE, at_s=0.5)
    reply(core, put(core, Status()), Pong())
    assert core.disconnected() == ()
    third = put(core, FREE, *IDS, at_s=0.7, connected=False)
    assert core.request(Ping()).message_id == 5, "made, and not sent yet"
    again = core.waiting(0.8, DEFAULT_MS)
    assert numbers(again) == numbers((first, second, third))
    assert [one.deadline_ms for one in again] == [200, 700, 900]
    assert core.waiting(0.9, DEFAULT_MS) == ()
    core.disconnected()
    assert [one.deadline_ms for one in core.waiting(99.0, DEFAULT_MS)] == [1, 1, 1], "the daemon says what came"


def test_a_batch_goes_again_as_one(core: ClientCore) -> None:
    parts = [core.request(ALLOCATE, deadline_ms=1000), core.request(FREE, IDS)]
    batch = sent(core, core.batch(parts))
    core.disconnected()
    [again] = core.waiting(0.25, DEFAULT_MS)
    assert again.message_id == batch.message_id
    assert isinstance(again.body, Batch)
    assert again.body.deadlines_ms == (750, 0)
    assert again.deadline_ms == DEFAULT_MS - 250
    results = Batched(results=(Allocated(pages=2), Freed(freed=2, deferred=0)))
    assert reply(core, again, results, PAGES) is not None
    assert core.pending == 0


def test_what_breaks_each_connection_is_given_up(core: ClientCore) -> None:
    put(core, Ping(), connected=False)
    for _ in range(MAX_CUTS - 1):
        assert len(core.waiting(0.0, DEFAULT_MS)) == 1
        assert core.disconnected() == ()
    core.waiting(0.0, DEFAULT_MS)
    [one] = core.disconnected()
    assert isinstance(one, ReplyArrived)
    assert isinstance(one.error, DaemonLostError)
    assert (one.error.effect, one.error.retryable) == ("unknown", False)
    assert core.waiting(0.0, DEFAULT_MS) == ()


def test_pages_for_nobody_go_back_and_other_late_replies_mean_nothing(core: ClientCore) -> None:
    ping, allocate = put(core, Ping()), put(core, ALLOCATE)
    core.forget(ping.message_id)
    core.forget(allocate.message_id)
    core.disconnected()
    assert numbers(core.waiting(0.0, DEFAULT_MS)) == [allocate.message_id], "its pages have to be known"
    assert reply(core, ping, Pong()) is None
    unclaimed = reply(core, allocate, Allocated(pages=2), PAGES)
    assert isinstance(unclaimed, Unclaimed)
    back = sent(core, core.give_back(unclaimed))
    assert back.body == FREE
    assert reply(core, back, Freed(freed=2, deferred=0)) is None


# -- the next daemon


def test_what_the_next_daemon_refuses_is_kept_for_it(core: ClientCore) -> None:
    """ZeroMQ connects by itself, before anybody knows."""
    outgoing = put(core, DeletePool(pool="pool"))
    assert reply(core, outgoing, REFUSED, boot=NEW) == OtherDaemon(NEW)
    assert core.restarted(NEW, SECRET).news == ()
    [again] = core.waiting(0.0, DEFAULT_MS)
    assert (again.message_id, boot_of(core, again)) == (outgoing.message_id, NEW)


def opened(core: ClientCore, body: Send | Receive = RECEIVE) -> Transfer:
    """Return a transfer that the daemon has accepted."""
    transfer, outgoing = core.transfer(body, IDS)
    reply(core, sent(core, outgoing), Accepted(generation=1))
    return transfer


def test_each_transfer_ends_once_and_settles(core: ClientCore) -> None:
    received = opened(core)
    arrived = opened(core, Receive(request_id=REQUEST, pool="other", lists=RECEIVE.lists))
    finished = Finished(request_id=REQUEST, pool="other", direction="receive", pages=2)
    core.feed([bytes(frame) for frame in encode(Event(1, OLD, finished))])
    asked, outgoing = core.transfer(Send(request_id=REQUEST, pool="pool", lists=RECEIVE.lists, last=False), IDS)
    sent(core, outgoing)
    core.disconnected()
    more, outgoing = core.transfer(Send(request_id=REQUEST, pool="pool", lists=RECEIVE.lists), IDS)
    core.sent(outgoing, 0.0, connected=False)
    later, outgoing = core.transfer(Send(request_id=REQUEST[::-1], pool="pool", lists=RECEIVE.lists), IDS)
    core.sent(outgoing, 0.0, connected=False)

    ended = core.restarted(NEW, SECRET)
    assert {*ended.transfers} == {received, arrived, asked, more}, "a chunk is nothing without those before"
    assert sorted(map(id, (one for one in ended.news if isinstance(one, Transfer)))) == sorted(map(id, ended.transfers))
    for one in (received, asked, more):
        assert isinstance(one.error, StaleBootError)
        assert (one.error.effect, one.error.retryable, one.error.request_id) == ("unknown", True, REQUEST)
        assert one.is_settled
    assert arrived.outcome().pages == 2, "what had finished stays"
    assert arrived.is_settled
    assert later.state == "sent"
    assert numbers(core.waiting(0.0, DEFAULT_MS)) == [outgoing.message_id], "none of what has ended goes on"
    assert core.restarted(OLD, SECRET).transfers == (later,)


def test_each_operation_ends_once(core: ClientCore) -> None:
    known, outgoing = core.operation(Offload(pool="pool", lists=(PageList(pages=2),)), IDS)
    reply(core, sent(core, outgoing), OperationStarted(operation=7))
    asked, outgoing = core.operation(Restore(snapshot=REQUEST, pool="pool", allocate=True), ())
    sent(core, outgoing)
    ended = core.restarted(NEW, SECRET)
    assert ended.operations == (known, asked)
    assert [one for one in ended.news if isinstance(one, TierOperation)] == [known, asked]
    assert [type(one.error) for one in (known, asked)] == [StaleBootError] * 2
    late = Event(1, OLD, TierDone(operation=7, kind="offload"))
    assert core.feed([bytes(frame) for frame in encode(late)]) is None
    assert core.waiting(0.0, DEFAULT_MS) == ()


@pytest.mark.parametrize("alone", [False, True])
def test_each_request_goes_again_or_fails_with_its_effect(*, alone: bool) -> None:
    core = ClientCore(OLD, SECRET, owns_alone=alone)
    sent = [
        put(core, Ping()),
        put(core, ALLOCATE),
        put(core, FREE, *IDS),
        put(core, DeletePool(pool="pool")),
        put(core, Unpin(lease=1)),
        put(core, Cancel(request_id=REQUEST, pool="pool", direction="send")),
    ]
    ping, allocate, free, delete, unpin, cancel = (one.message_id for one in sent)
    ended = core.restarted(NEW, SECRET)
    unknown = {delete: "unknown"} if alone else {delete: "unknown", allocate: "unknown", free: "unknown"}
    assert effects(ended.news) == {**unknown, unpin: "done", cancel: "done"}
    assert numbers(ended.frees) == ([free] if alone else [])
    again = core.waiting(0.0, DEFAULT_MS)
    assert numbers(again) == ([ping, allocate] if alone else [ping])
    assert {boot_of(core, one) for one in again} == {NEW}
    if alone:
        [news] = core.resolve(ended.frees[0], Freed(freed=2, deferred=0))
        assert news == ReplyArrived(free, Freed(freed=2, deferred=0), (), None)
        assert core.resolve(ended.frees[0], NotOwnerError("again")) == (), "once"


def test_every_request_says_what_becomes_of_it() -> None:
    said = {name: request_type(name).after_restart for name in REQUESTS}
    assert {name for name, what in said.items() if what == "unknown"} == {
        "ALLOCATE", "BATCH", "DELETE_POOL", "FREE", "LOAD", "OFFLOAD", "RECEIVE", "RESTORE", "SEND", "STORE", "VERIFY",
    }  # fmt: skip


def test_a_batch_goes_on_as_what_is_left_of_it(core: ClientCore) -> None:
    ping_like, stale_like = core.request(ALLOCATE), core.request(Unpin(lease=1))
    transfer, part = core.transfer(RECEIVE, IDS)
    sent(core, core.batch([ping_like, stale_like, part]))
    ended = core.restarted(NEW, SECRET)
    assert effects(ended.news) == {stale_like.message_id: "done"}
    assert ended.transfers == (transfer,)
    [again] = core.waiting(0.0, DEFAULT_MS)
    assert (again.message_id, again.body) == (ping_like.message_id, ALLOCATE)


def test_a_cancel_of_what_a_batch_asks_for_goes_on_with_it(core: ClientCore) -> None:
    operation, part = core.operation(Offload(pool="pool", lists=(PageList(pages=2),)), IDS)
    with pytest.raises(MisuseError, match="was not sent yet"):
        core.asked_by(operation)
    batch = core.batch([core.request(ALLOCATE), part])
    core.sent(batch, 0.0, connected=False)
    assert core.asked_by(operation) == (batch.message_id, 1)
    cancel = CancelOperation(request=batch.message_id, part=1)
    core.sent(core.request(cancel), 0.0, connected=False)
    core.restarted(NEW, SECRET)
    *_, again = core.waiting(0.0, DEFAULT_MS)
    assert again.body == CancelOperation(request=part.message_id)
    assert core.asked_by(operation) == (part.message_id, 0)


def test_what_a_block_has_collected_is_for_the_next_daemon(core: ClientCore) -> None:
    transfer, part = core.transfer(RECEIVE, IDS)
    assert core.restarted(NEW, SECRET).transfers == ()
    batch = sent(core, core.batch([part]))
    assert boot_of(core, batch) == NEW
    assert transfer.state == "sent"
    early = core.request(Ping())
    core.restarted(OLD, SECRET)
    assert boot_of(core, sent(core, early)) == OLD


# -- whose pages they are


def ids(*pages: int) -> np.typing.NDArray[np.int64]:
    return np.array(pages, np.int64)


def test_the_books_follow_replies_and_events(core: ClientCore) -> None:
    assert core.held is not None
    manifest = manifest_of(MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=8, dtype="float16"))
    reply(core, put(core, Ping()), PoolCreated(pool="pool", created=True, manifest=manifest))
    reply(core, put(core, Allocate(pool="pool", count=4)), Allocated(pages=4), ids(1, 2, 3, 4))
    freed = put(core, Free(pool="pool", pages=1), ids(1).tobytes())
    reply(core, freed, Freed(freed=1, deferred=0))
    offload, back = Offload(pool="pool", lists=ONE), Restore(snapshot=REQUEST, pool="pool", allocate=True)
    two = (PageList(pages=2),)
    for number, body, done, moved, its in (
        (1, replace(offload, release=True), TierDone(operation=1, kind="offload"), [ids(2)], ()),
        (2, offload, TierDone(operation=2, kind="offload"), [ids(3)], ()),
        (3, back, TierDone(operation=3, kind="restore", lists=two), [], (ids(8, 9),)),
    ):
        _, outgoing = core.operation(body, tuple(one.tobytes() for one in moved))
        reply(core, sent(core, outgoing), OperationStarted(operation=number))
        core.feed([bytes(frame) for frame in encode(Event(number, OLD, done), its)])
    unknown, missing = core.held.compare("pool", "main", ids(3, 4, 5, 9))
    assert (unknown.tolist(), missing.tolist()) == ([5], [8])
    assert core.held.compare("pool", "main", ids(3, 4, 9)).missing.tolist() == [], "now they are right"


def test_pages_of_a_pool_that_is_not_known_are_left_alone() -> None:
    held = HeldPages()
    held.took("pool", "main", ids(1, 200))
    held.took_lists("pool", [PageList(component="swa", pages=1)], [ids(3)])
    unknown, missing = held.compare("pool", "main", ids(1, 7))
    assert (unknown.tolist(), missing.tolist()) == ([], [200])
    assert held.pools == {"pool"}
    held.gave("pool", "main", ids(900))
    held.gave("other", "main", ids(900))
    assert held.compare("pool", "main", ids()).missing.tolist() == [1, 7]


def test_pages_of_a_pool_for_whose_books_there_is_no_memory_are_left_alone() -> None:
    held = HeldPages()
    for pool, page in (("one", 5), ("pool", 1 << 60), ("other", 6)):
        held.took(pool, "main", ids(page))
    assert held.compare("pool", "main", ids(3)).unknown.tolist() == []
    for pool, page in (("one", 5), ("other", 6)):
        unknown, missing = held.compare(pool, "main", ids(page, 7))
        assert (unknown.tolist(), missing.tolist()) == ([7], [])


@given(
    moves=st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.lists(st.integers(1, 300), max_size=9))),
    again=st.integers(1, 40),
)
def test_what_is_held_is_what_was_taken_and_not_given_back(
    moves: list[tuple[bool, str, list[int]]], again: int
) -> None:
    held, expected = HeldPages(), {"a": set[int](), "b": set[int]()}
    for taken, pool, numbers in moves * again:
        its = ids(*numbers)
        (held.took if taken else held.gave)(pool, "main", its)
        expected[pool] = expected[pool] | {*numbers} if taken else expected[pool] - {*numbers}
    for pool, pages in expected.items():
        assert set(held.compare(pool, "main", ids()).missing.tolist()) == pages

"""The client's half of the protocol, driven by hand-made replies and events; and what connections and restarts end."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.clients.core.client_core import (
    MAX_CUTS,
    BatchAnswered,
    ClientCore,
    OtherDaemon,
    Outgoing,
    ReplyArrived,
    Unclaimed,
)
from kvferry.clients.core.followed import TierOperation, Transfer
from kvferry.clients.core.held_pages import HeldPages
from kvferry.clients.core.reconnection import ABSENT_PAUSE_S, FIRST_PAUSE_S, LONGEST_PAUSE_S, Reconnection
from kvferry.pools.layouts import manifest_of
from kvferry.protocol import errors
from kvferry.protocol.base import Body, Busy, DeviceEvent, ErrorReply, PageList, RequestBody
from kvferry.protocol.codec import IncomingRequest, decode_request, encode
from kvferry.protocol.envelope import Batch, Batched, Event, Reply, Request
from kvferry.protocol.events import Finished, Matched, Settled, SingleEvent, TierDone, Together, merged
from kvferry.protocol.ids import BootId
from kvferry.protocol.manifests import MhaSpec
from kvferry.protocol.pool_messages import Allocate, Allocated, DeletePool, Free, Freed, PoolCreated
from kvferry.protocol.requests import REQUESTS, request_type
from kvferry.protocol.session_messages import Ping, Pong, Status
from kvferry.protocol.tier_messages import CancelOperation, Offload, OperationStarted, Restore, Store, Unpin
from kvferry.protocol.transfer_messages import Accepted, Cancel, Receive, Send

BOOT: Final = BootId("00112233445566778899aabbccddeeff")
OTHER_BOOT: Final = BootId("ff" * 16)
SECRET: Final = b"0123456789abcdef"
REQUEST: Final = "ab" * 16
PAGES: Final = np.array([3, 4], np.int64)
IDS: Final = (PAGES.tobytes(),)
CHUNK: Final = Send(request_id=REQUEST, pool="prefill", lists=(PageList(pages=2),), last=False)
SEND: Final = Send(request_id=REQUEST, pool="prefill", lists=CHUNK.lists)
RECEIVE: Final = Receive(request_id=REQUEST, pool="decode", lists=CHUNK.lists)
BUSY: Final = errors.PageBusyError("page 3 is being read", field="pages")
LOST: Final = errors.PeerLostError("the engine died")
ALLOCATE: Final = Allocate(pool="pool", count=2)


@pytest.fixture
def core() -> ClientCore:
    """Return a core with a session, which alone owns its pages."""
    return ClientCore(BOOT, SECRET, owns_alone=True)


def request_in(core: ClientCore, outgoing: Outgoing) -> Request:
    incoming = decode_request([bytes(frame) for frame in core.frames(outgoing)])
    assert isinstance(incoming, IncomingRequest)
    assert incoming.request.message_id == outgoing.message_id
    return incoming.request


def reply(core: ClientCore, outgoing: Outgoing, body: Any, *ids: Any, boot: str = BOOT) -> Any:  # noqa: ANN401
    """Let a daemon answer, or refuse with an error; return the news, or the transfer that changed."""
    body = ErrorReply(error=body.info()) if isinstance(body, errors.KvferryError) else body
    return core.feed([bytes(frame) for frame in encode(Reply(outgoing.message_id, boot, body), ids)])


def event(core: ClientCore, cursor: int, body: SingleEvent | Together, boot: str = BOOT) -> object:
    """Let the daemon tell something; return the transfer that changed."""
    return core.feed([bytes(frame) for frame in encode(Event(cursor, boot, body))])


def finished(of: Send | Receive = RECEIVE, error: errors.KvferryError | None = None, **fields: Any) -> Finished:  # noqa: ANN401
    info = None if error is None else error.info()
    return Finished(
        request_id=REQUEST, pool=of.pool, direction="send" if of is SEND else "receive", error=info, **fields
    )


SETTLED: Final = Settled(request_id=REQUEST, pool="decode", direction="receive")


def acknowledged(core: ClientCore) -> int:
    return request_in(core, core.request(Ping())).acknowledged


def states(transfer: Transfer) -> tuple[str, bool, bool]:
    return transfer.state, transfer.is_finished, transfer.is_settled


def opened(core: ClientCore, body: Send | Receive = RECEIVE) -> Transfer:
    transfer, outgoing = core.transfer(body, IDS)
    core.sent(outgoing, 0.0, connected=True)
    changed: object = reply(core, outgoing, Accepted(generation=1))
    assert changed is transfer
    return transfer


# -- requests and replies


def test_a_request_says_who_when_and_what_was_seen(core: ClientCore) -> None:
    request = request_in(core, core.request(ALLOCATE, deadline_ms=250))
    assert request == Request(1, BOOT, SECRET, 250, 0, ALLOCATE)
    second = core.request(Ping())
    assert (request_in(core, second).message_id, core.pending) == (2, 2)
    assert reply(core, second, Pong()) == ReplyArrived(2, Pong(), (), None), "each reply finds its request"
    assert reply(core, Outgoing(1, ALLOCATE), Allocated(pages=2), PAGES).ids[0].tolist() == [3, 4]
    assert ClientCore(BOOT, SECRET, last_message=41).request(Ping()).message_id == 42


@pytest.mark.parametrize("answer", ["again", "after giving up", "never asked"])
def test_a_reply_nobody_waits_for_means_nothing(core: ClientCore, answer: str) -> None:
    outgoing = core.request(Ping())
    if answer == "again":
        reply(core, outgoing, Pong())
    elif answer == "after giving up":
        core.forget(outgoing.message_id)
    else:
        outgoing = Outgoing(99, Ping())
    assert reply(core, outgoing, Pong()) is None


def test_a_refusal_is_an_error_of_its_class_and_busy_says_when(core: ClientCore) -> None:
    error = reply(core, core.request(Ping()), BUSY).error
    assert isinstance(error, errors.PageBusyError)
    assert error.field == "pages"
    error = reply(core, core.request(Ping()), Busy(retry_after_ms=50, detail="256 requests")).error
    assert isinstance(error, errors.OverloadedError)
    assert "50 ms" in error.detail
    assert error.retry_after_ms == 50


# -- transfers


def test_the_life_of_a_transfer(core: ClientCore) -> None:
    transfer, outgoing = core.transfer(RECEIVE, IDS)
    assert states(transfer) == ("sent", False, False)
    with pytest.raises(errors.MisuseError, match="is not finished: call wait_finished"):
        transfer.outcome()
    assert reply(core, outgoing, Accepted(generation=1)) is transfer
    assert states(transfer) == ("open", False, False)
    assert acknowledged(core) == 0
    success = finished(first_token=5)
    assert event(core, 1, success) is transfer
    assert states(transfer) == ("finished", True, False)
    assert acknowledged(core) == 1
    assert event(core, 1, finished(first_token=2)) is None, "it comes again"
    assert transfer.outcome() == success
    assert event(core, 2, SETTLED) is transfer
    assert states(transfer) == ("settled", True, True)
    assert "settled" in repr(transfer)
    assert [event(core, cursor, SETTLED) for cursor in (1, 2)] == [None, None]
    assert acknowledged(core) == 2


def test_a_refused_chunk_leaves_the_transfer_open(core: ClientCore) -> None:
    first = opened(core, CHUNK)
    hole, outgoing = core.transfer(SEND, IDS)
    assert reply(core, outgoing, errors.PageGapError("a hole")) is hole
    assert states(hole) == ("refused", True, False), "what was sent before is held"
    assert states(first) == ("open", False, False)
    second, outgoing = core.transfer(SEND, IDS)
    reply(core, outgoing, Accepted())
    assert event(core, 1, finished(SEND)) == BatchAnswered((first, hole, second))
    assert (first.outcome(), second.outcome()) == (finished(SEND),) * 2
    with pytest.raises(errors.PageGapError):
        hole.outcome()
    event(core, 2, replace(SETTLED, pool="prefill", direction="send"))
    assert {one.state for one in (first, hole, second)} == {"settled"}
    assert repr(core) == "<ClientCore pending=0 batches=0 transfers=0>"


@pytest.mark.parametrize("refused", [0, 1])
def test_of_two_receives_in_a_batch_the_accepted_one_ends(core: ClientCore, refused: int) -> None:
    both = [core.transfer(RECEIVE, IDS) for _ in range(2)]
    batch = core.batch([outgoing for _, outgoing in both])
    assert event(core, 1, finished(generation=1)) is None, "nobody knows yet of which of them"
    assert event(core, 2, replace(SETTLED, generation=1)) is None
    results = [Accepted(generation=1), ErrorReply(error=BUSY.info())]
    reply(core, batch, Batched(results=tuple(results[:: -1 if refused == 0 else 1])))
    mine, other = both[1 - refused][0], both[refused][0]
    assert (states(mine), states(other)) == (("settled", True, True), ("refused", True, True))
    assert (mine.error, type(other.error)) == (None, errors.PageBusyError)
    assert repr(core) == "<ClientCore pending=0 batches=0 transfers=0>"


@pytest.mark.parametrize("body", [SEND, RECEIVE], ids=["send", "receive"])
def test_one_that_settles_late_is_not_the_next_ones_end(core: ClientCore, body: Send | Receive) -> None:
    generation = 0 if body is SEND else 1
    first = opened(core, body)
    event(core, 1, finished(body, generation=generation))
    second, outgoing = core.transfer(body, IDS)
    reply(core, outgoing, Accepted(generation=2 * generation))
    settled = replace(SETTLED, pool=body.pool, direction="send" if body is SEND else "receive", generation=generation)
    assert event(core, 2, settled) is first
    assert (first.state, states(second)) == ("settled", ("open", False, False))
    assert event(core, 3, finished(body, LOST, generation=2 * generation)) is second
    assert isinstance(second.error, errors.PeerLostError)


@pytest.mark.parametrize("before", [1, 2])
def test_events_may_come_before_the_reply(core: ClientCore, before: int) -> None:
    transfer, outgoing = core.transfer(RECEIVE, IDS)
    events: list[SingleEvent] = [finished(), SETTLED]
    assert [event(core, at, body) for at, body in enumerate(events[:before], 1)] == [transfer] * before
    assert reply(core, outgoing, Accepted()) is transfer
    assert states(transfer) == (("finished", True, False) if before == 1 else ("settled", True, True))
    assert event(core, 2, SETTLED) is (transfer if before == 1 else None)
    assert repr(core) == "<ClientCore pending=0 batches=0 transfers=0>", "nothing of it is kept, nor ended by a restart"


# -- events


def test_an_event_of_another_daemon_means_nothing(core: ClientCore) -> None:
    transfer = opened(core)
    assert event(core, 1, finished(), boot=OTHER_BOOT) is None
    assert (states(transfer), acknowledged(core)) == (("open", False, False), 0)
    event(core, 5, finished())
    assert event(core, 4, SETTLED) is None
    assert acknowledged(core) == 5, "one out of order does not take the cursor back"
    assert event(core, 6, finished(SEND)) is None
    assert acknowledged(core) == 6, "one of something forgotten is seen all the same"


OF_ONE: Final = st.tuples(
    st.lists(st.integers(1, 3), max_size=2).map(sorted), st.sampled_from(["open", "finished", "settled"]), st.booleans()
)
"""What a sender is told: the counts of MATCHED, how far it came, and whether it failed."""


@given(endpoints=st.lists(OF_ONE, min_size=1, max_size=4), data=st.data())
def test_what_a_finished_stands_for_is_heard_as_if_it_had_come_by_itself(
    endpoints: list[tuple[list[int], str, bool]], data: st.DataObject
) -> None:
    waiting: list[list[SingleEvent]] = []
    for number, (counts, end, fails) in enumerate(endpoints):
        its: dict[str, Any] = {
            "request_id": f"{number:032x}",
            "pool": "prefill",
            "direction": "send",
            "generation": number,
        }
        told: list[SingleEvent] = [Matched(**its, matched=count, destinations=3) for count in counts]
        told += [Finished(**its, error=LOST.info() if fails else None)] if end != "open" else []
        told += [Settled(**its)] if end == "settled" else []
        waiting.append(told)
    events: list[SingleEvent] = []
    while left := [one for one in waiting if one]:
        events.append(data.draw(st.sampled_from(left)).pop(0))
    alone, together = (ClientCore(BOOT, SECRET) for _ in range(2))
    sends = [replace(SEND, request_id=f"{number:032x}") for number in range(len(endpoints))]
    heard = [[opened(core, one) for one in sends] for core in (alone, together)]
    at = 0
    while at < len(events):
        count = data.draw(st.integers(1, len(events) - at))
        for cursor, body in enumerate(events[at : at + count], at + 1):
            event(alone, cursor, body)
        at += count
        found = merged(events[at - count : at])
        event(together, at, found[0] if len(found) == 1 else Together(events=tuple(found)))
    for one, other in zip(*heard, strict=True):
        assert (states(one), one.matched, one.settled) == (states(other), other.matched, other.settled)
        assert str(one.error) == str(other.error)
    assert acknowledged(alone) == acknowledged(together) == len(events)
    assert len(merged(events)) == len([one for one in endpoints if one[0] or one[1] != "open"])


def test_a_request_that_was_made_again_has_a_finished_for_each_time() -> None:
    first, second = finished(SEND, LOST), finished(SEND)
    settled = Settled(request_id=REQUEST, pool="prefill", direction="send")
    matched = Matched(request_id=REQUEST, pool="prefill", direction="send", matched=1, destinations=1)
    expected = [replace(first, settled=True), replace(second, settled=True, matched=1)]
    assert merged([first, settled, matched, second, settled]) == expected


# -- batches


def step_of(core: ClientCore) -> tuple[Transfer, TierOperation, Outgoing, Outgoing]:
    """Return a transfer, an operation, a plain request and the batch that holds all three."""
    transfer, sending = core.transfer(SEND, IDS)
    operation, storing = core.operation(Store(pool="prefill", hashes=bytes(32), pages=2), IDS)
    asking = core.request(ALLOCATE, deadline_ms=70)
    return transfer, operation, asking, core.batch([sending, storing, asking])


def test_a_batch_is_answered_part_by_part(core: ClientCore) -> None:
    transfer, operation, asking, batch = step_of(core)
    body = request_in(core, batch).body
    assert isinstance(body, Batch)
    assert [type(one) for one in body.requests] == [Send, Store, Allocate]
    assert body.deadlines_ms == (0, 0, 70)
    done = TierDone(operation=7, kind="store", stored=2)
    assert event(core, 1, done) is None, "nobody knows the number yet"
    results = (Accepted(), OperationStarted(operation=7), Allocated(pages=2))
    heard = reply(core, batch, Batched(results=results), PAGES)
    assert heard.news[:2] == (transfer, operation)
    assert (transfer.state, operation.state, operation.done) == ("open", "done", done)
    assert heard.news[2].message_id == asking.message_id
    assert heard.news[2].ids[0].tolist() == [3, 4]
    assert core.pending == 0


def test_an_event_that_comes_early_waits_for_its_own_batch(core: ClientCore) -> None:
    asked = [core.operation(Store(pool="prefill", hashes=bytes(32), pages=2), IDS) for _ in range(2)]
    batches = [core.batch([outgoing]) for _, outgoing in asked]
    assert event(core, 1, TierDone(operation=7, kind="store")) is None
    for number, batch in zip((6, 7), batches, strict=True):
        reply(core, batch, Batched(results=(OperationStarted(operation=number),)))
    assert [one.is_done for one, _ in asked] == [False, True]


@pytest.mark.parametrize(
    "body",
    [
        Pong(),
        Batched(results=(Accepted(),)),
        Batched(results=(Accepted(),), times=(2,)),
        Batched(results=(Accepted(),) * 3, times=(3,)),
        Batched(results=(Accepted(),), times=(1, 2)),
    ],
    ids=["no batch", "too few", "too few in all", "times of some", "times of others"],
)
def test_an_answer_that_is_none_of_a_batch(core: ClientCore, body: Body) -> None:
    *_, batch = step_of(core)
    with pytest.raises(errors.MalformedError, match=r"a batch of 3|results, \d times"):
        reply(core, batch, body)


DEFAULT_MS: Final = 30_000
REFUSED: Final = ErrorReply(error=errors.StaleBootError("for another boot").info())
ONE: Final = (PageList(pages=1),)
FREE: Final = Free(pool="pool", pages=2)


def put(core: ClientCore, body: RequestBody, *ids: Any, at_s: float = 0.0, connected: bool = True) -> Outgoing:  # noqa: ANN401
    return sent(core, core.request(body, ids, deadline_ms=1000), at_s, connected=connected)


def sent(core: ClientCore, outgoing: Outgoing, at_s: float = 0.0, *, connected: bool = True) -> Outgoing:
    """Note that a request was sent; return it."""
    core.sent(outgoing, at_s, connected=connected)
    return outgoing


def boot_of(core: ClientCore, outgoing: Outgoing) -> str:
    """Return which daemon a request is for, as it is sent now."""
    return request_in(core, outgoing).boot_id


def numbers(sent: tuple[Outgoing, ...]) -> list[int]:
    return [one.message_id for one in sent]


def effects(news: tuple[Any, ...]) -> dict[int, str]:
    """Return the effects of requests that fail with STALE_BOOT, by their numbers."""
    failed = [one for one in news if isinstance(one, ReplyArrived)]
    assert all(isinstance(one.error, errors.StaleBootError) for one in failed)
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
    assert isinstance(one.error, errors.DaemonLostError)
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
    assert reply(core, outgoing, REFUSED, boot=OTHER_BOOT) == OtherDaemon(OTHER_BOOT)
    assert core.restarted(OTHER_BOOT, SECRET).news == ()
    [again] = core.waiting(0.0, DEFAULT_MS)
    assert (again.message_id, boot_of(core, again)) == (outgoing.message_id, OTHER_BOOT)


def test_each_transfer_ends_once_and_settles(core: ClientCore) -> None:
    received = opened(core)
    arrived = opened(core, Receive(request_id=REQUEST, pool="other", lists=RECEIVE.lists))
    finished = Finished(request_id=REQUEST, pool="other", direction="receive", pages=2)
    event(core, 1, finished)
    asked, outgoing = core.transfer(Send(request_id=REQUEST, pool="pool", lists=RECEIVE.lists, last=False), IDS)
    sent(core, outgoing)
    core.disconnected()
    more, outgoing = core.transfer(Send(request_id=REQUEST, pool="pool", lists=RECEIVE.lists), IDS)
    core.sent(outgoing, 0.0, connected=False)
    later, outgoing = core.transfer(Send(request_id=REQUEST[::-1], pool="pool", lists=RECEIVE.lists), IDS)
    core.sent(outgoing, 0.0, connected=False)

    ended = core.restarted(OTHER_BOOT, SECRET)
    assert {*ended.transfers} == {received, arrived, asked, more}, "a chunk is nothing without those before"
    assert sorted(map(id, (one for one in ended.news if isinstance(one, Transfer)))) == sorted(map(id, ended.transfers))
    for one in (received, asked, more):
        assert isinstance(one.error, errors.StaleBootError)
        assert (one.error.effect, one.error.retryable, one.error.request_id) == ("unknown", True, REQUEST)
        assert one.is_settled
    assert arrived.outcome().pages == 2, "what had finished stays"
    assert arrived.is_settled
    assert later.state == "sent"
    assert numbers(core.waiting(0.0, DEFAULT_MS)) == [outgoing.message_id], "none of what has ended goes on"
    assert core.restarted(BOOT, SECRET).transfers == (later,)


def test_each_operation_ends_once(core: ClientCore) -> None:
    known, outgoing = core.operation(Offload(pool="pool", lists=(PageList(pages=2),)), IDS)
    reply(core, sent(core, outgoing), OperationStarted(operation=7))
    after = DeviceEvent(event=1, value=1, ring=1)
    asked, outgoing = core.operation(Restore(snapshot=REQUEST, pool="pool", allocate=True, after=after), ())
    sent(core, outgoing)
    ended = core.restarted(OTHER_BOOT, SECRET)
    assert ended.operations == (known, asked)
    assert [one for one in ended.news if isinstance(one, TierOperation)] == [known, asked]
    assert [type(one.error) for one in (known, asked)] == [errors.StaleBootError] * 2
    assert event(core, 1, TierDone(operation=7, kind="offload")) is None
    assert core.waiting(0.0, DEFAULT_MS) == ()


def test_a_restore_is_asked_for_again_before_anything_else_with_the_time_that_is_left(core: ClientCore) -> None:
    started, outgoing = core.operation(Restore(snapshot=REQUEST, pool="pool", lists=SEND.lists), IDS, deadline_ms=5000)
    core.sent(outgoing, 1.0, connected=True)
    reply(core, outgoing, OperationStarted(operation=7))
    ping = put(core, Ping())
    other, unanswered = core.operation(Restore(snapshot=REQUEST, pool="pool", allocate=True), ())
    sent(core, core.batch([unanswered]))
    assert core.restarted(OTHER_BOOT, SECRET) == ((), (), (), ())
    assert (started.state, other.state) == ("sent", "sent")
    first, *rest = core.waiting(3.0, DEFAULT_MS)
    assert (first.body, first.ids, first.deadline_ms) == (outgoing.body, outgoing.ids, 3000)
    assert numbers(tuple(rest)) == [ping.message_id, unanswered.message_id]
    reply(core, ping, Pong(), boot=OTHER_BOOT)
    reply(core, first, OperationStarted(operation=7), boot=OTHER_BOOT)
    reply(core, unanswered, OperationStarted(operation=8), boot=OTHER_BOOT)
    event(core, 1, TierDone(operation=7, kind="restore"), boot=OTHER_BOOT)
    assert started.outcome().operation == 7
    core.restarted(BOOT, SECRET)
    [again] = core.waiting(4.0, DEFAULT_MS)
    assert again.body == unanswered.body, "what is over is over"


@pytest.mark.parametrize("by_number", [False, True])
def test_a_restore_that_was_to_be_cancelled_ends(core: ClientCore, *, by_number: bool) -> None:
    operation, outgoing = core.operation(Restore(snapshot=REQUEST, pool="pool", allocate=True), ())
    sent(core, outgoing)
    if by_number:
        reply(core, outgoing, OperationStarted(operation=7))
    cancel = put(core, CancelOperation(operation=7) if by_number else CancelOperation(request=outgoing.message_id))
    ended = core.restarted(OTHER_BOOT, SECRET)
    assert ended.operations == (operation,)
    assert effects(ended.news) == {cancel.message_id: "done"}
    assert core.waiting(0.0, DEFAULT_MS) == ()


@pytest.mark.parametrize("alone", [False, True])
def test_each_request_goes_again_or_fails_with_its_effect(*, alone: bool) -> None:
    core = ClientCore(BOOT, SECRET, owns_alone=alone)
    sent = [
        put(core, Ping()),
        put(core, ALLOCATE),
        put(core, FREE, *IDS),
        put(core, DeletePool(pool="pool")),
        put(core, Unpin(lease=1)),
        put(core, Cancel(request_id=REQUEST, pool="pool", direction="send")),
    ]
    ping, allocate, free, delete, unpin, cancel = (one.message_id for one in sent)
    ended = core.restarted(OTHER_BOOT, SECRET)
    unknown = {delete: "unknown"} if alone else {delete: "unknown", allocate: "unknown", free: "unknown"}
    assert effects(ended.news) == {**unknown, unpin: "done", cancel: "done"}
    assert numbers(ended.frees) == ([free] if alone else [])
    again = core.waiting(0.0, DEFAULT_MS)
    assert numbers(again) == ([ping, allocate] if alone else [ping])
    assert {boot_of(core, one) for one in again} == {OTHER_BOOT}
    if alone:
        [news] = core.resolve(ended.frees[0], Freed(freed=2, deferred=0))
        assert news == ReplyArrived(free, Freed(freed=2, deferred=0), (), None)
        assert core.resolve(ended.frees[0], errors.NotOwnerError("again")) == (), "once"


def test_every_request_says_what_becomes_of_it() -> None:
    said = {name: request_type(name).after_restart for name in REQUESTS}
    assert {name for name, what in said.items() if what == "unknown"} == {
        "ALLOCATE", "BATCH", "DELETE_POOL", "FREE", "LOAD", "OFFLOAD", "RECEIVE", "SEND", "STORE", "UPGRADE", "VERIFY",
    }  # fmt: skip


def test_a_batch_goes_on_as_what_is_left_of_it(core: ClientCore) -> None:
    ping_like, stale_like = core.request(ALLOCATE), core.request(Unpin(lease=1))
    transfer, part = core.transfer(RECEIVE, IDS)
    sent(core, core.batch([ping_like, stale_like, part]))
    ended = core.restarted(OTHER_BOOT, SECRET)
    assert effects(ended.news) == {stale_like.message_id: "done"}
    assert ended.transfers == (transfer,)
    [again] = core.waiting(0.0, DEFAULT_MS)
    assert (again.message_id, again.body) == (ping_like.message_id, ALLOCATE)


def test_a_cancel_of_what_a_batch_asks_for_goes_on_with_it(core: ClientCore) -> None:
    operation, part = core.operation(Offload(pool="pool", lists=(PageList(pages=2),)), IDS)
    with pytest.raises(errors.MisuseError, match="was not sent yet"):
        core.asked_by(operation)
    batch = core.batch([core.request(ALLOCATE), part])
    core.sent(batch, 0.0, connected=False)
    assert core.asked_by(operation) == (batch.message_id, 1)
    cancel = CancelOperation(request=batch.message_id, part=1)
    core.sent(core.request(cancel), 0.0, connected=False)
    core.restarted(OTHER_BOOT, SECRET)
    *_, again = core.waiting(0.0, DEFAULT_MS)
    assert again.body == CancelOperation(request=part.message_id)
    assert core.asked_by(operation) == (part.message_id, 0)


def test_what_a_block_has_collected_is_for_the_next_daemon(core: ClientCore) -> None:
    transfer, part = core.transfer(RECEIVE, IDS)
    assert core.restarted(OTHER_BOOT, SECRET).transfers == ()
    batch = sent(core, core.batch([part]))
    assert boot_of(core, batch) == OTHER_BOOT
    assert transfer.state == "sent"
    early = core.request(Ping())
    core.restarted(BOOT, SECRET)
    assert boot_of(core, sent(core, early)) == BOOT


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
        core.feed([bytes(frame) for frame in encode(Event(number, BOOT, done), its)])
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


@given(
    moves=st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.lists(st.integers(1, 300), max_size=9))),
    again=st.integers(1, 40),
)
@example(moves=[(True, "a", [1]), (False, "a", [1, 300])], again=1)  # given back beyond what was ever taken
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


GONE = errors.DaemonLostError("the daemon closed the session")


@pytest.mark.parametrize(
    "error",
    [
        GONE,
        errors.OverloadedError("too many connect"),
        errors.AccessDeniedError("the folder is being made"),
        errors.NoSessionError("session 1 still has its socket", retryable=True),
    ],
)
def test_what_passes_is_tried_again_at_growing_intervals_until_the_time_is_over(error: errors.KvferryError) -> None:
    one = Reconnection(GONE, 100.0, 10.0)
    assert one.pause_s(100.0) == 0.0
    now, pauses = 100.0, []
    while (ended := one.failed(error, now)) is None:
        pauses.append(one.pause_s(now))
        assert one.overdue(now) is None
        now += pauses[-1]
    assert pauses[:2] == pytest.approx([FIRST_PAUSE_S, 2 * FIRST_PAUSE_S])
    assert pauses == sorted(pauses)
    absent = isinstance(error, errors.DaemonLostError)
    assert max(pauses) == pytest.approx(ABSENT_PAUSE_S if absent else LONGEST_PAUSE_S)
    assert now >= 110.0
    assert isinstance(ended, errors.DaemonLostError)
    assert error.detail in ended.detail
    assert one.attempts == len(pauses) + 1


def test_what_does_not_pass_ends_it_at_once() -> None:
    one = Reconnection(GONE, 100.0, 10.0)
    assert isinstance(one.failed(errors.NoSessionError("it has ended"), 100.0), errors.SessionLostError)
    for error in (errors.SessionLostError("nothing of it"), errors.VersionMismatchError("protocol 3")):
        assert one.failed(error, 100.0) is error
    assert isinstance(one.overdue(110.0), errors.DaemonLostError)

"""The client's half of the protocol, driven by hand-made replies and events."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.clients.core.client_core import BatchAnswered, ClientCore, Outgoing, ReplyArrived
from kvferry.clients.core.followed import TierOperation, Transfer
from kvferry.protocol.base import Body, Busy, ErrorReply, PageList
from kvferry.protocol.codec import IncomingRequest, decode_request, encode
from kvferry.protocol.envelope import Batch, Batched, Event, Reply, Request
from kvferry.protocol.errors import (
    KvferryError,
    MalformedError,
    MisuseError,
    OverloadedError,
    PageBusyError,
    PageGapError,
    PeerLostError,
)
from kvferry.protocol.events import Finished, Matched, Settled, SingleEvent, TierDone, Together, merged
from kvferry.protocol.ids import BootId
from kvferry.protocol.pool_messages import Allocate, Allocated
from kvferry.protocol.session_messages import Ping, Pong
from kvferry.protocol.tier_messages import OperationStarted, Store
from kvferry.protocol.transfer_messages import Accepted, Receive, Send

BOOT: Final = BootId("00112233445566778899aabbccddeeff")
OTHER_BOOT: Final = "ff" * 16
SECRET: Final = b"0123456789abcdef"
REQUEST: Final = "ab" * 16
PAGES: Final = np.array([3, 4], np.int64)
IDS: Final = (PAGES.tobytes(),)
CHUNK: Final = Send(request_id=REQUEST, pool="prefill", lists=(PageList(pages=2),), last=False)
SEND: Final = Send(request_id=REQUEST, pool="prefill", lists=CHUNK.lists)
RECEIVE: Final = Receive(request_id=REQUEST, pool="decode", lists=CHUNK.lists)
BUSY: Final = PageBusyError("page 3 is being read", field="pages")
LOST: Final = PeerLostError("the engine died")
ALLOCATE: Final = Allocate(pool="a", count=2)


@pytest.fixture
def core() -> ClientCore:
    """Return a core with a session."""
    return ClientCore(BOOT, SECRET)


def request_in(core: ClientCore, outgoing: Outgoing) -> Request:
    """Return what the daemon reads."""
    incoming = decode_request([bytes(frame) for frame in core.frames(outgoing)])
    assert isinstance(incoming, IncomingRequest)
    assert incoming.request.message_id == outgoing.message_id
    return incoming.request


def reply(core: ClientCore, outgoing: Outgoing, body: Any, *ids: Any) -> Any:  # noqa: ANN401
    """Let the daemon answer, or refuse with an error; return the news, or the transfer that changed."""
    body = ErrorReply(error=body.info()) if isinstance(body, KvferryError) else body
    return core.feed([bytes(frame) for frame in encode(Reply(outgoing.message_id, BOOT, body), ids)])


def event(core: ClientCore, cursor: int, body: SingleEvent | Together, boot: str = BOOT) -> object:
    """Let the daemon tell something; return the transfer that changed."""
    return core.feed([bytes(frame) for frame in encode(Event(cursor, boot, body))])


def finished(of: Send | Receive = RECEIVE, error: KvferryError | None = None, **fields: Any) -> Finished:  # noqa: ANN401
    info = None if error is None else error.info()
    return Finished(
        request_id=REQUEST, pool=of.pool, direction="send" if of is SEND else "receive", error=info, **fields
    )


SETTLED: Final = Settled(request_id=REQUEST, pool="decode", direction="receive")


def acknowledged(core: ClientCore) -> int:
    """Return the cursor that the next request acknowledges."""
    return request_in(core, core.request(Ping())).acknowledged


def states(transfer: Transfer) -> tuple[str, bool, bool]:
    return transfer.state, transfer.is_finished, transfer.is_settled


def opened(core: ClientCore, body: Send | Receive = RECEIVE) -> Transfer:
    """Return a transfer that the daemon has accepted."""
    transfer, outgoing = core.transfer(body, IDS)
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
    assert isinstance(error, PageBusyError)
    assert error.field == "pages"
    error = reply(core, core.request(Ping()), Busy(retry_after_ms=50, detail="256 requests")).error
    assert isinstance(error, OverloadedError)
    assert "50 ms" in error.detail
    assert error.retry_after_ms == 50


@pytest.mark.parametrize("frames", [[], [b""], [b"\xc1"], [b"x" * 100], [b"\x93\xa1R\x01\xa0"]])
def test_junk_is_malformed(core: ClientCore, frames: list[bytes]) -> None:
    core.request(Ping())
    with pytest.raises(MalformedError):
        core.feed(frames)
    assert core.pending == 1


# -- transfers


def test_the_life_of_a_transfer(core: ClientCore) -> None:
    transfer, outgoing = core.transfer(RECEIVE, IDS)
    assert states(transfer) == ("sent", False, False)
    with pytest.raises(MisuseError, match="is not finished: call wait_finished"):
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
    assert reply(core, outgoing, PageGapError("a hole")) is hole
    assert states(hole) == ("refused", True, False), "what was sent before is held"
    assert states(first) == ("open", False, False)
    second, outgoing = core.transfer(SEND, IDS)
    reply(core, outgoing, Accepted())
    assert event(core, 1, finished(SEND)) == BatchAnswered((first, hole, second))
    assert (first.outcome(), second.outcome()) == (finished(SEND),) * 2
    with pytest.raises(PageGapError):
        hole.outcome()
    event(core, 2, replace(SETTLED, pool="prefill", direction="send"))
    assert {one.state for one in (first, hole, second)} == {"settled"}
    assert repr(core) == "<ClientCore pending=0 batches=0 transfers=0>"


@pytest.mark.parametrize("answered", ["first", "last"])
def test_a_refused_second_receive_is_not_the_first_ones_end(core: ClientCore, answered: str) -> None:
    first, outgoing = core.transfer(RECEIVE, IDS)
    if answered == "first":
        reply(core, outgoing, Accepted(generation=1))
    second, again = core.transfer(RECEIVE, IDS)
    assert reply(core, again, BUSY) is second
    if answered == "last":
        reply(core, outgoing, Accepted(generation=1))
    assert (states(first), states(second)) == (("open", False, False), ("refused", True, True))
    assert event(core, 1, finished(generation=1)) is first
    assert first.outcome() == finished(generation=1)
    assert event(core, 2, SETTLED) is first
    assert isinstance(second.error, PageBusyError)


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
    assert (mine.error, type(other.error)) == (None, PageBusyError)
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
    assert isinstance(second.error, PeerLostError)


@pytest.mark.parametrize("before", [1, 2])
def test_events_may_come_before_the_reply(core: ClientCore, before: int) -> None:
    transfer, outgoing = core.transfer(RECEIVE, IDS)
    events = [finished(), SETTLED]
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


def test_events_that_come_together_are_heard_in_their_order(core: ClientCore) -> None:
    sent, received = opened(core, SEND), opened(core)
    both = Together(events=(finished(SEND), finished(first_token=5), SETTLED))
    heard: Any = event(core, 3, both)
    assert heard == BatchAnswered(tuple(one for one in (sent, received, received)))
    assert (states(sent), states(received)) == (("finished", True, False), ("settled", True, True))
    assert acknowledged(core) == 3
    assert event(core, 3, both) is None, "seen before"
    settled = Settled(request_id=REQUEST, pool="prefill", direction="send")
    heard = event(core, 4, Together(events=(finished(error=LOST), settled)))
    assert heard == BatchAnswered((sent,)), "the first one was seen before"
    assert received.error is None


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


def test_a_batch_that_is_refused_as_a_whole(core: ClientCore) -> None:
    transfer, operation, asking, batch = step_of(core)
    core.forget(asking.message_id)
    heard = reply(core, batch, PageBusyError("page 3", field="requests[0].pages"))
    assert heard == BatchAnswered((transfer, operation))
    assert isinstance(transfer.error, PageBusyError)
    assert isinstance(operation.error, PageBusyError)


def test_results_that_are_alike_are_said_once(core: ClientCore) -> None:
    asked = [core.transfer(replace(SEND, request_id=f"{one:032x}"), IDS) for one in range(3)]
    last, sending = core.transfer(RECEIVE, IDS)
    batch = core.batch([*(one for _, one in asked), sending])
    body = request_in(core, batch).body
    assert isinstance(body, Batch)
    heard = reply(core, batch, Batched(results=(Accepted(), Accepted(generation=1)), times=(3, 1)))
    assert heard == BatchAnswered((*(one for one, _ in asked), last))
    assert [one.accepted for one in heard.news] == [Accepted()] * 3 + [Accepted(generation=1)]


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
    with pytest.raises(MalformedError, match=r"a batch of 3|results, \d times"):
        reply(core, batch, body)

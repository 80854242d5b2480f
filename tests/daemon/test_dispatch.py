"""From bytes to a handler and back, without a socket: every request is answered, once, whatever it is."""

from __future__ import annotations

import pytest

from kvferry.daemon.control.dispatch import Call
from kvferry.daemon.control.hub import EventAcknowledged
from kvferry.protocol.base import Busy, ErrorReply
from kvferry.protocol.codec import encode
from kvferry.protocol.envelope import REQUEST_TYPES, Event, Reply, Request
from kvferry.protocol.errors import InternalError, PoolFullError
from kvferry.protocol.events import Settled
from kvferry.protocol.ids import NO_BOOT, BootId
from kvferry.protocol.limits import Limits
from kvferry.protocol.pool_messages import Allocated, PoolDeleted
from kvferry.protocol.session_messages import Ping, Pong
from tests.daemon.dispatching import ALLOCATE, BOOT, DEALER, DELETE, Dispatching, error_of

LIMITS = Limits(max_requests_per_session=4, default_deadline_ms=10)


@pytest.fixture
def daemon() -> Dispatching:
    """Return a dispatcher and its surroundings."""
    return Dispatching(LIMITS)


# -- what is refused before a handler sees it


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"secret": b""}, "NO_SESSION", "secret"),
        ({"secret": b"x" * 16}, "NO_SESSION", "secret"),
        ({"boot": BootId("f" * 32)}, "STALE_BOOT", "boot_id"),
        ({"boot": NO_BOOT}, "INVALID_FIELD", "boot_id"),
        ({"deadline_ms": LIMITS.max_deadline_ms + 1}, "INVALID_FIELD", "deadline_ms"),
    ],
)
def test_refused(daemon: Dispatching, fields: dict[str, bytes], code: str, field: str) -> None:
    assert error_of(daemon.take(ALLOCATE, **fields)) == (1, code, field)  # type: ignore[arg-type]
    assert not daemon.calls
    assert daemon.counters.snapshot()[f"requests.refused.{code.lower()}"] == 1
    (reply,) = daemon.take(ALLOCATE)
    assert isinstance(reply.body, Allocated), "a refused number may be used again"


def test_open_requests_need_no_session_and_no_boot_id(daemon: Dispatching) -> None:
    assert daemon.take(Ping(), boot=NO_BOOT, secret=b"") == [Reply(1, BOOT, Pong())]


def test_bytes_that_are_no_request_are_answered(daemon: Dispatching) -> None:
    assert error_of(daemon.take_frames([b"junk"])) == (0, "MALFORMED", "")
    assert error_of(daemon.take_frames([])) == (0, "MALFORMED", "")
    assert daemon.counters.snapshot()["messages.refused.malformed"] == 2


@pytest.mark.parametrize("readable", [False, True])
def test_too_much_is_answered_by_number_where_that_is_known(daemon: Dispatching, *, readable: bool) -> None:
    frames = [bytes(one) for one in encode(Request(8, BOOT, daemon.session.secret, 0, 0, ALLOCATE))]
    refused = daemon.take_frames(frames if readable else [], too_large=True)
    assert error_of(refused) == (8 if readable else 0, "TOO_LARGE", "pages")
    assert not daemon.calls


def test_every_type_must_have_a_handler(daemon: Dispatching) -> None:
    with pytest.raises(AssertionError, match="Free"):
        daemon.dispatcher.check_complete()
    for kind in REQUEST_TYPES:
        daemon.dispatcher.handle(kind, daemon.deferred_call)
    daemon.dispatcher.check_complete()


# -- once


def test_a_retry_is_done_once_and_answered_again(daemon: Dispatching) -> None:
    first = daemon.take(ALLOCATE, number=5)
    again = daemon.take(ALLOCATE, number=5, identity=b"after a reconnect")
    assert first == again
    assert len(daemon.calls) == 1
    assert [identity for identity, _, _ in daemon.sent] == [DEALER, b"after a reconnect"]


def test_a_refusal_is_kept_for_a_retry_too(daemon: Dispatching) -> None:
    def full(_call: Call) -> None:
        raise PoolFullError("8 pages asked for, 3 of 16 free", field="count")

    daemon.on_call = full
    assert error_of(daemon.take(ALLOCATE)) == error_of(daemon.take(ALLOCATE)) == (1, "POOL_FULL", "count")
    assert len(daemon.calls) == 1


def test_a_bug_in_a_handler_is_an_error_and_tells_no_secrets(daemon: Dispatching) -> None:
    def bug(_call: Call) -> None:
        raise KeyError("/etc/passwd")

    daemon.on_call = bug
    (reply,) = daemon.take(ALLOCATE)
    assert isinstance(reply.body, ErrorReply)
    assert reply.body.error.code == InternalError.code
    assert "passwd" not in reply.body.error.detail


@pytest.mark.anyio
async def test_a_deferred_reply_goes_where_the_session_is_now(daemon: Dispatching) -> None:
    assert daemon.take(DELETE, number=3, deadline_ms=60_000) == []
    assert daemon.take(DELETE, number=3, deadline_ms=60_000, identity=b"new") == []
    (call,) = daemon.deferred
    assert (call.message_id, call.deadline_s) == (3, 60.0)
    daemon.answer(3)
    daemon.answer(3, "b")
    assert daemon.sent == [(b"new", Reply(3, BOOT, PoolDeleted(pool="a")), ())]
    assert daemon.take(DELETE, number=3) == [Reply(3, BOOT, PoolDeleted(pool="a"))]


@pytest.mark.anyio
async def test_a_deferred_request_has_a_deadline(daemon: Dispatching) -> None:
    daemon.said.clear()
    daemon.take(DELETE, number=3)
    await daemon.said.wait()
    assert error_of(daemon.messages) == (3, "DEADLINE", "")
    daemon.answer(3)
    assert len(daemon.sent) == 1, "the late reply is dropped"


@pytest.mark.anyio
async def test_a_session_that_ends_takes_its_timers_along(daemon: Dispatching) -> None:
    daemon.take(DELETE, number=3, deadline_ms=60_000)
    daemon.dispatcher.forget_session(daemon.session)
    assert repr(daemon.dispatcher.__dict__["_deadlines"]) == "{}"


# -- limits


@pytest.mark.anyio
async def test_busy_once_too_much_is_in_flight(daemon: Dispatching) -> None:
    for number in range(1, 5):
        daemon.take(DELETE, number=number, deadline_ms=60_000)
    (busy,) = daemon.take(ALLOCATE, number=5)
    assert isinstance(busy, Reply)
    assert isinstance(busy.body, Busy)
    assert busy.body.retry_after_ms > 0
    daemon.answer(2)
    (reply,) = daemon.take(ALLOCATE, number=5)
    assert isinstance(reply.body, Allocated), "the same request, unchanged, after a while"
    daemon.dispatcher.forget_session(daemon.session)


# -- events


def settled(number: int) -> Settled:
    return Settled(request_id=f"{number:032x}", pool="decode", direction="receive")


def push(daemon: Dispatching, *numbers: int) -> None:
    for number in numbers:
        daemon.session.add_event(settled(number))
    daemon.dispatcher.push_events(daemon.session)


def cursors(messages: list[Reply | Event]) -> list[int]:
    return [one.cursor for one in messages if isinstance(one, Event)]


def test_events_wait_for_a_peer_and_are_pushed_once(daemon: Dispatching) -> None:
    push(daemon, 1, 2)
    assert daemon.sent == []
    assert cursors(daemon.take(ALLOCATE, number=1)) == [1, 2]
    assert cursors(daemon.take(ALLOCATE, number=2)) == []


def test_events_are_sent_again_to_a_new_peer_until_they_are_acknowledged(daemon: Dispatching) -> None:
    daemon.take(ALLOCATE, number=1)
    push(daemon, 1, 2, 3)
    assert cursors(daemon.take(ALLOCATE, number=2, identity=b"b")) == [1, 2, 3]
    assert cursors(daemon.take(ALLOCATE, number=3, acknowledged=1, identity=b"c")) == [2, 3]
    assert cursors(daemon.take(ALLOCATE, number=4, acknowledged=3, identity=b"d")) == []
    assert not daemon.session.unacknowledged


def test_what_is_acknowledged_is_reported_once(daemon: Dispatching) -> None:
    seen: list[EventAcknowledged] = []
    daemon.hub.subscribe(EventAcknowledged, seen.append)
    daemon.take(ALLOCATE, number=1)
    push(daemon, 1, 2)
    daemon.take(ALLOCATE, number=2, acknowledged=1)
    daemon.take(ALLOCATE, number=3, acknowledged=1)
    assert seen == [EventAcknowledged(daemon.session, settled(1))]


def test_a_full_queue_keeps_events_for_later_in_order(daemon: Dispatching) -> None:
    daemon.take(ALLOCATE, number=1)
    daemon.accepts = False
    push(daemon, 1, 2)
    daemon.accepts = True
    push(daemon, 3)
    assert cursors(daemon.messages) == [1, 2, 3]


def test_a_cursor_beyond_all_events_is_no_harm(daemon: Dispatching) -> None:
    daemon.take(ALLOCATE, number=1, acknowledged=1 << 60)
    push(daemon, 1)
    assert cursors(daemon.messages) == [1]

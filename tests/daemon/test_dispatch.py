"""From bytes to a handler and back, without a socket: every request is answered, once, whatever it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from kvferry.daemon.control.control_socket import ReceivedMessage
from kvferry.daemon.control.dispatch import Answer, Call, Dispatcher
from kvferry.daemon.control.hub import EventAcknowledged, EventHub
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.sessions import Peer, SessionRegistry
from kvferry.protocol.base import Busy, ErrorReply, RequestBody
from kvferry.protocol.codec import Frames, decode_from_daemon, encode
from kvferry.protocol.envelope import REQUEST_TYPES, Event, Reply, Request
from kvferry.protocol.errors import InternalError, PoolFullError
from kvferry.protocol.events import Settled
from kvferry.protocol.ids import NO_BOOT, BootId, new_boot_id
from kvferry.protocol.limits import Limits
from kvferry.protocol.pool_messages import Allocate, Allocated, DeletePool, PoolDeleted
from kvferry.protocol.session_messages import Ping, Pong

BOOT = new_boot_id()
LIMITS = Limits(max_requests_per_session=4, default_deadline_ms=10)
DEALER = b"dealer"


class Daemon:
    """A dispatcher with one session, one handler that answers and one that answers later."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.sessions = SessionRegistry(LIMITS)
        self.session = self.sessions.open("engine", Peer(1, 2, 3))
        self.hub = EventHub()
        self.dispatcher = Dispatcher(BOOT, LIMITS, self.sessions, self.counters, self.send, self.hub)
        self.said = asyncio.Event()
        self.dispatcher.handle_open("PING", lambda _body: Pong())
        self.dispatcher.handle("ALLOCATE", self.allocate)
        self.dispatcher.handle("DELETE_POOL", self.delete)
        self.sent: list[tuple[bytes, Reply | Event]] = []
        self.calls: list[Call] = []
        self.deferred: list[Call] = []
        self.accepts = True
        self.on_call: Callable[[Call], None] = lambda _call: None

    def send(self, identity: bytes, frames: Frames) -> bool:
        """Take a message to a client, if its queue has room."""
        self.said.set()
        if self.accepts:
            self.sent.append((identity, decode_from_daemon([bytes(one) for one in frames]).message))
        return self.accepts

    def allocate(self, call: Call) -> Answer:
        """Answer at once, with as many pages as the number of calls so far."""
        self.calls.append(call)
        self.on_call(call)
        ids = np.arange(1, len(self.calls) + 1)
        return Answer(Allocated(pages=len(ids)), (ids,))

    def delete(self, call: Call) -> None:
        """Answer later."""
        self.deferred.append(call)

    def take(
        self,
        body: RequestBody,
        *,
        number: int = 1,
        boot: BootId = BOOT,
        secret: bytes | None = None,
        deadline_ms: int = 0,
        acknowledged: int = 0,
        identity: bytes = DEALER,
    ) -> list[Reply | Event]:
        """Let a request arrive; return what is sent because of it."""
        known = self.session.secret if secret is None else secret
        request = Request(number, boot, known, deadline_ms, acknowledged, body)
        return self.take_frames([bytes(one) for one in encode(request)], identity=identity)

    def take_frames(
        self, frames: list[bytes], *, identity: bytes = DEALER, too_large: bool = False
    ) -> list[Reply | Event]:
        """Let bytes arrive; return what is sent because of them."""
        before = len(self.sent)
        self.dispatcher.on_message(ReceivedMessage(identity, frames, too_large=too_large))
        return [message for _, message in self.sent[before:]]


@pytest.fixture
def daemon() -> Daemon:
    """Return a dispatcher and its surroundings."""
    return Daemon()


def error_of(messages: list[Reply | Event]) -> tuple[int, str, str]:
    """Return the one refusal: to which message, its code and field."""
    (message,) = messages
    assert isinstance(message, Reply)
    assert isinstance(message.body, ErrorReply)
    return message.message_id, message.body.error.code, message.body.error.field


# -- what is refused before a handler sees it


ALLOCATE = Allocate(pool="a", count=1)


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
def test_refused(daemon: Daemon, fields: dict[str, bytes], code: str, field: str) -> None:
    assert error_of(daemon.take(ALLOCATE, **fields)) == (1, code, field)  # type: ignore[arg-type]
    assert not daemon.calls
    assert daemon.counters.snapshot()[f"requests.refused.{code.lower()}"] == 1
    (reply,) = daemon.take(ALLOCATE)
    assert isinstance(reply.body, Allocated), "a refused number may be used again"


def test_open_requests_need_no_session_and_no_boot_id(daemon: Daemon) -> None:
    assert daemon.take(Ping(), boot=NO_BOOT, secret=b"") == [Reply(1, BOOT, Pong())]


def test_bytes_that_are_no_request_are_answered(daemon: Daemon) -> None:
    assert error_of(daemon.take_frames([b"junk"])) == (0, "MALFORMED", "")
    assert error_of(daemon.take_frames([])) == (0, "MALFORMED", "")
    assert daemon.counters.snapshot()["messages.refused.malformed"] == 2


@pytest.mark.parametrize("readable", [False, True])
def test_too_much_is_answered_by_number_where_that_is_known(daemon: Daemon, *, readable: bool) -> None:
    frames = [bytes(one) for one in encode(Request(8, BOOT, daemon.session.secret, 0, 0, ALLOCATE))]
    refused = daemon.take_frames(frames if readable else [], too_large=True)
    assert error_of(refused) == (8 if readable else 0, "TOO_LARGE", "pages")
    assert not daemon.calls


def test_every_type_must_have_a_handler(daemon: Daemon) -> None:
    with pytest.raises(AssertionError, match="Free"):
        daemon.dispatcher.check_complete()
    for kind in REQUEST_TYPES:
        daemon.dispatcher.handle(kind, daemon.delete)
    daemon.dispatcher.check_complete()


# -- once


def test_a_retry_is_done_once_and_answered_again(daemon: Daemon) -> None:
    first = daemon.take(ALLOCATE, number=5)
    again = daemon.take(ALLOCATE, number=5, identity=b"after a reconnect")
    assert first == again
    assert len(daemon.calls) == 1
    assert [identity for identity, _ in daemon.sent] == [DEALER, b"after a reconnect"]


def test_a_refusal_is_kept_for_a_retry_too(daemon: Daemon) -> None:
    def full(_call: Call) -> None:
        raise PoolFullError("8 pages asked for, 3 of 16 free", field="count")

    daemon.on_call = full
    assert error_of(daemon.take(ALLOCATE)) == error_of(daemon.take(ALLOCATE)) == (1, "POOL_FULL", "count")
    assert len(daemon.calls) == 1


def test_a_bug_in_a_handler_is_an_error_and_tells_no_secrets(daemon: Daemon) -> None:
    def bug(_call: Call) -> None:
        raise KeyError("/etc/passwd")

    daemon.on_call = bug
    (reply,) = daemon.take(ALLOCATE)
    assert isinstance(reply.body, ErrorReply)
    assert reply.body.error.code == InternalError.code
    assert "passwd" not in reply.body.error.detail


@pytest.mark.anyio
async def test_a_deferred_reply_goes_where_the_session_is_now(daemon: Daemon) -> None:
    assert daemon.take(DeletePool(pool="a"), number=3, deadline_ms=60_000) == []
    assert daemon.take(DeletePool(pool="a"), number=3, deadline_ms=60_000, identity=b"new") == []
    (call,) = daemon.deferred
    assert (call.message_id, call.deadline_s) == (3, 60.0)
    daemon.dispatcher.answer(daemon.session, 3, Answer(PoolDeleted(pool="a")))
    daemon.dispatcher.answer(daemon.session, 3, Answer(PoolDeleted(pool="b")))
    assert daemon.sent == [(b"new", Reply(3, BOOT, PoolDeleted(pool="a")))]
    assert daemon.take(DeletePool(pool="a"), number=3) == [Reply(3, BOOT, PoolDeleted(pool="a"))]


@pytest.mark.anyio
async def test_a_deferred_request_has_a_deadline(daemon: Daemon) -> None:

    daemon.said.clear()
    daemon.take(DeletePool(pool="a"), number=3)
    await daemon.said.wait()
    assert error_of([daemon.sent[-1][1]]) == (3, "DEADLINE", "")
    daemon.dispatcher.answer(daemon.session, 3, Answer(PoolDeleted(pool="a")))
    assert len(daemon.sent) == 1, "the late reply is dropped"


@pytest.mark.anyio
async def test_a_session_that_ends_takes_its_timers_along(daemon: Daemon) -> None:
    daemon.take(DeletePool(pool="a"), number=3, deadline_ms=60_000)
    daemon.dispatcher.forget_session(daemon.session)
    assert repr(daemon.dispatcher.__dict__["_deadlines"]) == "{}"


# -- limits


@pytest.mark.anyio
async def test_busy_once_too_much_is_in_flight(daemon: Daemon) -> None:
    for number in range(1, 5):
        daemon.take(DeletePool(pool="a"), number=number, deadline_ms=60_000)
    (busy,) = daemon.take(ALLOCATE, number=5)
    assert isinstance(busy, Reply)
    assert isinstance(busy.body, Busy)
    assert busy.body.retry_after_ms > 0
    daemon.dispatcher.answer(daemon.session, 2, Answer(PoolDeleted(pool="a")))
    (reply,) = daemon.take(ALLOCATE, number=5)
    assert isinstance(reply.body, Allocated), "the same request, unchanged, after a while"
    daemon.dispatcher.forget_session(daemon.session)


# -- events


def settled(number: int) -> Settled:
    return Settled(request_id=f"{number:032x}", pool="decode", direction="receive")


def push(daemon: Daemon, *numbers: int) -> None:
    for number in numbers:
        daemon.session.add_event(settled(number))
    daemon.dispatcher.push_events(daemon.session)


def cursors(messages: list[Reply | Event]) -> list[int]:
    return [one.cursor for one in messages if isinstance(one, Event)]


def test_events_wait_for_a_peer_and_are_pushed_once(daemon: Daemon) -> None:
    push(daemon, 1, 2)
    assert daemon.sent == []
    assert cursors(daemon.take(ALLOCATE, number=1)) == [1, 2]
    assert cursors(daemon.take(ALLOCATE, number=2)) == []


def test_events_are_sent_again_to_a_new_peer_until_they_are_acknowledged(daemon: Daemon) -> None:
    daemon.take(ALLOCATE, number=1)
    push(daemon, 1, 2, 3)
    assert cursors(daemon.take(ALLOCATE, number=2, identity=b"b")) == [1, 2, 3]
    assert cursors(daemon.take(ALLOCATE, number=3, acknowledged=1, identity=b"c")) == [2, 3]
    assert cursors(daemon.take(ALLOCATE, number=4, acknowledged=3, identity=b"d")) == []
    assert not daemon.session.unacknowledged


def test_what_is_acknowledged_is_reported_once(daemon: Daemon) -> None:
    seen: list[EventAcknowledged] = []
    daemon.hub.subscribe(EventAcknowledged, seen.append)
    daemon.take(ALLOCATE, number=1)
    push(daemon, 1, 2)
    daemon.take(ALLOCATE, number=2, acknowledged=1)
    daemon.take(ALLOCATE, number=3, acknowledged=1)
    assert seen == [EventAcknowledged(daemon.session, settled(1))]


def test_a_full_queue_keeps_events_for_later_in_order(daemon: Daemon) -> None:
    daemon.take(ALLOCATE, number=1)
    daemon.accepts = False
    push(daemon, 1, 2)
    daemon.accepts = True
    push(daemon, 3)
    assert cursors([message for _, message in daemon.sent]) == [1, 2, 3]


def test_a_cursor_beyond_all_events_is_no_harm(daemon: Daemon) -> None:
    daemon.take(ALLOCATE, number=1, acknowledged=1 << 60)
    push(daemon, 1)
    assert cursors([message for _, message in daemon.sent]) == [1]

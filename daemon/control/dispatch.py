"""Dispatch of requests to their handlers: decodes, checks, runs and answers each request exactly once."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import structlog

from kvferry.daemon.control import first_step
from kvferry.daemon.control.kept_bytes import REQUEST_BYTES, SMALL_BYTES, outlives_session
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.refusals import Refusals
from kvferry.daemon.control.sessions import PendingEvent, Session, SessionRegistry
from kvferry.daemon.control.zmtp import ReceivedMessage
from kvferry.daemon.quota import Quota
from kvferry.protocol.base import Body, Busy, ErrorReply, ReplyBody
from kvferry.protocol.codec import (
    Frames,
    IncomingRequest,
    PageIds,
    UnreadableRequest,
    decode_request,
    encode,
    encoded_bytes,
)
from kvferry.protocol.envelope import REQUEST_TYPES, Batch, Batched, Event, Reply, Request
from kvferry.protocol.errors import (
    DeadlineError,
    InternalError,
    InvalidFieldError,
    KvferryError,
    NoSessionError,
    OverloadedError,
    StaleBootError,
    TooLargeError,
)
from kvferry.protocol.events import MAX_TOGETHER, Finished, Together, merged
from kvferry.protocol.ids import NO_BOOT, BootId
from kvferry.protocol.limits import Limits

EVENT_AGAIN_S: Final = 0.05
SMALL_RESULT_BYTES: Final = 1024
"""A result of up to this size is never left out: the client must learn what its request did."""

TOGETHER_BYTES: Final = 1 << 16
"""Payloads and page lists of events that go in one message; what has more goes alone."""

BodyT = TypeVar("BodyT", bound=Body)
log = structlog.get_logger(__name__)


class Call(NamedTuple):
    """One request for a handler. ``deadline_s`` is its remaining time in seconds."""

    message_id: int
    session: Session
    body: Body
    ids: tuple[PageIds, ...]
    deadline_s: float


class Answer(NamedTuple):
    """A handler's reply and its page lists."""

    body: ReplyBody
    ids: tuple[PageIds, ...] = ()


class Handler(Protocol):
    """Handles one type of request of a session."""

    def __call__(self, call: Call) -> Answer | None:
        """Return the reply, or None if ``Dispatcher.answer`` is called later; raise KvferryError to refuse."""


AsyncHandler = Callable[[Call], Coroutine[Any, Any, Answer | None] | Answer | None]
"""Does the same as a coroutine, where it has to wait, which takes its first step at once.

It is cancelled where the request gets another answer meanwhile (its deadline, ``give_up``), or its session ends.
"""


class OpenCall(NamedTuple):
    """A request that needs no session, of the connection with this identity; see ``Call``."""

    message_id: int
    identity: bytes
    body: Body
    deadline_s: float


OpenHandler = Callable[[OpenCall], ReplyBody | None]
"""Returns the reply, or None if ``Dispatcher.answer_open`` is called later; raises KvferryError to refuse."""


class SendFrames(Protocol):
    """Sends a message to the connection with this identity; see ``ControlSocket.send``."""

    def __call__(self, identity: bytes, frames: Frames, /, *, more: bool = False) -> bool:
        """Return False if the peer is gone or its queue is full."""


class OpenBatch:
    """A BATCH in progress: collects the results of its requests, within a bound on their total size.

    Attributes:
        places: the index of each request's result, by the number under which the request runs.
    """

    def __init__(self, session: Session, message_id: int, batch: Batch, max_bytes: int, kept: Quota) -> None:
        self.session = session
        self.message_id = message_id
        self.places: dict[int, int] = {}
        self._max_bytes = max_bytes
        self._kept = kept
        self._bytes = 0
        self._missing = len(batch.requests)
        self._results: list[tuple[ReplyBody, tuple[PageIds, ...]]] = [(ReplyBody(), ())] * self._missing

    def __repr__(self) -> str:
        """Show how many results are missing."""
        return f"<OpenBatch {self.message_id} missing={self._missing}>"

    @property
    def is_complete(self) -> bool:
        """Return whether every request has its result."""
        return self._missing == 0

    def put(self, part_id: int, body: ReplyBody, ids: tuple[PageIds, ...]) -> None:
        """Store a request's result; one that makes the reply too large is replaced by TOO_LARGE."""
        size_bytes = encoded_bytes(body) + sum(one.nbytes for one in ids)
        session_id = self.session.session_id
        if size_bytes > SMALL_RESULT_BYTES and not (
            self._bytes + size_bytes <= self._max_bytes and self._kept.fits(session_id, size_bytes)
        ):
            too_large = TooLargeError(f"the batch's results exceed {self._max_bytes} bytes: send this request alone")
            body, ids = ErrorReply(error=too_large.info()), ()
        else:
            self._bytes += size_bytes
            self._kept.keep(session_id, self.message_id, size_bytes)
        self._results[self.places[part_id]] = (body, ids)
        self._missing -= 1

    def reply(self) -> tuple[Batched, tuple[PageIds, ...]]:
        """Return the reply and its page lists."""
        ids = tuple([one for _, its in self._results for one in its])
        results: list[ReplyBody] = []
        times: list[int] = []
        for body, its in self._results:
            if results and not its and body == results[-1]:
                times[-1] += 1
            else:
                results.append(body)
                times.append(1)
        folded = tuple(times) if len(results) < len(self._results) else ()
        return Batched(results=tuple(results), times=folded), ids


class Dispatcher:
    """Passes each request to the handler of its type; handlers do not see envelopes.

    Attributes:
        sessions: the live sessions.
        kept: what requests that are not over keep.
    """

    def __init__(
        self,
        boot_id: BootId,
        limits: Limits,
        sessions: SessionRegistry,
        counters: Counters,
        send: SendFrames,
    ) -> None:
        """``send`` sends replies and events; it returns False if the peer is gone or its queue is full."""
        self._boot_id = boot_id
        self._limits = limits
        self.sessions = sessions
        self.kept = Quota(
            "request",
            limits.max_kept_session_request_bytes,
            limits.max_kept_request_bytes,
            sessions.tenant_of,
            small=SMALL_BYTES,
            shares=sessions.tenants.shares,
        )
        self._counters = counters
        self._refusals = Refusals()
        self._open_handlers: dict[type[Body], OpenHandler] = {}
        self._handlers: dict[type[Body], Handler | AsyncHandler] = {}
        self._send = send
        self._on_acknowledged: dict[type[Body], Callable[[Session, Any], None]] = {}
        self._deadlines: dict[tuple[int, int], asyncio.TimerHandle] = {}
        self._handling: dict[tuple[int, int], asyncio.Future[Answer | None]] = {}
        self._part_ids = itertools.count(-1, -1)
        self._batches: dict[int, OpenBatch] = {}
        self.handle("BATCH", self._batch)

    def handle_open(self, kind: str, handler: OpenHandler) -> None:
        """Register the handler of a request type that needs no session."""
        self._open_handlers[REQUEST_TYPES[kind]] = handler

    def handle(self, kind: str, handler: Handler | AsyncHandler) -> None:
        """Register the handler of a request type that needs a session."""
        self._handlers[REQUEST_TYPES[kind]] = handler

    def handle_acknowledged(self, kind: type[BodyT], handler: Callable[[Session, BodyT], None]) -> None:
        """Register what is called when an engine has acknowledged an event of this type."""
        self._on_acknowledged[kind] = handler

    def check_complete(self) -> None:
        """Assert that every request type has a handler."""
        missing = {*REQUEST_TYPES.values()} - {*self._open_handlers, *self._handlers}
        assert not missing, missing

    def on_message(self, message: ReceivedMessage) -> None:
        """Handle one message from the control socket. Never raises."""
        self._counters.add("messages.received")
        incoming = decode_request(message.frames)
        if message.too_large:
            self._counters.add("messages.too_large")
            number = incoming.request.message_id if isinstance(incoming, IncomingRequest) else incoming.message_id
            error = TooLargeError(
                f"over {self._limits.max_frames} frames or {self._limits.max_message_bytes} bytes", field="pages"
            )
            self._refuse(message.identity, number, error)
        elif isinstance(incoming, UnreadableRequest):
            self._counters.add(f"messages.refused.{incoming.error.code.lower()}")
            self._refusals.add(incoming.error.info())
            self._refuse(message.identity, incoming.message_id, incoming.error)
        else:
            self._serve(message.identity, incoming, sum(map(len, message.frames)))

    def answer(self, session: Session, message_id: int, answer: Answer) -> None:
        """Send the reply that a handler deferred; a second one to the same request is dropped."""
        timer = self._deadlines.pop((session.session_id, message_id), None)
        if timer is not None:
            timer.cancel()
            self.kept.drop(session.session_id, message_id)
            self._stop_handling(session.session_id, message_id)
        if message_id < 0:
            self._part_answered(session, message_id, answer)
            return
        frames = encode(Reply(message_id, self._boot_id, answer.body), answer.ids)
        if not session.answered(message_id, frames):
            return
        self.sessions.bound_replies()
        self._count(answer.body, session)
        if session.identity is not None:
            self._send(session.identity, frames)

    def _answer_of(self, call: Call, handle: Handler | AsyncHandler) -> Answer | None:
        """Run a handler; return its answer, or None where that comes later. Never raises."""
        try:
            answer = handle(call)
            if answer is None or isinstance(answer, Answer):
                return answer
            handling = first_step.begin(self._finish(call, answer))
            if handling.done():
                return handling.result()
        except Exception as error:  # noqa: BLE001  see _serve
            return Answer(self._refusal(call.body, error))
        self._handling[call.session.session_id, call.message_id] = handling
        return None

    async def _finish(self, call: Call, work: Coroutine[Any, Any, Answer | None]) -> Answer | None:
        """Answer a request that is not answered in the first step."""
        try:
            answer = await work
        except Exception as error:  # noqa: BLE001  see _serve
            answer = Answer(self._refusal(call.body, error))
        finally:
            is_first_step = self._handling.pop((call.session.session_id, call.message_id), None) is None
        if not is_first_step:
            if answer is not None:
                self.answer(call.session, call.message_id, answer)
            self._push_after(call)
        return answer

    def _stop_handling(self, session_id: int, message_id: int) -> None:
        handling = self._handling.get((session_id, message_id))
        if handling is not None:
            handling.cancel()

    async def close(self) -> None:
        """Cancel the coroutines of requests that are under way, and wait for them."""
        handling = list(self._handling.values())
        for one in handling:
            one.cancel()
        if handling:
            await asyncio.wait(handling)

    def answer_open(self, call: OpenCall, answer: ReplyBody | KvferryError) -> None:
        """Send the reply, or the refusal, that the handler of a request without a session deferred."""
        body = _error_body(answer) if isinstance(answer, KvferryError) else answer
        self._count(body)
        self._send(call.identity, encode(Reply(call.message_id, self._boot_id, body)))

    def answer_error(self, session: Session, message_id: int, error: KvferryError) -> None:
        """Refuse a request that a handler deferred."""
        self.answer(session, message_id, Answer(_error_body(error)))

    def asked_by(self, call: Call) -> tuple[int, int]:
        """Return by which message a request came, and which of a BATCH it is; 0 where it came alone."""
        batch = self._batches.get(call.message_id)
        return (call.message_id, 0) if batch is None else (batch.message_id, batch.places[call.message_id])

    def give_up(self, session: Session, asked_by: tuple[int, int], error: KvferryError) -> bool:
        """Answer a request that is held with an error; return False if it has its answer."""
        message_id, place = asked_by
        of_batch = {
            batch.places[part_id]: part_id
            for part_id, batch in self._batches.items()
            if batch.session is session and batch.message_id == message_id
        }
        held = of_batch.get(place) if of_batch else message_id
        if held is None or not session.is_pending(held):
            return False
        self.answer_error(session, held, error)
        return True

    def push_events(self, session: Session) -> None:
        """Send the session's unsent events, as many as its queue takes; the others follow with its next request."""
        try:
            while session.unsent and session.identity is not None:
                events = _together(session)
                more = len(session.unsent) > len(events)
                is_first = events[0].cursor > session.sent_cursor  # of those sent again, it may know some
                frames = self._event_frames(events, merge=is_first)
                if not self._send(session.identity, frames, more=more):
                    return
                session.sent_cursor = max(session.sent_cursor, events[-1].cursor)
                for _ in events:
                    session.unsent.popleft()
        except Exception as cause:  # no memory: the engine may wait for nothing else, so it is tried again
            log.exception("an event could not be sent", session=session.session_id, cause=str(cause))
            asyncio.get_running_loop().call_later(EVENT_AGAIN_S, self._push_again, session)

    def _push_after(self, call: Call) -> None:
        """Send the events that a request has caused behind its reply; where that is to come, in a later turn."""
        if not call.session.unsent:
            return
        if call.message_id < 0 or call.session.is_pending(call.message_id):
            asyncio.get_running_loop().call_soon(self._push_again, call.session)
        else:
            self.push_events(call.session)

    def _event_frames(self, events: Sequence[PendingEvent], *, merge: bool) -> Frames:
        """Return the message that tells of these events."""
        last = events[-1]
        if len(events) == 1:
            return encode(Event(last.cursor, self._boot_id, last.body), last.ids)
        bodies = [one.body for one in events]
        if merge:
            bodies = merged(bodies)
        body = bodies[0] if len(bodies) == 1 else Together(events=tuple(bodies))
        return encode(Event(last.cursor, self._boot_id, body), [ids for one in events for ids in one.ids])

    def _push_again(self, session: Session) -> None:
        if not session.ended:
            self.push_events(session)

    def forget_session(self, session: Session) -> None:
        """Drop the timers and open batches of a session that has ended."""
        for key in [one for one in self._deadlines if one[0] == session.session_id]:
            self._deadlines.pop(key).cancel()
            self._stop_handling(*key)
        for part_id in [one for one, batch in self._batches.items() if batch.session is session]:
            del self._batches[part_id]
        self.kept.drop_all(session.session_id, lambda key: not outlives_session(key))

    def _serve(self, identity: bytes, incoming: IncomingRequest, size_bytes: int) -> None:
        try:
            self._dispatch(identity, incoming, size_bytes)
        except Exception as error:  # noqa: BLE001  a bug must neither end the loop nor leave the client waiting
            refusal = self._refusal(incoming.request.body, error)
            self._count(refusal)
            self._send(identity, encode(Reply(incoming.request.message_id, self._boot_id, refusal)))

    def _dispatch(self, identity: bytes, incoming: IncomingRequest, size_bytes: int) -> None:
        request = incoming.request
        if request.boot_id not in (self._boot_id, NO_BOOT):
            raise StaleBootError(
                f"the request is for daemon {request.boot_id}, this is {self._boot_id}", field="boot_id"
            )
        session = self._session_of(request)
        if session is not None:
            self._update_session(session, identity, request)
        kind = type(request.body)
        open_handler = self._open_handlers.get(kind)
        if open_handler is not None:
            deadline_ms = min(request.deadline_ms or self._limits.default_deadline_ms, self._limits.max_deadline_ms)
            call = OpenCall(request.message_id, identity, request.body, deadline_ms / 1000)
            answer = open_handler(call)
            if answer is not None:
                self.answer_open(call, answer)
        elif session is None:
            raise NoSessionError(f"{kind.__name__} needs a session", field="secret")
        elif not request.boot_id:
            raise InvalidFieldError(f"{kind.__name__} needs the boot id of this daemon", field="boot_id")
        else:
            self._handle(session, request, incoming.ids, size_bytes)

    def _session_of(self, request: Request) -> Session | None:
        if not request.secret:
            return None
        session = self.sessions.by_secret(request.secret)
        if session is None:
            raise NoSessionError("no live session has this secret", field="secret")
        return session

    def _update_session(self, session: Session, identity: bytes, request: Request) -> None:
        """Apply what every request of a session carries: where to answer, and which events it acknowledges."""
        session.bind(identity)
        for event in session.acknowledge(request.acknowledged):
            self._counters.observe("stages.told.any", time.monotonic() - event.queued_s)
            acknowledged = self._on_acknowledged.get(type(event.body))
            if acknowledged is not None:
                acknowledged(session, event.body)
        self.push_events(session)

    def _handle(self, session: Session, request: Request, ids: tuple[PageIds, ...], size_bytes: int) -> None:
        call = Call(request.message_id, session, request.body, ids, self._deadline_s(request.deadline_ms))
        if session.begin(call.message_id):
            self._run(call, size_bytes)
            self._push_after(call)
            return
        reply = session.reply_to(call.message_id)
        if reply is not None and session.identity is not None:
            self._send(session.identity, reply)

    def _run(self, call: Call, size_bytes: int = 0) -> None:
        """Run the handler of a request; answer it, or keep its message and set a timer that answers DEADLINE."""
        try:
            if call.message_id > 0:  # not one of a BATCH, which is counted as a whole
                self.kept.check(call.session.session_id, size_bytes)
        except KvferryError as error:
            answer: Answer | None = Answer(self._refusal(call.body, error))
        else:
            answer = self._answer_of(call, self._handlers[type(call.body)])
        if answer is not None:
            self.answer(call.session, call.message_id, answer)
            return
        if not call.session.is_pending(call.message_id):
            return
        self.kept.keep(call.session.session_id, call.message_id, size_bytes + REQUEST_BYTES)
        if not isinstance(call.body, Batch):
            late = _late(call)
            late.request_id = call.body.request_id
            self._deadlines[call.session.session_id, call.message_id] = asyncio.get_running_loop().call_later(
                call.deadline_s, self.answer_error, call.session, call.message_id, late
            )

    def _batch(self, call: Call) -> None:
        """Run the requests of a BATCH as if each had come alone, under numbers below 0, which no client can use."""
        body = expect(call, Batch)
        call.session.check_parts()
        deadlines_ms = body.deadlines_ms or (0,) * len(body.requests)
        if len(deadlines_ms) != len(body.requests):
            raise InvalidFieldError(
                f"{len(deadlines_ms)} deadlines for {len(body.requests)} requests", field="deadlines_ms"
            )
        deadlines_s = [
            self._deadline_s(one, f"deadlines_ms[{at}]") if one else call.deadline_s
            for at, one in enumerate(deadlines_ms)
        ]
        batch = OpenBatch(call.session, call.message_id, body, self._limits.max_message_bytes, self.kept)
        ids = iter(call.ids)
        for at, (request, deadline_s) in enumerate(zip(body.requests, deadlines_s, strict=True)):
            its = tuple(itertools.islice(ids, len(request.page_counts())))
            part = Call(next(self._part_ids), call.session, request, its, deadline_s)
            batch.places[part.message_id] = at
            self._batches[part.message_id] = batch
            call.session.begin_part(part.message_id)
            self._run(part)

    def _part_answered(self, session: Session, part_id: int, answer: Answer) -> None:
        """Store the result of a request of a BATCH; the last one answers the BATCH."""
        batch = self._batches.pop(part_id, None)
        if batch is None:  # answered before
            return
        session.part_answered(part_id)
        self._count(answer.body, session)
        batch.put(part_id, answer.body, answer.ids)
        if batch.is_complete:
            self.kept.drop(session.session_id, batch.message_id)
            self.answer(session, batch.message_id, Answer(*batch.reply()))

    def _deadline_s(self, deadline_ms: int, field: str = "deadline_ms") -> float:
        deadline_ms = deadline_ms or self._limits.default_deadline_ms
        if deadline_ms > self._limits.max_deadline_ms:
            raise InvalidFieldError(
                f"a deadline of {deadline_ms / 1000:g} s; at most {self._limits.max_deadline_ms / 1000:g} s "
                "(limits.max_deadline_ms)",
                field=field,
            )
        return deadline_ms / 1000

    def _refusal(self, body: Body, error: Exception) -> ErrorReply | Busy:
        """Return the answer to a request whose handler raised."""
        name = type(body).__name__
        if not isinstance(error, KvferryError):
            log.error("request failed", type=name, request_id=body.request_id, exc_info=error)
            error = InternalError(f"{name} failed: {type(error).__name__}")
        error.request_id = body.request_id
        return _error_body(error)

    def _count(self, answer: ReplyBody, session: Session | None = None) -> None:
        """Count the answer to a request, if it is a refusal: also of one that was deferred, and of each of a BATCH."""
        if isinstance(answer, Busy):
            error = OverloadedError(answer.detail).info()
        elif isinstance(answer, ErrorReply):
            error = answer.error
        else:
            return
        self._counters.add(f"requests.refused.{error.code.lower()}")
        self._refusals.add(error, f"{session.session_id} {session.name}" if session else "")

    def _refuse(self, identity: bytes, message_id: int, error: KvferryError) -> None:
        self._send(identity, encode(Reply(message_id, self._boot_id, _error_body(error))))


def _error_body(error: KvferryError) -> ErrorReply | Busy:
    if isinstance(error, OverloadedError):
        return Busy(retry_after_ms=error.retry_after_ms, detail=error.detail)
    return ErrorReply(error=error.info())


def _together(session: Session) -> list[PendingEvent]:
    """Return the next of a session's unsent events, of which there are some: as many as go in one message."""
    found: list[PendingEvent] = []
    size_bytes = 0
    for one in itertools.islice(session.unsent, MAX_TOGETHER):
        payload = one.body.payload if isinstance(one.body, Finished) else b""
        size_bytes += len(payload) + sum(ids.nbytes for ids in one.ids)
        if found and size_bytes > TOGETHER_BYTES:
            break
        found.append(one)
    return found


def _late(call: Call) -> DeadlineError:
    """Return the error of a deferred request that has had no answer in time."""
    after = getattr(call.body, "after", None)
    if after is None:
        return DeadlineError(
            f"no answer within {call.deadline_s:g} s",
            fault="daemon",
            remedy="allow more time; kvferry transfers, kvferry tiers and the daemon's log show what it waits for",
        )
    return DeadlineError(
        f"no answer within {call.deadline_s:g} s; it was to wait until event {after.event} reaches {after.value}",
        fault="caller",
        remedy="record the event, or allow more time",
    )


def expect(call: Call, kind: type[BodyT]) -> BodyT:
    """Return the call's body, which is of this type by the handler's registration."""
    assert isinstance(call.body, kind), call.body
    return call.body

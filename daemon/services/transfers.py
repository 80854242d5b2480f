"""The shell around the transfer state machine: requests in, transports and events out, one timer for all deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, NamedTuple

import structlog

from kvferry.daemon.control.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.control.kept_bytes import REQUEST_BYTES, TRANSFER
from kvferry.daemon.control.later import Later
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.sessions import Session
from kvferry.daemon.process.shares import share
from kvferry.daemon.services.event_rings import EventRings
from kvferry.daemon.services.peer_transfers import PeerTransferService
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.services.receive_to_host import HostReceivePlan, HostReceives
from kvferry.daemon.transfer.endpoints import Clocked, EndpointKey, Half, ReceiveRequest, SendChunk
from kvferry.daemon.transfer.peer_transfers import TransferActivity
from kvferry.daemon.transfer.registry import (
    AnnounceReceive,
    Effect,
    Notify,
    ReportBug,
    SendToDaemon,
    SendToPeer,
    StartOp,
    StopOp,
    StopSending,
    WarnTrimmed,
    request_id_of,
)
from kvferry.daemon.transfer.state_machine import RequestContext, TransferStateMachine
from kvferry.daemon.transfer.transitions import State
from kvferry.daemon.transports.local import Transport
from kvferry.daemon.transports.remote import RemoteTransports
from kvferry.pools.planning.page_ranges import PageRange, page_ranges
from kvferry.protocol.errors import (
    CancelledError,
    InternalError,
    KvferryError,
    OverloadedError,
    PeerCancelledError,
    ShuttingDownError,
    TransferExistsError,
)
from kvferry.protocol.events import Finished, Matched, Settled
from kvferry.protocol.limits import Limits
from kvferry.protocol.session_messages import TransferStatus
from kvferry.protocol.transfer_messages import Abandon, Abandoned, Cancel, Cancelled, Receive, Result, Send

# -- what is logged and counted about transfers.


END_AGAIN_S = 0.1
"""After so long a copy's end that could not be handled is handled again."""

FEW_EVENTS = 64
"""A session with so few events that are not acknowledged is not asked how many others have."""

log = structlog.get_logger(__name__)


def count_finished(event: Finished, counters: Counters) -> None:
    """Count the outcome of one side of a transfer."""
    counters.add(f"transfers.{event.direction}.{_outcome(event).lower()}")
    if event.direction == "receive" and not event.error:
        counters.add("transfers.moved_bytes", event.moved_bytes)


def log_finished(event: Finished) -> None:
    """Log the outcome of one side of a transfer."""
    log.info(
        "transfer finished",
        request_id=event.request_id,
        direction=event.direction,
        pool=event.pool,
        outcome=_outcome(event),
        detail=event.error.detail if event.error else "",
        pages=event.pages,
        moved_bytes=event.moved_bytes,
        waited_us=event.waited_us,
        moved_us=event.moved_us,
    )


def _outcome(event: Finished) -> str:
    return event.error.code if event.error else "OK"


def warn_trimmed(effect: WarnTrimmed, counters: Counters) -> None:
    """Count and log that page lists of unequal length were cut to the shorter one."""
    send_request, receive_request, trim = effect
    counters.add("transfers.trimmed")
    log.warning(
        "lists of unequal length were cut to the shorter one; give first_page on both sides",
        request_id=receive_request.request_id,
        component=trim.component,
        source=send_request.pool.name,
        source_daemon=send_request.origin.peer.address if send_request.origin else "",
        source_pages=trim.source_length,
        destination=receive_request.pool.name,
        destination_pages=trim.destination_length,
        dropped_pages=trim.pages,
    )


def _same_receive(tenant: int, request_id: str, pool: str) -> Callable[[Call], bool]:
    """Return what says whether a request is a RECEIVE of this key."""

    def is_it(call: Call) -> bool:
        body = call.body
        return (
            call.session.tenant == tenant
            and isinstance(body, Receive)
            and (body.request_id, body.pool) == (request_id, pool)
        )

    return is_it


class Movers(NamedTuple):
    """The transports within this daemon and from other daemons, and what yields to them while they copy."""

    local: Transport
    remote: RemoteTransports
    activity: TransferActivity


class TransferService:
    """Drives the state machine on the control loop's clock."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        state_machine: TransferStateMachine,
        pools: PoolRegistry,
        rings: EventRings,
        movers: Movers,
        peers: PeerTransferService,
        host_receives: HostReceives,
        limits: Limits,
        counters: Counters,
    ) -> None:
        """``host_receives`` handles RECEIVEs into the host tier."""
        self.draining = False
        self._dispatcher = dispatcher
        self._state_machine = state_machine
        self._pools = pools
        self._rings = rings
        self._local = movers.local
        self._local.reported = self._end_ops
        self._remote = movers.remote
        self._activity = movers.activity
        self._peers = peers
        self._host_receives = host_receives
        self._limits = limits
        self._counters = counters
        self._under_way: set[int] = set()
        self._done: list[tuple[int, KvferryError | None]] = []
        self._ended: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._later = Later()
        self._cancels: dict[tuple[int, EndpointKey], list[tuple[Call, bool]]] = {}
        self._executing = False
        self._idle = asyncio.Event()
        self._idle.set()
        dispatcher.handle("SEND", self._send)
        dispatcher.handle("RECEIVE", rings.after(self._receive))
        dispatcher.handle("CANCEL", self._cancel)
        dispatcher.handle("ABANDON", self._abandon)
        dispatcher.handle("RESULT", self._result)
        dispatcher.handle_acknowledged(Settled, self._acknowledged)

    def session_began(self, session_id: int) -> None:
        """Keep the session's results from now on."""
        self._state_machine.results.open_session(session_id)

    def events_reached(self, session_id: int, values: list[int]) -> None:
        """Start what waits for these values of a session's event ring, by slot."""
        if self._state_machine.waits_for_events(session_id):
            self._state_machine.events_reached(session_id, values, time.monotonic())
            self.execute()

    def session_lost(self, session: Session) -> None:
        """Fail the session's open endpoints."""
        self._state_machine.session_lost(session.session_id, time.monotonic())
        for key in [one for one in self._cancels if one[0] == session.session_id]:
            del self._cancels[key]
        self.execute()

    def _op_done(self, op_id: int, error: KvferryError | None) -> None:
        """Take note that a transfer op has ended, as its transport reports.

        That is handled at once where effects are being executed, or the transport then says that all was reported; else
        in the next turn: engines hear in one message of all that have ended by then. What comes first in that turn, a
        CANCEL or a deadline, may still end a transfer whose bytes are all there.
        """
        if self._executing:
            self._end_op(op_id, error)
            return
        if not self._done:
            self._loop.call_soon(self._end_ops)
        self._done.append((op_id, error))

    def _end_ops(self) -> None:
        done, self._done = self._done, []
        for op_id, error in done:
            self._end_op(op_id, error)
        if done:  # else they were handled as ``reported`` was called
            self.execute()

    def _end_op(self, op_id: int, error: KvferryError | None) -> None:
        if op_id not in self._state_machine.endpoints.ops:  # it was ended by _end_by, as its transport raised
            self._counters.add("transfers.ops_over")
            return
        try:
            self._state_machine.op_done(op_id, error, time.monotonic())
        except Exception as cause:  # noqa: BLE001  no byte of it moves any more: it ends, if by another error
            self._failed("the end of a copy", cause)
            self._end_by(op_id, InternalError(f"the copy could not be ended: {cause!r}"))
        finally:
            self._ended.append(op_id)

    async def drained(self) -> None:
        """Return once no transfer is live and the last events are queued for sending."""
        await self._idle.wait()
        await asyncio.sleep(0)
        self.write_log()

    def write_log(self) -> None:
        """Write the lines of the log that wait."""
        self._later.make_all()

    def live(self, session_id: int) -> int:
        """Return how many endpoints of a session are live, or settled and not acknowledged."""
        return self._state_machine.results.count(session_id)

    def drain(self) -> None:
        """Refuse new transfers, and fail the endpoints that still wait for a SEND or RECEIVE."""
        self.draining = True
        for call in self._host_receives.waiting():
            error = ShuttingDownError("the daemon is shutting down")
            self._dispatcher.answer_error(call.session, call.message_id, error)
        self._state_machine.drain(time.monotonic())
        self.execute()

    def status(self) -> tuple[TransferStatus, ...]:
        """Return the live endpoints as STATUS shows them."""
        now = time.monotonic()
        return tuple(
            TransferStatus(
                request=endpoint.request_id,
                request_id=endpoint.request_id,
                direction=endpoint.direction,
                pool=endpoint.pool.name,
                state=endpoint.state.value,
                age_ms=round((now - endpoint.created_at) * 1000),
                pages=endpoint.pages,
                arrived=endpoint.arrived_pages if isinstance(endpoint, ReceiveRequest) else 0,
                waits_for=endpoint.waits_for(),
                tenant=endpoint.key.tenant,
            )
            for endpoint in self._state_machine.endpoints
        )

    def _send(self, call: Call) -> Answer:
        body = expect(call, Send)
        context = self._context(call, body)
        manifest = context.pool.manifest
        ranges = page_ranges(body.lists, call.ids, manifest, may_end_inside=body.last, may_lack=not body.last)
        chunk = SendChunk(ranges, body.last, body.first_token, body.payload, body.steps, body.checksums)
        reached = self._reached(context.session_id, body)
        accepted = self._state_machine.send(context, chunk, body.destinations)
        self._keep_lists(call, "send", ranges)
        if body.steps:
            self._state_machine.events_reached(context.session_id, reached, time.monotonic())
        self.execute(call.session)
        return Answer(accepted)

    def _reached(self, session_id: int, body: Send) -> list[int]:
        """Return the values of the session's event ring; empty where the SEND has no steps."""
        return self._rings.values(session_id, body.steps) if body.steps else []

    def _receive(self, call: Call) -> Answer | Coroutine[Any, Any, Answer]:
        body = expect(call, Receive)
        is_it = _same_receive(call.session.tenant, body.request_id, body.pool)
        if any(map(is_it, self._host_receives.waiting())):
            raise TransferExistsError("a RECEIVE of this request into this pool waits for room", field="request_id")
        context = self._context(call, body)
        if body.into == "host":
            plan = self._host_receives.plan(body, context.pool)
            steps = self._host_receives.making_room(plan)
            if steps is not None:
                self._state_machine.comes_later(Half(call.session.tenant, body.request_id, "receive"))
                return self._receive_later(call, steps)
            return self._receive_to_host(call, body, context, plan)
        ranges = page_ranges(body.lists, call.ids, context.pool.manifest, may_end_inside=True)
        return self._begin_receive_into(call, context, ranges, body)

    async def _receive_later(self, call: Call, steps: Iterator[None]) -> Answer:
        """Start a receive request once there is room, by what there is then."""
        await self._host_receives.make_room(call, steps)
        body = expect(call, Receive)
        context = self._context(call, body)
        return self._receive_to_host(call, body, context, self._host_receives.plan(body, context.pool))

    def _receive_to_host(self, call: Call, body: Receive, context: RequestContext, plan: HostReceivePlan) -> Answer:
        """Start a receive request whose bytes become a snapshot in the host tier."""
        host_receive = self._host_receives.make(call, body, plan)
        try:
            return self._begin_receive_into(call, context._replace(pool=host_receive.pool), host_receive.ranges, body)
        except Exception as cause:
            error = (
                cause if isinstance(cause, KvferryError) else InternalError(f"no receive request was made: {cause!r}")
            )
            self._host_receives.refused(host_receive, error)
            raise

    def _begin_receive_into(
        self, call: Call, context: RequestContext, ranges: tuple[PageRange, ...], body: Receive
    ) -> Answer:
        daemons = body.source_daemons
        if daemons:
            daemons = self._peers.source_daemons(daemons)
        accepted = self._state_machine.receive(context, ranges, body.sources, daemons, checksums=body.checksums)
        self._keep_lists(call, "receive", ranges)
        self.execute(call.session)
        return Answer(accepted)

    def _keep_lists(self, call: Call, direction: str, ranges: tuple[PageRange, ...]) -> None:
        """Count the page lists of an accepted message until its endpoint has settled."""
        body = call.body
        assert isinstance(body, Send | Receive), body
        size_bytes = REQUEST_BYTES + sum(one.ids.nbytes for one in ranges if not one.shared)
        self._dispatcher.kept.keep(
            call.session.session_id, (TRANSFER, direction, body.request_id, body.pool), size_bytes
        )

    def _cancel_held(self, call: Call, body: Cancel) -> bool:
        """Cancel a RECEIVE that is held for its event, or for room: it would begin later, when nobody wants it."""
        is_same = _same_receive(call.session.tenant, body.request_id, body.pool)

        def is_it(held: Call) -> bool:
            return held.session is call.session and is_same(held)

        for held in filter(is_it, self._host_receives.waiting()):
            error = CancelledError("cancelled while it waited for room in the host tier")
            self._dispatcher.answer_error(held.session, held.message_id, error)
            return True
        return self._rings.give_up(call.session.session_id, is_it)

    def _cancel(self, call: Call) -> Answer | None:
        body = expect(call, Cancel)
        key = EndpointKey(call.session.tenant, body.request_id, body.pool, body.direction)
        session_id = call.session.session_id
        endpoint = self._state_machine.endpoint(session_id, key)
        if endpoint is None and body.direction == "receive" and self._cancel_held(call, body):
            return Answer(Cancelled(was_finished=False))
        if endpoint is None and self._state_machine.result(session_id, key).settled is not None:
            return Answer(Cancelled(was_finished=True))
        was_finished = endpoint is not None and endpoint.state is not State.OPEN
        if body.wait:
            self._cancels.setdefault((session_id, key), []).append((call, was_finished))
        self._state_machine.cancel(session_id, key, time.monotonic())
        self.execute(call.session)
        if body.wait:
            return None
        return Answer(
            Cancelled(was_finished=was_finished, settled=self._state_machine.endpoint(session_id, key) is None)
        )

    def _abandon(self, call: Call) -> Answer:
        body = expect(call, Abandon)
        daemons = self._peers.other_daemons(body.daemons, "daemons")
        half = Half(call.session.tenant, body.request_id, body.direction)
        error = PeerCancelledError(f"the peer abandoned the request{body.reason and f': {body.reason}'}")
        failed = self._state_machine.abandon(half, error, time.monotonic(), daemons)
        self.execute(call.session)
        return Answer(Abandoned(failed=failed))

    def _result(self, call: Call) -> Answer:
        body = expect(call, Result)
        key = EndpointKey(call.session.tenant, body.request_id, body.pool, body.direction)
        return Answer(self._state_machine.result(call.session.session_id, key))

    def _context(self, call: Call, body: Send | Receive) -> RequestContext:
        if self.draining:
            raise ShuttingDownError("the daemon is shutting down and accepts no new transfers")
        pool = self._pools.named_by(call.session, body.pool)
        session_id = call.session.session_id
        key = EndpointKey(pool.tenant, body.request_id, body.pool, "send" if isinstance(body, Send) else "receive")
        if self._state_machine.endpoint(session_id, key) is None:  # chunks of a live endpoint are always accepted
            self._check_limits(call.session)
        self._dispatcher.kept.check(session_id, REQUEST_BYTES + sum(one.nbytes for one in call.ids))
        now = time.monotonic()
        return RequestContext(
            session_id, pool, body.request_id, Clocked(now, now + call.deadline_s), call.session.owner_id
        )

    def _check_limits(self, session: Session) -> None:
        most = self._limits.max_transfers_per_session
        if self.live(session.session_id) >= most:
            raise OverloadedError(f"{most} transfers of the session are live or unacknowledged")
        if len(session.unacknowledged) >= 2 * most:  # reused request ids keep the count of results low
            raise OverloadedError(f"{len(session.unacknowledged)} events of the session are unacknowledged")
        most = self._limits.max_transfers
        if 2 * self._state_machine.results.total >= most:
            live = {one: self.live(one.session_id) for one in self._dispatcher.sessions}
            self._check_share(session.tenant, most, live, "transfers of all sessions are live or unacknowledged")
        if len(session.unacknowledged) > FEW_EVENTS:
            events = {one: len(one.unacknowledged) for one in self._dispatcher.sessions}
            self._check_share(session.tenant, 2 * most, events, "events of all sessions are unacknowledged")

    def _check_share(self, user: int, most: int, counts: dict[Session, int], what: str) -> None:
        total = sum(counts.values())
        its = sum(count for one, count in counts.items() if one.tenant == user)
        if its >= share(user, most, total - its):
            raise OverloadedError(f"{total} {what}, {its} of them of user {user}, of at most {most}")

    def _acknowledged(self, session: Session, event: Settled) -> None:
        key = EndpointKey(session.tenant, event.request_id, event.pool, event.direction)
        self._state_machine.results.acknowledged(session.session_id, key, event.generation)

    def execute(self, asking: Session | None = None) -> None:
        """Execute the state machine's effects in order; effects that these cause are executed after them.

        Their events leave at once, but those of ``asking``, the session whose request this is: the dispatcher sends
        them after its reply, which they never overtake.
        """
        if self._executing:
            return
        self._executing = True
        notified: dict[int, Session] = {}
        try:
            while effects := self._state_machine.effects():
                self._do(effects, notified)
        finally:
            self._executing = False
            for session in notified.values():
                if session is not asking:
                    self._dispatcher.push_events(session)
            while self._ended:  # what copies in the background goes on once engines are told
                self._op_ended(self._ended.pop())
            self._set_timer()
            if any(True for _ in self._state_machine.endpoints):
                self._idle.clear()
            else:
                self._idle.set()

    def _do(self, effects: list[Effect], notified: dict[int, Session]) -> None:
        not_started: dict[int, KvferryError] = {}
        for effect in effects:
            try:
                self._do_one(effect, notified)
            except Exception as cause:  # noqa: BLE001  a bug in one transfer must not stop the others
                self._failed(type(effect).__name__, cause, request_id_of(effect))
                if isinstance(effect, StartOp):
                    known = cause if isinstance(cause, KvferryError) else None
                    not_started[effect.op_id] = known or InternalError(f"the copy could not be started: {cause!r}")
                elif isinstance(effect, SendToPeer | SendToDaemon | AnnounceReceive | StopOp | StopSending):
                    try:  # others wait for it
                        self._do_one(effect, notified)
                    except Exception as again:  # noqa: BLE001  its request ends here, and its deadline ends it there
                        self._failed(type(effect).__name__, again, request_id_of(effect))
        for op_id, error in not_started.items():
            self._end_by(op_id, error)

    def _do_one(self, effect: Effect, notified: dict[int, Session]) -> None:
        if isinstance(effect, Notify):
            session = self._notify(effect)
            if session is not None:
                notified[session.session_id] = session
        elif isinstance(effect, StartOp):
            self._start(effect)
        elif isinstance(effect, StopOp):
            self._stop(effect.op_id)
        elif isinstance(effect, WarnTrimmed):
            warn_trimmed(effect, self._counters)
        elif isinstance(effect, ReportBug):
            self._counters.add("transfers.bugs")
            log.error("a transfer failed", request_id=effect.request_id, detail=effect.detail, exc_info=effect.cause)
        else:
            self._peers.execute(effect)

    def _failed(self, what: str, cause: Exception, request_id: str = "") -> None:
        self._counters.add("transfers.effects_failed")
        log.error("an effect failed", effect=what, cause=str(cause), exc_info=cause, request_id=request_id)

    def _end_by(self, op_id: int, error: KvferryError) -> None:
        """End a transfer op that could not be started, or whose end raised: no byte of it moves."""
        with contextlib.suppress(Exception):  # the transport may have begun it before it raised
            self._stop(op_id)
        if op_id not in self._state_machine.endpoints.ops:  # it was done, at once, before its transport raised
            return
        try:
            self._state_machine.op_done(op_id, error, time.monotonic())
        except Exception as cause:  # noqa: BLE001  transports report once: nobody else would end it
            self._failed("the end of a copy", cause)
            self._loop.call_later(END_AGAIN_S, self._op_done, op_id, error)
        finally:
            self._op_ended(op_id)

    def _op_ended(self, op_id: int) -> None:
        if op_id in self._under_way:
            self._under_way.remove(op_id)
            self._activity.transfer_ended()

    def _start(self, effect: StartOp) -> None:
        self._under_way.add(effect.op_id)
        self._activity.transfer_began()
        op = self._state_machine.endpoints.ops[effect.op_id]
        if op.send_request.origin is not None:
            self._remote.start(op, self._op_done)
        else:
            self._local.start(effect, self._op_done)

    def _stop(self, op_id: int) -> None:
        op = self._state_machine.endpoints.ops.get(op_id)
        if op is None:  # it has ended meanwhile
            return
        if op.send_request.origin is not None:
            self._remote.stop(op_id)
        else:
            self._local.stop(op_id)

    def _notify(self, effect: Notify) -> Session | None:
        event = effect.event
        session = self._dispatcher.sessions.get(effect.session_id)
        if isinstance(event, Matched):
            return session if session is not None and self._notify_matched(session, event) else None
        if session is not None:
            session.add_event(event)  # first: the engine is told of the end whatever else fails
        if isinstance(event, Settled):
            key = (TRANSFER, event.direction, event.request_id, event.pool)
            self._dispatcher.kept.drop(effect.session_id, key)
        try:
            if isinstance(event, Finished):
                count_finished(event, self._counters)
                self._later.add(partial(log_finished, event))  # after the engines hear of it
            self._host_receives.on_event(effect.session_id, event)
            if session is not None and isinstance(event, Settled):
                self._answer_cancels(session, event)
        except Exception as cause:  # noqa: BLE001
            self._failed(type(event).__name__, cause, event.request_id)
        return session

    def _answer_cancels(self, session: Session, event: Settled) -> None:
        key = (session.session_id, EndpointKey(session.tenant, event.request_id, event.pool, event.direction))
        for call, was_finished in self._cancels.pop(key, ()):
            self._dispatcher.answer(session, call.message_id, Answer(Cancelled(was_finished=was_finished)))

    def _notify_matched(self, session: Session, event: Matched) -> bool:
        """Queue MATCHED, unless the session acknowledges no events (RESULT has it then); return whether it was."""
        is_notified = len(session.unacknowledged) < 2 * self._limits.max_transfers_per_session
        if is_notified:
            session.add_event(event)
        else:
            self._counters.add("transfers.matched_unsent")
        return is_notified

    def _set_timer(self) -> None:
        deadline = self._state_machine.next_deadline()
        if self._timer is not None:
            if deadline is not None and self._timer_at <= deadline:
                return  # it fires early at worst, and _expire sets the next one
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer_at = deadline
            self._timer = self._loop.call_later(max(0.0, deadline - time.monotonic()), self._expire)

    def _expire(self) -> None:
        self._timer = None
        try:
            self._state_machine.expire(time.monotonic())
        except Exception as cause:  # noqa: BLE001  the timer is set again
            self._failed("deadlines", cause)
        finally:
            self.execute()

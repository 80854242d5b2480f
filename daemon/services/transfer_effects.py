"""Executes what the transfer state machine asks for: copies, events, messages to other daemons, and its deadlines.

Each effect is executed once. Where one for another daemon raises, nobody knows how far it came: its request ends.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import structlog

from kvferry.daemon.control.dispatch import Dispatcher
from kvferry.daemon.control.kept_bytes import TRANSFER
from kvferry.daemon.control.later import Later
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.sessions import Session
from kvferry.daemon.services.copy_times import CopyTimes
from kvferry.daemon.services.flight_recorder import FlightRecorder
from kvferry.daemon.services.peer_transfers import PeerMessenger
from kvferry.daemon.services.receive_to_host import HostReceives
from kvferry.daemon.transfer.endpoints import EndpointKey
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
from kvferry.daemon.transfer.state_machine import TransferStateMachine
from kvferry.daemon.transports.local import Transport
from kvferry.daemon.transports.remote import RemoteTransports
from kvferry.protocol.errors import InternalError, KvferryError
from kvferry.protocol.events import Finished, Matched, Settled
from kvferry.protocol.limits import Limits

log = structlog.get_logger(__name__)


def count_finished(event: Finished, counters: Counters) -> None:
    """Count the outcome of one side of a transfer."""
    counters.add(f"transfers.{event.direction}.{_outcome(event).lower()}")
    if event.error:
        return
    counters.observe(f"transfers.{event.direction}.waited", event.waited_us / 1e6)
    counters.observe(f"transfers.{event.direction}.moved", event.moved_us / 1e6)
    if event.direction == "receive":
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


class Movers(NamedTuple):
    """The transports within this daemon and from other daemons, and what yields to them while they copy."""

    local: Transport
    remote: RemoteTransports
    activity: TransferActivity


class TransferEffects:
    """Executes the state machine's effects in order, on the control loop; effects that these cause come after them.

    Attributes:
        copies: where the time of copies goes.
        recorder: where that of each transfer goes.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        state_machine: TransferStateMachine,
        movers: Movers,
        messenger: PeerMessenger,
        host_receives: HostReceives,
        limits: Limits,
        counters: Counters,
    ) -> None:
        """``host_receives`` are told of the ends of RECEIVEs into the host tier."""
        self._dispatcher = dispatcher
        self._state_machine = state_machine
        self._movers = movers
        self._host_receives = host_receives
        self._most_matched = 2 * limits.max_transfers_per_session
        self._counters = counters
        self.copies = CopyTimes(counters)
        self.recorder = FlightRecorder()
        self._executors: dict[type[Effect], Callable[[Any], None]] = {
            StartOp: self._start,
            StopOp: self._stop,
            Notify: self._notify,
            WarnTrimmed: self._warn_trimmed,
            ReportBug: self._report_bug,
            AnnounceReceive: messenger.announce,
            SendToPeer: messenger.send_to_peer,
            SendToDaemon: messenger.send_to_daemon,
            StopSending: lambda effect: movers.remote.stop_sending(effect.remote_endpoint),
        }
        self._executing = False
        self._done: deque[tuple[int, KvferryError | None]] = deque()
        self._ended = 0
        self._notified: dict[int, Session] = {}
        self._when_settled: dict[tuple[int, EndpointKey], list[Callable[[], None]]] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._later = Later()
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        """Show how many ends of transfer ops are to be handled."""
        return f"<TransferEffects ended={len(self._done)}>"

    async def drained(self) -> None:
        """Return once no transfer is live and the last events are queued for sending."""
        await self._idle.wait()
        await asyncio.sleep(0)
        self.write_log()

    def write_log(self) -> None:
        """Write the lines of the log that wait."""
        self._later.make_all()

    def when_settled(self, session_id: int, key: EndpointKey, call: Callable[[], None]) -> None:
        """Call once an endpoint of a session has settled, unless the session ends before."""
        self._when_settled.setdefault((session_id, key), []).append(call)

    def session_lost(self, session_id: int) -> None:
        """Drop the calls that wait for endpoints of a session to settle."""
        for one in [one for one in self._when_settled if one[0] == session_id]:
            del self._when_settled[one]

    def execute(self, asking: Session | None = None) -> None:
        """Execute all effects there are. Call it after each call of the state machine.

        Their events leave at once, but those of ``asking``, the session whose request this is: the dispatcher sends
        them after its reply, which they never overtake.
        """
        if self._executing:
            return
        self._executing = True
        try:
            self._end_ops()
            while effects := self._state_machine.effects():
                self._do(effects)
                self._end_ops()
        finally:
            self._executing = False
            notified, self._notified = self._notified, {}
            for session in notified.values():
                if session is not asking:
                    self._dispatcher.push_events(session)
            while self._ended:  # what copies in the background goes on once engines are told
                self._ended -= 1
                self._movers.activity.transfer_ended()
            self._set_timer()
            if any(True for _ in self._state_machine.endpoints):
                self._idle.clear()
            else:
                self._idle.set()

    def _do(self, effects: list[Effect]) -> None:
        failed: list[tuple[Effect, Exception]] = []
        for effect in effects:
            try:
                self._executors[type(effect)](effect)
            except Exception as cause:
                self._counters.add("transfers.effects_failed")
                log.exception("an effect failed", effect=type(effect).__name__, request_id=request_id_of(effect))
                failed.append((effect, cause))
        for effect, why in failed:
            self._end_request(effect, why, time.monotonic())

    def _end_request(self, effect: Effect, cause: Exception, now: float) -> None:
        """End the request of an effect that raised, if another daemon or a copy is concerned."""
        if isinstance(effect, StartOp):
            known = cause if isinstance(cause, KvferryError) else None
            error = known or InternalError(f"the copy could not be started: {cause!r}")
            self._state_machine.op_failed(effect.op_id, error, now)
        elif isinstance(effect, AnnounceReceive | SendToPeer | SendToDaemon):
            self._state_machine.break_off(request_id_of(effect), cause, now)

    # -- copies

    def _start(self, effect: StartOp) -> None:
        op = self._state_machine.endpoints.ops[effect.op_id]
        self._movers.activity.transfer_began()
        if op.send_request.origin is not None:
            self.copies.began(op.op_id, self._movers.remote.way_of(op))
            self._movers.remote.start(op, self._op_done)
        else:
            self.copies.began(op.op_id, "local")
            self._movers.local.start(effect, self._op_done, self.execute)

    def _stop(self, effect: StopOp) -> None:
        """Stop a transfer op; one that its transport does not have, because ``start`` raised, has ended."""
        op = self._state_machine.endpoints.ops.get(effect.op_id)
        if op is not None:
            transport = self._movers.local if op.send_request.origin is None else self._movers.remote
            if not transport.stop(effect.op_id):
                self._op_done(effect.op_id, None)

    def _op_done(self, op_id: int, error: KvferryError | None) -> None:
        """Take note that a transfer op has ended, as its transport reports.

        That is handled with the effects that are being executed, or once the transport says that all was reported, or
        in the next turn: engines hear in one message of all that have ended by then. What comes first in that turn, a
        CANCEL or a deadline, may still end a transfer whose bytes are all there.
        """
        if not self._executing and not self._done:
            self._loop.call_soon(self.execute)
        self.copies.reported(op_id)
        self._done.append((op_id, error))

    def _end_ops(self) -> None:
        while self._done:
            op_id, error = self._done.popleft()
            op = self._state_machine.endpoints.ops.get(op_id)
            if op is None:  # it has ended: see _stop
                self.copies.ended(op_id, None)
                continue
            self._ended += 1
            self._state_machine.op_done(op_id, error, time.monotonic())
            arrived = [(one.component, one.plan.total_bytes) for one in op.planned_copies]
            copied_s = self.copies.ended(op_id, None if error else arrived)
            for endpoint in (op.send_request, op.receive_request):
                self.recorder.copied(endpoint, copied_s)

    # -- what engines and the log are told

    def _notify(self, effect: Notify) -> None:
        event = effect.event
        session = self._dispatcher.sessions.get(effect.session_id)
        if isinstance(event, Matched) and session is not None and len(session.unacknowledged) >= self._most_matched:
            self._counters.add("transfers.matched_unsent")  # it acknowledges no events; RESULT has it
            return
        if session is not None:
            session.add_event(event)  # first: the engine is told of the end whatever else fails
            self._notified[session.session_id] = session
        if isinstance(event, Matched):
            return
        if isinstance(event, Finished):
            self._later.add(partial(log_finished, event))  # after the engines hear of it
            count_finished(event, self._counters)
            self.recorder.finished(effect.session_id, event)
        else:
            self.recorder.settled(effect.session_id, event)
            key = (TRANSFER, event.direction, event.request_id, event.pool)
            self._dispatcher.kept.drop(effect.session_id, key)
        self._host_receives.on_event(effect.session_id, event)
        if session is not None and isinstance(event, Settled):
            key_of_it = EndpointKey(session.tenant, event.request_id, event.pool, event.direction)
            for call in self._when_settled.pop((session.session_id, key_of_it), ()):
                call()

    def _warn_trimmed(self, effect: WarnTrimmed) -> None:
        """Count and log that page lists of unequal length were cut to the shorter one."""
        send_request, receive_request, trim = effect
        self._counters.add("transfers.trimmed")
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

    def _report_bug(self, effect: ReportBug) -> None:
        self._counters.add("transfers.bugs")
        log.error("a transfer failed", request_id=effect.request_id, detail=effect.detail, exc_info=effect.cause)

    # -- deadlines

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
        finally:
            self.execute()

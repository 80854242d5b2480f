"""The shell around the room book: requests in, transports and events out, one timer for all deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import time

import structlog

from kvferry.daemon.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.event_rings import EventRings
from kvferry.daemon.metrics import Counters
from kvferry.daemon.pool_service import PoolService
from kvferry.daemon.request_ids import about
from kvferry.daemon.rooms.book import RoomBook, Sender
from kvferry.daemon.rooms.effects import Effect, StartPiece, StopPiece, Tell, WarnTrimmed
from kvferry.daemon.rooms.page_ranges import PageRange, page_ranges
from kvferry.daemon.rooms.peer_service import PeerService
from kvferry.daemon.rooms.reports import record_finished, warn_trimmed
from kvferry.daemon.rooms.sides import Chunk, Clocked, Room, SideKey, State
from kvferry.daemon.rooms.tombstones import Tombstones
from kvferry.daemon.scheduler import Scheduler
from kvferry.daemon.sessions import Session, SessionRegistry
from kvferry.daemon.tiers.landings import Landings
from kvferry.daemon.transports.base import Transport
from kvferry.daemon.transports.remote import RemoteTransports
from kvferry.protocol.errors import (
    InternalError,
    InvalidFieldError,
    KvferryError,
    OverloadedError,
    ShuttingDownError,
)
from kvferry.protocol.events import Finished, Settled
from kvferry.protocol.limits import Limits
from kvferry.protocol.room_messages import Cancel, Cancelled, Receive, Result, Send
from kvferry.protocol.session_messages import RoomStatus

log = structlog.get_logger(__name__)


class RoomService:
    """Drives the book on the control loop's clock."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        pools: PoolService,
        sessions: SessionRegistry,
        limits: Limits,
        counters: Counters,
        whole_below_bytes: int,
        tombstones: Tombstones | None = None,
    ) -> None:
        self.draining = False
        self._dispatcher = dispatcher
        self._pools = pools
        self._sessions = sessions
        self._limits = limits
        self._counters = counters
        self._book = RoomBook(whole_below_bytes, tombstones)
        self._transport: Transport | None = None
        self._remote: RemoteTransports | None = None
        self._peers: PeerService | None = None
        self._rings: EventRings | None = None
        self._landings: Landings | None = None
        self._scheduler: Scheduler | None = None
        self._under_way: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._cancels: dict[tuple[int, SideKey], list[tuple[Call, bool]]] = {}
        self._carrying_out = False
        self._idle = asyncio.Event()
        self._idle.set()
        dispatcher.handle("SEND", self._send)
        dispatcher.handle("RECEIVE", self._receive)
        dispatcher.handle("CANCEL", self._cancel)
        dispatcher.handle("RESULT", self._result)
        dispatcher.on_acknowledged = self._acknowledged

    @property
    def book(self) -> RoomBook:
        """Return the book, for the parts of the daemon that other daemons speak to."""
        return self._book

    def connect(
        self,
        transport: Transport,
        remote: RemoteTransports,
        peers: PeerService,
        rings: EventRings,
        landings: Landings | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        """Copy by these transports, speak to other daemons by ``peers``, know by ``rings`` what engines have done.

        ``landings`` is for rooms whose bytes become snapshots; ``scheduler`` is told while pieces are under way.
        """
        self._landings = landings
        self._scheduler = scheduler
        if scheduler is not None:
            self._book.peers.on_sending = lambda began: (
                scheduler.hand_off_began() if began else scheduler.hand_off_ended()
            )
        self._rings = rings
        self._transport = transport
        self._remote = remote
        self._peers = peers

    def events_reached(self, session_id: int, values: list[int]) -> None:
        """Take the counters of a session's event ring."""
        if self._book.waits_for_events(session_id):
            self._book.events_reached(session_id, values, time.monotonic())
            self.carry_out()

    def session_opened(self, session: Session) -> None:
        """Keep the session's results from now on."""
        self._book.results.open_session(session.session_id)

    def session_lost(self, session: Session) -> None:
        """Fail what died with the session."""
        self._book.session_lost(session.session_id, time.monotonic())
        for key in [one for one in self._cancels if one[0] == session.session_id]:
            del self._cancels[key]
        self.carry_out()

    def piece_done(self, piece_id: int, error: KvferryError | None) -> None:
        """Take the end of a copy from a transport."""
        self._piece_ended(piece_id)
        if self._remote is not None:
            self._remote.forget(piece_id)
        if piece_id not in self._book.sides.pieces:  # it was ended because its transport raised
            self._counters.add("rooms.pieces_over")
            return
        try:
            self._book.piece_done(piece_id, error, time.monotonic())
        finally:
            self.carry_out()

    async def drained(self) -> None:
        """Return once no hand-off is live and the events of the last ones are on their way."""
        await self._idle.wait()
        await asyncio.sleep(0)

    def live(self, session_id: int) -> int:
        """Return how many sides of a session are live, or settled and not acknowledged."""
        return self._book.results.count(session_id)

    def drain(self) -> None:
        """Take no new hand-offs, and fail those that wait for one."""
        self.draining = True
        self._book.drain(time.monotonic())
        self.carry_out()

    def status(self) -> tuple[RoomStatus, ...]:
        """Return the live sides as STATUS shows them."""
        now = time.monotonic()
        return tuple(
            RoomStatus(
                request=side.request_id,
                request_id=side.request_id,
                side=side.side,
                pool=side.source_or_destination.name,
                state=side.state.value,
                age_ms=round((now - side.created_at) * 1000),
                pages=side.pages,
                arrived=side.arrived_pages if isinstance(side, Room) else 0,
                waits_for=side.waits_for(),
            )
            for side in self._book.sides
        )

    def _send(self, call: Call) -> Answer:
        body = expect(call, Send)
        sender = self._sender(call, body)
        manifest = sender.pool.manifest
        ranges = page_ranges(body.lists, call.ids, manifest, may_end_inside=body.last, may_lack=not body.last)
        chunk = Chunk(ranges, body.last, body.first_token, body.payload, body.steps)
        reached = self._reached(sender.session_id, body)
        accepted = self._book.send(sender, chunk, body.destinations)
        if body.steps:
            self._book.events_reached(sender.session_id, reached, time.monotonic())
        self.carry_out()
        return Answer(accepted)

    def _reached(self, session_id: int, body: Send) -> list[int]:
        """Return how far the session's events are; only where steps wait for them."""
        if not body.steps or self._rings is None:
            return []
        reached = self._rings.values(session_id)
        beyond = max(step.event for step in body.steps)
        if beyond >= len(reached):
            raise InvalidFieldError(f"event {beyond}; the session's ring has {len(reached)}", field="steps")
        return reached

    def _receive(self, call: Call) -> Answer | None:
        after = expect(call, Receive).after
        return self._make_room(call) if self._rings is None else self._rings.hold(call, after, self._make_room)

    def _make_room(self, call: Call) -> Answer:
        body = expect(call, Receive)
        sender = self._sender(call, body)
        if body.land == "host":
            return self._land(call, body, sender)
        ranges = page_ranges(body.lists, call.ids, sender.pool.manifest, may_end_inside=True)
        return self._make_room_in(sender, ranges, body)

    def _land(self, call: Call, body: Receive, sender: Sender) -> Answer:
        """Make a room whose bytes become a snapshot."""
        if self._landings is None:
            raise InternalError("no host tier is connected")
        landed = self._landings.make(call, body, sender.pool)
        try:
            return self._make_room_in(sender._replace(pool=landed.pool), landed.ranges, body)
        except Exception as cause:
            error = cause if isinstance(cause, KvferryError) else InternalError(f"no room was made: {cause!r}")
            self._landings.refused(landed, error)
            raise

    def _make_room_in(self, sender: Sender, ranges: tuple[PageRange, ...], body: Receive) -> Answer:
        daemons = body.source_daemons
        if daemons and self._peers is not None:
            daemons = self._peers.source_daemons(daemons)
        accepted = self._book.receive(sender, ranges, body.sources, daemons)
        self.carry_out()
        return Answer(accepted)

    def _gave_up_held(self, session_id: int, body: Cancel) -> bool:
        """Give up a RECEIVE that waits for its event still: it would make its room later, in pages given to others."""

        def is_it(held: Call) -> bool:
            asked = held.body
            return isinstance(asked, Receive) and (asked.request_id, asked.pool) == (body.request_id, body.pool)

        return self._rings is not None and self._rings.give_up(session_id, is_it)

    def _cancel(self, call: Call) -> Answer | None:
        body = expect(call, Cancel)
        key = SideKey(call.session.tenant, body.request_id, body.pool, body.side)
        session_id = call.session.session_id
        side = self._book.side(session_id, key)
        if side is None and body.side == "receive" and self._gave_up_held(session_id, body):
            return Answer(Cancelled(was_finished=False))
        if side is None and self._book.result(session_id, key).settled is not None:
            return Answer(Cancelled(was_finished=True))
        was_finished = side is not None and side.state is not State.OPEN
        waiting = self._cancels.setdefault((session_id, key), [])
        waiting.append((call, was_finished))
        self._book.cancel(session_id, key, time.monotonic())
        self.carry_out()
        return None

    def _result(self, call: Call) -> Answer:
        body = expect(call, Result)
        key = SideKey(call.session.tenant, body.request_id, body.pool, body.side)
        return Answer(self._book.result(call.session.session_id, key))

    def _sender(self, call: Call, body: Send | Receive) -> Sender:
        if self.draining:
            raise ShuttingDownError("the daemon ends and takes no new hand-off")
        pool = self._pools.get(call.session.tenant, body.pool)
        session_id = call.session.session_id
        key = SideKey(pool.tenant, body.request_id, body.pool, "send" if isinstance(body, Send) else "receive")
        if self._book.side(session_id, key) is None:  # what has begun may always go on
            self._check_limits(call.session)
        now = time.monotonic()
        return Sender(session_id, pool, body.request_id, Clocked(now, now + call.deadline_s))

    def _check_limits(self, session: Session) -> None:
        most = self._limits.max_rooms_per_session
        if self.live(session.session_id) >= most:
            raise OverloadedError(f"{most} hand-offs of the session are live or unacknowledged")
        if len(session.unacknowledged) >= 2 * most:  # possible where request ids are used again and again
            raise OverloadedError(f"{len(session.unacknowledged)} events of the session are unacknowledged")
        if self._book.results.total >= self._limits.max_rooms:
            raise OverloadedError(f"{self._limits.max_rooms} hand-offs of all sessions are live or unacknowledged")

    def _acknowledged(self, session: Session, event: Settled) -> None:
        key = SideKey(session.tenant, event.request_id, event.pool, event.side)
        known = self._book.results.get(session.session_id, key)
        if known is not None and known.settled is not None and known.settled.generation == event.generation:
            self._book.results.forget(session.session_id, key)

    def carry_out(self) -> None:
        """Do what the book asks, in its order; what that leads to comes after it, not in between."""
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while effects := self._book.effects():
                self._do(effects)
        finally:
            self._carrying_out = False
            self._set_timer()
            if any(True for _ in self._book.sides):
                self._idle.clear()
            else:
                self._idle.set()

    def _do(self, effects: list[Effect]) -> None:
        told: dict[int, Session] = {}
        not_started: dict[int, KvferryError] = {}
        for effect in effects:
            try:
                self._do_one(effect, told)
            except Exception as cause:  # a bug in one hand-off must not become the end of the others
                self._counters.add("rooms.effects_failed")
                log.exception("an effect failed", effect=type(effect).__name__, cause=str(cause), **about(effect))
                if isinstance(effect, StartPiece):
                    known = cause if isinstance(cause, KvferryError) else None
                    not_started[effect.piece_id] = known or InternalError(f"no copy began: {cause!r}")
        for piece_id, error in not_started.items():
            self._not_started(piece_id, error)
        # After the reply that this call may still give: events never overtake their request's reply.
        for session in told.values():
            self._loop.call_soon(self._dispatcher.push_events, session)

    def _do_one(self, effect: Effect, told: dict[int, Session]) -> None:
        if isinstance(effect, Tell):
            session = self._tell(effect)
            if session is not None:
                told[session.session_id] = session
        elif isinstance(effect, StartPiece):
            self._start(effect)
        elif isinstance(effect, StopPiece):
            self._stop(effect.piece_id)
        elif isinstance(effect, WarnTrimmed):
            warn_trimmed(effect, self._counters)
        elif self._peers is not None:
            self._peers.carry_out(effect)

    def _not_started(self, piece_id: int, error: KvferryError) -> None:
        """End a piece whose transport raised when it was to begin: no byte of it moves."""
        with contextlib.suppress(Exception):  # it may know the piece all the same, and go on with it
            self._stop(piece_id)
        self._piece_ended(piece_id)
        if self._remote is not None:
            self._remote.forget(piece_id)
        self._book.piece_done(piece_id, error, time.monotonic())

    def _piece_ended(self, piece_id: int) -> None:
        if piece_id in self._under_way:
            self._under_way.remove(piece_id)
            if self._scheduler is not None:
                self._scheduler.hand_off_ended()

    def _start(self, effect: StartPiece) -> None:
        if self._scheduler is not None:
            self._under_way.add(effect.piece_id)
            self._scheduler.hand_off_began()
        piece = self._book.sides.pieces[effect.piece_id]
        if piece.offer.origin is not None and self._remote is not None:
            self._remote.start(piece)
        elif self._transport is not None:
            self._transport.start(effect)

    def _stop(self, piece_id: int) -> None:
        piece = self._book.sides.pieces[piece_id]
        if piece.offer.origin is not None and self._remote is not None:
            self._remote.stop(piece_id)
        elif self._transport is not None:
            self._transport.stop(piece_id)

    def _tell(self, effect: Tell) -> Session | None:
        event = effect.event
        if isinstance(event, Finished):
            record_finished(event, self._counters)
        if self._landings is not None:
            self._landings.heard(effect.session_id, event)
        session = self._sessions.get(effect.session_id)
        if session is None:
            return None
        session.add_event(event)
        if isinstance(event, Settled):
            key = (session.session_id, SideKey(session.tenant, event.request_id, event.pool, event.side))
            for call, was_finished in self._cancels.pop(key, ()):
                self._dispatcher.answer(session, call.message_id, Answer(Cancelled(was_finished=was_finished)))
        return session

    def _set_timer(self) -> None:
        deadline = self._book.next_deadline()
        if self._timer is not None:
            if deadline is not None and self._timer_at <= deadline:
                return  # early at worst: _expire sets the next one
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer_at = deadline
            self._timer = self._loop.call_later(max(0.0, deadline - time.monotonic()), self._expire)

    def _expire(self) -> None:
        self._timer = None
        try:
            self._book.expire(time.monotonic())
        finally:
            self.carry_out()

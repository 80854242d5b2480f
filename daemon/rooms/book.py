"""The room book: every live hand-off of the daemon, as a state machine without I/O.

Methods take what happened and the time; they return what to do (``effects``), or raise, and then nothing has changed.
One rule decides who is refused where two messages do not fit: the one that came later. What was accepted stays.

What happens to an OPEN side:

====================================  ==========================================  ================================
event                                 offer (SEND side)                           room (RECEIVE side)
====================================  ==========================================  ================================
its own CANCEL                        CANCELLED                                   CANCELLED
the other side's CANCEL               PEER_CANCELLED                              PEER_CANCELLED
its own deadline                      DEADLINE                                    DEADLINE
its session dies before its last SEND forgotten; pages go back                    PEER_LOST
its session dies after its last SEND  lives on without a listener                 completes
the receiving session dies            PEER_LOST                                   forgotten; pages go back
a copy fails                          TRANSFER_FAILED                             TRANSFER_FAILED
all cells there, all sources done     success                                     success
====================================  ==========================================  ================================

A room is SETTLED once no piece of it is under way; an offer once all its rooms are.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvferry.daemon.rooms.acceptance import (
    check_continues,
    check_together,
    hold_for_reading,
    hold_for_writing,
    withdraw,
    would_complete,
)
from kvferry.daemon.rooms.effects import Effect, StartPiece, StopPiece, Tell
from kvferry.daemon.rooms.matching import Match, match
from kvferry.daemon.rooms.page_ranges import PageRange
from kvferry.daemon.rooms.results import Generations, Results
from kvferry.daemon.rooms.sides import Chunk, Clocked, Offer, Piece, Room, Side, SideKey, State
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import (
    CancelledError,
    DeadlineError,
    InternalError,
    KvferryError,
    PeerCancelledError,
    PeerLostError,
    RoomExistsError,
    ShuttingDownError,
    UnexpectedSourceError,
    UnknownRoomError,
)
from kvferry.protocol.events import Settled
from kvferry.protocol.room_messages import Accepted, RoomResult


class Sender(NamedTuple):
    """Who sends a message about a hand-off, and until when it may take."""

    session_id: int
    pool: Pool
    request_id: str
    times: Clocked


class RoomBook:
    """All live hand-offs. Single-threaded; ``effects`` must be drained after each call."""

    def __init__(self) -> None:
        self.results = Results()
        self._offers: dict[SideKey, Offer] = {}
        self._rooms: dict[SideKey, Room] = {}
        self._by_request: dict[str, list[Offer | Room]] = {}
        self._pieces: dict[int, Piece] = {}
        self._piece_ids = itertools.count(1)
        self._deadlines: list[tuple[float, int, Offer | Room]] = []
        self._ties = itertools.count()
        self._generations = Generations()
        self._effects: list[Effect] = []

    def __repr__(self) -> str:
        """Show the live counts."""
        return f"<RoomBook offers={len(self._offers)} rooms={len(self._rooms)} pieces={len(self._pieces)}>"

    def effects(self) -> list[Effect]:
        """Return what to do because of the last calls, and forget it."""
        effects, self._effects = self._effects, []
        return effects

    def sides(self) -> Iterator[Offer | Room]:
        """Yield every live side."""
        yield from self._offers.values()
        yield from self._rooms.values()

    def side(self, session_id: int, key: SideKey) -> Offer | Room | None:
        """Return the session's own live side of that name, or None."""
        side = self._offers.get(key) if key.side == "send" else self._rooms.get(key)
        return side if side is not None and side.session_id == session_id else None

    def receive(self, sender: Sender, ranges: tuple[PageRange, ...], sources: int) -> Accepted:
        """Make a room and start what offers hold for it already.

        Raises:
            RoomExistsError: the request id is in use.
            UnexpectedSourceError: more offers wait than ``sources``.
            KvferryError: the pages cannot be written, or a waiting SEND does not fit: see ``match``.
        """
        self._check_tenant(sender)
        room = Room(sender.pool, sender.request_id, sender.session_id, sender.times, ranges, sources)
        if room.key in self._rooms:
            raise RoomExistsError("a RECEIVE of this request into this pool is live", field="request_id")
        offers = [one for one in self._open_offers(sender) if len(one.rooms) < one.destinations]
        if len(offers) > sources:
            raise UnexpectedSourceError(f"{len(offers)} pools send, sources={sources}", field="sources")
        pieces = [(offer, match_) for offer in offers for match_ in self._fit(room, offer, offer.chunks)]
        check_together(room, offers)
        hold_for_writing(room)
        room.generation = self._generations.next(room.session_id, room.key)
        self.results.begin(room.session_id, room.key)
        self._enter(room)
        for offer, match_ in pieces:
            self._start(room, offer, match_, sender.times.created_at)
        self._check_done(room, sender.times.created_at)
        return Accepted(
            generation=room.generation,
            skipped_source_entries=room.skipped_source_entries,
            skipped_source_pages=room.skipped_source_pages,
        )

    def send(self, sender: Sender, chunk: Chunk, destinations: int) -> Accepted:
        """Accept a SEND and start it into the rooms that wait for it.

        Raises:
            RoomExistsError: the request id is in use, or its last SEND from this pool was accepted.
            PageGapError: the chunk does not continue the one before.
            KvferryError: the pages cannot be read, or a room does not take them: see ``match``.
        """
        self._check_tenant(sender)
        offer = self._offer_for(sender, destinations)
        is_new = not offer.chunks
        check_continues(offer, chunk)
        rooms = self._rooms_for(offer, sender) if is_new else [r for r in offer.rooms if r.state is State.OPEN]
        with_chunk = [*offer.chunks, chunk]
        fits: list[tuple[Room, list[Match]]] = []
        try:
            for room in rooms:
                fits.append((room, self._fit(room, offer, [chunk], with_chunk)))  # noqa: PERF401  a refusal keeps what fitted
            hold_for_reading(offer, chunk)
        except KvferryError:
            withdraw(fits)
            raise
        offer.chunks.append(chunk)
        if is_new:
            self.results.begin(offer.session_id, offer.key)
            self._enter(offer)
        else:
            self._set_deadline(offer, max(offer.deadline_at, sender.times.deadline_at))
        for room, matches in fits:
            for match_ in matches:
                self._start(room, offer, match_, sender.times.created_at)
        for room in rooms:
            self._check_done(room, sender.times.created_at)
        return Accepted(
            skipped_source_entries=offer.skipped_source_entries, skipped_source_pages=offer.skipped_source_pages
        )

    def piece_done(self, piece_id: int, error: KvferryError | None, now: float) -> None:
        """Take a copy's end, in whatever state its room is."""
        piece = self._pieces.pop(piece_id)
        room = piece.room
        del room.pieces[piece_id]
        if room.state is State.OPEN:
            if error is not None:
                self._fail_room(room, error, error, now)
            else:
                for promise in piece.promises:
                    room.coverage[promise.component].arrive(promise.cells)
                    room.moved_bytes += promise.plan.total_bytes
                    piece.offer.moved_bytes += promise.plan.total_bytes
                self._check_done(room, now)
        self._settle_room(room)

    def cancel(self, session_id: int, key: SideKey, now: float) -> None:
        """Fail the session's side if it is open still.

        Raises:
            UnknownRoomError: the session has no such side.
        """
        side = self.side(session_id, key)
        if side is None:
            raise UnknownRoomError(f"no live {key.side} of this request in pool {key.pool!r}", field="request_id")
        if side.state is State.OPEN:
            self._fail(side, CancelledError("cancelled by its own side"), PeerCancelledError("the peer cancelled"), now)

    def session_lost(self, session_id: int, now: float) -> None:
        """Fail what died with a session; complete offers live on."""
        for side in [one for one in self.sides() if one.session_id == session_id]:
            if side.state is State.OPEN and not (isinstance(side, Offer) and side.complete):
                lost = PeerLostError(f"the engine on the {side.side} side died")
                self._fail(side, lost, lost, now)
        self.results.forget_session(session_id)
        self._generations.forget_session(session_id)

    def expire(self, now: float) -> None:
        """Fail the open sides whose deadline has come."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, side = heapq.heappop(self._deadlines)
            if side.state is State.OPEN and side.deadline_at <= now:
                late = DeadlineError(f"the {side.side} side's deadline passed; missing: {side.waits_for()}")
                self._fail(side, late, late, now)

    def drain(self, now: float) -> None:
        """Fail the open sides that wait for a message which will not be taken any more."""
        ending = ShuttingDownError("the daemon ends")
        for side in list(self.sides()):
            complete = side.all_promised if isinstance(side, Room) else side.fully_matched
            if side.state is State.OPEN and not complete:
                self._fail(side, ending, ending, now)

    def next_deadline(self) -> float | None:
        """Return when to call ``expire`` next, or None."""
        while self._deadlines and self._deadlines[0][2].state is not State.OPEN:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def result(self, session_id: int, key: SideKey) -> RoomResult:
        """Return the state of the session's side.

        Raises:
            UnknownRoomError: neither live nor unacknowledged.
        """
        known = self.results.get(session_id, key)
        if known is None:
            raise UnknownRoomError(
                f"no {key.side} of this request in pool {key.pool!r}, live or unacknowledged", field="request_id"
            )
        return known

    # -- accepting

    def _check_tenant(self, sender: Sender) -> None:
        for other in self._by_request.get(sender.request_id, ()):
            if other.pool.tenant != sender.pool.tenant:
                raise RoomExistsError("the request id is another tenant's", field="request_id")

    def _open_offers(self, sender: Sender) -> list[Offer]:
        sides = self._by_request.get(sender.request_id, ())
        return [one for one in sides if isinstance(one, Offer) and one.state is State.OPEN]

    def _offer_for(self, sender: Sender, destinations: int) -> Offer:
        offer = Offer(sender.pool, sender.request_id, sender.session_id, sender.times, destinations)
        live = self._offers.get(offer.key)
        if live is None:
            self.results.check_not_failed(sender.session_id, offer.key)
            return offer
        if live.session_id != sender.session_id:
            raise RoomExistsError("another session sends this request from this pool", field="request_id")
        if live.state is not State.OPEN:
            self.results.check_not_failed(sender.session_id, offer.key)
            raise RoomExistsError("the hand-off has finished but not settled", field="request_id")
        if live.complete:
            raise RoomExistsError("the last SEND of this request from this pool was accepted", field="last")
        return live

    def _rooms_for(self, offer: Offer, sender: Sender) -> list[Room]:
        """Return the open rooms that a new offer joins."""
        sides = self._by_request.get(sender.request_id, ())
        rooms = [one for one in sides if isinstance(one, Room) and one.state is State.OPEN]
        waiting = [room for room in rooms if len(room.offers) < room.sources]
        if rooms and not waiting:
            raise UnexpectedSourceError("every room of this request has all its sources", field="request_id")
        return waiting[: offer.destinations]

    def _fit(
        self, room: Room, offer: Offer, chunks: Sequence[Chunk], with_chunk: Sequence[Chunk] | None = None
    ) -> list[Match]:
        """Match the chunks, promise their cells and check what can be checked by now; or leave no trace."""
        matches: list[Match] = []
        try:
            for chunk in chunks:
                found = match(chunk, offer.pool, room)
                for promise in found.promises:
                    room.coverage[promise.component].promise(promise.cells)
                matches.append(found)
            if would_complete(room, offer, with_chunk or chunks):
                room.check_promised()
        except KvferryError:
            withdraw([(room, matches)])
            raise
        return matches

    def _enter(self, side: Offer | Room) -> None:
        if isinstance(side, Room):
            self._rooms[side.key] = side
        else:
            self._offers[side.key] = side
        self._by_request.setdefault(side.request_id, []).append(side)
        self._set_deadline(side, side.deadline_at)

    def _set_deadline(self, side: Offer | Room, deadline_at: float) -> None:
        side.deadline_at = deadline_at
        heapq.heappush(self._deadlines, (deadline_at, next(self._ties), side))

    def _start(self, room: Room, offer: Offer, found: Match, now: float) -> None:
        if offer not in room.offers:
            room.offers.append(offer)
            offer.rooms.append(room)
        for side in (room, offer):
            side.skipped_source_entries = max(side.skipped_source_entries, found.skipped_source_entries)
            side.skipped_source_pages += found.skipped_source_pages
        if not found.promises:
            return
        for side in (room, offer):
            side.first_copy_at = now if side.first_copy_at is None else side.first_copy_at
        piece = Piece(next(self._piece_ids), offer, room, found.promises)
        self._pieces[piece.piece_id] = room.pieces[piece.piece_id] = piece
        plans = tuple(promise.plan for promise in found.promises)
        self._effects.append(StartPiece(piece.piece_id, offer.pool, room.pool, plans))

    # -- finishing and settling

    def _check_done(self, room: Room, now: float) -> None:
        if room.state is not State.OPEN or room.pieces or not room.all_promised:
            return
        if not all(coverage.complete for coverage in room.coverage.values()):
            bug = InternalError("all copies ended, but cells are missing")
            self._fail_room(room, bug, bug, now)
            return
        self._finish_room(room, None, now)
        for offer in room.offers:
            self._room_finished(offer, None, now)
        self._settle_room(room)

    def _fail(self, side: Offer | Room, own: KvferryError, peers: KvferryError, now: float) -> None:
        if isinstance(side, Room):
            self._fail_room(side, own, peers, now)
        else:
            self._finish_offer(side, own, now)
            for room in [one for one in side.rooms if one.state is State.OPEN]:
                self._fail_room(room, peers, peers, now)
            self._settle_offer(side)

    def _fail_room(self, room: Room, own: KvferryError, peers: KvferryError, now: float) -> None:
        self._finish_room(room, own, now)
        self._effects.extend(StopPiece(piece_id) for piece_id in room.pieces)
        for offer in room.offers:
            self._room_finished(offer, peers, now)
        self._settle_room(room)

    def _room_finished(self, offer: Offer, error: KvferryError | None, now: float) -> None:
        offer.outcomes.append(error)
        if offer.state is State.OPEN and len(offer.outcomes) == offer.destinations:
            self._finish_offer(offer, next((one for one in offer.outcomes if one), None), now)

    def _finish_room(self, room: Room, error: KvferryError | None, now: float) -> None:
        room.state = State.FINISHED
        self._tell(room, RoomResult(state="finished", finished=room.finished_event(error, now)))

    def _finish_offer(self, offer: Offer, error: KvferryError | None, now: float) -> None:
        offer.state = State.FINISHED
        self._tell(offer, RoomResult(state="finished", finished=offer.finished_event(error, now)))

    def _settle_room(self, room: Room) -> None:
        if room.state is not State.FINISHED or room.pieces:
            return
        for one in room.ranges.values():
            room.pool.allocator.end_write(one.ids)
        self._leave(room)
        for offer in room.offers:
            self._settle_offer(offer)

    def _settle_offer(self, offer: Offer) -> None:
        if offer.state is not State.FINISHED or any(room.state is not State.SETTLED for room in offer.rooms):
            return
        for chunk in offer.chunks:
            for one in chunk.ranges:
                offer.pool.allocator.end_read(one.ids)
        self._leave(offer)

    def _leave(self, side: Offer | Room) -> None:
        side.state = State.SETTLED
        del (self._rooms if isinstance(side, Room) else self._offers)[side.key]
        others = self._by_request[side.request_id]
        others.remove(side)
        if not others:
            del self._by_request[side.request_id]
        settled = Settled(request_id=side.request_id, pool=side.pool.name, side=side.side, generation=side.generation)
        self._tell(side, RoomResult(state="settled", settled=settled))

    def _tell(self, side: Side, news: RoomResult) -> None:
        self.results.add(side.session_id, side.key, news)
        event = news.settled or news.finished
        if event is not None:
            self._effects.append(Tell(side.session_id, event))

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

A side that comes after the other one has ended by itself, so that nobody was there to be told, ends as soon as it is
accepted, with the other's code; see ``tombstones``. A side that it has joined already is told so too.

A room is SETTLED once no piece of it is under way; an offer once all its rooms are. What other daemons say is in
``peer_book``.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from kvferry.daemon.rooms.acceptance import (
    check_continues,
    check_steps,
    check_together,
    hold_for_reading,
    hold_for_writing,
)
from kvferry.daemon.rooms.effects import AnnounceRoom, Effect, OfferChunk, TellReady
from kvferry.daemon.rooms.endings import Endings
from kvferry.daemon.rooms.moves import Fit, Moves
from kvferry.daemon.rooms.page_ranges import PageRange
from kvferry.daemon.rooms.peer_book import PeerBook
from kvferry.daemon.rooms.registry import Sides
from kvferry.daemon.rooms.remote import Announcement
from kvferry.daemon.rooms.results import Generations, Results
from kvferry.daemon.rooms.sides import Chunk, Clocked, Offer, Room, SideKey, State
from kvferry.daemon.rooms.tombstones import Half, Tombstones
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import (
    CancelledError,
    DeadlineError,
    KvferryError,
    PeerCancelledError,
    PeerLostError,
    RoomExistsError,
    ShuttingDownError,
    UnexpectedSourceError,
    UnknownRoomError,
)
from kvferry.protocol.room_messages import Accepted, LayerStep, RoomResult


class Sender(NamedTuple):
    """Who sends a message about a hand-off, and until when it may take."""

    session_id: int
    pool: Pool
    request_id: str
    times: Clocked


class RoomBook:
    """All live hand-offs. Single-threaded; ``effects`` must be drained after each call.

    Attributes:
        results: what sessions were told.
        sides: the live sides.
        peers: takes what other daemons say.
    """

    def __init__(self, whole_below_bytes: int = 0, tombstones: Tombstones | None = None) -> None:
        self.results = Results()
        self.sides = Sides(Tombstones() if tombstones is None else tombstones)
        self._generations = Generations()
        self._armings = itertools.count(1)
        self._stepping: dict[int, list[Offer]] = {}  # offers whose steps wait for events of their session
        self._endings = Endings(self.sides, self.results)
        self._moves = Moves(self.sides, whole_below_bytes)
        self.peers = PeerBook(self.sides, self._endings, self._moves)

    def __repr__(self) -> str:
        """Show the live counts."""
        sides = self.sides
        return f"<RoomBook offers={len(sides.offers)} rooms={len(sides.rooms)} pieces={len(sides.pieces)}>"

    def effects(self) -> list[Effect]:
        """Return what to do because of the last calls, and forget it."""
        effects, self.sides.effects = self.sides.effects, []
        return effects

    def side(self, session_id: int, key: SideKey) -> Offer | Room | None:
        """Return the session's own live side of that name, or None."""
        side = self.sides.offers.get(key) if key.side == "send" else self.sides.rooms.get(key)
        return side if side is not None and side.session_id == session_id else None

    def receive(
        self, sender: Sender, ranges: tuple[PageRange, ...], sources: int, source_daemons: tuple[str, ...] = ()
    ) -> Accepted:
        """Make a room, start what offers hold for it already, and announce it to other daemons.

        Args:
            sender: whose room it is.
            ranges: its pages.
            sources: how many offers fill it, over all daemons.
            source_daemons: the other daemons that may have offers.

        Raises:
            RoomExistsError: the request id is in use.
            UnexpectedSourceError: more offers wait than ``sources``.
            KvferryError: the pages cannot be written, or a waiting SEND does not fit: see ``match``.
        """
        self._check_tenant(sender)
        now = sender.times.created_at
        room = Room(sender.pool, sender.request_id, sender.session_id, sender.times, ranges, sources, source_daemons)
        if room.key in self.sides.rooms:
            raise RoomExistsError("a RECEIVE of this request into this pool is live", field="request_id")
        offers = [one for one in self._open_offers(sender) if len(one.rooms) < one.destinations]
        if len(offers) > sources:
            raise UnexpectedSourceError(f"{len(offers)} pools send, sources={sources}", field="sources")
        fits = [(offer, fit) for offer in offers for fit in self._moves.fit(room, offer, 0, offer.chunks)]
        check_together(room, offers, [one for _, fit in fits for one in fit.match.excused])
        hold_for_writing(room)
        room.generation = self._generations.next(room.session_id, room.key)
        room.arming = next(self._armings)
        self._enter(room)
        ended = self._ended_sources(room, offers, now)
        for offer, fit in fits:
            if ended is None:
                self._moves.start(room, offer, fit, now)
            elif offer not in room.offers:
                self._moves.join(room, offer)
        self.sides.effects.extend(AnnounceRoom(address, room) for address in source_daemons)
        if ended is not None:
            self._endings.fail_room(room, ended, ended, now)
        self._endings.check_done(room, now)
        return _accepted(room)

    def send(self, sender: Sender, chunk: Chunk, destinations: int) -> Accepted:
        """Accept a SEND and start it into the rooms that wait for it.

        Raises:
            RoomExistsError: the request id is in use, or its last SEND from this pool was accepted.
            PageGapError: the chunk does not continue the one before.
            InvalidFieldError: the steps do not name each layer once.
            KvferryError: the pages cannot be read, or a room does not take them: see ``match``.
        """
        self._check_tenant(sender)
        now = sender.times.created_at
        offer = self._offer_for(sender, destinations)
        number = len(offer.chunks)
        check_continues(offer, chunk)
        check_steps(chunk, sender.pool.manifest)
        rooms = [one for one in offer.rooms if isinstance(one, Room) and one.state is State.OPEN]
        if number == 0:
            rooms = self._rooms_for(offer, sender)
        fits: list[tuple[Room, list[Fit]]] = []
        try:
            for room in rooms:
                fits.append((room, self._moves.fit(room, offer, number, [chunk])))  # noqa: PERF401  a refusal keeps what fitted
            hold_for_reading(offer, chunk)
        except KvferryError:
            for room, its_fits in fits:
                self._moves.withdraw(room, its_fits)
            raise
        offer.add(chunk)
        stepping = self._stepping.setdefault(offer.session_id, []) if chunk.steps else []
        if offer not in stepping:
            stepping.append(offer)
        if number == 0:
            self._enter(offer)
        else:
            self.sides.postpone(offer, sender.times.deadline_at)
        for room, its_fits in fits:
            for fit in its_fits:
                self._moves.start(room, offer, fit, now)
        self._offer_to_peers(offer, number)
        for room in rooms:
            self._endings.check_done(room, now)
        self._check_receivers_live(offer, number, now)
        return _accepted(offer)

    def events_reached(self, session_id: int, reached: list[int], now: float) -> None:
        """Take the values of a session's events, by their slot in its ring, and start what waited for them."""
        for offer in self._stepping.pop(session_id, ()):
            if offer.state is not State.OPEN:
                continue
            for number, chunk in enumerate(offer.chunks):
                ready = _ready_steps(chunk.steps, reached)
                if ready > offer.ready[number]:
                    offer.ready[number] = ready
                    self._step_ready(offer, number, now)
            if any(offer.waiting_steps):
                self._stepping.setdefault(session_id, []).append(offer)

    def waits_for_events(self, session_id: int) -> bool:
        """Return whether a step of the session's offers is not ready."""
        return session_id in self._stepping

    def piece_done(self, piece_id: int, error: KvferryError | None, now: float) -> None:
        """Take a copy's end, in whatever state its room is."""
        piece = self.sides.pieces.pop(piece_id)
        room = piece.room
        del room.pieces[piece_id]
        if room.state is State.OPEN:
            if error is not None:
                self._endings.fail_room(room, error, error, now)
            else:
                for promise in piece.promises:
                    room.coverage[promise.component].arrive(promise.cells)
                    room.moved_bytes += promise.plan.total_bytes
                    piece.offer.moved_bytes += promise.plan.total_bytes
                self._endings.check_done(room, now)
        self._endings.settle_room(room)

    def cancel(self, session_id: int, key: SideKey, now: float) -> None:
        """Fail the session's side if it is open still.

        Raises:
            UnknownRoomError: the session has no such side.
        """
        side = self.side(session_id, key)
        if side is None:
            raise UnknownRoomError(f"no live {key.side} of this request in pool {key.pool!r}", field="request_id")
        if side.state is State.OPEN:
            own, peers = CancelledError("cancelled by its own side"), PeerCancelledError("the peer cancelled")
            self._endings.end(side, own, peers, now)

    def session_lost(self, session_id: int, now: float) -> None:
        """Fail what died with a session; offers that are complete and ready live on."""
        for side in [one for one in self.sides if one.session_id == session_id]:
            if side.state is State.OPEN and not (isinstance(side, Offer) and side.outlives_its_sender):
                lost = PeerLostError(f"the engine on the {side.side} side died")
                self._endings.end(side, lost, lost, now)
        self._stepping.pop(session_id, None)
        self.results.forget_session(session_id)
        self._generations.forget_session(session_id)

    def expire(self, now: float) -> None:
        """Fail the open sides whose deadline has come."""
        for side in self.sides.deadlines.due(now):
            if isinstance(side, Announcement):
                self.peers.expired(side, now)
            elif side.state is State.OPEN:
                late = DeadlineError(f"the {side.side} side's deadline passed; missing: {side.waits_for()}")
                self._endings.end(side, late, late, now)

    def drain(self, now: float) -> None:
        """Fail the open sides that wait for a message which will not be taken any more."""
        ending = ShuttingDownError("the daemon ends")
        for side in list(self.sides):
            complete = side.all_promised if isinstance(side, Room) else side.fully_matched
            if side.state is State.OPEN and not complete:
                self._endings.fail(side, ending, ending, now)

    def next_deadline(self) -> float | None:
        """Return when to call ``expire`` next, or None."""
        return self.sides.deadlines.next()

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

    def _check_tenant(self, sender: Sender) -> None:
        tenants = [one.source_or_destination.tenant for one in self.sides.of_request(sender.request_id)]
        tenants += [one.room.tenant for one in self.sides.announced(sender.request_id)]
        if any(tenant != sender.pool.tenant for tenant in tenants):
            raise RoomExistsError("the request id is another tenant's", field="request_id")

    def _open_offers(self, sender: Sender) -> list[Offer]:
        sides = self.sides.of_request(sender.request_id)
        return [one for one in sides if isinstance(one, Offer) and one.state is State.OPEN]

    def _offer_for(self, sender: Sender, destinations: int) -> Offer:
        offer = Offer(sender.pool, sender.request_id, sender.session_id, sender.times, destinations)
        live = self.sides.offers.get(offer.key)
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
        sides = self.sides.of_request(sender.request_id)
        rooms = [one for one in sides if isinstance(one, Room) and one.state is State.OPEN]
        waiting = [room for room in rooms if len(room.offers) < room.sources]
        if rooms and not waiting and not self.sides.announced(sender.request_id):
            raise UnexpectedSourceError("every room of this request has all its sources", field="request_id")
        return waiting[: offer.destinations]

    def _enter(self, side: Offer | Room) -> None:
        """Let a side be known, in place of what was known of those before it."""
        self.results.begin(side.session_id, side.key)
        self.sides.enter(side)
        self.sides.tombstones.renewed(_half(side))

    def _ended_sources(self, room: Room, offers: list[Offer], now: float) -> KvferryError | None:
        """Return how a source ended for which a new room would wait; None where none did.

        A room with sources at other daemons is another matter: it may be armed again on those, after one here ended.
        """
        if room.source_daemons or len(offers) >= room.sources:
            return None
        half = Half(room.pool.tenant, room.request_id, "send")
        return next(iter(self.sides.tombstones.heard_by(half, room.pool.name, now)), None)

    def _check_receivers_live(self, offer: Offer, number: int, now: float) -> None:
        """End a new offer that no room takes, if as many receivers as it is for have ended."""
        if number or offer.rooms:
            return
        half = Half(offer.pool.tenant, offer.request_id, "receive")
        ended = self.sides.tombstones.heard_by(half, offer.pool.name, now)
        if ended and len(ended) >= offer.destinations:
            self._endings.fail(offer, ended[0], ended[0], now)

    def _offer_to_peers(self, offer: Offer, number: int) -> None:
        """Offer a chunk to the rooms of other daemons: all chunks so far to those that have just been found."""
        known = [one for one in offer.rooms if not isinstance(one, Room) and one.state is State.OPEN]
        self.sides.effects.extend(OfferChunk(target, number) for target in known)
        if number == 0:
            for announcement in list(self.sides.announced(offer.request_id)):
                self.peers.join(announcement, offer)

    def _step_ready(self, offer: Offer, number: int, now: float) -> None:
        for room in list(offer.rooms):
            if room.state is not State.OPEN:
                continue
            if isinstance(room, Room):
                self._moves.start_ready(room, now)
            else:
                self.sides.effects.append(TellReady(room, number, offer.ready[number]))


def _half(side: Offer | Room) -> Half:
    return Half(side.source_or_destination.tenant, side.request_id, side.side)


def _accepted(side: Offer | Room) -> Accepted:
    return Accepted(
        generation=side.generation,
        skipped_source_entries=side.skipped_source_entries,
        skipped_source_pages=side.skipped_source_pages,
        covered_source_entries=side.covered_source_entries,
    )


def _ready_steps(steps: tuple[LayerStep, ...], reached: list[int]) -> int:
    """Return how many of the steps are ready: those before the first whose event has not come."""
    return next((n for n, step in enumerate(steps) if reached[step.event] < step.value), len(steps))

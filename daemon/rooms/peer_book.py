"""The room book's dealings with other daemons, sans I/O: their offers for rooms here, their rooms for offers here.

====================================  ===========================================================================
event                                 result
====================================  ===========================================================================
a peer's first chunk does not fit     the peer's offer fails with the reason; the room goes on waiting
a peer's later chunk does not fit     both fail with the reason
a peer withdraws its offer            the room fails as the offer did
a source daemon dies or restarts      rooms that its offers joined: PEER_LOST; others go on waiting
a home dies or restarts               offers that joined its rooms: PEER_LOST, after what is under way has ended
a room is announced after its offer   the source says so; the room fails as the offer did, unless others may fill it
ended by itself
a SEND comes after a peer's room      it fails as the room did; see ``tombstones``
was ended by its receiver
====================================  ===========================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from kvferry.daemon.rooms.effects import OfferChunk, RefuseOffer, TellEnded
from kvferry.daemon.rooms.endings import Endings, listener_of
from kvferry.daemon.rooms.moves import Moves
from kvferry.daemon.rooms.registry import Sides
from kvferry.daemon.rooms.remote import Announcement, Incarnation, Origin, Target
from kvferry.daemon.rooms.sides import Chunk, Clocked, Offer, Room, SideKey, SourcePool, State
from kvferry.daemon.rooms.tombstones import Half
from kvferry.protocol.errors import (
    DeadlineError,
    KvferryError,
    OverloadedError,
    PageGapError,
    PeerLostError,
    RoomExistsError,
    UnexpectedSourceError,
    UnknownRoomError,
)
from kvferry.protocol.peer_messages import RoomName

MAX_ANNOUNCEMENTS = 65_536
NO_OFFER = 0
"""What a refusal names where not an offer was refused but the announcement of the room itself."""

NO_SESSION = 0
"""The session number of offers from other daemons: nobody here is told of them."""


class PeerBook:
    """Takes what other daemons say. Part of the room book, which carries out its effects.

    Attributes:
        on_sending: called whenever the writing of a piece to another daemon begins (True) or is over (False).
    """

    def __init__(self, sides: Sides, endings: Endings, moves: Moves) -> None:
        self._sides = sides
        self._endings = endings
        self._moves = moves
        self._target_numbers = itertools.count(1)
        self.on_sending: Callable[[bool], None] = _nobody

    # -- at the home: offers of other daemons for rooms here

    def room(self, name: RoomName) -> Room:
        """Return the open room that another daemon means.

        Raises:
            UnknownRoomError: it is over, or was armed again since.
        """
        room = self._sides.rooms.get(SideKey(name.tenant, name.request_id, name.pool, "receive"))
        if room is None or room.state is not State.OPEN or room.arming != name.arming:
            raise UnknownRoomError("the room is over", field="request_id")
        return room

    def room_for(self, origin: Origin) -> Room:
        """Return the open room that another daemon offers to.

        Raises:
            UnknownRoomError: it is over, or was armed again since.
            UnexpectedSourceError: it does not expect offers of that daemon.
        """
        room = self.room(origin.room)
        if origin.peer.address not in room.source_daemons:
            raise UnexpectedSourceError("the RECEIVE does not name this daemon as a source", field="source_daemons")
        return room

    def rooms_expecting(self, address: str) -> list[Room]:
        """Return the open rooms that were announced to a daemon."""
        return [r for r in self._sides.rooms.values() if r.state is State.OPEN and address in r.source_daemons]

    def offered(self, origin: Origin, number: int, pool: SourcePool, chunk: Chunk, ready: int, now: float) -> None:
        """Take a chunk of another daemon's offer; refuse it by an effect where it does not fit.

        Args:
            origin: which offer.
            number: of the chunk, from 0.
            pool: what the offer's pages are of.
            chunk: with its page lists.
            ready: how many of its steps are ready.
            now: the time.
        """
        offer = self._sides.remote_offers.get(origin)
        try:
            room = self.room_for(origin)
            if offer is None:
                offer = self._new_offer(origin, number, pool, room, now)
            elif number < len(offer.chunks):
                return  # said again after a reconnection
            elif number > len(offer.chunks):
                raise PageGapError(f"chunk {number} came after {len(offer.chunks)} chunks", field="chunk")
            fits = self._moves.fit(room, offer, number, [chunk])
        except KvferryError as error:
            self.refuse(origin, error, now)
            return
        self._sides.remote_offers[origin] = offer
        offer.add(chunk)
        offer.ready[number] = ready
        for fit in fits:
            self._moves.start(room, offer, fit, now)
        self._endings.check_done(room, now)

    def step_ready(self, origin: Origin, number: int, ready: int, now: float) -> None:
        """Take the news that steps of another daemon's chunk are ready."""
        offer = self._sides.remote_offers.get(origin)
        if offer is None or number >= len(offer.ready):
            return
        offer.ready[number] = max(offer.ready[number], ready)
        for room in list(offer.rooms):
            if isinstance(room, Room) and room.state is State.OPEN:
                self._moves.start_ready(room, now)

    def withdrawn(self, origin: Origin, error: KvferryError, now: float) -> None:
        """Take the end of another daemon's offer."""
        offer = self._sides.remote_offers.get(origin)
        if offer is not None and offer.state is State.OPEN:
            self._endings.fail(offer, error, error, now)

    def sources_ended(self, peer: Incarnation, name: RoomName, error: KvferryError, now: float) -> None:
        """Take another daemon's word that SENDs for a room here had ended before it was announced there.

        The room fails, unless others may still fill it: where it names more daemons than it has sources, it goes on
        until all of them have said so.

        Raises:
            UnknownRoomError: the room is over.
            UnexpectedSourceError: it does not expect offers of that daemon.
        """
        room = self.room_for(Origin(peer, name, NO_OFFER))
        room.given_up.add(peer.address)
        if not room.unmet_sources:
            return
        if len(room.source_daemons) <= room.sources or room.given_up.issuperset(room.source_daemons):
            self._endings.fail_room(room, error, error, now)

    def waiting_homes(self) -> list[Incarnation]:
        """Return the home of each room of another daemon that waits for offers from here, or takes them."""
        return [one.home for one in self._sides.announcements.values()]

    # -- at the source: rooms of other daemons for offers here

    def announced(self, home: Incarnation, name: RoomName, deadline_at: float, now: float) -> None:
        """Take another daemon's room, and offer it what is here. Once is enough."""
        known = self._sides.announcements.get((home, name))
        if known is not None:  # said again after a reconnection: what we said may be lost as well
            for target in known.targets:
                chunks = range(len(target.offer.chunks))
                self._sides.effects.extend(OfferChunk(target, number) for number in chunks)
            self._tell_of_ends(known, now)
            return
        for older in list(self._sides.announced(name.request_id)):
            same_room = _whatever_arming(older.room) == _whatever_arming(name)
            if older.home.address == home.address and same_room:  # its end was lost, or is on its way
                self._close(older, PeerLostError("the receiver has begun anew"), now)
        announcement = Announcement(home, name, deadline_at)
        sides = self._sides.of_request(name.request_id)
        if any(one.source_or_destination.tenant != name.tenant for one in sides):
            taken = RoomExistsError("the request id is another tenant's", field="request_id")
            self._sides.effects.append(RefuseOffer(home, name, NO_OFFER, taken))
            return
        if len(self._sides.announcements) >= MAX_ANNOUNCEMENTS:
            full = OverloadedError(f"{MAX_ANNOUNCEMENTS} rooms of other daemons wait here")
            self._sides.effects.append(RefuseOffer(home, name, NO_OFFER, full))
            return
        self._sides.announce(announcement)
        self._sides.tombstones.renewed(Half(name.tenant, name.request_id, "receive"))
        for side in list(sides):
            if isinstance(side, Offer) and side.state is State.OPEN:
                self.join(announcement, side)
        self._tell_of_ends(announcement, now)

    def join(self, announcement: Announcement, offer: Offer) -> None:
        """Offer all chunks of a local offer to another daemon's room, if the offer has a destination left."""
        if len(offer.rooms) >= offer.destinations:
            return
        target = Target(announcement, offer, next(self._target_numbers), State.OPEN)
        self._sides.targets[target.number] = target
        announcement.targets.append(target)
        offer.rooms.append(target)
        self._sides.effects.extend(OfferChunk(target, number) for number in range(len(offer.chunks)))

    def closed(
        self,
        home: Incarnation,
        name: RoomName,
        error: KvferryError | None,
        moved: Iterable[tuple[int, int, int]],
        now: float,
        unmet: int = 0,
    ) -> None:
        """Take the outcome of another daemon's room; ``unmet`` sources had not come when its receiver ended it."""
        announcement = self._sides.announcements.get((home, name))
        if announcement is None:
            return
        if error is not None and unmet:
            self._bury(announcement, error, now)
        found = {offer: (moved_bytes, trimmed_pages) for offer, moved_bytes, trimmed_pages in moved}
        for target in announcement.targets:
            moved_bytes, trimmed_pages = found.get(target.number, (0, 0))
            target.offer.moved_bytes += moved_bytes
            target.offer.trimmed_pages += trimmed_pages
        self._close(announcement, error, now)

    def refused(self, home: Incarnation, number: int, error: KvferryError, now: float) -> None:
        """Take another daemon's word that an offer does not fit its room."""
        target = self._sides.targets.get(number)
        if target is not None and target.announcement.home == home:
            self._endings.close_target(target, error, now)

    def announcement_refused(self, name: RoomName, error: KvferryError) -> None:
        """Take another daemon's word that it has no offers for a room here; the room goes on waiting.

        Raises:
            UnknownRoomError: the room is over.
        """
        self.room(name).last_refusal = error

    def open_target(self, home: Incarnation, number: int, name: RoomName) -> Target:
        """Return what an offer sends to, while it may.

        Raises:
            UnknownRoomError: the room or the offer is over, or it is another one's.
        """
        target = self._sides.targets.get(number)
        if target is None or target.state is not State.OPEN or target.announcement.home != home:
            raise UnknownRoomError("the offer is over", field="offer")
        if target.announcement.room != name:
            raise UnknownRoomError("the offer is for another room", field="room")
        return target

    def begin_sending(self, target: Target, piece: int, now: float) -> None:
        """Note that a piece of the target's offer is being written to its home."""
        if piece not in target.sending:
            self.on_sending(True)  # noqa: FBT003
        target.sending.add(piece)
        if target.offer.first_copy_at is None:
            target.offer.first_copy_at = now

    def sending_done(self, target: Target, piece: int) -> None:
        """Note that no byte of a piece can move any more."""
        if piece in target.sending:
            self.on_sending(False)  # noqa: FBT003
        target.sending.discard(piece)
        self._endings.settle_target(target)

    # -- both

    def peer_lost(self, peer: Incarnation, why: str, now: float) -> None:
        """Fail what depends on an incarnation that is gone."""
        lost = PeerLostError(f"the daemon at {peer.address} is gone: {why}")
        for offer in [one for one in self._sides.remote_offers.values() if one.origin and one.origin.peer == peer]:
            if offer.state is State.OPEN:
                self._endings.fail(offer, lost, lost, now)
        for announcement in [one for one in self._sides.announcements.values() if one.home == peer]:
            self._close(announcement, lost, now)

    def expired(self, announcement: Announcement, now: float) -> None:
        """Drop another daemon's room at its deadline: its end was lost on the way."""
        if self._sides.announcements.get((announcement.home, announcement.room)) is announcement:
            late = DeadlineError(f"the room at {announcement.home.address} is over, and its end was not heard of")
            if not announcement.targets:
                self._bury(announcement, late, now)
            self._close(announcement, late, now)

    def _new_offer(self, origin: Origin, number: int, pool: SourcePool, room: Room, now: float) -> Offer:
        if number:
            raise PageGapError(f"chunk {number} came first", field="chunk")
        if len(room.offers) >= room.sources:
            raise UnexpectedSourceError(f"the room has its {room.sources} sources", field="request_id")
        times = Clocked(now, room.deadline_at)
        return Offer(pool, room.request_id, NO_SESSION, times, 1, origin)

    def refuse(self, origin: Origin, error: KvferryError, now: float) -> None:
        """Refuse a chunk of another daemon's offer; what came before it fails with it, else the room goes on."""
        offer = self._sides.remote_offers.get(origin)
        self._sides.effects.append(RefuseOffer(origin.peer, origin.room, origin.offer, error))
        if offer is not None and offer.chunks and offer.state is State.OPEN:
            self._endings.fail(offer, error, error, now)
            return
        room = self._sides.rooms.get(SideKey(origin.room.tenant, origin.room.request_id, origin.room.pool, "receive"))
        if room is not None and not isinstance(error, UnknownRoomError):
            room.last_refusal = error

    def _bury(self, announcement: Announcement, error: KvferryError, now: float) -> None:
        """Remember that another daemon's room has ended, for those who come too late."""
        name, met = announcement.room, [target.offer.pool.name for target in announcement.targets]
        half = Half(name.tenant, name.request_id, "receive")
        self._sides.tombstones.bury(half, listener_of(announcement), error, now, met)

    def _tell_of_ends(self, announcement: Announcement, now: float) -> None:
        """Tell another daemon's room of SENDs that ended here before it was announced; its home judges by what came."""
        home, name = announcement.home, announcement.room
        half = Half(name.tenant, name.request_id, "send")
        ended = self._sides.tombstones.heard_by(half, listener_of(announcement), now, (home.boot_id, name.arming))
        if ended:
            self._sides.effects.append(TellEnded(home, name, ended[0]))

    def _close(self, announcement: Announcement, error: KvferryError | None, now: float) -> None:
        self._sides.withdraw(announcement)
        for target in list(announcement.targets):
            self._endings.close_target(target, error, now)


def _nobody(began: bool) -> None:  # noqa: FBT001  a callback's only argument
    """Tell nobody: no scheduler is connected."""


def _whatever_arming(name: RoomName) -> tuple[str, str, int]:
    """Return what names a room whatever its arming."""
    return (name.request_id, name.pool, name.tenant)

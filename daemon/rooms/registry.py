"""Every live side of a hand-off by what names it, the deadlines, and the effects gathered so far."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.daemon.rooms.deadlines import Deadlines
from kvferry.daemon.rooms.effects import Effect
from kvferry.daemon.rooms.remote import Announcement, Incarnation, Origin, Target
from kvferry.daemon.rooms.sides import Offer, Piece, Room, SideKey
from kvferry.daemon.rooms.tombstones import Tombstones
from kvferry.protocol.peer_messages import RoomName


class Sides:
    """What the parts of the room book share.

    Attributes:
        offers: the offers of this daemon's sessions.
        rooms: the rooms of this daemon's sessions.
        remote_offers: other daemons' offers that joined rooms here.
        announcements: other daemons' rooms that wait for offers from here.
        targets: what offers here are for other daemons' rooms, by number, until they have settled.
        pieces: what is on its way into rooms here.
        effects: what the shell has to do.
        deadlines: of the open sides and of the announcements.
        tombstones: of sides that ended before the other side came.
    """

    def __init__(self, tombstones: Tombstones) -> None:
        self.tombstones = tombstones
        self.offers: dict[SideKey, Offer] = {}
        self.rooms: dict[SideKey, Room] = {}
        self.remote_offers: dict[Origin, Offer] = {}
        self.announcements: dict[tuple[Incarnation, RoomName], Announcement] = {}
        self.targets: dict[int, Target] = {}
        self.pieces: dict[int, Piece] = {}
        self.effects: list[Effect] = []
        self._by_request: dict[str, list[Offer | Room]] = {}
        self._announced: dict[str, list[Announcement]] = {}
        self.deadlines: Deadlines[Offer | Room | Announcement] = Deadlines()

    def __iter__(self) -> Iterator[Offer | Room]:
        """Yield every side that belongs to a session here."""
        yield from self.offers.values()
        yield from self.rooms.values()

    def of_request(self, request_id: str) -> list[Offer | Room]:
        """Return this daemon's sides of a request."""
        return self._by_request.get(request_id, [])

    def announced(self, request_id: str) -> list[Announcement]:
        """Return the rooms of other daemons for a request, oldest first."""
        return self._announced.get(request_id, [])

    def announce(self, announcement: Announcement) -> None:
        """Add another daemon's room."""
        self.announcements[announcement.home, announcement.room] = announcement
        self._announced.setdefault(announcement.room.request_id, []).append(announcement)
        self.deadlines.set(announcement, announcement.deadline_at)

    def withdraw(self, announcement: Announcement) -> None:
        """Remove another daemon's room, if it is there."""
        if self.announcements.pop((announcement.home, announcement.room), None) is None:
            return
        self.deadlines.drop(announcement)
        others = self._announced[announcement.room.request_id]
        others.remove(announcement)
        if not others:
            del self._announced[announcement.room.request_id]

    def enter(self, side: Offer | Room) -> None:
        """Add a side that belongs to a session here."""
        if isinstance(side, Room):
            self.rooms[side.key] = side
        else:
            self.offers[side.key] = side
        self._by_request.setdefault(side.request_id, []).append(side)
        self.deadlines.set(side, side.deadline_at)

    def leave(self, side: Offer | Room) -> None:
        """Remove a side that has settled."""
        if isinstance(side, Offer) and side.origin is not None:
            del self.remote_offers[side.origin]
            return
        del (self.rooms if isinstance(side, Room) else self.offers)[side.key]
        others = self._by_request[side.request_id]
        others.remove(side)
        if not others:
            del self._by_request[side.request_id]

    def postpone(self, side: Offer | Room, deadline_at: float) -> None:
        """Let a side be due at this time, unless it is due later."""
        if deadline_at > side.deadline_at:
            side.deadline_at = deadline_at
            self.deadlines.set(side, deadline_at)

"""Every live side of a hand-off by what names it, the deadlines, and the effects gathered so far."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from kvferry.daemon.rooms.effects import Effect
from kvferry.daemon.rooms.remote import Announcement, Incarnation, Origin, Target
from kvferry.daemon.rooms.sides import Offer, Piece, Room, SideKey, State
from kvferry.protocol.peer_messages import RoomName

FEW_DEADLINES = 16


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
    """

    def __init__(self) -> None:
        self.offers: dict[SideKey, Offer] = {}
        self.rooms: dict[SideKey, Room] = {}
        self.remote_offers: dict[Origin, Offer] = {}
        self.announcements: dict[tuple[Incarnation, RoomName], Announcement] = {}
        self.targets: dict[int, Target] = {}
        self.pieces: dict[int, Piece] = {}
        self.effects: list[Effect] = []
        self._by_request: dict[str, list[Offer | Room]] = {}
        self._announced: dict[str, list[Announcement]] = {}
        self._deadlines: list[tuple[float, int, Offer | Room | Announcement]] = []
        self._ties = itertools.count()

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
        self.set_deadline(announcement, announcement.deadline_at)

    def withdraw(self, announcement: Announcement) -> None:
        """Remove another daemon's room, if it is there."""
        if self.announcements.pop((announcement.home, announcement.room), None) is None:
            return
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
        self.set_deadline(side, side.deadline_at)

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

    def set_deadline(self, side: Offer | Room | Announcement, deadline_at: float) -> None:
        """Let a side be due at this time."""
        side.deadline_at = deadline_at
        heapq.heappush(self._deadlines, (deadline_at, next(self._ties), side))
        if len(self._deadlines) > FEW_DEADLINES + 2 * (len(self.offers) + len(self.rooms) + len(self.announcements)):
            # Sides that are over would stay, with all they know, as long as one that is not is due before them.
            self._deadlines = [
                one for one in self._deadlines if one[0] == one[2].deadline_at and not self._is_over(one[2])
            ]
            heapq.heapify(self._deadlines)

    def postpone(self, side: Offer | Room, deadline_at: float) -> None:
        """Let a side be due at this time, unless it is due later."""
        if deadline_at > side.deadline_at:
            self.set_deadline(side, deadline_at)

    def due(self, now: float) -> Iterator[Offer | Room | Announcement]:
        """Yield the sides whose deadline has come, open or not."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline_at, _, side = heapq.heappop(self._deadlines)
            if deadline_at == side.deadline_at:
                yield side

    def next_deadline(self) -> float | None:
        """Return when the next open side is due, or None."""
        while self._deadlines and self._is_over(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _is_over(self, side: Offer | Room | Announcement) -> bool:
        if isinstance(side, Announcement):
            return self.announcements.get((side.home, side.room)) is not side
        return side.state is not State.OPEN

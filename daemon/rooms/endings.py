"""How sides end: finishing, when the outcome is known, and settling, when no byte can move any more.

Sans I/O; every step leaves its effects in the registry.
"""

from __future__ import annotations

from collections.abc import Hashable

from kvferry.daemon.rooms.effects import CloseRoom, StopPiece, StopSending, Tell, Withdraw
from kvferry.daemon.rooms.registry import Sides
from kvferry.daemon.rooms.remote import Announcement, Target
from kvferry.daemon.rooms.results import Results
from kvferry.daemon.rooms.sides import Offer, Room, Side, State
from kvferry.daemon.rooms.tombstones import Half
from kvferry.protocol.errors import InternalError, KvferryError
from kvferry.protocol.events import Settled
from kvferry.protocol.peer_messages import RoomName
from kvferry.protocol.room_messages import RoomResult


class Endings:
    """Ends sides, each together with those that end because of it."""

    def __init__(self, sides: Sides, results: Results) -> None:
        self._sides = sides
        self._results = results

    def check_done(self, room: Room, now: float) -> None:
        """Finish the room if all is there."""
        if room.state is not State.OPEN or room.pieces or not room.all_promised:
            return
        if not all(coverage.complete for coverage in room.coverage.values()):
            bug = InternalError("all copies ended, but cells are missing")
            self.fail_room(room, bug, bug, now)
            return
        self._finish_room(room, None, None, now)
        for offer in list(room.offers):
            self.room_finished(offer, None, now)
        self.settle_room(room)

    def end(self, side: Offer | Room, own: KvferryError, peers: KvferryError, now: float) -> None:
        """End an open side by its own doing: who of the other side is not there yet hears of it when he comes."""
        if isinstance(side, Room):
            side.ended_itself = True
            missing = side.unmet_sources
            met: list[Hashable] = [offer.pool.name for offer in side.offers if offer.origin is None]
        else:
            missing = side.destinations - len(side.rooms)
            met = [_listener(room) for room in side.rooms]
        if missing:
            key = side.key
            self._sides.tombstones.bury(Half(key.tenant, key.request_id, side.side), key.pool, peers, now, met)
        self.fail(side, own, peers, now)

    def fail(self, side: Offer | Room, own: KvferryError, peers: KvferryError, now: float) -> None:
        """End an open side with ``own``, and what depends on it with ``peers``."""
        if isinstance(side, Room):
            self.fail_room(side, own, peers, now)
            return
        self._finish_offer(side, own, now)
        for room in [one for one in side.rooms if one.state is State.OPEN]:
            if isinstance(room, Room):
                self.fail_room(room, peers, peers, now)
            else:
                self._sides.effects.append(Withdraw(room, peers))
                self.close_target(room, None, now, tell_offer=False)
        self.settle_offer(side)

    def fail_room(self, room: Room, own: KvferryError, peers: KvferryError, now: float) -> None:
        """End an open room with ``own``, and the offers that joined it with ``peers``."""
        self._finish_room(room, own, peers, now)
        for piece in room.waiting:  # nothing of them has begun
            del self._sides.pieces[piece.piece_id], room.pieces[piece.piece_id]
        room.waiting.clear()
        self._sides.effects.extend(StopPiece(piece_id) for piece_id in room.pieces)
        for offer in list(room.offers):
            self.room_finished(offer, peers, now)
        self.settle_room(room)

    def close_target(self, target: Target, error: KvferryError | None, now: float, *, tell_offer: bool = True) -> None:
        """End another daemon's room as one offer sees it."""
        if target.state is not State.OPEN:
            return
        target.state = State.FINISHED
        if target in target.announcement.targets:
            target.announcement.targets.remove(target)
        if target.sending:
            self._sides.effects.append(StopSending(target))
        if tell_offer:
            self.room_finished(target.offer, error, now)
        self.settle_target(target)

    def room_finished(self, offer: Offer, error: KvferryError | None, now: float) -> None:
        """Note the outcome of one of an offer's rooms; the last one's is the offer's end."""
        offer.outcomes.append(error)
        if offer.state is State.OPEN and len(offer.outcomes) == offer.destinations:
            self._finish_offer(offer, next((one for one in offer.outcomes if one), None), now)

    def settle_room(self, room: Room) -> None:
        """Settle a finished room if nothing of it is under way."""
        if room.state is not State.FINISHED or room.pieces:
            return
        for one in room.ranges.values():
            if not one.shared and len(one.ids):
                room.pool.allocator_of(one.component).end_write(one.ids)
        self._leave(room)
        for offer in room.offers:
            self.settle_offer(offer)

    def settle_target(self, target: Target) -> None:
        """Settle a finished target if nothing is being sent to it."""
        if target.state is State.FINISHED and not target.sending:
            target.state = State.SETTLED
            del self._sides.targets[target.number]
            self.settle_offer(target.offer)

    def settle_offer(self, offer: Offer) -> None:
        """Settle a finished offer if all its rooms are."""
        if offer.state is not State.FINISHED or any(room.state is not State.SETTLED for room in offer.rooms):
            return
        if offer.holder is not None:
            for chunk in offer.chunks:
                for one in chunk.ranges:
                    if not one.shared and len(one.ids):
                        offer.holder.allocator_of(one.component).end_read(one.ids)
        self._leave(offer)

    def _finish_room(self, room: Room, own: KvferryError | None, peers: KvferryError | None, now: float) -> None:
        room.state = State.FINISHED
        self._sides.deadlines.drop(room)
        self._tell(room, RoomResult(state="finished", finished=room.finished_event(own, now)))
        moved: dict[str, list[tuple[int, int, int]]] = {address: [] for address in room.source_daemons}
        for offer in room.offers:
            if offer.origin is not None:
                found = (offer.origin.offer, offer.moved_bytes, offer.trimmed_pages)
                moved.setdefault(offer.origin.peer.address, []).append(found)
        self._sides.effects.extend(
            CloseRoom(address, name_of(room), peers, tuple(of_offers), room.unmet_sources if room.ended_itself else 0)
            for address, of_offers in moved.items()
        )

    def _finish_offer(self, offer: Offer, error: KvferryError | None, now: float) -> None:
        offer.state = State.FINISHED
        self._sides.deadlines.drop(offer)
        self._tell(offer, RoomResult(state="finished", finished=offer.finished_event(error, now)))

    def _leave(self, side: Offer | Room) -> None:
        side.state = State.SETTLED
        self._sides.leave(side)
        key = side.key
        settled = Settled(request_id=key.request_id, pool=key.pool, side=side.side, generation=side.generation)
        self._tell(side, RoomResult(state="settled", settled=settled))

    def _tell(self, side: Side, news: RoomResult) -> None:
        if isinstance(side, Offer) and side.origin is not None:
            return
        self._results.add(side.session_id, side.key, news)
        event = news.settled or news.finished
        if event is not None:
            self._sides.effects.append(Tell(side.session_id, event))


def _listener(room: Room | Target) -> Hashable:
    """Return by what name a receiving pool hears of sides that ended."""
    return room.pool.name if isinstance(room, Room) else listener_of(room.announcement)


def listener_of(announcement: Announcement) -> Hashable:
    """Return by what name another daemon's receiving pool hears of sides that ended here."""
    return (announcement.home.address, announcement.room.pool)


def name_of(room: Room) -> RoomName:
    """Return how other daemons call a room of this one."""
    return RoomName(room.request_id, room.pool.name, room.pool.tenant, room.arming)

"""What the room book asks its shell to do, in order."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.daemon.rooms.matching import Trim
from kvferry.daemon.rooms.remote import Incarnation, Target
from kvferry.daemon.rooms.sides import Offer, Room, SourcePool
from kvferry.pools.plan import Plan
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.events import Finished, Settled
from kvferry.protocol.peer_messages import RoomName


class StartPiece(NamedTuple):
    """Copy these plans, then report ``piece_done``; the pages are held until then."""

    piece_id: int
    source: SourcePool
    destination: Pool
    plans: tuple[Plan, ...]
    request_id: str = ""


class StopPiece(NamedTuple):
    """The copy is not wanted any more: stop at the next boundary, then report ``piece_done`` all the same."""

    piece_id: int


class Tell(NamedTuple):
    """Tell a session, if it still lives."""

    session_id: int
    event: Finished | Settled


class WarnTrimmed(NamedTuple):
    """Warn that lists were cut to one length: nothing proves that what was kept belongs together."""

    offer: Offer
    room: Room
    trim: Trim


class AnnounceRoom(NamedTuple):
    """Tell another daemon that a room waits for its offers."""

    address: str
    room: Room


class CloseRoom(NamedTuple):
    """Tell another daemon the outcome of a room; ``moved``: (offer, bytes moved, pages trimmed) of its offers.

    ``unmet``: how many sources had not come, where the receiver ended it.
    """

    address: str
    room: RoomName
    error: KvferryError | None
    moved: tuple[tuple[int, int, int], ...]
    unmet: int = 0


class RefuseOffer(NamedTuple):
    """Tell another daemon that its offer does not fit."""

    peer: Incarnation
    room: RoomName
    offer: int
    error: KvferryError


class OfferChunk(NamedTuple):
    """Offer a chunk to another daemon's room."""

    target: Target
    chunk: int


class TellReady(NamedTuple):
    """Tell another daemon how many steps of a chunk are ready."""

    target: Target
    chunk: int
    ready: int


class Withdraw(NamedTuple):
    """Tell another daemon that an offer has failed."""

    target: Target
    error: KvferryError


class TellEnded(NamedTuple):
    """Tell another daemon that what its room waits for was here and has ended."""

    peer: Incarnation
    room: RoomName
    error: KvferryError


class StopSending(NamedTuple):
    """Write no further piece of this target, then report ``sending_done`` for each under way."""

    target: Target


Effect = (
    StartPiece
    | StopPiece
    | Tell
    | WarnTrimmed
    | AnnounceRoom
    | CloseRoom
    | RefuseOffer
    | OfferChunk
    | TellReady
    | Withdraw
    | TellEnded
    | StopSending
)

"""What daemons say to each other about a hand-off between them.

The *home* is the destination's daemon: it has the room, matches offers with it and decides what moves. The *source*
daemon has the offers. A message is about one arming of a room; what is about another is void.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.base import Body
from kvferry.protocol.error_info import ErrorInfo
from kvferry.protocol.ids import ComponentName, Hex128, PeerAddress, PoolName
from kvferry.protocol.manifests import Index, LayerCount, Manifest, Offset, Size
from kvferry.protocol.room_messages import MAX_POOLS, MAX_STEPS, PageLists, Payload

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Checksum = Annotated[int, Meta(ge=0)]
MAX_RUNS = 1 << 16
MAX_ENTRIES = 1 << 16
MAX_PARTS = 1024
"""One or more of a component: replicas may have sent some pages of some of its entries."""


class RoomName(msgspec.Struct, frozen=True, array_like=True):
    """One arming of a room, at its home, which numbers all armings of its life: none is ever taken for another."""

    request_id: Hex128
    pool: PoolName
    tenant: Number
    arming: Number


class PeerHello(Body, frozen=True, kw_only=True, tag="PEER_HELLO"):
    """First on every connection, and again after each reconnection: who speaks, and which protocol."""

    protocol_min: int
    protocol_max: int
    dialled: PeerAddress
    """What the sender calls the receiver. One that calls itself otherwise logs it and answers all the same, under its
    own name: the sender then knows two daemons, and the one that it dialled never comes up."""
    answers: bool = False
    """Whether this answers the other's PEER_HELLO: then it is not answered again."""


class Announce(Body, frozen=True, kw_only=True, tag="ANNOUNCE"):
    """Home to source: a room waits for this request. Said again after a reconnection; once is enough."""

    room: RoomName
    deadline_ms: Number


class PeerOffer(Body, frozen=True, kw_only=True, tag="OFFER"):
    """Source to home: one SEND of the request. The first of an offer describes its pool."""

    room: RoomName
    offer: Number
    chunk: Number
    pool: PoolName
    manifest: Manifest | None = None
    region: Number = 0
    """Which memory it is, for a home on the same host."""
    lists: PageLists
    last: bool
    first_token: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    payload: Payload = b""
    steps: Annotated[tuple[tuple[Index, LayerCount], ...], Meta(max_length=MAX_STEPS)] = ()
    """(first layer, layers) of each step; which events they wait for is the source's affair."""
    ready: Number = 1
    """How many steps are ready by now; 1 for a chunk without steps."""

    def page_counts(self) -> tuple[int, ...]:
        """Return each list's length."""
        return tuple(one.pages for one in self.lists)


class StepReady(Body, frozen=True, kw_only=True, tag="STEP_READY"):
    """Source to home: so many steps of a chunk are ready."""

    room: RoomName
    offer: Number
    chunk: Number
    ready: Number


class OfferRefused(Body, frozen=True, kw_only=True, tag="OFFER_REFUSED"):
    """Home to source: the offer does not fit the room, which goes on waiting if nothing of the offer was taken.

    Source to home, with ``offer`` 0: the room is not taken note of.
    """

    room: RoomName
    offer: Number
    error: ErrorInfo


class OfferWithdrawn(Body, frozen=True, kw_only=True, tag="OFFER_WITHDRAWN"):
    """Source to home: the offer has failed.

    With ``offer`` 0: offers of this request were here and had ended when the room was announced.
    """

    room: RoomName
    offer: Number
    error: ErrorInfo


class RoomClosed(Body, frozen=True, kw_only=True, tag="ROOM_CLOSED"):
    """Home to source: the room's outcome is known; nothing is granted any more."""

    room: RoomName
    error: ErrorInfo | None = None
    moved: Annotated[tuple[tuple[Number, Number, Number], ...], Meta(max_length=MAX_POOLS)] = ()
    """(offer, bytes moved, pages trimmed) of each offer of this source."""
    unmet: Number = 0
    """How many sources had not come, where the receiver ended the room: they are told so when they come."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Some entries of the source's pool and a stretch of one of the chunk's page lists.

    ``entries`` are indices in the source's manifest. ``heads`` has (first head, heads) of each entry, counted in the
    source's own entry, or (0, 0) for whole pages.
    """

    component: ComponentName
    start: Number
    pages: Number
    entries: Annotated[tuple[Index, ...], Meta(max_length=MAX_ENTRIES)]
    heads: Annotated[tuple[tuple[Index, Index], ...], Meta(max_length=MAX_ENTRIES)]


class Piece(Body, frozen=True, kw_only=True, tag="PIECE"):
    """Home to source: what is to be sent by the grants that follow. Its segments are numbered part by part."""

    room: RoomName
    offer: Number
    piece: Number
    chunk: Number
    parts: Annotated[tuple[Part, ...], Meta(min_length=1, max_length=MAX_PARTS)]


class Grant(Body, frozen=True, kw_only=True, tag="GRANT"):
    """Home to source: write these segments of a piece's part into this landing slot.

    With ``runs``, where homes land pieces in their pages directly, the segments go one after another into these
    (address, bytes) instead, and ``address`` is the first one's.
    """

    piece: Number
    grant: Number
    part: Index
    first: Number
    stop: Number
    session: Annotated[str, Meta(max_length=256)]
    address: Offset
    size_bytes: Size
    runs: Annotated[tuple[tuple[Offset, Size], ...], Meta(max_length=MAX_RUNS)] = ()


class Landed(Body, frozen=True, kw_only=True, tag="LANDED"):
    """Source to home: the grant is used up, and its pages are not read any more; XXH3-64 of the bytes if all landed."""

    grant: Number
    checksum: Checksum = 0
    error: ErrorInfo | None = None
    may_still_land: bool = False
    """Whether bytes may still land, whatever the source does: the slot has to rest."""


class PieceOver(Body, frozen=True, kw_only=True, tag="PIECE_OVER"):
    """Home to source: no grant of the piece follows. Those under way are answered all the same."""

    piece: Number


class Confirm(Body, frozen=True, kw_only=True, tag="CONFIRM"):
    """Home to source: a piece was read from the source's memory; was it the offer's all the time?"""

    room: RoomName
    offer: Number
    piece: Number


class Confirmed(Body, frozen=True, kw_only=True, tag="CONFIRMED"):
    """Source to home: it was, where there is no error."""

    piece: Number
    error: ErrorInfo | None = None


class PoolGone(Body, frozen=True, kw_only=True, tag="POOL_GONE"):
    """Source to home: a pool was deleted; its memory goes back once nobody has it mapped."""

    tenant: Number
    pool: PoolName
    region: Number


PeerBody = (
    PeerHello
    | Announce
    | PeerOffer
    | StepReady
    | OfferRefused
    | OfferWithdrawn
    | RoomClosed
    | Piece
    | Grant
    | Landed
    | PieceOver
    | Confirm
    | Confirmed
    | PoolGone
)


class PeerEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """Who speaks: the address at which the sender can be reached, its incarnation, and the one it speaks to."""

    address: PeerAddress
    boot_id: Hex128
    to_boot_id: str
    """Empty in PEER_HELLO, which is how incarnations are learnt."""
    body: PeerBody

"""What daemons say to each other about a transfer between them.

The *home* is the destination's daemon: it has the room, matches send requests with it and decides what moves. The
*source* daemon has the send requests. A message is about one epoch of a receive request; what is about another is void.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.base import Body
from kvferry.protocol.error_info import ErrorInfo
from kvferry.protocol.ids import ComponentName, Hex128, PeerAddress, PoolName
from kvferry.protocol.manifests import Index, LayerCount, Manifest, Offset, Size
from kvferry.protocol.model_identity import ModelIdentity
from kvferry.protocol.transfer_messages import MAX_POOLS, MAX_STEPS, Direction, PageLists, Payload

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Checksum = Annotated[int, Meta(ge=0)]
MAX_RUNS = 1 << 16
MAX_ENTRIES = 1 << 16
MAX_SEGMENTS = 1024
"""One or more of a component: replicas may have sent some pages of some of its entries."""


class ReceiveName(msgspec.Struct, frozen=True, array_like=True):
    """One epoch of a receive request. Its home numbers the epochs of all: none is ever taken for another."""

    request_id: Hex128
    pool: PoolName
    tenant: Number
    epoch: Number


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
    """Home to source: a receive request waits for this request. Said again after a reconnection; once is enough."""

    receive_request: ReceiveName
    deadline_ms: Number


class PeerSend(Body, frozen=True, kw_only=True, tag="SEND_REQUEST"):
    """Source to home: one SEND of the request. The first of a send request describes its pool."""

    receive_request: ReceiveName
    send_request: Number
    chunk: Number
    pool: PoolName
    manifest: Manifest | None = None
    region: Number = 0
    """Which memory it is, for a home on the same host."""
    lists: PageLists = ()
    last: bool
    first_token: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    payload: Payload = b""
    steps: Annotated[tuple[tuple[Index, LayerCount], ...], Meta(max_length=MAX_STEPS)] = ()
    """(first layer, layers) of each step; which events they wait for is the source's affair."""
    ready: Number = 1
    """How many steps are ready by now; 1 for a chunk without steps."""
    model: ModelIdentity | None = None
    """Whose KV the pool holds, beside its manifest and without the salt."""

    def page_counts(self) -> tuple[int, ...]:
        """Return each list's length."""
        return tuple(one.pages for one in self.lists)


class StepReady(Body, frozen=True, kw_only=True, tag="STEP_READY"):
    """Source to home: so many steps of a chunk are ready."""

    receive_request: ReceiveName
    send_request: Number
    chunk: Number
    ready: Number


class SendRefused(Body, frozen=True, kw_only=True, tag="SEND_REFUSED"):
    """Home to source: the send request does not fit the receive request, which waits on if nothing was taken.

    Source to home, with ``send_request`` 0: the receive request is not taken note of.
    """

    receive_request: ReceiveName
    send_request: Number
    error: ErrorInfo


class SendWithdrawn(Body, frozen=True, kw_only=True, tag="SEND_WITHDRAWN"):
    """Source to home: the send request has failed.

    With ``send_request`` 0: send requests of this request were here and had ended when the room was announced.
    """

    receive_request: ReceiveName
    send_request: Number
    error: ErrorInfo


class ReceiveClosed(Body, frozen=True, kw_only=True, tag="RECEIVE_CLOSED"):
    """Home to source: the receive request's outcome is known; nothing is granted any more."""

    receive_request: ReceiveName
    error: ErrorInfo | None = None
    moved: Annotated[tuple[tuple[Number, Number, Number], ...], Meta(max_length=MAX_POOLS)] = ()
    """(send request, bytes moved, pages trimmed) of each send request of this source."""
    unmet: Number = 0
    """How many sources had not come, where the receiver ended the receive request: they are told so when they come."""


class HalfAbandoned(Body, frozen=True, kw_only=True, tag="HALF_ABANDONED"):
    """Either way: an engine gave a request up before its SENDs, or its RECEIVEs, came.

    Of SENDs it concerns only receive requests that name the daemon that says so.
    """

    tenant: Number
    request_id: Hex128
    direction: Direction
    error: ErrorInfo


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Some entries of the source's pool and an extent of one of the chunk's page lists.

    ``entries`` are indices in the source's manifest. ``heads`` has (first head, heads) of each entry, counted in the
    source's own entry, or (0, 0) for whole pages.
    """

    component: ComponentName
    start: Number
    pages: Number
    entries: Annotated[tuple[Index, ...], Meta(max_length=MAX_ENTRIES)]
    heads: Annotated[tuple[tuple[Index, Index], ...], Meta(max_length=MAX_ENTRIES)]


class OpRequest(Body, frozen=True, kw_only=True, tag="OP_REQUEST"):
    """Home to source: what is to be sent by the grants that follow. Its segments are numbered segment by segment."""

    receive_request: ReceiveName
    send_request: Number
    op: Number
    chunk: Number
    segments: Annotated[tuple[Segment, ...], Meta(min_length=1, max_length=MAX_SEGMENTS)]


class Grant(Body, frozen=True, kw_only=True, tag="GRANT"):
    """Home to source: write these segments of a transfer op's segment into this bounce buffer.

    With ``runs``, where homes land transfer ops in their pages directly, the segments go one after another into these
    (address, bytes) instead, and ``address`` is the first one's.
    """

    op: Number
    grant: Number
    segment: Index
    first: Number
    stop: Number
    session: Annotated[str, Meta(max_length=256)]
    address: Offset
    size_bytes: Size
    runs: Annotated[tuple[tuple[Offset, Size], ...], Meta(max_length=MAX_RUNS)] = ()


class Written(Body, frozen=True, kw_only=True, tag="WRITTEN"):
    """Source to home: the grant is used up, and its pages are not read any more; XXH3-64 of the bytes if all landed."""

    grant: Number
    checksum: Checksum = 0
    error: ErrorInfo | None = None
    may_still_land: bool = False
    """Whether bytes may still land, whatever the source does: the slot has to rest."""


class OpEnded(Body, frozen=True, kw_only=True, tag="OP_ENDED"):
    """Home to source: no grant of the transfer op follows. Those under way are answered all the same."""

    op: Number


class Confirm(Body, frozen=True, kw_only=True, tag="CONFIRM"):
    """Home to source: a transfer op was read from the source's memory; was it the send request's all the time?"""

    receive_request: ReceiveName
    send_request: Number
    op: Number


class Confirmed(Body, frozen=True, kw_only=True, tag="CONFIRMED"):
    """Source to home: it was, where there is no error."""

    op: Number
    error: ErrorInfo | None = None


class PoolGone(Body, frozen=True, kw_only=True, tag="POOL_GONE"):
    """Source to home: a pool was deleted; its memory goes back once nobody has it mapped."""

    tenant: Number
    pool: PoolName
    region: Number


PeerBody = (
    PeerHello
    | Announce
    | PeerSend
    | StepReady
    | SendRefused
    | SendWithdrawn
    | ReceiveClosed
    | HalfAbandoned
    | OpRequest
    | Grant
    | Written
    | OpEnded
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

"""Messages between daemons about a transfer between them.

The *home* is the daemon of the receive request: it matches send requests, plans and decides what is copied. The
*source* daemon has the send requests. A message is about one epoch of a receive request; one about another epoch is
ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kvferry.protocol.base import Body
from kvferry.protocol.codec import Frames, PageIds, page_lists, with_page_lists
from kvferry.protocol.errors import ErrorInfo, MalformedError
from kvferry.protocol.ids import ComponentName, Hex128, ModelIdentity, PeerAddress, PeerKey, PoolName
from kvferry.protocol.manifests import Index, LayerCount, Manifest, Offset, Size
from kvferry.protocol.transfer_messages import MAX_POOLS, MAX_STEPS, Direction, Few, PageLists, Payload, SourcePools

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Amount = Annotated[int, Meta(ge=0, le=1 << 50)]
"""Bytes or pages that were moved: sums of many still fit 64 bits."""
Checksum = Annotated[int, Meta(ge=0)]
MAX_RUNS = 1 << 16
MAX_ENTRIES = 1 << 16
MAX_SEGMENTS = 1024
MAX_STEP = 64
"""Segments per transfer op; a component may need several if replicas have sent part of its pages or entries."""


class ReceiveName(msgspec.Struct, frozen=True, array_like=True):
    """One epoch of a receive request. The home numbers the epochs of all its receive requests, so each is unique."""

    request_id: Hex128
    pool: PoolName
    tenant: Number
    epoch: Number


class PeerHello(Body, frozen=True, kw_only=True, tag="PEER_HELLO"):
    """Names the sender: the first message on every connection, repeated if the other side seems not to know it.

    A key sent to an address and returned proves that the sender listens there: only then are its messages read beyond
    their ``PeerHead``. See ``daemon.peers``.
    """

    boot_id: Hex128
    protocol_min: int
    protocol_max: int
    dialled: PeerAddress
    """The address that the sender used for the receiver. A receiver with another address logs that and answers under
    its own: the sender then knows two daemons, and the one that it dialled never comes up."""
    max_frame_bytes: Number = 0
    max_message_bytes: Number = 0
    """What the sender reads at most, of one frame and of all frames of a message; the smaller of both sides counts."""
    bounce_buffer_bytes: Number = 0
    """What the sender stages at most for one write between hosts; 0: it has no transport between hosts. The smaller of
    both sides counts."""


class PeerHeartbeat(Body, frozen=True, kw_only=True, tag="PEER_HEARTBEAT"):
    """Are you there? Answered by the same number with ``answers``, from the loop that also handles transfers."""

    number: Number
    answers: bool = False


class OfReceive(Body, frozen=True, kw_only=True):
    """The base of what is said about an epoch of a receive request."""

    receive_request: ReceiveName

    @property
    def request_id(self) -> str:
        """Return the receive request's."""
        return self.receive_request.request_id


class Announce(OfReceive, frozen=True, kw_only=True, tag="ANNOUNCE"):
    """Home to source: a receive request waits for this request id. Repeated after a reconnection; idempotent."""

    deadline_ms: Number
    destinations: Few = 1
    source_pools: SourcePools = ()
    """As in RECEIVE."""


class PeerSend(OfReceive, frozen=True, kw_only=True, tag="SEND_REQUEST"):
    """Source to home: one SEND of the request. The first of a send request describes its pool."""

    send_request: Number
    chunk: Number
    pool: PoolName
    manifest: Manifest | None = None
    region: Number = 0
    """The number of the pool's memory region, for a home on the same host."""
    lists: PageLists = ()
    last: bool
    first_token: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    payload: Payload = b""
    steps: Annotated[tuple[tuple[Index, LayerCount], ...], Meta(max_length=MAX_STEPS)] = ()
    """(first layer, number of layers) of each step; the device events they wait for stay at the source."""
    ready: Number = 1
    """Number of steps that are ready; 1 for a chunk without steps."""
    model: ModelIdentity | None = None
    """The pool's model identity without the salt, sent with the manifest."""
    checksums: bool = False
    """As in SEND."""
    region_key: PeerKey = ""
    """In chunk 0, for a home on the same host: its REGION_REQUEST shows it. Good for the pool's memory while the send
    request is open."""

    def page_counts(self) -> tuple[int, ...]:
        """Return each list's length."""
        return tuple(one.pages for one in self.lists)


class StepReady(OfReceive, frozen=True, kw_only=True, tag="STEP_READY"):
    """Source to home: ``ready`` steps of a chunk are ready."""

    send_request: Number
    chunk: Number
    ready: Number


class SendRefused(OfReceive, frozen=True, kw_only=True, tag="SEND_REFUSED"):
    """Home to source: the send request does not fit the receive request, which keeps waiting if nothing was accepted.

    Source to home, with ``send_request`` 0: the source has not accepted the announced receive request.
    """

    send_request: Number
    error: ErrorInfo


class SendWithdrawn(OfReceive, frozen=True, kw_only=True, tag="SEND_WITHDRAWN"):
    """Source to home: the send request has failed.

    With ``send_request`` 0: the send requests of this request id had ended before the receive request was announced.
    """

    send_request: Number
    error: ErrorInfo


class ReceiveClosed(OfReceive, frozen=True, kw_only=True, tag="RECEIVE_CLOSED"):
    """Home to source: the receive request's outcome is known; no more write credits follow."""

    error: ErrorInfo | None = None
    moved: Annotated[tuple[tuple[Number, Amount, Amount], ...], Meta(max_length=MAX_POOLS)] = ()
    """(send request, bytes moved, pages trimmed) of each send request of this source."""
    unmet: Number = 0
    """Number of sources that had not sent when the receiver ended the receive request; they are told when they do."""


class HalfAbandoned(Body, frozen=True, kw_only=True, tag="HALF_ABANDONED"):
    """In either direction: an engine abandoned a request before its SENDs, or its RECEIVEs, came.

    If SENDs were abandoned, it applies only to receive requests that name the sending daemon.
    """

    tenant: Number
    request_id: Hex128
    direction: Direction
    error: ErrorInfo


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Entries of the source's pool, and an extent of one of the chunk's page lists.

    ``entries`` are indices in the source's manifest. ``heads`` has (first head, number of heads) of each entry, counted
    within the source's entry, or (0, 0) for whole pages. Where pages of both sides hold different numbers of tokens,
    the segment has every ``step``-th page of the extent, and of each ``tokens`` (first token, number of tokens).
    """

    component: ComponentName
    start: Number
    pages: Number
    entries: Annotated[tuple[Index, ...], Meta(max_length=MAX_ENTRIES)]
    heads: Annotated[tuple[tuple[Index, Index], ...], Meta(max_length=MAX_ENTRIES)]
    step: Annotated[int, Meta(ge=1, le=MAX_STEP)] = 1
    tokens: tuple[Index, Index] = (0, 0)


class OpRequest(OfReceive, frozen=True, kw_only=True, tag="OP_REQUEST"):
    """Home to source: the segments of a transfer op, which the following write credits refer to by index."""

    send_request: Number
    op: Number
    chunk: Number
    segments: Annotated[tuple[Segment, ...], Meta(min_length=1, max_length=MAX_SEGMENTS)]


class WriteCredit(Body, frozen=True, kw_only=True, tag="WRITE_CREDIT"):
    """Home to source: write plan segments ``[first, stop)`` of the transfer op's segment into this bounce buffer.

    With ``runs`` (``network.direct``), write them one after another into these (address, bytes) ranges of the home's
    pages instead; ``address`` is that of the first range.
    """

    op: Number
    credit: Number
    segment: Index
    first: Number
    stop: Number
    session: Annotated[str, Meta(max_length=256)]
    address: Offset
    size_bytes: Size
    runs: Annotated[tuple[tuple[Offset, Size], ...], Meta(max_length=MAX_RUNS)] = ()


class Written(Body, frozen=True, kw_only=True, tag="WRITTEN"):
    """Source to home: the write credit has ended, and no page is read any more; XXH3-64 if all bytes were written."""

    credit: Number
    checksum: Checksum = 0
    error: ErrorInfo | None = None
    may_still_land: bool = False
    """Whether a write may still land, whatever the source does: the home must quarantine the memory."""


class OpEnded(Body, frozen=True, kw_only=True, tag="OP_ENDED"):
    """Home to source: no more write credits of the transfer op follow. Outstanding write credits are still answered."""

    op: Number


class Confirm(OfReceive, frozen=True, kw_only=True, tag="CONFIRM"):
    """Home to source: a transfer op was read from the source's memory; did the send request hold it throughout?"""

    send_request: Number
    op: Number


class Confirmed(Body, frozen=True, kw_only=True, tag="CONFIRMED"):
    """Source to home: the answer to CONFIRM; no error means yes."""

    op: Number
    error: ErrorInfo | None = None


class PoolGone(Body, frozen=True, kw_only=True, tag="POOL_GONE"):
    """Source to home: a pool was deleted; its memory is released once no process has it mapped."""

    tenant: Number
    pool: PoolName
    region: Number


PeerBody = (
    PeerHello
    | PeerHeartbeat
    | Announce
    | PeerSend
    | StepReady
    | SendRefused
    | SendWithdrawn
    | ReceiveClosed
    | HalfAbandoned
    | OpRequest
    | WriteCredit
    | Written
    | OpEnded
    | Confirm
    | Confirmed
    | PoolGone
)


class PeerHead(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of a message between daemons: all that is read before the sender is authenticated.

    ``address`` is the sender's; ``key`` is the sender's for the receiver; ``to_key`` is the receiver's for the sender,
    which proves that the sender receives messages to ``address``. It is empty in a PEER_HELLO to an unauthenticated
    peer.
    """

    address: PeerAddress
    key: Hex128
    to_key: PeerKey


class PeerEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """A message between daemons without its page lists: see ``PeerHead``."""

    address: PeerAddress
    key: Hex128
    to_key: PeerKey
    body: PeerBody


# -- encoding and decoding of messages between daemons: ``[head, body, ids…]``; see ``codec`` for the page lists.


MAX_HEAD_BYTES = 512
_encoder = msgspec.msgpack.Encoder()
_head_decoder = msgspec.msgpack.Decoder(PeerHead)
_body_decoder: msgspec.msgpack.Decoder[PeerBody] = msgspec.msgpack.Decoder(PeerBody)
_NOT_READABLE = (msgspec.MsgspecError, ValueError, IndexError, RecursionError, MemoryError)


class IncomingPeerMessage(NamedTuple):
    """A decoded message of another daemon and its page lists, in the order in which the body names them."""

    envelope: PeerEnvelope
    ids: tuple[PageIds, ...]


def encode_peer(envelope: PeerEnvelope, ids: Sequence[PageIds] = ()) -> Frames:
    """Return the message's frames. The id frames are views of the arrays: do not modify these before sending."""
    head = _encoder.encode((envelope.address, envelope.key, envelope.to_key))
    return [head, *with_page_lists(_encoder.encode(envelope.body), envelope.body, ids)]


def decode_peer_head(frame: bytes) -> PeerHead:
    """Return who says that he speaks; costs the same whatever follows.

    Raises:
        MalformedError: the bytes are not the first frame of a message between daemons.
    """
    if len(frame) > MAX_HEAD_BYTES:
        raise MalformedError(f"the first frame of a daemon's message has {len(frame)} bytes")
    try:
        return _head_decoder.decode(frame)
    except _NOT_READABLE as cause:
        raise MalformedError(f"a daemon's message cannot be decoded: {cause}") from cause


def decode_peer_body(head: PeerHead, frames: Sequence[bytes]) -> IncomingPeerMessage:
    """Return the message of which ``frames`` are what follows the head.

    Raises:
        MalformedError: the bytes are not a message. Nothing else is raised, whatever the input.
    """
    try:
        body = _body_decoder.decode(frames[0])
        return IncomingPeerMessage(
            PeerEnvelope(head.address, head.key, head.to_key, body), page_lists(body, frames[1:])
        )
    except _NOT_READABLE as cause:
        raise MalformedError(f"a daemon's message cannot be decoded: {cause}") from cause


def decode_peer(frames: Sequence[bytes]) -> IncomingPeerMessage:
    """Return a whole message.

    Raises:
        MalformedError: the bytes are not a message. Nothing else is raised, whatever the input.
    """
    return decode_peer_body(decode_peer_head(frames[0] if frames else b""), frames[1:])

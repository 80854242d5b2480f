"""Transfers: SEND, RECEIVE, CANCEL, ABANDON, RESULT."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.protocol.base import MAX_PAGE_LISTS, AnsweredBy, DeviceEvent, PageList, ReplyBody, RingNumber
from kvferry.protocol.events import Finished, Settled
from kvferry.protocol.ids import Hex128, PeerAddress, PoolName
from kvferry.protocol.limits import EVENT_RING_SLOTS, LARGEST_PAYLOAD_BYTES
from kvferry.protocol.manifests import Index, LayerCount

Direction = Literal["send", "receive"]
ReceiveInto = Literal["pages", "host"]
MAX_STEPS = 256
MAX_CHUNKS = 4096
"""SENDs of one request from one pool."""
MAX_POOLS = 1024
Few = Annotated[int, Meta(ge=1, le=MAX_POOLS)]
SourcePools = Annotated[tuple[PoolName, ...], Meta(max_length=MAX_POOLS)]
PageLists = Annotated[tuple[PageList, ...], Meta(max_length=MAX_PAGE_LISTS)]
Payload = Annotated[bytes, Meta(max_length=LARGEST_PAYLOAD_BYTES)]


class LayerStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Layers of a SEND whose bytes are ready once an event of the session's ring has reached a value.

    The step has ``layers`` layers from ``first_layer`` on, by the model's own layer numbers, in every component but
    draft; draft layers go with the last step. Steps become ready in order.
    """

    first_layer: Index
    layers: LayerCount
    event: Annotated[int, Meta(ge=0, lt=EVENT_RING_SLOTS)]
    value: Annotated[int, Meta(ge=1, lt=1 << 62)]
    ring: RingNumber = 0
    """As in ``DeviceEvent``."""


class Accepted(ReplyBody, frozen=True, kw_only=True, tag="ACCEPTED"):
    """SEND's and RECEIVE's reply: the checks passed, events follow.

    ``generation`` counts a session's RECEIVEs of this request id and pool: 1 for the first one; 0 for a SEND.
    """

    generation: int = 0
    skipped_source_entries: int = 0
    skipped_source_pages: int = 0
    covered_source_entries: int = 0
    """Entries that another source of the transfer has sent already, as a replica."""
    matched: int = 0
    """How many of the RECEIVEs of a SEND, or of a RECEIVE's ``sources``, have come."""


class Receive(AnsweredBy[Accepted], frozen=True, kw_only=True, tag="RECEIVE"):
    """Receive a request's KV into these pages of this session, from ``sources`` sending pools.

    Answered by ACCEPTED, then by the events FINISHED and SETTLED. The pages must not be read or written before
    FINISHED, nor reused before SETTLED.
    """

    request_id: Hex128
    pool: PoolName
    lists: PageLists = ()
    """No lists, or only empty ones: receive only the first token and payload. Source components without a list here
    are skipped."""
    sources: Few = 1
    destinations: Few = 1
    """How many RECEIVEs of the request each of the sending pools fills, this one among them: all of those say the same
    number, so that a sender need not know how its receivers split the model."""
    source_pools: SourcePools = ()
    """The names of the ``sources`` pools, where others send the request's other parts; the first one's first token and
    payload count. None: all pools that send the request, one of them with first token and payload."""
    source_daemons: Annotated[tuple[PeerAddress, ...], Meta(max_length=64)] = ()
    """The daemons of the sending pools; none: this daemon only. Its own address may be among them."""
    after: DeviceEvent | None = None
    """Wait for this event before the pages are written, as a device's kernels may still read them."""
    into: ReceiveInto = "pages"
    """``host``: the lists give only the number of pages, and no ids follow. The bytes become a snapshot in the host
    tier, which FINISHED names, and which RESTORE brings into pages later."""
    checksums: bool = False
    """Compare what arrived in the pages with checksums of the source's bytes, before FINISHED says that all is well."""

    def page_counts(self) -> tuple[int, ...]:
        """Return each list's length; empty for the host tier, for which no ids follow."""
        return tuple([one.pages for one in self.lists]) if self.into == "pages" else ()


class Send(AnsweredBy[Accepted], frozen=True, kw_only=True, tag="SEND"):
    """Send filled pages of this session to all RECEIVEs of the request, as many as these say; late ones are waited for.

    A prompt may be sent in chunks during its prefill: each SEND but the last one has ``last=false`` and ends on a page
    boundary, and the next one continues there. One SEND of a request carries ``first_token`` and ``payload``, or one of
    each pool where RECEIVEs say of which one they take them.
    A SEND with no lists, ``last=false`` and no payload asks which receivers wait: ACCEPTED has their number, and
    MATCHED comes with each further one.
    A SEND may come before its pages are filled: then ``steps`` say after which events which layers are.
    Answered by ACCEPTED; FINISHED and SETTLED come once for all SENDs of a request from one pool.
    """

    request_id: Hex128
    pool: PoolName
    lists: PageLists = ()
    """No lists, or only empty ones: no page is sent."""
    last: bool = True
    first_token: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    payload: Payload = b""
    """At most ``max_payload_bytes`` of its own pool and of each receiver's."""
    steps: Annotated[tuple[LayerStep, ...], Meta(max_length=MAX_STEPS)] = ()
    """In which order, and after which events, its layers are ready; none: all of them are ready now."""
    checksums: bool = False
    """As in RECEIVE, for this SEND's pages and those of later ones of its request and pool."""

    def page_counts(self) -> tuple[int, ...]:
        """Return each list's length."""
        return tuple([one.pages for one in self.lists])


class Cancelled(ReplyBody, frozen=True, kw_only=True, tag="CANCELLED"):
    """CANCEL's reply. ``was_finished``: the outcome was known before."""

    was_finished: bool
    settled: bool = True
    """Whether no byte moves any more; false only without ``wait``: SETTLED is still to come."""


class Cancel(AnsweredBy[Cancelled], frozen=True, kw_only=True, tag="CANCEL"):
    """Cancel this session's endpoint of a transfer. Answered when it has settled or, without ``wait``, at once."""

    after_restart = "done"

    request_id: Hex128
    pool: PoolName
    direction: Direction
    wait: bool = True
    """Whether the reply waits until the endpoint has settled; FINISHED and SETTLED come either way."""


class Abandoned(ReplyBody, frozen=True, kw_only=True, tag="ABANDONED"):
    """ABANDON's reply: how many endpoints failed here; other daemons are told, and do not answer."""

    failed: int


class Abandon(AnsweredBy[Abandoned], frozen=True, kw_only=True, tag="ABANDON"):
    """Declare that this user's SENDs (or RECEIVEs) of a request will never come.

    Every RECEIVE (or SEND) of the request that waits for one fails with PEER_CANCELLED and the reason, here and at
    ``daemons``; one that comes later fails at once, within the bounds of the daemon's tombstones.
    """

    after_restart = "again"

    request_id: Hex128
    direction: Direction
    """Which half will not come."""
    daemons: Annotated[tuple[PeerAddress, ...], Meta(max_length=64)] = ()
    """Where the other half may wait; this daemon, and daemons whose RECEIVEs wait here, are told in any case."""
    reason: Annotated[str, Meta(max_length=256)] = ""


class TransferResult(ReplyBody, frozen=True, kw_only=True, tag="TRANSFER_RESULT"):
    """RESULT's reply: the events so far."""

    state: Literal["open", "finished", "settled"]
    finished: Finished | None = None
    settled: Settled | None = None
    matched: int = 0
    """As in ACCEPTED, until it has settled."""


class Result(AnsweredBy[TransferResult], frozen=True, kw_only=True, tag="RESULT"):
    """Ask for the state of this session's endpoint of a transfer; recovers a lost event."""

    after_restart = "again"

    request_id: Hex128
    pool: PoolName
    direction: Direction

"""Transfers: SEND, RECEIVE, CANCEL, ABANDON, RESULT."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.protocol.base import MAX_PAGE_LISTS, Body, PageList
from kvferry.protocol.device_event import DeviceEvent
from kvferry.protocol.events import Finished, Settled
from kvferry.protocol.ids import Hex128, PeerAddress, PoolName
from kvferry.protocol.limits import EVENT_RING_SLOTS, LARGEST_PAYLOAD_BYTES
from kvferry.protocol.manifests import Index, LayerCount

Direction = Literal["send", "receive"]
ReceiveInto = Literal["pages", "host"]
MAX_STEPS = 256
MAX_POOLS = 1024
Few = Annotated[int, Meta(ge=1, le=MAX_POOLS)]
PageLists = Annotated[tuple[PageList, ...], Meta(max_length=MAX_PAGE_LISTS)]
Payload = Annotated[bytes, Meta(max_length=LARGEST_PAYLOAD_BYTES)]


class LayerStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Layers of a SEND whose bytes are there once an event of the session's ring has reached a value.

    ``layers`` are counted from ``first_layer``, by the model's own numbers, in every component but draft; what no step
    names goes with the last one. Steps become ready in their order.
    """

    first_layer: Index
    layers: LayerCount
    event: Annotated[int, Meta(ge=0, lt=EVENT_RING_SLOTS)]
    value: Annotated[int, Meta(ge=1, lt=1 << 62)]

    @property
    def layer_range(self) -> range:
        """Return the layers."""
        return range(self.first_layer, self.first_layer + self.layers)


class Receive(Body, frozen=True, kw_only=True, tag="RECEIVE"):
    """Make a transfer: these pages of this session are to be filled, by ``sources`` sending pools.

    Answered by ACCEPTED, then by the events FINISHED and SETTLED. The pages may not be touched before FINISHED, nor
    used again before SETTLED.
    """

    request_id: Hex128
    pool: PoolName
    lists: PageLists = ()
    """None, or lists that are all empty: only the first token and payload are wanted. What a source has of components
    without a list is skipped."""
    sources: Few = 1
    source_daemons: Annotated[tuple[PeerAddress, ...], Meta(max_length=64)] = ()
    """Where the sending pools are; none: with this daemon only. Its own address may be among them."""
    after: DeviceEvent | None = None
    """Wait for this before the pages are written: work that still reads them is under way on a device."""
    into: ReceiveInto = "pages"
    """``host``: the lists say how many pages, and no ids follow: the bytes become a snapshot in the host tier, which
    FINISHED names, to be restored once there are pages."""
    any_model: bool = False
    """Take pages of a pool of another model too: whoever asks knows that its KV fits."""

    def page_counts(self) -> tuple[int, ...]:
        """Return each list's length; none where it lands in the host tier."""
        return tuple(one.pages for one in self.lists) if self.into == "pages" else ()


class Send(Body, frozen=True, kw_only=True, tag="SEND"):
    """Send filled pages of this session to ``destinations`` transfers of the request; waits for them if need be.

    A prompt may be sent in chunks as its prefill goes on: each SEND but the last one has ``last=false``, ends on a
    page boundary, and the next one continues it. One SEND of a request carries ``first_token`` and ``payload``.
    One without lists, ``last=false`` and no payload asks who waits: ACCEPTED says how many receivers are there, and
    MATCHED when another one comes.
    A SEND may come before its pages are filled: then it says by ``steps`` when which layers are.
    Answered by ACCEPTED; FINISHED and SETTLED come once for all SENDs of a request from one pool.
    """

    request_id: Hex128
    pool: PoolName
    lists: PageLists = ()
    """None, or lists that are all empty: it moves no page."""
    last: bool = True
    destinations: Few = 1
    first_token: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    payload: Payload = b""
    """At most what its own pool and each receiver's say as ``max_payload_bytes``."""
    steps: Annotated[tuple[LayerStep, ...], Meta(max_length=MAX_STEPS)] = ()
    """In which order, and after which events, its layers are there; none: all of them are there now."""

    def page_counts(self) -> tuple[int, ...]:
        """Return each list's length."""
        return tuple(one.pages for one in self.lists)


class Accepted(Body, frozen=True, kw_only=True, tag="ACCEPTED"):
    """SEND's and RECEIVE's reply: the checks passed, events follow. ``generation`` counts a transfer's re-epoch."""

    generation: int = 0
    skipped_source_entries: int = 0
    skipped_source_pages: int = 0
    covered_source_entries: int = 0
    """Entries that another source of the transfer, a replica of this one, has sent already."""
    matched: int = 0
    """How many of a SEND's ``destinations``, or of a RECEIVE's ``sources``, are there."""


class Cancel(Body, frozen=True, kw_only=True, tag="CANCEL"):
    """Give up this session's side of a transfer. Answered when it has settled, or at once."""

    request_id: Hex128
    pool: PoolName
    direction: Direction
    wait: bool = True
    """Whether the reply waits until the side has settled; FINISHED and SETTLED come either way."""


class Cancelled(Body, frozen=True, kw_only=True, tag="CANCELLED"):
    """CANCEL's reply. ``was_finished`` says that the outcome was known before."""

    was_finished: bool
    settled: bool = True
    """Whether no byte moves any more; only without ``wait`` it may be that SETTLED is still to come."""


class Abandon(Body, frozen=True, kw_only=True, tag="ABANDON"):
    """Say that this user's SENDs (or RECEIVEs) of a request will never come: it was given up before they began.

    Every RECEIVE (or SEND) of the request that waits for one fails with PEER_CANCELLED and the reason, here and at the
    daemons named; one that comes later hears it at once, within the bounds of what is remembered of ends.
    """

    request_id: Hex128
    direction: Direction
    """Which half does not come."""
    daemons: Annotated[tuple[PeerAddress, ...], Meta(max_length=64)] = ()
    """Where the other half may wait; this daemon, and daemons whose RECEIVEs wait for it, are told anyway."""
    reason: Annotated[str, Meta(max_length=256)] = ""


class Abandoned(Body, frozen=True, kw_only=True, tag="ABANDONED"):
    """ABANDON's reply: how many sides failed here; other daemons are told, and do not answer."""

    failed: int


class Result(Body, frozen=True, kw_only=True, tag="RESULT"):
    """Ask for the state of this session's side of a transfer; recovers an event that was lost."""

    request_id: Hex128
    pool: PoolName
    direction: Direction


class TransferResult(Body, frozen=True, kw_only=True, tag="TRANSFER_RESULT"):
    """RESULT's reply: the events so far."""

    state: Literal["open", "finished", "settled"]
    finished: Finished | None = None
    settled: Settled | None = None
    matched: int = 0
    """As in ACCEPTED, while it has not settled."""

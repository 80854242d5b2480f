"""Chunks as they travel between daemons, and back."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.daemon.rooms.page_ranges import PageRange, entries_of, page_ranges
from kvferry.daemon.rooms.remote import Target
from kvferry.daemon.rooms.sides import Chunk
from kvferry.pools.runs import PageIds
from kvferry.protocol.base import PageList
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.peer_messages import PeerOffer
from kvferry.protocol.room_messages import LayerStep

ANY_EVENT, ANY_VALUE = 0, 1
"""A step's event is the source's affair: the home is told how many steps are ready."""


def offer_of(target: Target, number: int) -> tuple[PeerOffer, list[PageIds]]:
    """Return a chunk of a local offer as it is said to a room's home, and its page lists."""
    offer = target.offer
    chunk, pool = offer.chunks[number], offer.holder
    assert pool is not None, target
    body = PeerOffer(
        room=target.announcement.room,
        offer=target.number,
        chunk=number,
        pool=pool.name,
        manifest=pool.manifest if number == 0 else None,
        region=pool.region.identity,
        lists=tuple(_list_of(one, pool.manifest) for one in chunk.ranges),
        last=chunk.last,
        first_token=chunk.first_token,
        payload=chunk.payload,
        steps=tuple((step.first_layer, step.layers) for step in chunk.steps),
        ready=offer.ready[number],
    )
    return body, [one.ids for one in chunk.ranges]


def chunk_of(message: PeerOffer, ids: Sequence[PageIds], manifest: Manifest) -> Chunk:
    """Return the chunk that another daemon offers, checked against its pool's manifest.

    Raises:
        KvferryError: a list at fault, see ``page_ranges``.
    """
    steps = tuple(
        LayerStep(first_layer=first, layers=layers, event=ANY_EVENT, value=ANY_VALUE) for first, layers in message.steps
    )
    ranges = page_ranges(message.lists, ids, manifest, may_end_inside=message.last, may_lack=True)
    return Chunk(ranges, message.last, message.first_token, message.payload, steps)


def _list_of(one: PageRange, manifest: Manifest) -> PageList:
    tokens = None
    if one.end_token is not None:
        tokens = one.end_token - one.start_page * (entries_of(manifest, one.component)[0].page_tokens or 0)
    return PageList(
        component=one.component, first_page=one.first_page, pages=len(one.ids), tokens=tokens, none=one.none
    )

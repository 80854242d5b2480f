"""Chunks as they travel between daemons, and back."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.daemon.rooms.endings import name_of
from kvferry.daemon.rooms.page_ranges import PageRange, page_ranges, page_tokens_of
from kvferry.daemon.rooms.remote import RemotePool, Target
from kvferry.daemon.rooms.sides import Chunk, Piece, Promise
from kvferry.pools.runs import PageIds
from kvferry.protocol.base import PageList
from kvferry.protocol.manifests import Entry, Manifest
from kvferry.protocol.peer_messages import Part, PeerOffer
from kvferry.protocol.peer_messages import Piece as PieceMessage
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
        model=pool.model.public if pool.model and number == 0 else None,
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
        tokens = one.end_token - one.start_page * (page_tokens_of(manifest, one.component) or 0)
    return PageList(
        component=one.component, first_page=one.first_page, pages=len(one.ids), tokens=tokens, none=one.none
    )


def piece_of(piece: Piece) -> PieceMessage:
    """Return a piece of another daemon's offer as its source is told of it."""
    assert piece.offer.origin is not None, piece
    assert isinstance(piece.offer.pool, RemotePool), piece
    places = {id(entry): number for number, entry in enumerate(piece.offer.pool.manifest.entries)}
    return PieceMessage(
        room=name_of(piece.room),
        offer=piece.offer.origin.offer,
        piece=piece.piece_id,
        chunk=piece.chunk,
        parts=tuple(_part_of(promise, places) for promise in piece.promises),
    )


def _part_of(promise: Promise, places: dict[int, int]) -> Part:
    entries: list[Entry] = [pair.source for pair in promise.pairs]
    heads = tuple((pair.heads.source, pair.heads.count) if pair.heads else (0, 0) for pair in promise.pairs)
    return Part(
        component=promise.component,
        start=promise.source_start,
        pages=len(promise.plan.source.ids),
        entries=tuple(places[id(entry)] for entry in entries),
        heads=heads,
    )

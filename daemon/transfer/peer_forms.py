"""Conversion of chunks and transfer ops to and from the messages between daemons."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.daemon.transfer.completion import name_of
from kvferry.daemon.transfer.endpoints import PlannedCopy, RemoteEndpoint, SendChunk, TransferOp
from kvferry.daemon.transfer.page_ranges import page_ranges, page_tokens_of, split
from kvferry.daemon.transfer.remote import RemotePool
from kvferry.pools.planning.runs import PageIds
from kvferry.protocol.manifests import Entry, Manifest
from kvferry.protocol.peer_messages import OpRequest, PeerSend, Segment
from kvferry.protocol.transfer_messages import LayerStep

ANY_EVENT, ANY_VALUE = 0, 1
"""In steps of another daemon's chunk: only the source sees their events; it sends how many steps are ready."""


def peer_send_of(remote_endpoint: RemoteEndpoint, number: int) -> tuple[PeerSend, list[PageIds]]:
    """Return the message with chunk ``number`` of a local send request for a receive request's home, and its ids."""
    send_request = remote_endpoint.send_request
    chunk, pool = send_request.chunks[number], send_request.holder
    assert pool is not None, remote_endpoint
    lists = [
        named
        for one in chunk.ranges
        if not one.implied
        for named in split(one, page_tokens_of(pool.manifest, one.component))
    ]
    body = PeerSend(
        receive_request=remote_endpoint.announcement.receive_request,
        send_request=remote_endpoint.number,
        chunk=number,
        pool=pool.name,
        manifest=pool.manifest if number == 0 else None,
        region=pool.region.identity,
        lists=tuple(one for one, _ in lists),
        last=chunk.last,
        first_token=chunk.first_token,
        payload=chunk.payload,
        steps=tuple((step.first_layer, step.layers) for step in chunk.steps),
        ready=send_request.ready[number],
        model=pool.model.public if pool.model and number == 0 else None,
    )
    return body, [ids for _, ids in lists]


def chunk_of(message: PeerSend, ids: Sequence[PageIds], manifest: Manifest) -> SendChunk:
    """Return the chunk of another daemon's message, checked against the manifest of its pool.

    Raises:
        KvferryError: a page list does not fit the manifest, see ``page_ranges``.
    """
    steps = tuple(
        LayerStep(first_layer=first, layers=layers, event=ANY_EVENT, value=ANY_VALUE) for first, layers in message.steps
    )
    ranges = page_ranges(message.lists, ids, manifest, may_end_inside=message.last, may_lack=True)
    return SendChunk(ranges, message.last, message.first_token, message.payload, steps)


def op_of(op: TransferOp) -> OpRequest:
    """Return the message that asks the source daemon for a transfer op."""
    assert op.send_request.origin is not None, op
    assert isinstance(op.send_request.pool, RemotePool), op
    places = {id(entry): number for number, entry in enumerate(op.send_request.pool.manifest.entries)}
    return OpRequest(
        receive_request=name_of(op.receive_request),
        send_request=op.send_request.origin.send_request,
        op=op.op_id,
        chunk=op.chunk,
        segments=tuple(_segment_of(planned_copy, places) for planned_copy in op.planned_copies),
    )


def _segment_of(planned_copy: PlannedCopy, places: dict[int, int]) -> Segment:
    entries: list[Entry] = [pair.source for pair in planned_copy.pairs]
    heads = tuple((pair.heads.source, pair.heads.count) if pair.heads else (0, 0) for pair in planned_copy.pairs)
    return Segment(
        component=planned_copy.component,
        start=planned_copy.source_start,
        pages=len(planned_copy.plan.source.ids),
        entries=tuple(places[id(entry)] for entry in entries),
        heads=heads,
    )

"""Admission of a SEND or RECEIVE: its checks, holding its pages, and the transfer ops that its chunks become.

A refusal leaves the state unchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvferry.daemon.quota import Quota
from kvferry.daemon.transfer.endpoints import Held, ReceiveRequest, SendChunk, SendRequest, TransferOp, Waived
from kvferry.daemon.transfer.matching import DRAFT, Match, match
from kvferry.daemon.transfer.registry import Endpoints, StartOp, WarnTrimmed
from kvferry.pools.planning.page_ranges import check_apart, lists_with_pages
from kvferry.protocol.errors import FirstTokenTwiceError, InvalidFieldError, PageGapError, TooLargeError
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.transfer_messages import MAX_CHUNKS


def check_chunk_count(send_request: SendRequest) -> None:
    """Check that a send request may have one more chunk: each later message of the transfer looks at all of them.

    Raises:
        TooLargeError: it has ``MAX_CHUNKS``.
    """
    if len(send_request.chunks) >= MAX_CHUNKS:
        raise TooLargeError(f"{MAX_CHUNKS} SENDs of this request came from this pool: send larger chunks", field="last")


def check_continues(send_request: SendRequest, chunk: SendChunk) -> None:
    """Check that a chunk starts where the send request's last one ended, and that only one carries the first token.

    Raises:
        FirstTokenTwiceError: an earlier SEND carried the first token or payload.
        PageGapError: the chunk does not continue the one before.
    """
    if send_request.carries_token and chunk.carries_token:
        raise FirstTokenTwiceError("an earlier SEND carried the first token or payload", field="first_token")
    for one in chunk.ranges:
        before = send_request.last_range(one.component)
        if before is None:
            continue
        if one.first_page is None or before.first_page is None:
            raise PageGapError(
                f"{one.component}: a list without first_page, but several chunks have one", field=one.field
            )
        if one.kind == "paged" and one.first_page != before.end_page:
            raise PageGapError(
                f"{one.component}: the chunk starts at page {one.first_page}, the one before ended at "
                f"{before.end_page}",
                field=f"{one.field}.first_page",
            )


def check_steps(chunk: SendChunk, manifest: Manifest) -> None:
    """Check that each layer of the chunk's components is in exactly one step; steps may name other layers too.

    A layer in no step, or in two, could be copied before its bytes are there. A chunk without pages may have no steps.
    Draft layers have their own numbers, and go with the last step.

    Raises:
        InvalidFieldError: a layer is in no step or in several (the error names it), or the chunk has no pages.
    """
    if not chunk.steps:
        return
    if not any(len(one.ids) for one in chunk.ranges):
        raise InvalidFieldError("a SEND without pages has steps: leave them out", field="steps")
    listed = {one.component for one in chunk.ranges} - {DRAFT}
    layers = np.array(sorted({entry.layer for entry in manifest.entries if entry.component in listed}), np.int64)
    first, counts = np.array([(step.first_layer, step.layers) for step in chunk.steps]).T
    named = (first <= layers[:, None]) & (layers[:, None] < first + counts)
    times = named.sum(axis=1)
    for wrong, what in ((times == 0, "in no step"), (times > 1, "in more than one step")):
        if wrong.any():
            raise InvalidFieldError(
                f"layer {layers[wrong.argmax()]} is {what} ({np.count_nonzero(wrong)} layers)", field="steps"
            )


def check_together(
    receive_request: ReceiveRequest, send_requests: Sequence[SendRequest], waived: Sequence[Waived]
) -> None:
    """Check the send requests that wait for a new receive request against each other; each one fits by itself.

    Raises:
        FirstTokenTwiceError: two of them carry a first token or payload.
        UncoveredEntryError, IncompleteError: all sources have sent everything, and required cells have no source.
    """
    givers = [one for one in send_requests if receive_request.takes_token_of(one.pool.name)]
    if sum(one.carries_token for one in givers) > 1:
        raise FirstTokenTwiceError("two SENDs of this request carry a first token or payload", field="request_id")
    if len(send_requests) == receive_request.sources and all(send_request.complete for send_request in send_requests):
        receive_request.check_planned(waived)


def would_complete(receive_request: ReceiveRequest, send_request: SendRequest, chunks: Sequence[SendChunk]) -> bool:
    """Return whether, with these chunks of the send request, every source has sent its last SEND."""
    others = [one for one in receive_request.send_requests if one is not send_request]
    return (
        bool(chunks)
        and chunks[-1].last
        and len(others) + 1 == receive_request.sources
        and all(one.complete for one in others)
    )


def hold_for_writing(receive_request: ReceiveRequest, owner_id: int) -> None:
    """Make the receive request the only writer of its pages. After an error, ``release`` those that it has.

    Raises:
        KvferryError: a page is not the owner's, is named twice, or is busy.
    """
    lists = lists_with_pages(receive_request.ranges.values())
    check_apart(lists, receive_request.pool.manifest)
    for one in lists:
        held = Held(receive_request.pool.allocator_of(one.component), one.ids, written=True)
        receive_request.hold(held, owner_id, f"{one.field}.pages")


def hold_for_reading(send_request: SendRequest, chunk: SendChunk, owner_id: int) -> None:
    """Make the send request a reader of the chunk's pages. After an error, ``release`` those that it has of them.

    Raises:
        KvferryError: a page is not the owner's, or is being written.
    """
    pool = send_request.holder
    if pool is None:
        return
    for one in lists_with_pages(chunk.ranges):
        held = Held(pool.allocator_of(one.component), one.ids, written=False)
        send_request.hold(held, owner_id, f"{one.field}.pages")


# -- transfer ops


class Fit(NamedTuple):
    """The number of a send request's chunk, and what the chunk fills."""

    chunk: int
    match: Match


class CopyScheduler:
    """Makes and starts transfer ops. A chunk of less than ``whole_below_bytes`` is not split into steps."""

    def __init__(self, endpoints: Endpoints, whole_below_bytes: int, payloads: Quota) -> None:
        self._endpoints = endpoints
        self._payloads = payloads
        self._whole_below_bytes = whole_below_bytes
        self._op_ids = itertools.count(1)

    def fit(
        self, receive_request: ReceiveRequest, send_request: SendRequest, first: int, chunks: Sequence[SendChunk]
    ) -> list[Fit]:
        """Match a send request's chunks, of numbers from ``first`` on, and mark their cells as planned.

        On an error, nothing is planned.

        Raises:
            KvferryError: a chunk does not fit, or all sources are done and cells are missing.
        """
        fits: list[Fit] = []
        try:
            for number, chunk in enumerate(chunks, first):
                found = match(chunk, send_request.pool, receive_request, self._whole_below_bytes)
                fits.append(Fit(number, found))
                for planned_copy in found.planned_copies:
                    receive_request.coverage[planned_copy.component].plan(planned_copy.cells)
            if would_complete(receive_request, send_request, chunks):
                receive_request.check_planned([one for fit in fits for one in fit.match.waived])
        except Exception:
            self.withdraw(receive_request, fits)
            raise
        return fits

    def withdraw(self, receive_request: ReceiveRequest, fits: Sequence[Fit]) -> None:
        """Undo what ``fit`` planned."""
        for fit in fits:
            for planned_copy in fit.match.planned_copies:
                receive_request.coverage[planned_copy.component].withdraw(planned_copy.cells)

    def join(self, receive_request: ReceiveRequest, send_request: SendRequest) -> None:
        """Match the two endpoints: a failure of one now fails the other."""
        receive_request.send_requests.append(send_request)
        send_request.receive_requests.append(receive_request)

    def start(self, receive_request: ReceiveRequest, send_request: SendRequest, fit: Fit, now: float) -> None:
        """Join the send request to the receive request, and start the chunk's transfer ops whose step is ready."""
        if send_request not in receive_request.send_requests:
            self.join(receive_request, send_request)
        found = fit.match
        payload = send_request.chunks[fit.chunk].payload
        self._payloads.keep(receive_request.session_id, (receive_request.key, receive_request.generation), len(payload))
        for endpoint in (receive_request, send_request):
            endpoint.skipped_source_entries = max(endpoint.skipped_source_entries, found.skipped_source_entries)
            endpoint.covered_source_entries = max(endpoint.covered_source_entries, found.covered_source_entries)
            endpoint.skipped_source_pages += found.skipped_source_pages
            endpoint.trimmed_pages += found.trimmed_pages
        self._endpoints.effects.extend(WarnTrimmed(send_request, receive_request, trim) for trim in found.trims)
        for waived in found.waived:
            receive_request.coverage[waived.component].waive(waived.cells)
        steps = sorted({planned_copy.step for planned_copy in found.planned_copies})
        for step in steps:
            planned_copies = tuple(one for one in found.planned_copies if one.step == step)
            op = TransferOp(next(self._op_ids), send_request, receive_request, planned_copies, fit.chunk, step)
            receive_request.waiting.append(op)
            self._endpoints.ops[op.op_id] = receive_request.ops[op.op_id] = op
        self.start_ready(receive_request, now)

    def start_ready(self, receive_request: ReceiveRequest, now: float) -> None:
        """Start the receive request's waiting transfer ops whose step is ready."""
        waiting: list[TransferOp] = []
        started: list[StartOp] = []
        for op in receive_request.waiting:
            if not op.ready:
                waiting.append(op)
                continue
            for endpoint in (receive_request, op.send_request):
                endpoint.first_copy_at = now if endpoint.first_copy_at is None else endpoint.first_copy_at
                endpoint.changed_at = now
            plans = tuple(planned_copy.plan for planned_copy in op.planned_copies)
            started.append(
                StartOp(
                    op.op_id,
                    op.send_request.pool,
                    receive_request.pool,
                    plans,
                    receive_request.request_id,
                    op.checksums,
                )
            )
        self._endpoints.effects.extend(started)
        receive_request.waiting = waiting  # nothing between the two may raise: an op waits, or is started

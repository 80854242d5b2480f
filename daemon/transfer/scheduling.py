"""Makes transfer ops of accepted chunks: matches them, reserves cells, splits by steps, and starts what is ready."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from kvferry.daemon.transfer.admission import withdraw, would_complete
from kvferry.daemon.transfer.effects import StartOp, WarnTrimmed
from kvferry.daemon.transfer.endpoints import ReceiveRequest, SendChunk, SendRequest, TransferOp
from kvferry.daemon.transfer.matching import Match, match
from kvferry.daemon.transfer.payloads import KeptPayloads
from kvferry.daemon.transfer.registry import Endpoints
from kvferry.protocol.errors import KvferryError


class Fit(NamedTuple):
    """The number of a send request's chunk, and what the chunk fills."""

    chunk: int
    match: Match


class CopyScheduler:
    """Makes and starts transfer ops. A chunk of less than ``whole_below_bytes`` is not split into steps."""

    def __init__(self, endpoints: Endpoints, whole_below_bytes: int, payloads: KeptPayloads) -> None:
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
                for planned_copy in found.planned_copies:
                    receive_request.coverage[planned_copy.component].plan(planned_copy.cells)
                fits.append(Fit(number, found))
            if would_complete(receive_request, send_request, chunks):
                receive_request.check_planned([one for fit in fits for one in fit.match.excused])
        except KvferryError:
            self.withdraw(receive_request, fits)
            raise
        return fits

    def withdraw(self, receive_request: ReceiveRequest, fits: Sequence[Fit]) -> None:
        """Undo what ``fit`` planned."""
        withdraw([(receive_request, [fit.match for fit in fits])])

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
        self._payloads.keep(receive_request.session_id, receive_request.key, receive_request.generation, len(payload))
        for endpoint in (receive_request, send_request):
            endpoint.skipped_source_entries = max(endpoint.skipped_source_entries, found.skipped_source_entries)
            endpoint.covered_source_entries = max(endpoint.covered_source_entries, found.covered_source_entries)
            endpoint.skipped_source_pages += found.skipped_source_pages
            endpoint.trimmed_pages += found.trimmed_pages
        self._endpoints.effects.extend(WarnTrimmed(send_request, receive_request, trim) for trim in found.trims)
        for excused in found.excused:
            receive_request.coverage[excused.component].excuse(excused.cells)
        steps = sorted({planned_copy.step for planned_copy in found.planned_copies})
        for step in steps:
            planned_copies = tuple(one for one in found.planned_copies if one.step == step)
            op = TransferOp(next(self._op_ids), send_request, receive_request, planned_copies, fit.chunk, step)
            self._endpoints.ops[op.op_id] = receive_request.ops[op.op_id] = op
            receive_request.waiting.append(op)
        self.start_ready(receive_request, now)

    def start_ready(self, receive_request: ReceiveRequest, now: float) -> None:
        """Start the receive request's waiting transfer ops whose step is ready."""
        ready = [op for op in receive_request.waiting if op.ready]
        for op in ready:
            receive_request.waiting.remove(op)
            for endpoint in (receive_request, op.send_request):
                endpoint.first_copy_at = now if endpoint.first_copy_at is None else endpoint.first_copy_at
            plans = tuple(planned_copy.plan for planned_copy in op.planned_copies)
            self._endpoints.effects.append(
                StartOp(op.op_id, op.send_request.pool, receive_request.pool, plans, receive_request.request_id)
            )

"""Ends endpoints: they finish when the outcome is known, and settle when no byte can move any more.

Executes the table of ``transitions``, without I/O: effects are added to the registry.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

from kvferry.daemon.transfer.endpoints import (
    Announcement,
    Endpoint,
    ReceiveRequest,
    RemoteEndpoint,
    SendRequest,
)
from kvferry.daemon.transfer.kept import KeptPayloads, Results
from kvferry.daemon.transfer.registry import (
    Endpoints,
    Notify,
    ReportBug,
    SendToDaemon,
    SendToPeer,
    StopOp,
    StopSending,
)
from kvferry.daemon.transfer.transitions import (
    TRANSITIONS,
    Event,
    Kind,
    Notice,
    Outcome,
    Result,
    State,
    Transition,
    Transitions,
    bug_in,
)
from kvferry.pools.planning.page_ranges import lists_with_pages
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.events import Settled
from kvferry.protocol.peer_messages import ReceiveClosed, SendWithdrawn
from kvferry.protocol.transfer_messages import TransferResult

AnyEndpoint: TypeAlias = SendRequest | ReceiveRequest | RemoteEndpoint


class Completion:
    """Ends endpoints, and with each one the endpoints that end because of it."""

    def __init__(
        self, endpoints: Endpoints, results: Results, payloads: KeptPayloads, transitions: Transitions = TRANSITIONS
    ) -> None:
        self._payloads = payloads
        self._endpoints = endpoints
        self._results = results
        self._transitions = transitions

    def apply(
        self,
        endpoint: AnyEndpoint,
        event: Event,
        now: float,
        *,
        cause: KvferryError | None = None,
        detail: str = "",
        matched_detail: str = "",
    ) -> None:
        """Execute the table's row for an event of an endpoint.

        Args:
            endpoint: an endpoint that has not settled.
            event: what happened.
            now: the time.
            cause: the error in rows that finish with the cause.
            detail: the text of errors whose type the table names.
            matched_detail: that text for the matched endpoints, if it differs.
        """
        row = self._row(endpoint.kind, endpoint.state, event, endpoint.request_id)
        if row.notice is Notice.REFUSE and cause is not None and isinstance(endpoint, SendRequest) and endpoint.origin:
            self._endpoints.refuse(endpoint.origin, cause)
        if row.state is not State.FINISHED or endpoint.state is not State.OPEN:
            return
        own, matched = _error(row.own, cause, detail), _error(row.matched, cause, matched_detail or detail)
        if row.tombstone and matched is not None and not isinstance(endpoint, RemoteEndpoint):
            self._bury(endpoint, matched, now)
        if isinstance(endpoint, ReceiveRequest):
            self._finish_receive(endpoint, row, own, matched, now)
        elif isinstance(endpoint, SendRequest):
            self._finish_send(endpoint, own, matched, now)
        else:
            self._finish_remote(endpoint, row, matched, now)

    def close(
        self,
        announcement: Announcement,
        event: Event,
        now: float,
        *,
        unmet: bool = False,
        cause: KvferryError | None = None,
        detail: str = "",
    ) -> None:
        """End another daemon's receive request for the send requests that joined it; ``unmet``: some had not come."""
        row = self._row(Kind.REMOTE_RECEIVE, State.OPEN, event, announcement.half.request_id)
        error = _error(row.matched, cause, detail)
        if row.tombstone and unmet and error is not None:
            met = [one.send_request.pool.name for one in announcement.remote_endpoints]
            self._endpoints.tombstones.bury(announcement.half, announcement.listener, error, now, met)
        self._endpoints.withdraw(announcement)
        for remote_endpoint in list(announcement.remote_endpoints):
            self.apply(remote_endpoint, event, now, cause=cause, detail=detail)

    def check_done(self, receive_request: ReceiveRequest, now: float) -> None:
        """Finish the receive request if all sources are done and no copy is left."""
        if receive_request.state is not State.OPEN or receive_request.ops or not receive_request.all_planned:
            return
        if all(coverage.complete for coverage in receive_request.coverage.values()):
            self.apply(receive_request, Event.COMPLETE, now)
        else:
            self.apply(receive_request, Event.CELLS_MISSING, now, detail="all copies ended, but cells are missing")

    def check_settled(self, endpoint: AnyEndpoint) -> None:
        """Settle a finished endpoint that has no copy in progress; a send request once its receive requests settled."""
        if isinstance(endpoint, SendRequest):
            is_busy = any(one.state is not State.SETTLED for one in endpoint.receive_requests)
        elif isinstance(endpoint, ReceiveRequest):
            is_busy = bool(endpoint.ops)
        else:
            is_busy = bool(endpoint.sending)
        if is_busy or endpoint.state is State.SETTLED:
            return
        row = self._row(endpoint.kind, endpoint.state, Event.NOTHING_UNDER_WAY, endpoint.request_id)
        if row.state is State.SETTLED:
            self._settle(endpoint)

    def receiver_ended(self, send_request: SendRequest, error: KvferryError | None, now: float) -> None:
        """Record the outcome of one of a send request's receive requests; the last one finishes the send request."""
        send_request.outcomes.append(error)
        if len(send_request.outcomes) != send_request.destinations:
            return
        failed = next((one for one in send_request.outcomes if one), None)
        event = Event.RECEIVERS_DONE if failed is None else Event.RECEIVERS_FAILED
        self.apply(send_request, event, now, cause=failed)

    def _row(self, kind: Kind, state: State, event: Event, request_id: str) -> Transition:
        """Return the table's row, or that of a bug, which is reported."""
        row = self._transitions.get((kind, state, event))
        if row is not None:
            return row
        bug = f"{kind.value}, {state.value}: no transition for: {event.value}"
        self._endpoints.effects.append(ReportBug(request_id, bug))
        return bug_in(state)

    def _finish_receive(
        self,
        receive_request: ReceiveRequest,
        row: Transition,
        own: KvferryError | None,
        matched: KvferryError | None,
        now: float,
    ) -> None:
        receive_request.state = State.FINISHED
        self._endpoints.deadlines.drop(receive_request)
        event = receive_request.finished_event(own, now)
        self._notify(receive_request, TransferResult(state="finished", finished=event))
        if own is not None:
            self._payloads.drop(receive_request.session_id, receive_request.key, receive_request.generation)
        if row.notice is Notice.CLOSE:
            self._close_at_sources(receive_request, matched, receive_request.unmet if row.tombstone else 0)
        for op in receive_request.waiting:  # these have not been started
            del self._endpoints.ops[op.op_id], receive_request.ops[op.op_id]
        receive_request.waiting.clear()
        self._endpoints.effects.extend(StopOp(op_id) for op_id in receive_request.ops)
        for send_request in list(receive_request.send_requests):
            self.receiver_ended(send_request, matched, now)
        self.check_settled(receive_request)

    def _finish_send(
        self, send_request: SendRequest, own: KvferryError | None, matched: KvferryError | None, now: float
    ) -> None:
        send_request.state = State.FINISHED
        self._endpoints.deadlines.drop(send_request)
        event = send_request.finished_event(own, now)
        self._notify(send_request, TransferResult(state="finished", finished=event))
        if matched is not None:
            for one in [one for one in send_request.receive_requests if one.state is State.OPEN]:
                self.apply(one, Event.MATCHED_FAILED, now, cause=matched)
        self.check_settled(send_request)

    def _finish_remote(
        self, remote_endpoint: RemoteEndpoint, row: Transition, error: KvferryError | None, now: float
    ) -> None:
        remote_endpoint.state = State.FINISHED
        announcement = remote_endpoint.announcement
        if row.notice is Notice.WITHDRAW and error is not None:
            withdrawn = SendWithdrawn(
                receive_request=announcement.receive_request, send_request=remote_endpoint.number, error=error.info()
            )
            self._endpoints.effects.append(SendToPeer(announcement.home, withdrawn))
        if remote_endpoint in announcement.remote_endpoints:
            announcement.remote_endpoints.remove(remote_endpoint)
        if remote_endpoint.sending:
            self._endpoints.effects.append(StopSending(remote_endpoint))
        self.receiver_ended(remote_endpoint.send_request, error, now)
        self.check_settled(remote_endpoint)

    def _close_at_sources(self, receive_request: ReceiveRequest, error: KvferryError | None, unmet: int) -> None:
        moved: dict[str, list[tuple[int, int, int]]] = {address: [] for address in receive_request.source_daemons}
        for send_request in receive_request.send_requests:
            if send_request.origin is not None:
                found = (send_request.origin.send_request, send_request.moved_bytes, send_request.trimmed_pages)
                moved.setdefault(send_request.origin.peer.address, []).append(found)
        info = error.info() if error else None
        for address, of_sends in moved.items():
            closed = ReceiveClosed(receive_request=receive_request.name, error=info, moved=tuple(of_sends), unmet=unmet)
            self._endpoints.effects.append(SendToDaemon(address, closed))

    def _bury(self, endpoint: SendRequest | ReceiveRequest, error: KvferryError, now: float) -> None:
        """Leave a tombstone of an endpoint, if some that would match it have not come."""
        if not endpoint.unmet:
            return
        if isinstance(endpoint, ReceiveRequest):
            met: list[Hashable] = [one.pool.name for one in endpoint.send_requests if one.origin is None]
        else:
            met = [receive_request.listener for receive_request in endpoint.receive_requests]
        self._endpoints.tombstones.bury(endpoint.half, endpoint.key.pool, error, now, met)

    def _settle(self, endpoint: AnyEndpoint) -> None:
        if isinstance(endpoint, ReceiveRequest):
            for one in lists_with_pages(endpoint.ranges.values()):
                endpoint.pool.allocator_of(one.component).end_write(one.ids)
            self._leave(endpoint)
            for send_request in endpoint.send_requests:
                self.check_settled(send_request)
        elif isinstance(endpoint, RemoteEndpoint):
            endpoint.state = State.SETTLED
            del self._endpoints.remote_endpoints[endpoint.number]
            self.check_settled(endpoint.send_request)
        else:
            if endpoint.holder is not None:
                for one in lists_with_pages(one for chunk in endpoint.chunks for one in chunk.ranges):
                    endpoint.holder.allocator_of(one.component).end_read(one.ids)
            self._leave(endpoint)

    def _leave(self, endpoint: SendRequest | ReceiveRequest) -> None:
        if isinstance(endpoint, SendRequest):
            self._payloads.drop(endpoint.session_id, endpoint.key, endpoint.generation)
        endpoint.state = State.SETTLED
        self._endpoints.leave(endpoint)
        key = endpoint.key
        settled = Settled(
            request_id=key.request_id, pool=key.pool, direction=endpoint.direction, generation=endpoint.generation
        )
        self._notify(endpoint, TransferResult(state="settled", settled=settled))

    def _notify(self, endpoint: Endpoint, news: TransferResult) -> None:
        if isinstance(endpoint, SendRequest) and endpoint.origin is not None:
            return
        self._results.add(endpoint.session_id, endpoint.key, news)
        event = news.settled or news.finished
        if event is not None:
            self._endpoints.effects.append(Notify(endpoint.session_id, event))


def _error(result: Result, cause: KvferryError | None, detail: str) -> KvferryError | None:
    """Return the error for a column of a row; None for success and for an empty column."""
    if not isinstance(result, Outcome):
        return result(detail)
    return cause if result is Outcome.CAUSE else None

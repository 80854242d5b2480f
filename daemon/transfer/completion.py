"""Ends endpoints: they finish when the outcome is known, and settle when no byte can move any more.

Executes the table of ``transitions``, without I/O: effects are added to the registry.

Anything may raise, if only for want of memory. What raises before a message was accepted refuses it. After that, all
endpoints of its request end with INTERNAL, each once. If the end of an endpoint itself raises, nobody knows how far it
came: the endpoint is quarantined. Its session hears FINISHED, but never SETTLED, and its pages stay held.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Final, TypeAlias

from kvferry.daemon.quota import Quota
from kvferry.daemon.transfer.endpoints import (
    Announcement,
    Endpoint,
    ReceiveRequest,
    RemoteEndpoint,
    SendRequest,
)
from kvferry.daemon.transfer.kept import Results
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
from kvferry.protocol.errors import InternalError, KvferryError
from kvferry.protocol.events import Finished, Settled
from kvferry.protocol.peer_messages import ReceiveClosed, SendWithdrawn
from kvferry.protocol.transfer_messages import TransferResult

AnyEndpoint: TypeAlias = SendRequest | ReceiveRequest | RemoteEndpoint
_OVER: Final = frozenset({State.SETTLED, State.QUARANTINED})


class Completion:
    """Ends endpoints, and with each one the endpoints that end because of it."""

    def __init__(
        self, endpoints: Endpoints, results: Results, payloads: Quota, transitions: Transitions = TRANSITIONS
    ) -> None:
        self._payloads = payloads
        self._endpoints = endpoints
        self._results = results
        self._transitions = transitions

    @contextlib.contextmanager
    def ending(self, request_id: str, now: float, endpoint: AnyEndpoint | None = None) -> Iterator[None]:
        """Run a block that changes a request; if it raises, ``break_off`` and go on."""
        try:
            yield
        except Exception as cause:  # noqa: BLE001  a bug in one transfer must not stop the others
            self.break_off(request_id, cause, now, endpoint)

    def break_off(self, request_id: str, cause: Exception, now: float, endpoint: AnyEndpoint | None = None) -> None:
        """End all open endpoints of a request here: nobody knows how far what raised ``cause`` had come.

        Args:
            request_id: the request.
            cause: what was raised.
            now: the time.
            endpoint: one that the registry may not have.
        """
        error = InternalError(f"the transfer broke off: {type(cause).__name__}: {cause}")
        self._endpoints.effects.append(ReportBug(request_id, error.detail, cause))
        more = [] if endpoint is None else [endpoint]
        for one in dict.fromkeys([*self._endpoints.all_of_request(request_id), *more]):
            if isinstance(one, RemoteEndpoint):
                self._endpoints.withdraw(one.announcement)  # its home may have said already that it is over
            if one.state is State.OPEN:
                self.apply(one, Event.BROKEN_OFF, now, cause=error)
            else:
                self.check_settled(one, now)

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
        if endpoint.state is State.QUARANTINED:
            return
        row = self._row(endpoint, event)
        if row.notice is Notice.REFUSE and cause is not None and isinstance(endpoint, SendRequest) and endpoint.origin:
            self._endpoints.refuse(endpoint.origin, cause)
        if row.state is not State.FINISHED or endpoint.state is not State.OPEN:
            return
        own, matched = _error(row.own, cause, detail), _error(row.matched, cause, matched_detail or detail)
        endpoint.state = State.FINISHED
        try:
            if row.tombstone and matched is not None and not isinstance(endpoint, RemoteEndpoint):
                self._bury(endpoint, matched, now)
            if isinstance(endpoint, ReceiveRequest):
                self._finish_receive(endpoint, row, own, matched, now)
            elif isinstance(endpoint, SendRequest):
                self._finish_send(endpoint, own, matched, now)
            else:
                self._finish_remote(endpoint, row, matched, now)
            if endpoint.state is State.FINISHED:
                self._check_settled(endpoint, now)
        except Exception as again:  # noqa: BLE001  it ends once
            self._quarantine(endpoint, again, now)

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
        row = self._row_of(Kind.REMOTE_RECEIVE, State.OPEN, event, announcement.half.request_id)
        error = _error(row.matched, cause, detail)
        if row.tombstone and unmet and error is not None:
            met = [one.send_request.pool.name for one in announcement.remote_endpoints]
            self._endpoints.tombstones.bury(
                announcement.half, announcement.listener, error, now, met, announcement.destinations
            )
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

    def check_settled(self, endpoint: AnyEndpoint, now: float) -> None:
        """Settle a finished endpoint that has no copy in progress; a send request once its receive requests settled."""
        if endpoint.state is not State.FINISHED:
            return
        try:
            self._check_settled(endpoint, now)
        except Exception as cause:  # noqa: BLE001  it ends once
            self._quarantine(endpoint, cause, now)

    def _check_settled(self, endpoint: AnyEndpoint, now: float) -> None:
        if isinstance(endpoint, SendRequest):
            states = {one.state for one in endpoint.receive_requests}
            is_busy = not states <= _OVER
            if not is_busy and State.QUARANTINED in states:
                self._give_up(endpoint)
                return
        else:
            is_busy = bool(endpoint.ops if isinstance(endpoint, ReceiveRequest) else endpoint.sending)
        row = None if is_busy else self._row(endpoint, Event.NOTHING_UNDER_WAY)
        if row is not None and row.state is State.SETTLED:
            self._settle(endpoint, now)

    def _quarantine(self, endpoint: AnyEndpoint, cause: Exception, now: float) -> None:
        """Give up an endpoint whose end raised, tell its session once, and end all others of its request."""
        self._give_up(endpoint)
        if not isinstance(endpoint, RemoteEndpoint):
            known = self._results.get(endpoint.session_id, endpoint.key)
            if known is None or known.finished is None:
                key, error = endpoint.key, InternalError(f"the transfer's end failed: {type(cause).__name__}: {cause}")
                error.request_id = key.request_id
                event = Finished(
                    request_id=key.request_id,
                    pool=key.pool,
                    direction=key.direction,
                    generation=endpoint.generation,
                    error=error.info(),
                )
                self._notify(endpoint, TransferResult(state="finished", finished=event), event)
        self.break_off(endpoint.request_id, cause, now)
        for send_request in endpoint.send_requests if isinstance(endpoint, ReceiveRequest) else ():
            self.check_settled(send_request, now)
        if isinstance(endpoint, RemoteEndpoint):
            self.check_settled(endpoint.send_request, now)

    def _give_up(self, endpoint: AnyEndpoint) -> None:
        endpoint.state = self._row(endpoint, Event.END_RAISED).state
        self._endpoints.quarantine(endpoint)

    def receiver_ended(
        self,
        send_request: SendRequest,
        receiver: ReceiveRequest | RemoteEndpoint,
        error: KvferryError | None,
        now: float,
    ) -> None:
        """Record the outcome of one of a send request's receive requests; the last one finishes the send request."""
        send_request.outcomes[receiver] = error
        if len(send_request.outcomes) != send_request.destinations:
            return
        failed = next((one for one in send_request.outcomes.values() if one), None)
        event = Event.RECEIVERS_DONE if failed is None else Event.RECEIVERS_FAILED
        self.apply(send_request, event, now, cause=failed)

    def _row(self, endpoint: AnyEndpoint, event: Event) -> Transition:
        """Return the table's row, or that of a bug, which is reported."""
        return self._row_of(endpoint.kind, endpoint.state, event, endpoint.request_id)

    def _row_of(self, kind: Kind, state: State, event: Event, request_id: str) -> Transition:
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
        self._endpoints.deadlines.drop(receive_request)
        self._tell_finished(receive_request, own, now)
        if own is not None:
            self._payloads.drop(receive_request.session_id, (receive_request.key, receive_request.generation))
        if row.notice is Notice.CLOSE:
            self._close_at_sources(receive_request, matched, receive_request.unmet if row.tombstone else 0)
        for op in receive_request.waiting:  # these have not been started
            self._endpoints.ops.pop(op.op_id, None)
            receive_request.ops.pop(op.op_id, None)
        receive_request.waiting = []
        self._endpoints.effects.extend(StopOp(op_id) for op_id in receive_request.ops)
        for send_request in list(receive_request.send_requests):
            self.receiver_ended(send_request, receive_request, matched, now)

    def _finish_send(
        self, send_request: SendRequest, own: KvferryError | None, matched: KvferryError | None, now: float
    ) -> None:
        self._endpoints.deadlines.drop(send_request)
        self._tell_finished(send_request, own, now)
        if matched is not None:
            for one in [one for one in send_request.receive_requests if one.state is State.OPEN]:
                self.apply(one, Event.MATCHED_FAILED, now, cause=matched)

    def _finish_remote(
        self, remote_endpoint: RemoteEndpoint, row: Transition, error: KvferryError | None, now: float
    ) -> None:
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
        self.receiver_ended(remote_endpoint.send_request, remote_endpoint, error, now)

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
        members = 1
        if isinstance(endpoint, ReceiveRequest):
            met: list[Hashable] = [one.pool.name for one in endpoint.send_requests if one.origin is None]
            members = endpoint.destinations
        else:
            met = [receive_request.listener for receive_request in endpoint.receive_requests]
        self._endpoints.tombstones.bury(endpoint.half, endpoint.key.pool, error, now, met, members)

    def _settle(self, endpoint: AnyEndpoint, now: float) -> None:
        if isinstance(endpoint, RemoteEndpoint):
            self._endpoints.remote_endpoints.pop(endpoint.number, None)
            endpoint.state = State.SETTLED
            self.check_settled(endpoint.send_request, now)
            return
        endpoint.release()
        if isinstance(endpoint, SendRequest):
            self._payloads.drop(endpoint.session_id, (endpoint.key, endpoint.generation))
        key = endpoint.key
        settled = Settled(
            request_id=key.request_id, pool=key.pool, direction=endpoint.direction, generation=endpoint.generation
        )
        self._notify(endpoint, TransferResult(state="settled", settled=settled), settled)
        self._endpoints.leave(endpoint)
        endpoint.state = State.SETTLED
        if isinstance(endpoint, SendRequest):
            endpoint.forget_receivers()
            return
        for send_request in endpoint.send_requests:
            self.check_settled(send_request, now)

    def _tell_finished(self, endpoint: SendRequest | ReceiveRequest, error: KvferryError | None, now: float) -> None:
        event = endpoint.finished_event(error, now)
        self._notify(endpoint, TransferResult(state="finished", finished=event), event)

    def _notify(self, endpoint: Endpoint, news: TransferResult, event: Finished | Settled) -> None:
        if isinstance(endpoint, SendRequest) and endpoint.origin is not None:
            return
        self._results.add(endpoint.session_id, endpoint.key, news)
        self._endpoints.effects.append(Notify(endpoint.session_id, event))


def _error(result: Result, cause: KvferryError | None, detail: str) -> KvferryError | None:
    """Return the error for a column of a row; None for success and for an empty column."""
    if not isinstance(result, Outcome):
        return result(detail)
    return cause if result is Outcome.CAUSE else None

"""Ends endpoints: they finish when the outcome is known, and settle when no byte can move any more.

Executes the table of ``transitions``, without I/O: effects are added to the registry.

Anything may raise, if only for want of memory. So every step here may be repeated: what raised between the acceptance
of a message and the last event of its transfer is caught by ``whole``, and all endpoints of the request end with
INTERNAL, from wherever they had come to.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import TracebackType
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

BREAK_OFF_AGAIN_S: Final = 1.0
_ATTEMPTS: Final = 3
"""How often it is tried to end a request that broke off, before that is left for later."""


class Whole:
    """A block that changes a request: where it raises, what there is of the request ends. See ``Completion.whole``."""

    __slots__ = ("_completion", "_endpoint", "_now", "_request_id")

    def __init__(self, completion: Completion, request_id: str, now: float, endpoint: AnyEndpoint | None) -> None:
        self._completion = completion
        self._request_id = request_id
        self._now = now
        self._endpoint = endpoint

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """End the request, if the block raised."""
        if not isinstance(error, Exception):
            return False
        self._completion.break_off(self._request_id, error, self._now, self._endpoint)
        return True


class Completion:
    """Ends endpoints, and with each one the endpoints that end because of it.

    Attributes:
        broken: the requests that broke off and could not be ended yet, with their error.
        retry_at: when to try that again.
    """

    def __init__(
        self, endpoints: Endpoints, results: Results, payloads: Quota, transitions: Transitions = TRANSITIONS
    ) -> None:
        self.broken: dict[str, KvferryError] = {}
        self.retry_at = 0.0
        self._payloads = payloads
        self._endpoints = endpoints
        self._results = results
        self._transitions = transitions

    def whole(self, request_id: str, now: float, endpoint: AnyEndpoint | None = None) -> Whole:
        """Return a context that ends all endpoints of a request with INTERNAL if its block raises, and goes on.

        Args:
            request_id: the request that the block changes.
            now: the time.
            endpoint: one that the registry may not have.
        """
        return Whole(self, request_id, now, endpoint)

    def break_off(self, request_id: str, cause: Exception, now: float, endpoint: AnyEndpoint | None = None) -> None:
        """End all endpoints of a request here: nobody knows how far what raised ``cause`` had come."""
        error = InternalError(f"the transfer broke off: {type(cause).__name__}: {cause}")
        self._endpoints.effects.append(ReportBug(request_id, error.detail, cause))
        self._end_broken(request_id, error, now, [] if endpoint is None else [endpoint])

    def retry_broken(self, now: float) -> None:
        """Try again to end what broke off and could not be ended."""
        broken, self.broken = self.broken, {}
        for request_id, error in broken.items():
            self._end_broken(request_id, error, now, [])

    def _end_broken(self, request_id: str, error: KvferryError, now: float, more: list[AnyEndpoint]) -> None:
        failed: Exception | None = None
        for _ in range(_ATTEMPTS):
            failed = None
            endpoints = dict.fromkeys([*self._endpoints.all_of_request(request_id), *more])
            for endpoint in endpoints:
                if endpoint.state is State.FINISHED and not endpoint.ended:
                    endpoint.state = State.OPEN  # it broke while it finished: that again
            for endpoint in endpoints:
                try:
                    self._end_one_broken(endpoint, error, now)
                except Exception as again:  # noqa: BLE001  the others end all the same
                    failed = again
            if failed is None:
                return
        self._endpoints.effects.append(ReportBug(request_id, "a request that broke off could not be ended", failed))
        self.broken[request_id] = error
        self.retry_at = now + BREAK_OFF_AGAIN_S

    def _end_one_broken(self, endpoint: AnyEndpoint, error: KvferryError, now: float) -> None:
        if isinstance(endpoint, RemoteEndpoint):
            self._endpoints.withdraw(endpoint.announcement)  # its home may have said already that it is over
        if endpoint.state is State.OPEN:
            self.apply(endpoint, Event.BROKEN_OFF, now, cause=error)
        else:
            self.check_settled(endpoint)

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
        if receive_request.told is State.OPEN:
            self._tell_finished(receive_request, own, now)
            if own is not None:
                self._payloads.drop(receive_request.session_id, (receive_request.key, receive_request.generation))
        if row.notice is Notice.CLOSE:
            self._close_at_sources(receive_request, matched, receive_request.unmet if row.tombstone else 0)
        while receive_request.waiting:  # these have not been started
            op_id = receive_request.waiting[-1].op_id
            self._endpoints.ops.pop(op_id, None)
            receive_request.ops.pop(op_id, None)
            receive_request.waiting.pop()
        self._endpoints.effects.extend(StopOp(op_id) for op_id in receive_request.ops)
        for send_request in list(receive_request.send_requests):
            self.receiver_ended(send_request, receive_request, matched, now)
        receive_request.ended = True
        self.check_settled(receive_request)

    def _finish_send(
        self, send_request: SendRequest, own: KvferryError | None, matched: KvferryError | None, now: float
    ) -> None:
        send_request.state = State.FINISHED
        self._endpoints.deadlines.drop(send_request)
        if send_request.told is State.OPEN:
            self._tell_finished(send_request, own, now)
        if matched is not None:
            for one in [one for one in send_request.receive_requests if one.state is State.OPEN]:
                self.apply(one, Event.MATCHED_FAILED, now, cause=matched)
        send_request.ended = True
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
        self.receiver_ended(remote_endpoint.send_request, remote_endpoint, error, now)
        remote_endpoint.ended = True
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
            self._leave(endpoint)
            for send_request in endpoint.send_requests:
                self.check_settled(send_request)
        elif isinstance(endpoint, RemoteEndpoint):
            self._endpoints.remote_endpoints.pop(endpoint.number, None)
            endpoint.state = State.SETTLED
            self.check_settled(endpoint.send_request)
        else:
            self._leave(endpoint)

    def _leave(self, endpoint: SendRequest | ReceiveRequest) -> None:
        endpoint.release()
        if isinstance(endpoint, SendRequest):
            self._payloads.drop(endpoint.session_id, (endpoint.key, endpoint.generation))
        if endpoint.told is not State.SETTLED:
            key = endpoint.key
            settled = Settled(
                request_id=key.request_id, pool=key.pool, direction=endpoint.direction, generation=endpoint.generation
            )
            self._notify(endpoint, TransferResult(state="settled", settled=settled), settled)
            endpoint.told = State.SETTLED
        self._endpoints.leave(endpoint)
        endpoint.state = State.SETTLED
        if isinstance(endpoint, SendRequest):
            endpoint.forget_receivers()

    def _tell_finished(self, endpoint: SendRequest | ReceiveRequest, error: KvferryError | None, now: float) -> None:
        event = endpoint.finished_event(error, now)
        self._notify(endpoint, TransferResult(state="finished", finished=event), event)
        endpoint.told = State.FINISHED

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

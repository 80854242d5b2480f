"""How sides end: finishing, when the outcome is known, and settling, when no byte can move any more.

Sans I/O; every step leaves its effects in the registry.
"""

from __future__ import annotations

from collections.abc import Hashable

from kvferry.daemon.transfer.effects import CloseReceive, Notify, StopOp, StopSending, Withdraw
from kvferry.daemon.transfer.endpoints import Announcement, Endpoint, ReceiveRequest, RemoteEndpoint, SendRequest, State
from kvferry.daemon.transfer.registry import Endpoints
from kvferry.daemon.transfer.results import Results
from kvferry.daemon.transfer.tombstones import Half
from kvferry.protocol.errors import InternalError, KvferryError
from kvferry.protocol.events import Settled
from kvferry.protocol.peer_messages import ReceiveName
from kvferry.protocol.transfer_messages import TransferResult


class Completion:
    """Ends sides, each together with those that end because of it."""

    def __init__(self, endpoints: Endpoints, results: Results) -> None:
        self._endpoints = endpoints
        self._results = results

    def check_done(self, receive_request: ReceiveRequest, now: float) -> None:
        """Finish the receive request if all is there."""
        if receive_request.state is not State.OPEN or receive_request.ops or not receive_request.all_planned:
            return
        if not all(coverage.complete for coverage in receive_request.coverage.values()):
            bug = InternalError("all copies ended, but cells are missing")
            self.fail_receive(receive_request, bug, bug, now)
            return
        self._finish_receive(receive_request, None, None, now)
        for send_request in list(receive_request.send_requests):
            self.receive_finished(send_request, None, now)
        self.settle_receive(receive_request)

    def end(self, endpoint: SendRequest | ReceiveRequest, own: KvferryError, peers: KvferryError, now: float) -> None:
        """End an open side by its own doing: who of the other side is not there yet hears of it when he comes."""
        if isinstance(endpoint, ReceiveRequest):
            endpoint.ended_itself = True
            missing = endpoint.unmet_sources
            met: list[Hashable] = [
                send_request.pool.name for send_request in endpoint.send_requests if send_request.origin is None
            ]
        else:
            missing = endpoint.destinations - len(endpoint.receive_requests)
            met = [_listener(receive_request) for receive_request in endpoint.receive_requests]
        if missing:
            key = endpoint.key
            self._endpoints.tombstones.bury(
                Half(key.tenant, key.request_id, endpoint.direction), key.pool, peers, now, met
            )
        self.fail(endpoint, own, peers, now)

    def fail(self, endpoint: SendRequest | ReceiveRequest, own: KvferryError, peers: KvferryError, now: float) -> None:
        """End an open side with ``own``, and what depends on it with ``peers``."""
        if isinstance(endpoint, ReceiveRequest):
            self.fail_receive(endpoint, own, peers, now)
            return
        self._finish_send(endpoint, own, now)
        for receive_request in [one for one in endpoint.receive_requests if one.state is State.OPEN]:
            if isinstance(receive_request, ReceiveRequest):
                self.fail_receive(receive_request, peers, peers, now)
            else:
                self._endpoints.effects.append(Withdraw(receive_request, peers))
                self.close_remote(receive_request, None, now, notify_send=False)
        self.settle_send(endpoint)

    def fail_receive(self, receive_request: ReceiveRequest, own: KvferryError, peers: KvferryError, now: float) -> None:
        """End an open receive request with ``own``, and the send requests that joined it with ``peers``."""
        self._finish_receive(receive_request, own, peers, now)
        for op in receive_request.waiting:  # nothing of them has begun
            del self._endpoints.ops[op.op_id], receive_request.ops[op.op_id]
        receive_request.waiting.clear()
        self._endpoints.effects.extend(StopOp(op_id) for op_id in receive_request.ops)
        for send_request in list(receive_request.send_requests):
            self.receive_finished(send_request, peers, now)
        self.settle_receive(receive_request)

    def close_remote(
        self, remote_endpoint: RemoteEndpoint, error: KvferryError | None, now: float, *, notify_send: bool = True
    ) -> None:
        """End another daemon's receive request as one send request sees it."""
        if remote_endpoint.state is not State.OPEN:
            return
        remote_endpoint.state = State.FINISHED
        if remote_endpoint in remote_endpoint.announcement.remote_endpoints:
            remote_endpoint.announcement.remote_endpoints.remove(remote_endpoint)
        if remote_endpoint.sending:
            self._endpoints.effects.append(StopSending(remote_endpoint))
        if notify_send:
            self.receive_finished(remote_endpoint.send_request, error, now)
        self.settle_remote(remote_endpoint)

    def receive_finished(self, send_request: SendRequest, error: KvferryError | None, now: float) -> None:
        """Note the outcome of one of a send request's receive requests; the last one's is the send request's end."""
        send_request.outcomes.append(error)
        if send_request.state is State.OPEN and len(send_request.outcomes) == send_request.destinations:
            self._finish_send(send_request, next((one for one in send_request.outcomes if one), None), now)

    def settle_receive(self, receive_request: ReceiveRequest) -> None:
        """Settle a finished receive request if nothing of it is under way."""
        if receive_request.state is not State.FINISHED or receive_request.ops:
            return
        for one in receive_request.ranges.values():
            if not one.shared and len(one.ids):
                receive_request.pool.allocator_of(one.component).end_write(one.ids)
        self._leave(receive_request)
        for send_request in receive_request.send_requests:
            self.settle_send(send_request)

    def settle_remote(self, remote_endpoint: RemoteEndpoint) -> None:
        """Settle a finished remote endpoint if nothing is being sent to it."""
        if remote_endpoint.state is State.FINISHED and not remote_endpoint.sending:
            remote_endpoint.state = State.SETTLED
            del self._endpoints.remote_endpoints[remote_endpoint.number]
            self.settle_send(remote_endpoint.send_request)

    def settle_send(self, send_request: SendRequest) -> None:
        """Settle a finished send request if all its receive requests are."""
        if send_request.state is not State.FINISHED or any(
            receive_request.state is not State.SETTLED for receive_request in send_request.receive_requests
        ):
            return
        if send_request.holder is not None:
            for chunk in send_request.chunks:
                for one in chunk.ranges:
                    if not one.shared and len(one.ids):
                        send_request.holder.allocator_of(one.component).end_read(one.ids)
        self._leave(send_request)

    def _finish_receive(
        self, receive_request: ReceiveRequest, own: KvferryError | None, peers: KvferryError | None, now: float
    ) -> None:
        receive_request.state = State.FINISHED
        self._endpoints.deadlines.drop(receive_request)
        self._notify(
            receive_request, TransferResult(state="finished", finished=receive_request.finished_event(own, now))
        )
        moved: dict[str, list[tuple[int, int, int]]] = {address: [] for address in receive_request.source_daemons}
        for send_request in receive_request.send_requests:
            if send_request.origin is not None:
                found = (send_request.origin.send_request, send_request.moved_bytes, send_request.trimmed_pages)
                moved.setdefault(send_request.origin.peer.address, []).append(found)
        self._endpoints.effects.extend(
            CloseReceive(
                address,
                name_of(receive_request),
                peers,
                tuple(of_sends),
                receive_request.unmet_sources if receive_request.ended_itself else 0,
            )
            for address, of_sends in moved.items()
        )

    def _finish_send(self, send_request: SendRequest, error: KvferryError | None, now: float) -> None:
        send_request.state = State.FINISHED
        self._endpoints.deadlines.drop(send_request)
        self._notify(send_request, TransferResult(state="finished", finished=send_request.finished_event(error, now)))

    def _leave(self, endpoint: SendRequest | ReceiveRequest) -> None:
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


def _listener(receive_request: ReceiveRequest | RemoteEndpoint) -> Hashable:
    """Return by what name a receiving pool hears of sides that ended."""
    return (
        receive_request.pool.name
        if isinstance(receive_request, ReceiveRequest)
        else listener_of(receive_request.announcement)
    )


def listener_of(announcement: Announcement) -> Hashable:
    """Return by what name another daemon's receiving pool hears of sides that ended here."""
    return (announcement.home.address, announcement.receive_request.pool)


def name_of(receive_request: ReceiveRequest) -> ReceiveName:
    """Return how other daemons call a receive request of this one."""
    return ReceiveName(
        receive_request.request_id, receive_request.pool.name, receive_request.pool.tenant, receive_request.epoch
    )

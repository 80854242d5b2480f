"""The transfer state machine: all live transfers of the daemon, without I/O.

Methods take what happened and the time. They leave what is to be done in ``effects``, or raise, and then nothing has
changed. What raises once something has changed is a bug, or a lack of memory: then the request ends here with
INTERNAL, as its events say, and the method returns. Where two messages do not fit each other, the later one is
refused; what was accepted stays accepted.

The table in ``transitions`` says what an event does to an endpoint; ``completion`` executes it.

An endpoint whose peer had ended by itself before it came fails as soon as it is accepted, with the peer's error code,
and so do the endpoints that it has joined; see ``kept``.

A receive request is SETTLED once it has no transfer op any more, a send request once all its receive requests are.
Messages of other daemons are handled in ``peer_transfers``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from kvferry.daemon.quota import Quota
from kvferry.daemon.transfer.admission import (
    CopyScheduler,
    Fit,
    check_chunk_count,
    check_continues,
    check_steps,
    check_together,
    hold_for_reading,
    hold_for_writing,
)
from kvferry.daemon.transfer.completion import Completion
from kvferry.daemon.transfer.endpoints import (
    Announcement,
    Clocked,
    EndpointKey,
    Half,
    ReceiveRequest,
    SendChunk,
    SendRequest,
    shared_sources,
)
from kvferry.daemon.transfer.kept import Generations, Results, Tombstones
from kvferry.daemon.transfer.matching import check_payload
from kvferry.daemon.transfer.peer_transfers import PeerTransfers, TransferActivity
from kvferry.daemon.transfer.registry import AnnounceReceive, Effect, Endpoints, SendToDaemon, SendToPeer
from kvferry.daemon.transfer.transitions import TRANSITIONS, Event, State, Transitions
from kvferry.pools.planning.page_ranges import PageRange
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import (
    InvalidFieldError,
    KvferryError,
    TransferExistsError,
    UnexpectedSourceError,
    UnknownTransferError,
)
from kvferry.protocol.peer_messages import HalfAbandoned, StepReady
from kvferry.protocol.transfer_messages import Accepted, LayerStep, TransferResult

EXPIRED_AT_ONCE: Final = 32
"""Endpoints whose deadlines have passed that end at once: some 2 ms with their log."""


class RequestContext(NamedTuple):
    """The session and pool of a SEND or RECEIVE, its request id and deadline, and the instance that owns the pages."""

    session_id: int
    pool: Pool
    request_id: str
    times: Clocked
    owner_id: int


class TransferStateMachine:
    """All live transfers. Single-threaded; ``effects`` must be drained after each call.

    Attributes:
        results: the results that sessions have not acknowledged.
        endpoints: the live endpoints.
        peers: handles the messages of other daemons.
        payloads: counts the payload bytes that are kept.
    """

    def __init__(
        self,
        activity: TransferActivity,
        payloads: Quota,
        whole_below_bytes: int = 0,
        transitions: Transitions = TRANSITIONS,
    ) -> None:
        """``activity`` is told when a write of a transfer op to another daemon begins and ends."""
        self.payloads = payloads
        self.results = Results(self.payloads)
        self.endpoints = Endpoints(Tombstones())
        self._generations = Generations()
        self._epochs = itertools.count(1)
        self._stepping: dict[int, list[SendRequest]] = {}  # send requests whose steps wait for events of their session
        self._completion = Completion(self.endpoints, self.results, self.payloads, transitions)
        self._copy_scheduler = CopyScheduler(self.endpoints, whole_below_bytes, self.payloads)
        self.peers = PeerTransfers(self.endpoints, self._completion, self._copy_scheduler, activity, self.payloads)

    def __repr__(self) -> str:
        """Show the live counts."""
        endpoints = self.endpoints
        sends, receives = len(endpoints.send_requests), len(endpoints.receive_requests)
        return f"<TransferStateMachine sends={sends} receives={receives} ops={len(endpoints.ops)}>"

    def effects(self) -> list[Effect]:
        """Return the effects of the calls since the last time, and clear them."""
        effects, self.endpoints.effects = self.endpoints.effects, []
        return effects

    def endpoint(self, session_id: int, key: EndpointKey) -> SendRequest | ReceiveRequest | None:
        """Return the session's live endpoint with this key, or None."""
        endpoint = (
            self.endpoints.send_requests.get(key)
            if key.direction == "send"
            else self.endpoints.receive_requests.get(key)
        )
        return endpoint if endpoint is not None and endpoint.session_id == session_id else None

    def receive(
        self,
        context: RequestContext,
        ranges: tuple[PageRange, ...],
        sources: int,
        destinations: int,
        source_daemons: tuple[str, ...] = (),
        source_pools: tuple[str, ...] = (),
        *,
        checksums: bool = False,
    ) -> Accepted:
        """Make a receive request, start the copies of send requests that wait for it, and announce it to other daemons.

        Args:
            context: the session, pool and deadline of the RECEIVE.
            ranges: the pages to fill.
            sources: how many send requests fill it, over all daemons.
            destinations: how many receive requests of the request each of them fills, over all daemons.
            source_daemons: the other daemons that may have send requests for it.
            source_pools: the names of the pools whose send requests fill it; none: of any.
            checksums: whether what arrives is compared with checksums of the source's bytes.

        Raises:
            TransferExistsError: the request has a receive request in this pool.
            InvalidFieldError: another RECEIVE of the request has said another number of ``destinations``, or
                ``source_pools`` are not ``sources`` names.
            UnexpectedSourceError: more send requests wait than ``sources``.
            OverloadedError: too many payload bytes are kept.
            KvferryError: the pages cannot be written, or a waiting SEND does not fit: see ``match``.
        """
        if source_pools and len(set(source_pools)) != sources:
            raise InvalidFieldError(f"{len(set(source_pools))} names of {sources} sources", field="source_pools")
        self.endpoints.check_destinations(context.pool.tenant, context.request_id, destinations, source_pools)
        now = context.times.created_at
        receive_request = ReceiveRequest(
            context.pool,
            context.request_id,
            context.session_id,
            context.times,
            ranges,
            sources,
            destinations,
            source_daemons,
            source_pools,
            checksums=checksums,
        )
        if receive_request.key in self.endpoints.receive_requests:
            raise TransferExistsError("a RECEIVE of this request into this pool is live", field="request_id")
        send_requests = [
            one for one in self._open_sends(context) if one.unmet and shared_sources(source_pools, (one.pool.name,))
        ]
        if len(send_requests) > sources:
            raise UnexpectedSourceError(f"{len(send_requests)} pools send, sources={sources}", field="sources")
        payload_bytes = sum(len(chunk.payload) for one in send_requests for chunk in one.chunks)
        self.payloads.check(context.session_id, payload_bytes)
        fits = [
            (send_request, fit)
            for send_request in send_requests
            for fit in self._copy_scheduler.fit(receive_request, send_request, 0, send_request.chunks)
        ]
        check_together(receive_request, send_requests, [one for _, fit in fits for one in fit.match.waived])
        ending = self._completion.ending(context.request_id, now, receive_request)
        try:
            hold_for_writing(receive_request, context.owner_id)
        except Exception:
            receive_request.release()
            raise
        with ending:
            self._begin_receive(receive_request, send_requests, fits, now)
        return _accepted(receive_request)

    def _begin_receive(
        self,
        receive_request: ReceiveRequest,
        send_requests: list[SendRequest],
        fits: list[tuple[SendRequest, Fit]],
        now: float,
    ) -> None:
        receive_request.generation = self._generations.next(receive_request.session_id, receive_request.key)
        receive_request.epoch = next(self._epochs)
        self._enter(receive_request)
        ended = self._ended_sources(receive_request, send_requests, now)
        for send_request, fit in fits:
            if ended is None:
                self._copy_scheduler.start(receive_request, send_request, fit, now)
            elif send_request not in receive_request.send_requests:
                self._copy_scheduler.join(receive_request, send_request)
        if ended is None:
            for send_request in send_requests:
                self.endpoints.notify_matched(send_request)
        self.endpoints.effects.extend(
            AnnounceReceive(address, receive_request) for address in receive_request.source_daemons
        )
        if ended is not None:
            self._completion.apply(receive_request, Event.PEERS_ENDED_BEFORE, now, cause=ended)
        self._completion.check_done(receive_request, now)

    def send(self, context: RequestContext, chunk: SendChunk) -> Accepted:
        """Accept a SEND and start its copies into the receive requests that wait for it.

        Raises:
            TransferExistsError: another session sends the request, or its last SEND from this pool was accepted.
            PageGapError: the chunk does not continue the one before.
            InvalidFieldError: the steps do not name each layer once.
            TooLargeError: the payload exceeds the bound of this pool or a receiver's, or there are too many chunks.
            OverloadedError: too many payload bytes are kept.
            KvferryError: the pages cannot be read, or a receive request does not take them: see ``match``.
        """
        now = context.times.created_at
        send_request = self._send_for(context)
        number = len(send_request.chunks)
        check_chunk_count(send_request)
        check_continues(send_request, chunk)
        check_steps(chunk, context.pool.manifest)
        check_payload(chunk.payload, context.pool)
        receive_requests = [
            one for one in send_request.receive_requests if isinstance(one, ReceiveRequest) and one.state is State.OPEN
        ]
        if number == 0:
            receive_requests = self._receives_for(context)
        if chunk.payload:
            keeping = Counter([context.session_id, *(one.session_id for one in receive_requests)])
            for session_id, copies in keeping.items():
                beside = (keeping.total() - copies) * len(chunk.payload)
                self.payloads.check(session_id, copies * len(chunk.payload), beside)
        fits: list[tuple[ReceiveRequest, list[Fit]]] = []
        held, ending = len(send_request.held), self._completion.ending(context.request_id, now, send_request)
        try:
            for receive_request in receive_requests:
                fits.append((receive_request, self._copy_scheduler.fit(receive_request, send_request, number, [chunk])))  # noqa: PERF401  on a refusal, the fits so far are undone
            hold_for_reading(send_request, chunk, context.owner_id)
        except Exception:
            with ending:
                send_request.release(keep=held)
                for receive_request, its_fits in fits:
                    self._copy_scheduler.withdraw(receive_request, its_fits)
            raise
        with ending:
            self._begin_send(send_request, chunk, fits, context.times)
        return _accepted(send_request)

    def _begin_send(
        self,
        send_request: SendRequest,
        chunk: SendChunk,
        fits: list[tuple[ReceiveRequest, list[Fit]]],
        times: Clocked,
    ) -> None:
        number, now = len(send_request.chunks), times.created_at
        send_request.add(chunk)
        send_request.changed_at = now
        self.payloads.keep(send_request.session_id, (send_request.key, send_request.generation), len(chunk.payload))
        stepping = self._stepping.setdefault(send_request.session_id, []) if chunk.steps else []
        if send_request not in stepping:
            stepping.append(send_request)
        if number == 0:
            self._enter(send_request)
        else:
            self.endpoints.postpone(send_request, times.deadline_at)
        for receive_request, its_fits in fits:
            for fit in its_fits:
                self._copy_scheduler.start(receive_request, send_request, fit, now)
        self.peers.send_chunk(send_request, number)
        for receive_request, _ in fits:
            self._completion.check_done(receive_request, now)
        self._check_receivers_live(send_request, number, now)

    def events_reached(self, session_id: int, reached: list[int], now: float) -> None:
        """Start the steps that waited for a session's device events; ``reached`` has the values by ring slot."""
        for send_request in self._stepping.pop(session_id, ()):
            if send_request.state is not State.OPEN:
                continue
            with self._completion.ending(send_request.request_id, now):
                for number, chunk in enumerate(send_request.chunks):
                    ready = _ready_steps(chunk.steps, reached)
                    if ready > send_request.ready[number]:
                        send_request.ready[number] = ready
                        self._step_ready(send_request, number, now)
                if any(send_request.waiting_steps):
                    self._stepping.setdefault(session_id, []).append(send_request)

    def waits_for_events(self, session_id: int) -> bool:
        """Return whether a step of the session's send requests may not be ready yet."""
        return session_id in self._stepping

    def op_failed(self, op_id: int, error: KvferryError, now: float) -> None:
        """Fail the receive request of a transfer op whose start failed; it is stopped, and ``op_done`` follows."""
        receive_request = self.endpoints.ops[op_id].receive_request
        with self._completion.ending(receive_request.request_id, now):
            self._completion.apply(receive_request, Event.COPY_FAILED, now, cause=error)

    def break_off(self, request_id: str, cause: Exception, now: float) -> None:
        """End all endpoints of a request, for which something raised that may have come anywhere."""
        self._completion.break_off(request_id, cause, now)

    def op_done(self, op_id: int, error: KvferryError | None, now: float) -> None:
        """Handle the end of a transfer op, in any state of its receive request."""
        op = self.endpoints.ops[op_id]
        receive_request = op.receive_request
        receive_request.changed_at = op.send_request.changed_at = now
        with self._completion.ending(receive_request.request_id, now):
            del self.endpoints.ops[op_id], receive_request.ops[op_id]
            if error is not None:
                self._completion.apply(receive_request, Event.COPY_FAILED, now, cause=error)
            elif receive_request.state is State.OPEN:
                for planned_copy in op.planned_copies:
                    receive_request.coverage[planned_copy.component].arrive(planned_copy.cells)
                    moved_bytes = planned_copy.plan.total_bytes
                    receive_request.moved_bytes += moved_bytes
                    op.send_request.moved_bytes += moved_bytes
                self._completion.check_done(receive_request, now)
            self._completion.check_settled(receive_request, now)

    def cancel(self, session_id: int, key: EndpointKey, now: float) -> None:
        """Cancel the session's endpoint; does nothing if it has finished.

        Raises:
            UnknownTransferError: the session has no such live endpoint.
        """
        endpoint = self.endpoint(session_id, key)
        if endpoint is None:
            raise UnknownTransferError(
                f"no live {key.direction} of this request in pool {key.pool!r}", field="request_id"
            )
        self._completion.apply(
            endpoint, Event.CANCEL, now, detail="cancelled by its own side", matched_detail="the peer cancelled"
        )

    def abandon(self, half: Half, error: KvferryError, now: float, daemons: Sequence[str] = ()) -> int:
        """Fail the endpoints that wait for a half that will not come, and leave a tombstone for later ones.

        ``daemons`` are told too, and the homes of receive requests that wait for SENDs from here.

        Returns:
            How many endpoints of sessions here failed.
        """
        failed = self.peers.half_abandoned(half, error, now)
        homes = [
            one.home.address
            for one in self.endpoints.announced(half.tenant, half.request_id)
            if half.direction == "send"
        ]
        body = HalfAbandoned(
            tenant=half.tenant, request_id=half.request_id, direction=half.direction, error=error.info()
        )
        self.endpoints.effects.extend(SendToDaemon(address, body) for address in dict.fromkeys([*daemons, *homes]))
        return failed

    def comes_later(self, half: Half) -> None:
        """Take note of a RECEIVE that is accepted as soon as it can be: how an earlier one ended is of no interest."""
        self.endpoints.tombstones.renewed(half)

    def session_lost(self, session_id: int, now: float) -> None:
        """Fail the endpoints of a session that has ended; send requests that are complete and ready go on."""
        for endpoint in self.endpoints.while_live(one for one in self.endpoints if one.session_id == session_id):
            with self._completion.ending(endpoint.request_id, now):
                outlives = isinstance(endpoint, SendRequest) and endpoint.outlives_its_sender
                event = Event.SESSION_ENDED_SENT if outlives else Event.SESSION_ENDED
                self._completion.apply(endpoint, event, now, detail=f"the engine on the {endpoint.direction} side died")
        self._stepping.pop(session_id, None)
        self.results.forget_session(session_id)
        self._generations.forget_session(session_id)

    def expire(self, now: float) -> None:
        """Fail open endpoints whose deadline has passed, a few: ``next_deadline`` says when there are more."""
        for endpoint in itertools.islice(self.endpoints.deadlines.due(now), EXPIRED_AT_ONCE):
            with self._completion.ending(endpoint.request_id, now):
                if isinstance(endpoint, Announcement):
                    self.peers.expired(endpoint, now)
                else:
                    late = f"the {endpoint.direction} side's deadline passed; missing: {endpoint.waits_for()}"
                    self._completion.apply(endpoint, Event.DEADLINE, now, detail=late)

    def drain(self, now: float) -> None:
        """Fail the open endpoints that wait for a SEND or RECEIVE, as none is accepted any more."""
        for endpoint in self.endpoints.while_live(self.endpoints):
            with self._completion.ending(endpoint.request_id, now):
                complete = endpoint.all_planned if isinstance(endpoint, ReceiveRequest) else endpoint.fully_matched
                if not complete:
                    self._completion.apply(endpoint, Event.DRAIN, now, detail="the daemon is shutting down")

    def next_deadline(self) -> float | None:
        """Return when to call ``expire`` next, or None."""
        return self.endpoints.deadlines.next()

    def result(self, session_id: int, key: EndpointKey) -> TransferResult:
        """Return the state of the session's endpoint.

        Raises:
            UnknownTransferError: it is neither live nor unacknowledged.
        """
        known = self.results.get(session_id, key)
        if known is None:
            raise UnknownTransferError(
                f"no {key.direction} of this request in pool {key.pool!r}, live or unacknowledged", field="request_id"
            )
        endpoint = self.endpoint(session_id, key)
        return known if endpoint is None else msgspec.structs.replace(known, matched=endpoint.matched)

    def _open_sends(self, context: RequestContext) -> list[SendRequest]:
        endpoints = self.endpoints.of_request(context.pool.tenant, context.request_id)
        return [one for one in endpoints if isinstance(one, SendRequest) and one.state is State.OPEN]

    def _send_for(self, context: RequestContext) -> SendRequest:
        send_request = SendRequest(context.pool, context.request_id, context.session_id, context.times)
        live = self.endpoints.send_requests.get(send_request.key)
        if live is None:
            self.results.check_not_failed(context.session_id, send_request.key)
            return send_request
        if live.session_id != context.session_id:
            raise TransferExistsError("another session sends this request from this pool", field="request_id")
        if live.state is not State.OPEN:
            self.results.check_not_failed(context.session_id, send_request.key)
            raise TransferExistsError("the transfer has finished but not settled", field="request_id")
        if live.complete:
            raise TransferExistsError("the last SEND of this request from this pool was accepted", field="last")
        return live

    def _receives_for(self, context: RequestContext) -> list[ReceiveRequest]:
        """Return the open receive requests that a new send request joins."""
        endpoints = self.endpoints.of_request(context.pool.tenant, context.request_id)
        receive_requests = [
            one
            for one in endpoints
            if isinstance(one, ReceiveRequest)
            and one.state is State.OPEN
            and shared_sources(one.source_pools, (context.pool.name,))
        ]
        waiting = [
            receive_request
            for receive_request in receive_requests
            if len(receive_request.send_requests) < receive_request.sources
        ]
        if receive_requests and not waiting and not self.endpoints.announced(context.pool.tenant, context.request_id):
            raise UnexpectedSourceError("every receive request of this request has all its sources", field="request_id")
        return waiting[: waiting[0].destinations] if waiting else []

    def _enter(self, endpoint: SendRequest | ReceiveRequest) -> None:
        """Add an endpoint; results and tombstones of earlier ones are dropped."""
        self.endpoints.enter(endpoint)
        self.results.begin(endpoint.session_id, endpoint.key)
        self.endpoints.tombstones.renewed(endpoint.half)

    def _ended_sources(
        self, receive_request: ReceiveRequest, send_requests: list[SendRequest], now: float
    ) -> KvferryError | None:
        """Return the error of an ended source for which a new receive request would wait, or None.

        A receive request that names other daemons only heeds abandoned SENDs: after a source here has ended, the
        engine may repeat the RECEIVE for a source at another daemon.
        """
        if len(send_requests) >= receive_request.sources:
            return None
        half = receive_request.half.other
        abandoned = self.endpoints.tombstones.abandoned(half, receive_request.pool.name, now)
        if abandoned is not None or receive_request.source_daemons:
            return abandoned
        return next(iter(self.endpoints.tombstones.notices_for(half, receive_request.pool.name, now)), None)

    def _check_receivers_live(self, send_request: SendRequest, number: int, now: float) -> None:
        """Fail a new send request if its RECEIVEs were abandoned, or all of them, by their number, have ended."""
        if number or not send_request.unmet:
            return
        half = send_request.half.other
        abandoned = self.endpoints.tombstones.abandoned(half, send_request.pool.name, now)
        if abandoned is not None:
            self._completion.apply(send_request, Event.PEERS_ENDED_BEFORE, now, cause=abandoned)
        if abandoned is not None or send_request.receive_requests:
            return
        ended = self.endpoints.tombstones.notices_for(half, send_request.pool.name, now)
        if ended and len(ended) >= self.endpoints.tombstones.members(half):
            self._completion.apply(send_request, Event.PEERS_ENDED_BEFORE, now, cause=ended[0])

    def _step_ready(self, send_request: SendRequest, number: int, now: float) -> None:
        for receive_request in list(send_request.receive_requests):
            if receive_request.state is not State.OPEN:
                continue
            if isinstance(receive_request, ReceiveRequest):
                self._copy_scheduler.start_ready(receive_request, now)
            else:
                announcement = receive_request.announcement
                ready = StepReady(
                    receive_request=announcement.receive_request,
                    send_request=receive_request.number,
                    chunk=number,
                    ready=send_request.ready[number],
                )
                self.endpoints.effects.append(SendToPeer(announcement.home, ready))


def _accepted(endpoint: SendRequest | ReceiveRequest) -> Accepted:
    return Accepted(
        generation=endpoint.generation,
        skipped_source_entries=endpoint.skipped_source_entries,
        skipped_source_pages=endpoint.skipped_source_pages,
        covered_source_entries=endpoint.covered_source_entries,
        matched=endpoint.matched,
    )


def _ready_steps(steps: tuple[LayerStep, ...], reached: list[int]) -> int:
    """Return how many steps are ready: those before the first one whose event is not reached."""
    return next((n for n, step in enumerate(steps) if reached[step.event] < step.value), len(steps))

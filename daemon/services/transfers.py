"""The requests about transfers: SEND, RECEIVE, CANCEL, ABANDON and RESULT, checked and passed to the state machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Literal

from kvferry.daemon.control.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.control.kept_bytes import REQUEST_BYTES, TRANSFER
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.sessions import Session
from kvferry.daemon.services.event_rings import EventRings
from kvferry.daemon.services.peer_transfers import PeerMessenger
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.services.receive_to_host import HostReceivePlan, HostReceives
from kvferry.daemon.services.transfer_effects import TransferEffects
from kvferry.daemon.transfer.endpoints import Clocked, EndpointKey, Half, ReceiveRequest, SendChunk
from kvferry.daemon.transfer.state_machine import RequestContext, TransferStateMachine
from kvferry.daemon.transfer.transitions import State
from kvferry.pools.planning.page_ranges import PageRange, page_ranges
from kvferry.protocol.config.tenants import whose
from kvferry.protocol.errors import (
    CancelledError,
    DrainedError,
    InternalError,
    KvferryError,
    OverloadedError,
    PeerCancelledError,
    ShuttingDownError,
    TransferExistsError,
)
from kvferry.protocol.events import Settled
from kvferry.protocol.limits import Limits
from kvferry.protocol.session_messages import TransferStatus
from kvferry.protocol.transfer_messages import Abandon, Abandoned, Cancel, Cancelled, Receive, Result, Send

FEW_EVENTS = 64
"""A session with so few events that are not acknowledged is not asked how many others have."""


def _same_receive(tenant: int, request_id: str, pool: str) -> Callable[[Call], bool]:
    """Return what says whether a request is a RECEIVE of this key."""

    def is_it(call: Call) -> bool:
        body = call.body
        return (
            call.session.tenant == tenant
            and isinstance(body, Receive)
            and (body.request_id, body.pool) == (request_id, pool)
        )

    return is_it


class TransferService:
    """Handles what engines ask for, and passes it to the state machine."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        state_machine: TransferStateMachine,
        effects: TransferEffects,
        pools: PoolRegistry,
        rings: EventRings,
        messenger: PeerMessenger,
        host_receives: HostReceives,
        limits: Limits,
        counters: Counters,
    ) -> None:
        """``host_receives`` handles RECEIVEs into the host tier."""
        self.draining = False
        self.drained = False
        """An operator lets no new transfers begin."""
        self._dispatcher = dispatcher
        self._state_machine = state_machine
        self._effects = effects
        self._pools = pools
        self._rings = rings
        self._messenger = messenger
        self._host_receives = host_receives
        self._limits = limits
        self._counters = counters
        dispatcher.handle("SEND", self._send)
        dispatcher.handle("RECEIVE", rings.after(self._receive))
        dispatcher.handle("CANCEL", self._cancel)
        dispatcher.handle("ABANDON", self._abandon)
        dispatcher.handle("RESULT", self._result)
        dispatcher.handle_acknowledged(Settled, self._acknowledged)

    def session_began(self, session_id: int) -> None:
        """Keep the session's results from now on."""
        self._state_machine.results.open_session(session_id)

    def events_reached(self, session_id: int, values: list[int]) -> None:
        """Start what waits for these values of a session's event ring, by slot."""
        if self._state_machine.waits_for_events(session_id):
            self._state_machine.events_reached(session_id, values, time.monotonic())
            self._effects.execute()

    def session_lost(self, session: Session) -> None:
        """Fail the session's open endpoints."""
        self._state_machine.session_lost(session.session_id, time.monotonic())
        self._effects.session_lost(session.session_id)
        self._effects.execute()

    def live(self, session_id: int) -> int:
        """Return how many endpoints of a session are live, or settled and not acknowledged."""
        return self._state_machine.results.count(session_id)

    def drain(self) -> None:
        """Refuse new transfers, and fail the endpoints that still wait for a SEND or RECEIVE."""
        self.draining = True
        for call in self._host_receives.waiting():
            error = ShuttingDownError("the daemon is shutting down")
            self._dispatcher.answer_error(call.session, call.message_id, error)
        self._state_machine.drain(time.monotonic())
        self._effects.execute()

    def status(self) -> tuple[TransferStatus, ...]:
        """Return the live endpoints as STATUS shows them."""
        now = time.monotonic()
        return tuple(
            TransferStatus(
                request=endpoint.request_id,
                request_id=endpoint.request_id,
                direction=endpoint.direction,
                pool=endpoint.pool.name,
                state=endpoint.state.value,
                age_ms=round((now - endpoint.created_at) * 1000),
                pages=endpoint.pages,
                arrived=endpoint.arrived_pages if isinstance(endpoint, ReceiveRequest) else 0,
                waits_for=endpoint.waits_for(),
                tenant=endpoint.key.tenant,
                session=endpoint.session_id,
                deadline_ms=max(0, round((endpoint.deadline_at - now) * 1000)),
                quiet_ms=round((now - endpoint.changed_at) * 1000),
                daemons=endpoint.daemons,
            )
            for endpoint in (*self._state_machine.endpoints, *self._state_machine.endpoints.quarantined)
        )

    def _send(self, call: Call) -> Answer:
        body = expect(call, Send)
        context = self._context(call, body)
        manifest = context.pool.manifest
        ranges = page_ranges(body.lists, call.ids, manifest, may_end_inside=body.last, may_lack=not body.last)
        chunk = SendChunk(ranges, body.last, body.first_token, body.payload, body.steps, body.checksums)
        reached = self._reached(context.session_id, body)
        began_s = time.perf_counter()
        accepted = self._state_machine.send(context, chunk)
        self._planned(context, "send", time.perf_counter() - began_s)
        self._keep_lists(call, "send", ranges)
        if len(body.steps) > 1:
            self._counters.add("transfers.layered")
        if body.steps:
            self._state_machine.events_reached(context.session_id, reached, time.monotonic())
        self._effects.execute(call.session)
        return Answer(accepted)

    def _reached(self, session_id: int, body: Send) -> list[int]:
        """Return the values of the session's event ring; empty where the SEND has no steps."""
        return self._rings.values(session_id, body.steps) if body.steps else []

    def _receive(self, call: Call) -> Answer | Coroutine[Any, Any, Answer]:
        body = expect(call, Receive)
        is_it = _same_receive(call.session.tenant, body.request_id, body.pool)
        if any(map(is_it, self._host_receives.waiting())):
            raise TransferExistsError("a RECEIVE of this request into this pool waits for room", field="request_id")
        context = self._context(call, body)
        if body.into == "host":
            plan = self._host_receives.plan(body, context.pool)
            steps = self._host_receives.making_room(plan)
            if steps is not None:
                self._state_machine.comes_later(Half(call.session.tenant, body.request_id, "receive"))
                return self._receive_later(call, steps)
            return self._receive_to_host(call, body, context, plan)
        manifest = context.pool.manifest
        ranges = page_ranges(body.lists, call.ids, manifest, may_end_inside=True, may_be_in_place=True)
        return self._begin_receive_into(call, context, ranges, body)

    async def _receive_later(self, call: Call, steps: Iterator[None]) -> Answer:
        """Start a receive request once there is room, by what there is then."""
        await self._host_receives.make_room(call, steps)
        body = expect(call, Receive)
        context = self._context(call, body)
        return self._receive_to_host(call, body, context, self._host_receives.plan(body, context.pool))

    def _receive_to_host(self, call: Call, body: Receive, context: RequestContext, plan: HostReceivePlan) -> Answer:
        """Start a receive request whose bytes become a snapshot in the host tier."""
        host_receive = self._host_receives.make(call, body, plan)
        try:
            return self._begin_receive_into(call, context._replace(pool=host_receive.pool), host_receive.ranges, body)
        except Exception as cause:
            error = (
                cause if isinstance(cause, KvferryError) else InternalError(f"no receive request was made: {cause!r}")
            )
            self._host_receives.refused(host_receive, error)
            raise

    def _begin_receive_into(
        self, call: Call, context: RequestContext, ranges: tuple[PageRange, ...], body: Receive
    ) -> Answer:
        daemons = body.source_daemons
        if daemons:
            daemons = self._messenger.source_daemons(daemons, call.session.tenant)
        began_s = time.perf_counter()
        accepted = self._state_machine.receive(
            context, ranges, body.sources, body.destinations, daemons, body.source_pools, checksums=body.checksums
        )
        self._planned(context, "receive", time.perf_counter() - began_s)
        self._keep_lists(call, "receive", ranges)
        self._effects.execute(call.session)
        return Answer(accepted)

    def _planned(self, context: RequestContext, direction: Literal["send", "receive"], seconds: float) -> None:
        self._counters.observe("stages.planned.any", seconds)
        key = EndpointKey(context.pool.tenant, context.request_id, context.pool.name, direction)
        endpoint = self._state_machine.endpoint(context.session_id, key)
        self._effects.recorder.planned(context.session_id, key, endpoint, seconds)

    def _keep_lists(self, call: Call, direction: str, ranges: tuple[PageRange, ...]) -> None:
        """Count the page lists of an accepted message until its endpoint has settled."""
        body = call.body
        assert isinstance(body, Send | Receive), body
        size_bytes = REQUEST_BYTES + sum(one.ids.nbytes for one in ranges if not one.shared)
        self._dispatcher.kept.keep(
            call.session.session_id, (TRANSFER, direction, body.request_id, body.pool), size_bytes
        )

    def _cancel_held(self, call: Call, body: Cancel) -> bool:
        """Cancel a RECEIVE that is held for its event, or for room: it would begin later, when nobody wants it."""
        is_same = _same_receive(call.session.tenant, body.request_id, body.pool)

        def is_it(held: Call) -> bool:
            return held.session is call.session and is_same(held)

        for held in filter(is_it, self._host_receives.waiting()):
            error = CancelledError("cancelled while it waited for room in the host tier")
            self._dispatcher.answer_error(held.session, held.message_id, error)
            return True
        return self._rings.give_up(call.session.session_id, is_it)

    def _cancel(self, call: Call) -> Answer | None:
        body = expect(call, Cancel)
        key = EndpointKey(call.session.tenant, body.request_id, body.pool, body.direction)
        session_id = call.session.session_id
        endpoint = self._state_machine.endpoint(session_id, key)
        if endpoint is None and body.direction == "receive" and self._cancel_held(call, body):
            return Answer(Cancelled(was_finished=False))
        if endpoint is None and self._state_machine.result(session_id, key).settled is not None:
            return Answer(Cancelled(was_finished=True))
        was_finished = endpoint is not None and endpoint.state is not State.OPEN
        if body.wait:
            cancelled = Answer(Cancelled(was_finished=was_finished))
            answer = partial(self._dispatcher.answer, call.session, call.message_id, cancelled)
            self._effects.when_settled(session_id, key, answer)
        self._state_machine.cancel(session_id, key, time.monotonic())
        self._effects.execute(call.session)
        if body.wait:
            return None
        return Answer(
            Cancelled(was_finished=was_finished, settled=self._state_machine.endpoint(session_id, key) is None)
        )

    def _abandon(self, call: Call) -> Answer:
        body = expect(call, Abandon)
        daemons = self._messenger.other_daemons(body.daemons, "daemons", call.session.tenant)
        half = Half(call.session.tenant, body.request_id, body.direction)
        error = PeerCancelledError(f"the peer abandoned the request{body.reason and f': {body.reason}'}")
        failed = self._state_machine.abandon(half, error, time.monotonic(), daemons)
        self._effects.execute(call.session)
        return Answer(Abandoned(failed=failed))

    def _result(self, call: Call) -> Answer:
        body = expect(call, Result)
        key = EndpointKey(call.session.tenant, body.request_id, body.pool, body.direction)
        return Answer(self._state_machine.result(call.session.session_id, key))

    def _context(self, call: Call, body: Send | Receive) -> RequestContext:
        if self.draining:
            raise ShuttingDownError("the daemon is shutting down and accepts no new transfers")
        if self.drained and not self._is_under_way(call.session.tenant, body.request_id):
            raise DrainedError("an operator has drained this daemon: it accepts no new transfers")
        pool = self._pools.named_by(call.session, body.pool)
        session_id = call.session.session_id
        key = EndpointKey(pool.tenant, body.request_id, body.pool, "send" if isinstance(body, Send) else "receive")
        if self._state_machine.endpoint(session_id, key) is None:  # chunks of a live endpoint are always accepted
            self._check_limits(call.session)
        self._dispatcher.kept.check(session_id, REQUEST_BYTES + sum(one.nbytes for one in call.ids))
        now = time.monotonic()
        return RequestContext(
            session_id, pool, body.request_id, Clocked(now, now + call.deadline_s), call.session.owner_id
        )

    def _is_under_way(self, tenant: int, request_id: str) -> bool:
        endpoints = self._state_machine.endpoints
        return bool(endpoints.of_request(tenant, request_id) or endpoints.announced(tenant, request_id))

    def _check_limits(self, session: Session) -> None:
        most = self._limits.max_transfers_per_session
        if self.live(session.session_id) >= most:
            raise OverloadedError(f"{most} transfers of the session are live or unacknowledged")
        if len(session.unacknowledged) >= 2 * most:  # reused request ids keep the count of results low
            raise OverloadedError(f"{len(session.unacknowledged)} events of the session are unacknowledged")
        most = self._limits.max_transfers
        if self._dispatcher.sessions.tenants.shares.parts or 2 * self._state_machine.results.total >= most:
            live = {one: self.live(one.session_id) for one in self._dispatcher.sessions}
            self._check_share(session.tenant, most, live, "transfers of all sessions are live or unacknowledged")
        if len(session.unacknowledged) > FEW_EVENTS:
            events = {one: len(one.unacknowledged) for one in self._dispatcher.sessions}
            self._check_share(session.tenant, 2 * most, events, "events of all sessions are unacknowledged")

    def _check_share(self, tenant: int, most: int, counts: dict[Session, int], what: str) -> None:
        used: Counter[int] = Counter()
        for session, count in counts.items():
            used[session.tenant] += count
        its = used[tenant]
        if its >= self._dispatcher.sessions.tenants.shares.most(tenant, most, used):
            raise OverloadedError(f"{used.total()} {what}, {its} of them of {whose(tenant)}, of at most {most}")

    def _acknowledged(self, session: Session, event: Settled) -> None:
        self._effects.recorder.told(session.session_id, event)
        key = EndpointKey(session.tenant, event.request_id, event.pool, event.direction)
        self._state_machine.results.acknowledged(session.session_id, key, event.generation)

"""Connects the transfer state machine to other daemons: passes their messages in, and executes its effects on them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import structlog

from kvferry.daemon.control.hub import EndpointsChanged, EventHub, PoolRemoved
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.peers.links import PeerLinks
from kvferry.daemon.transfer.completion import name_of
from kvferry.daemon.transfer.endpoints import Incarnation, Origin, ReceiveRequest, RemotePool
from kvferry.daemon.transfer.kept import Half
from kvferry.daemon.transfer.peer_transfers import NO_SEND, PeerTransfers, chunk_of, peer_send_of
from kvferry.daemon.transfer.registry import (
    AnnounceReceive,
    CloseReceive,
    Effect,
    NotifyAbandoned,
    NotifyChunk,
    NotifyEnded,
    NotifyReady,
    RefuseSend,
    StopSending,
    Withdraw,
)
from kvferry.daemon.transports.remote import RemoteTransports
from kvferry.pools.layouts.entry_checks import check_entry
from kvferry.pools.pool import Pool
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    InvalidFieldError,
    KvferryError,
    OverloadedError,
    UnknownTransferError,
    raised,
)
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.peer_messages import (
    Announce,
    Confirm,
    Confirmed,
    Grant,
    HalfAbandoned,
    OpEnded,
    OpRequest,
    PeerBody,
    PeerSend,
    PoolGone,
    ReceiveClosed,
    SendRefused,
    SendWithdrawn,
    StepReady,
    Written,
)
from kvferry.protocol.session_messages import PeerStatus

MAX_REMOTE_POOLS = 4096
MAX_UNSENT = 4096
UNSENT_S = 600.0
"""How many HALF_ABANDONED messages for unreachable daemons are kept, and how long, in seconds; as for tombstones."""
LONGEST_ANNOUNCEMENT_S = 86_400.0
log = structlog.get_logger(__name__)


class PeerTransferService:
    """Matches send requests and receive requests of this daemon with those of other daemons.

    Attributes:
        remote_pools: pools that other daemons have described, by daemon, tenant and name.
    """

    def __init__(
        self,
        links: PeerLinks,
        state_machine: PeerTransfers,
        transports: RemoteTransports,
        hub: EventHub,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` returns seconds, and is the state machine's too."""
        self._links = links
        self._state_machine = state_machine
        self._transports = transports
        self._hub = hub
        self._counters = counters
        self._clock = clock
        self.remote_pools: dict[tuple[Incarnation, int, str], RemotePool] = {}
        self._unsent: dict[tuple[str, Half], tuple[HalfAbandoned, float]] = {}
        hub.subscribe(PoolRemoved, lambda event: self.pool_removed(event.pool))

    def source_daemons(self, addresses: tuple[str, ...]) -> tuple[str, ...]:
        """Return the daemons that a RECEIVE names, without this one, and connect to them.

        Raises:
            InvalidFieldError: one of them cannot be reached from here.
        """
        for address in addresses:
            if not (self._links.is_own(address) or self._transports.can_reach(address)):
                raise InvalidFieldError(
                    f"{address}: this daemon has no bounce buffers; set network.transport in its configuration",
                    field=f"source_daemons[{addresses.index(address)}]",
                )
        return self.other_daemons(addresses, "source_daemons")

    def other_daemons(self, addresses: tuple[str, ...], field: str) -> tuple[str, ...]:
        """Return the daemons that a message's field names, without this one, and connect to them.

        Raises:
            InvalidFieldError: one of them cannot be reached from here.
        """
        others = tuple(dict.fromkeys(one for one in addresses if not self._links.is_own(one)))
        for address in others:
            where = f"{field}[{addresses.index(address)}]"
            self._links.check_reachable(address, where)
            self._links.connect(address, where)  # now, as a message cannot be refused once it is accepted
        return others

    def execute(self, effect: Effect) -> None:
        """Execute an effect that concerns another daemon."""
        if isinstance(effect, AnnounceReceive):
            peer = self._links.connect(effect.address)
            if peer is None:
                effect.receive_request.unreachable.add(effect.address)
            else:
                self._announce(peer, effect.receive_request)
        elif isinstance(effect, CloseReceive):
            peer = self._links.connect(effect.address)
            if peer is not None:
                info = effect.error.info() if effect.error else None
                closed = ReceiveClosed(
                    receive_request=effect.receive_request, error=info, moved=effect.moved, unmet=effect.unmet
                )
                self._links.send(peer, closed)
        elif isinstance(effect, RefuseSend):
            refused = SendRefused(
                receive_request=effect.receive_request, send_request=effect.send_request, error=effect.error.info()
            )
            self._links.send(effect.peer, refused)
        elif isinstance(effect, NotifyEnded):
            ended = SendWithdrawn(
                receive_request=effect.receive_request, send_request=NO_SEND, error=effect.error.info()
            )
            self._links.send(effect.peer, ended)
        elif isinstance(effect, NotifyAbandoned):
            self._abandon(effect)
        elif isinstance(effect, StopSending):
            self._transports.stop_sending(effect.remote_endpoint)
        else:
            self._send_to_home(effect)

    def status(self) -> tuple[PeerStatus, ...]:
        """Return the other daemons as STATUS shows them."""
        waiting = Counter(home.address for home in self._state_machine.waiting_homes())
        return tuple(
            PeerStatus(
                address=address,
                state=state,
                announced=len(self._state_machine.receives_expecting(address)),
                waiting=waiting[address],
            )
            for address, state in self._links.status()
        )

    def pool_removed(self, pool: Pool) -> None:
        """Tell the connected daemons to unmap a pool's memory."""
        gone = PoolGone(tenant=pool.tenant, pool=pool.name, region=pool.region.identity)
        for peer in self._links.up():
            self._links.send(peer, gone)

    def _send_to_home(self, effect: Effect) -> None:
        if isinstance(effect, NotifyChunk):
            body, ids = peer_send_of(effect.remote_endpoint, effect.chunk)
            self._links.send(effect.remote_endpoint.announcement.home, body, ids)
        elif isinstance(effect, NotifyReady):
            remote_endpoint = effect.remote_endpoint
            ready = StepReady(
                receive_request=remote_endpoint.announcement.receive_request,
                send_request=remote_endpoint.number,
                chunk=effect.chunk,
                ready=effect.ready,
            )
            self._links.send(remote_endpoint.announcement.home, ready)
        elif isinstance(effect, Withdraw):
            remote_endpoint = effect.remote_endpoint
            withdrawn = SendWithdrawn(
                receive_request=remote_endpoint.announcement.receive_request,
                send_request=remote_endpoint.number,
                error=effect.error.info(),
            )
            self._links.send(remote_endpoint.announcement.home, withdrawn)

    def _announce(self, peer: Incarnation, receive_request: ReceiveRequest) -> None:
        left_ms = max(1, round((receive_request.deadline_at - self._clock()) * 1000))
        self._links.send(peer, Announce(receive_request=name_of(receive_request), deadline_ms=left_ms))

    def _abandon(self, effect: NotifyAbandoned) -> None:
        """Send HALF_ABANDONED to another daemon, now or once it is connected; of too many, the oldest is dropped."""
        half = effect.half
        info = effect.error.info()
        body = HalfAbandoned(tenant=half.tenant, request_id=half.request_id, direction=half.direction, error=info)
        peer = self._links.connect(effect.address)
        if peer is not None:
            self._links.send(peer, body)
            return
        self._unsent[effect.address, half] = (body, self._clock() + UNSENT_S)
        while len(self._unsent) > MAX_UNSENT:
            del self._unsent[next(iter(self._unsent))]

    def _send_unsent(self, peer: Incarnation) -> None:
        """Send a newly connected daemon the HALF_ABANDONED messages that are kept for it."""
        for key in [one for one in self._unsent if one[0] == peer.address]:
            body, until = self._unsent.pop(key)
            if self._clock() < until:
                self._links.send(peer, body)

    def is_needed(self, address: str) -> bool:
        """See ``PeerListener.is_needed``."""
        now = self._clock()
        has_unsent = any(until > now for (known, _), (_, until) in self._unsent.items() if known == address)
        return has_unsent or bool(self._state_machine.receives_expecting(address))

    def on_up(self, peer: Incarnation) -> None:
        """See ``PeerListener.on_up``."""
        self._send_unsent(peer)
        for receive_request in self._state_machine.receives_expecting(peer.address):
            receive_request.unreachable.discard(peer.address)
            self._announce(peer, receive_request)

    def on_lost(self, peer: Incarnation, why: str) -> None:
        """See ``PeerListener.on_lost``."""
        self._transports.peer_lost(peer, why)
        self._state_machine.peer_lost(peer, why, self._clock())
        for receive_request in self._state_machine.receives_expecting(peer.address):
            receive_request.unreachable.add(peer.address)
        for key in [one for one in self.remote_pools if one[0] == peer]:
            self.remote_pools.pop(key).unmap()
        self._hub.publish(EndpointsChanged())

    def on_message(self, peer: Incarnation, body: PeerBody, ids: tuple[PageIds, ...]) -> None:
        """See ``PeerListener.on_message``."""
        try:
            if isinstance(body, HalfAbandoned):
                half = Half(body.tenant, body.request_id, body.direction)
                source = peer.address
                self._state_machine.half_abandoned(half, raised(body.error), self._clock(), source)
            self._at_home(peer, body, ids)
            self._at_source(peer, body)
        except UnknownTransferError:
            self._counters.add("peers.too_late")
        finally:
            self._hub.publish(EndpointsChanged())

    def _at_home(self, peer: Incarnation, body: PeerBody, ids: tuple[PageIds, ...]) -> None:
        now = self._clock()
        if isinstance(body, PeerSend):
            self._chunk_announced(peer, body, ids, now)
        elif isinstance(body, StepReady):
            self._state_machine.step_ready(
                Origin(peer, body.receive_request, body.send_request), body.chunk, body.ready, now
            )
        elif isinstance(body, SendWithdrawn) and body.send_request == NO_SEND:
            self._state_machine.sources_ended(peer, body.receive_request, raised(body.error), now)
        elif isinstance(body, SendWithdrawn):
            self._state_machine.withdrawn(
                Origin(peer, body.receive_request, body.send_request), raised(body.error), now
            )
        elif isinstance(body, Written):
            self._transports.written(peer, body)
        elif isinstance(body, Confirmed):
            self._transports.confirmed(peer, body)
        elif isinstance(body, PoolGone):
            self._pool_gone(peer, body)

    def _at_source(self, peer: Incarnation, body: PeerBody) -> None:
        now = self._clock()
        if isinstance(body, Announce):
            left_s = min(body.deadline_ms / 1000, LONGEST_ANNOUNCEMENT_S)
            self._state_machine.announced(peer, body.receive_request, now + left_s, now)
        elif isinstance(body, ReceiveClosed):
            error = raised(body.error) if body.error else None
            self._state_machine.closed(peer, body.receive_request, error, body.moved, now, body.unmet)
        elif isinstance(body, SendRefused) and body.send_request == NO_SEND:
            self._state_machine.announcement_refused(body.receive_request, raised(body.error))
        elif isinstance(body, SendRefused):
            self._state_machine.refused(peer, body.send_request, raised(body.error), now)
        elif isinstance(body, OpRequest):
            self._transports.op_asked(peer, body)
        elif isinstance(body, Grant):
            self._transports.granted(peer, body)
        elif isinstance(body, OpEnded):
            self._transports.op_over(peer, body.op)
        elif isinstance(body, Confirm):
            self._confirm(peer, body)

    def _confirm(self, peer: Incarnation, body: Confirm) -> None:
        error = None
        try:
            self._state_machine.open_remote(peer, body.send_request, body.receive_request)
        except KvferryError as wrong:
            error = wrong.info()
        self._links.send(peer, Confirmed(op=body.op, error=error))

    def _chunk_announced(self, peer: Incarnation, body: PeerSend, ids: tuple[PageIds, ...], now: float) -> None:
        origin = Origin(peer, body.receive_request, body.send_request)
        try:
            self._state_machine.receive_for(origin)
            pool = self._remote_pool(peer, body)
            chunk = chunk_of(body, ids, pool.manifest)
        except KvferryError as error:
            self._state_machine.refuse(origin, error, now)
            return
        self._state_machine.chunk_announced(origin, body.chunk, pool, chunk, body.ready, now)

    def _pool_gone(self, peer: Incarnation, body: PoolGone) -> None:
        key = (peer, body.tenant, body.pool)
        known = self.remote_pools.get(key)
        if known is not None and known.region_id == body.region:
            self.remote_pools.pop(key).unmap()

    def _remote_pool(self, peer: Incarnation, body: PeerSend) -> RemotePool:
        key = (peer, body.receive_request.tenant, body.pool)
        known = self.remote_pools.get(key)
        if known is not None and known.region_id == body.region:
            return known
        if body.manifest is None:
            raise InvalidFieldError(f"pool {body.pool!r} was not described", field="manifest")
        if known is None and len(self.remote_pools) >= MAX_REMOTE_POOLS:
            raise OverloadedError(f"{MAX_REMOTE_POOLS} pools of other daemons are known here")
        if known is not None:
            known.unmap()
        check_manifest(body.manifest)
        pool = RemotePool(body.receive_request.tenant, body.pool, body.manifest, peer, body.region, body.model)
        self.remote_pools[key] = pool
        return pool


def check_manifest(manifest: Manifest) -> None:
    """Check that another daemon's manifest is consistent, before addresses are computed from it.

    Raises:
        InvalidFieldError: no entry, or one that lies beyond the region or whose component is not described.
        GeometryMismatchError: an entry's fields contradict each other.
    """
    names = {one.name for one in manifest.components}
    for index, entry in enumerate(manifest.entries):
        beyond = entry.base + entry.pages * entry.page_bytes > manifest.region_bytes
        if beyond or entry.component not in names:
            raise InvalidFieldError(
                f"{entry.name} lies beyond the region, or its component is not described",
                field=f"manifest.entries[{index}]",
            )
        check_entry(entry, f"manifest.entries[{index}]")
    if not manifest.entries:
        raise InvalidFieldError("the pool has no entries", field="manifest.entries")

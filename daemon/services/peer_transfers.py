"""Connects the transfer state machine to other daemons: passes their messages in, and executes its effects on them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.peers.links import PeerLinks
from kvferry.daemon.transfer.endpoints import Half, Incarnation, ReceiveRequest
from kvferry.daemon.transfer.peer_transfers import PeerTransfers
from kvferry.daemon.transfer.registry import AnnounceReceive, SendToDaemon, SendToPeer
from kvferry.daemon.transfer.state_machine import TransferStateMachine
from kvferry.daemon.transports.remote import RemoteTransports
from kvferry.pools.pool import Pool
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import InvalidFieldError, KvferryError, TooLargeError, UnknownTransferError
from kvferry.protocol.peer_messages import (
    Announce,
    Confirm,
    Confirmed,
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
    WriteCredit,
    Written,
)
from kvferry.protocol.session_messages import PeerStatus

MAX_UNSENT = 4096
UNSENT_S = 600.0
"""How many HALF_ABANDONED messages for unreachable daemons are kept, and how long, in seconds; as for tombstones."""


class PeerMessenger:
    """Sends other daemons what the transfer state machine has for them, and connects to those that engines name."""

    def __init__(
        self,
        links: PeerLinks,
        state_machine: PeerTransfers,
        transports: RemoteTransports,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``changed`` executes the state machine's effects; ``clock`` returns seconds, as the state machine's."""
        self._links = links
        self._state_machine = state_machine
        self._transports = transports
        self._clock = clock
        self._unsent: dict[tuple[str, Half], tuple[HalfAbandoned, float]] = {}

    def __repr__(self) -> str:
        """Show how many messages wait for their daemons."""
        return f"<PeerMessenger unsent={len(self._unsent)}>"

    def source_daemons(self, addresses: tuple[str, ...], tenant: int) -> tuple[str, ...]:
        """Return the daemons that a tenant's RECEIVE names, without this one, and connect to them.

        Raises:
            InvalidFieldError: one of them cannot be reached from here.
        """
        for address in addresses:
            if not (self._links.is_own(address) or self._transports.can_reach(address)):
                raise InvalidFieldError(
                    f"{address}: this daemon has no bounce buffers; set network.transport in its configuration",
                    field=f"source_daemons[{addresses.index(address)}]",
                )
        return self.other_daemons(addresses, "source_daemons", tenant)

    def other_daemons(self, addresses: tuple[str, ...], field: str, tenant: int) -> tuple[str, ...]:
        """Return the daemons that a field of a tenant's message names, without this one, and connect to them.

        Raises:
            InvalidFieldError: one of them cannot be reached from here.
        """
        others = tuple(dict.fromkeys(one for one in addresses if not self._links.is_own(one)))
        for address in others:
            where = f"{field}[{addresses.index(address)}]"
            self._links.check_reachable(address, where)
            self._links.connect(address, where, tenant)  # now, as a message cannot be refused once it is accepted
        return others

    def pool_removed(self, pool: Pool) -> None:
        """Tell the connected daemons to unmap a pool's memory."""
        gone = PoolGone(tenant=pool.tenant, pool=pool.name, region=pool.region.identity)
        for peer in self._links.up():
            self._links.send(peer, gone)

    def announce(self, effect: AnnounceReceive) -> None:
        """Announce a receive request to a daemon; if it is not connected, once it is."""
        peer = self._links.connect(effect.address)
        if peer is None:
            effect.receive_request.unreachable.add(effect.address)
        else:
            self.announce_to(peer, effect.receive_request)

    def announce_to(self, peer: Incarnation, receive_request: ReceiveRequest) -> None:
        """Announce a receive request to a connected daemon."""
        left_ms = max(1, round((receive_request.deadline_at - self._clock()) * 1000))
        self._links.send(
            peer,
            Announce(
                receive_request=receive_request.name,
                deadline_ms=left_ms,
                destinations=receive_request.destinations,
                source_pools=receive_request.source_pools,
            ),
        )

    def send_to_peer(self, effect: SendToPeer) -> None:
        """Send a message to an incarnation, if it is still there; a chunk that is too large fails here."""
        try:
            self._links.send(effect.peer, effect.body, effect.ids)
        except TooLargeError as error:
            if not isinstance(effect.body, PeerSend):
                raise
            self._state_machine.unsendable(effect.peer, effect.body, error, self._clock())

    def send_to_daemon(self, effect: SendToDaemon) -> None:
        """Send now, or HALF_ABANDONED once the daemon is connected; of too many, the oldest is dropped."""
        address, body = effect
        peer = self._links.connect(address)
        if peer is not None:
            self._links.send(peer, body)
        elif isinstance(body, HalfAbandoned):
            self._forget_unsent()
            key = address, Half(body.tenant, body.request_id, body.direction)
            self._unsent.pop(key, None)  # to its end
            self._unsent[key] = (body, self._clock() + UNSENT_S)
            while len(self._unsent) > MAX_UNSENT:
                del self._unsent[next(iter(self._unsent))]

    def _forget_unsent(self) -> None:
        """Forget what has been kept for too long; the oldest comes first."""
        while self._unsent and next(iter(self._unsent.values()))[1] <= self._clock():
            del self._unsent[next(iter(self._unsent))]

    def has_unsent(self, address: str) -> bool:
        """Return whether messages are kept for the daemon at an address."""
        self._forget_unsent()
        return any(known == address for known, _ in self._unsent)

    def send_unsent(self, peer: Incarnation) -> None:
        """Send a newly connected daemon the HALF_ABANDONED messages that are kept for it."""
        for key in [one for one in self._unsent if one[0] == peer.address]:
            body, until = self._unsent.pop(key)
            if self._clock() < until:
                self._links.send(peer, body)


class PeerTransferService:
    """Passes what other daemons say to the state machine and the transports. See ``PeerListener``."""

    def __init__(
        self,
        links: PeerLinks,
        state_machine: TransferStateMachine,
        transports: RemoteTransports,
        messenger: PeerMessenger,
        execute: Callable[[], None],
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``execute`` executes the effects of the state machine, whose clock ``clock`` is too, in seconds."""
        self._links = links
        self._endpoints = state_machine.endpoints
        self._state_machine = peers = state_machine.peers
        self._transports = transports
        self._messenger = messenger
        self._execute = execute
        self._counters = counters
        self._clock = clock
        self._to_state_machine: dict[type[PeerBody], Callable[[Incarnation, Any, float], None]] = {
            Announce: peers.announced,
            StepReady: peers.step_ready,
            SendRefused: peers.refused,
            SendWithdrawn: peers.withdrawn,
            ReceiveClosed: peers.closed,
            HalfAbandoned: peers.abandoned,
        }
        self._to_transports: dict[type[PeerBody], Callable[[Incarnation, Any], None]] = {
            OpRequest: partial(transports.op_asked, on_settled=execute),
            WriteCredit: transports.credited,
            Written: transports.written,
            OpEnded: transports.op_over,
            Confirm: self._confirm,
            Confirmed: transports.confirmed,
            PoolGone: peers.pool_gone,
        }

    def status(self) -> tuple[PeerStatus, ...]:
        """Return the other daemons as STATUS shows them."""
        waiting = Counter(home.address for home, _ in self._endpoints.announcements)
        return tuple(
            PeerStatus(
                address=link.address,
                state=link.state,
                announced=len(self._endpoints.receives_expecting(link.address)),
                waiting=waiting[link.address],
                round_trip_us=link.round_trip_us,
                quiet_ms=link.quiet_ms,
                why=link.why,
                node=link.node,
                keys=link.keys,
            )
            for link in self._links.status()
        )

    def is_needed(self, address: str) -> bool:
        """See ``PeerListener.is_needed``."""
        return self._messenger.has_unsent(address) or bool(self._endpoints.receives_expecting(address))

    def on_up(self, peer: Incarnation) -> None:
        """See ``PeerListener.on_up``."""
        self._messenger.send_unsent(peer)
        for receive_request in self._endpoints.receives_expecting(peer.address):
            receive_request.unreachable.discard(peer.address)
            self._messenger.announce_to(peer, receive_request)

    def on_lost(self, peer: Incarnation, why: str) -> None:
        """See ``PeerListener.on_lost``."""
        self._transports.peer_lost(peer, why)
        self._state_machine.peer_lost(peer, why, self._clock())
        for receive_request in self._endpoints.receives_expecting(peer.address):
            receive_request.unreachable.add(peer.address)
        self._execute()

    def on_message(self, peer: Incarnation, body: PeerBody, ids: tuple[PageIds, ...]) -> None:
        """See ``PeerListener.on_message``."""
        try:
            if isinstance(body, PeerSend):
                self._state_machine.chunk_announced(peer, body, ids, self._clock())
            elif (handler := self._to_state_machine.get(type(body))) is not None:
                handler(peer, body, self._clock())
            else:
                self._to_transports[type(body)](peer, body)
        except UnknownTransferError:
            self._counters.add("peers.too_late")
        except KvferryError:
            raise
        except Exception as cause:
            self._state_machine.failed(body, cause, self._clock())
            raise
        finally:
            self._execute()

    def _confirm(self, peer: Incarnation, body: Confirm) -> None:
        error = None
        try:
            self._state_machine.open_remote(peer, body.send_request, body.receive_request)
        except KvferryError as wrong:
            error = wrong.info()
        self._links.send(peer, Confirmed(op=body.op, error=error))

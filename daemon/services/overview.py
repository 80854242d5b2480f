"""STATUS: what each part of the daemon says of itself, in one report."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from kvferry.daemon.control.control_socket import ControlSocket
from kvferry.daemon.control.dispatch import Dispatcher, OpenCall
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.session_socket import SessionSocket
from kvferry.daemon.control.sessions import Session, SessionRegistry
from kvferry.daemon.peers.links import PeerLinks
from kvferry.daemon.process.descriptors import Descriptors
from kvferry.daemon.process.devices import Devices
from kvferry.daemon.services.peer_transfers import PeerTransferService
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.services.pools import PoolService
from kvferry.daemon.services.readiness import Readiness
from kvferry.daemon.services.status_view import seen_by
from kvferry.daemon.services.tables import TableService
from kvferry.daemon.services.tiers import Tiers
from kvferry.daemon.services.transfer_effects import TransferEffects
from kvferry.daemon.services.transfers import TransferService
from kvferry.daemon.transports.remote import RemoteTransports
from kvferry.protocol import VERSION
from kvferry.protocol.session_messages import ConfiguredValue, SessionStatus, Status, StatusReport, TenantStatus

REPORT_KEPT: Final = 10.0
"""Unauthenticated clients are given a STATUS again for as many times its processor time: a tenth of the work."""


class Parts(NamedTuple):
    """The parts that are asked, and the ``configuration`` with which the daemon began."""

    counters: Counters
    sessions: SessionRegistry
    session_socket: SessionSocket
    registry: PoolRegistry
    pools: PoolService
    transfers: TransferService
    effects: TransferEffects
    links: PeerLinks
    peers: PeerTransferService
    remote: RemoteTransports
    devices: Devices
    tables: TableService
    tiers: Tiers
    descriptors: Descriptors
    readiness: Readiness
    configuration: Mapping[str, ConfiguredValue]


class Overview:
    """Answers STATUS."""

    def __init__(self, dispatcher: Dispatcher, control: ControlSocket, parts: Parts) -> None:
        self._dispatcher = dispatcher
        self._control = control
        self._parts = parts
        self._began_s = time.monotonic()
        self._last_reports: dict[Status, tuple[StatusReport, float]] = {}
        """By what was asked: the last report, and until when it is given again."""
        dispatcher.handle_open("STATUS", self._status)

    def __repr__(self) -> str:
        """Show how many reports are given again."""
        return f"<Overview {len(self._last_reports)} reports>"

    def _status(self, call: OpenCall) -> StatusReport:
        asked = call.body
        assert isinstance(asked, Status), asked
        tenant = self._control.tenant_of(call.identity)
        if self._control.is_of_session(call.identity):
            return seen_by(self._report(asked), tenant, self._parts.links.known_to(tenant))
        now_s, worked_s = time.monotonic(), time.thread_time()
        report, until_s = self._last_reports.get(asked, (None, 0.0))
        if report is None or now_s >= until_s:
            report = self._report(asked)
            self._last_reports[asked] = report, now_s + REPORT_KEPT * (time.thread_time() - worked_s)
        return seen_by(report, tenant, self._parts.links.known_to(tenant))

    def _report(self, asked: Status) -> StatusReport:
        of = self._parts
        owned = of.registry.pages_by_owner()
        return StatusReport(
            daemon_version=VERSION,
            pid=os.getpid(),
            uptime_ms=round((time.monotonic() - self._began_s) * 1000),
            draining=of.readiness.ends,
            drained=of.readiness.drained,
            pools=of.pools.status(holders=asked.holders),
            sessions=tuple(self._session(one, owned.get(one.owner_id, 0)) for one in of.sessions),
            transfers=of.transfers.status(),
            counters=of.counters.snapshot(),
            addresses=tuple(of.links.addresses.values()),
            peers=of.peers.status(),
            peers_prove=of.links.peers_prove,
            network=of.remote.receiver.status() if of.remote.receiver else None,
            devices=tuple(of.devices.status()),
            tables=tuple(of.tables.status()),
            tiers=tuple(of.tiers.status()),
            operations=tuple(of.tiers.operations.status()),
            descriptors=of.descriptors.status(listening=of.readiness.listens),
            recent=tuple(of.effects.recorder.ended()) if asked.recent else (),
            configuration=dict(of.configuration) if asked.configuration else {},
            tenants=tuple(self._tenants()),
        )

    def _tenants(self) -> Iterator[TenantStatus]:
        of, tenants = self._parts, self._parts.sessions.tenants
        kept = self._dispatcher.kept.by_tenant() + of.sessions.replies_by_tenant()
        sessions, descriptors, pools = of.sessions.by_tenant(), of.descriptors.by_tenant(), of.pools.host_bytes()
        in_tiers = of.tiers.by_tenant()
        for one in sorted({*tenants.names, *kept, *sessions, *descriptors, *pools, *in_tiers}):
            tier_bytes, disk_bytes = in_tiers.get(one, (0, 0))
            found = TenantStatus(
                tenant=one,
                name=tenants.names.get(one, ""),
                share=tenants.shares.parts.get(one, 0.0),
                sessions=sessions[one],
                descriptors=descriptors[one],
                kept_bytes=kept[one],
                pool_bytes=pools[one],
                tier_bytes=tier_bytes,
                disk_bytes=disk_bytes,
            )
            if found != TenantStatus(tenant=one):  # who has been here once has nothing
                yield found

    def _session(self, one: Session, pages: int) -> SessionStatus:
        return SessionStatus(
            session=one.session_id,
            name=one.name,
            tenant=one.tenant,
            pid=one.peer.pid,
            pages=pages,
            transfers=self._parts.transfers.live(one.session_id),
            unacknowledged_events=len(one.unacknowledged),
            connected=self._parts.session_socket.is_connected(one),
            instance=one.instance,
            owner=one.owner_id,
            kept_bytes=self._dispatcher.kept.of(one.session_id),
            reply_bytes=one.reply_bytes,
        )

"""The daemon put together: one control loop, its sockets, its services, and an orderly end."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import structlog

from kvferry.daemon.config.schema import Config
from kvferry.daemon.control.control_socket import ControlSocket
from kvferry.daemon.control.dispatch import Dispatcher
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.session_socket import SessionSocket
from kvferry.daemon.control.sessions import Session, SessionRegistry
from kvferry.daemon.devices.registry import CHECK_S, Devices
from kvferry.daemon.peers.link import Heartbeat
from kvferry.daemon.peers.links import PeerLinks
from kvferry.daemon.process.access import DEVICE_POOLS_FILE, RuntimeDirectory
from kvferry.daemon.process.memory import keep_freed_memory
from kvferry.daemon.process.service_manager import ServiceManager
from kvferry.daemon.process.signals import answered
from kvferry.daemon.services.event_rings import EventRings
from kvferry.daemon.services.lost_pools import LostPools
from kvferry.daemon.services.peer_transfers import PeerService
from kvferry.daemon.services.pools import PoolService
from kvferry.daemon.services.tables import TableService
from kvferry.daemon.services.tiers import Tiers
from kvferry.daemon.services.transfers import TransferService
from kvferry.daemon.transfer.tombstones import Tombstones
from kvferry.daemon.transports.local import LocalTransport, best_copy
from kvferry.daemon.transports.network import NetworkTransport
from kvferry.daemon.transports.pull import PullTransport, fetch_region
from kvferry.daemon.transports.remote import RemoteTransports
from kvferry.protocol.base import Body
from kvferry.protocol.errors import DeviceLostError, KvferryError, MalformedError
from kvferry.protocol.ids import new_boot_id
from kvferry.protocol.session_messages import Hello, Pong, SessionStatus, StatusReport, Welcome
from kvferry.protocol.versions import FEATURES, agree

FETCH_THREADS = 2
EXIT_DEVICE_LOST = 3
log = structlog.get_logger(__name__)


@functools.cache
def daemon_version() -> str:
    """Return the installed version of kvferry; looked up in files once."""
    return metadata.version("kvferry")


class Daemon:
    """One incarnation. Make it on its loop, ``serve`` until ``stopping`` is set. Who sees control.sock can connect."""

    def __init__(self, config: Config, directory: RuntimeDirectory, stopping: asyncio.Event) -> None:
        self.boot_id = new_boot_id()
        self._config = config
        limits = config.limits.announced
        self._loop = asyncio.get_running_loop()
        self._started_at = time.monotonic()
        self._stopping = stopping
        self.counters = Counters()
        self._sessions = SessionRegistry(limits)
        self._dispatcher = Dispatcher(self.boot_id, limits, self._sessions, self.counters)
        self._session_socket = SessionSocket(
            directory.session_socket,
            self.boot_id,
            self._sessions,
            self.counters,
            self._session_opened,
            self._session_lost,
        )
        self._control = ControlSocket(directory.control_socket, limits, self.counters, self._dispatcher.on_message)
        self._dispatcher.connect(self._control.send)
        self._devices = Devices(config.devices, self._device_lost)
        self._pools = PoolService(
            self._dispatcher,
            self._session_socket,
            self._devices,
            LostPools(directory.path / DEVICE_POOLS_FILE),
            max_bytes=config.max_pool_bytes,
            populate=config.pools.populate,
        )
        self._transfers = TransferService(
            self._dispatcher,
            self._pools,
            self._sessions,
            limits,
            self.counters,
            config.transfers.whole_below_bytes,
            Tombstones(config.limits.max_tombstones, config.limits.tombstone_s),
        )
        self._transport = LocalTransport(
            self._loop,
            self._copied,
            threads=config.copy_threads,
            chunk_bytes=config.transfers.chunk_bytes,
            copy=best_copy(),
        )
        self._links = PeerLinks(
            self.boot_id,
            directory.peer_socket,
            config.peers.listen,
            Heartbeat(config.peers.heartbeat_ms, config.peers.timeout_ms),
            limits,
            self.counters,
        )
        self._executor = ThreadPoolExecutor(config.copy_threads, "network")
        self._fetcher = ThreadPoolExecutor(FETCH_THREADS, "fetch")  # it may wait for other daemons
        self._pull = PullTransport(
            self._links.send, self._transport, self._fetcher, self._transfers.op_done, fetch_region
        )
        self._remote = RemoteTransports(self._pull)
        self._peers = PeerService(
            self._links,
            self._transfers.state_machine.peers,
            self._pools,
            self._remote,
            self._transfers.execute,
            self.counters,
        )
        self._session_socket.region_of = self._peers.region_of
        self._pools.on_deleted.append(self._peers.pool_deleted)
        self._rings = EventRings(
            self._dispatcher, self._session_socket, self._devices, self._fetcher, self._transfers.events_reached
        )
        self._pools.hold = self._rings.hold
        self._tiers = Tiers(config, self._dispatcher, self._sessions, self._pools, self._fetcher, self.counters)
        self._transfers.connect(
            self._transport, self._remote, self._peers, self._rings, self._tiers.host_receives, self._tiers.scheduler
        )
        self._tables = TableService(self._dispatcher, self._session_socket, self._pools, self._devices, self._rings)
        self._network = NetworkTransport(
            config, self._links, self._transfers, self._pools, self._executor, self.counters
        )
        self._dispatcher.handle_open("HELLO", self._hello)
        self._dispatcher.handle_open("PING", lambda _body: Pong())
        self._dispatcher.handle_open("STATUS", self._status)
        self._dispatcher.check_complete()

    async def serve(self, manager: ServiceManager) -> None:
        """Serve until it is stopping, then let running transfers finish and give everything back.

        Raises:
            KvferryError: the transport between hosts, or a device that is to be open, cannot be had.
        """
        for device in self._config.devices.open:
            await self._loop.run_in_executor(self._fetcher, self._devices.open, device)
        await self._network.start(self._remote)
        await self._tiers.start()
        self._links.start(self._loop)
        self._control.start(self._loop)
        self._session_socket.start(self._loop)
        self._watch_devices()
        manager.ready(f"serving, boot id {self.boot_id}")
        log.info("serving", boot_id=self.boot_id, pid=os.getpid(), version=daemon_version())
        try:
            await self._stopping.wait()
            manager.stopping()
            self._transfers.drain()
            self._tiers.drain()
            await self._drain()
        finally:
            self._leave_if_a_device_is_lost()
            self._leave_in_any_case()
            self._remote.close()
            await self._network.close()
            await self._tiers.close()
            self._transport.close()
            self._executor.shutdown()
            self._fetcher.shutdown(wait=False, cancel_futures=True)
            self._links.close()
            self._control.close()  # first what was said, then the end of the sessions
            self._session_socket.close()
            self._tables.close()
            self._pools.close()
            log.info("ended", counters=self.counters.snapshot())

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._config.service.drain_timeout_s):
                await self._transfers.drained()
                await self._tiers.drained()
        except TimeoutError:
            log.warning("transfers cut off", live=len(self._transfers.status()))

    def _watch_devices(self) -> None:
        self._devices.check(time.monotonic())
        self._loop.call_later(CHECK_S, self._watch_devices)

    def _device_lost(self, device: str, error: DeviceLostError) -> None:
        """On any thread: nothing that a device does can be trusted any more, so this life of the daemon ends."""
        log.critical(
            "device lost: the daemon ends",
            device=device,
            cause=error.detail,
            remedy="it is started anew by its service manager; look at the device (kvferry doctor, npu-smi)",
        )
        self._loop.call_soon_threadsafe(self._stopping.set)

    def _leave_if_a_device_is_lost(self) -> None:
        """End the process where a device is lost: a thread may be inside a call that never comes back."""
        if self._devices.lost:
            self._control.close()
            self._session_socket.close()
            log.error("ended", counters=self.counters.snapshot())
            os._exit(EXIT_DEVICE_LOST)

    def _leave_in_any_case(self) -> None:
        """End the process where a call to a device holds up the rest of the end: nothing looks at the time any more."""
        if self._devices.in_use:
            timer = threading.Timer(2 * self._config.devices.stuck_after_s, os._exit, (EXIT_DEVICE_LOST,))
            timer.daemon = True
            timer.start()

    def _copied(self, op_id: int, error: KvferryError | None) -> None:
        if not self._pull.copied(op_id, error):
            self._transfers.op_done(op_id, error)

    def _session_opened(self, session: Session) -> None:
        self._transfers.session_opened(session)

    def _session_lost(self, session: Session) -> None:
        self._dispatcher.forget_session(session)
        self._rings.session_lost(session.session_id)
        self._tables.session_lost(session.session_id)
        self._transfers.session_lost(session)
        self._tiers.session_lost(session.session_id)
        self._pools.session_lost(session.session_id)

    def _hello(self, body: Body) -> Welcome:
        if not isinstance(body, Hello):
            raise MalformedError("no HELLO")
        return Welcome(
            protocol=agree(body.protocol_min, body.protocol_max),
            daemon_version=daemon_version(),
            features=FEATURES,
            limits=self._config.limits.announced,
        )

    def _status(self, _body: Body) -> StatusReport:
        owned = self._pools.pages_by_session()
        return StatusReport(
            daemon_version=daemon_version(),
            pid=os.getpid(),
            uptime_ms=round((time.monotonic() - self._started_at) * 1000),
            draining=self._stopping.is_set(),
            pools=self._pools.status(),
            sessions=tuple(
                SessionStatus(
                    session=one.session_id,
                    name=one.name,
                    tenant=one.tenant,
                    pid=one.peer.pid,
                    pages=owned.get(one.session_id, 0),
                    transfers=self._transfers.live(one.session_id),
                    unacknowledged_events=len(one.unacknowledged),
                    connected=self._session_socket.is_connected(one),
                )
                for one in self._sessions
            ),
            transfers=self._transfers.status(),
            counters=self.counters.snapshot(),
            addresses=tuple(self._links.addresses.values()),
            peers=self._peers.status(),
            network=self._network.status(),
            devices=tuple(self._devices.status()),
            tables=tuple(self._tables.status()),
            tiers=tuple(self._tiers.status()),
            operations=tuple(self._tiers.operations()),
        )


async def run_daemon(config: Config, directory: RuntimeDirectory, manager: ServiceManager) -> None:
    """Serve in a locked runtime directory until a signal asks to end; see ``signals``."""
    stopping = asyncio.Event()
    with answered(asyncio.get_running_loop(), stopping):
        keep_freed_memory()
        await Daemon(config, directory, stopping).serve(manager)

"""The daemon put together: one control loop, its sockets, its services, and an orderly end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import encodings.idna  # noqa: F401  Python imports it at the first look at a host's name; see numpy.ma
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec
import numpy.ma  # noqa: F401  numpy imports it at the first unique(), when there may be no descriptor left
import structlog
import uvloop

from kvferry.daemon.control.control_socket import ControlSocket, listening_on
from kvferry.daemon.control.dispatch import Dispatcher, OpenCall
from kvferry.daemon.control.http_socket import HttpSocket
from kvferry.daemon.control.kept_bytes import ConnectionBytes
from kvferry.daemon.control.loop_lag import LoopLag
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.self_ping import SelfPing
from kvferry.daemon.control.session_socket import SessionSocket
from kvferry.daemon.control.sessions import Session, SessionRegistry
from kvferry.daemon.peers.key_ring import KeyRing, open_keys
from kvferry.daemon.peers.link import Heartbeat
from kvferry.daemon.peers.links import PeerLinks
from kvferry.daemon.process.access import RuntimeDirectory
from kvferry.daemon.process.descriptors import PER_POOL, PER_REGION, PER_SESSION, Descriptors, raise_limit
from kvferry.daemon.process.device_keeper import DeviceKeeper, Fence, open_keeper
from kvferry.daemon.process.devices import CHECK_S, Devices
from kvferry.daemon.process.fd_store import FdStore, NoStore, open_store
from kvferry.daemon.process.garbage import collect_new_only
from kvferry.daemon.process.host import ServiceManager, configure_logs, keep_freed_memory
from kvferry.daemon.process.inherited import Inherited, take_inherited
from kvferry.daemon.process.log_lines import LogLines
from kvferry.daemon.process.memory import HostMemory
from kvferry.daemon.process.signals import answered
from kvferry.daemon.process.succession import Predecessor
from kvferry.daemon.process.tenants import Tenants
from kvferry.daemon.process.threads import started_threads
from kvferry.daemon.process.time_slices import as_others, be_as_others, be_prompt
from kvferry.daemon.quota import Quota
from kvferry.daemon.services import metric_sources
from kvferry.daemon.services.adoption import Adoption
from kvferry.daemon.services.event_rings import EventRings
from kvferry.daemon.services.log_reader import LogReader
from kvferry.daemon.services.metrics import Metrics
from kvferry.daemon.services.overview import Overview, Parts
from kvferry.daemon.services.peer_transfers import PeerMessenger, PeerTransferService
from kvferry.daemon.services.pool_registry import LostPools, PoolRegistry
from kvferry.daemon.services.pools import HostResources, PoolService
from kvferry.daemon.services.readiness import Readiness
from kvferry.daemon.services.tables import TableService
from kvferry.daemon.services.tiers import Tiers
from kvferry.daemon.services.transfer_effects import Movers, TransferEffects
from kvferry.daemon.services.transfers import TransferService
from kvferry.daemon.services.upgrade import UpgradeService, check_kept
from kvferry.daemon.services.verification import Verification
from kvferry.daemon.tiers.scheduler import OperationClass, Scheduler
from kvferry.daemon.transfer.state_machine import TransferStateMachine
from kvferry.daemon.transports.local import AT_ONCE_S, LocalTransport
from kvferry.daemon.transports.network_copier import NetworkCopier
from kvferry.daemon.transports.network_memory import NetworkMemory, NetworkTuning, open_network
from kvferry.daemon.transports.network_receiver import NetworkReceiver
from kvferry.daemon.transports.network_sender import NetworkSender
from kvferry.daemon.transports.pull import PullTransport, fetch_region
from kvferry.daemon.transports.remote import RemoteTransports
from kvferry.pools import copy_kernel
from kvferry.pools.devices.accelerator import STUCK_AFTER_S
from kvferry.pools.devices.base import Region
from kvferry.pools.host.memory import kept_bytes, smallest_limit
from kvferry.pools.host.placement import offer
from kvferry.pools.pool import Pool
from kvferry.protocol import VERSION, programs
from kvferry.protocol.config.load import read_config
from kvferry.protocol.config.schema import Config
from kvferry.protocol.config.values import changes, sourced, values_of
from kvferry.protocol.errors import (
    ConfigError,
    DaemonLostError,
    DeviceLostError,
    KvferryError,
    MalformedError,
)
from kvferry.protocol.ids import new_boot_id
from kvferry.protocol.limits import Limits, agree
from kvferry.protocol.session_messages import (
    ConfiguredValue,
    Hello,
    Welcome,
)
from kvferry.protocol.session_stream import RegionRequest
from kvferry.protocol.settings import CONTROL_SOCKET, METRICS_SOCKET, PEER_SOCKET, SESSION_SOCKET, runtime_dirs

FETCH_THREADS = 2
IN_FLIGHT_BYTES: Final = 128 << 20
"""Of each class of the tiers' operations: a small one begins beside the longest step of a large one."""

PINGS_PER_WATCHDOG: Final = 4
"""So many pings fit into the time that the service manager's watchdog leaves."""

EXIT_BAD_INPUT = 2
EXIT_DEVICE_LOST = 3
log = structlog.get_logger(__name__)


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """What no operator could choose well, so the daemon chooses itself; tests choose otherwise.

    Attributes:
        limits: in place of those that follow from the configuration.
        copy_threads: threads that copy pages; how many of them copy one transfer is measured.
        at_once_s: how long the control loop itself may copy in one of its turns; 0: never.
        whole_below_bytes: a SEND that releases its layers step by step but moves less is sent as a whole at its last
            step: for small prompts the steps cost more than the overlap saves.
        stuck_after_s: a device call that has not returned for so long counts as the loss of the device.
        network: see ``NetworkTuning``.
    """

    limits: Limits | None = None
    copy_threads: int = msgspec.field(default_factory=lambda: min(8, len(os.sched_getaffinity(0))))
    at_once_s: float = AT_ONCE_S
    whole_below_bytes: int = 4 << 20
    stuck_after_s: float = STUCK_AFTER_S
    network: NetworkTuning = NetworkTuning()


DEFAULT_TUNING: Final = Tuning()


class Surroundings(NamedTuple):
    """What a daemon's process has for it."""

    inherited: Inherited
    """The descriptors that the service manager has passed. The daemon's parts take theirs by name while they are built;
    ``serve`` closes the rest."""
    store: FdStore
    """What keeps pools and sessions for the next daemon; ``NoStore``: they end with this one."""
    keeper: DeviceKeeper | None
    """Who keeps the memory of pools on devices for it."""
    lines: LogLines
    """What remembers the log's last lines."""
    configuration: Mapping[str, ConfiguredValue]
    """The values of the configuration, and where they come from."""

    @classmethod
    def of_none(cls, store: FdStore | None = None) -> Self:
        """Return those of a process that has nothing, but for a store."""
        return cls(Inherited(), store or NoStore(), None, LogLines(), {})


class Daemon:
    """All parts of the daemon, put together: who is built from what, and in which order they start and end."""

    def __init__(
        self,
        config: Config,
        directory: RuntimeDirectory,
        stopping: asyncio.Event,
        network: NetworkMemory | None = None,
        tuning: Tuning = DEFAULT_TUNING,
        surroundings: Surroundings | None = None,
        keys: KeyRing | None = None,
    ) -> None:
        """Build everything on the running loop.

        Args:
            config: the configuration.
            directory: where to listen; locked.
            stopping: set from outside or, where a device is lost, by the daemon itself: ``serve`` ends then.
            network: what transfers between hosts go by; see ``open_network``. It is the daemon's from now on.
            tuning: what it chooses itself.
            surroundings: what its process has for it.
            keys: by which daemons of other hosts prove who they are; see ``open_keys``.

        Raises:
            ConfigError: an address cannot be listened on, or tiers lack what they need.
        """
        self.boot_id = new_boot_id()
        self._config = config
        self._directory = directory
        self._tuning = tuning
        self._inherited, store, keeper, lines, configuration = surroundings or Surroundings.of_none()
        may_keep_bytes = kept_bytes(smallest_limit().size_bytes)
        self._limits = limits = (tuning.limits or config.announced).within(may_keep_bytes)
        connection_bytes = ConnectionBytes(may_keep_bytes // 2)
        self._loop = loop = asyncio.get_running_loop()
        self._stopping = stopping
        self.counters = counters = Counters()
        # -- what engines, operators and other daemons talk to
        tenants = Tenants(config.tenants)
        self._control_path = directory.path / CONTROL_SOCKET
        self._descriptors = descriptors = Descriptors(raise_limit(), shares=tenants.shares)
        self._control = ControlSocket(
            directory.listen(CONTROL_SOCKET),
            limits,
            counters,
            max_connections=descriptors.unauthenticated,
            kept=connection_bytes,
            tenants=tenants,
        )
        self._sessions = SessionRegistry(limits, tenants)
        self._dispatcher = Dispatcher(self.boot_id, limits, self._sessions, counters, self._control.send)
        self._links = PeerLinks(
            self.boot_id,
            directory.listen(PEER_SOCKET),
            config.peers.listen,
            Heartbeat(config.peers.heartbeat_ms, config.peers.timeout_ms),
            limits,
            counters,
            config.network.bounce_buffer_bytes if network is not None else 0,
            descriptors,
            connection_bytes,
            keys,
        )
        # -- pools and devices
        self._devices = Devices(config.devices, self._device_lost, tuning.stuck_after_s, keeper)
        self._fence = Fence(keeper, counters.add)
        self._adopting: asyncio.Task[None] | None = None
        self._registry = PoolRegistry(LostPools(directory.folder), self._sessions, self._pool_removed)
        self._session_socket = SessionSocket(
            directory.listen(SESSION_SOCKET),
            self.boot_id,
            self._sessions,
            counters,
            self._session_began,
            self._session_ended,
            self._region_of,
            descriptors,
            self._dispatcher.kept,
            resume_grace_s=config.service.resume_grace_s,
        )
        self._adoption = Adoption(
            store, self.boot_id, self._sessions, self._session_socket, self._registry, counters, keeper
        )
        self._fetcher = started_threads(FETCH_THREADS, "fetch")
        self._rings = EventRings(
            self._dispatcher,
            self._session_socket,
            self._devices,
            self._fetcher,
            self._events_reached,
            descriptors,
        )
        memory = HostMemory(config=config.memory)
        self._pools = PoolService(
            self._dispatcher,
            self._session_socket,
            self._devices,
            self._registry,
            self._rings,
            HostResources(memory, descriptors),
            max_bytes=config.pools.size_bytes(smallest_limit().size_bytes),
            populate=config.pools.populate,
            largest_payload_bytes=limits.largest_payload_bytes,
            adoption=self._adoption,
        )
        # -- tiers
        scheduler = Scheduler(dict.fromkeys(OperationClass, IN_FLIGHT_BYTES))
        self._tiers = Tiers(
            config,
            self._dispatcher,
            self._sessions,
            self._registry,
            self._rings,
            scheduler,
            self._fetcher,
            memory,
            counters,
            self._adoption.host_tier(memory, config.tiers),
        )
        # -- transfers
        state_machine = TransferStateMachine(
            scheduler,
            Quota(
                "payload",
                limits.max_kept_session_payload_bytes,
                limits.max_kept_payload_bytes,
                self._sessions.tenant_of,
                field="payload",
                part_of=self._dispatcher.kept,
                shares=tenants.shares,
            ),
            tuning.whole_below_bytes,
        )
        self._redeem = state_machine.peers.redeem
        self._transport = LocalTransport.as_fast_as_here(loop, threads=tuning.copy_threads, at_once_s=tuning.at_once_s)
        self._network = network
        self._copier: NetworkCopier | None = None
        self._remote = RemoteTransports(
            PullTransport(self._links.send, self._transport, self._fetcher, fetch_region),
            *(() if network is None else self._network_transports(network, tuning.copy_threads, state_machine)),
        )
        self._messenger = messenger = PeerMessenger(self._links, state_machine.peers, self._remote)
        self._effects = TransferEffects(
            self._dispatcher,
            state_machine,
            Movers(self._transport, self._remote, scheduler),
            messenger,
            self._tiers.host_receives,
            limits,
            counters,
        )
        self._peers = PeerTransferService(
            self._links, state_machine, self._remote, messenger, self._effects.execute, counters
        )
        self._transfers = TransferService(
            self._dispatcher,
            state_machine,
            self._effects,
            self._registry,
            self._rings,
            messenger,
            self._tiers.host_receives,
            limits,
            counters,
        )
        # -- graph tables
        self._tables = TableService(
            self._dispatcher,
            self._session_socket,
            self._registry,
            self._devices,
            self._rings,
            descriptors,
            self._fence,
        )
        self._verification = Verification(
            self._dispatcher,
            self._control.tenant_of,
            self._registry,
            self._pools,
            state_machine.endpoints,
            self._tiers,
            self._remote.receiver,
            self._adoption,
        )
        self._upgrade = UpgradeService(self._dispatcher, self._control.tenant_of, self._adoption, config)
        # -- what operators ask, and metrics
        self._readiness = Readiness(
            self._dispatcher, self._control.tenant_of, self._transfers, self._ends_or_hands_over, self._listens
        )
        self._lag = LoopLag(loop)
        self._metrics = self._collecting(state_machine, connection_bytes)
        self._http = self._serving_http(directory)
        self._answer_without_session(lines, configuration)

    def _network_transports(
        self, network: NetworkMemory, threads: int, state_machine: TransferStateMachine
    ) -> tuple[NetworkReceiver, NetworkSender]:
        """Return both halves of transfers between hosts."""
        executor = started_threads(threads, "network", initializer=be_as_others)
        self._copier = NetworkCopier(executor, copy_kernel.new_copy_threads(threads, as_others()))
        receiver = NetworkReceiver(
            self._links.send,
            lambda peer: self._links.terms_with(peer).bounce_buffer_bytes,
            network,
            self._copier,
            self.counters,
        )
        sender = NetworkSender(self._links.send, network, self._copier, state_machine.peers, self.counters)
        return receiver, sender

    def _answer_without_session(self, lines: LogLines, configuration: Mapping[str, ConfiguredValue]) -> None:
        parts = Parts(
            self.counters,
            self._sessions,
            self._session_socket,
            self._registry,
            self._pools,
            self._transfers,
            self._effects,
            self._links,
            self._peers,
            self._remote,
            self._devices,
            self._tables,
            self._tiers,
            self._descriptors,
            self._readiness,
            configuration,
        )
        Overview(self._dispatcher, self._control, parts)
        LogReader(self._dispatcher, self._control.tenant_of, lines)
        self._dispatcher.handle_open("HELLO", self._hello)
        self._dispatcher.check_complete()

    def _collecting(self, state_machine: TransferStateMachine, connections: ConnectionBytes) -> Metrics:
        kept, payloads = self._dispatcher.kept, state_machine.payloads
        sources = (
            self._readiness.samples,
            metric_sources.of_counters(self.counters),
            metric_sources.of_pools(self._registry),
            metric_sources.of_sessions(self._sessions, self._session_socket),
            metric_sources.of_kept(kept, payloads, self._sessions, connections, self._limits),
            metric_sources.of_transfers(state_machine.endpoints),
            metric_sources.of_copies(self._effects.copies),
            metric_sources.of_peers(self._links, self._remote.receiver),
            metric_sources.of_devices(self._devices, self._tables),
            metric_sources.of_tiers(self._tiers),
            metric_sources.of_descriptors(self._descriptors),
            metric_sources.of_loop(self._lag),
        )
        return Metrics(sources, self._fetcher)

    def _serving_http(self, directory: RuntimeDirectory) -> HttpSocket:
        address = self._config.metrics.listen
        by_tcp = [] if address is None else [listening_on(address, "metrics.listen")]
        pages = {"/metrics": self._metrics.page, "/healthz": self._readiness.healthz, "/readyz": self._readiness.readyz}
        return HttpSocket([directory.listen(METRICS_SOCKET).socket, *by_tcp], pages)

    async def serve(self, manager: ServiceManager) -> None:
        """Serve until it is stopping, then let running transfers finish and give everything back.

        Raises:
            KvferryError: a device that is to be open cannot be had.
        """
        for device in self._config.devices.open:
            manager.starting(f"opening {device}")
            await self._loop.run_in_executor(self._fetcher, self._devices.open, device)
        await self._tiers.start(self._fence)
        self._adoption.adopt(self._loop, self._tiers.adopt)
        self._links.start(self._peers)
        self._control.start(self._loop, self._dispatcher.on_message, self._sessions.identities)
        self._session_socket.start(self._loop, self._control.drain)
        self._http.start()
        self._lag.start()
        self._watch_devices()
        self._inherited.close_rest()
        for pool in self._registry:
            self._descriptors.promise(pool.region, pool.tenant, "pools", PER_POOL)
        for found in self._adoption.coming:
            self._descriptors.promise(found.file, found.record.tenant, "pools", PER_REGION)
        for session in self._sessions:
            self._descriptors.promise(session, session.tenant, "sessions", PER_SESSION)
        self._descriptors.begin()
        self._adopting = self._loop.create_task(self._adopt_devices())
        self_ping = SelfPing(self._control_path, self.boot_id)
        await self_ping.check()
        if manager.watchdog_s is not None:
            self_ping.watch(manager.watchdog_s / PINGS_PER_WATCHDOG, manager.alive)
        self._readiness.serves = True
        manager.ready(f"serving, boot id {self.boot_id}")
        log.info("serving", boot_id=self.boot_id, pid=os.getpid(), version=VERSION)
        try:
            await self._told_to_end_or_succeeded()
            if self._upgrade.successor is None:
                manager.stopping()
            self._transfers.drain()
            self._tiers.operations.drain()
            await self._drain()
        finally:
            await self._close(manager, self_ping)

    async def _told_to_end_or_succeeded(self) -> None:
        waits = [self._loop.create_task(event.wait()) for event in (self._stopping, self._upgrade.ready)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _close(self, manager: ServiceManager, self_ping: SelfPing) -> None:
        """Give everything back; what outlives this daemon is the successor's as soon as nothing here writes it.

        Raises:
            DaemonLostError: the successor has ended.
        """
        self._leave_if_a_device_is_lost()
        self._leave_in_any_case()
        await self._upgrade.close()
        if self._adopting is not None:
            self._adopting.cancel()
            await asyncio.wait([self._adopting])
        await self._fence.close()
        successor = self._upgrade.successor
        if successor is not None:
            successor.hand(self._directory.handed_over())
        await self_ping.close()
        self._lag.close()
        await self._http.close()
        await self._metrics.close()
        self._remote.close()
        if self._network is not None and self._copier is not None:
            await self._network.stop()
            # Its threads know the network's memory by its address.
            await self._copier.close(self._fetcher)
            self._network.close()
        await self._verification.close()
        await self._dispatcher.close()
        await self._tiers.close()
        self._transport.close()
        self._fetcher.shutdown(wait=False, cancel_futures=True)
        self._links.close()
        self._control.close()  # first what was said, then the end of the sessions
        self._leave_sessions()
        if successor is not None:
            successor.hand(self._adoption.handed_over())
        self._adoption.leave()
        try:
            if successor is not None:
                manager.succeeded_by(successor.pid)
                successor.go()
        finally:
            await self._tables.close()
            await self._pools.close()
            log.info("ended", counters=self.counters.snapshot())
        if successor is not None and self._stopping.is_set():
            successor.tell_to_end()
        if not self._devices.let_go():
            os._exit(0)  # torch would wait for an engine's replay

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._config.service.drain_timeout_s):
                await self._effects.drained()
                await self._tiers.operations.drained()
        except TimeoutError:
            log.warning("transfers cut off", live=len(self._transfers.status()))
        finally:
            self._effects.write_log()
            self._tiers.operations.write_log()

    async def _adopt_devices(self) -> None:
        try:
            await self._adoption.adopt_devices(self._devices, self._fence)
        except Exception as cause:
            log.exception("pools on devices are not adopted", cause=str(cause))

    def _watch_devices(self) -> None:
        try:
            self._devices.check(time.monotonic())
            with contextlib.suppress(RuntimeError):  # it ends
                self._fetcher.submit(self._devices.let_go)
        finally:
            self._loop.call_later(CHECK_S, self._watch_devices)

    def _device_lost(self, device: str, error: DeviceLostError) -> None:
        """On any thread: nothing that a device does can be trusted any more, so this life of the daemon ends."""
        log.critical(
            "device lost: the daemon ends",
            device=device,
            cause=error.detail,
            remedy="its service manager restarts it; check the device (kvferry doctor, npu-smi)",
        )
        self._loop.call_soon_threadsafe(self._stopping.set)

    def _leave_if_a_device_is_lost(self) -> None:
        """End the process where a device is lost: a thread may be inside a call that never comes back."""
        if lost := self._devices.lost:
            self._adoption.forget_records(pool for pool in self._registry if pool.region.device in lost)
            self._control.close()
            self._leave_sessions()
            log.error("ended", counters=self.counters.snapshot())
            os._exit(EXIT_DEVICE_LOST)

    def _leave_sessions(self) -> None:
        """Close the sessions' sockets: they end, unless the next daemon may adopt them."""
        if self._adoption.outlives:
            self._session_socket.leave()
        else:
            self._session_socket.close()

    def _leave_in_any_case(self) -> None:
        """End the process where a call to a device holds up the rest of the end: nothing looks at the time any more."""
        if self._devices.in_use:
            timer = threading.Timer(2 * self._tuning.stuck_after_s, os._exit, (EXIT_DEVICE_LOST,))
            timer.daemon = True
            with contextlib.suppress(RuntimeError):  # no thread left: the service manager looks at the time, too
                timer.start()

    def _session_began(self, session: Session) -> None:
        self._adoption.session_began(session)
        self._transfers.session_began(session.session_id)

    def _session_ended(self, session: Session) -> None:
        """Let go of what a session had for itself, what waits for it first, and what its instance had: pages last."""
        for part, lost in (
            ("adoption", partial(self._adoption.session_ended, session.session_id)),
            ("dispatcher", partial(self._dispatcher.forget_session, session)),
            ("event rings", partial(self._rings.session_lost, session.session_id)),
            ("tables", partial(self._tables.session_lost, session.session_id)),
            ("transfers", partial(self._transfers.session_lost, session)),
            ("tiers", partial(self._tiers.session_lost, session.session_id)),
            ("pools", partial(self._pools.session_lost, session.session_id)),
        ):
            self._let_go(part, lost)
        if not self._sessions.of_instance(session.owner_id):
            self._let_go("tiers", partial(self._tiers.instance_lost, session.owner_id))
            self._let_go("pools", partial(self._pools.instance_lost, session.owner_id))

    def _let_go(self, part: str, lost: Callable[[], None]) -> None:
        """Let one part go; what it raises must not keep the others from it: the engine's pages come last."""
        try:
            lost()
        except Exception as cause:
            self.counters.add("sessions.ends_failed")
            log.exception("a session's end failed in part", part=part, cause=str(cause))

    def _events_reached(self, session_id: int, values: list[int]) -> None:
        self._transfers.events_reached(session_id, values)

    def _pool_removed(self, pool: Pool) -> None:
        self._adoption.forget(pool)
        self._tiers.pool_removed(pool)
        if self._network is not None:
            self._network.drop_pool(pool)
        self._messenger.pool_removed(pool)

    def _region_of(self, asked: RegionRequest) -> Region:
        """Return the memory that another daemon of this host may map for reading; see ``SessionSocket``."""
        self._redeem(asked)
        return self._registry.region_of(asked)

    def _ends_or_hands_over(self) -> bool:
        return self._stopping.is_set() or self._upgrade.ready.is_set()

    def _listens(self) -> bool:
        return self._control.is_listening and self._session_socket.is_listening and self._links.is_listening

    def _hello(self, call: OpenCall) -> Welcome:
        if not isinstance(call.body, Hello):
            raise MalformedError("no HELLO")
        return Welcome(
            protocol=agree(call.body.protocol_min, call.body.protocol_max),
            daemon_version=VERSION,
            limits=self._limits,
        )


async def run_daemon(
    config: Config,
    directory: RuntimeDirectory,
    manager: ServiceManager,
    tuning: Tuning = DEFAULT_TUNING,
    surroundings: Surroundings | None = None,
) -> None:
    """Serve in a locked runtime directory until a signal asks to end; see ``signals``."""
    stopping = asyncio.Event()
    with answered(asyncio.get_running_loop(), stopping):
        keep_freed_memory()
        collect_new_only()
        network = await open_network(config, tuning.network)
        keys = await open_keys(config.peers)
        await Daemon(config, directory, stopping, network, tuning, surroundings, keys).serve(manager)


def main(arguments: list[str] | None = None, tuning: Tuning = DEFAULT_TUNING) -> int:
    """Run the daemon; return its exit status.

    0 after SIGTERM; 1 where it could not start; 2 where arguments or configuration are wrong, which no restart mends;
    3 after a device was lost.
    """
    parser = argparse.ArgumentParser(prog="kvferry daemon", description="Run the daemon of this node.")
    programs.add_daemon(parser)
    options = parser.parse_args(arguments)
    inherited, predecessor = take_inherited(), None
    # A torch_npu without CANN would make torch itself fail: devices are asked for when a pool needs one.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        predecessor = Predecessor.find()
        copy_kernel.check_switch()
        read = read_config(options.config, offer(), os.environ)
        config = read.accepted()
        Tenants(config.tenants)  # an unknown name is refused before anything is taken over
        path = options.runtime_dir or Path(config.runtime_dir or runtime_dirs(os.environ)[0])
        if predecessor is not None:
            check_kept(predecessor.kept)
            inherited = Inherited(predecessor.take_over(VERSION))
        runtime_directory = RuntimeDirectory(path.absolute(), inherited)
        runtime_directory.check_path()
    except KvferryError as error:
        if predecessor is not None:
            predecessor.refuse(str(error))
        print(f"kvferry daemon: {error}", file=sys.stderr)
        return 1 if isinstance(error, DaemonLostError) else EXIT_BAD_INPUT
    try:
        lines = LogLines()
        configure_logs(config.logging, lines)
        configuration = {
            key: ConfiguredValue(value=one.value, source=one.source)
            for key, one in sourced(config, read.sources, os.environ, options.runtime_dir).items()
        }
        if predecessor is not None:
            log.info("configuration read anew", changed=changes(predecessor.config, values_of(config)))
        with runtime_directory as directory:
            store = open_store(directory.path, inherited, keep=options.keep)
            keeper = open_keeper(directory.path, store, config.keeper.grace_s)
            be_prompt()
            surroundings = Surroundings(inherited, store, keeper, lines, configuration)
            uvloop.run(run_daemon(config, directory, ServiceManager(), tuning, surroundings))
    except KvferryError as error:
        print(f"kvferry daemon: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, ConfigError) and not error.retryable else 1
    return 0

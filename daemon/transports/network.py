"""Transfers between hosts, put together: the engine, bounce buffers, staging, sender and receiver."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from urllib.parse import urlsplit

import structlog

from kvferry.daemon.config.schema import Config
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.peers.links import PeerLinks
from kvferry.daemon.services.pools import PoolService
from kvferry.daemon.services.transfers import TransferService
from kvferry.daemon.transports.bounce_buffers import BounceBuffers, FenceBounds
from kvferry.daemon.transports.direct_pages import DirectPages
from kvferry.daemon.transports.mooncake import MooncakeEngine
from kvferry.daemon.transports.mooncake_native import MooncakeSettings
from kvferry.daemon.transports.network_receiver import NetworkReceiver
from kvferry.daemon.transports.network_sender import NetworkSender
from kvferry.daemon.transports.remote import RemoteTransports
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.session_messages import NetworkStatus

log = structlog.get_logger(__name__)


class NetworkTransport:
    """Nothing, where the configuration names no transport; else what ``start`` makes and ``close`` gives back."""

    def __init__(
        self,
        config: Config,
        links: PeerLinks,
        receive_requests: TransferService,
        pools: PoolService,
        executor: Executor,
        counters: Counters,
    ) -> None:
        self._config = config.network
        self._listen = config.peers.listen
        self._links = links
        self._receive_requests = receive_requests
        self._pools = pools
        self._executor = executor
        self._counters = counters
        self._engine: MooncakeEngine | None = None
        self._bounce_buffers: BounceBuffers | None = None
        self._pages: DirectPages | None = None
        self._receiver: NetworkReceiver | None = None
        self._regions: list[HostRegion] = []

    async def start(self, transports: RemoteTransports) -> None:
        """Begin to listen, and give ``transports`` its two halves.

        Raises:
            ConfigError: no address to listen on, or Mooncake is not installed.
            OutOfMemoryError: no memory for bounce buffers or staging.
            TransferFailedError: Mooncake could not begin.
        """
        config = self._config
        if config.transport == "none":
            return
        engine = MooncakeEngine(MooncakeSettings(address=self._address(), protocol=config.protocol))
        network = self._region("network", config.bounce_buffers)
        staging = self._region("staging", config.staging)
        self._engine = await engine.__aenter__()
        # Peers may write what is registered: nothing else is, unless pages are written directly.
        await engine.register(network.address, network.size_bytes)
        if config.direct:
            self._pages = DirectPages(engine)
            self._pools.on_deleted.append(self._pages.drop)
        bounds = FenceBounds(
            network.size_bytes // 2 if config.quarantined_bytes is None else config.quarantined_bytes,
            config.quarantined_s,
            config.drain_timeout_s,
        )
        bounce_buffers = self._bounce_buffers = BounceBuffers(
            network.address, config.bounce_buffer_bytes, config.bounce_buffers, bounds
        )
        transports.receiver = self._receiver = NetworkReceiver(
            self._links.send,
            engine,
            bounce_buffers,
            self._executor,
            self._receive_requests.op_done,
            self._counters,
            self._pages,
        )
        transports.sender = NetworkSender(
            self._links.send,
            engine,
            staging,
            config.bounce_buffer_bytes,
            self._executor,
            self._receive_requests.state_machine.peers,
            self._receive_requests.execute,
            self._counters,
            config.write_timeout_s,
        )
        log.info(
            "network", transport=config.transport, session=engine.session_name, bounce_buffers=config.bounce_buffers
        )

    def status(self) -> NetworkStatus | None:
        """Return the bounce buffers as STATUS shows them; None without a transport between hosts."""
        if self._engine is None or self._bounce_buffers is None or self._receiver is None:
            return None
        return NetworkStatus(
            session=self._engine.session_name,
            bounce_buffer_bytes=self._bounce_buffers.bounce_buffer_bytes,
            bounce_buffers=self._bounce_buffers.count,
            free=self._bounce_buffers.free,
            granted=self._bounce_buffers.granted,
            quarantined=self._bounce_buffers.quarantined,
            quarantined_bytes=self._bounce_buffers.quarantined_bytes,
            direct=self._config.direct,
            state=self._receiver.state,
            held_by=self._receiver.held_by(),
        )

    async def close(self) -> None:
        """Stop listening: afterwards nothing lands, and nothing is gathered or scattered any more."""
        if self._engine is not None:
            await self._engine.close()
        if self._pages is not None:
            await self._pages.close()
        await asyncio.to_thread(self._executor.shutdown)  # threads know the memory by its address
        for region in self._regions:
            region.close()

    def _region(self, name: str, buffers: int) -> HostRegion:
        region = HostRegion.create(name, buffers * self._config.bounce_buffer_bytes)
        self._regions.append(region)
        return region

    def _address(self) -> str:
        address = self._config.address or (urlsplit(self._listen).hostname if self._listen else None)
        if not address:
            raise ConfigError("say at which address, or set peers.listen", field="network.address")
        return address

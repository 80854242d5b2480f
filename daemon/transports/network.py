"""Transfers between hosts, assembled: network engine, bounce buffers, staging, sender and receiver."""

from __future__ import annotations

from urllib.parse import urlsplit

import structlog

from kvferry.daemon.config.schema import Config, NetworkConfig
from kvferry.daemon.transports.bounce_buffers import BounceBuffers, FenceBounds
from kvferry.daemon.transports.direct_pages import DirectPages
from kvferry.daemon.transports.mooncake import MooncakeEngine
from kvferry.daemon.transports.mooncake_native import MooncakeSettings
from kvferry.daemon.transports.network_receiver import NetworkReceiver
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.session_messages import NetworkStatus

log = structlog.get_logger(__name__)


class NetworkMemory:
    """The engine that writes between hosts and the memory that it may access. Made by ``open_network``.

    Attributes:
        engine: the network engine, Mooncake's transfer engine; it listens.
        bounce_buffers: the memory that peers write.
        staging: the memory that outgoing bytes are gathered in, in buffers of ``bounce_buffer_bytes``.
        pages: whole pages that peers may write directly; None where the configuration does not allow it.
    """

    def __init__(self, config: NetworkConfig, engine: MooncakeEngine, buffers: HostRegion, staging: HostRegion) -> None:
        bounds = FenceBounds(
            buffers.size_bytes // 2 if config.quarantined_bytes is None else config.quarantined_bytes,
            config.quarantined_s,
            config.drain_timeout_s,
        )
        self.config = config
        self.engine = engine
        self.staging = staging
        self.bounce_buffers = BounceBuffers(buffers.address, config.bounce_buffer_bytes, config.bounce_buffers, bounds)
        self.pages = DirectPages(engine) if config.direct else None
        self._regions = (buffers, staging)

    def __repr__(self) -> str:
        """Show its session name and buffers."""
        return f"<NetworkMemory {self.engine.session_name} {self.bounce_buffers!r}>"

    def drop_pool(self, pool: Pool) -> None:
        """Unregister a pool's pages, if peers may write them."""
        if self.pages is not None:
            self.pages.drop(pool)

    def status(self, receiver: NetworkReceiver) -> NetworkStatus:
        """Return the bounce buffers as STATUS shows them."""
        buffers = self.bounce_buffers
        return NetworkStatus(
            session=self.engine.session_name,
            bounce_buffer_bytes=buffers.bounce_buffer_bytes,
            bounce_buffers=buffers.count,
            free=buffers.free,
            granted=buffers.granted,
            quarantined=buffers.quarantined,
            quarantined_bytes=buffers.quarantined_bytes,
            direct=self.config.direct,
            state=receiver.state,
            held_by=receiver.held_by(),
        )

    async def stop(self) -> None:
        """Stop listening; no write lands afterwards."""
        await self.engine.close()
        if self.pages is not None:
            await self.pages.close()

    def close(self) -> None:
        """Unmap the memory; no thread may gather or scatter any more."""
        for region in self._regions:
            region.close()


async def open_network(config: Config) -> NetworkMemory | None:
    """Start listening for writes of other hosts; None where no transport between hosts is configured.

    Raises:
        ConfigError: no address to listen on, or Mooncake is not installed.
        OutOfMemoryError: no memory for bounce buffers or staging.
        TransferFailedError: Mooncake could not start.
    """
    network = config.network
    if network.transport == "none":
        return None
    address = network.address or (urlsplit(config.peers.listen).hostname if config.peers.listen else None)
    if not address:
        raise ConfigError("set the address to listen at, or peers.listen", field="network.address")
    engine = MooncakeEngine(MooncakeSettings(address=address, protocol=network.protocol))
    buffers = HostRegion.create("network", network.bounce_buffers * network.bounce_buffer_bytes)
    staging = HostRegion.create("staging", network.staging * network.bounce_buffer_bytes)
    await engine.__aenter__()
    # Peers may write whatever is registered, so only this is, unless pages are written directly.
    await engine.register(buffers.address, buffers.size_bytes)
    log.info(
        "network ready", transport=network.transport, session=engine.session_name, bounce_buffers=network.bounce_buffers
    )
    return NetworkMemory(network, engine, buffers, staging)

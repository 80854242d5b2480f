"""Transfers between hosts, put together: the engine, the slots that peers write, the staging, and both halves."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from urllib.parse import urlsplit

import structlog

from kvferry.daemon.config import Config
from kvferry.daemon.landing import FenceBounds, LandingSlots
from kvferry.daemon.metrics import Counters
from kvferry.daemon.peers import PeerLinks
from kvferry.daemon.pool_service import PoolService
from kvferry.daemon.rooms.service import RoomService
from kvferry.daemon.transports.direct_pages import DirectPages
from kvferry.daemon.transports.landing_receiver import LandingReceiver
from kvferry.daemon.transports.landing_sender import LandingSender
from kvferry.daemon.transports.mooncake import MooncakeEngine
from kvferry.daemon.transports.mooncake_native import MooncakeSettings
from kvferry.daemon.transports.remote import RemoteTransports
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.session_messages import LandingStatus

log = structlog.get_logger(__name__)


class Landing:
    """Nothing, where the configuration names no transport; else what ``start`` makes and ``close`` gives back."""

    def __init__(
        self,
        config: Config,
        links: PeerLinks,
        rooms: RoomService,
        pools: PoolService,
        executor: Executor,
        counters: Counters,
    ) -> None:
        self._config = config.landing
        self._listen = config.peers.listen
        self._links = links
        self._rooms = rooms
        self._pools = pools
        self._executor = executor
        self._counters = counters
        self._engine: MooncakeEngine | None = None
        self._slots: LandingSlots | None = None
        self._pages: DirectPages | None = None
        self._receiver: LandingReceiver | None = None
        self._regions: list[HostRegion] = []

    async def start(self, transports: RemoteTransports) -> None:
        """Begin to listen, and give ``transports`` its two halves.

        Raises:
            ConfigError: no address to listen on, or Mooncake is not installed.
            OutOfMemoryError: no memory for slots or staging.
            TransferFailedError: Mooncake could not begin.
        """
        config = self._config
        if config.transport == "none":
            return
        engine = MooncakeEngine(MooncakeSettings(address=self._address(), protocol=config.protocol))
        landing = self._region("landing", config.slots)
        staging = self._region("staging", config.staging)
        self._engine = await engine.__aenter__()
        # Peers may write what is registered: nothing else is, unless pages are written directly.
        await engine.register(landing.address, landing.size_bytes)
        if config.direct:
            self._pages = DirectPages(engine)
            self._pools.on_deleted.append(self._pages.drop)
        bounds = FenceBounds(
            landing.size_bytes // 2 if config.quarantined_bytes is None else config.quarantined_bytes,
            config.quarantined_s,
            config.drain_timeout_s,
        )
        slots = self._slots = LandingSlots(landing.address, config.slot_bytes, config.slots, bounds)
        transports.receiver = self._receiver = LandingReceiver(
            self._links.send,
            engine,
            slots,
            self._executor,
            self._rooms.piece_done,
            self._counters,
            self._pages,
        )
        transports.sender = LandingSender(
            self._links.send,
            engine,
            staging,
            config.slot_bytes,
            self._executor,
            self._rooms.book.peers,
            self._rooms.carry_out,
            self._counters,
            config.write_timeout_s,
        )
        log.info("landing", transport=config.transport, session=engine.session_name, slots=config.slots)

    def status(self) -> LandingStatus | None:
        """Return the slots as STATUS shows them; None without a transport between hosts."""
        if self._engine is None or self._slots is None or self._receiver is None:
            return None
        return LandingStatus(
            session=self._engine.session_name,
            slot_bytes=self._slots.slot_bytes,
            slots=self._slots.count,
            free=self._slots.free,
            granted=self._slots.granted,
            quarantined=self._slots.quarantined,
            quarantined_bytes=self._slots.quarantined_bytes,
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
        region = HostRegion.create(name, buffers * self._config.slot_bytes)
        self._regions.append(region)
        return region

    def _address(self) -> str:
        address = self._config.address or (urlsplit(self._listen).hostname if self._listen else None)
        if not address:
            raise ConfigError("say at which address, or set peers.listen", field="landing.address")
        return address

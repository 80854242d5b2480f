"""Builds the cache tiers and their services, and starts, drains and closes them."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Final

import structlog

from kvferry.daemon.control.dispatch import Dispatcher
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.sessions import SessionRegistry
from kvferry.daemon.process.device_keeper import Fence
from kvferry.daemon.process.memory import HostMemory
from kvferry.daemon.process.time_slices import background
from kvferry.daemon.services.cache_reports import CacheReports
from kvferry.daemon.services.event_rings import EventRings
from kvferry.daemon.services.offload import OffloadService
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.services.prefix_cache import PrefixCache
from kvferry.daemon.services.receive_to_host import HostReceives
from kvferry.daemon.tiers.copier import TierCopier
from kvferry.daemon.tiers.disk_tier import DiskTier
from kvferry.daemon.tiers.host_tier import HostTier
from kvferry.daemon.tiers.kept_tier import KeptTier
from kvferry.daemon.tiers.lower_tiers import LowerTiers
from kvferry.daemon.tiers.operations import Operations
from kvferry.daemon.tiers.remote_store import RemoteStore
from kvferry.daemon.tiers.remote_tier import RemoteTier
from kvferry.daemon.tiers.scheduler import Scheduler
from kvferry.daemon.tiers.snapshots import SnapshotRegistry
from kvferry.pools import copy_kernel
from kvferry.pools.integrity import RESTART, Check, Problem
from kvferry.pools.pool import Pool
from kvferry.pools.tiers.arena import Extent
from kvferry.pools.tiers.index import PinnedBlocks
from kvferry.protocol.config.schema import Config
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.session_messages import TierStatus

REST_INTERVAL_S: Final = 0.02
MOST_COPY_THREADS: Final = 4
"""How many copy one operation is measured; they are in the background of everything else."""

log = structlog.get_logger(__name__)


def checks_of(
    host: HostTier,
    snapshots: SnapshotRegistry,
    host_receives: HostReceives,
    operations: Operations,
    lower: LowerTiers,
    cache: PrefixCache,
) -> Iterator[Check]:
    """Yield the checks of tiers, each against what holds memory and blocks there."""

    def extents() -> Iterator[Extent]:
        holders = (snapshots, host_receives, lower, cache)
        return itertools.chain.from_iterable(holder.extents() for holder in holders)

    def pinned() -> Iterator[PinnedBlocks]:
        return itertools.chain(cache.pinned(), lower.pinned())

    yield from host.checks(extents, pinned)
    yield Check(
        "the blocks being stored",
        lambda: host.index.writing_problems(cache.writing()),
        lambda: host.index.changes,
        RESTART,
    )
    yield from lower.checks()
    yield Check("the operations", operations.problems, lambda: None, RESTART)


class Tiers:
    """The host, disk and remote tiers with their services. For the control loop's thread only.

    Attributes:
        host_receives: handles RECEIVEs into the host tier.
        operations: all live operations.
        offloads, cache, reports: handle what else engines ask for.
        lower: the tiers below the host tier.
    """

    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        sessions: SessionRegistry,
        pools: PoolRegistry,
        rings: EventRings,
        scheduler: Scheduler,
        executor: Executor,
        memory: HostMemory,
        counters: Counters,
        kept: KeptTier | None = None,
    ) -> None:
        """Build the tiers; ``executor`` runs calls that wait for devices, ``kept`` outlives the daemon."""
        self._config = config.tiers
        self._counters = counters
        self._scheduler = scheduler
        loop = asyncio.get_running_loop()
        self._kept = kept
        self._resting: asyncio.Task[None] | None = None
        self._sessions = sessions
        self._host = HostTier(
            config.tiers, counters, memory, call_soon=loop.call_soon, kept=kept, tenants=sessions.tenants
        )
        threads = min(MOST_COPY_THREADS, len(os.sched_getaffinity(0)))
        copy_threads = copy_kernel.new_copy_threads(threads, background())
        self._copier = TierCopier(loop, scheduler, threads=threads, copy_threads=copy_threads)
        self.operations = Operations(dispatcher, sessions, counters, self._copier, self._host, executor)
        self.offloads = OffloadService(
            dispatcher,
            pools,
            rings,
            self._host,
            self.operations,
            grace_s=config.tiers.snapshot_grace_s,
        )
        self.host_receives = HostReceives(self._host, self.offloads, self.operations)
        self.lower = LowerTiers(self._host, self._disk(), self._remote(config), counters)
        self.cache = PrefixCache(dispatcher, pools, rings, self._host, self.operations, self.lower, counters)
        self.reports = CacheReports(dispatcher, pools, self._host, self.lower)

    def __repr__(self) -> str:
        """Show the live counts."""
        return f"<Tiers {self._host!r} {self.operations!r} {self.lower!r}>"

    async def start(self, fence: Fence) -> None:
        """Start the lower tiers, and allocate the first host tier memory: it is used once ``fence`` is passed.

        Raises:
            ConfigError: a tier cannot be started as it is configured.
        """
        if self._kept is not None:
            self._host.rests = True
            self._resting = asyncio.create_task(self._rest(self._kept, fence), name="the host tier's memory rests")
        await self.lower.start()
        self._host.populate(0)

    def adopt(self) -> None:
        """Take over what the daemon before has left in the host tier; its sessions are adopted already."""
        snapshots = self._host.adopt()
        if snapshots:
            self._counters.add("adoption.snapshots", len(snapshots))
        self.offloads.adopt(snapshots, {(one.tenant, one.owner_id) for one in self._sessions})

    async def _rest(self, kept: KeptTier, fence: Fence) -> None:
        """Let nobody use memory without a record while what a daemon before has begun may still write into it."""
        if not await fence.passed():
            log.error("the host tier takes nothing new", cause="a device may still write into it for a daemon before")
            return
        if kept.has_writers():
            log.warning("the host tier takes nothing new while a process of the daemon before has its memory")
        while kept.has_writers():  # noqa: ASYNC110  the kernel says no word when the last one has ended
            await asyncio.sleep(REST_INTERVAL_S)
        self._host.rests = False

    def session_lost(self, session_id: int) -> None:
        """Stop a session's operations, and forget its CACHE_EVENTS."""
        self.operations.session_lost(session_id)
        self.reports.session_lost(session_id)

    def pool_removed(self, pool: Pool) -> None:
        """End what waits for pages of a pool."""
        self.offloads.pool_removed(pool)

    def instance_lost(self, owner_id: int) -> None:
        """Release an instance's leases; its snapshots are kept for a while."""
        self.cache.leases.instance_lost(owner_id)
        self.offloads.instance_lost(owner_id)

    def checks(self) -> Iterator[Check]:
        """Yield the checks of the tiers, each against what holds memory and blocks there."""
        if self._host.enabled:
            snapshots = self.offloads.snapshots
            yield from checks_of(self._host, snapshots, self.host_receives, self.operations, self.lower, self.cache)

    def counts(self) -> dict[str, int]:
        """Return how many blocks, snapshots and operations there are."""
        snapshots, operations = len(self.offloads.snapshots), sum(1 for _ in self.operations)
        return {"blocks": len(self._host.index), "snapshots": snapshots, "operations": operations}

    async def examine_files(self, *, deep: bool, until_s: float) -> tuple[int, list[Problem]]:
        """See ``DiskTier.examine_files``."""
        return await self.lower.examine_files(deep=deep, until_s=until_s)

    def status(self) -> list[TierStatus]:
        """Return the tiers as STATUS shows them."""
        return [self._host.status(len(self.offloads.snapshots)), *self.lower.status()]

    def by_tenant(self) -> dict[int, tuple[int, int]]:
        """Return the bytes of each tenant in the host tier and on disk."""
        on_disk = self.lower.on_disk()
        in_host = {tenant: account.taken_bytes for tenant, account in self._host.index.accounts.items()}
        return {tenant: (in_host.get(tenant, 0), on_disk.get(tenant, 0)) for tenant in {*in_host, *on_disk}}

    async def close(self) -> None:
        """End all operations and threads; no byte moves afterwards."""
        if self._resting is not None:
            self._resting.cancel()
        self.operations.drain()
        self._scheduler.close()
        self.cache.close()
        await self.lower.close()
        self._copier.close()
        await self.operations.close()
        self._host.close()

    def _disk(self) -> DiskTier | None:
        config = self._config
        if config.disk.path is None:
            return None
        if not self._host.enabled:
            raise ConfigError("the disk tier needs the host tier: tiers.host_bytes is 0", field="tiers.disk.path")
        return DiskTier(config.disk, config.policy, self._host, self._scheduler, self._counters)

    def _remote(self, config: Config) -> RemoteTier | None:
        remote = config.tiers.remote
        if remote.transport == "none":
            return None
        if not self._host.enabled:
            raise ConfigError(
                "the remote tier needs the host tier: tiers.host_bytes is 0", field="tiers.remote.transport"
            )
        address = config.store_address
        if address is None:
            raise ConfigError("set the address by which other nodes reach this one", field="tiers.remote.address")
        region = self._host.region
        store = RemoteStore(remote, address, region.fd, region.size_bytes, self._counters)
        return RemoteTier(store, self._host, self._scheduler, self._counters, shared=remote.shared)

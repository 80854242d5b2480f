"""The tiers below the host tier, together: what goes down to them, and what comes up.

A block comes up once however many ask for it. It lands in memory that is charged to its tenant meanwhile, and becomes
visible in the host tier with its right checksums or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.tiers.disk_tier import DiskTier
from kvferry.daemon.tiers.host_tier import HostTier
from kvferry.daemon.tiers.remote_tier import RemoteTier
from kvferry.pools.tiers.arena import Offsets
from kvferry.pools.tiers.cached_block import BlockState, CachedBlock, Digests
from kvferry.pools.tiers.namespaces import Namespace
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.session_messages import TierStatus

COMING_AT_ONCE: Final = 32
"""Blocks that have memory of the host tier while they come up; the others wait for their turn."""

log = structlog.get_logger(__name__)


class LowerTiers:
    """See above; either may be missing. For the control loop."""

    def __init__(self, host: HostTier, disk: DiskTier | None, remote: RemoteTier | None, counters: Counters) -> None:
        self._host = host
        self._disk = disk
        self._remote = remote
        self._counters = counters
        self._coming: dict[CachedBlock, asyncio.Task[bool]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(COMING_AT_ONCE)

    def __repr__(self) -> str:
        """Show what comes up."""
        return f"<LowerTiers {self._disk!r} {self._remote!r} coming={self.coming} leaving={self.leaving}>"

    @property
    def coming(self) -> int:
        """Return how many blocks come up."""
        return len(self._coming)

    @property
    def leaving(self) -> int:
        """Return how many removals from the remote tier are under way."""
        return len(self._leaving)

    async def start(self) -> None:
        """Begin to work."""
        if self._disk is not None:
            self._disk.start()
        if self._remote is not None:
            await self._remote.start()

    async def close(self) -> None:
        """End; what has not gone down is lost."""
        tasks = [*self._coming.values(), *self._leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._disk is not None:
            await self._disk.close()
        if self._remote is not None:
            await self._remote.close()

    def stored(self, blocks: Sequence[CachedBlock]) -> None:
        """Let blocks that are new in the host tier go down, in the background."""
        for block in blocks:
            if self._disk is not None:
                self._disk.store(block)
            if self._remote is not None:
                self._remote.store(block)

    def used(self, blocks: Sequence[CachedBlock]) -> None:
        """Note the use of blocks."""
        if self._disk is not None:
            for block in reversed(blocks):
                self._disk.used(block)

    async def find(
        self, namespace: Namespace, hashes: Sequence[bytes], parent: bytes | None, page_bytes: int
    ) -> list[CachedBlock]:
        """Return how many leading ones of these blocks the remote tier has, as blocks of the index."""
        if self._remote is None or not hashes:
            return []
        return await self._remote.find(namespace, hashes, parent, page_bytes)

    @property
    def asks_far(self) -> bool:
        """Return whether ``find`` may find anything."""
        return self._remote is not None and self._remote.available

    def promote(self, block: CachedBlock) -> asyncio.Future[bool] | None:
        """Bring a block to the host tier; None where it is there, or gone. True once it is there, else False."""
        if block.in_host or block.state is not BlockState.READY:
            return None
        coming = self._coming.get(block)
        if coming is None:
            coming = self._coming[block] = asyncio.create_task(self._promote(block))
            coming.add_done_callback(lambda _: self._coming.pop(block, None))
        return coming

    def remove(self, blocks: Sequence[CachedBlock]) -> None:
        """Delete what lower tiers have of blocks that the index has no more."""
        if self._disk is not None:
            self._disk.remove(blocks)
        far = [block for block in blocks if block.in_remote]
        if self._remote is not None and far:
            task = asyncio.create_task(self._remote.remove(far))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    def status(self) -> list[TierStatus]:
        """Return the tiers as STATUS shows them."""
        return [one.status() for one in (self._disk, self._remote) if one is not None]

    async def _promote(self, block: CachedBlock) -> bool:
        async with self._turns:
            return block.in_host or (block.state is BlockState.READY and await self._promote_now(block))

    async def _promote_now(self, block: CachedBlock) -> bool:
        """Read a block from the nearest tier that has it; see ``promote``."""
        tenant, pages = block.namespace.tenant, block.namespace.block_pages
        page_bytes = self._host.page_bytes[block.namespace]
        try:
            offsets = self._host.reserve(tenant, pages, page_bytes)
        except KvferryError as error:
            self._counters.add("tiers.host.promotions_refused")
            log.info("a cached block cannot come up", cause=error.detail)
            return False
        accounts = self._host.index.accounts
        accounts.charge(tenant, block.size_bytes)
        entered = False
        try:
            digests = await self._read(block, offsets, page_bytes)
            entered = digests is not None and self._host.index.enter_host(block, offsets, digests)
        finally:
            accounts.discharge(tenant, block.size_bytes)
            if not entered:
                self._host.free(offsets, page_bytes)
        if entered:
            self._counters.add("tiers.host.promoted_blocks")
        return block.in_host

    async def _read(self, block: CachedBlock, offsets: Offsets, page_bytes: int) -> Digests | None:
        digests = None
        if self._disk is not None and block.on_disk:
            digests = await self._disk.read(block, offsets, page_bytes)
        if digests is None and self._remote is not None and block.in_remote and block.state is BlockState.READY:
            digests = await self._remote.read(block, offsets, page_bytes)
        return digests

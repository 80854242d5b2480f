"""The tiers below the host tier, taken together: demotion to them and promotion from them.

A block is promoted once, however many lookups ask for it. It is read into memory that is charged to its tenant
meanwhile, and becomes visible in the host tier only if its checksums match.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Final

import structlog

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.tiers.disk_tier import DiskTier
from kvferry.daemon.tiers.host_tier import DEMOTION, HostTier, SpaceRequest
from kvferry.daemon.tiers.remote_tier import RemoteTier
from kvferry.pools.integrity import RESTART, Check, Problem
from kvferry.pools.tiers.arena import Extent, Offsets
from kvferry.pools.tiers.cached_block import BlockState, CachedBlock, Digests, Namespace
from kvferry.pools.tiers.index import PinnedBlocks
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.session_messages import TierStatus

log = structlog.get_logger(__name__)


class Background:
    """Tasks on the control loop that outlive the request that started them: tracked until done, with errors logged."""

    def __init__(self, what: str) -> None:
        """Name the tasks ``what`` in the log."""
        self._what = what
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        """Show how many are running."""
        return f"<Background {self._what} {len(self._tasks)}>"

    def __len__(self) -> int:
        """Return how many are running."""
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        """Start a task; an exception it raises is logged."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Cancel the running tasks and wait for them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task failed", what=self._what, exc_info=task.exception())


MAX_PROMOTIONS: Final = 32
"""Blocks promoted at a time, each with memory of the host tier; others wait."""


class LowerTiers:
    """The lower tiers; either may be missing. For the control loop."""

    def __init__(self, host: HostTier, disk: DiskTier | None, remote: RemoteTier | None, counters: Counters) -> None:
        self._host = host
        self._disk = disk
        self.remote = remote
        self._counters = counters
        self._promotions: dict[CachedBlock, asyncio.Task[bool]] = {}
        self._reading: dict[CachedBlock, Extent] = {}
        """The memory that blocks are being read into."""
        self._removals = Background("a removal from the remote tier")
        self._promotion_slots = asyncio.Semaphore(MAX_PROMOTIONS)

    def __repr__(self) -> str:
        """Show the tiers, and the promotions and removals in progress."""
        return f"<LowerTiers {self._disk!r} {self.remote!r} promotions={self.promotions} removals={self.removals}>"

    @property
    def promotions(self) -> int:
        """Return the number of promotions in progress."""
        return len(self._promotions)

    @property
    def removals(self) -> int:
        """Return the number of removals from the remote tier in progress."""
        return len(self._removals)

    def on_disk(self) -> dict[int, int]:
        """Return the bytes of each tenant on disk."""
        return {} if self._disk is None else self._disk.by_tenant()

    async def start(self) -> None:
        """Start the tiers that are configured."""
        if self._disk is not None:
            self._disk.start()
        if self.remote is not None:
            await self.remote.start()

    async def close(self) -> None:
        """Stop; blocks that are not demoted by then are lost."""
        tasks = list(self._promotions.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._removals.close()
        if self._disk is not None:
            await self._disk.close()
        if self.remote is not None:
            await self.remote.close()

    def stored(self, blocks: Sequence[CachedBlock]) -> None:
        """Demote blocks that are new in the host tier, in the background."""
        for block in blocks:
            if self._disk is not None:
                self._disk.store(block)
            if self.remote is not None:
                self.remote.store(block)

    def used(self, blocks: Sequence[CachedBlock]) -> None:
        """Record a use of blocks, for the disk tier's policy."""
        if self._disk is not None:
            self._disk.used(blocks[::-1])

    async def find(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        parent: bytes | None,
        page_bytes: int,
        *,
        gaps: bool = False,
    ) -> list[CachedBlock]:
        """Return those leading blocks that lower tiers have and the index may not know, as blocks of the index.

        With ``gaps`` also those after a missing one, of a long list the last ones; some may be returned twice.
        """
        found = list[CachedBlock]()
        if self._disk is not None and self._disk.is_scanning:
            found = await self._disk.find(namespace, hashes, gaps=gaps)
        rest = hashes if gaps else hashes[len(found) :]
        if self.remote is None or not self.remote.available or not rest:
            return found
        parent = found[-1].hash if found and not gaps else parent
        return found + await self.remote.find(namespace, rest, parent, page_bytes, gaps=gaps)

    @property
    def may_find(self) -> bool:
        """Return whether ``find`` may find anything."""
        is_scanning = self._disk is not None and self._disk.is_scanning
        return is_scanning or (self.remote is not None and self.remote.available)

    async def known(self) -> None:
        """Wait until the index knows what is on disk."""
        if self._disk is not None:
            await self._disk.scan_ended()

    def promote(self, block: CachedBlock) -> asyncio.Future[bool] | None:
        """Promote a block to the host tier; None where it is there already, or gone.

        The result tells whether it is there.
        """
        if block.in_host or block.state is not BlockState.READY:
            return None
        task = self._promotions.get(block)
        if task is None:
            task = self._promotions[block] = asyncio.create_task(self._promote(block))
            task.add_done_callback(lambda _: self._promotions.pop(block, None))
        return task

    def remove(self, blocks: Sequence[CachedBlock]) -> None:
        """Delete blocks from the lower tiers that the index has dropped."""
        if self._disk is not None:
            self._disk.remove(blocks)
        in_remote = [block for block in blocks if block.in_remote]
        if self.remote is not None and in_remote:
            self._removals.spawn(self.remote.remove(in_remote))

    def extents(self) -> Iterator[Extent]:
        """Yield the memory in the host tier that blocks are being read into."""
        return iter(self._reading.values())

    def pinned(self) -> Iterator[PinnedBlocks]:
        """Yield the blocks that are being copied to a lower tier."""
        for tier in (self._disk, self.remote):
            if tier is not None:
                yield PinnedBlocks(DEMOTION, tier.copying)

    def checks(self) -> Iterator[Check]:
        """Yield the checks of what the lower tiers know of their blocks."""
        disk = self._disk
        if disk is not None:
            yield Check("the disk tier's index", disk.problems, lambda: self._host.index.changes, RESTART)

    async def examine_files(self, *, deep: bool, until_s: float) -> tuple[int, list[Problem]]:
        """See ``DiskTier.examine_files``; finds nothing where there is no disk tier."""
        return (0, []) if self._disk is None else await self._disk.examine_files(deep=deep, until_s=until_s)

    def status(self) -> list[TierStatus]:
        """Return the tiers as STATUS shows them."""
        return [one.status() for one in (self._disk, self.remote) if one is not None]

    async def _promote(self, block: CachedBlock) -> bool:
        async with self._promotion_slots:
            return block.in_host or (block.state is BlockState.READY and await self._promote_now(block))

    async def _promote_now(self, block: CachedBlock) -> bool:
        """Read a block from the nearest tier that has it; see ``promote``."""
        tenant, pages = block.namespace.tenant, block.namespace.block_pages
        page_bytes = self._host.page_bytes[block.namespace]
        try:
            for _ in self._host.making_room(tenant, [SpaceRequest(pages, page_bytes)]):
                await asyncio.sleep(0)
            offsets = self._host.reserve(tenant, pages, page_bytes)
        except KvferryError as error:
            self._counters.add("tiers.host.promotions_refused")
            log.info("a cached block was not promoted", cause=error.detail)
            return False
        self._reading[block] = Extent(offsets, page_bytes, f"promotion of {block.hash[:4].hex()}", tenant)
        promoted = False
        try:
            digests = await self._read(block, offsets, page_bytes)
            promoted = digests is not None and self._host.enter(block, offsets, digests)
        finally:
            del self._reading[block]
            if promoted:  # the index counts it now
                self._host.discharge(tenant, pages, page_bytes)
            else:
                self._host.release(tenant, offsets, page_bytes)
        if promoted:
            self._counters.add("tiers.host.promoted_blocks")
        return block.in_host

    async def _read(self, block: CachedBlock, offsets: Offsets, page_bytes: int) -> Digests | None:
        digests = None
        if self._disk is not None and block.on_disk:
            digests = await self._disk.read(block, offsets, page_bytes)
        if digests is None and self.remote is not None and block.in_remote and block.state is BlockState.READY:
            digests = await self.remote.read(block, offsets, page_bytes)
        return digests

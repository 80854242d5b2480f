"""The remote tier: cached blocks that many nodes share in a Mooncake Store; see ``remote_store`` for the store itself.

New blocks are put there in the background; a lookup asks it for what no nearer tier has. Every fetched block is
verified against its checksums before it becomes visible.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Final

import structlog
import xxhash

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.process.threads import started_threads
from kvferry.daemon.tiers.host_tier import Demotions, HostTier
from kvferry.daemon.tiers.remote_store import RemoteStore, remote_name
from kvferry.daemon.tiers.scheduler import OperationClass, Scheduler
from kvferry.pools.tiers.arena import Offsets, whole_units
from kvferry.pools.tiers.cached_block import BlockKey, BlockState, CachedBlock, Digests, Namespace, Tier
from kvferry.protocol.session_messages import TierStatus

MAX_NAMES: Final = 4096
"""Names that one lookup asks for, of each group; others count as missing."""

MAX_KNOWN: Final = 1 << 18
"""Blocks in the index because the store once had them: the store does not report what it has dropped since."""

log = structlog.get_logger(__name__)


class RemoteTier:
    """The remote tier. For the control loop; checksums are computed on a thread."""

    def __init__(
        self,
        store: RemoteStore,
        host: HostTier,
        scheduler: Scheduler,
        counters: Counters,
        *,
        shared: bool,
        hasher: Executor | None = None,
    ) -> None:
        """Compute checksums on ``hasher``, by default a thread of its own; it is shut down with the tier."""
        self._store = store
        self._host = host
        self._scheduler = scheduler
        self._counters = counters
        self._shared = shared
        self._queue = Demotions(host, Tier.REMOTE, self._put)
        self._known: deque[CachedBlock] = deque()
        self._hasher = hasher or started_threads(1, "remote-hash")
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """Show the store and the number of queued blocks."""
        return f"<RemoteTier {self._store!r} waiting={self.waiting}>"

    @property
    def waiting(self) -> int:
        """Return the number of blocks that wait to be put."""
        return len(self._queue)

    @property
    def copying(self) -> tuple[CachedBlock, ...]:
        """Return the block that is being put, if any: it is pinned."""
        return self._queue.copying

    @property
    def available(self) -> bool:
        """Return whether the store is reachable."""
        return self._store.available

    async def start(self) -> None:
        """Start joining the store.

        Raises:
            ConfigError: Mooncake is not installed, or the address does not belong to this host.
        """
        await self._store.start()
        self._task = asyncio.create_task(self._queue.run(), name="remote tier")

    async def close(self) -> None:
        """Leave the store."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._store.close()
        await asyncio.to_thread(self._hasher.shutdown, cancel_futures=True)

    def store(self, block: CachedBlock) -> None:
        """Queue a block of the host tier to be put, unless the store is away or too many blocks wait."""
        if self.available and not self._queue.add(block):
            self._counters.add("tiers.remote.skipped_blocks")

    async def find(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        parent: bytes | None,
        page_bytes: int,
        *,
        gaps: bool = False,
    ) -> list[CachedBlock]:
        """Return those leading blocks that the store has, entered into the index; ``gaps``: see ``LowerTiers.find``."""
        pairs = list(zip((parent, *hashes), hashes, strict=False))
        pairs = pairs[-MAX_NAMES:] if gaps else pairs[:MAX_NAMES]
        names = [remote_name(BlockKey(namespace, block_hash), shared=self._shared) for _, block_hash in pairs]
        exists = await self._store.exists(names)
        size_bytes = namespace.block_pages * whole_units(page_bytes)
        index, found = self._host.index, []
        for (previous, block_hash), in_store in zip(pairs, exists, strict=False):
            block = known = index.get(namespace, block_hash)  # a nearer tier may have what the store lacks
            if in_store:
                block = index.adopt(namespace, block_hash, previous, size_bytes, tier=Tier.REMOTE)
                if known is None:
                    self._remember(block)
            if block is not None and block.state is BlockState.READY:
                found.append(block)
            elif not gaps:  # missing, or an engine is storing it right now
                break
        return found

    async def read(self, block: CachedBlock, offsets: Offsets, page_bytes: int) -> Digests | None:
        """Fetch a block into the arena; return its digests, or None where it is missing or damaged."""
        ranges = [(at, page_bytes) for at in offsets.tolist()]
        name = self._name(block)
        header = await self._store.get(name, ranges, pages=len(ranges))
        if header is not None:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._hasher, self._digests, offsets, page_bytes)
            if found == header.digests:
                self._counters.add("tiers.remote.read_blocks")
                return found
            self._counters.add("tiers.remote.damaged_blocks")
            log.warning("a cached block of the remote tier is damaged", name=name)
            await self._store.remove([name])
        else:
            self._counters.add("tiers.remote.missing_blocks")
        self._host.index.set_tier(block, Tier.REMOTE, present=False)
        return None

    async def remove(self, blocks: Sequence[CachedBlock]) -> None:
        """Delete blocks from the store."""
        await self._store.remove([self._name(block) for block in blocks])

    def status(self) -> TierStatus:
        """Return the tier as STATUS shows it; only the store's master knows how full the store is."""
        health = self._store.health
        return TierStatus(
            tier="remote",
            state=self._store.state,
            total_bytes=0,
            used_bytes=0,
            write_us=health.mean_us("write"),
            read_us=health.mean_us("read"),
        )

    async def _put(self, block: CachedBlock) -> None:
        """Put a block once the scheduler allows it."""
        assert block.offsets is not None, block
        if not self.available or not await self._scheduler.begin_async(OperationClass.DEMOTION, block.size_bytes):
            return
        page_bytes = self._host.page_bytes[block.namespace]
        try:
            loop = asyncio.get_running_loop()
            digests = block.digests or await loop.run_in_executor(
                self._hasher, self._digests, block.offsets, page_bytes
            )
            ranges = [(at, page_bytes) for at in block.offsets.tolist()]
            stored = await self._store.put(self._name(block), ranges, parent=block.parent, digests=digests)
        finally:
            self._scheduler.end(OperationClass.DEMOTION, block.size_bytes)
        if stored and self._host.index.set_tier(block, Tier.REMOTE, present=True):
            self._counters.add("tiers.remote.written_blocks")
            self._remember(block)
        elif stored:  # it was dropped meanwhile
            await self.remove([block])

    def _remember(self, block: CachedBlock) -> None:
        """Remember a block of the store. Above the bound forget the oldest: a later lookup may find it again."""
        self._known.append(block)
        if len(self._known) > MAX_KNOWN:
            oldest = self._known.popleft()
            if oldest.pins:
                self._known.append(oldest)
            elif oldest.state is BlockState.READY:
                self._host.index.set_tier(oldest, Tier.REMOTE, present=False)

    def _digests(self, offsets: Offsets, page_bytes: int) -> Digests:
        memory = memoryview(self._host.region.buffer)
        return tuple(xxhash.xxh3_64_intdigest(memory[at : at + page_bytes]) for at in offsets.tolist())

    def _name(self, block: CachedBlock) -> str:
        return remote_name(block.key, shared=self._shared)

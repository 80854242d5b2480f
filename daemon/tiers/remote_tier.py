"""The remote tier: cached blocks that many nodes share, in a Mooncake Store; see ``remote_store`` for the store itself.

New blocks are put there in the background; a lookup asks for what no nearer tier has. Whatever comes from there is
compared with its checksums before anybody sees it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final

import structlog
import xxhash

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.tiers.host_tier import DEMOTION, HostTier
from kvferry.daemon.tiers.remote_store import RemoteStore
from kvferry.daemon.tiers.remote_value import remote_name
from kvferry.daemon.tiers.scheduler import OperationClass, Scheduler
from kvferry.pools.tiers.arena import Offsets, whole_units
from kvferry.pools.tiers.cached_block import BlockState, CachedBlock, Digests
from kvferry.pools.tiers.journal import Tier
from kvferry.pools.tiers.namespaces import BlockKey, Namespace
from kvferry.protocol.session_messages import TierStatus

MAX_WAITING: Final = 4096
MAX_NAMES: Final = 4096
"""Names that one lookup asks for; what is further on counts as not there."""

MAX_KNOWN: Final = 1 << 18
"""Blocks that the index has because the store had them once: what the store has dropped since, nobody says."""

log = structlog.get_logger(__name__)


class RemoteTier:
    """See above. For the control loop; checksums are computed on a thread."""

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
        """``hasher`` computes the checksums, a thread by default; it ends with the tier."""
        self._store = store
        self._host = host
        self._scheduler = scheduler
        self._counters = counters
        self._shared = shared
        self._waiting: deque[CachedBlock] = deque()
        self._queued: set[CachedBlock] = set()
        self._known: deque[CachedBlock] = deque()
        self._wanted = asyncio.Event()
        self._hasher = hasher or ThreadPoolExecutor(1, "remote-hash")
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """Show the store and what waits."""
        return f"<RemoteTier {self._store!r} waiting={self.waiting}>"

    @property
    def waiting(self) -> int:
        """Return how many blocks wait to be put."""
        return len(self._waiting)

    @property
    def available(self) -> bool:
        """Return whether the store can be asked."""
        return self._store.available

    async def start(self) -> None:
        """Begin to join the store.

        Raises:
            ConfigError: Mooncake is not installed, or the address is none of this host's.
        """
        await self._store.start()
        self._task = asyncio.create_task(self._run(), name="remote tier")

    async def close(self) -> None:
        """Leave the store."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._store.close()
        await asyncio.to_thread(self._hasher.shutdown, cancel_futures=True)

    def store(self, block: CachedBlock) -> None:
        """Put a block of the host tier some time, unless the store is away or too many wait."""
        if block.in_remote or block in self._queued or not self.available:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._counters.add("tiers.remote.skipped_blocks")
            return
        self._waiting.append(block)
        self._queued.add(block)
        self._wanted.set()

    async def find(
        self, namespace: Namespace, hashes: Sequence[bytes], parent: bytes | None, page_bytes: int
    ) -> list[CachedBlock]:
        """Return the leading ones of these blocks that the store has, now blocks of the index."""
        asked = hashes[:MAX_NAMES]
        names = [remote_name(BlockKey(namespace, one), shared=self._shared) for one in asked]
        there = await self._store.exists(names)
        size_bytes = namespace.block_pages * whole_units(page_bytes)
        index, found = self._host.index, []
        for before, one, is_there in zip((parent, *asked), asked, there, strict=False):
            block = known = index.get(namespace, one)  # a nearer tier may have what the store lacks
            if is_there:
                block = index.adopt(namespace, one, before, size_bytes, tier=Tier.REMOTE)
                if known is None:
                    self._know(block)
            if block is None or block.state is not BlockState.READY:  # or being stored from here this very moment
                break
            found.append(block)
        return found

    async def read(self, block: CachedBlock, offsets: Offsets, page_bytes: int) -> Digests | None:
        """Fetch a block into the arena; return its digests, or None where it is not there any more, or damaged."""
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
            log.warning("a block of the remote tier is damaged", name=name)
            await self._store.remove([name])
        else:
            self._counters.add("tiers.remote.missing_blocks")
        self._host.index.set_in_remote(block, present=False)
        return None

    async def remove(self, blocks: Sequence[CachedBlock]) -> None:
        """Let the store forget blocks."""
        await self._store.remove([self._name(block) for block in blocks])

    def status(self) -> TierStatus:
        """Return the tier as STATUS shows it; how full the store is only its master knows."""
        return TierStatus(tier="remote", state="ready" if self.available else "away", total_bytes=0, used_bytes=0)

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            while self._waiting:
                block = self._waiting.popleft()
                self._queued.discard(block)
                if block.state is BlockState.READY and block.in_host and not block.in_remote and self.available:
                    try:
                        await self._put(block)
                    except Exception as cause:  # a bug with one block must not be the end of the tier
                        log.exception("a cached block was not put", cause=str(cause))
            self._wanted.clear()

    async def _put(self, block: CachedBlock) -> None:
        """Put a block, pinned meanwhile, when the scheduler lets it."""
        assert block.offsets is not None, block
        page_bytes = self._host.page_bytes[block.namespace]
        self._host.index.pin([block], DEMOTION)
        try:
            if not await self._scheduler.begin_async(OperationClass.DEMOTION, block.size_bytes):
                return
            try:
                loop = asyncio.get_running_loop()
                digests = block.digests or await loop.run_in_executor(
                    self._hasher, self._digests, block.offsets, page_bytes
                )
                ranges = [(at, page_bytes) for at in block.offsets.tolist()]
                stored = await self._store.put(self._name(block), ranges, parent=block.parent, digests=digests)
            finally:
                self._scheduler.end(OperationClass.DEMOTION, block.size_bytes)
        finally:
            self._host.free_all(self._host.index.unpin([block], DEMOTION))
        if stored and self._host.index.set_in_remote(block, present=True):
            self._counters.add("tiers.remote.written_blocks")
            self._know(block)
        elif stored:  # it went meanwhile
            await self.remove([block])

    def _know(self, block: CachedBlock) -> None:
        """Remember that the store has a block; of too many, forget the oldest: the store has it still, if asked."""
        self._known.append(block)
        if len(self._known) > MAX_KNOWN:
            oldest = self._known.popleft()
            if oldest.pins:
                self._known.append(oldest)
            elif oldest.state is BlockState.READY:
                self._host.index.set_in_remote(oldest, present=False)

    def _digests(self, offsets: Offsets, page_bytes: int) -> Digests:
        memory = memoryview(self._host.region.buffer)
        return tuple(xxhash.xxh3_64_intdigest(memory[at : at + page_bytes]) for at in offsets.tolist())

    def _name(self, block: CachedBlock) -> str:
        return remote_name(BlockKey(block.namespace, block.hash), shared=self._shared)

"""The disk tier: cached blocks are written in the background, and read when a lookup has pinned them.

Its files are ``DiskStore``'s; here is what is written when, what goes when the disk's part is full, and what a disk
that is full or fails means: the node goes on without it, and says so once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import structlog

from kvferry.daemon.config.tiers import DiskTierConfig
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.tiers.host_tier import DEMOTION, HostTier
from kvferry.daemon.tiers.scheduler import OperationClass, Scheduler
from kvferry.pools.tiers.arena import Offsets, whole_units
from kvferry.pools.tiers.block_file import DamagedBlockError, DiskError, DiskFullError, MissingBlockError
from kvferry.pools.tiers.cached_block import BlockState, CachedBlock, Digests
from kvferry.pools.tiers.disk import DiskStore, FoundBlock
from kvferry.pools.tiers.journal import Tier
from kvferry.pools.tiers.namespaces import BlockKey
from kvferry.pools.tiers.policies import EvictionPolicy, make_policy
from kvferry.protocol.session_messages import TierStatus

STEP_BYTES: Final = 1 << 20
SYNC_EVERY_S: Final = 5.0
REST_S: Final = 30.0
"""How long nothing is written after the disk was full or failed."""

MAX_WAITING: Final = 4096
FOLDERS_SHOWN: Final = 8
log = structlog.get_logger(__name__)


class DiskTier:
    """See above. For the control loop, but for its two threads: one writes, one reads."""

    def __init__(
        self,
        config: DiskTierConfig,
        policy: str,
        host: HostTier,
        scheduler: Scheduler,
        counters: Counters,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lock the folder. ``clock`` says for how long nothing is written after a failure.

        Raises:
            ConfigError: the path is missing, not writable, or another daemon's.
        """
        assert config.path is not None, config
        self._max_bytes = config.max_bytes
        self._host = host
        self._scheduler = scheduler
        self._counters = counters
        self._clock = clock
        self._store = DiskStore(Path(config.path), config.fsync)
        self._policy: EvictionPolicy[CachedBlock] = make_policy(policy)
        self._sizes: dict[CachedBlock, int] = {}
        self._used_bytes = 0
        self._waiting: deque[CachedBlock] = deque()
        self._queued: set[CachedBlock] = set()
        self._wanted = asyncio.Event()
        self._resting_until = 0.0
        self._failure = ""
        self._closing = threading.Event()
        self._writer = ThreadPoolExecutor(1, "disk-write")
        self._reader = ThreadPoolExecutor(1, "disk-read")
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        """Show the live counts."""
        return f"<DiskTier blocks={len(self._sizes)} used={self._used_bytes} waiting={len(self._waiting)}>"

    def start(self) -> None:
        """Look through the folder, then write what comes."""
        self._tasks = [asyncio.create_task(self._run(), name="disk tier"), asyncio.create_task(self._sync())]

    async def close(self) -> None:
        """Stop at the next step; what is not written is lost."""
        self._closing.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for executor in (self._writer, self._reader):
            await asyncio.to_thread(executor.shutdown, cancel_futures=True)  # a step may take a while
        self._store.close()

    def store(self, block: CachedBlock) -> None:
        """Write a block of the host tier some time, unless too many wait."""
        if block.on_disk or block in self._queued:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._counters.add("tiers.disk.skipped_blocks")
            return
        self._waiting.append(block)
        self._queued.add(block)
        self._wanted.set()

    def used(self, block: CachedBlock) -> None:
        """Note the use of a block."""
        if block in self._sizes:
            self._policy.hit(block)

    async def read(self, block: CachedBlock, offsets: Offsets, page_bytes: int) -> Digests | None:
        """Read a block into the arena; return its digests, or None where it is not there any more, or damaged."""
        buffers = self._buffers(offsets, page_bytes)
        loop = asyncio.get_running_loop()
        try:
            digests = await loop.run_in_executor(self._reader, self._read, _key(block), buffers)
        except (MissingBlockError, DamagedBlockError) as error:
            damaged = isinstance(error, DamagedBlockError)
            self._counters.add("tiers.disk.damaged_blocks" if damaged else "tiers.disk.missing_blocks")
            log.warning("a cached block on disk is gone", cause=str(error), damaged=damaged)
            self._forget(block)
            return None
        except DiskError as error:
            self._failed(error)
            return None
        self._counters.add("tiers.disk.read_blocks")
        return digests

    def remove(self, blocks: Sequence[CachedBlock]) -> None:
        """Delete blocks' files: before any other is written that is asked for after this."""
        keys = [_key(block) for block in blocks if self._leave(block)]
        if keys and not self._closing.is_set():
            asyncio.get_running_loop().run_in_executor(self._writer, self._remove_all, keys)

    def status(self) -> TierStatus:
        """Return the tier as STATUS shows it."""
        return TierStatus(
            tier="disk",
            state=self._failure or "ready",
            total_bytes=self._max_bytes,
            used_bytes=self._used_bytes,
            blocks=len(self._sizes),
        )

    async def _run(self) -> None:
        try:
            await self._scan()
        except DiskError as error:
            self._failed(error)
        except Exception as cause:  # what is on disk is lost to this daemon; what comes can be written all the same
            log.exception("the disk tier's folder was not looked through", cause=str(cause))
        while True:
            await self._wanted.wait()
            while self._waiting:
                block = self._waiting.popleft()
                self._queued.discard(block)
                if self._clock() < self._resting_until:
                    self._counters.add("tiers.disk.skipped_blocks")
                elif block.state is BlockState.READY and block.in_host and not block.on_disk:
                    try:
                        await self._write_one(block)
                    except Exception as cause:  # a bug with one block must not be the end of the tier
                        log.exception("a cached block was not written", cause=str(cause))
            self._wanted.clear()

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(SYNC_EVERY_S)
            try:  # other writes go in between
                while await asyncio.get_running_loop().run_in_executor(self._writer, self._store.sync_dirty):
                    pass
            except DiskError as error:
                self._failed(error)
            except Exception as cause:  # the next time may do better
                log.exception("cached blocks were not written out", cause=str(cause))

    async def _scan(self) -> None:
        """Take in what lies there since before; the oldest first, as they were used."""
        loop = asyncio.get_running_loop()
        steps = self._store.scan()
        while (step := await loop.run_in_executor(self._reader, next, steps, None)) is not None:
            for one in step:
                self._adopt(one)
        await self._make_room(0)
        outdated = self._store.counts.outdated
        if outdated:
            log.warning(
                "the disk tier's folder has blocks of an older format, which do not say of which model they are",
                path=str(self._store.root),
                folders=outdated[:FOLDERS_SHOWN],
                count=len(outdated),
                remedy="they are never served: delete these folders for their space",
            )
        log.info("disk tier ready", path=str(self._store.root), blocks=len(self._sizes), used_bytes=self._used_bytes)

    def _adopt(self, found: FoundBlock) -> None:
        namespace, block_hash = found.key
        size_bytes = namespace.block_pages * whole_units(found.page_bytes)
        block = self._host.index.adopt(
            namespace, block_hash, found.parent, size_bytes, tier=Tier.DISK, digests=found.digests
        )
        self._host.know(namespace, found.page_bytes, found.model)
        self._enter(block, found.size_bytes)

    async def _write_one(self, block: CachedBlock) -> None:
        """Write a block, pinned meanwhile; make room for it first."""
        assert block.offsets is not None, block
        page_bytes = self._host.page_bytes[block.namespace]
        size_bytes = self._store.file_bytes(block.namespace, page_bytes)
        buffers = self._buffers(block.offsets, page_bytes)
        self._host.index.pin([block], DEMOTION)
        try:
            if not await self._make_room(size_bytes):
                self._counters.add("tiers.disk.skipped_blocks")
                return
            written = await asyncio.get_running_loop().run_in_executor(
                self._writer, self._write, block, buffers, self._host.models.get(block.namespace.identity, "")
            )
        except DiskError as error:
            self._failed(error)
            return
        finally:
            self._host.free_all(self._host.index.unpin([block], DEMOTION))
        if not written:
            return
        if self._host.index.set_on_disk(block, present=True):
            self._enter(block, size_bytes)
            self._counters.add("tiers.disk.written_blocks")
            self._recovered()
        else:  # it went meanwhile
            await self._unlink(block)

    def _remove_all(self, keys: Sequence[BlockKey]) -> None:
        """On the writing thread: what cannot be deleted is found by the next scan."""
        for key in keys:
            try:
                self._store.remove(key)
            except DiskError as error:
                log.warning("a cached block stays on disk", cause=str(error))

    def _write(self, block: CachedBlock, buffers: list[memoryview], model: str) -> bool:
        """On the writing thread: step by step, as the scheduler lets it; False where the daemon ends."""
        with self._store.begin_write(_key(block), buffers, block.digests, block.parent, model) as writer:
            written = False
            while not written:
                if not self._scheduler.begin(OperationClass.DEMOTION, STEP_BYTES, self._closing.is_set):
                    return False
                try:
                    written = writer.step(STEP_BYTES)
                finally:
                    self._scheduler.end(OperationClass.DEMOTION, STEP_BYTES)
            writer.finish()
        return True

    def _read(self, key: BlockKey, buffers: list[memoryview]) -> Digests:
        """On the reading thread; as urgent as a restore, which waits for it."""
        with self._store.begin_read(key, buffers) as reader:
            read = False
            while not read:
                if not self._scheduler.begin(OperationClass.RESTORE, STEP_BYTES, self._closing.is_set):
                    raise MissingBlockError("the daemon ends")
                try:
                    read = reader.step(STEP_BYTES)
                finally:
                    self._scheduler.end(OperationClass.RESTORE, STEP_BYTES)
            return reader.header.digests

    async def _make_room(self, size_bytes: int) -> bool:
        """Delete the files that go next until there is room; blocks that somebody waits for stay."""
        if size_bytes > self._max_bytes:
            return False
        for block in self._policy.victims():
            if self._used_bytes + size_bytes <= self._max_bytes:
                break
            if block.pins and not block.in_host:
                continue
            self._leave(block)
            self._host.index.set_on_disk(block, present=False)
            self._counters.add("tiers.disk.evicted_blocks")
            await self._unlink(block)
        return self._used_bytes + size_bytes <= self._max_bytes

    async def _unlink(self, block: CachedBlock) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._store.remove, _key(block))
        except DiskError as error:
            self._failed(error)

    def _enter(self, block: CachedBlock, size_bytes: int) -> None:
        if block not in self._sizes:
            self._sizes[block] = size_bytes
            self._used_bytes += size_bytes
            self._policy.add(block)

    def _leave(self, block: CachedBlock) -> bool:
        size_bytes = self._sizes.pop(block, None)
        if size_bytes is None:
            return False
        self._used_bytes -= size_bytes
        self._policy.remove(block)
        return True

    def _forget(self, block: CachedBlock) -> None:
        self._leave(block)
        self._host.index.set_on_disk(block, present=False)

    def _failed(self, error: DiskError) -> None:
        """Rest for a while; say so once, not for every block."""
        full = isinstance(error, DiskFullError)
        self._counters.add("tiers.disk.full" if full else "tiers.disk.failed")
        self._resting_until = self._clock() + REST_S
        if not self._failure:
            log.warning(
                "the disk tier rests: cached blocks are kept in memory only",
                cause=str(error),
                remedy="make space, or lower tiers.disk.max_bytes" if full else "look at the disk (dmesg, smartctl)",
            )
        self._failure = "full" if full else f"failed: {error}"

    def _recovered(self) -> None:
        if self._failure:
            log.info("the disk tier works again")
            self._failure = ""

    def _buffers(self, offsets: Offsets, page_bytes: int) -> list[memoryview]:
        memory = memoryview(self._host.region.buffer)
        return [memory[at : at + page_bytes] for at in offsets.tolist()]


def _key(block: CachedBlock) -> BlockKey:
    return BlockKey(block.namespace, block.hash)

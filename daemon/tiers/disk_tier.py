"""The disk tier: cached blocks are written in the background, and read once a lookup has pinned them.

``DiskStore`` handles the files. This module decides what is written when and what is evicted when the tier's
bytes are used up, and handles a full or failing disk: the node continues without it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import structlog

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.process.threads import started_threads
from kvferry.daemon.tiers.host_tier import CATCH_UP_TURNS, USES_AT_ONCE, Demotions, HostTier
from kvferry.daemon.tiers.scheduler import OperationClass, Scheduler
from kvferry.daemon.tiers.tier_health import TierHealth, Way
from kvferry.pools.host.memory import smallest_limit
from kvferry.pools.integrity import WALKED, Problem, Walk
from kvferry.pools.tiers.arena import Offsets, whole_units
from kvferry.pools.tiers.block_file import DamagedBlockError, DiskError, DiskFullError, MissingBlockError, file_bytes
from kvferry.pools.tiers.cached_block import BlockKey, BlockState, CachedBlock, Digests, Namespace, Tier, place_of
from kvferry.pools.tiers.disk import DiskStore, FoundBlock
from kvferry.pools.tiers.fairness import fairest
from kvferry.pools.tiers.policies import Deferred, make_policy
from kvferry.protocol.config.schema import DiskTierConfig
from kvferry.protocol.session_messages import TierStatus

STEP_BYTES: Final = 1 << 20
SYNC_EVERY_S: Final = 5.0
PAUSE_S: Final = 30.0
"""How long nothing is written after the disk was full or failed."""

MAX_FOUND: Final = 4096
"""Blocks of a group that one lookup asks the folder for while it is being scanned; others count as missing."""

FOUND_AT_ONCE: Final = 32
"""Files that are opened for it at a time; between them the scan goes on."""

INDEX_PART: Final = 16
BLOCK_MEMORY_BYTES: Final = 640
"""Blocks on disk may take a 16th of the daemon's memory: so much is in the index for each."""

FOLDERS_SHOWN: Final = 8
MAX_WRONG: Final = 64
"""Files that differ from what is known and are told, each by itself."""

log = structlog.get_logger(__name__)


class _Files:
    """What a tenant has on disk."""

    def __init__(self, policy: Deferred[CachedBlock]) -> None:
        self.policy = policy
        self.size_bytes = 0

    def victims(self) -> Callable[[], CachedBlock | None]:
        return functools.partial(next, self.policy.victims(), None)


class DiskTier:
    """The disk tier. For the control loop, with two threads of its own: one writes, one reads."""

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
        """Lock the folder; ``clock`` times the pause after a failure.

        Raises:
            ConfigError: the path is missing, not writable, or locked by another daemon.
        """
        assert config.path is not None, config
        self._max_bytes = config.max_bytes
        self._max_blocks = smallest_limit().size_bytes // INDEX_PART // BLOCK_MEMORY_BYTES
        self._host = host
        self._scheduler = scheduler
        self._counters = counters
        self._clock = clock
        self._store = DiskStore(Path(config.path), config.fsync)
        fell_behind = host.in_turns(self._catch_up)
        self._of_tenants: defaultdict[int, _Files] = defaultdict(
            lambda: _Files(Deferred(make_policy(policy), place_of, fell_behind))
        )
        self._sizes: dict[CachedBlock, int] = {}
        self._scanned = False
        self._scan_ended = asyncio.Event()
        self._used_bytes = 0
        self._queue = Demotions(host, Tier.DISK, self._write_block)
        self._paused_until = 0.0
        self._health = TierHealth("disk", clock)
        self._closing = threading.Event()
        self._writer = started_threads(1, "disk-write")
        self._reader = started_threads(1, "disk-read")
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        """Show the live counts."""
        return f"<DiskTier blocks={len(self._sizes)} used={self._used_bytes} waiting={len(self._queue)}>"

    @property
    def copying(self) -> tuple[CachedBlock, ...]:
        """Return the block that is being written, if any: it is pinned."""
        return self._queue.copying

    def start(self) -> None:
        """Scan the folder, then write queued blocks."""
        self._tasks = [asyncio.create_task(self._run(), name="disk tier"), asyncio.create_task(self._sync())]

    async def close(self) -> None:
        """Stop at the next step; blocks not written by then are lost."""
        self._closing.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._writer.shutdown)  # files that are to go do go: the next daemon would find them
        await asyncio.to_thread(self._reader.shutdown, cancel_futures=True)  # a step may take a while
        self._store.close()

    @property
    def is_scanning(self) -> bool:
        """Return whether there may be blocks on disk that the index does not know yet: ``find`` asks for them."""
        return not self._scan_ended.is_set()

    async def scan_ended(self) -> None:
        """Wait until the blocks on disk are in the index."""
        await self._scan_ended.wait()

    async def find(self, namespace: Namespace, hashes: Sequence[bytes], *, gaps: bool = False) -> list[CachedBlock]:
        """Return those leading blocks that are on disk, or in the index, while the folder is being scanned.

        ``gaps``: see ``LowerTiers.find``.
        """
        loop, found = asyncio.get_running_loop(), list[CachedBlock]()
        some_hashes = hashes[-MAX_FOUND:] if gaps else hashes[:MAX_FOUND]
        keys = [BlockKey(namespace, block_hash) for block_hash in some_hashes]
        for first in range(0, len(keys), FOUND_AT_ONCE):
            some = keys[first : first + FOUND_AT_ONCE]
            try:
                on_disk = await loop.run_in_executor(self._reader, self._store.find, some)
            except DiskError as error:
                self._pause(error)
                break
            for key, one in zip(some, on_disk, strict=True):
                block = self._host.index.get(*key)
                if block is None and one is not None:
                    block = self._adopt(one)
                if block is not None and block.state is BlockState.READY:
                    found.append(block)
                elif not gaps:
                    return found
        return found

    def store(self, block: CachedBlock) -> None:
        """Queue a block of the host tier to be written, unless too many wait."""
        if not self._queue.add(block):
            self._counters.add("tiers.disk.skipped_blocks")

    def used(self, blocks: Sequence[CachedBlock]) -> None:
        """Record a use of each of these blocks that is here, in this order."""
        here = [block for block in blocks if block in self._sizes]
        for tenant, its in itertools.groupby(here, lambda block: block.namespace.tenant):
            self._of_tenants[tenant].policy.hit([*its])

    def _catch_up(self) -> bool:
        for its in self._of_tenants.values():
            its.policy.catch_up(USES_AT_ONCE)
        return self._behind > 0

    @property
    def _behind(self) -> int:
        return sum([its.policy.behind for its in self._of_tenants.values()])

    def by_tenant(self) -> dict[int, int]:
        """Return the bytes of each tenant's files."""
        return {tenant: its.size_bytes for tenant, its in self._of_tenants.items()}

    async def read(self, block: CachedBlock, offsets: Offsets, page_bytes: int) -> Digests | None:
        """Read a block into the arena; return its digests, or None where it is missing or damaged."""
        buffers = self._buffers(offsets, page_bytes)
        loop = asyncio.get_running_loop()
        try:
            digests, took_s = await loop.run_in_executor(self._reader, self._read, block.key, buffers)
        except (MissingBlockError, DamagedBlockError) as error:
            damaged = isinstance(error, DamagedBlockError)
            self._counters.add("tiers.disk.damaged_blocks" if damaged else "tiers.disk.missing_blocks")
            log.warning("a cached block on disk is missing or damaged", cause=str(error), damaged=damaged)
            self._forget(block)
            return None
        except DiskError as error:
            self._pause(error)
            return None
        self._counters.add("tiers.disk.read_blocks")
        self._took("read", took_s, block.size_bytes)
        return digests

    def remove(self, blocks: Sequence[CachedBlock]) -> None:
        """Delete the files of blocks, before any block that is queued after this call is written."""
        keys = [block.key for block in blocks if self._discard(block)]
        if keys and not self._closing.is_set():
            asyncio.get_running_loop().run_in_executor(self._writer, self._remove_all, keys)

    def status(self) -> TierStatus:
        """Return the tier as STATUS shows it."""
        return TierStatus(
            tier="disk",
            state=self._health.state,
            total_bytes=self._max_bytes,
            used_bytes=self._used_bytes,
            blocks=len(self._sizes),
            write_us=self._health.mean_us("write"),
            read_us=self._health.mean_us("read"),
        )

    # -- checks

    def problems(self) -> Walk:
        """Yield where the blocks, sizes and counts that are known here differ from the index."""
        for number, block in enumerate(self._sizes):
            if not block.on_disk or block.state not in {BlockState.READY, BlockState.WRITING}:
                yield Problem(f"a block has a file, and the index says that it has none: {block}")
            if number % WALKED == 0:
                yield None
        lost = 0
        for number, block in enumerate(self._host.index.on_disk()):
            lost += block not in self._sizes
            if number % WALKED == 0:
                yield None
        if lost:
            yield Problem("a block has no file, and the index says that it has one", total=lost)
        used = sum(self._sizes.values())
        counted = sum(len(its.policy) for its in self._of_tenants.values())
        if {used, sum(self.by_tenant().values())} != {self._used_bytes} or counted != len(self._sizes):
            yield Problem(
                f"{len(self._sizes)} files of {used} bytes are known, {counted} of {self._used_bytes} counted"
            )

    async def examine_files(self, *, deep: bool, until_s: float) -> tuple[int, list[Problem]]:
        """Compare the files with what is known here; ``deep``: also each page's checksum.

        Args:
            deep: read all pages.
            until_s: the loop's time at which to end: the last problem says so.

        Returns:
            How many files were looked at, and what is wrong.
        """
        loop = asyncio.get_running_loop()
        sizes: dict[BlockKey, int] = {}
        problems: list[Problem] = []
        whole = self._scanned
        steps = self._store.examine(deep=deep)
        while (step := await loop.run_in_executor(self._reader, next, steps, None)) is not None:
            sizes.update(step.sizes)
            problems += step.problems
            if loop.time() > until_s:
                left = len(self._sizes) - len(sizes)
                problems.append(Problem(f"not all files were read in time; {left} not at all: give more time"))
                whole = False
                break
        count, suspects = len(sizes), dict.fromkeys(key for key, size in sizes.items() if size < 0)
        for number, block in enumerate(list(self._sizes)):
            found = sizes.pop(block.key, None)
            if block in self._sizes and found != self._sizes[block] and (whole or found is not None):
                suspects[block.key] = None
            if number % WALKED == 0:
                await asyncio.sleep(0)
        if whole:
            suspects.update(dict.fromkeys(sizes))
        wrong = 0
        for number, key in enumerate(suspects):  # most are blocks that came or went meanwhile
            differing = await self._look_again(key)
            wrong += len(differing)
            problems += differing
            if wrong >= MAX_WRONG or loop.time() > until_s:
                if left := len(suspects) - number - 1:
                    problems.append(Problem("files that may differ, too, were not looked at again", total=left))
                break
        return count, problems

    async def _look_again(self, key: BlockKey) -> list[Problem]:
        """Compare one file with what is known, when writes and removals that had begun before are done."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, self._store.size_of, key)  # queued behind them
        found = await loop.run_in_executor(self._reader, self._store.size_of, key)
        block = self._host.index.get(*key)
        known = None if block is None else self._sizes.get(block)
        if found == known:
            return []
        return [Problem(f"the file of block {key.hash.hex()} has {found} bytes, {known} are known (None: no file)")]

    async def _run(self) -> None:
        try:
            await self._scan()
            self._scanned = True
        except DiskError as error:
            self._pause(error)
        except Exception as cause:  # blocks on disk are lost to this daemon; new ones can still be written
            log.exception("scanning the disk tier's folder failed", cause=str(cause))
        self._scan_ended.set()
        await self._queue.run()

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(SYNC_EVERY_S)
            try:  # other writes are interleaved
                while await self._sync_some():
                    pass
            except DiskError as error:
                self._pause(error)
            except Exception as cause:  # the next attempt may succeed
                log.exception("syncing cached blocks to disk failed", cause=str(cause))
            for key in self._store.take_removed():
                if (block := self._host.index.get(*key)) is not None:
                    self._forget(block)

    async def _sync_some(self) -> int:
        """Write out some of what was stored; return how many files are left."""
        files, left, took_s = await asyncio.get_running_loop().run_in_executor(self._writer, self._sync_dirty)
        if files:
            self._took("sync", took_s / files, self._used_bytes // max(1, len(self._sizes)))
        return left

    def _sync_dirty(self) -> tuple[int, int, float]:
        """On the writing thread: return how many files were written out, how many are left, and the time it took."""
        waiting, began_s = self._store.dirty, self._clock()
        left = self._store.sync_dirty()
        return waiting - left, left, self._clock() - began_s

    async def _scan(self) -> None:
        """Adopt the blocks in the folder, least recently used first."""
        loop = asyncio.get_running_loop()
        steps = self._store.scan()
        while (step := await loop.run_in_executor(self._reader, next, steps, None)) is not None:
            for found in step:
                self._adopt(found)
            await self._evict_for(0)
        outdated = self._store.counts.outdated
        if outdated:
            log.warning(
                "the disk tier's folder has blocks of an older format, which does not name their model",
                path=str(self._store.root),
                folders=outdated[:FOLDERS_SHOWN],
                count=len(outdated),
                remedy="they are never used: delete these folders to free their space",
            )
        log.info("disk tier ready", path=str(self._store.root), blocks=len(self._sizes), used_bytes=self._used_bytes)

    def _adopt(self, found: FoundBlock) -> CachedBlock:
        header, (namespace, block_hash) = found.header, found.header.key
        size_bytes = namespace.block_pages * whole_units(header.page_bytes)
        block = self._host.index.adopt(
            namespace, block_hash, header.parent, size_bytes, tier=Tier.DISK, digests=header.digests
        )
        self._host.know(namespace, header.page_bytes, header.model)
        self._add(block, found.size_bytes)
        return block

    async def _write_block(self, block: CachedBlock) -> None:
        """Write a block, evicting others first where needed."""
        assert block.offsets is not None, block
        if self._clock() < self._paused_until:
            self._counters.add("tiers.disk.skipped_blocks")
            return
        page_bytes = self._host.page_bytes[block.namespace]
        size_bytes = file_bytes(block.namespace, page_bytes)
        buffers = self._buffers(block.offsets, page_bytes)
        try:
            if not await self._evict_for(size_bytes):
                self._counters.add("tiers.disk.skipped_blocks")
                return
            took_s = await asyncio.get_running_loop().run_in_executor(
                self._writer, self._write, block, buffers, self._host.models.get(block.namespace.identity, "")
            )
        except DiskError as error:
            self._pause(error)
            return
        if took_s is None:
            return
        self._took("write", took_s, block.size_bytes)
        if self._host.index.set_tier(block, Tier.DISK, present=True):
            self._add(block, size_bytes)
            self._counters.add("tiers.disk.written_blocks")
            self._health.succeeded()
        else:  # it was dropped meanwhile
            await self._unlink(block)

    def _remove_all(self, keys: Sequence[BlockKey]) -> None:
        """On the writing thread: remove files. One that cannot be deleted is found again by the next scan."""
        failed: list[DiskError] = []
        for key in keys:
            try:
                self._store.remove(key)
            except DiskError as error:
                failed.append(error)
        if failed:
            log.warning("cached blocks could not be deleted from disk", blocks=len(failed), cause=str(failed[0]))

    def _write(self, block: CachedBlock, buffers: list[memoryview], model: str) -> float | None:
        """On the writing thread: write a block in steps that the scheduler allows.

        Returns:
            How long the disk took, in seconds; None where the daemon is ending.
        """
        began_s, waited_s = self._clock(), 0.0
        with self._store.begin_write(block.key, buffers, block.digests, block.parent, model) as writer:
            written = False
            while not written:
                asked_s = self._clock()
                if not self._scheduler.begin(OperationClass.DEMOTION, STEP_BYTES, self._closing.is_set):
                    return None
                waited_s += self._clock() - asked_s
                try:
                    written = writer.step(STEP_BYTES)
                finally:
                    self._scheduler.end(OperationClass.DEMOTION, STEP_BYTES)
            writer.finish()
        return self._clock() - began_s - waited_s

    def _read(self, key: BlockKey, buffers: list[memoryview]) -> tuple[Digests, float]:
        """On the reading thread: read a block, scheduled like a restore, since one waits for it.

        Returns:
            Its digests, and how long the disk took, in seconds.
        """
        began_s, waited_s = self._clock(), 0.0
        with self._store.begin_read(key, buffers) as reader:
            read = False
            while not read:
                asked_s = self._clock()
                if not self._scheduler.begin(OperationClass.RESTORE, STEP_BYTES, self._closing.is_set):
                    raise MissingBlockError("the daemon is ending")
                waited_s += self._clock() - asked_s
                try:
                    read = reader.step(STEP_BYTES)
                finally:
                    self._scheduler.end(OperationClass.RESTORE, STEP_BYTES)
            return reader.header.digests, self._clock() - began_s - waited_s

    def _took(self, way: Way, seconds: float, size_bytes: int) -> None:
        self._counters.observe(f"tiers.disk.{way}", seconds)
        self._health.took(way, seconds, size_bytes)

    async def _evict_for(self, size_bytes: int) -> bool:
        """Evict files until ``size_bytes`` fit; blocks that a lookup waits for stay. Return whether they fit."""
        if size_bytes > self._max_bytes:
            return False
        if self._fits(size_bytes):
            return True
        turns_left = await self._caught_up(CATCH_UP_TURNS)
        for block in fairest(self._of_tenants, self._host.shares.parts, lambda its: its.size_bytes, _Files.victims):
            if self._fits(size_bytes):
                break
            if block.pins and not block.in_host:
                continue
            self._discard(block)
            self._host.index.set_tier(block, Tier.DISK, present=False)
            self._counters.add("tiers.disk.evicted_blocks")
            await self._unlink(block)
            turns_left = await self._caught_up(turns_left)
        return self._fits(size_bytes)

    def _fits(self, size_bytes: int) -> bool:
        """Return whether there is room for a file of that size; of 0 bytes: for what there is."""
        return (
            self._used_bytes + size_bytes <= self._max_bytes and len(self._sizes) + bool(size_bytes) <= self._max_blocks
        )

    async def _caught_up(self, turns_left: int) -> int:
        """Tell the policy of what it does not know yet, in at most so many turns; return how many of them are left."""
        while self._behind > USES_AT_ONCE and turns_left:
            turns_left -= 1
            self._catch_up()
            await asyncio.sleep(0)
        return turns_left

    async def _unlink(self, block: CachedBlock) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._store.remove, block.key)
        except DiskError as error:
            self._pause(error)

    def _add(self, block: CachedBlock, size_bytes: int) -> None:
        if block not in self._sizes:
            self._sizes[block] = size_bytes
            self._used_bytes += size_bytes
            its = self._of_tenants[block.namespace.tenant]
            its.size_bytes += size_bytes
            its.policy.add([block])

    def _discard(self, block: CachedBlock) -> bool:
        size_bytes = self._sizes.pop(block, None)
        if size_bytes is None:
            return False
        self._used_bytes -= size_bytes
        its = self._of_tenants[block.namespace.tenant]
        its.size_bytes -= size_bytes
        its.policy.remove(block)
        return True

    def _forget(self, block: CachedBlock) -> None:
        self._discard(block)
        self._host.index.set_tier(block, Tier.DISK, present=False)

    def _pause(self, error: DiskError) -> None:
        """Write nothing for a while."""
        full = isinstance(error, DiskFullError)
        self._counters.add("tiers.disk.full" if full else "tiers.disk.failed")
        self._paused_until = self._clock() + PAUSE_S
        remedy = "free space, or lower tiers.disk.max_bytes" if full else "check the disk (dmesg, smartctl)"
        self._health.failed("full" if full else f"failing: {error}", f"{remedy}; blocks stay in memory meanwhile")

    def _buffers(self, offsets: Offsets, page_bytes: int) -> list[memoryview]:
        memory = memoryview(self._host.region.buffer)
        return [memory[at : at + page_bytes] for at in offsets.tolist()]

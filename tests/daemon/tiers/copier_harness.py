"""A copier on its own, what it reports, and regions whose every step a test decides about."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import numpy as np

from kvferry.daemon.tiers.copier import BlockJob, BlockSegment, TierCopier
from kvferry.daemon.tiers.scheduler import OperationClass, Scheduler
from kvferry.pools.devices.base import NOTHING_PENDING, Arena, Pending
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.manifest import lay_out
from kvferry.pools.tiers.blocks import BlockLayout, BlockPages, BlockStep
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.manifests import Entry

WAIT_S = 30.0
MIB = 1 << 20
BLOCK_BYTES = MIB
PAGES = 40
LAYOUT = BlockLayout(
    lay_out([Entry(component="main", role="k", layer=0, base=0, pages=PAGES, page_bytes=BLOCK_BYTES)]), "main"
)


class Site:
    """A copier, its scheduler, an arena, and what was reported."""

    def __init__(self, *, threads: int = 2, **options: Any) -> None:  # noqa: ANN401  the copier's own
        self.reports: list[tuple[BlockJob, KvferryError | None]] = []
        self._news = asyncio.Event()
        self.scheduler = Scheduler(dict.fromkeys(OperationClass, 64 * MIB), patience_s=0)
        loop = asyncio.get_running_loop()
        self.copier = TierCopier(loop, self.scheduler, threads=threads, **options)
        self.arena = HostRegion.create("arena", 64 * MIB)

    async def reported(self, count: int = 1) -> list[tuple[BlockJob, KvferryError | None]]:
        """Wait for so many reports in all, and return them."""
        async with asyncio.timeout(WAIT_S):
            while len(self.reports) < count:
                self._news.clear()
                await self._news.wait()
        return self.reports

    async def run(self, job: BlockJob) -> KvferryError | None:
        """Run a job to its end."""
        self.copier.start(job, self.done)
        reported, error = (await self.reported(len(self.reports) + 1))[-1]
        assert reported is job
        return error

    def job(
        self,
        region: Any,  # noqa: ANN401  a scripted one, or a real one
        blocks: int = PAGES - 1,
        first: int = 1,
        kind: Literal["offload", "restore"] = "offload",
    ) -> BlockJob:
        """Return a job of so many blocks of ``LAYOUT``, without checksums."""
        ids = np.arange(first, first + blocks)
        pages = BlockPages(LAYOUT, ids, (ids - 1) * BLOCK_BYTES)
        return BlockJob(kind, [BlockSegment(region, pages)], self.arena, checksums=False)

    def done(self, job: BlockJob, error: KvferryError | None) -> None:
        """Take a job's end."""
        self.reports.append((job, error))
        self._news.set()


@asynccontextmanager
async def site(**options: Any) -> AsyncIterator[Site]:  # noqa: ANN401
    """Yield a site; its threads end with it."""
    made = Site(**options)
    try:
        yield made
    finally:
        made.scheduler.close()
        await asyncio.get_running_loop().run_in_executor(None, made.copier.close)
        made.arena.close()


class ScriptedRegion:
    """A region that copies nothing: it notes each step, and does what the test wants of it.

    Attributes:
        log: ``begin N`` and ``wait N``, N the step's first block.
        steps: what was begun.
    """

    device = "scripted"
    size_bytes = PAGES * BLOCK_BYTES
    identity = 0

    def __init__(self, name: str = "", log: list[str] | None = None) -> None:
        self.name = name
        self.log = [] if log is None else log
        self.steps: list[BlockStep] = []
        self.on_begin: Callable[[BlockStep], None] = lambda _step: None
        self.on_wait: Callable[[BlockStep], None] | None = None

    def begin_offload(self, pages: BlockPages, step: BlockStep, arena: Arena) -> Pending:
        """See ``Region.begin_offload``."""
        del pages, arena
        self.steps.append(step)
        self.log.append(f"{self.name}begin {step.first}")
        self.on_begin(step)
        return NOTHING_PENDING if self.on_wait is None else _Scripted(self, step)

    begin_restore = begin_offload


class _Scripted:
    done = False

    def __init__(self, region: ScriptedRegion, step: BlockStep) -> None:
        self._region = region
        self._step = step

    def wait(self) -> None:
        assert self._region.on_wait is not None
        self._region.on_wait(self._step)
        self._region.log.append(f"{self._region.name}wait {self._step.first}")


class Gate:
    """A point where a thread waits for the test, and the test for the thread."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._entered = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self, _step: BlockStep) -> None:
        """Wait here until it is open."""
        self._loop.call_soon_threadsafe(self._entered.set)
        assert self._open.wait(WAIT_S)

    async def entered(self) -> None:
        """Wait for a thread."""
        async with asyncio.timeout(WAIT_S):
            await self._entered.wait()

    def open(self) -> None:
        """Let all go on."""
        self._open.set()

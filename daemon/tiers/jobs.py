"""Starting a work's job: where its pages are on a card, that card has to know the arena first."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from functools import partial

import structlog

from kvferry.daemon.tiers.copier import BlockJob
from kvferry.daemon.tiers.host_tier import HostTier
from kvferry.daemon.tiers.works import Work, Works
from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.accelerator_region import AcceleratorRegion
from kvferry.protocol.errors import CancelledError, InternalError, KvferryError, OutOfMemoryError

log = structlog.get_logger(__name__)


class JobStarter:
    """See above. A card that cannot register so much memory copies by memory of its driver in between, and slower.

    Attributes:
        checksums: whether blocks get checksums.
    """

    def __init__(self, works: Works, host: HostTier, executor: Executor, *, checksums: bool) -> None:
        """Register memory on ``executor``: that may wait."""
        self.checksums = checksums
        self._works = works
        self._host = host
        self._executor = executor
        self._registered: dict[str, asyncio.Future[None]] = {}

    def start(self, work: Work, job: BlockJob) -> None:
        """Run a work's job as soon as the cards of its pages know the arena."""
        cards = {
            part.region.accelerator.name: part.region.accelerator
            for part in job.parts
            if isinstance(part.region, AcceleratorRegion)
        }
        for card in cards.values():
            known = self._registered.get(card.name)
            if known is None:
                known = self._registered[card.name] = asyncio.get_running_loop().run_in_executor(
                    self._executor, self._register, card
                )
            if not known.done():
                work.waits_for = f"{card.name} to register the host tier"
                known.add_done_callback(partial(self._known, work, job))
                return
            failed = CancelledError("the daemon ends") if known.cancelled() else known.exception()
            if failed is not None:
                error = failed if isinstance(failed, KvferryError) else InternalError(f"{card.name}: {failed!r}")
                asyncio.get_running_loop().call_soon(self._works.stop, work, error)
                return
        self._works.run(work, job)

    def _known(self, work: Work, job: BlockJob, done: asyncio.Future[None]) -> None:
        del done
        if work.stopped is None:
            self.start(work, job)

    def _register(self, card: Accelerator) -> None:
        try:
            card.register_host(self._host.region)
        except OutOfMemoryError as cause:
            log.warning(
                "the host tier is not registered: copies to and from the card take a detour",
                device=card.name,
                cause=cause.detail,
                remedy="raise LimitMEMLOCK of the unit, or make tiers.host_bytes smaller",
            )

"""Starting an operation's job: where its pages are on a device, that device has to know the arena first."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from functools import partial

import structlog

from kvferry.daemon.tiers.copier import BlockJob
from kvferry.daemon.tiers.host_tier import HostTier
from kvferry.daemon.tiers.operations import Operation, Operations
from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.accelerator_region import AcceleratorRegion
from kvferry.protocol.errors import CancelledError, InternalError, KvferryError, OutOfMemoryError

log = structlog.get_logger(__name__)


class JobStarter:
    """See above. A device that cannot register so much memory copies by memory of its driver in between, and slower.

    Attributes:
        checksums: whether blocks get checksums.
    """

    def __init__(self, operations: Operations, host: HostTier, executor: Executor, *, checksums: bool) -> None:
        """Register memory on ``executor``: that may wait."""
        self.checksums = checksums
        self._operations = operations
        self._host = host
        self._executor = executor
        self._registered: dict[str, asyncio.Future[None]] = {}

    def start(self, operation: Operation, job: BlockJob) -> None:
        """Run an operation's job as soon as the devices of its pages know the arena."""
        devices = {
            segment.region.accelerator.name: segment.region.accelerator
            for segment in job.segments
            if isinstance(segment.region, AcceleratorRegion)
        }
        for device in devices.values():
            known = self._registered.get(device.name)
            if known is None:
                known = self._registered[device.name] = asyncio.get_running_loop().run_in_executor(
                    self._executor, self._register, device
                )
            if not known.done():
                operation.waits_for = f"{device.name} to register the host tier"
                known.add_done_callback(partial(self._known, operation, job))
                return
            failed = CancelledError("the daemon ends") if known.cancelled() else known.exception()
            if failed is not None:
                error = failed if isinstance(failed, KvferryError) else InternalError(f"{device.name}: {failed!r}")
                asyncio.get_running_loop().call_soon(self._operations.give_up, operation, error)
                return
        self._operations.run(operation, job)

    def _known(self, operation: Operation, job: BlockJob, done: asyncio.Future[None]) -> None:
        del done
        if operation.stopped is None:
            self.start(operation, job)

    def _register(self, device: Accelerator) -> None:
        try:
            device.register_host(self._host.region)
        except OutOfMemoryError as cause:
            log.warning(
                "the host tier is not registered: copies to and from the device take a detour",
                device=device.name,
                cause=cause.detail,
                remedy="raise LimitMEMLOCK of the unit, or make tiers.host_bytes smaller",
            )

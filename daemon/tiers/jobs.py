"""Starting an operation's job, after the host tier was registered with the devices that hold its pages."""

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
    """Starts jobs. A device that cannot register so much memory copies through its driver's buffers, which is slower.

    Attributes:
        checksums: whether offloads compute checksums.
    """

    def __init__(self, operations: Operations, host: HostTier, executor: Executor, *, checksums: bool) -> None:
        """Register memory on ``executor``, since that may block."""
        self.checksums = checksums
        self._operations = operations
        self._host = host
        self._executor = executor
        self._registered: dict[str, asyncio.Future[None]] = {}

    def start(self, operation: Operation, job: BlockJob) -> None:
        """Run an operation's job once the devices of its pages have registered the arena."""
        devices = {
            segment.region.accelerator.name: segment.region.accelerator
            for segment in job.segments
            if isinstance(segment.region, AcceleratorRegion)
        }
        for device in devices.values():
            registration = self._registered.get(device.name)
            if registration is None:
                registration = self._registered[device.name] = asyncio.get_running_loop().run_in_executor(
                    self._executor, self._register, device
                )
            if not registration.done():
                operation.waits_for = f"{device.name} to register the host tier"
                registration.add_done_callback(partial(self._on_registered, operation, job))
                return
            cause = CancelledError("the daemon is ending") if registration.cancelled() else registration.exception()
            if cause is not None:
                error = cause if isinstance(cause, KvferryError) else InternalError(f"{device.name}: {cause!r}")
                asyncio.get_running_loop().call_soon(self._operations.give_up, operation, error)
                return
        self._operations.run(operation, job)

    def _on_registered(self, operation: Operation, job: BlockJob, done: asyncio.Future[None]) -> None:
        del done
        if operation.stopped is None:
            self.start(operation, job)

    def _register(self, device: Accelerator) -> None:
        try:
            device.register_host(self._host.region)
        except OutOfMemoryError as cause:
            log.warning(
                "the host tier is not registered with the device: copies go through the driver's buffers",
                device=device.name,
                cause=cause.detail,
                remedy="raise LimitMEMLOCK of the unit, or make tiers.host_bytes smaller",
            )

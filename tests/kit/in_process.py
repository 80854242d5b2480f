"""A daemon on the test's own loop, whole, and its log and end as the command has them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from kvferry.clients import AsyncClient, MhaSpec
from kvferry.daemon.daemon import Daemon, Surroundings, Tuning
from kvferry.daemon.process.access import RuntimeDirectory
from kvferry.daemon.process.fd_store import FdStore
from kvferry.daemon.process.host import configure_logs
from kvferry.daemon.transports.network_memory import NetworkMemory
from kvferry.protocol.config.schema import Config, LoggingConfig, ServiceConfig
from tests.kit.recording_service_manager import RecordingServiceManager

SPEC = MhaSpec(layers=2, tokens=64, page_size=4, kv_heads=2, head_dim=4, dtype="float32")
CONFIG = Config(service=ServiceConfig(drain_timeout_s=10), logging=LoggingConfig(level="error", format="json"))
TUNING = Tuning(copy_threads=1)
ON_THREADS = Tuning(copy_threads=1, at_once_s=0)
"""No copy on the control loop, which a test's may not hold up."""
PATIENCE_S = 20.0


class Serving(NamedTuple):
    """A daemon that serves: where, what it told its service manager, and what ends it."""

    path: Path
    manager: RecordingServiceManager
    stopping: asyncio.Event


@asynccontextmanager
async def serving(
    config: Config = CONFIG,
    store: FdStore | None = None,
    *,
    tuning: Tuning = TUNING,
    network: NetworkMemory | None = None,
    watchdog_s: float | None = None,
) -> AsyncIterator[Serving]:
    """Run a daemon; it is stopped in the end, if it was not before, and must have ended well.

    ``store`` keeps what outlives it; ``watchdog_s`` is its service manager's.
    """
    configure_logs(CONFIG.logging)
    stopping, manager = asyncio.Event(), RecordingServiceManager(watchdog_s)
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as folder:
        directory = await asyncio.to_thread(RuntimeDirectory(Path(folder) / "run").__enter__)
        daemon = Daemon(config, directory, stopping, network, tuning, Surroundings.of_none(store))
        ends = asyncio.ensure_future(daemon.serve(manager))
        ready = asyncio.ensure_future(manager.is_ready.wait())
        await asyncio.wait([ends, ready], return_when=asyncio.FIRST_COMPLETED)
        if ends.done():  # it failed before it could serve
            ready.cancel()
            await ends
        try:
            yield Serving(directory.path, manager, stopping)
        finally:
            stopping.set()
            async with asyncio.timeout(PATIENCE_S):
                await ends
            await asyncio.to_thread(directory.__exit__, None, None, None)
        assert [one.name for one in directory.path.iterdir()] == ["daemon.lock"]


@asynccontextmanager
async def client_of_one(tuning: Tuning = TUNING) -> AsyncIterator[tuple[AsyncClient, Path]]:
    """Run a daemon, with a client that has a pool."""
    async with (
        serving(tuning=tuning) as one,
        asyncio.timeout(PATIENCE_S),
        await AsyncClient.connect(one.path) as client,
    ):
        await client.create_pool("pool", SPEC)
        yield client, one.path

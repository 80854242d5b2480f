"""A daemon as far as the remote tier goes, in a process that a test kills: prints the store process's number."""

from __future__ import annotations

import asyncio
import sys

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.process.host import configure_logs
from kvferry.daemon.tiers.remote_store import RemoteStore, StoreTuning
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.config.schema import LoggingConfig, RemoteTierConfig


async def main(master_port: int) -> None:
    """Join the store, say so, and wait."""
    configure_logs(LoggingConfig())
    config = RemoteTierConfig(transport="mooncake_store", master=f"127.0.0.1:{master_port}", segment_bytes=1 << 24)
    with HostRegion.create("arena", 1 << 20) as region:
        async with RemoteStore(config, "127.0.0.1", region.fd, 1 << 20, Counters(), StoreTuning(retry_s=0.05)) as store:
            while not store.available:
                await store.changed()
            sys.stdout.write(f"{store.process_id}\n")
            sys.stdout.flush()
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))

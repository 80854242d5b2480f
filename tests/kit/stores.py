"""What tests of the remote tier share: a Mooncake master of their own, and nodes that join its store."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.tiers.remote_store import RemoteStore, StoredHeader, StoreTuning
from kvferry.daemon.tiers.store_process import Range
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.config.schema import RemoteTierConfig

WAIT_S = 30.0
NEEDED = "Mooncake's master: kvferry[mooncake], libibverbs1, libnuma1"
ARENA_BYTES = 8 << 20
PARENT = bytes(range(16))
AT = 1 << 20
"""Where tests let blocks be fetched to."""
PAGE_BYTES = 64 << 10


def master_binary() -> Path | None:
    """Return where the wheel has its master; None where Mooncake or a library that it needs is missing."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        return None
    binary = Path(spec.submodule_search_locations[0], "mooncake_master")
    runs = subprocess.run([binary, "--version"], capture_output=True, check=False, timeout=WAIT_S)
    return binary if runs.returncode == 0 else None


def free_port() -> int:
    """Return a port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Master:
    """A ``mooncake_master`` on the loopback, started and killed as the test says."""

    def __init__(self, binary: Path, log: Path) -> None:
        self.port = free_port()
        self._binary = binary
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, on the same port each time; nobody waits until it listens."""
        command = [str(self._binary), "--rpc_address=127.0.0.1", f"--rpc_port={self.port}", "--rpc_thread_num=2"]
        command += ["--metrics_host=127.0.0.1", f"--metrics_port={free_port()}", "--enable_metric_reporting=false"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self) -> None:
        """Kill it; nothing where it does not run."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(WAIT_S)


@contextmanager
def running_master(binary: Path, log: Path, *, start: bool = True) -> Iterator[Master]:
    """Yield a master; kill it at the end."""
    master = Master(binary, log)
    if start:
        master.start()
    try:
        yield master
    finally:
        master.kill()


class Node:
    """A daemon as far as the remote tier goes: an arena, and what joins the store."""

    def __init__(self, region: HostRegion, store: RemoteStore, counters: Counters) -> None:
        self.region = region
        self.store = store
        self.counters = counters

    @property
    def arena(self) -> npt.NDArray[np.uint8]:
        """Return the arena, ``(ARENA_BYTES,)`` uint8."""
        return self.region.view()

    def fill(self, offset: int, pages: int, seed: int) -> list[int]:
        """Write random pages from ``offset`` on; return their digests."""
        data = np.random.default_rng(seed).integers(0, 256, (pages, PAGE_BYTES), np.uint8)
        self.arena[offset : offset + pages * PAGE_BYTES] = data.reshape(-1)
        return [xxhash.xxh3_64_intdigest(page) for page in data]

    def page(self, offset: int) -> bytes:
        """Return the page at ``offset``."""
        return self.arena[offset : offset + PAGE_BYTES].tobytes()

    def signal(self, number: int) -> int:
        """Send the store process a signal, and wait until it has worked; return the process's number."""
        pid = self.store.process_id
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        return pid

    async def until(self, *, available: bool) -> None:
        """Wait until the store is there, or away."""
        async with asyncio.timeout(WAIT_S):
            while self.store.available is not available:
                await self.store.changed()


@asynccontextmanager
async def running_node(
    master: Master,
    *,
    address: str = "127.0.0.1",
    there: bool = True,
    segment_bytes: int = 32 << 20,
    hung_s: float = 5.0,
    timeout_s: float = 30.0,
) -> AsyncIterator[Node]:
    """Run a node at an address of the loopback; wait until it has joined, unless ``there`` is False."""
    config = RemoteTierConfig(
        transport="mooncake_store", master=f"127.0.0.1:{master.port}", segment_bytes=segment_bytes
    )
    tuning = StoreTuning(retry_s=0.05, lookup_timeout_s=5.0, progress_timeout_s=1, hung_s=hung_s, timeout_s=timeout_s)
    counters = Counters()
    with HostRegion.create("arena", ARENA_BYTES) as region:
        async with RemoteStore(config, address, region.fd, ARENA_BYTES, counters, tuning) as store:
            node = Node(region, store, counters)
            if there:
                await node.until(available=True)
            yield node


def pages_at(offset: int, pages: int) -> list[Range]:
    """Return ranges for so many pages, with a gap after each."""
    return [(offset + index * 2 * PAGE_BYTES, PAGE_BYTES) for index in range(pages)]


async def put_pages(node: Node, name: str, pages: int = 3, seed: int = 1) -> StoredHeader:
    """Store a block whose pages lie in one extent from 0 on; return its header.

    A store that has only just begun may have no memory for some milliseconds.
    """
    digests = node.fill(0, pages, seed)
    async with asyncio.timeout(WAIT_S):
        while not await node.store.put(name, [(0, pages * PAGE_BYTES)], parent=PARENT, digests=digests):
            await node.until(available=True)
    return StoredHeader(PARENT, tuple(digests))

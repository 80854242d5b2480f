"""The remote tier with a real Mooncake Store: what nodes share and refuse, and what dies, hangs, is late or damaged."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvferry.clients import Client
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.process.signals import ENDING, IGNORED
from kvferry.daemon.tiers.remote_store import (
    RemoteStore,
    StoredHeader,
    StoreTuning,
    header_bytes,
    pack_header,
    remote_name,
    unpack_header,
)
from kvferry.daemon.tiers.store_process import Range
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.tiers.cached_block import BlockKey, Namespace
from kvferry.protocol.config.schema import RemoteTierConfig
from kvferry.protocol.errors import ConfigError
from tests import kit
from tests.kit.daemons import soon

pytestmark = pytest.mark.anyio
WAIT_S = 30.0
AT_ONCE_S = 0.5
NEEDED = "Mooncake's master: kvferry[mooncake], libibverbs1, libnuma1"
ARENA_BYTES = 8 << 20
PARENT = bytes(range(16))
AT = 1 << 20
"""Where blocks are fetched to."""
PAGE_BYTES = 64 << 10


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Run on the daemon's own loop only: each of these tests takes seconds."""
    return "asyncio", {"use_uvloop": True}


def master_binary() -> Path | None:
    """Return where the wheel has its master; None where Mooncake or a library that it needs is missing."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        return None
    binary = Path(spec.submodule_search_locations[0], "mooncake_master")
    runs = subprocess.run([binary, "--version"], capture_output=True, check=False, timeout=WAIT_S)
    return binary if runs.returncode == 0 else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Master:
    """A ``mooncake_master`` on the loopback, started and killed as the test says."""

    def __init__(self, binary: Path, log: Path) -> None:
        self.port = free_port()
        self._command = [str(binary), "--rpc_address=127.0.0.1", f"--rpc_port={self.port}", "--rpc_thread_num=2"]
        self._command += ["--metrics_host=127.0.0.1", "--enable_metric_reporting=false"]
        self._log = log

    def start(self) -> None:
        """Start it, on the same port each time; nobody waits until it listens."""
        with self._log.open("ab") as log:
            command = [*self._command, f"--metrics_port={free_port()}"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)


@pytest.fixture(scope="session")
def binary(require: Callable[[object, str], None]) -> Path:
    found = master_binary()
    require(found is not None, NEEDED)
    assert found is not None
    return found


@pytest.fixture
def master(binary: Path, tmp_path: Path) -> Iterator[Master]:
    running = Master(binary, tmp_path / "master.log")
    running.start()
    yield running
    running.kill()


class Node:
    """A daemon as far as the remote tier goes: an arena, and what joins the store."""

    def __init__(self, region: HostRegion, store: RemoteStore, counters: Counters) -> None:
        self.region = region
        self.store = store
        self.counters = counters

    @property
    def arena(self) -> npt.NDArray[np.uint8]:
        return self.region.view()

    def fill(self, offset: int, pages: int, seed: int) -> list[int]:
        """Write random pages from ``offset`` on; return their digests."""
        data = np.random.default_rng(seed).integers(0, 256, (pages, PAGE_BYTES), np.uint8)
        self.arena[offset : offset + pages * PAGE_BYTES] = data.reshape(-1)
        return [xxhash.xxh3_64_intdigest(page) for page in data]

    async def put(self, name: str, pages: int = 3, seed: int = 1) -> StoredHeader:
        """Store a block whose pages lie in one extent from 0 on; return its header.

        A store that has only just begun may have no memory for some milliseconds.
        """
        digests = self.fill(0, pages, seed)
        async with asyncio.timeout(WAIT_S):
            while not await self.store.put(name, [(0, pages * PAGE_BYTES)], parent=PARENT, digests=digests):
                await self.until(available=True)
        return StoredHeader(PARENT, tuple(digests))

    async def get(self, name: str, pages: int = 3) -> StoredHeader | None:
        """Fetch a block into pages from ``AT`` on, with a gap after each."""
        ranges: list[Range] = [(AT + index * 2 * PAGE_BYTES, PAGE_BYTES) for index in range(pages)]
        return await self.store.get(name, ranges, pages=pages)

    def page(self, offset: int) -> bytes:
        return self.arena[offset : offset + PAGE_BYTES].tobytes()

    def signal(self, number: int) -> int:
        """Send the store process a signal, and wait until it has stopped, if it is to; return the process's number."""
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
    master: Master, *, address: str = "127.0.0.1", segment_bytes: int = 32 << 20, hung_s: float = 5.0
) -> AsyncIterator[Node]:
    """Run a node at an address of the loopback, which has joined."""
    config = RemoteTierConfig(
        transport="mooncake_store", master=f"127.0.0.1:{master.port}", segment_bytes=segment_bytes
    )
    tuning = StoreTuning(retry_s=0.05, lookup_timeout_s=5.0, progress_timeout_s=1, hung_s=hung_s, timeout_s=30.0)
    counters = Counters()
    with HostRegion.create("arena", ARENA_BYTES) as region:
        async with RemoteStore(config, address, region.fd, ARENA_BYTES, counters, tuning) as store:
            node = Node(region, store, counters)
            await node.until(available=True)
            yield node


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.full)])
async def test_two_nodes_share_blocks(master: Master, address: str) -> None:
    async with (
        running_node(master, address=address) as one,
        running_node(master, address=address, segment_bytes=0) as other,
    ):
        header = await one.put("a")
        assert await other.store.exists(["a", "b", "a"]) == [True, False, True]
        assert await other.get("a") == header
        for index in range(3):
            assert other.page(AT + index * 2 * PAGE_BYTES) == one.page(index * PAGE_BYTES)
            assert not other.arena[AT + (2 * index + 1) * PAGE_BYTES :][:PAGE_BYTES].any()
        await other.put("a", seed=2)
        assert await other.get("a") == header, "what is there stays as it is"
        assert await other.get("b") is None
        back = other.fill(0, 1, 5)
        assert await other.store.put("c", [(0, PAGE_BYTES)], parent=None, digests=back)
        assert await one.get("c", 1) == StoredHeader(None, tuple(back))
        assert one.page(AT) == other.page(0)
        assert await other.store.remove(["a", "b"])
        assert await one.store.exists(["a", "c"]) == [False, True]
        seen = other.counters.snapshot()
        counted = {"gets_done": 2, "gets_bytes": 6 * PAGE_BYTES, "gets_missed": 1, "puts_done": 2, "found": 2}
        assert {name: seen[f"remote.{name}"] for name in counted} == counted


@pytest.mark.usefixtures("binary")
async def test_an_address_of_another_host_is_a_mistake() -> None:
    config = RemoteTierConfig(transport="mooncake_store")
    with pytest.raises(ConfigError, match="not an address of this host"):
        await RemoteStore(config, "192.0.2.1", -1, 0, Counters()).start()


async def test_what_is_not_whole_or_not_ours_is_not_there(master: Master) -> None:
    async with running_node(master) as node:
        await node.put("a")
        for pages in (2, 4):
            assert await node.get("a", pages) is None
        assert await node.store.exists(["a"]) == [True]
        # As many bytes in all, but no header where one must be.
        assert await node.store.get("a", [(AT, 3 * PAGE_BYTES - 8)], pages=4) is None
        assert node.counters.snapshot()["remote.headers_damaged"] == 1
        assert await node.store.exists(["a"]) == [False]


# -- names and headers of blocks


KEY = BlockKey(Namespace(1000, "0f" * 16, "1e" * 16, "main", 4), bytes(range(16)))
PARENTS = st.none() | st.binary(min_size=16, max_size=16)
DIGESTS = st.lists(st.integers(0, (1 << 64) - 1), max_size=40)


@given(PARENTS, DIGESTS, st.data())
def test_a_header_comes_back_and_one_that_is_changed_cut_or_anothers_is_none(
    parent: bytes | None, digests: list[int], data: st.DataObject
) -> None:
    packed = pack_header("a", parent, digests)
    assert len(packed) == header_bytes(len(digests))
    assert unpack_header("a", packed) == StoredHeader(parent, tuple(digests))
    at = data.draw(st.integers(0, len(packed) - 1))
    changed = packed[:at] + bytes([packed[at] ^ data.draw(st.integers(1, 255))]) + packed[at + 1 :]
    for wrong in (changed, packed[:at], packed + bytes(8)):
        assert unpack_header("a", wrong) is None
    assert unpack_header("b", packed) is None


@pytest.mark.parametrize("shared", [True, False])
def test_other_blocks_have_other_names_and_shared_ones_are_those_of_all_tenants(*, shared: bool) -> None:
    of = KEY.namespace
    others = [of._replace(layout_digest="0e" * 16), of._replace(identity="1f" * 16), of._replace(group="swa")]
    keys = [BlockKey(one, KEY.hash) for one in (of, *others, of._replace(block_pages=5))] + [BlockKey(of, bytes(16))]
    assert len({remote_name(one, shared=shared) for one in keys}) == len(keys)
    of_another = remote_name(BlockKey(of._replace(tenant=1001), KEY.hash), shared=shared)
    assert (of_another == remote_name(KEY, shared=shared)) is shared


def test_a_name_is_what_it_was() -> None:
    name = f"kvferry/2/tenant-1000/{'0f' * 16}/{'1e' * 16}/main/4/{bytes(range(16)).hex()}"
    assert remote_name(KEY, shared=False) == name


# -- faults of the remote tier: its master, its process, another node or the daemon itself dies, hangs or is late


def said(logs: list[Any]) -> list[Any]:
    return [line for line in logs if line["log_level"] in {"warning", "info"}]


@pytest.mark.full
async def test_a_master_that_is_killed_and_comes_back(master: Master) -> None:
    async with running_node(master) as node:
        with capture_logs() as logs:
            await node.put("a")
            pid = node.store.process_id
            master.kill()
            assert await node.store.exists(["a"]) == [False]
            assert not node.store.available
            began_s = time.monotonic()
            assert await node.get("a") is None
            assert time.monotonic() - began_s < AT_ONCE_S
            master.start()
            await node.until(available=True)
        assert [one["event"] for one in said(logs) if one["log_level"] == "warning"] == ["remote tier away"]
        assert await node.store.exists(["a"]) == [False]
        assert await node.put("b") == await node.get("b")
        assert node.store.process_id == pid


@pytest.mark.full
async def test_signals_for_the_daemon_do_not_end_the_process(master: Master) -> None:
    """``systemctl kill`` sends to all processes of the unit, and Mooncake ends its own at some signals."""
    async with running_node(master) as node:
        pid = node.store.process_id
        for number in (*ENDING, *IGNORED):
            node.signal(number)
        assert await node.put("a") == await node.get("a")
        assert (node.store.process_id, node.counters.snapshot()["remote.processes_started"]) == (pid, 1)


async def test_a_process_that_hangs_is_killed_and_started_again(master: Master) -> None:
    async with running_node(master) as keeper, running_node(master, segment_bytes=0, hung_s=1.0) as node:
        header = await keeper.put("a")
        hung = node.signal(signal.SIGSTOP)
        asked = [asyncio.create_task(node.get("a")) for _ in range(4)]
        asyncio.get_running_loop().call_soon(asked[0].cancel)
        assert await node.store.exists(["a"]) == [False]
        with pytest.raises(asyncio.CancelledError):
            await asked[0]
        # It came back only when the process could not write any more, whatever its caller wanted.
        with pytest.raises(ProcessLookupError):
            os.kill(hung, 0)
        assert await asyncio.gather(*asked[1:]) == [None] * 3
        await node.until(available=True)
        assert await node.get("a") == header
        with capture_logs() as logs:
            node.signal(signal.SIGKILL)
            await node.until(available=False)
        [away] = [one for one in said(logs) if one["log_level"] == "warning"]
        assert "SIGKILL" in away["cause"]


@pytest.mark.full
async def test_puts_to_and_gets_from_a_node_that_does_not_answer_are_given_up_and_said(master: Master) -> None:
    async with running_node(master, hung_s=WAIT_S) as keeper, running_node(master, segment_bytes=0) as node:
        # The first contact with a node that takes connections and says nothing is given up after a minute only.
        assert await node.put("a") == await node.get("a")
        assert node.store.state == "ready"
        keeper.signal(signal.SIGSTOP)
        before = node.store.process_id
        with capture_logs() as logs:
            for name in ("b", "c"):
                assert not await node.store.put(name, [(0, PAGE_BYTES)], parent=None, digests=[1])
            assert node.store.state.startswith("failing: bytes do not reach the node")
            assert await node.get("a") is None
            assert (node.store.process_id, node.store.available) == (before, True)
            keeper.signal(signal.SIGCONT)
            await node.put("d")
            assert node.store.state == "ready"
        first, last = said(logs)
        assert (first["event"], first["failed"]) == ("a tier does not store blocks", 1)
        assert last["event"] == "a tier stores blocks again"
        assert last["failed"] >= 2, "one more where the node was not back yet"
        counted = node.counters.snapshot()
        assert (counted["remote.puts_failed"], counted["remote.gets_failed"]) == (last["failed"], 1)


@pytest.mark.full
async def test_a_store_without_memory_is_full(master: Master) -> None:
    async with running_node(master, segment_bytes=0) as node:
        assert not await node.store.put("a", [(0, PAGE_BYTES)], parent=None, digests=[1])
        assert node.store.state == "full"


def test_a_daemon_that_is_killed_leaves_no_process(master: Master) -> None:
    remote = f'transport = "mooncake_store"\naddress = "127.0.0.1"\nmaster = "127.0.0.1:{master.port}"\n'
    with kit.daemon(f"[tiers]\nhost_bytes = 1048576\n[tiers.remote]\n{remote}segment_bytes = 16777216\n") as daemon:
        with Client.connect(daemon.runtime_dir, session=False) as client:
            assert soon(lambda: [one.state for one in client.status().tiers if one.tier == "remote"] == ["ready"])
        [store] = psutil.Process(daemon.process.pid).children()
        watched, ended = os.pidfd_open(store.pid), select.poll()
        ended.register(watched, select.POLLIN)
        daemon.kill()
        assert ended.poll(1000 * WAIT_S)
        os.close(watched)

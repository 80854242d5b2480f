"""The remote tier with a real Mooncake Store: what nodes share and refuse, and what dies, hangs, is late or damaged."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.process.signals import ENDING, IGNORED
from kvferry.daemon.tiers.remote_store import (
    RemoteStore,
    StoredHeader,
    header_bytes,
    pack_header,
    remote_name,
    unpack_header,
)
from kvferry.pools.tiers.cached_block import BlockKey, Namespace
from kvferry.protocol.config.schema import RemoteTierConfig
from kvferry.protocol.errors import ConfigError
from tests.kit import store_daemon
from tests.kit.stores import (
    AT,
    NEEDED,
    PAGE_BYTES,
    WAIT_S,
    Master,
    master_binary,
    pages_at,
    put_pages,
    running_master,
    running_node,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Run on the daemon's own loop only: each of these tests takes seconds."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def binary(require: Callable[[object, str], None]) -> Path:
    found = master_binary()
    require(found is not None, NEEDED)
    assert found is not None
    return found


@pytest.fixture
def master(binary: Path, tmp_path: Path) -> Iterator[Master]:
    with running_master(binary, tmp_path / "master.log") as running:
        yield running


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.full)])
async def test_two_nodes_share_blocks(master: Master, address: str) -> None:
    async with (
        running_node(master, address=address) as one,
        running_node(master, address=address, segment_bytes=0) as other,
    ):
        header = await put_pages(one, "a")
        assert await other.store.exists(["a", "b", "a"]) == [True, False, True]
        assert await other.store.get("a", pages_at(AT, 3), pages=3) == header
        for index in range(3):
            assert other.page(AT + index * 2 * PAGE_BYTES) == one.page(index * PAGE_BYTES)
            assert not other.arena[AT + (2 * index + 1) * PAGE_BYTES :][:PAGE_BYTES].any()
        await put_pages(other, "a", seed=2)
        assert await other.store.get("a", pages_at(AT, 3), pages=3) == header, "what is there stays as it is"
        assert await other.store.get("b", pages_at(AT, 3), pages=3) is None
        back = other.fill(0, 1, 5)
        assert await other.store.put("c", [(0, PAGE_BYTES)], parent=None, digests=back)
        assert await one.store.get("c", pages_at(AT, 1), pages=1) == StoredHeader(None, tuple(back))
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


# -- names and headers of blocks in the remote tier.


KEY = BlockKey(Namespace(1000, "0f" * 16, "1e" * 16, "main", 4), bytes(range(16)))
PARENTS = st.none() | st.binary(min_size=16, max_size=16)
DIGESTS = st.lists(st.integers(0, (1 << 64) - 1), max_size=40)


@given(PARENTS, DIGESTS)
def test_a_header_comes_back(parent: bytes | None, digests: list[int]) -> None:
    packed = pack_header("a", parent, digests)
    assert len(packed) == header_bytes(len(digests))
    assert unpack_header("a", packed) == StoredHeader(parent, tuple(digests))


@given(PARENTS, DIGESTS, st.data())
def test_a_changed_header_is_none(parent: bytes | None, digests: list[int], data: st.DataObject) -> None:
    packed = bytearray(pack_header("a", parent, digests))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    assert unpack_header("a", bytes(packed)) is None


@given(DIGESTS, st.integers(min_value=1))
def test_a_cut_header_is_none(digests: list[int], cut: int) -> None:
    packed = pack_header("a", None, digests)
    assert unpack_header("a", packed[: -min(cut, len(packed))]) is None
    assert unpack_header("a", packed + bytes(8)) is None


def test_a_header_is_of_one_name() -> None:
    assert unpack_header("b", pack_header("a", None, [1, 2])) is None


OTHERS = [{"layout_digest": "0e" * 16}, {"identity": "1f" * 16}, {"space": "swa"}, {"block_pages": 5}]


@pytest.mark.parametrize("shared", [True, False])
def test_other_blocks_have_other_names(*, shared: bool) -> None:
    others = [BlockKey(KEY.namespace._replace(**one), KEY.hash) for one in OTHERS]  # type: ignore[arg-type]
    for other in (*others, KEY._replace(hash=bytes(16))):
        assert remote_name(other, shared=shared) != remote_name(KEY, shared=shared)


def test_only_shared_names_are_those_of_all_tenants() -> None:
    other = BlockKey(KEY.namespace._replace(tenant=1001), KEY.hash)
    assert remote_name(other, shared=False) != remote_name(KEY, shared=False)
    assert remote_name(other, shared=True) == remote_name(KEY, shared=True)
    name = f"kvferry/2/tenant-1000/{'0f' * 16}/{'1e' * 16}/main/4/{bytes(range(16)).hex()}"
    assert remote_name(KEY, shared=False) == name


# -- faults of the remote tier: its master, its process, another node or the daemon itself dies, hangs or is late


AT_ONCE_S = 0.5


def warnings_of(logs: list[Any]) -> list[str]:
    return [line["event"] for line in logs if line["log_level"] == "warning"]


@pytest.mark.full
async def test_a_master_that_is_killed_and_comes_back(master: Master) -> None:
    async with running_node(master) as node:
        with capture_logs() as logs:
            await put_pages(node, "a")
            pid = node.store.process_id
            master.kill()
            assert await node.store.exists(["a"]) == [False]
            assert not node.store.available
            began_s = time.monotonic()
            assert await node.store.get("a", pages_at(AT, 3), pages=3) is None
            assert time.monotonic() - began_s < AT_ONCE_S
            assert warnings_of(logs) == ["remote tier away"]
            master.start()
            await node.until(available=True)
        assert warnings_of(logs) == ["remote tier away"]
        assert await node.store.exists(["a"]) == [False]
        header = await put_pages(node, "b")
        assert await node.store.get("b", pages_at(AT, 3), pages=3) == header
        assert node.store.process_id == pid


@pytest.mark.full
async def test_a_process_that_is_killed_is_started_again(master: Master) -> None:
    async with running_node(master) as keeper, running_node(master, segment_bytes=0) as node:
        header = await put_pages(keeper, "a")
        with capture_logs() as logs:
            killed = node.signal(signal.SIGKILL)
            assert await node.store.exists(["a"]) == [False]
            await node.until(available=False)
            await node.until(available=True)
        assert node.store.process_id not in (0, killed)
        assert warnings_of(logs) == ["remote tier away"]
        assert "SIGKILL" in next(line["cause"] for line in logs if line["log_level"] == "warning")
        assert await node.store.get("a", pages_at(AT, 3), pages=3) == header


@pytest.mark.full
async def test_signals_for_the_daemon_do_not_end_the_process(master: Master) -> None:
    """``systemctl kill`` sends to all processes of the unit, and Mooncake ends its own at some signals."""
    async with running_node(master) as node:
        pid = node.store.process_id
        for number in (*ENDING, *IGNORED):
            node.signal(number)
        header = await put_pages(node, "a")
        assert await node.store.get("a", pages_at(AT, 3), pages=3) == header
        assert (node.store.process_id, node.counters.snapshot()["remote.processes_started"]) == (pid, 1)


async def test_a_process_that_hangs_is_killed(master: Master) -> None:
    async with running_node(master) as keeper, running_node(master, segment_bytes=0, hung_s=1.0) as node:
        header = await put_pages(keeper, "a")
        hung = node.signal(signal.SIGSTOP)
        asked = [asyncio.create_task(node.store.get("a", pages_at(AT, 3), pages=3)) for _ in range(4)]
        asyncio.get_running_loop().call_soon(asked[0].cancel)
        assert await node.store.exists(["a"]) == [False]
        with pytest.raises(asyncio.CancelledError):
            await asked[0]
        # It came back only when the process could not write any more, whatever its caller wanted.
        with pytest.raises(ProcessLookupError):
            os.kill(hung, 0)
        assert await asyncio.gather(*asked[1:]) == [None] * 3
        await node.until(available=True)
        assert await node.store.get("a", pages_at(AT, 3), pages=3) == header


@pytest.mark.full
async def test_a_node_that_does_not_answer_is_given_up(master: Master) -> None:
    async with running_node(master, hung_s=WAIT_S) as keeper, running_node(master, segment_bytes=0) as node:
        header = await put_pages(keeper, "a")
        # The first contact with a node that takes connections and says nothing is given up after a minute only.
        assert await node.store.get("a", pages_at(AT, 3), pages=3) == header
        keeper.signal(signal.SIGSTOP)
        before = node.store.process_id
        assert await node.store.get("a", pages_at(AT, 3), pages=3) is None
        assert (node.store.process_id, node.store.available) == (before, True)
        assert node.counters.snapshot()["remote.gets_failed"] == 1
        keeper.signal(signal.SIGCONT)


@pytest.mark.full
async def test_puts_that_fail_are_said_and_so_is_that_they_work_again(master: Master) -> None:
    async with running_node(master, hung_s=WAIT_S) as keeper, running_node(master, segment_bytes=0) as node:
        await put_pages(node, "a")
        assert node.store.state == "ready"
        keeper.signal(signal.SIGSTOP)
        with capture_logs() as logs:
            for name in ("b", "c"):
                assert not await node.store.put(name, [(0, PAGE_BYTES)], parent=None, digests=[1])
            assert node.store.state.startswith("failing: bytes do not reach the node")
            keeper.signal(signal.SIGCONT)
            await put_pages(node, "d")
            assert node.store.state == "ready"
        first, last = [line for line in logs if line["log_level"] in {"warning", "info"}]
        assert (first["event"], first["failed"]) == ("a tier does not store blocks", 1)
        assert last["event"] == "a tier stores blocks again"
        assert last["failed"] >= 2, "one more where the node was not back yet"
        assert node.counters.snapshot()["remote.puts_failed"] == last["failed"]


@pytest.mark.full
async def test_a_store_without_memory_is_full(master: Master) -> None:
    async with running_node(master, segment_bytes=0) as node:
        assert not await node.store.put("a", [(0, PAGE_BYTES)], parent=None, digests=[1])
        assert node.store.state == "full"


async def test_a_daemon_that_is_killed_leaves_no_process(master: Master) -> None:
    command = [sys.executable, "-P", store_daemon.__file__, str(master.port)]
    with subprocess.Popen(  # noqa: ASYNC220  nothing else is to happen meanwhile
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as daemon:
        try:
            assert daemon.stdout is not None
            watched = os.pidfd_open(int(await asyncio.to_thread(daemon.stdout.readline)))
        finally:
            daemon.kill()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(watched, ended.set)
    async with asyncio.timeout(WAIT_S):
        await ended.wait()
    asyncio.get_running_loop().remove_reader(watched)
    os.close(watched)


async def test_what_is_not_whole_or_not_ours_is_not_there(master: Master) -> None:
    async with running_node(master) as node:
        await put_pages(node, "a")
        for pages in (2, 4):
            assert await node.store.get("a", pages_at(AT, pages), pages=pages) is None
        assert await node.store.exists(["a"]) == [True]
        # As many bytes in all, but no header where one must be.
        assert await node.store.get("a", [(AT, 3 * PAGE_BYTES - 8)], pages=4) is None
        assert node.counters.snapshot()["remote.headers_damaged"] == 1
        assert await node.store.exists(["a"]) == [False]

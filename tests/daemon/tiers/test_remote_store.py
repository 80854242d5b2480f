"""The remote tier with a real Mooncake Store: what two nodes share, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.daemon.config.remote_tier import RemoteTierConfig
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.tiers.remote_store import RemoteStore, StoredHeader
from kvferry.protocol.errors import ConfigError
from tests.daemon.tiers.store_harness import (
    AT,
    NEEDED,
    PAGE_BYTES,
    Master,
    master_binary,
    pages_at,
    put_pages,
    running_master,
    running_node,
)

pytestmark = pytest.mark.anyio


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


async def test_two_nodes_share_blocks(master: Master) -> None:
    async with running_node(master) as one, running_node(master, segment_bytes=0) as other:
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
        assert (seen["remote.gets_done"], seen["remote.gets_bytes"], seen["remote.gets_missed"]) == (
            2,
            6 * PAGE_BYTES,
            1,
        )
        assert (seen["remote.puts_done"], seen["remote.found"]) == (2, 2)


@pytest.mark.usefixtures("binary")
async def test_an_address_of_another_host_is_a_mistake() -> None:
    config = RemoteTierConfig(transport="mooncake_store")
    with pytest.raises(ConfigError, match="not an address of this host"):
        await RemoteStore(config, "192.0.2.1", -1, 0, Counters()).start()

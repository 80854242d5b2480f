"""VERIFY: nothing wrong in a daemon at work, and each kind of wrong entry in its books found, with where and whose."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from kvferry.clients import AsyncClient, Client, ModelIdentity, new_request_id, pages, pages_wanted
from kvferry.clients.cli.main import main
from kvferry.clients.cli.verify import closing_line, finding_line
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.tiers.host_tier import HostTier
from kvferry.daemon.tiers.snapshots import Snapshot, SnapshotRegistry
from kvferry.daemon.transfer.registry import Endpoints
from kvferry.daemon.transfer.state_machine import TransferStateMachine
from kvferry.pools.allocator import HeldPages, PageAllocator
from kvferry.pools.integrity import Problem
from kvferry.pools.pool import Pool
from kvferry.pools.tiers.block_file import DiskFailedError
from kvferry.pools.tiers.cached_block import BlockState, CachedBlock
from kvferry.protocol.config.schema import DiskTierConfig, TiersConfig
from kvferry.protocol.errors import OverloadedError
from tests import kit
from tests.kit.daemons import Daemon, said_by_another_user
from tests.kit.in_process import CONFIG as BARE
from tests.kit.in_process import PATIENCE_S, SPEC, serving
from tests.kit.pools import arena_of

pytestmark = pytest.mark.anyio
NOBODY = 4711
HASHES = [bytes([number]) * 16 for number in range(4)]


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Let calls block: a disk tier locks its folder on the loop before it serves, and the tests look at its files."""


class DamagedAllocator(PageAllocator):
    """An allocator whose books a test can spoil."""

    def damage(
        self, page: int, *, free: int = -1, owner: int = 0, readers: int = 0, doomed: int = 0, writing: int = 0
    ) -> None:
        """Put a page into a state that no call leaves it in; ``free`` -1 leaves that as it was."""
        self._free[page] = self._free[page] if free < 0 else free
        self._owner[page], self._readers[page] = owner, readers
        self._doomed[page], self._writing[page] = doomed, writing


class Busy(NamedTuple):
    """A daemon in which everything holds something, and its books; the file is the first block's."""

    client: AsyncClient
    path: Path
    disk: Path
    file: Path
    pool: Pool
    allocator: PageAllocator
    owner: int
    endpoints: Endpoints
    host: HostTier
    snapshot: Snapshot
    blocks: list[CachedBlock]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[type[Any], Any]:
    """Return what the daemon makes of some of its parts, by class."""
    found: dict[type[Any], Any] = {}

    def make(kind: type[Any], *arguments: Any, **more: Any) -> Any:  # noqa: ANN401  whatever the class takes
        found[kind] = kind(*arguments, **more)
        return found[kind]

    for where, kind in (
        ("daemon", PoolRegistry),
        ("daemon", TransferStateMachine),
        ("services.tiers", HostTier),
        ("services.offload", SnapshotRegistry),
    ):
        monkeypatch.setattr(f"kvferry.daemon.{where}.{kind.__name__}", partial(make, kind))
    return found


@pytest.fixture
async def busy(made: dict[type[Any], Any], tmp_path: Path) -> AsyncIterator[Busy]:
    """Run a daemon with a waiting SEND and RECEIVE, a snapshot, stored and leased blocks, and blocks on disk."""
    disk = tmp_path / "blocks"
    disk.mkdir(mode=0o700)
    tiers = TiersConfig(host_bytes=1 << 20, disk=DiskTierConfig(path=str(disk), max_bytes=1 << 20))
    async with (
        serving(msgspec.structs.replace(BARE, tiers=tiers)) as one,
        asyncio.timeout(PATIENCE_S),
        await AsyncClient.connect(one.path) as client,
    ):
        pool = await client.create_pool("pool", SPEC, model=ModelIdentity(name="a/model"))
        sent, received, kept = [await client.allocate("pool", 3) for _ in range(3)]
        pool.tensor("main", "k")[:, kept] = torch.rand(2, 3, 4, 2, 4)
        client.send("pool", new_request_id(), [pages(sent)])
        client.receive("pool", new_request_id(), [pages(received)])
        client.receive("pool", new_request_id(), [pages_wanted(2)], into="host")
        await client.wait_done(client.offload("pool", [pages(kept)]))
        await client.wait_done(client.store("pool", HASHES[:3], kept))
        await client.lookup("pool", HASHES[:2])
        await client.lookup("pool", HASHES[:1])
        while sum(tier.blocks for tier in (await client.status()).tiers if tier.tier == "disk") < len(kept):
            pass  # each look is a round trip
        (its,) = made[PoolRegistry]
        yield Busy(
            client=client,
            path=one.path,
            disk=disk,
            file=next(one for one in disk.rglob(HASHES[0].hex())),
            pool=its,
            allocator=its.allocator,
            owner=next(iter(its.allocator.pages_by_owner())),
            endpoints=made[TransferStateMachine].endpoints,
            host=made[HostTier],
            snapshot=next(one for one in made[SnapshotRegistry] if one.state == "ready"),
            blocks=made[HostTier].index.page(0, 10).blocks,
        )


async def test_nothing_is_wrong_in_a_daemon_at_work(busy: Busy) -> None:
    verified = await busy.client.verify(deep=True)
    assert not verified.findings
    assert verified.checked == {
        "pools": 1,
        "pages": 16,
        "requests": 3,
        "blocks": 3,
        "snapshots": 2,
        "operations": 0,
        "files": 3,
    }
    assert "nothing is wrong" in closing_line(verified)


def a_reader_is_leaked(busy: Busy) -> None:
    busy.allocator.begin_read(busy.owner, busy.allocator.allocate(busy.owner, 2), "pages")


def a_deadline_is_forgotten(busy: Busy) -> None:
    busy.endpoints.deadlines.drop(next(iter(busy.endpoints)))


def a_block_is_written_by_nobody(busy: Busy) -> None:
    busy.host.index.begin(busy.blocks[0].namespace, HASHES[3:], None, 4096)


def a_reader_is_lost(busy: Busy) -> None:
    sent = next(iter(busy.endpoints.send_requests.values()))
    busy.allocator.end_read(sent.chunks[0].ranges[0].ids[:1])


def a_writer_is_lost(busy: Busy, *, temporary: bool) -> None:
    requests = busy.endpoints.receive_requests.values()
    received = next(one for one in requests if bool(one.pool.becomes_snapshot) is temporary)
    received.pool.allocator.end_write(received.ranges["main"].ids[:1])


def a_charge_is_leaked(busy: Busy) -> None:
    busy.host.index.accounts[busy.pool.tenant].charged_bytes += 4096


def a_snapshots_memory_is_freed(busy: Busy) -> None:
    segment = busy.snapshot.segments[0]
    busy.host.arena.free(segment.offsets[:1], segment.layout.block_bytes)


def two_blocks_have_the_same_memory(busy: Busy) -> None:
    first, second, *_ = busy.blocks
    second.offsets = first.offsets


def a_count_of_bytes_is_wrong(busy: Busy) -> None:
    busy.host.index.accounts[busy.pool.tenant].cached_bytes -= 1


def a_file_is_unknown(busy: Busy) -> None:
    other = busy.file.parent.with_name(HASHES[3].hex()[:2]) / HASHES[3].hex()
    other.parent.mkdir(mode=0o700)
    busy.file.rename(other)


def a_block_has(**fields: object) -> Callable[[Busy], None]:
    def damage(busy: Busy) -> None:
        for name, value in fields.items():
            setattr(busy.blocks[0], name, value)

    return damage


POOL = f"pool 'pool' of user {os.getuid()}, page space 'main'"
ARENA, PINS, FILES = "the host tier's memory", "the pins of cached blocks", "the disk tier's files"


@pytest.mark.parametrize(
    ("damage", "where", "what"),
    [
        (a_reader_is_leaked, POOL, "page 10 has 1 readers, its holders say 0"),
        (a_reader_is_lost, POOL, "page 1 has 0 readers, its holders say 1"),
        (partial(a_writer_is_lost, temporary=False), POOL, "page 4 has 0 writers, its holders say 1"),
        (partial(a_writer_is_lost, temporary=True), POOL, "page 1 has 0 writers, its holders say 1"),
        (lambda busy: busy.allocator.allocate(NOBODY, 1), POOL, "a page belongs to an instance that has ended"),
        (a_deadline_is_forgotten, "the transfers", "an open request has no deadline"),
        (lambda busy: busy.host.arena.allocate(1, 4096), ARENA, "4096 bytes are allocated, and nothing holds them"),
        (a_charge_is_leaked, ARENA, "is charged"),
        (a_snapshots_memory_is_freed, ARENA, "it is held twice, also by snapshot"),
        (two_blocks_have_the_same_memory, ARENA, "it is held twice, also by cached blocks"),
        (lambda busy: busy.host.index.pin(busy.blocks, NOBODY), PINS, "has 1 pins of 4711, who says 0"),
        (lambda busy: busy.host.index.unpin(busy.blocks[:1], busy.owner), PINS, "has 1 pins of 1, who says 2"),
        (a_block_is_written_by_nobody, "the blocks being stored", "a block is being written, and no STORE writes it"),
        (a_count_of_bytes_is_wrong, "the cached blocks", "cached bytes, 12287 are counted"),
        (a_block_has(offsets=np.empty(0, np.int64)), "the cached blocks", "a block with memory for 0 of its 1 pages"),
        (a_block_has(state=BlockState.DOOMED), "the cached blocks", "a visible block that is not READY"),
        (a_block_has(on_disk=False), "the disk tier's index", "and the index says that it has none"),
        (lambda busy: busy.file.unlink(), FILES, "has None bytes, "),
        (lambda busy: busy.file.write_bytes(busy.file.read_bytes()[:-1]), FILES, "bytes are not 1 pages of"),
        (a_file_is_unknown, FILES, "bytes, None are known"),
    ],
)
async def test_what_is_wrong_is_found(busy: Busy, damage: Callable[[Busy], object], where: str, what: str) -> None:
    damage(busy)
    found = (await busy.client.verify()).findings
    assert [one for one in found if one.where == where and what in one.what and one.remedy], found


async def test_a_damaged_page_on_disk_is_found_by_reading_it(busy: Busy) -> None:
    content = bytearray(busy.file.read_bytes())
    content[-1] ^= 1
    busy.file.write_bytes(content)
    assert (await busy.client.verify()).findings == ()
    (finding,) = (await busy.client.verify(deep=True)).findings
    assert "the checksum of page 0 is wrong" in finding.what
    assert finding_line(finding).startswith(
        f"the disk tier's files: {busy.file.relative_to(busy.disk)}: the checksum of page 0 is wrong. To do:"
    )


async def test_where_no_descriptor_is_left_files_are_not_blamed(busy: Busy, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise DiskFailedError("too many") from OSError(errno.EMFILE, "too many")

    monkeypatch.setattr("kvferry.pools.tiers.disk.open_block", none_left)
    verified = await busy.client.verify()
    assert (verified.findings, verified.checked["files"]) == ((), 3)


async def test_one_at_a_time(busy: Busy) -> None:
    busy.allocator.allocate(NOBODY, 1)  # what is wrong is looked at again a moment later
    async with await AsyncClient.connect(busy.path) as other:
        first = asyncio.create_task(busy.client.verify())
        await busy.client.ping()
        with pytest.raises(OverloadedError, match="another VERIFY is in progress"):
            await other.verify()
    assert len((await first).findings) == 1


@pytest.mark.full
def test_a_walk_through_a_million_pages_may_be_paused_often() -> None:
    allocator = PageAllocator(1_000_000)
    allocator.begin_read(1, allocator.allocate(1, 500_000), "pages")
    ids = allocator.pages_of(1)
    halves = [HeldPages(allocator, one, writing=False, holder="a SEND") for one in np.split(ids, 2)]
    steps = [*allocator.problems(), *allocator.holder_problems(halves), *allocator.owner_problems({1})]
    assert steps == [None] * len(steps)
    assert len(steps) > 1_000_000 // 200_000
    found = [*filter(None, allocator.holder_problems(halves[:1]))]
    assert (found[0].at[0], found[0].what) == (250_001, "page 250001 has 1 readers, its holders say 0")
    assert sum(one.total for one in found) == 250_000


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ({"free": False}, "a page is in none of the states free, owned, doomed"),
        ({"owner": 1}, "a page is in several of the states free, owned, doomed"),
        ({"readers": 1}, "a free page is read or written"),
        ({"free": False, "doomed": True}, "a doomed page is idle, but not free"),
        ({"free": False, "owner": 1, "readers": 1, "writing": True}, "a page is both read and written"),
        ({"free": False, "owner": 1, "readers": -1}, "a page has a negative number of readers"),
    ],
)
def test_a_page_in_a_wrong_state_is_found(damage: dict[str, int], what: str) -> None:
    allocator = DamagedAllocator(10)
    allocator.damage(5, **damage)
    assert Problem(what, (5,), 1) in list(allocator.problems())
    allocator.damage(0, **damage)
    padding = Problem("the padding page is in use, or free", (0,), 1)
    assert (padding in list(allocator.problems())) is (damage != {"free": False})


async def test_the_command(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["verify", "--runtime-dir", str(daemon.runtime_dir), "--json", "--deep"]
    status = await asyncio.to_thread(main, command)
    assert (status, msgspec.json.decode(capsys.readouterr().out)["findings"]) == (0, [])


def test_other_users_are_refused(daemon: Daemon) -> None:
    said = said_by_another_user(
        daemon,
        "with Client.connect(sys.argv[1]) as client:\n    try: client.verify()\n    except KvferryError as e: print(e)",
    )
    assert said.startswith("ACCESS_DENIED")


@pytest.mark.parametrize(
    ("memory", "content", "what"),
    [
        ("kvferry:index", b"a-name-of-its-own", "a session's record is not its own"),
        ("kvferry:record", b"the-pool", "the record of pool 'the-pool' cannot be read"),
    ],
)
def test_a_spoiled_record_for_the_next_daemon_is_found(memory: str, content: bytes, what: str) -> None:
    with kit.daemon(keep=True) as life, Client.connect(life.runtime_dir, name="a-name-of-its-own") as client:
        client.create_pool("the-pool", SPEC)
        assert not client.verify().findings
        with arena_of(life, memory) as mapped:
            mapped[mapped.find(content)] ^= 1
        (finding,) = client.verify().findings
        assert what in finding.what

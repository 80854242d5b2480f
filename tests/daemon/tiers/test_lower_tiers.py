"""What goes down to lower tiers and comes up: to a disk, and to a store that a test lets answer.

What is written, what comes back, memory, charges and races, and what a full or broken disk means.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import xxhash
from structlog.testing import capture_logs

from kvferry.daemon.tiers import disk_tier, host_tier, lower_tiers, remote_tier
from kvferry.daemon.tiers.disk_tier import PAUSE_S
from kvferry.daemon.tiers.host_tier import DEMOTION
from kvferry.daemon.tiers.lower_tiers import LowerTiers
from kvferry.daemon.tiers.tier_health import FEW, FORGOTTEN_S, LOG_INTERVAL_S, TierHealth
from kvferry.pools.host.memory import MACHINE, Limit
from kvferry.pools.tiers.block_file import DiskFailedError, DiskFullError
from kvferry.pools.tiers.cached_block import BlockState, CachedBlock
from kvferry.pools.tiers.disk import DiskStore, FoundBlock
from kvferry.protocol.errors import CacheMissError, DeadlineError
from kvferry.protocol.tier_messages import CacheEvict, CacheEvicted, Found, Lookup
from tests.kit.tiers import POOL, UNIT, Engine, Harness, harness, hashes, names, settle, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def tiers(folder: Path) -> AsyncIterator[Harness]:
    """Return services over a host tier of 8 blocks and a disk."""
    async with harness(8, disk=folder) as one:
        yield one


def files(folder: Path) -> list[Path]:
    return sorted(one for one in folder.rglob("*") if one.is_file() and len(one.name) >= 32)


async def written(tiers: Harness, *numbers: int) -> list[CachedBlock]:
    blocks = await tiers.stored(*numbers)
    await until(lambda: all(one.on_disk for one in blocks))
    return blocks


async def kept(folder: Path, *numbers: int) -> int:
    """Let a daemon keep blocks on disk, and end; return how many bytes they take."""
    async with harness(8, disk=folder) as first:
        await written(first, *numbers)
        return first.lower.status()[0].used_bytes


async def loaded(tiers: Harness, engine: Engine, lease: int, count: int) -> tuple[int, list[set[int]]]:
    """Load blocks into new pages; return the operation and what is in the pages."""
    ids = engine.allocate(count)
    engine.write(ids, 200)
    operation = engine.load(lease, ids)

    def over() -> Any:  # noqa: ANN401
        tiers.copier.finish_all()
        return engine.done(operation)

    await until(over)
    return operation, engine.read(ids)


async def test_the_next_daemon_finds_them(folder: Path) -> None:
    await kept(folder, 1, 2, 3)
    async with harness(8, disk=folder) as second:
        await until(lambda: len(second.host.index) == 3)
        engine = second.engine()
        operation, contents = await loaded(second, engine, engine.lookup(names(1, 2, 3)).lease, 3)
        assert engine.error(operation) is None
        assert contents == [{1}, {2}, {3}]


@pytest.fixture
def scan_goes_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold scans of folders before the first file until this is set."""
    goes_on, scan = threading.Event(), DiskStore.scan

    def held(store: DiskStore) -> Iterator[tuple[FoundBlock, ...]]:
        while not goes_on.is_set():
            yield ()
        yield from scan(store)

    monkeypatch.setattr(DiskStore, "scan", held)
    goes_on.set()
    return goes_on


async def test_a_lookup_finds_what_is_on_disk_before_the_scan_does(folder: Path, scan_goes_on: threading.Event) -> None:
    await kept(folder, 1, 2, 4, 5)
    scan_goes_on.clear()
    async with harness(8, disk=folder, scanned=False) as second:
        await second.stored(3)
        engine = second.engine()
        found = await engine.answer(Lookup(pool=POOL, hashes=hashes(1, 2, 3, 4, 6, 5)), Found)
        assert (found.blocks, found.host, found.disk) == (4, 1, 3)
        scan_goes_on.set()
        await until(lambda: len(second.host.index) == 5)
        assert (await loaded(second, engine, found.lease, 4))[1] == [{1}, {2}, {3}, {4}]


async def test_blocks_after_a_gap_are_found_on_disk_and_in_the_store_before_the_scan_does(
    folder: Path, scan_goes_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kept(folder, 2, 4)
    scan_goes_on.clear()
    async with harness(8, disk=folder, remote=True, scanned=False, adds_up=False) as second:
        await second.stored(7)

        async def exists(asked: Sequence[str]) -> list[bool]:
            return [one.endswith((names(1)[0].hex(), names(6)[0].hex())) for one in asked]

        monkeypatch.setattr(second.store, "exists", exists)
        await second.lower.find(second.namespace, names(1, 2, 3, 4, 5, 6), None, 192, gaps=True)
        assert [(one.hash, one.on_disk, one.in_remote) for one in second.blocks(1, 2, 3, 4, 5, 6)] == [
            (one, one in names(2, 4), one in names(1, 6)) for one in names(1, 2, 4, 6)
        ]
        assert [one.parent for one in second.blocks(6)] == names(5)
        scan_goes_on.set()


async def test_a_reset_drops_what_is_on_disk_and_not_known_yet(folder: Path, scan_goes_on: threading.Event) -> None:
    await kept(folder, 1, 2)
    scan_goes_on.clear()
    async with harness(8, disk=folder, scanned=False) as second:
        engine = second.engine()
        number = engine.send(CacheEvict(everything=True, pool=POOL))
        await settle()
        assert number not in engine.replies
        scan_goes_on.set()
        await until(lambda: number in engine.replies)
        assert engine.reply(number, CacheEvicted).blocks == 2
    assert not files(folder)


async def test_there_are_no_more_than_the_index_may_have_in_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kept(folder, 1, 2, 3)
    memory_bytes = 2 * disk_tier.INDEX_PART * disk_tier.BLOCK_MEMORY_BYTES
    monkeypatch.setattr(disk_tier, "smallest_limit", lambda: Limit(memory_bytes, memory_bytes, MACHINE))
    async with harness(8, disk=folder) as tiers:
        await until(lambda: len(files(folder)) == 2)
        await written(tiers, 4)
        await until(lambda: len(files(folder)) == 2)
        assert tiers.lower.status()[0].blocks == 2


async def test_who_has_most_on_disk_gives_first(folder: Path) -> None:
    """One alone has all of it; what another stores then takes the place of that one's files, up to half of them."""
    size = await kept(folder, 1)
    async with harness(32, disk=folder, disk_bytes=8 * size, policy="lru", tenants=(1, 2)) as tiers:
        await until(lambda: len(tiers.host.index) == 1)
        space = tiers.namespace

        async def store(tenant: int, *numbers: int) -> None:
            engine = tiers.engine(tenant)
            for number, name in zip(numbers, names(*numbers), strict=True):
                await engine.stored(number)
                await until(
                    lambda name=name: (one := tiers.host.index.get(space._replace(tenant=tenant), name)) and one.on_disk
                )
            tiers.lose(engine)

        await store(1, *range(2, 9))
        assert tiers.lower.on_disk() == {1: 8 * size}
        await store(2, *range(20, 30))
        its = {tenant: its // size for tenant, its in tiers.lower.on_disk().items()}
        assert its in ({1: 4, 2: 4}, {1: 3, 2: 5})


async def test_those_looked_up_last_stay_and_of_a_prompt_its_beginning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = await kept(folder, 1)
    async with harness(16, disk=folder, disk_bytes=2 * size, policy="lru") as tiers:
        await until(lambda: len(tiers.host.index) == 1)
        failures: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        engine = tiers.engine()
        await written(tiers, 2)
        with monkeypatch.context() as none:
            none.setattr(host_tier, "MAX_DEMOTIONS", 0)
            [third] = await tiers.stored(3)
        assert engine.lookup(names(3, 2, 1), pin=False).blocks == 3
        await settle()
        assert not third.on_disk  # where its lookup does not count, and is no error
        assert failures == []
        await written(tiers, 4)
        tiers.empty_memory()
        assert [one.hash for one in tiers.blocks(1, 2, 3, 4)] == names(2, 4)


async def test_what_somebody_waits_for_does_not_go(folder: Path) -> None:
    size = await kept(folder, 1)
    async with harness(8, disk=folder, disk_bytes=size) as tiers:
        await until(lambda: len(tiers.host.index) == 1)
        [block] = tiers.host.index.page(0, 10).blocks
        tiers.host.index.pin([block], 77)
        await tiers.stored(2)
        await until(lambda: tiers.counters.snapshot().get("tiers.disk.skipped_blocks"))
        assert block.on_disk
        tiers.host.index.unpin([block], 77)


@pytest.mark.parametrize("how", ["flipped", "truncated", "gone"])
async def test_a_file_that_is_not_right_is_a_miss_and_never_wrong_bytes(
    tiers: Harness, engine: Engine, folder: Path, how: str
) -> None:
    await written(tiers, 1, 2)
    tiers.empty_memory()
    [second] = [one for one in files(folder) if names(2)[0].hex() in one.name]
    content = bytearray(second.read_bytes())
    if how == "flipped":
        content[-1] ^= 1
        second.write_bytes(content)
    elif how == "truncated":
        second.write_bytes(content[:-10])
    else:
        second.unlink()
    operation, contents = await loaded(tiers, engine, engine.lookup(names(1, 2)).lease, 2)
    assert engine.error(operation) is CacheMissError
    assert contents == [{1}, {200}]
    counted = tiers.counters.snapshot()
    assert counted.get("tiers.disk.missing_blocks" if how == "gone" else "tiers.disk.damaged_blocks") == 1
    assert engine.lookup(names(1, 2), pin=False).blocks == 1
    assert tiers.lower.status()[0].blocks == 1


@pytest.mark.parametrize(
    ("error", "state"), [(DiskFullError("no space"), "full"), (DiskFailedError("broken"), "failing: broken")]
)
async def test_a_disk_that_is_full_or_fails_rests_and_says_so_once(
    tiers: Harness, monkeypatch: pytest.MonkeyPatch, error: Exception, state: str
) -> None:
    real = DiskStore.begin_write
    monkeypatch.setattr(DiskStore, "begin_write", Mock(side_effect=error))
    with capture_logs() as logs:
        await tiers.stored(1, 2)
        await until(lambda: tiers.counters.snapshot().get("tiers.disk.skipped_blocks"))
    assert [one["event"] for one in logs].count("a tier does not store blocks") == 1
    assert tiers.lower.status()[0].state.startswith(state)
    assert all(not one.pins for one in tiers.blocks(1, 2))
    monkeypatch.setattr(DiskStore, "begin_write", real)
    tiers.now_s += PAUSE_S + 1
    await written(tiers, 3)
    assert tiers.lower.status()[0].state == "ready"


async def test_what_the_disk_did_not_take_is_no_longer_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.daemon.tiers.disk_tier.SYNC_EVERY_S", 0.001)
    async with harness(8, disk=folder) as tiers:
        monkeypatch.setattr(os, "fdatasync", Mock(side_effect=OSError(errno.EIO, "broken")))
        [block] = await tiers.stored(1)
        await until(lambda: bool(tiers.counters.snapshot().get("tiers.disk.failed")))
        await until(lambda: not block.on_disk)
        assert files(folder) == []
        assert tiers.lower.status()[0].used_bytes == 0


async def test_a_block_that_goes_while_it_is_written_leaves_no_file(tiers: Harness, folder: Path) -> None:
    tiers.scheduler.transfer_began()  # nothing is written meanwhile
    [block] = await tiers.stored(1)
    await until(lambda: block.pins == {DEMOTION: 1})
    assert tiers.host.index.remove(block) == []
    tiers.lower.remove([block])
    tiers.scheduler.transfer_ended()
    await until(lambda: block.state is BlockState.GONE)
    await settle()
    await written(tiers, 2)  # after it, by the same thread
    assert [names(2)[0].hex() in one.name for one in files(folder)] == [True]
    [again] = await written(tiers, 1)
    assert again is not block
    assert len(files(folder)) == 2
    assert tiers.scheduler.bytes_in_flight == 0


async def test_a_block_that_is_stored_again_keeps_its_file(tiers: Harness, engine: Engine, folder: Path) -> None:
    for _ in range(3):
        blocks = await written(tiers, 1, 2)
        assert (await engine.evict()).blocks == 2
        assert tiers.host.arena.used_bytes == 0
        assert all(one.state is BlockState.GONE for one in blocks)
    await written(tiers, 1, 2)
    assert len(files(folder)) == 2


async def test_a_daemon_that_ends_does_not_wait_for_its_turn(folder: Path) -> None:
    async with harness(8, disk=folder) as tiers:
        tiers.scheduler.transfer_began()
        [block] = await tiers.stored(1)
        await until(lambda: block.pins == {DEMOTION: 1})
        assert tiers.scheduler.bytes_in_flight == 0
    assert not files(folder)


# -- what is said of a tier's failing writes, and how often


def test_failures_are_counted_and_not_logged_each() -> None:
    now_s = 1000.0
    failures, passing = TierHealth("disk", lambda: now_s), TierHealth("remote", lambda: now_s)
    with capture_logs() as logs:
        for _ in range(100):
            failures.failed("failing: EIO", "look")
        now_s += LOG_INTERVAL_S
        failures.failed("failing: EIO", "look")
        assert failures.state == "failing: EIO"
        for _ in range(100):
            failures.succeeded()
            assert failures.state == "ready"
            failures.failed("failing: EIO", "look")  # in turn
    assert [(one["log_level"], one["failed"]) for one in logs] == [("warning", 1), ("warning", 101), ("info", 101)]
    with capture_logs() as logs:
        passing.failed("full", "look", patience_s=10)
        passing.succeeded()
        passing.failed("full", "look", patience_s=10)
        assert logs == [], "it may pass by itself"
        now_s += 10
        passing.failed("full", "look", patience_s=10)
    assert [(one["log_level"], one["failed"]) for one in logs] == [("warning", 2)]


# -- a tier that stores, but takes far too long


def test_a_slow_tier_says_so_until_it_is_fast_again_or_was_long_ago() -> None:
    now_s = 1000.0
    health = TierHealth("disk", lambda: now_s)
    with capture_logs() as logs:
        for _ in range(FEW - 1):
            health.took("write", 0.4, 1 << 20)
        assert health.state == "ready", "that is too few to tell"
        for _ in range(3):
            health.took("write", 0.4, 1 << 20)
        assert health.state == "slow: the last 5 writes took 400 ms a block, 121 ms would do"
        assert (health.mean_us("write"), health.mean_us("read")) == (400_000, 0)
        health.failed("failing: EIO", "look")
        assert health.state == "failing: EIO", "what fails is worse than what is slow"
        health.succeeded()
        for _ in range(20):
            health.took("write", 0.001, 1 << 20)
        assert health.state == "ready"
        for _ in range(20):
            health.took("read", 0.4, 1 << 20)
        assert health.state.startswith("slow: the last 8 reads took 400 ms")
    of_speed = [one["event"] for one in logs if "failed" not in one]
    assert of_speed == ["a tier is slow", "a tier is as fast as it should be again", "a tier is slow"]
    now_s += FORGOTTEN_S + 1
    assert health.state == "ready"
    health.took("write", 0.9, 100 << 20)
    assert health.mean_us("write") == 900_000


def test_a_large_block_may_take_longer() -> None:
    health = TierHealth("disk", lambda: 0.0)
    for _ in range(20):
        health.took("write", 1.0, 64 << 20)
    assert health.state == "ready"


class SlowWriter:
    """A file's writer on a disk that needs 400 ms for each block, by the test's clock."""

    def __init__(self, writer: Any, tiers: Harness) -> None:  # noqa: ANN401  it has no name outside
        self._writer = writer
        self._tiers = tiers

    def __enter__(self) -> Any:  # noqa: ANN401
        self._tiers.now_s += 0.4
        return self._writer.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._writer.__exit__(*raised)


async def test_a_slow_disk_is_not_merely_ready(tiers: Harness, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = DiskStore.begin_write
    monkeypatch.setattr(DiskStore, "begin_write", lambda *given: SlowWriter(real(*given), tiers))
    for number in range(1, 5):
        await written(tiers, number)
    [disk] = tiers.lower.status()
    assert disk.state.startswith("slow: the last 4 writes took 400 ms a block")
    assert disk.write_us == 400_000
    assert tiers.counters.times()["tiers.disk.write"].values == 4
    assert engine.lookup(names(1)).blocks == 1, "it is used all the same"


def syncs(tiers: Harness) -> int:
    seen = tiers.counters.times().get("tiers.disk.sync")
    return seen.values if seen else 0


async def test_a_disk_that_is_slow_when_the_kernel_writes_is_found_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write goes to the kernel's memory, so that it is quick on any disk."""
    monkeypatch.setattr("kvferry.daemon.tiers.disk_tier.SYNC_EVERY_S", 0.001)
    async with harness(8, disk=folder) as tiers:

        def sync(_fd: int) -> None:
            tiers.now_s += 0.4

        monkeypatch.setattr(os, "fdatasync", sync)
        for number in range(1, FEW + 1):
            await written(tiers, number)
            await until(lambda: syncs(tiers) >= number)  # noqa: B023
        [disk] = tiers.lower.status()
    assert disk.state.startswith(f"slow: the last {FEW} syncs took 400 ms a block")
    assert disk.write_us == 0, "by the test's clock"


# -- a store


@pytest.fixture
async def far() -> AsyncIterator[Harness]:
    """Return services over a host tier of 8 blocks, a pool of 15 pages, and a store that answers at once."""
    async with harness(8, remote=True) as one:
        yield one
        await one.let_store_answer()


async def away(far: Harness, *numbers: int) -> list[CachedBlock]:
    """Store blocks, and have them in the store alone."""
    blocks = await far.stored(*numbers)
    await until(lambda: all(one.in_remote for one in blocks))
    far.empty_memory()
    assert far.host.arena.used_bytes == 0
    return blocks


def charged(far: Harness) -> int:
    return sum(one.charged_bytes for _, one in far.host.index.accounts.items())


@pytest.mark.parametrize("checksums", [True, False])
async def test_what_goes_to_the_store_has_digests_also_where_host_memory_has_none(*, checksums: bool) -> None:
    """Whoever fetches it, another node perhaps, compares them."""
    async with harness(8, remote=True, checksums=checksums) as far:
        [block] = await far.stored(1)
        assert bool(block.digests) is checksums
        await until(lambda: block.in_remote)
        [value] = far.store.values.values()
        assert value.header.digests == tuple(xxhash.xxh3_64_intdigest(page) for page in value.pages)
        assert far.counters.snapshot()["tiers.remote.written_blocks"] == 1


async def test_a_block_comes_up_once_however_many_ask(far: Harness) -> None:
    [block] = await away(far, 1)
    far.store.holds = True
    first, second = far.lower.promote(block), far.lower.promote(block)
    assert first is not None
    assert first is second
    await settle()
    assert charged(far) == UNIT
    assert len(far.store.waiting) == 1
    far.store.let_go()
    assert await first
    assert charged(far) == 0
    assert far.lower.promote(block) is None
    assert far.host.arena.used_bytes == UNIT


@pytest.mark.parametrize("how", ["gone", "damaged", "removed", "raises"])
async def test_a_block_that_cannot_come_up_leaves_no_byte(
    far: Harness, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [block] = await away(far, 1)
    far.store.holds = True
    [name] = far.store.values
    coming = far.lower.promote(block)
    assert coming is not None
    await settle()
    if how == "gone":
        del far.store.values[name]
    elif how == "damaged":
        far.store.values[name].pages[0] = bytes(len(far.store.values[name].pages[0]))
    elif how == "removed":
        assert far.host.index.remove(block) == []
    else:
        monkeypatch.setattr(xxhash, "xxh3_64_intdigest", Mock(side_effect=RuntimeError))
    with capture_logs():
        far.store.holds = False
        far.store.let_go()
        if how == "raises":
            with pytest.raises(RuntimeError):
                await coming
        else:
            assert not await coming
    assert far.host.arena.used_bytes == charged(far) == 0
    if how != "raises":
        assert block.state is BlockState.GONE


async def test_so_many_have_memory_at_a_time(far: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = await away(far, 1, 2, 3, 4)
    monkeypatch.setattr(lower_tiers, "MAX_PROMOTIONS", 2)
    far.store.holds = True
    lower = LowerTiers(far.host, None, far.remote, far.counters)
    coming = [lower.promote(one) for one in blocks]
    await settle()
    assert far.host.arena.used_bytes == 2 * UNIT
    far.host.index.remove(blocks[2])  # it waits for its turn
    await far.let_store_answer()
    assert [await one for one in coming if one is not None] == [True, True, False, True]
    assert far.host.arena.used_bytes == 3 * UNIT


async def test_a_full_host_tier_lets_nothing_come_up(far: Harness) -> None:
    [block] = await away(far, 1)
    engine = far.engine()
    engine.offload(engine.allocate(7))  # the user's share of 8 blocks
    coming = far.lower.promote(block)
    assert coming is not None
    assert not await coming
    assert far.counters.snapshot()["tiers.host.promotions_refused"] == 1
    assert block.state is BlockState.READY
    far.copier.finish_all()


async def test_a_block_that_is_evicted_while_it_goes_down_is_nowhere_at_last(far: Harness) -> None:
    far.store.holds = True
    [block] = await far.stored(1)
    assert far.host.index.remove(block) == []
    far.lower.remove([block])
    assert block.in_host  # for the one that reads it
    far.store.let_go()
    far.store.holds = False
    await until(lambda: block.state is BlockState.GONE)
    await until(lambda: not far.store.values)
    assert far.host.arena.used_bytes == 0


async def test_evicted_blocks_leave_the_store_together(far: Harness) -> None:
    blocks = await far.stored(1, 2)
    await until(lambda: all(one.in_remote for one in blocks))
    far.store.holds = True
    far.host.free_all([freed for one in blocks for freed in far.host.index.remove(one)])
    far.lower.remove(blocks)
    await settle()
    assert len(far.store.waiting) == 1
    far.store.let_go()
    await settle()
    assert far.store.values == {}
    far.lower.remove([])


async def test_what_the_store_had_once_is_forgotten_some_time(far: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_tier, "MAX_KNOWN", 3)
    first = await away(far, 1, 2, 3)
    far.host.index.pin(first[:1], 5)
    await away(far, 4, 5)
    assert [one.hash for one in far.blocks(1, 2, 3, 4, 5)] == names(1, 3, 4, 5)  # 1 is pinned: the next one went
    found = await far.lower.find(far.namespace, names(2), None, 192)
    assert [one.hash for one in found] == names(2)  # the store has it still
    far.host.index.unpin(first[:1], 5)


async def test_a_bug_with_one_block_is_not_the_end_of_the_tier(far: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    real = far.store.put

    monkeypatch.setattr(far.store, "put", Mock(side_effect=RuntimeError))
    with capture_logs() as logs:
        await far.stored(1)
        await until(lambda: bool(logs))
    monkeypatch.setattr(far.store, "put", real)
    [second] = await far.stored(2)
    await until(lambda: second.in_remote)
    assert not far.blocks(1)[0].pins
    assert far.scheduler.bytes_in_flight == 0


async def test_a_lookup_that_is_late_is_answered_so_and_pins_nothing(far: Harness) -> None:
    engine = far.engine()
    await far.stored(1)
    far.store.holds = True
    number = engine.send(Lookup(pool=POOL, hashes=hashes(1, 2)), deadline_ms=5)
    await until(lambda: number in engine.replies)
    with pytest.raises(DeadlineError):
        engine.reply(number, Found)
    await far.let_store_answer()
    await until(lambda: not far.host.index.pinned_by())

"""The disk tier: what is written, what comes back, and what a full or broken disk means."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvferry.daemon.tiers import disk_tier, host_tier
from kvferry.daemon.tiers.disk_tier import PAUSE_S
from kvferry.daemon.tiers.host_tier import DEMOTION
from kvferry.daemon.tiers.write_failures import LOG_INTERVAL_S, WriteFailures
from kvferry.pools.host.memory import MACHINE, Limit
from kvferry.pools.tiers.block_file import DiskFailedError, DiskFullError
from kvferry.pools.tiers.cached_block import BlockState, CachedBlock
from kvferry.pools.tiers.disk import DiskStore, FoundBlock
from kvferry.protocol.errors import CacheMissError
from kvferry.protocol.tier_messages import CacheEvict, CacheEvicted, Found, Lookup
from tests.kit.tiers import POOL, Engine, Harness, harness, names, settle, until

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


async def loaded(tiers: Harness, engine: Engine, *numbers: int) -> tuple[int, list[set[int]]]:
    """Load blocks into new pages; return the operation and what is in the pages."""
    ids = engine.allocate(len(numbers))
    engine.write(ids, 200)
    operation = engine.load(engine.lookup(names(*numbers)).lease, ids)

    def over() -> Any:  # noqa: ANN401
        tiers.copier.finish_all()
        return engine.done(operation)

    await until(over)
    return operation, engine.read(ids)


async def test_the_next_daemon_finds_them(folder: Path) -> None:
    async with harness(8, disk=folder) as first:
        await written(first, 1, 2, 3)
    async with harness(8, disk=folder) as second:
        await until(lambda: len(second.host.index) == 3)
        engine = second.engine()
        operation, contents = await loaded(second, engine, 1, 2, 3)
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
    return goes_on


async def test_a_lookup_finds_what_is_on_disk_before_the_scan_does(folder: Path, scan_goes_on: threading.Event) -> None:
    scan_goes_on.set()
    async with harness(8, disk=folder) as first:
        await written(first, 1, 2, 4, 5)
    scan_goes_on.clear()
    async with harness(8, disk=folder, scanned=False) as second:
        await second.stored(3)
        engine = second.engine()
        found = await engine.answer(Lookup(pool=POOL, hashes=b"".join(names(1, 2, 3, 4, 6, 5))), Found)
        assert (found.blocks, found.host, found.disk) == (4, 1, 3)
        scan_goes_on.set()
        await until(lambda: len(second.host.index) == 5)
        ids = engine.allocate(4)
        operation = engine.load(found.lease, ids)

        def is_loaded() -> bool:
            second.copier.finish_all()
            return engine.done(operation) is not None

        await until(is_loaded)
        assert engine.read(ids) == [{1}, {2}, {3}, {4}]


async def test_a_reset_drops_what_is_on_disk_and_not_known_yet(folder: Path, scan_goes_on: threading.Event) -> None:
    scan_goes_on.set()
    async with harness(8, disk=folder) as first:
        await written(first, 1, 2)
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
    async with harness(8, disk=folder) as first:
        await written(first, 1, 2, 3)
    memory_bytes = 2 * disk_tier.INDEX_PART * disk_tier.BLOCK_MEMORY_BYTES
    monkeypatch.setattr(disk_tier, "smallest_limit", lambda: Limit(memory_bytes, memory_bytes, MACHINE))
    async with harness(8, disk=folder) as tiers:
        await until(lambda: len(files(folder)) == 2)
        await written(tiers, 4)
        await until(lambda: len(files(folder)) == 2)
        assert tiers.lower.status()[0].blocks == 2


async def test_those_looked_up_last_stay_and_of_a_prompt_its_beginning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with harness(8, disk=folder) as first:
        await written(first, 1)
        size = first.lower.status()[0].used_bytes
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
    async with harness(8, disk=folder) as first:
        await written(first, 1)
        size = first.lower.status()[0].used_bytes
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
    operation, contents = await loaded(tiers, engine, 1, 2)
    assert engine.error(operation) is CacheMissError
    assert contents == [{1}, {200}]
    counted = tiers.counters.snapshot()
    assert counted.get("tiers.disk.missing_blocks" if how == "gone" else "tiers.disk.damaged_blocks") == 1
    assert engine.lookup(names(1, 2), pin=False).blocks == 1
    assert tiers.lower.status()[0].blocks == 1


@pytest.mark.parametrize(
    ("make", "state"),
    [(lambda: DiskFullError("no space"), "full"), (lambda: DiskFailedError("broken"), "failing: broken")],
)
async def test_a_disk_that_is_full_or_fails_rests_and_says_so_once(
    tiers: Harness, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Exception], state: str
) -> None:
    real = DiskStore.begin_write

    def fails(*_: object) -> Any:  # noqa: ANN401
        raise make()

    monkeypatch.setattr(DiskStore, "begin_write", fails)
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
        monkeypatch.setattr(os, "fdatasync", _fails)
        [block] = await tiers.stored(1)
        await until(lambda: bool(tiers.counters.snapshot().get("tiers.disk.failed")))
        await until(lambda: not block.on_disk)
        assert files(folder) == []
        assert tiers.lower.status()[0].used_bytes == 0


def _fails(*_: object) -> None:
    raise OSError(errno.EIO, "broken")


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
        assert (await engine.answer(CacheEvict(everything=True), CacheEvicted)).blocks == 2
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


class Clock:
    """A clock that a test sets."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def said(logs: list[MutableMapping[str, Any]]) -> list[tuple[str, int]]:
    return [(line["log_level"], line["failed"]) for line in logs]


def test_the_first_failure_is_logged_and_further_ones_are_counted() -> None:
    clock = Clock()
    failures = WriteFailures("disk", clock)
    with capture_logs() as logs:
        for _ in range(100):
            failures.failed("failing: EIO", "look")
        clock.now_s += LOG_INTERVAL_S
        failures.failed("failing: EIO", "look")
        assert failures.state == "failing: EIO"
        failures.succeeded()
    assert failures.state == ""
    assert said(logs) == [("warning", 1), ("warning", 101), ("info", 101)]


def test_writes_that_fail_and_succeed_in_turn_are_not_logged_each() -> None:
    failures = WriteFailures("disk", Clock())
    with capture_logs() as logs:
        for _ in range(100):
            failures.failed("failing: EIO", "look")
            failures.succeeded()
    assert said(logs) == [("warning", 1), ("info", 1)]


def test_what_passes_by_itself_is_logged_once_it_lasts() -> None:
    clock = Clock()
    failures = WriteFailures("remote", clock)
    with capture_logs() as logs:
        failures.failed("full", "look", patience_s=10)
        failures.succeeded()
        assert logs == []
        failures.failed("full", "look", patience_s=10)
        clock.now_s += 10
        failures.failed("full", "look", patience_s=10)
    assert said(logs) == [("warning", 2)]

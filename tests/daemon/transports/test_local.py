"""The local transport with real threads: every transfer op is reported exactly once, and no byte moves after that."""

from __future__ import annotations

import asyncio
import ctypes
import re
import select
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvferry.daemon.transfer.endpoints import Incarnation, RemotePool
from kvferry.daemon.transfer.registry import StartOp
from kvferry.daemon.transports import local
from kvferry.daemon.transports.local import PART_BLOCKS, LocalTransport, LoopBudget, best_copy
from kvferry.pools import copy_kernel
from kvferry.pools import native_kernel as native
from kvferry.pools.copy_kernel import Copies, CopyThreads, Hashing
from kvferry.pools.devices.accelerator_region import AcceleratorRegion
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.copies import CopyBlocks, copy_one_by_one
from kvferry.pools.planning.pairing import pair_entries
from kvferry.pools.planning.plan import Blocks, make_plan
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import CancelledError, InternalError, KvferryError, TransferFailedError
from kvferry.protocol.ids import HOST
from kvferry.protocol.manifests import Entry, MhaSpec
from tests.kit.bytes import read_region, write_region
from tests.kit.devices import DEVICE
from tests.kit.transfers import PAGE_BYTES, TransferHarness

WAIT_S = 30.0
ONE_CHUNK = 1 << 20
ONE_BLOCK = PAGE_BYTES


class GatedCopy:
    """Copies, but each call waits at a gate; tells the loop how many have come to it."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = asyncio.Event()
        self.calls = 0
        self.error: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()

    def __call__(self, blocks: Blocks) -> None:
        with self._lock:
            self.calls += 1
        self._loop.call_soon_threadsafe(self.entered.set)
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        copy_one_by_one(blocks)


class Site:
    """Two pools, a transport between them, and what it reports."""

    def __init__(self, copy: CopyBlocks, *, threads: int = 2, chunk_bytes: int = ONE_BLOCK, **more: Any) -> None:  # noqa: ANN401  what ``LocalTransport`` takes
        self.harness = TransferHarness()
        self.source, self.destination = (self.harness.pool(name, pages=65) for name in ("source", "destination"))
        self.reports: list[tuple[int, KvferryError | None]] = []
        self.threads: set[int] = set()
        self._news = asyncio.Event()
        more = {"at_once_s": 0, "threads": threads, "chunk_bytes": chunk_bytes, "copy": copy, **more}
        self.transport = LocalTransport(asyncio.get_running_loop(), **more)

    def op(self, number: int, first: int, count: int) -> StartOp:
        ids = np.arange(first, first + count)
        self.harness.fill(self.source, ids)
        plan = make_plan(pair_entries(self.source.manifest.entries, self.destination.manifest.entries), ids, ids[::-1])
        return StartOp(number, self.source, self.destination, (plan,))

    def populate(self) -> None:
        for pool in (self.source, self.destination):
            assert isinstance(pool.region, HostRegion)
            pool.region.populate(lambda _: True)

    def start(self, op: StartOp) -> None:
        self.transport.start(op, self._done)

    def arrived(self, first: int, count: int) -> bool:
        ids = np.arange(first, first + count)
        return self.harness.content(self.source, ids) == self.harness.content(self.destination, ids[::-1])

    async def reported(self, count: int) -> list[tuple[int, KvferryError | None]]:
        async with asyncio.timeout(WAIT_S):
            while len(self.reports) < count:
                self._news.clear()
                await self._news.wait()
        return self.reports

    def _done(self, op_id: int, error: KvferryError | None) -> None:
        self.threads.add(threading.get_ident())
        self.reports.append((op_id, error))
        self._news.set()


async def let_scheduled_callbacks_run() -> None:
    await asyncio.get_running_loop().run_in_executor(None, lambda: None)


@asynccontextmanager
async def closing(site: Site, copy: GatedCopy | None = None) -> AsyncIterator[Site]:
    try:
        yield site
    finally:
        if copy is not None:
            copy.gate.set()
        await asyncio.get_running_loop().run_in_executor(None, site.transport.close)


pytestmark = pytest.mark.anyio
ONE_TOKEN_BYTES = 16
MOST_EXPANDED_BYTES = 12 * 24 * PART_BLOCKS
"""Of a part under way and the arrays that it is made from."""


async def test_scattered_pages_of_one_token_are_never_expanded_all_at_once() -> None:
    count = 1 << 17
    manifest = manifest_of(MhaSpec(layers=4, tokens=count, page_size=1, kv_heads=1, head_dim=8, dtype="float16"))
    source, destination = (HostRegion.create(name, manifest.region_bytes) for name in ("source", "destination"))
    source.view()[:] = np.random.default_rng(1).integers(0, 256, manifest.region_bytes, np.uint8)
    ids = np.arange(1, count + 1)
    plan = make_plan(pair_entries(manifest.entries, manifest.entries), ids, ids[::-1])
    pools = [Pool(0, name, manifest, region) for name, region in (("source", source), ("destination", destination))]
    done = asyncio.Event()
    transport = LocalTransport(asyncio.get_running_loop(), threads=2, copy=best_copy())
    tracemalloc.start()
    try:
        transport.start(StartOp(1, pools[0], pools[1], (plan,)), lambda _op_id, _error: done.set())
        await asyncio.wait_for(done.wait(), WAIT_S)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        await asyncio.get_running_loop().run_in_executor(None, transport.close)
    assert peak_bytes < MOST_EXPANDED_BYTES
    for entry in manifest.entries:
        assert entry.page_bytes == ONE_TOKEN_BYTES
        sent, arrived = (
            region.view()[entry.base :][: (count + 1) * ONE_TOKEN_BYTES].reshape(-1, ONE_TOKEN_BYTES)
            for region in (source, destination)
        )
        assert np.array_equal(arrived[1:], sent[:0:-1])


@pytest.mark.any_device
@pytest.mark.parametrize(("threads", "chunk_bytes"), [(1, ONE_CHUNK), (2, 5 * PAGE_BYTES), (4, 1)])
async def test_all_ops_arrive_and_are_reported_once(chunk_bytes: int, threads: int) -> None:
    async with closing(Site(best_copy(), threads=threads, chunk_bytes=chunk_bytes)) as site:
        site.transport.stop(7)  # it is not under way
        for number in range(16):
            site.start(site.op(number, 1 + 4 * number, 4))
        reports = await site.reported(16)
        site.transport.stop(7)
        await let_scheduled_callbacks_run()
        assert sorted(reports) == [(number, None) for number in range(16)]
        assert all(site.arrived(1 + 4 * number, 4) for number in range(16))
        assert site.threads == {threading.get_ident()}, "reports come on the loop"
        assert "ops=0" in repr(site.transport)


def heads_of(first: int, count: int, *, tokens: int = 4) -> list[Entry]:
    return [
        Entry(
            component="main", role=role, layer=0, base=0, pages=1, page_bytes=tokens * held * head_bytes,
            page_tokens=tokens, head_start=start, heads=held, total_heads=total,
        )
        for role, start, held, total, head_bytes in (
            ("k", first, count, 8, 6),
            ("index_k", 0, 1, 1, 16),
            ("v", first, count, 8, 24),
        )
    ]  # fmt: skip


def by_head(pool: Pool, role: str, ids: np.typing.NDArray[np.int64]) -> np.typing.NDArray[np.uint8]:
    (entry,) = (one for one in pool.manifest.entries if one.role == role)
    memory = read_region(pool.region)[entry.base : entry.base + entry.pages * entry.page_bytes]
    return memory.reshape(entry.pages, entry.page_tokens or 0, entry.heads or 0, -1)[ids]


@pytest.mark.any_device
@pytest.mark.parametrize(
    ("chunk_bytes", "threads", "with_copy_threads"), [(1, 3, False), (500, 1, False), (500, 2, True)]
)
@pytest.mark.parametrize(("ours", "theirs"), [((0, 8), (2, 2)), ((2, 4), (0, 4)), ((6, 2), (0, 8))])
async def test_slices_and_whole_pages_of_one_op_arrive(
    monkeypatch: pytest.MonkeyPatch,
    chunk_bytes: int,
    threads: int,
    ours: tuple[int, int],
    theirs: tuple[int, int],
    *,
    with_copy_threads: bool,
) -> None:
    if chunk_bytes == 1:
        monkeypatch.setattr(local, "STAGING_BYTES", 8)  # smaller than a page
    copy_threads = copy_kernel.new_copy_threads(threads, b"") if with_copy_threads else None
    async with closing(Site(best_copy(), threads=threads, chunk_bytes=chunk_bytes, copy_threads=copy_threads)) as site:
        rng = np.random.default_rng(chunk_bytes)
        source = site.harness.pool("sliced source", heads_of(*ours), pages=33)
        destination = site.harness.pool("sliced destination", heads_of(*theirs), pages=33)
        for pool in (source, destination):
            write_region(pool.region, rng.integers(0, 256, pool.manifest.region_bytes, np.uint8))
        expected = {role: by_head(destination, role, np.arange(33)) for role in ("k", "v", "index_k")}
        sent, received = (rng.permutation(np.arange(1, 33))[:20] for _ in range(2))
        for role, content in expected.items():
            (first, count), (own_first, own_count) = ((0, 1), (0, 1)) if role == "index_k" else (theirs, ours)
            common = range(max(first, own_first), min(first + count, own_first + own_count))
            for head in common:
                content[received, :, head - first] = by_head(source, role, sent)[:, :, head - own_first]
        plan = make_plan(pair_entries(source.manifest.entries, destination.manifest.entries), sent, received)
        assert plan.sliced.sum() == 2
        plans = (
            (plan.of(~plan.sliced), plan) if with_copy_threads else (plan,)
        )  # of whole pages alone, and some of both
        site.start(StartOp(1, source, destination, plans))
        assert await site.reported(1) == [(1, None)]
        for role, content in expected.items():
            assert (by_head(destination, role, np.arange(33)) == content).all()


async def test_a_stopped_op_ends_early_and_is_reported_once() -> None:
    copy = GatedCopy()
    async with closing(Site(copy, threads=2), copy) as site:
        site.start(site.op(1, 1, 60))
        await copy.entered.wait()
        site.transport.stop(1)
        site.transport.stop(1)
        copy.gate.set()
        ((number, error),) = await site.reported(1)
        assert number == 1
        assert error is not None
        assert error.code == "CANCELLED"
        site.transport.stop(1)
        site.start(site.op(2, 1, 1))
        assert (await site.reported(2))[1] == (2, None)
        assert copy.calls <= 2 + 4, "two chunks under way, and the four of the second transfer op"


@pytest.mark.parametrize("cause", [TransferFailedError("Bad address"), MemoryError()])
async def test_a_copy_that_fails_is_reported_once(cause: Exception) -> None:
    copy = GatedCopy()
    copy.error = cause
    with capture_logs() as logs:
        async with closing(Site(copy, threads=3), copy) as site:
            site.start(site.op(1, 1, 20))
            await copy.entered.wait()
            copy.gate.set()
            ((_, error),) = await site.reported(1)
            copy.error = None
            site.start(site.op(2, 30, 20))
            assert (await site.reported(2))[1] == (2, None)
            await let_scheduled_callbacks_run()
    assert len(site.reports) == 2
    assert error is not None
    assert error.code == ("TRANSFER_FAILED" if isinstance(cause, KvferryError) else "INTERNAL")
    assert bool(logs) == (not isinstance(cause, KvferryError)), "a bug is logged"


class Turns:
    """A loop whose turns the test begins."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._due.append(callback)

    def next(self) -> None:
        due, self._due = self._due, []
        for callback in due:
            callback()


def test_the_loop_copies_no_longer_in_a_turn_than_it_may() -> None:
    turns, now = Turns(), [0.0]
    budget = LoopBudget(cast("asyncio.AbstractEventLoop", turns), 50e-6, lambda: now[0])

    def takes(elapsed_s: float) -> Callable[[], None]:
        return lambda: now.__setitem__(0, now[0] + elapsed_s)

    assert budget.allows(1, 16 << 10)
    assert not budget.allows(1, 4 << 20)
    assert not budget.allows(4096, 4096), "each block has its own price"
    budget.spend(takes(40e-6))
    assert budget.allows(1, 16 << 10)
    budget.spend(takes(30e-6))
    assert not budget.allows(1, 1)
    turns.next()
    assert budget.allows(1, 16 << 10)
    assert not LoopBudget(cast("asyncio.AbstractEventLoop", turns), 0).allows(1, 1)


@pytest.mark.parametrize("fails", [False, True])
async def test_what_is_small_has_arrived_or_failed_when_start_returns(*, fails: bool) -> None:
    def copy(blocks: Blocks) -> None:
        if fails:
            raise TransferFailedError("nothing is mapped there")
        copy_one_by_one(blocks)

    async with closing(Site(copy, chunk_bytes=ONE_CHUNK, at_once_s=WAIT_S)) as site:
        site.populate()
        site.start(site.op(1, 1, 4))
        [(number, error)] = site.reports
        assert (number, type(error)) == (1, TransferFailedError if fails else type(None))
        assert site.arrived(1, 4) == (not fails)


@pytest.mark.parametrize("why", ["checksums", "not populated", "another daemon's", "several plans", "no time"])
async def test_all_else_is_left_to_the_threads(why: str) -> None:
    async with closing(Site(best_copy(), chunk_bytes=ONE_CHUNK, at_once_s=0 if why == "no time" else 50e-6)) as site:
        if why != "not populated":
            site.populate()
        op = site.op(1, 1, 1)
        if why == "several plans":
            op = op._replace(plans=op.plans * 2)
        elif why == "checksums":
            op = op._replace(checksums=True)
        elif why == "another daemon's":
            far = RemotePool(7, "far", site.source.manifest, Incarnation("ipc:///there", "0" * 32), 1)
            far.mapping = cast("HostRegion", site.source.region)
            op = op._replace(source=far)
        site.start(op)
        assert site.reports == []
        assert await site.reported(1) == [(1, None)]


class GivenCopyThreads(CopyThreads):
    """Copy threads, whose copies stand still while their gate is shut, and how many rows they were given."""

    def __init__(self, threads: int = 1) -> None:
        super().__init__(native, native.new_copy_threads(threads, b""))
        self.given: list[int] = []
        self.gate = copy_kernel.Gate()

    def submit(self, copies: Copies, threads: int, token: object, hashed: Hashing | None = None) -> None:
        self.given.append(len(copies))
        with self.gate.giving_way(WAIT_S):
            super().submit(copies, threads, token, hashed)

    async def stands(self) -> None:
        def wait() -> None:
            ends_s = time.monotonic() + WAIT_S
            while not self.gate.standing:
                assert time.monotonic() < ends_s

        await asyncio.to_thread(wait)


@asynccontextmanager
async def with_copy_threads(copy_threads: GivenCopyThreads) -> AsyncIterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "SHORT_ROW_BYTES", 0)
        async with closing(Site(best_copy(), chunk_bytes=ONE_CHUNK, copy_threads=copy_threads)) as site:
            try:
                yield site
            finally:
                copy_threads.gate.open()


async def test_what_copy_threads_have_copied_is_reported_in_one_turn_whoever_does_not_hear_of_it() -> None:
    loop, said, over, failed = asyncio.get_running_loop(), list[int | str](), asyncio.Event(), list[str]()
    loop.set_exception_handler(lambda _, context: failed.append(context["message"]))

    def all_reported() -> None:
        said.append("that was all")

    def done(op_id: int, error: KvferryError | None) -> None:
        assert error is None
        said.append(op_id)
        loop.call_soon(next_turn)
        raise OSError

    def next_turn() -> None:
        said.append("next turn")
        if said.count("next turn") == 4:
            over.set()

    async with with_copy_threads(GivenCopyThreads()) as site:
        for number in range(4):
            site.transport.start(site.op(number, 1 + 8 * number, 8), done, all_reported)
        await asyncio.wait_for(over.wait(), WAIT_S)
    turns = "".join(str(one)[0] for one in said)  # like 01tnn2tn3tn
    assert re.fullmatch(r"([0-3]+tn+)+", turns), said
    assert failed == ["the end of a copy was not heard"] * 4


async def test_copy_threads_have_no_more_than_two_lists_of_an_op_and_so_many_rows_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "LIST_ROWS", 4)
    monkeypatch.setattr(local, "GIVEN_ROWS", 12)
    copy_threads = GivenCopyThreads()
    async with with_copy_threads(copy_threads) as site:
        copy_threads.gate.shut()
        site.start(site.op(0, 1, 40))
        assert copy_threads.given == [4, 4]
        for number in range(1, 4):
            site.start(site.op(number, 33 + 8 * number, 4))
        assert copy_threads.given == [4, 4, 4], "three times four rows are all that it may have"
        copy_threads.gate.open()
        reports = await site.reported(4)
        assert sorted(reports) == [(number, None) for number in range(4)]
        assert reports[-1][0] == 0, "ops take turns"
        assert {*copy_threads.given} == {4}
        assert sum(copy_threads.given) == (40 + 3 * 4) * len(site.source.manifest.entries)
        assert site.arrived(1, 40)
        assert all(site.arrived(33 + 8 * number, 4) for number in range(1, 4))


async def test_an_op_that_the_copy_threads_have_not_begun_is_stopped_at_once() -> None:
    copy_threads = GivenCopyThreads()
    async with with_copy_threads(copy_threads) as site:
        copy_threads.gate.shut()
        for number in range(3):
            site.start(site.op(number, 1 + 8 * number, 8))
        await copy_threads.stands()
        site.transport.stop(1)
        site.transport.stop(1)
        [(number, error)] = await site.reported(1)
        assert (number, type(error)) == (1, CancelledError)
        assert not site.arrived(9, 8)
        site.transport.stop(0)
        await let_scheduled_callbacks_run()
        assert len(site.reports) == 1, "a thread is at it"
        copy_threads.gate.open()
        reports = dict(await site.reported(3))
        assert (type(reports[0]), reports[2]) == (CancelledError, None)
        assert len(site.reports) == 3


@pytest.mark.parametrize("waits", ["for its next list", "for its first list"])
async def test_an_op_is_stopped_while_it_waits(monkeypatch: pytest.MonkeyPatch, waits: str) -> None:
    monkeypatch.setattr(local, "LIST_ROWS", 4)
    monkeypatch.setattr(local, "GIVEN_ROWS", 4 if waits == "for its first list" else 8)
    copy_threads = GivenCopyThreads()
    async with with_copy_threads(copy_threads) as site:
        copy_threads.gate.shut()
        site.start(site.op(0, 1, 2 if waits == "for its first list" else 16))
        site.start(site.op(1, 33, 16))
        await copy_threads.stands()
        site.transport.stop(1)
        [(number, error)] = await site.reported(1)
        assert (number, type(error)) == (1, CancelledError)
        site.transport.stop(0)
        copy_threads.gate.open()
        assert len(await site.reported(2)) == 2
        given = len(copy_threads.given)
        site.start(site.op(2, 1, 16))
        assert (await site.reported(3))[2] == (2, None)
        assert sum(copy_threads.given[given:]) == 16 * len(site.source.manifest.entries), "nothing is left of the two"
        assert site.arrived(1, 16)
        assert not site.arrived(33, 16)


@pytest.mark.parametrize("failing", [1, 3])
async def test_what_the_copy_threads_cannot_be_given_fails_and_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    monkeypatch.setattr(local, "LIST_ROWS", 4)
    copy_threads, split_blocks = GivenCopyThreads(), local.split_blocks  # type: ignore[attr-defined]

    def fail(blocks: Blocks, max_bytes: int) -> Blocks:
        nonlocal failing
        failing -= 1
        if not failing:
            raise MemoryError
        return split_blocks(blocks, max_bytes)

    async with with_copy_threads(copy_threads) as site:
        monkeypatch.setattr(local, "split_blocks", fail)
        monkeypatch.setattr(local, "GIVEN_ROWS", 8)
        with capture_logs() as logs:
            site.start(site.op(1, 1, 8))
            [(number, error)] = await site.reported(1)
        assert (number, type(error), len(logs)) == (1, InternalError, 1)
        assert "ops=0" in repr(site.transport)
        for number in range(2, 5):
            site.start(site.op(number, 1, 8))
        assert (await site.reported(4))[1:] == [(number, None) for number in range(2, 5)]
        assert site.arrived(1, 8)


async def closed_while_a_copy_stands(site: Site, gate: Callable[[], None]) -> None:
    """Close the transport: it must wait until the gate lets the copies end, and report nothing."""
    closed = asyncio.get_running_loop().run_in_executor(None, site.transport.close)
    done, _ = await asyncio.wait({closed}, timeout=0.05)
    assert not done, "a copy is under way"
    gate()
    await closed
    await let_scheduled_callbacks_run()
    assert site.reports == []


async def test_close_waits_for_what_threads_are_at_and_nothing_more_is_copied_or_reported() -> None:
    copy = GatedCopy()
    site = Site(copy, threads=2, chunk_bytes=ONE_CHUNK)
    for number in range(4):
        site.start(site.op(number, 1 + number, 1))
    await copy.entered.wait()
    await closed_while_a_copy_stands(site, copy.gate.set)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("copy-")]
    assert copy.calls <= 2


async def test_close_waits_for_what_copy_threads_are_at_and_nothing_more_is_copied_or_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "LIST_ROWS", 4)
    monkeypatch.setattr(local, "SHORT_ROW_BYTES", 0)
    copy_threads = GivenCopyThreads()
    site = Site(best_copy(), chunk_bytes=ONE_CHUNK, copy_threads=copy_threads)
    copy_threads.gate.shut()
    for number in range(3):
        site.start(site.op(number, 1 + 8 * number, 8))
    given = len(copy_threads.given)
    await copy_threads.stands()
    await closed_while_a_copy_stands(site, copy_threads.gate.open)
    site.start(site.op(3, 33, 8))
    copy_threads.submit(np.zeros((1, 3), np.uint64), 1, copy_threads)  # behind all that it was given
    assert select.select([copy_threads], [], [], WAIT_S)[0]
    assert copy_threads.take_ended() == [copy_threads], "nothing withdrawn is left that keeps the transport alive"
    assert site.reports == []
    assert len(copy_threads.given) == given + 1
    assert not any(site.arrived(first, 1) for first in (9, 17, 33))
    assert not asyncio.get_running_loop().remove_reader(copy_threads.fileno())


# -- checksums


class Flipping:
    """Copies, and flips a bit of a byte whenever it was written, as memory or a bug would."""

    def __init__(self) -> None:
        self.address = 0

    def __call__(self, blocks: Blocks) -> None:
        copy_one_by_one(blocks)
        for _, start, size_bytes in blocks.tolist():
            if start <= self.address < start + size_bytes:
                ctypes.c_uint8.from_address(self.address).value ^= 1


def copy_with_a_wrong_byte(at: int, byte: int) -> Callable[..., None]:
    """Return how a device's region copies, but for one byte, which is as given afterwards."""
    copy_from = AcceleratorRegion.copy_from

    def copy_wrongly(region: AcceleratorRegion, *given: Any) -> None:  # noqa: ANN401  what it takes
        copy_from(region, *given)
        write_region(region, np.array([byte], np.uint8), at)

    return copy_wrongly


@pytest.mark.any_device
@pytest.mark.parametrize("wrong", ["first", "middle", "last", None])
async def test_checksums_find_a_byte_that_is_not_the_sources(
    monkeypatch: pytest.MonkeyPatch, wrong: str | None
) -> None:
    copy = Flipping()
    threads = 3 if DEVICE.name == HOST else 1  # each copy of a device's writes the wrong byte
    async with closing(Site(copy, threads=threads, chunk_bytes=8 * ONE_BLOCK)) as site:
        op = site.op(1, 10, 40)
        entries = site.destination.manifest.entries
        places = {"first": (entries[0], 49), "middle": (entries[1], 30), "last": (entries[-1], 10)}
        entry, page = places.get(wrong or "", (entries[0], 64))
        at = entry.base + page * entry.page_bytes + 3
        if isinstance(site.destination.region, HostRegion):
            copy.address = site.destination.region.address + at
        else:
            sent = entry.base + (59 - page) * entry.page_bytes + 3 if wrong else 0
            byte = int(read_region(site.source.region)[sent]) ^ 1
            monkeypatch.setattr(AcceleratorRegion, "copy_from", copy_with_a_wrong_byte(at, byte))
        site.start(op._replace(checksums=True))
        ((_, error),) = await site.reported(1)
        assert site.arrived(10, 40) == (wrong is None)
        if wrong is None:
            assert error is None
        else:
            assert isinstance(error, TransferFailedError)
            assert error.field == f"{entry.name}[{page}]"
            assert "from byte 3 on" in error.detail
        site.start(op._replace(op_id=2))
        assert (await site.reported(2))[1] == (2, None), "nobody has asked for checksums"

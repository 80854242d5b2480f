"""The copier with real threads: bytes and checksums on any device; turns, errors and ends by regions of the test's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvferry.daemon.tiers import copier as copier_module
from kvferry.daemon.tiers.copier import (
    MAX_STEP_BYTES,
    MIN_SHARD_BYTES,
    MIN_STEP_BYTES,
    BlockJob,
    BlockSegment,
    TierCopier,
)
from kvferry.daemon.tiers.scheduler import OperationClass, Permit, Scheduler
from kvferry.pools import native_kernel as native
from kvferry.pools.copy_kernel import Copies, CopyThreads, Hashing, new_copy_threads
from kvferry.pools.devices.base import NOTHING_PENDING, Arena, Pending, Region
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.manifest import lay_out, spaces_of
from kvferry.pools.tiers.blocks import BlockLayout, BlockPages, BlockStep
from kvferry.protocol import errors
from kvferry.protocol.ids import HOST
from kvferry.protocol.manifests import Entry, PoolSpec
from tests.kit.blocks import UNTOUCHED, BlockHarness, harness_of, wide_specs
from tests.kit.bytes import fill_region, read_region, write_region
from tests.kit.devices import new_region
from tests.kit.pool_specs import pool_specs

WAIT_S = 30.0
MIB = 1 << 20
BLOCK_BYTES = MIB
PAGES = 40
LAYOUT = BlockLayout(
    lay_out([Entry(component="main", role="k", layer=0, base=0, pages=PAGES, page_bytes=BLOCK_BYTES)]), "main"
)


class _Site:
    """A copier, its scheduler, an arena, and what was reported."""

    def __init__(self, *, threads: int = 2, **options: Any) -> None:  # noqa: ANN401  the copier's own
        self.reports: list[tuple[BlockJob, errors.KvferryError | None]] = []
        self._news = asyncio.Event()
        clock = options.get("clock", time.monotonic)
        self.scheduler = Scheduler(dict.fromkeys(OperationClass, 64 * MIB), patience_s=0, clock=clock)
        self.copier = TierCopier(asyncio.get_running_loop(), self.scheduler, threads=threads, **options)
        self.arena = HostRegion.create("arena", 64 * MIB)

    async def reported(self, count: int = 1) -> list[tuple[BlockJob, errors.KvferryError | None]]:
        async with asyncio.timeout(WAIT_S):
            while len(self.reports) < count:
                self._news.clear()
                await self._news.wait()
        return self.reports

    async def run(self, job: BlockJob) -> errors.KvferryError | None:
        self.copier.start(job, self.done)
        reported, error = (await self.reported(len(self.reports) + 1))[-1]
        assert reported is job
        return error

    def job(
        self,
        region: Any,  # noqa: ANN401  a scripted one, or a real one
        blocks: int = PAGES - 1,
        first: int = 1,
        kind: Literal["offload", "restore"] = "offload",
        *,
        checksums: bool = False,
    ) -> BlockJob:
        """Return a job of so many blocks of ``LAYOUT``."""
        ids = np.arange(first, first + blocks)
        pages = BlockPages(LAYOUT, ids, (ids - 1) * BLOCK_BYTES)
        return BlockJob(kind, [BlockSegment(region, pages)], self.arena, checksums=checksums)

    def done(self, job: BlockJob, error: errors.KvferryError | None) -> None:
        self.reports.append((job, error))
        self._news.set()


@asynccontextmanager
async def site(**options: Any) -> AsyncIterator[_Site]:  # noqa: ANN401
    made = _Site(**options)
    try:
        with capture_logs():  # of bugs whole stacks are shown, which takes seconds
            yield made
    finally:
        made.scheduler.close()
        await asyncio.get_running_loop().run_in_executor(None, made.copier.close)
        made.arena.close()


class _ScriptedRegion:
    """A region that copies nothing: it notes each step, and does what the test wants of it.

    Attributes:
        log: ``begin N`` and ``wait N``, N the step's first block.
        steps: what was begun.
    """

    device = "scripted"
    size_bytes = PAGES * BLOCK_BYTES
    identity = 0

    def __init__(self, name: str = "", log: list[str] | None = None) -> None:
        self.name = name
        self.log = [] if log is None else log
        self.steps: list[BlockStep] = []
        self.on_begin: Callable[[BlockStep], None] = lambda _step: None
        self.on_wait: Callable[[BlockStep], None] | None = None

    def most_blocks(self, layout: BlockLayout) -> int:
        return layout.pages

    def begin_offload(self, pages: BlockPages, step: BlockStep, arena: Arena) -> Pending:
        del pages, arena
        self.steps.append(step)
        self.log.append(f"{self.name}begin {step.first}")
        self.on_begin(step)
        return NOTHING_PENDING if self.on_wait is None else _Scripted(self, step)

    begin_restore = begin_offload


class _Scripted(NamedTuple):
    region: _ScriptedRegion
    step: BlockStep
    done: bool = False

    def wait(self) -> None:
        assert self.region.on_wait is not None
        self.region.on_wait(self.step)
        self.region.log.append(f"{self.region.name}wait {self.step.first}")


class _Gate:
    """A point where a thread waits for the test, and the test for the thread."""

    def __init__(self) -> None:
        self._open, self._entered = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> None:
        self._entered.set()
        assert self._open.wait(WAIT_S)

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.wait, WAIT_S)

    def open(self) -> None:
        self._open.set()


SIZES = st.sampled_from([1, 700, 5000, MIB])


def fix_steps(patch: pytest.MonkeyPatch, step_bytes: int) -> None:
    for name in ("MIN_STEP_BYTES", "MAX_STEP_BYTES", "MAX_COPY_THREADS_STEP_BYTES", "FIRST_STEP_BYTES"):
        patch.setattr(copier_module, name, step_bytes)


def pages_with(pages: BlockPages, ids: npt.ArrayLike | None = None, offsets: npt.ArrayLike | None = None) -> BlockPages:
    """Return them with other ids or offsets."""
    ids, offsets = pages.ids if ids is None else ids, pages.offsets if offsets is None else offsets
    return BlockPages(pages.layout, np.array(ids, np.int64), np.array(offsets, np.int64))


# -- bytes and checksums


@pytest.mark.any_device
@given(pool_specs() | wide_specs(), SIZES, st.data())
def test_what_was_offloaded_comes_back_to_other_pages_and_a_flipped_bit_is_named(
    spec: PoolSpec, step_bytes: int, data: st.DataObject
) -> None:
    manifest = manifest_of(spec)
    parts = [harness_of(manifest, space, data.draw) for space in spaces_of(manifest)]
    if len(parts) > 1 and data.draw(st.booleans()):
        parts[0] = parts[0]._replace(pages=pages_with(parts[0].pages, ids=[], offsets=[]))
    starts = np.cumsum([0, *(part.arena_bytes for part in parts)])
    content = parts[0].memory()
    arenas = [part.offloaded(content) for part in parts]
    ids = [data.draw(st.permutations(range(1, part.pages.layout.pages)))[: len(part.pages.ids)] for part in parts]
    targets = [part._replace(pages=pages_with(part.pages, ids=theirs)) for part, theirs in zip(parts, ids, strict=True)]

    def segments(region: Region, places: list[BlockHarness]) -> list[BlockSegment]:
        """Return them as a job has them, one after another in the arena."""
        moved = [pages_with(one.pages, offsets=one.pages.offsets + at) for one, at in zip(places, starts, strict=False)]
        return [BlockSegment(region, pages) for pages in moved]

    async def test(one: _Site) -> None:
        region, other = new_region(manifest.region_bytes), new_region(manifest.region_bytes)
        write_region(region, content)
        fill_region(other, UNTOUCHED)
        arena = one.arena.view()[: starts[-1]]
        arena[:] = UNTOUCHED
        offload = BlockJob("offload", segments(region, parts), one.arena)
        assert await one.run(offload) is None
        assert (arena == np.concatenate(arenas)).all()
        blocks = [
            [arena[at : at + pages.layout.block_bytes] for at in pages.offsets.tolist()]
            for _, pages in offload.segments
        ]
        assert offload.digests is not None
        assert [digests.tolist() for digests in offload.digests] == [
            [xxhash.xxh3_64_intdigest(block.tobytes()) for block in of_one] for of_one in blocks
        ]
        assert await one.run(BlockJob("restore", segments(other, targets), one.arena, digests=offload.digests)) is None
        expected = np.full(manifest.region_bytes, UNTOUCHED, np.uint8)
        for target, its in zip(targets, arenas, strict=True):
            expected = target.restored(expected, its)
        assert (read_region(other) == expected).all()
        assert (read_region(region) == content).all()
        space, number = data.draw(
            st.sampled_from([(s, n) for s, of_one in enumerate(blocks) for n in range(len(of_one))])
        )
        block = blocks[space][number]
        block[data.draw(st.integers(0, len(block) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        error = await one.run(BlockJob("restore", offload.segments, one.arena, digests=offload.digests))
        assert isinstance(error, errors.SnapshotDamagedError)
        assert error.field == f"{parts[space].pages.layout.space}[{number}]"
        unchecked = BlockJob("restore", offload.segments, one.arena)
        assert await one.run(unchecked) is None, "who has no checksums gets what is there"

    async def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            fix_steps(patch, step_bytes)
            patch.setattr(copier_module, "MIN_SHARD_BYTES", data.draw(st.sampled_from([4096, MIN_SHARD_BYTES])))
            async with site(threads=3, copy_threads=new_copy_threads(2, b"")) as made:
                await test(made)

    asyncio.run(run())


pytestmark = pytest.mark.anyio


async def test_a_job_without_blocks_and_one_without_checksums_end_as_well() -> None:
    async with site() as one:
        empty = one.job(_ScriptedRegion(), 0)
        one.copier.start(empty, one.done)
        assert not one.reports, "never from within the call"
        assert await one.reported() == [(empty, None)]
        assert empty.digests is None
        assert await one.run(BlockJob("restore", [], one.arena, digests=[])) is None


# -- turns


@pytest.fixture
def _steps_of_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_steps(monkeypatch, 2 * MIB)


@pytest.mark.usefixtures("_steps_of_two_blocks")
@pytest.mark.parametrize(
    ("taken_bytes", "log"),
    [
        (1, "begin 0, begin 2, wait 0, begin 4, wait 2, begin 6, wait 4, wait 6"),
        (61 * MIB, "begin 0, wait 0, begin 2, wait 2, begin 4, wait 4, begin 6, wait 6"),
    ],
    ids=["before the last one is waited for", "or, if it may not begin, when that is over"],
)
async def test_the_next_step_begins(taken_bytes: int, log: str) -> None:
    """Else a thread would wait for bytes in flight that are its own."""
    async with site(threads=1) as one:
        assert one.scheduler.try_begin(OperationClass.OFFLOAD, taken_bytes)
        region = _ScriptedRegion()
        region.on_wait = lambda _step: None
        assert await one.run(one.job(region, 8)) is None
        assert region.log == log.split(", ")


@pytest.mark.usefixtures("_steps_of_two_blocks")
async def test_jobs_of_one_class_take_turns_and_a_higher_one_overtakes() -> None:
    async with site(threads=1) as one:
        gate, log = _Gate(), list[str]()
        first, second, urgent = (_ScriptedRegion(name, log) for name in ("a ", "b ", "c "))
        first.on_begin = gate
        one.copier.start(one.job(first, 39), one.done)
        await gate.entered()
        one.copier.start(one.job(second, 39), one.done)
        one.copier.start(one.job(urgent, 39, kind="restore"), one.done)
        gate.open()
        reports = await one.reported(3)
        assert [id(job.segments[0].region) for job, _ in reports] == [id(urgent), id(first), id(second)]
        names = "".join(step[0] for step in log)
        assert names.startswith("a" + "c" * len(urgent.steps) + "ba"), names
        rest = names.replace("c", "")[1:]
        assert rest == ("ba" * len(rest))[: len(rest)], "one step each in turns"


async def test_a_restore_is_not_kept_waiting_by_threads_that_wait_for_an_offloads_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site(threads=1) as one:
        gate, begin = _Gate(), one.scheduler.begin
        gate.open()

        def waits(*given: Any) -> Permit | None:  # noqa: ANN401
            gate()
            return begin(*given)

        monkeypatch.setattr(one.scheduler, "begin", waits)
        assert one.scheduler.try_begin(OperationClass.OFFLOAD, 64 * MIB)
        offload, restore = _ScriptedRegion(), _ScriptedRegion()
        one.copier.start(one.job(offload, 3), one.done)
        await gate.entered()
        assert await one.run(one.job(restore, 3, kind="restore")) is None
        assert not offload.log
        one.scheduler.end(OperationClass.OFFLOAD, 64 * MIB)
        assert len(await one.reported(2)) == 2


class _Pace:
    """A clock that shows how long so many bytes take at a speed, for regions that copy nothing."""

    def __init__(self, mib_per_s: int) -> None:
        self.time_s = 0.0
        self._bytes_per_s = mib_per_s * MIB

    def __call__(self) -> float:
        return self.time_s

    def region(self, device: str = HOST) -> _ScriptedRegion:
        made = _ScriptedRegion()
        made.device, made.on_begin = device, self.copied
        return made

    def copied(self, step: BlockStep) -> None:
        self.time_s += step.size_bytes / self._bytes_per_s


@pytest.mark.parametrize(
    ("device", "mib_per_s", "expected"),
    [
        ("scripted", 1, MIN_STEP_BYTES),
        ("scripted", 5100, 4 * MIB),
        ("scripted", 10**6, MAX_STEP_BYTES),
        (HOST, 1300, 10 * MIB),  # copy threads stop for transfers: 8 milliseconds in place of 0.8
    ],
)
async def test_steps_grow_and_shrink_to_what_a_millisecond_copies(device: str, mib_per_s: int, expected: int) -> None:
    pace = _Pace(mib_per_s)
    async with site(threads=1, clock=pace, copy_threads=new_copy_threads(1, b"")) as one:
        region = pace.region(device)
        for _ in range(3):
            assert await one.run(one.job(region, 39)) is None
        assert max(step.size_bytes for step in region.steps[-4:]) == expected


async def test_what_stands_still_for_a_transfer_is_not_taken_for_slow() -> None:
    pace, transfers = _Pace(1300), False

    async with site(threads=1, clock=pace, copy_threads=new_copy_threads(1, b"")) as one:

        def copied(step: BlockStep) -> None:
            pace.copied(step)
            if transfers:
                one.scheduler.transfer_began()
                pace.time_s += 0.1
                one.scheduler.transfer_ended()

        region = pace.region()
        region.on_begin = copied
        for number in range(5):
            transfers = number > 1
            assert await one.run(one.job(region, 39)) is None
        assert region.steps[-3].size_bytes == 10 * MIB


async def test_what_a_step_copies_and_hashes_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of the host hash as they copy; of others the digests are made when a step is complete."""
    said: list[str] = []

    @contextmanager
    def giving_way(_permit: Permit) -> Iterator[None]:
        said.append("gives way")
        yield
        said.append("goes on")

    def hashed(*_arguments: object) -> npt.NDArray[np.uint64]:
        said.append("hashes")
        return np.zeros(1, np.uint64)

    async with site(threads=1) as one:
        region = _ScriptedRegion()
        region.on_begin = lambda _step: said.append("copies")
        monkeypatch.setattr(one.scheduler, "giving_way", giving_way)
        monkeypatch.setattr(copier_module, "hash_step", hashed)
        assert await one.run(one.job(region, 1, checksums=True)) is None
    assert said == ["gives way", "copies", "goes on", "gives way", "hashes", "goes on"]


# -- what the loop gives to the copy threads


class _GivenCopyThreads(CopyThreads):
    """Copy threads, and what it was given and asked for: a word each."""

    def __init__(self) -> None:
        super().__init__(native, native.new_copy_threads(2, b""))
        self.log: list[str] = []
        self.before: Callable[[], None] = lambda: None

    def submit(self, copies: Copies, threads: int, token: object, hashed: Hashing | None = None) -> None:
        """Note it, and give it."""
        self.log.append("hashed" if hashed else "given")
        self.before()
        super().submit(copies, threads, token, hashed)

    def serve(self, threads: int) -> None:
        """Note it."""
        self.log.append("served")
        super().serve(threads)


def _region() -> HostRegion:
    region = HostRegion.create("given", PAGES * BLOCK_BYTES)
    region.view()[:] = np.random.default_rng(1).integers(0, 256, region.size_bytes, np.uint8)
    return region


ONE_STEP: dict[str, list[str]] = {"one step": ["given"], "one step with checksums": ["hashed"]}
OTHERS = ["several steps", "two jobs", "two spaces", "many copies", "transfers", "no host memory", "no hash"]


@pytest.mark.parametrize("what", [*ONE_STEP, *OTHERS])
async def test_the_loop_gives_copy_threads_a_job_that_is_alone_and_one_step_and_others_are_for_the_threads(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    copy_threads = _GivenCopyThreads()
    async with site(copy_threads=copy_threads) as one:
        region = _region()
        checksums = what in {"no hash", "one step with checksums"}
        jobs = [one.job(region, 20 if what == "several steps" else 2, checksums=checksums)]
        if what == "no hash":
            monkeypatch.setattr(_GivenCopyThreads, "hashes", False)
        elif what == "two jobs":
            jobs.append(one.job(region, 2, first=3))
        elif what == "two spaces":
            segments = one.job(region, 1).segments + one.job(region, 1, first=3).segments
            jobs = [BlockJob("offload", segments, one.arena, checksums=False)]
        elif what == "many copies":
            monkeypatch.setattr(copier_module, "SUBMITTED_ROWS", 1)
        elif what == "transfers":
            one.scheduler.transfer_began()
        elif what == "no host memory":
            scripted = _ScriptedRegion()
            scripted.device = HOST
            jobs = [one.job(scripted, 2)]
        for job in jobs:
            one.copier.start(job, one.done)
        if what == "transfers":
            await asyncio.get_running_loop().run_in_executor(None, lambda: None)
            assert not one.reports
            one.scheduler.transfer_ended()
        assert [error for _, error in await one.reported(len(jobs))] == [None] * len(jobs)
        if what in ONE_STEP:
            restore = BlockJob("restore", jobs[0].segments, one.arena, digests=jobs[0].digests)
            assert await one.run(restore) is None
            assert copy_threads.log == ONE_STEP[what] * 2
        else:
            assert len([one for one in copy_threads.log if one != "served"]) == (1 if what == "two jobs" else 0)
            assert "served" in copy_threads.log
        assert one.scheduler.bytes_in_flight == 0


async def test_a_job_of_the_copy_threads_stands_still_for_transfers_and_may_be_stopped() -> None:
    copy_threads = _GivenCopyThreads()
    async with site(copy_threads=copy_threads) as one:
        job, copy_threads.before = one.job(_region(), 2), one.scheduler.transfer_began
        one.copier.start(job, one.done)
        assert await asyncio.get_running_loop().run_in_executor(None, lambda: one.arena.view().any()) == 0
        assert not one.reports
        one.scheduler.transfer_ended()
        assert (await one.reported())[0][1] is None
        copy_threads.before = lambda: None
        one.copier.start(job, one.done)
        one.copier.stop(job)
        (_, (_, error)) = await one.reported(2)
        assert isinstance(error, errors.CancelledError)
        assert await one.run(job) is None


async def test_nothing_that_the_copy_threads_were_given_is_copied_or_reported_after_the_end() -> None:
    copy_threads, loop = _GivenCopyThreads(), asyncio.get_running_loop()
    one = _Site(copy_threads=copy_threads)
    copy_threads.before = one.scheduler.transfer_began
    one.copier.start(one.job(_region(), 2), one.done)
    closed = loop.run_in_executor(None, one.copier.close)
    done, _ = await asyncio.wait({closed}, timeout=0.05)
    assert not done, "a copy is under way"
    one.scheduler.close()
    await closed
    content = one.arena.view()[: 2 * MIB].copy()
    await loop.run_in_executor(None, lambda: None)
    assert not one.reports
    assert (one.arena.view()[: 2 * MIB] == content).all()
    assert not loop.remove_reader(copy_threads.fileno())
    assert copy_threads.take_ended() == []
    one.arena.close()


# -- ends


@pytest.mark.usefixtures("_steps_of_two_blocks")
async def test_a_job_that_is_stopped_ends_after_the_step_that_has_begun() -> None:
    async with site(threads=1) as one:
        gate, region, waiting = _Gate(), _ScriptedRegion(), _ScriptedRegion()
        region.on_begin = gate
        running, queued = one.job(region, 39), one.job(waiting, 39)
        one.copier.start(running, one.done)
        await gate.entered()
        one.copier.start(queued, one.done)
        one.copier.stop(queued)
        one.copier.stop(running)
        [(first, error)] = await one.reported()
        assert first is queued, "none of its steps had begun"
        assert isinstance(error, errors.CancelledError)
        gate.open()
        (_, (second, error)) = await one.reported(2)
        assert second is running
        assert isinstance(error, errors.CancelledError)
        assert (len(region.steps), len(waiting.steps)) == (1, 0)
        one.copier.stop(running)
        assert await one.run(one.job(_ScriptedRegion())) is None
        assert len(one.reports) == 3


@pytest.mark.usefixtures("_steps_of_two_blocks")
@pytest.mark.parametrize("where", ["on_begin", "on_wait"])
@pytest.mark.parametrize(
    ("raised", "reported"),
    [
        (errors.DeviceLostError("it burns"), errors.DeviceLostError),
        (errors.TransferFailedError("not mapped"), errors.TransferFailedError),
        (ValueError("a bug"), errors.InternalError),
    ],
)
async def test_an_error_is_reported_once_and_ends_nobody_else(
    where: str, raised: Exception, reported: type[Exception]
) -> None:
    def fail(step: BlockStep) -> None:
        if step.first >= 4:
            raise raised

    async with site() as one:
        region = _ScriptedRegion()
        region.on_wait = lambda _step: None
        setattr(region, where, fail)
        one.copier.start(one.job(region, 39), one.done)
        one.copier.start(one.job(_ScriptedRegion(), 39), one.done)
        assert {type(error) for _, error in await one.reported(2)} == {reported, type(None)}
        if where == "on_begin":
            waited = {line.replace("wait", "begin") for line in region.log if "wait" in line}
            assert waited >= {line for line in region.log if line in {"begin 0", "begin 2"}}, "what had begun"
        assert one.scheduler.bytes_in_flight == 0
        assert await one.run(one.job(_ScriptedRegion())) is None

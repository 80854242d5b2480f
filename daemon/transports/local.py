"""The protocol of transports, and the local one, which copies within this process's mappings.

Copies that take less time than waking a thread are made on the control loop, within a budget for each of its turns.
Other copies in host memory the loop expands, some thousand at a time, and gives to copy threads; a descriptor signals
the end, so that nothing waits for Python's lock. All else (devices, checksums, very many short copies, and everything
without copy threads) goes to a few threads that release the lock. Both take transfer ops in turn, so that a large
transfer does not delay a small one: a thread copies one chunk of the transfer op at the head of the queue and puts it
back at the tail. Copies between a device and the host go through a staging buffer small enough to stay in a cache;
those within one device stay on it. While a device copies, a thread here waits.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from kvferry.daemon.process.thread_count import ThreadCount, Trial, length_of
from kvferry.daemon.process.time_slices import as_others, be_as_others
from kvferry.daemon.transfer.endpoints import Incarnation, RemotePool, SourcePool
from kvferry.daemon.transfer.registry import StartOp
from kvferry.daemon.transports.arrival import check_arrived
from kvferry.pools import copy_kernel
from kvferry.pools.copy_kernel import Copies, CopyThreads
from kvferry.pools.devices.accelerator_region import AcceleratorRegion
from kvferry.pools.devices.base import Region
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.copies import (
    CopyBlocks,
    chunk_bounds,
    copy_by_size,
    copy_one_by_one,
    cut_copy_chunks,
    digest_of,
    split_blocks,
    vectored_copy_works,
)
from kvferry.pools.planning.plan import BlockParts, Blocks, Plan, whole_blocks
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import CancelledError, InternalError, KvferryError
from kvferry.protocol.peer_messages import PeerBody

MAX_BLOCK_BYTES = 1 << 20
STAGING_BYTES: Final = 4 << 20
"""A thread's staging buffer for slices, small enough for the last-level cache; larger where a single page is."""

PART_BLOCKS: Final = 1 << 16
"""How many blocks are expanded at a time for one chunk, at most: 24 bytes each."""

CHUNKS_BLOCKS: Final = 4096
CHUNKS_BYTES: Final = CHUNKS_BLOCKS * MAX_BLOCK_BYTES
"""Where blocks are large enough, many chunks are expanded at a time, of so many blocks and bytes, and wait for their
turns."""

AT_ONCE_S: Final = 50e-6
"""How long the control loop may copy in one of its turns."""

AT_ONCE_BYTES_S: Final = 4e9
AT_ONCE_BLOCK_S: Final = 0.25e-6
"""What a copy is expected to take: the memory's speed with much else going on, and what it waits for a block's first
line. An op within the budget takes less than waking a thread and being told by it."""

CHUNK_BYTES: Final = 4 << 20
"""How much a thread copies between two looks at the queue: smaller is fairer, larger is a little faster."""

LIST_ROWS: Final = 1 << 12
LIST_BYTES: Final = 64 << 20
"""How much the copy threads are given at a time of a transfer op that is alone when it begins: what the loop expands in
0.2 ms, and some milliseconds for one thread, as one makes all of it where the kernel tries its variants. Of others it
is as much as threads here would take, who have to wait for each other's."""
LISTS_AT_ONCE: Final = 2
"""So many of one transfer op: the next one is ready when the copy threads are done with one."""
SHORT_ROW_BYTES: Final = 1 << 10
"""Below that the loop expands a list while copy threads copy it; with several, threads do both."""
GIVEN_ROWS: Final = 1 << 14
"""Of all transfer ops together no more is expanded until the copy threads are done with some: 24 or 48 bytes each."""

log = structlog.get_logger(__name__)

T = TypeVar("T")
OnOpDone = Callable[[int, KvferryError | None], None]
"""Called on the control loop, once per transfer op, with its id and its error."""

SendToPeer = Callable[[Incarnation, PeerBody], bool]
"""Sends another daemon a message; returns False if it is gone."""


class Transport(Protocol):
    """Copies transfer ops in the background. Methods are called on the control loop and return at once.

    ``StartOp`` is what is copied within this daemon; transports from other daemons take the ``TransferOp`` itself.
    """

    def start(self, op: StartOp, on_done: OnOpDone, reported: Callable[[], None] = ...) -> None:
        """Start copying; ``on_done`` is called exactly once, when no byte of the transfer op can move any more.

        What is copied at once is done before this returns. ``reported`` may be called once several ends were reported
        together, so that these need not wait for the loop's next turn.
        """

    def stop(self, op_id: int) -> bool:
        """Stop a transfer op at the next copy chunk: ``on_done`` follows. Return False where it is not under way."""

    def close(self) -> None:
        """Stop everything and wait until no byte moves; nothing is reported after that."""


def best_copy() -> CopyBlocks:
    """Return the fastest copy function that works here; warn where that is not the native one."""
    if copy_kernel.DESCRIPTION.native:
        return copy_kernel.copy
    log.warning(
        "copies are slower than they could be",
        cause=f"the native copy kernel does not copy: {copy_kernel.DESCRIPTION.why_not}",
        remedy="install a C compiler and Python's headers, then kvferry again; or end what switches it off",
    )
    return copy_by_size if vectored_copy_works() else copy_one_by_one


def _nobody() -> None:
    """Tell nobody."""


class _Staged(NamedTuple):
    """A copy chunk of a plan's segments: slices between host memory, or, from or to a device, through staging."""

    plan: Plan
    first: int
    stop: int
    size_bytes: int


class _Check(NamedTuple):
    """Segments of a plan that have been copied and are compared with the source's."""

    plan: Plan
    first: int
    stop: int
    size_bytes: int


_CopyChunk = Blocks | _Staged | _Check
"""A copy chunk: whole pages as blocks of absolute addresses, what goes through staging, or what is to be compared."""


class _Job:
    """One transfer op: queued chunks, the number in flight, and the first error. Guarded by the transport's lock.

    It is in the queue at most once, and not while a thread expands its next part, or as many as it may have are at it.
    What the copy threads are given, and have, of it is the loop's alone: ``lists`` are those to come, None where there
    are none.
    """

    def __init__(
        self, op: StartOp, on_done: OnOpDone, reported: Callable[[], None], trial: Trial, chunk_bytes: int
    ) -> None:
        self.by_copy_threads = False
        self.lists: Iterator[Copies] | None = None
        self.given: list[_Given] = []
        self.waits_for_copy_threads = False
        self.chunk_bytes = chunk_bytes
        self.op = op
        self.on_done = on_done
        self.reported = reported
        self.trial = trial
        self.most_in_flight = trial.threads
        self.queued = False
        self.expanding = False
        self.checking = False
        self.expansion: _Expansion | _Checks | _NoMore | None = None
        self.chunks: deque[_CopyChunk] = deque()
        self.in_flight = 0
        self.error: KvferryError | None = None

    @property
    def has_more(self) -> bool:
        """Return whether chunks are left to copy."""
        return bool(self.chunks) or self.expansion is None or not self.expansion.is_over


class _Given(NamedTuple):
    """A list of copies that the copy threads have of a transfer op."""

    job: _Job
    rows: int


class LoopBudget:
    """How long the control loop may copy in one of its turns: in all, so that many small copies do not hold it up."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, turn_s: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._turn_s = self._left_s = turn_s

    def __repr__(self) -> str:
        """Show what is left of this turn's."""
        return f"<LoopBudget {self._left_s * 1e6:.0f} us left>"

    def allows(self, blocks: int, size_bytes: int) -> bool:
        """Return whether so much may be copied in this turn."""
        return blocks * AT_ONCE_BLOCK_S + size_bytes / AT_ONCE_BYTES_S <= self._left_s

    def spend(self, call: Callable[[], T]) -> T:
        """Call, and take the time that it needed from what is left until the loop's next turn."""
        if self._left_s == self._turn_s:
            self._loop.call_soon(self._next_turn)
        began_s = self._clock()
        result = call()
        self._left_s -= max(self._clock() - began_s, 1e-9)
        return result

    def _next_turn(self) -> None:
        self._left_s = self._turn_s


class LocalTransport:
    """See ``Transport``. Each of ``threads`` copies ``chunk_bytes`` at a time, if the loop and copy threads do not."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        threads: int,
        chunk_bytes: int | None = None,
        at_once_s: float = AT_ONCE_S,
        copy: CopyBlocks,
        copy_threads: CopyThreads | None = None,
    ) -> None:
        """``copy_threads``: they copy in host memory, where ``copy`` is the kernel's; None: the threads here do."""
        self._loop = loop
        self._copy = copy
        self._copy_threads = copy_threads if copy is copy_kernel.copy else None  # it does just that
        self._given_rows = 0
        self._waiting: deque[_Job] = deque()
        self._chunk_bytes = chunk_bytes or CHUNK_BYTES
        self._budget = LoopBudget(loop, at_once_s)
        self._thread_count = ThreadCount(threads)
        self._jobs: dict[int, _Job] = {}
        self._alone: _Job | None = None
        self._queue: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._staging = threading.local()
        self._threads = [
            threading.Thread(target=self._work, name=f"copy-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        if self._copy_threads is not None:
            loop.add_reader(self._copy_threads.fileno(), self._copy_threads_told, self._copy_threads)

    @classmethod
    def as_fast_as_here(
        cls, loop: asyncio.AbstractEventLoop, *, threads: int, at_once_s: float = AT_ONCE_S
    ) -> LocalTransport:
        """Return one that copies as fast as it can here, on so many threads."""
        copy_threads = copy_kernel.new_copy_threads(threads, as_others())
        return cls(loop, threads=threads, at_once_s=at_once_s, copy=best_copy(), copy_threads=copy_threads)

    def __repr__(self) -> str:
        """Show the number of transfer ops in progress."""
        return f"<LocalTransport transfer ops={len(self._jobs)} threads={len(self._threads)}>"

    def start(self, op: StartOp, on_done: OnOpDone, reported: Callable[[], None] = _nobody) -> None:
        """See ``Transport.start``."""
        rows = sum(len(plan.runs.pages) * len(plan.source.base) for plan in op.plans)
        size_bytes = sum(plan.total_bytes for plan in op.plans)
        blocks = self._blocks_at_once(op, rows, size_bytes)
        if blocks is not None:
            on_done(op.op_id, self._budget.spend(functools.partial(self._try, op, self._copy, blocks)))
            return
        with self._changed:
            others = bool(self._jobs)
            alone = not others and not op.checksums and _is_populated(op.source) and _is_populated(op.destination)
            trial = self._thread_count.begin(length_of(size_bytes, rows), size_bytes, alone=alone)
            job = _Job(op, on_done, reported, trial, self._chunk_bytes)
            self._alone = job if alone else None
            self._jobs[op.op_id] = job
            are_short = rows > LIST_ROWS and size_bytes < SHORT_ROW_BYTES * rows
            if self._copy_threads is None or are_short or not _is_within_host(op):
                self._queue_up(job)
                return
            job.by_copy_threads, job.expansion = True, _NO_MORE
            job.most_in_flight = len(
                self._threads
            )  # for its checksums: no copy threads share what is hashed as a whole
        job.lists = _lists_of(op, min(LIST_BYTES, CHUNK_BYTES * trial.threads) if others else LIST_BYTES)
        self._go_on(job)
        self._give(self._copy_threads)

    # -- what the loop gives to the copy threads

    def _give(self, copy_threads: CopyThreads) -> None:
        """Give the copy threads a list of each transfer op in turns, as long as it may have more."""
        while self._waiting and self._given_rows < GIVEN_ROWS:
            job = self._waiting.popleft()
            job.waits_for_copy_threads = False
            error = self._try(job.op, self._give_next, job, copy_threads)
            if error is not None:
                self._give_up(job, copy_threads, error)
            else:
                self._go_on(job)

    def _give_next(self, job: _Job, copy_threads: CopyThreads) -> None:
        copies = None if job.lists is None else next(job.lists, None)
        if copies is None:
            job.lists = None
            return
        given = _Given(job, len(copies))
        copy_threads.submit(copies, job.trial.threads, given)
        job.given.append(given)
        self._given_rows += given.rows

    def _copy_threads_told(self, copy_threads: CopyThreads) -> None:
        ended: list[_Job] = []
        for given in copy_threads.take_ended():
            self._given_rows -= given.rows
            given.job.given.remove(given)
            self._go_on(given.job, ended.append)
        try:
            self._give(copy_threads)
        finally:
            self._report_all(ended)

    def _report_all(self, ended: Sequence[_Job]) -> None:
        """Report several transfer ops in one turn of the loop."""
        for job in ended:
            try:
                self._report(job)
            except Exception as cause:  # noqa: BLE001  it keeps no other from being reported
                self._loop.call_exception_handler({"message": "the end of a copy was not heard", "exception": cause})
        if not self._closing:
            for reported in {job.reported for job in ended}:
                reported()

    def _go_on(self, job: _Job, report: Callable[[_Job], None] | None = None) -> None:
        """Let a transfer op wait for its next turn; or end it, if copy threads have copied all of it."""
        if job.lists is not None:
            if not job.waits_for_copy_threads and len(job.given) < LISTS_AT_ONCE and not self._closing:
                job.waits_for_copy_threads = True
                self._waiting.append(job)
        elif not job.given:
            with self._changed:
                self._finish_if_idle(job, report)

    def _give_up(self, job: _Job, copy_threads: CopyThreads, error: KvferryError) -> None:
        """End a transfer op with an error, once what threads are at of it has ended."""
        with self._changed:
            job.error = job.error or error
        job.lists = None  # also where it waits for its turn
        for given in job.given:
            copy_threads.withdraw(given)
        self._go_on(job)

    def stop(self, op_id: int) -> bool:
        """See ``Transport.stop``."""
        error = CancelledError("the transfer ended before all bytes were copied")
        with self._changed:
            job = self._jobs.get(op_id)
            if job is None or job.error is not None:
                return job is not None
            if self._copy_threads is None or not job.by_copy_threads:
                job.error = error
                return True
        self._give_up(job, self._copy_threads, error)
        return True

    def close(self) -> None:
        """See ``Transport.close``."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if self._copy_threads is not None:
            self._copy_threads.withdraw_all()
            self._loop.call_soon_threadsafe(self._stop_listening, self._copy_threads)

    def _stop_listening(self, copy_threads: CopyThreads) -> None:
        self._loop.remove_reader(copy_threads.fileno())
        copy_threads.take_ended()  # what was withdrawn, and would keep this alive

    def _blocks_at_once(self, op: StartOp, rows: int, size_bytes: int) -> Blocks | None:
        """Return the blocks of an op that is copied sooner than a thread wakes up; None for any other.

        Both pools are in populated memory of this daemon's host: the loop must not wait for the kernel either.
        """
        if self._closing or op.checksums or not self._budget.allows(rows, size_bytes):
            return None
        is_there = _is_populated(op.source) and _is_populated(op.destination)
        return _blocks_of_one_chunk(op, self._chunk_bytes) if is_there else None

    def _work(self) -> None:
        be_as_others()
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                job = self._queue.popleft()
                job.queued = False
                if job.error is not None:
                    self._finish_if_idle(job)
                    continue
                chunk = job.chunks.popleft() if job.chunks else None
                job.expanding = chunk is None
                job.in_flight += 1
                self._queue_up(job)
            error = self._try(job.op, self._step, job, chunk)
            with self._changed:
                job.in_flight -= 1
                if job.error is None:
                    job.error = error
                self._queue_up(job)
                self._finish_if_idle(job)

    def _queue_up(self, job: _Job) -> None:
        """Queue a transfer op for one more thread, if there is something for it to do. Needs the lock."""
        if job.queued or job.expanding or job.error is not None or not job.has_more:
            return
        if job.in_flight < job.most_in_flight:
            job.queued = True
            self._queue.append(job)
            self._changed.notify()

    def _expand(self, job: _Job) -> _CopyChunk | None:
        """Expand the next part of a transfer op, and return its first chunk; meanwhile no other thread has the job."""
        blocks = None if job.expansion or job.checking else _blocks_of_one_chunk(job.op, job.chunk_bytes)
        if blocks is not None:
            job.expansion, chunks = _NO_MORE, deque[_CopyChunk]([blocks])
        else:
            job.expansion = job.expansion or (_Checks if job.checking else _Expansion)(job.op, job.chunk_bytes)
            chunks = deque(job.expansion.take())
        first = chunks.popleft() if chunks else None
        with self._changed:
            job.chunks = chunks
            job.expanding = False
            self._queue_up(job)  # a small transfer op takes one turn, on one thread
        return first

    def _step(self, job: _Job, chunk: _CopyChunk | None) -> None:
        """Copy a chunk of a transfer op, by default the first of its next part."""
        if chunk is None:
            chunk = self._expand(job)
        if isinstance(chunk, _Staged):
            self._copy_staged(job.op, chunk)
        elif isinstance(chunk, _Check):
            self._check(job.op, chunk)
        elif chunk is not None:
            self._copy(chunk)

    def _try(self, op: StartOp, call: Callable[..., None], *arguments: object) -> KvferryError | None:
        """Do some of a transfer op's work; return the error, if any."""
        try:
            call(*arguments)
        except KvferryError as error:
            return error
        except Exception as error:  # a thread that dies would leave its transfer op unsettled forever
            log.exception("copy failed", op=op.op_id, request_id=op.request_id)
            return InternalError(f"the copy failed: {type(error).__name__}: {error}")
        return None

    def _copy_staged(self, op: StartOp, chunk: _Staged) -> None:
        source, destination = _region(op.source), _region(op.destination)
        plan, first, stop, _ = chunk
        if isinstance(source, HostRegion) and isinstance(destination, HostRegion):
            copy_kernel.copy(plan.listed(first, stop, (source.address, destination.address)))
            return
        if (
            isinstance(source, AcceleratorRegion)
            and isinstance(destination, AcceleratorRegion)
            and destination.accelerator.reaches(source.accelerator)
        ):
            destination.copy_from(source, plan, first, stop)
            return
        at = self._staging_of(chunk.size_bytes).ctypes.data
        source.gather(plan.source, first, stop, at, self._copy)
        destination.scatter(plan.destination, first, stop, at, self._copy)

    def _check(self, op: StartOp, chunk: _Check) -> None:
        plan, first, stop, size_bytes = chunk
        source, destination = _region(op.source), _region(op.destination)
        if (
            isinstance(source, HostRegion)
            and isinstance(destination, HostRegion)
            and digest_of(plan.source, source.address, first, stop)
            == digest_of(plan.destination, destination.address, first, stop)
        ):
            return
        both = self._staging_of(2 * size_bytes)[: 2 * size_bytes].reshape(2, size_bytes)
        for memory, side, into in ((op.source, plan.source, both[0]), (op.destination, plan.destination, both[1])):
            _region(memory).gather(side, first, stop, into.ctypes.data, self._copy)
        check_arrived(both[0], both[1], plan.destination, first, op.destination.manifest)

    def _staging_of(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Return this thread's staging buffer, of so many bytes at least."""
        staging: npt.NDArray[np.uint8] | None = getattr(self._staging, "buffer", None)
        if staging is None or len(staging) < size_bytes:
            staging = self._staging.buffer = np.empty(max(size_bytes, STAGING_BYTES), np.uint8)
        return staging

    def _finish_if_idle(self, job: _Job, report: Callable[[_Job], None] | None = None) -> None:
        """Report the transfer op once nothing of it is in flight and nothing is left to do. Needs the lock.

        ``report``: takes it, on the loop; None: its next turn does.
        """
        if job.in_flight or (job.has_more and job.error is None):
            return
        if job.op.checksums and job.error is None and not job.checking:
            job.checking, job.expansion = True, None
            self._queue_up(job)
            return
        if self._jobs.pop(job.op.op_id, None) is not None:
            if self._alone is job and job.error is None:
                self._thread_count.end(job.trial)
            if report is None:
                self._loop.call_soon_threadsafe(self._report, job)
            else:
                report(job)

    def _report(self, job: _Job) -> None:
        if not self._closing:
            job.on_done(job.op.op_id, job.error)


class _NoMore:
    """Nothing but what was taken already."""

    is_over = True

    def take(self) -> list[_CopyChunk]:
        """Return no chunk."""
        return []


_NO_MORE: Final = _NoMore()


class _Checks:
    """What an op has copied, to be compared: all in one part."""

    def __init__(self, op: StartOp, chunk_bytes: int) -> None:
        self._checks: list[_CopyChunk] = []
        for plan in op.plans:
            max_bytes = max(min(chunk_bytes, STAGING_BYTES) // 2, int(plan.source.segment_bytes.max()))
            self._checks += [_Check(plan, *chunk) for chunk in cut_copy_chunks(plan.source, max_bytes)]

    @property
    def is_over(self) -> bool:
        """Return whether everything was taken."""
        return not self._checks

    def take(self) -> list[_CopyChunk]:
        """Return all chunks."""
        checks, self._checks = self._checks, []
        return checks


class _Expansion:
    """An op's copies, expanded part by part: whole pages, no block above MAX_BLOCK_BYTES, then the rest.

    A part is one chunk of many small blocks, or many chunks of few.
    """

    def __init__(self, op: StartOp, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._large_bytes = chunk_bytes // CHUNKS_BLOCKS
        source, destination = _region(op.source), _region(op.destination)
        within_host = isinstance(source, HostRegion) and isinstance(destination, HostRegion)
        at = (0, 0)
        if isinstance(source, HostRegion) and isinstance(destination, HostRegion):
            at = (source.address, destination.address)
        self._whole: deque[BlockParts] = deque()
        self._staged: list[_CopyChunk] = []
        for plan in op.plans:
            through_staging = plan.sliced if within_host else np.ones_like(plan.sliced)
            if not through_staging.any():
                self._whole.append(BlockParts(plan, at))
                continue
            if not through_staging.all():
                self._whole.append(BlockParts(plan.of(~through_staging), at))
                plan = plan.of(through_staging)  # noqa: PLW2901  the remaining segments
            max_bytes = chunk_bytes if within_host else min(chunk_bytes, STAGING_BYTES)
            max_bytes = max(max_bytes, int(plan.source.segment_bytes.max()))
            self._staged += [_Staged(plan, *copy_chunk) for copy_chunk in cut_copy_chunks(plan.source, max_bytes)]

    @property
    def is_over(self) -> bool:
        """Return whether everything was taken."""
        return not self._whole and not self._staged

    def take(self) -> list[_CopyChunk]:
        """Return the chunks of the next part."""
        if not self._whole:
            staged, self._staged = self._staged, []
            return staged
        parts: list[Blocks] = []
        bytes_left, blocks_left = self._chunk_bytes, PART_BLOCKS
        if self._whole[0].mean_bytes >= self._large_bytes:
            bytes_left, blocks_left = CHUNKS_BYTES, CHUNKS_BLOCKS
        while True:
            parts.append(self._whole[0].take(bytes_left, blocks_left))
            if self._whole[0].is_over:
                self._whole.popleft()
            if not self._whole:
                break
            bytes_left -= int(parts[-1][:, 2].sum())
            blocks_left -= len(parts[-1])
            if bytes_left <= 0 or blocks_left <= 0:
                break
        blocks = parts[0] if len(parts) == 1 else np.concatenate(parts)
        blocks = split_blocks(blocks, MAX_BLOCK_BYTES)
        chunks: list[_CopyChunk] = [
            blocks[first:stop] for first, stop in pairwise(chunk_bounds(blocks, self._chunk_bytes).tolist())
        ]
        return chunks


def _blocks_of_one_chunk(op: StartOp, chunk_bytes: int) -> Blocks | None:
    """Return all of an op that is one part of one chunk, as most are, and without more ado; None where it is not."""
    if len(op.plans) != 1 or not 0 < op.plans[0].total_bytes <= chunk_bytes:
        return None
    source, destination, plan = _region(op.source), _region(op.destination), op.plans[0]
    if (
        not (isinstance(source, HostRegion) and isinstance(destination, HostRegion))
        or len(plan.runs.pages) * len(plan.source.base) > CHUNKS_BLOCKS
        or not plan.is_whole
    ):
        return None
    return _all_blocks(plan, (source.address, destination.address))


def _all_blocks(plan: Plan, at: tuple[int, int]) -> Blocks:
    """Return all blocks of a plan of whole pages, none above MAX_BLOCK_BYTES."""
    blocks = whole_blocks(plan, at=at)
    return blocks if plan.largest_block_bytes <= MAX_BLOCK_BYTES else split_blocks(blocks, MAX_BLOCK_BYTES)


def _lists_of(op: StartOp, list_bytes: int) -> Iterator[Copies]:
    """Yield all copies of an op within the host, in lists of about so many bytes, and LIST_ROWS at most.

    Raises:
        InternalError: the memory of a pool is not mapped.
    """
    source, destination = _region(op.source), _region(op.destination)
    assert isinstance(source, HostRegion)
    assert isinstance(destination, HostRegion)
    at = (source.address, destination.address)
    for plan in op.plans:
        rows = len(plan.runs.pages) * len(plan.source.base)
        if plan.is_whole and rows <= LIST_ROWS and plan.total_bytes <= list_bytes:
            yield _all_blocks(plan, at)  # as of most
        elif plan.is_whole:
            parts = BlockParts(plan, at)
            while not parts.is_over:
                blocks = split_blocks(parts.take(list_bytes, LIST_ROWS), MAX_BLOCK_BYTES)
                for first, stop in pairwise(chunk_bounds(blocks, list_bytes).tolist()):  # of several where pages adjoin
                    yield blocks[first:stop]
        else:
            for first, stop, _ in cut_copy_chunks(plan.source, max(list_bytes, int(plan.source.segment_bytes.max()))):
                for one in range(first, stop, LIST_ROWS):
                    yield plan.listed(one, min(one + LIST_ROWS, stop), at)


def _is_populated(pool: SourcePool) -> bool:
    """Return whether a pool of this daemon is in host memory that is all there."""
    return isinstance(pool, Pool) and isinstance(pool.region, HostRegion) and pool.region.is_populated


def _is_within_host(op: StartOp) -> bool:
    """Return whether an op needs no device."""
    return isinstance(_memory(op.source), HostRegion) and isinstance(_memory(op.destination), HostRegion)


def _region(pool: SourcePool) -> Region:
    """Return a pool's memory, mapped in this process.

    Raises:
        InternalError: it is not mapped.
    """
    region = _memory(pool)
    if region is None:
        raise InternalError(f"the memory of pool {pool.name!r} is not mapped here")
    return region


def _memory(pool: SourcePool) -> Region | None:
    return pool.region if isinstance(pool, Pool) else pool.mapping if isinstance(pool, RemotePool) else None

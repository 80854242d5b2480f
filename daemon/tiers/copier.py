"""Copies between pools and the arena: offloads and restores, done in steps on a few threads.

Before each step, which takes about a millisecond, a thread asks the scheduler. Between steps a job of a higher class
overtakes, and jobs of one class take turns. What is in host memory is copied by copy threads, which share a step of
some milliseconds, and stop in the middle of it while transfers copy; for devices, and where there are no copy threads,
a large job is spread over the threads here. A job that is alone, and a single step, the control loop gives to the
copy threads itself: on its way nothing waits for a thread that waits for Python's lock. On a device, the next step
is begun before the previous one is waited for. A restore compares checksums as it copies: where one is wrong it fails,
and its pages hold anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import structlog

from kvferry.daemon.process.thread_count import ThreadCount, Trial, length_of
from kvferry.daemon.process.time_slices import be_as_others, run_in_background
from kvferry.daemon.tiers.scheduler import OperationClass, Permit, Scheduler
from kvferry.pools import copy_kernel
from kvferry.pools.copy_kernel import CopyThreads, Hashing
from kvferry.pools.devices.base import NOTHING_PENDING, Hashed, Pending, Region
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.tiers.block_copies import hash_step, offload_copies, restore_copies
from kvferry.pools.tiers.blocks import BlockPages, BlockStep, BlockSteps
from kvferry.protocol.errors import CancelledError, InternalError, KvferryError, SnapshotDamagedError
from kvferry.protocol.ids import HOST

# -- shards: some blocks of a job, which one thread at a time copies, step by step.
#
# A block's checksum is XXH3-64 over all its bytes in the arena, including its zero padding, so that whoever stores a
# block can check it without knowing what a page is. Knows nothing of threads and scheduling.


Digests = npt.NDArray[np.uint64]
"""``(n,)`` uint64: the XXH3-64 of each block over its ``block_bytes``, in the order of the pages."""


Kind: TypeAlias = Literal["offload", "restore"]


class BlockSegment(NamedTuple):
    """The blocks of one page space of a pool. Errors name them by the layout's ``space``."""

    region: Region
    pages: BlockPages


class ShardStep(NamedTuple):
    """A step, with the index of its segment."""

    segment: int
    step: BlockStep


class Shard:
    """Blocks ``[first, stop)`` of each segment; steps are begun, and completed, in order."""

    def __init__(
        self,
        kind: Kind,
        segments: Sequence[BlockSegment],
        arena: HostRegion,
        digests: Sequence[Digests] | None,
        blocks: Iterable[tuple[int, int]],
    ) -> None:
        """Fill ``digests`` (of an offload) or compare with them (of a restore); None: no checksums."""
        self.kind = kind
        self._segments = segments
        self._arena = arena
        self._digests = digests
        self._hash = copy_kernel.new_hash()
        self._ahead: deque[tuple[int, BlockSteps]] = deque(
            (number, BlockSteps(segments[number].pages.layout, first, stop))
            for number, (first, stop) in enumerate(blocks)
            if first < stop
        )
        self._returned: ShardStep | None = None
        self._memory: memoryview | None = None

    @property
    def exhausted(self) -> bool:
        """Return whether all steps have been taken."""
        return self._returned is None and not self._ahead

    @property
    def device(self) -> str:
        """Return the device of the next step; not for an exhausted shard."""
        return self._segments[self._returned.segment if self._returned else self._ahead[0][0]].region.device

    @property
    def left_bytes(self) -> int:
        """Return the bytes of all steps that were not taken, or were put back."""
        returned = 0 if self._returned is None else self._returned.step.size_bytes
        return returned + sum([steps.left_bytes for _, steps in self._ahead])

    def take(self, step_bytes: int) -> ShardStep:
        """Return the next step, of about ``step_bytes``; not for an exhausted shard."""
        if self._returned is not None:
            step, self._returned = self._returned, None
            return step
        segment, steps = self._ahead[0]
        region, pages = self._segments[segment]
        taken = steps.take(step_bytes, region.most_blocks(pages.layout))
        assert taken is not None, self
        if steps.exhausted:
            self._ahead.popleft()
        return ShardStep(segment, taken)

    def put_back(self, step: ShardStep) -> None:
        """Undo a ``take``: the step becomes the next one."""
        self._returned = step

    def begin(self, step: ShardStep) -> Pending:
        """Begin a step, and hash it in the same pass where that can be done; see ``Region.begin_offload``."""
        region, pages = self._segments[step.segment]
        if self._digests is not None and isinstance(region, HostRegion):
            hashed = region.offload_hashed if self.kind == "offload" else region.restore_hashed
            return hashed(pages, step.step, self._arena.view(), self._hash)
        begin = region.begin_offload if self.kind == "offload" else region.begin_restore
        return begin(pages, step.step, self._arena.view())

    def submit(self, step: ShardStep, copy_threads: CopyThreads, threads: int) -> Pending:
        """Give a step in host memory to copy threads; once that has ended, it is completed with what this returns."""
        region, pages = self._segments[step.segment]
        assert isinstance(region, HostRegion)
        memory, arena = region.address, self._arena.address
        self._memory = memoryview(region.buffer)  # kept, so that it stays mapped
        if self.kind == "offload":
            copies, ends = offload_copies(memory, pages, step.step, arena)
        else:
            copies, ends = restore_copies(memory, pages, step.step, arena, hashed=self._digests is not None)
        if self._digests is None:
            copy_threads.submit(copies, threads, self)
            return NOTHING_PENDING
        digests = np.zeros(len(ends), np.uint64)
        copy_threads.submit(copies, threads, self, Hashing(ends, digests, self._hash))
        return Hashed(digests)

    def complete(self, step: ShardStep, pending: Pending) -> None:
        """Keep, or compare, the checksums of a step that has been copied; ``pending`` is what began it.

        Raises:
            SnapshotDamagedError: of a restore: a block's checksum is not the expected one.
        """
        if self._digests is None:
            return
        segment, (first, stop, _, _) = step
        pages = self._segments[segment].pages
        if isinstance(pending, Hashed):
            found = pending.digests
        else:
            found = hash_step(pages, step.step, self._arena.view(), self._hash)
        if not len(found):  # none of its blocks ends in it
            return
        if self.kind == "offload":
            self._digests[segment][first:stop] = found
            return
        expected = self._digests[segment][first:stop]
        if found.tobytes() != expected.tobytes():
            wrong = int(np.flatnonzero(found != expected)[0])
            block = first + wrong
            raise SnapshotDamagedError(
                f"block {block} of {len(pages.ids)} of space {pages.layout.space!r} has checksum "
                f"{int(found[wrong]):016x}, expected {int(expected[wrong]):016x}",
                field=f"{pages.layout.space}[{block}]",
            )


MIN_SHARD_BYTES: Final = 4 << 20
"""The minimum of a shard: less is not worth a second thread."""


def shards_of(
    kind: Kind, segments: Sequence[BlockSegment], arena: HostRegion, digests: Sequence[Digests] | None, max_shards: int
) -> list[Shard]:
    """Return a job's shards: at most ``max_shards``, as equal as possible, none empty."""
    total_bytes = sum(one.pages.total_bytes for one in segments)
    count = max(1, min(max_shards, total_bytes // MIN_SHARD_BYTES))
    sizes = [len(one.pages.ids) for one in segments]
    shards = []
    for number in range(count):
        blocks = [(size * number // count, size * (number + 1) // count) for size in sizes]
        shards.append(Shard(kind, segments, arena, digests, blocks))
    return [one for one in shards if not one.exhausted]


__all__ = ["BlockJob", "BlockSegment", "Digests", "TierCopier"]

STEP_S: Final = 0.8e-3
COPY_THREADS_STEP_S: Final = 8e-3
"""Of steps of copy threads, which stop while transfers copy: what a step costs besides its bytes is some 0.1 ms."""
WITH_THE_LAST: Final = 1.5
"""Of a step of copy threads: what is left of a shard goes in one, where that is no larger."""
MIN_STEP_BYTES: Final = 256 << 10
MAX_STEP_BYTES: Final = 16 << 20
MAX_COPY_THREADS_STEP_BYTES: Final = 64 << 20
FIRST_STEP_BYTES: Final = 2 << 20
SUBMITTED_ROWS: Final = 4096
"""How many copies the control loop may expand for a job: some 0.2 ms."""
NEW_SPEED_WEIGHT: Final = 0.3
"""Weight of the latest step in the running average of a device's speed."""

log = structlog.get_logger(__name__)


class BlockJob:
    """One offload or restore. Its arrays and memory must not change between ``start`` and ``on_done``.

    Attributes:
        kind: the direction.
        operation_class: RESTORE for a restore, OFFLOAD for an offload.
        total_bytes: how many of the arena's it reads or writes.
        copies: how many it makes: one for each block's part of an entry.
        segments: one per page space; a region may occur several times.
        arena: the memory that holds the blocks.
        checksums: whether an offload computes checksums.
        digests: per segment. Of an offload: None until it is done, and always without checksums. Of a restore: the
            digests that the caller expects; None where they are not known.
    """

    def __init__(
        self,
        kind: Kind,
        segments: Sequence[BlockSegment],
        arena: HostRegion,
        *,
        checksums: bool = True,
        digests: Sequence[Digests] | None = None,
    ) -> None:
        """Check the lengths and ranges of the lists again.

        Raises:
            InternalError: they are inconsistent; see ``BlockPages.check``.
        """
        self.kind = kind
        self.segments = tuple(segments)
        self.arena = arena
        self.checksums = checksums
        self.digests = None if digests is None else tuple(digests)
        self.operation_class = OperationClass.RESTORE if kind == "restore" else OperationClass.OFFLOAD
        self.total_bytes = self.copies = 0
        for _, pages in self.segments:
            pages.check(arena.size_bytes)
            self.total_bytes += pages.total_bytes
            self.copies += len(pages.ids) * len(pages.layout.entries)
        counts = [len(digests) for digests in self.digests or ()]
        if self.digests is not None and counts != [len(segment.pages.ids) for segment in self.segments]:
            raise InternalError(f"checksums of {counts} blocks for {self!r}")

    def __repr__(self) -> str:
        """Show kind and size."""
        return f"<BlockJob {self.kind} blocks={[len(one.pages.ids) for one in self.segments]} {self.total_bytes} bytes>"

    @property
    def hashed(self) -> bool:
        """Return whether checksums are computed."""
        return self.digests is not None if self.kind == "restore" else self.checksums

    @property
    def device(self) -> str:
        """Return the device of the pools; a job with blocks of several has the first one's."""
        return self.segments[0].region.device if self.segments else HOST


OnJobDone = Callable[[BlockJob, KvferryError | None], None]
"""Called on the control loop, once per job, with the job and its error."""


class _Running:
    """A job with its unfinished shards and its first error. Guarded by the copier's lock."""

    def __init__(self, job: BlockJob, on_done: OnJobDone, trial: Trial) -> None:
        self.on_done = on_done
        self.job = job
        self.trial = trial
        self.memory = job.arena.view()  # keeps it mapped
        self.error: KvferryError | None = None
        self.open_shards = 0
        self.digests = job.digests
        if job.kind == "offload":
            empty = (np.zeros(len(one.pages.ids), np.uint64) for one in job.segments)
            self.digests = tuple(empty) if job.checksums else None


class _Slot(NamedTuple):
    """A shard that waits for a thread or is held by one."""

    running: _Running
    shard: Shard


class _InFlightStep(NamedTuple):
    """A step that has begun and is not completed."""

    slot: _Slot
    step: ShardStep
    pending: Pending
    permit: Permit
    began_s: float
    transfers: int | None
    """How many had begun when it did: another one since may have stopped it. None: it stops for none."""


class TierCopier:
    """Runs jobs on its threads. All public methods are for the control loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        scheduler: Scheduler,
        *,
        threads: int,
        clock: Callable[[], float] = time.perf_counter,
        copy_threads: CopyThreads | None = None,
    ) -> None:
        """``copy_threads``: what copies in host memory; None: the threads here do it themselves, in the background."""
        self._loop = loop
        self._clock = clock
        self._scheduler = scheduler
        self._running: dict[int, _Running] = {}
        self._alone: _Running | None = None
        self._thread_count = ThreadCount(threads)
        self._arena_bytes = 0
        self._copy_threads = copy_threads
        self._submitted: _InFlightStep | None = None
        self._processors = len(os.sched_getaffinity(0))
        self._queues: dict[OperationClass, deque[_Slot]] = {one: deque() for one in OperationClass}
        self._changed = threading.Condition()
        self._closing = False
        self._speeds: dict[tuple[Kind, str], float] = {}
        self._threads = [threading.Thread(target=self._work, name=f"tier-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()
        if copy_threads is not None:
            loop.add_reader(copy_threads.fileno(), self._submitted_ended, copy_threads)

    def __repr__(self) -> str:
        """Show the number of jobs and threads."""
        return f"<TierCopier jobs={len(self._running)} threads={len(self._threads)}>"

    def start(self, job: BlockJob, on_done: OnJobDone) -> None:
        """Run a job. ``on_done`` is called once, on the loop, never from within this call.

        It reports SnapshotDamagedError (a restore), CancelledError (``stop``), DeviceLostError or InternalError. Once
        it is called, no byte of the job moves any more, unless the device was lost.
        """
        grew = self._has_grown(job.arena)  # the first access to memory takes longer than any copy: that is no trial
        alone = not self._running and self._scheduler.quiet and not grew
        kind = (job.kind, job.hashed, job.device, length_of(job.total_bytes, job.copies))
        running = _Running(job, on_done, self._thread_count.begin(kind, job.total_bytes, alone=alone))
        self._alone = running if alone else None
        copy_threads = self._copy_threads
        if copy_threads is not None and self._may_submit(job, copy_threads) and self._submit(running, copy_threads):
            return
        most = 1 if self._copy_threads is not None and self._copy_threads_share(job) else running.trial.threads
        shards = shards_of(job.kind, job.segments, job.arena, running.digests, most)
        with self._changed:
            self._running[id(job)] = running
            running.open_shards = len(shards)
            self._queues[job.operation_class].extend(_Slot(running, one) for one in shards)
            self._changed.notify(len(shards))
        if not shards:
            self._loop.call_soon(self._report, running)
            return
        self._scheduler.wake()  # threads that wait with a lower class's shard should take this one

    def _may_submit(self, job: BlockJob, copy_threads: CopyThreads) -> bool:
        """Return whether the loop gives a job to copy threads if it may begin: alone, a single step, in host memory."""
        if self._running or len(job.segments) != 1 or (job.hashed and not copy_threads.hashes):
            return False
        if not isinstance(job.segments[0].region, HostRegion):
            return False
        return job.copies <= SUBMITTED_ROWS and 0 < job.total_bytes <= self._step_bytes(job.kind, HOST, job.total_bytes)

    def _submit(self, running: _Running, copy_threads: CopyThreads) -> bool:
        """Give a job to the copy threads; return False, and do nothing, where it may not begin at once."""
        job = running.job
        [(_, pages)] = job.segments
        shard = Shard(job.kind, job.segments, job.arena, running.digests, [(0, len(pages.ids))])
        permit = self._scheduler.try_begin(job.operation_class, shard.left_bytes)
        if permit is None:
            return False
        with self._changed:
            self._running[id(job)] = running
            running.open_shards = 1
        slot = _Slot(running, shard)
        self._submitted = self._begin(slot, shard.take(shard.left_bytes), permit, kept=False, copy_threads=copy_threads)
        return True

    def _submitted_ended(self, copy_threads: CopyThreads) -> None:
        if copy_threads.take_ended() and self._submitted is not None:
            in_flight, self._submitted = self._submitted, None
            self._complete(in_flight, 0.0, keep=True)  # it was the only step of the only shard
            self._report(in_flight.slot.running)

    def _has_grown(self, arena: HostRegion) -> bool:
        """Return whether the arena has another amount of memory than when this was last asked."""
        before, self._arena_bytes = self._arena_bytes, arena.size_bytes if arena.is_populated else arena.allocated_bytes
        return self._arena_bytes != before

    def stop(self, job: BlockJob) -> None:
        """End a job soon; it reports CancelledError unless it completes before that. A job that is done is ignored."""
        running = self._running.get(id(job))
        if running is not None:
            self._fail(running, CancelledError("stopped before all bytes were copied"))

    def close(self) -> None:
        """End all threads after the steps in progress; jobs not reported by then are never reported."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._scheduler.wake()
        for thread in self._threads:
            thread.join()
        if self._copy_threads is not None:
            self._copy_threads.withdraw_all()
            self._loop.call_soon_threadsafe(self._stop_listening, self._copy_threads)

    def _stop_listening(self, copy_threads: CopyThreads) -> None:
        self._loop.remove_reader(copy_threads.fileno())
        copy_threads.take_ended()

    # -- threads

    def _work(self) -> None:
        if self._copy_threads is None:
            run_in_background()
        else:
            be_as_others()
        with contextlib.nullcontext() if self._copy_threads is None else self._copy_threads.serving():
            self._take_steps()

    def _take_steps(self) -> None:
        """Begin steps and complete them; at most one step is in flight while the next one begins."""
        in_flight: _InFlightStep | None = None
        done_s = 0.0
        while True:
            slot = self._next(in_flight)
            if slot is None and in_flight is None:
                return
            begun: _InFlightStep | None = None
            if slot is not None:
                shard = slot.shard
                step = shard.take(self._step_bytes(shard.kind, shard.device, shard.left_bytes))
                permit = self._scheduler.try_begin(slot.running.job.operation_class, step.step.size_bytes)
                if permit is None:
                    if in_flight is not None:  # complete it first: else this thread might wait for itself
                        done_s = self._complete(in_flight, done_s, keep=in_flight.slot is slot)
                        in_flight = None
                    permit = self._wait_for(slot, step)
                    if permit is None:
                        continue
                begun = self._begin(slot, step, permit, kept=in_flight is not None and in_flight.slot is slot)
            if in_flight is not None:
                done_s = self._complete(in_flight, done_s, keep=begun is not None and begun.slot is in_flight.slot)
            in_flight = begun
            if in_flight is not None and in_flight.pending.done:
                done_s = self._complete(in_flight, done_s, keep=False)
                in_flight = None

    def _next(self, in_flight: _InFlightStep | None) -> _Slot | None:
        """Return the next slot, waiting for one if nothing is in flight; None where there is nothing to begin."""
        own = in_flight.slot if in_flight is not None else None
        with self._changed:
            if own is not None and (own.shard.exhausted or own.running.error is not None):
                own = None
            while not self._closing:
                for operation_class in OperationClass:
                    if self._queues[operation_class]:
                        return self._queues[operation_class].popleft()
                    if own is not None and own.running.job.operation_class is operation_class:
                        return own
                if in_flight is not None:
                    return None
                self._changed.wait()
        return None

    def _wait_for(self, slot: _Slot, step: ShardStep) -> Permit | None:
        """Wait until the step may begin. Return None, with the shard released, once there is no point in waiting."""
        permit = self._scheduler.begin(
            slot.running.job.operation_class, step.step.size_bytes, lambda: self._should_stop_waiting(slot)
        )
        if permit is None:
            slot.shard.put_back(step)
            self._release(slot)
        return permit

    def _begin(
        self, slot: _Slot, step: ShardStep, permit: Permit, *, kept: bool, copy_threads: CopyThreads | None = None
    ) -> _InFlightStep | None:
        """Begin a step, or give it to ``copy_threads``. On error, fail the job; release the shard if not ``kept``."""
        began_s = self._clock()
        # What stands still says nothing of how fast it is; a step that starts despite transfers does not.
        transfers = self._scheduler.transfers_begun if permit.patience_s else None
        threads = self._threads_for(slot.running)
        if self._copy_threads is not None and copy_threads is None:
            self._copy_threads.serve(threads)
        try:
            with self._scheduler.giving_way(permit):
                pending = slot.shard.submit(step, copy_threads, threads) if copy_threads else slot.shard.begin(step)
                return _InFlightStep(slot, step, pending, permit, began_s, transfers)
        except Exception as cause:  # noqa: BLE001  a thread that dies would leave its job unreported forever
            self._scheduler.end(slot.running.job.operation_class, step.step.size_bytes)
            self._fail(slot.running, _as_kvferry_error(cause))
            if not kept:
                self._release(slot)
            return None

    def _complete(self, in_flight: _InFlightStep, done_s: float, *, keep: bool) -> float:
        """Wait for a step, complete it, release its shard unless ``keep``; return the time of completion."""
        slot, step = in_flight.slot, in_flight.step
        size_bytes = step.step.size_bytes
        try:
            in_flight.pending.wait()
            with self._scheduler.giving_way(in_flight.permit):
                slot.shard.complete(step, in_flight.pending)
        except Exception as cause:  # noqa: BLE001
            self._fail(slot.running, _as_kvferry_error(cause))
        finally:
            self._scheduler.end(slot.running.job.operation_class, size_bytes)
        now_s = self._clock()
        if not keep:
            self._release(slot)
        if in_flight.transfers not in {None, self._scheduler.transfers_begun}:
            return now_s
        key = (slot.shard.kind, slot.running.job.segments[step.segment].region.device)
        speed = size_bytes / max(now_s - max(in_flight.began_s, done_s), 1e-6)
        self._speeds[key] = NEW_SPEED_WEIGHT * speed + (1 - NEW_SPEED_WEIGHT) * self._speeds.get(key, speed)
        return now_s

    def _step_bytes(self, kind: Kind, device: str, left_bytes: int) -> int:
        """Return the size of the next step: a multiple of MIN_STEP_BYTES, so that blocks are always cut alike."""
        speed = self._speeds.get((kind, device))
        if speed is None:
            return FIRST_STEP_BYTES
        if device != HOST or self._copy_threads is None or self._scheduler.transfers:
            return _bytes_of(speed * STEP_S, MAX_STEP_BYTES)
        step_bytes = _bytes_of(speed * COPY_THREADS_STEP_S, MAX_COPY_THREADS_STEP_BYTES)
        if left_bytes <= min(WITH_THE_LAST * step_bytes, MAX_COPY_THREADS_STEP_BYTES):
            return _bytes_of(left_bytes + MIN_STEP_BYTES - 1, MAX_COPY_THREADS_STEP_BYTES)
        return step_bytes

    @staticmethod
    def _copy_threads_share(job: BlockJob) -> bool:
        """Return whether copy threads share each of a job's steps: whole blocks in host memory, many a step."""
        largest_bytes = max((one.pages.layout.block_bytes for one in job.segments), default=0)
        return job.device == HOST and largest_bytes <= MIN_SHARD_BYTES

    def _threads_for(self, running: _Running) -> int:
        """Return how many copy threads share the next step: while transfers are about, a processor is left to them."""
        threads = running.trial.threads
        return threads if self._scheduler.quiet else min(threads, max(1, self._processors - 1))

    def _should_stop_waiting(self, slot: _Slot) -> bool:
        """Return whether to stop waiting for a shard's turn. Called with the scheduler locked, so it takes no lock."""
        if self._closing or slot.running.error is not None:
            return True
        return any(self._queues[one] for one in OperationClass if one < slot.running.job.operation_class)

    # -- slots

    def _release(self, slot: _Slot) -> None:
        """Queue a shard again, or end it where it is exhausted or its job has failed."""
        with self._changed:
            if slot.running.error is None and not slot.shard.exhausted:
                self._queues[slot.running.job.operation_class].append(slot)
                self._changed.notify()
                return
            slot.running.open_shards -= 1
            ended = not slot.running.open_shards and not self._closing
        if ended:
            self._loop.call_soon_threadsafe(self._report, slot.running)

    def _fail(self, running: _Running, error: KvferryError) -> None:
        """Record a job's first error. Its queued shards end here, those held by threads with their current step."""
        with self._changed:
            if running.error is not None:
                return
            running.error = error
            queue = self._queues[running.job.operation_class]
            waiting = [one for one in queue if one.running is running]
            for one in waiting:
                queue.remove(one)
            running.open_shards -= len(waiting)
            ended = bool(waiting) and not running.open_shards and not self._closing
        if ended:
            self._loop.call_soon_threadsafe(self._report, running)
        self._scheduler.wake()

    def _report(self, running: _Running) -> None:
        if self._closing or self._running.pop(id(running.job), None) is None:
            return
        if running.error is None:
            running.job.digests = running.digests
            if running is self._alone and self._scheduler.quiet and not self._has_grown(running.job.arena):
                self._thread_count.end(running.trial)
        running.on_done(running.job, running.error)


def _bytes_of(step_bytes: float, most: int) -> int:
    """Return the size of a step, a multiple of MIN_STEP_BYTES."""
    return int(min(max(step_bytes // MIN_STEP_BYTES * MIN_STEP_BYTES, MIN_STEP_BYTES), most))


def _as_kvferry_error(cause: Exception) -> KvferryError:
    if isinstance(cause, KvferryError):
        return cause
    log.error("a copy between tiers failed", exc_info=cause)
    return InternalError(f"the copy failed: {type(cause).__name__}: {cause}")

"""Copies between pools and the arena: offload and restore, step by step, on a few threads.

A thread asks the scheduler before each step, which takes about a millisecond. A job of a higher class overtakes between
steps, jobs of one class take turns, and a large one has several threads if they are idle. Where a card works, the next
step is begun before the last one is waited for. Of a restore all checksums are looked at before any page is written.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
import structlog

from kvferry.daemon.scheduler import Scheduler, WorkClass
from kvferry.daemon.tiers.lanes import BlockPart, Digests, Lane, LaneStep, Phase, lanes_of
from kvferry.pools.devices.base import Arena, Pending
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.errors import CancelledError, InternalError, KvferryError

__all__ = ["BlockJob", "BlockPart", "Digests", "TierCopier"]

STEP_S: Final = 0.8e-3
MIN_STEP_BYTES: Final = 256 << 10
MAX_STEP_BYTES: Final = 16 << 20
FIRST_STEP_BYTES: Final = 2 << 20
NEWS_WEIGHT: Final = 0.3
"""How much a step's speed says of the next one's; the rest is what was known before."""

NICE: Final = 10
"""Of the threads: where cores are short, a step that has begun does not keep a hand-off from its own."""

log = structlog.get_logger(__name__)


class BlockJob:
    """One offload or restore. Neither its arrays nor its memory may change from ``start`` to ``on_done``.

    Attributes:
        kind: which way.
        work_class: by default RESTORE for a restore, OFFLOAD for an offload.
        parts: one a page space; a region may come several times.
        arena: where the blocks lie.
        checksums: whether an offload makes checksums.
        digests: of each part. Of an offload: None until it is done, and for ever without checksums. Of a restore: what
            the blocks have to have, given by the caller; None where nobody knows them.
    """

    def __init__(
        self,
        kind: Literal["offload", "restore"],
        parts: Sequence[BlockPart],
        arena: HostRegion,
        *,
        checksums: bool = True,
        digests: Sequence[Digests] | None = None,
        work_class: WorkClass | None = None,
    ) -> None:
        """Check the lists' lengths and ranges once more.

        Raises:
            InternalError: they cannot be; see ``BlockPages.check``.
        """
        self.kind = kind
        self.parts = tuple(parts)
        self.arena = arena
        self.checksums = checksums
        self.digests = None if digests is None else tuple(digests)
        default = WorkClass.RESTORE if kind == "restore" else WorkClass.OFFLOAD
        self.work_class = default if work_class is None else work_class
        for one in self.parts:
            one.pages.check(arena.size_bytes)
        known = [len(one) for one in self.digests or ()]
        if self.digests is not None and known != [len(one.pages.ids) for one in self.parts]:
            raise InternalError(f"checksums of {known} blocks for {self!r}")

    def __repr__(self) -> str:
        """Show kind and size."""
        return f"<BlockJob {self.kind} blocks={[len(one.pages.ids) for one in self.parts]} {self.total_bytes} bytes>"

    @property
    def total_bytes(self) -> int:
        """Return how many bytes of the arena it fills or reads."""
        return sum(one.pages.total_bytes for one in self.parts)


class _Running:
    """A job, its phases to come, its lanes that are not over, and the first error. Guarded by the copier's lock."""

    def __init__(self, job: BlockJob) -> None:
        self.job = job
        self.arena: Arena = job.arena.view()  # keeps the memory mapped
        self.error: KvferryError | None = None
        self.open_lanes = 0
        self.made: tuple[Digests, ...] | None = None
        self.phases: deque[Phase] = deque()
        if job.kind == "offload":
            self.phases.append(Phase.OFFLOAD)
            if job.checksums:
                self.made = tuple(np.zeros(len(one.pages.ids), np.uint64) for one in job.parts)
        else:
            self.phases.extend([Phase.RESTORE] if job.digests is None else [Phase.VERIFY, Phase.RESTORE])

    def next_lanes(self, most: int) -> list[Lane]:
        """Return the next phase's lanes; none after the last one, and after an error."""
        while self.phases and self.error is None:
            digests = self.made if self.job.kind == "offload" else self.job.digests
            lanes = lanes_of(self.phases.popleft(), self.job.parts, self.arena, digests, most)
            if lanes:
                return lanes
        return []


class _Turn(NamedTuple):
    """A lane that waits for a thread, or that one has."""

    running: _Running
    lane: Lane


class _Flight(NamedTuple):
    """A step that has begun."""

    turn: _Turn
    step: LaneStep
    pending: Pending
    began_s: float


class TierCopier:
    """Runs jobs; everything but its threads is for the control loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_done: Callable[[BlockJob, KvferryError | None], None],
        scheduler: Scheduler,
        *,
        threads: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._on_done = on_done
        self._scheduler = scheduler
        self._running: dict[int, _Running] = {}
        self._queues: dict[WorkClass, deque[_Turn]] = {one: deque() for one in WorkClass}
        self._changed = threading.Condition()
        self._closing = False
        self._speeds: dict[tuple[Phase, str], float] = {}
        self._threads = [threading.Thread(target=self._work, name=f"tier-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        """Show how many jobs are under way."""
        return f"<TierCopier jobs={len(self._running)} threads={len(self._threads)}>"

    def start(self, job: BlockJob) -> None:
        """Run a job; ``on_done`` is called once for it on the loop, never from within this call.

        Errors that it reports: SnapshotDamagedError (a restore; no page was written), CancelledError (``stop``),
        DeviceLostError, InternalError. After it no byte of the job moves any more, unless the device is lost.
        """
        running = _Running(job)
        with self._changed:
            self._running[id(job)] = running
            self._go_on(running)
        self._scheduler.wake()  # a thread that waits for a lower class's turn may have to leave it

    def stop(self, job: BlockJob) -> None:
        """End a job soon; it is reported with CancelledError, unless it is done before. Nothing for one that is."""
        running = self._running.get(id(job))
        if running is not None:
            self._fail(running, CancelledError("it was stopped before all was copied"))

    def close(self) -> None:
        """End all threads after the steps that have begun; what has not been reported is not reported any more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._scheduler.wake()
        for thread in self._threads:
            thread.join()

    # -- threads

    def _work(self) -> None:
        """Begin steps and complete them, one of each at a time."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # Linux: of this thread alone
        flight: _Flight | None = None
        done_s = 0.0
        while True:
            turn = self._next(flight)
            if turn is None and flight is None:
                return
            begun: _Flight | None = None
            if turn is not None:
                step = turn.lane.take(self._step_bytes(turn.lane))
                if not self._scheduler.try_begin(turn.running.job.work_class, step.step.size_bytes):
                    if flight is not None:  # ended first: else this thread might wait for itself
                        done_s = self._complete(flight, done_s, keep=flight.turn is turn)
                        flight = None
                    if not self._wait_for(turn, step):
                        continue
                begun = self._begin(turn, step, kept=flight is not None and flight.turn is turn)
            if flight is not None:
                done_s = self._complete(flight, done_s, keep=begun is not None and begun.turn is flight.turn)
            flight = begun
            if flight is not None and flight.pending.done:
                done_s = self._complete(flight, done_s, keep=False)
                flight = None

    def _next(self, flight: _Flight | None) -> _Turn | None:
        """Return whose turn it is, if need be after a wait; None where nothing is to be begun."""
        own = flight.turn if flight is not None else None
        with self._changed:
            if own is not None and (own.lane.exhausted or own.running.error is not None):
                own = None
            while not self._closing:
                for work_class in WorkClass:
                    if self._queues[work_class]:
                        return self._queues[work_class].popleft()
                    if own is not None and own.running.job.work_class is work_class:
                        return own
                if flight is not None:
                    return None
                self._changed.wait()
        return None

    def _wait_for(self, turn: _Turn, step: LaneStep) -> bool:
        """Wait until a step may begin; return False, having let go of the lane, once that is not worth it any more."""
        granted = self._scheduler.begin(turn.running.job.work_class, step.step.size_bytes, lambda: self._leaves(turn))
        if not granted:
            turn.lane.put_back(step)
            self._let_go(turn)
        return granted

    def _begin(self, turn: _Turn, step: LaneStep, *, kept: bool) -> _Flight | None:
        """Begin a step; on an error end it, and let go of the lane unless it is ``kept``."""
        began_s = self._clock()
        try:
            return _Flight(turn, step, turn.lane.begin(step), began_s)
        except Exception as cause:  # noqa: BLE001  a thread that dies would leave its job unreported for ever
            self._scheduler.end(turn.running.job.work_class, step.step.size_bytes)
            self._fail(turn.running, _as_ours(cause))
            if not kept:
                self._let_go(turn)
            return None

    def _complete(self, flight: _Flight, done_s: float, *, keep: bool) -> float:
        """Wait for a step, do what is left of it, and let go of its lane unless it is kept; return when it was over."""
        turn, step = flight.turn, flight.step
        size_bytes = step.step.size_bytes
        try:
            flight.pending.wait()
            turn.lane.complete(step)
        except Exception as cause:  # noqa: BLE001
            self._fail(turn.running, _as_ours(cause))
        finally:
            self._scheduler.end(turn.running.job.work_class, size_bytes)
        now_s = self._clock()
        key = (turn.lane.phase, turn.running.job.parts[step.part].region.device)
        speed = size_bytes / max(now_s - max(flight.began_s, done_s), 1e-6)
        self._speeds[key] = NEWS_WEIGHT * speed + (1 - NEWS_WEIGHT) * self._speeds.get(key, speed)
        if not keep:
            self._let_go(turn)
        return now_s

    def _step_bytes(self, lane: Lane) -> int:
        """Return how much the next step has: in whole MIN_STEP_BYTES, so that blocks are cut where others were."""
        speed = self._speeds.get((lane.phase, lane.device))
        if speed is None:
            return FIRST_STEP_BYTES
        return int(min(max(speed * STEP_S // MIN_STEP_BYTES * MIN_STEP_BYTES, MIN_STEP_BYTES), MAX_STEP_BYTES))

    def _leaves(self, turn: _Turn) -> bool:
        """Return whether to wait for a lane's turn no longer. Called with the scheduler locked: takes no lock."""
        if self._closing or turn.running.error is not None:
            return True
        return any(self._queues[one] for one in WorkClass if one < turn.running.job.work_class)

    # -- turns

    def _let_go(self, turn: _Turn) -> None:
        """Queue a lane that this thread has nothing more to do with, or end it."""
        with self._changed:
            if turn.running.error is None and not turn.lane.exhausted:
                self._queues[turn.running.job.work_class].append(turn)
                self._changed.notify()
                return
            turn.running.open_lanes -= 1
            if not turn.running.open_lanes:
                self._go_on(turn.running)

    def _go_on(self, running: _Running) -> None:
        """Begin a job's next phase, or report it after its last one. Needs the lock; no lane of it is open."""
        lanes = running.next_lanes(len(self._threads))
        running.open_lanes = len(lanes)
        self._queues[running.job.work_class].extend(_Turn(running, one) for one in lanes)
        self._changed.notify(len(lanes))
        if not lanes and not self._closing:
            self._loop.call_soon_threadsafe(self._report, running)

    def _fail(self, running: _Running, error: KvferryError) -> None:
        """Note the first error; lanes that no thread has end here, the others with their step."""
        with self._changed:
            if running.error is not None:
                return
            running.error = error
            queue = self._queues[running.job.work_class]
            waiting = [one for one in queue if one.running is running]
            for one in waiting:
                queue.remove(one)
            running.open_lanes -= len(waiting)
            if waiting and not running.open_lanes:
                self._go_on(running)
        self._scheduler.wake()

    def _report(self, running: _Running) -> None:
        if self._closing or self._running.pop(id(running.job), None) is None:
            return
        if running.error is None and running.made is not None:
            running.job.digests = running.made
        self._on_done(running.job, running.error)


def _as_ours(cause: Exception) -> KvferryError:
    if isinstance(cause, KvferryError):
        return cause
    log.error("a copy between tiers failed", exc_info=cause)
    return InternalError(f"the copy failed: {type(cause).__name__}: {cause}")

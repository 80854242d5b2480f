"""Whose turn it is, against an oracle that looks at everything again after each change; and threads that wait."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.daemon.tiers.scheduler import QUIET_S, OperationClass, Permit, Scheduler
from kvferry.pools import copy_kernel

WAIT_S = 30.0
PATIENCE_S = 0.1
MIB = 1 << 20
BOUNDS = {OperationClass.RESTORE: 4 * MIB, OperationClass.OFFLOAD: 2 * MIB, OperationClass.DEMOTION: MIB}
RESTORE, OFFLOAD, DEMOTION = OperationClass


class Oracle:
    """All that may start does, the most urgent and oldest first, until nothing changes any more."""

    def __init__(self) -> None:
        self.waiting: list[tuple[OperationClass, int, int, float]] = []  # class, number, size, since
        self.running: dict[int, tuple[OperationClass, int]] = {}
        self.transfers = 0
        self.last_patient_s = float("-inf")
        self.quiet_from_s = float("-inf")

    def settle(self, now_s: float) -> None:
        while self.waiting:
            first = min(self.waiting)
            operation_class, number, size, since = first
            mine = sum(one[1] for one in self.running.values() if one[0] is operation_class)
            if self.transfers:
                if self.running or now_s < max(since, self.last_patient_s) + PATIENCE_S:
                    return
                self.last_patient_s = now_s
            elif mine and mine + size > BOUNDS[operation_class]:
                return
            self.waiting.remove(first)
            self.running[number] = (operation_class, size)


OPERATIONS = st.lists(
    st.tuples(st.just("ask"), st.sampled_from(OperationClass), st.sampled_from([1, MIB, 3 * MIB, 9 * MIB]))
    | st.tuples(st.sampled_from(["end", "cancel"]), st.integers(0, 9), st.just(0))
    | st.tuples(st.just("pass"), st.sampled_from([0.04, 0.1, 0.3]), st.just(0))
    | st.tuples(st.sampled_from(["began", "ended"]), st.just(0), st.just(0)),
    max_size=40,
)


async def settled() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


@given(OPERATIONS)
@example([("began", 0, 0), ("ask", 0, 1), ("ask", 1, 1), ("pass", 0.3, 0), ("end", 0, 0), ("pass", 0.1, 0)])
@example([("began", 0, 0), ("ask", 0, 1), ("ask", 1, 1), ("ended", 0, 0), ("pass", 0.1, 0)])
@example([("ask", 0, 9 * MIB), ("ask", 0, 1), ("ask", 1, 1), ("cancel", 0, 0)])
def test_what_may_start_does_and_nothing_else(operations: list[tuple[str, float, int]]) -> None:
    async def run() -> None:
        clock, oracle, numbers = SimpleNamespace(now_s=100.0), Oracle(), count()
        scheduler = Scheduler(BOUNDS, patience_s=PATIENCE_S, clock=lambda: clock.now_s)
        tasks: dict[int, asyncio.Task[bool]] = {}
        for name, what, size in operations:
            if name == "ask":
                number, operation_class = next(numbers), OperationClass(int(what))
                tasks[number] = asyncio.create_task(scheduler.begin_async(operation_class, size))
                oracle.waiting.append((operation_class, number, size, clock.now_s))
                await settled()
            elif name == "end" and oracle.running:
                number = sorted(oracle.running)[int(what) % len(oracle.running)]
                scheduler.end(*oracle.running.pop(number))
            elif name == "cancel" and oracle.waiting:
                _, number, *_ = oracle.waiting.pop(int(what) % len(oracle.waiting))
                tasks.pop(number).cancel()
            elif name == "pass":
                clock.now_s += what
                scheduler.wake()
            elif name == "began":
                scheduler.transfer_began()
                oracle.transfers += 1
            elif name == "ended" and oracle.transfers:
                scheduler.transfer_ended()
                oracle.transfers -= 1
                oracle.quiet_from_s = clock.now_s + QUIET_S
            oracle.settle(clock.now_s)
            await settled()
            waiting = {one[1] for one in oracle.waiting}
            assert {number for number, task in tasks.items() if not task.done()} == waiting
            assert scheduler.bytes_in_flight == sum(size for _, size in oracle.running.values())
            assert scheduler.transfers == oracle.transfers
            assert scheduler.quiet == (not oracle.transfers and clock.now_s > oracle.quiet_from_s), "or soon after one"
        scheduler.close()
        assert not any([await tasks[one[1]] for one in oracle.waiting]), "closed"

    asyncio.run(run())


# -- threads


class Asking:
    """A thread that asks for a turn; ``start`` returns once it waits, or has its answer."""

    def __init__(self, scheduler: Scheduler, executor: ThreadPoolExecutor) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self.stop = False

    def start(self, operation_class: OperationClass, size_bytes: int = 1) -> Future[Permit | None]:
        asked = threading.Event()

        def stopped() -> bool:
            asked.set()
            return self.stop

        answer = self._executor.submit(self._scheduler.begin, operation_class, size_bytes, stopped)
        assert asked.wait(WAIT_S)
        self._scheduler.try_begin(operation_class, 1 << 60)  # takes its lock: the thread has gone on to wait
        return answer


@pytest.fixture
def executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(8)


def scheduler_of(**options: object) -> Scheduler:
    made = Scheduler(BOUNDS, **options)  # type: ignore[arg-type]
    for operation_class in OperationClass:  # one chunk of each is under way, so that bounds count
        assert made.try_begin(operation_class, 1)
    return made


def test_what_copies_already_stops_while_a_transfer_is_under_way(executor: ThreadPoolExecutor) -> None:
    scheduler = Scheduler(BOUNDS, patience_s=0)
    permit = scheduler.try_begin(OFFLOAD, 1)
    assert permit is not None
    source, destination = np.ones(4 << 20, np.uint8), np.zeros(4 << 20, np.uint8)
    copies = np.array([[source.ctypes.data, destination.ctypes.data, source.nbytes]], np.uint64)
    thread: list[int] = []

    def copy_on() -> float:
        with scheduler.giving_way(permit):
            thread.append(threading.get_native_id())
            copy_kernel.copy(copies)
        return time.monotonic()

    scheduler.transfer_began()
    scheduler.transfer_began()
    copying = executor.submit(copy_on)
    wait_until_asleep(thread, copying)
    scheduler.transfer_ended()
    assert not destination.any(), "one transfer is still under way"
    opened_s = time.monotonic()
    scheduler.transfer_ended()
    assert copying.result(WAIT_S) >= opened_s
    assert (destination == source).all()
    scheduler.close()
    scheduler.transfer_began()
    assert executor.submit(copy_on).result(WAIT_S), "a scheduler that is closed stops nobody"


def wait_until_asleep(thread: list[int], done: Future[float]) -> None:
    """Return once the thread whose id that becomes sleeps for long, or is done."""
    asleep = 0
    while asleep < 1000 and not done.done():
        is_asleep = bool(thread) and Path(f"/proc/self/task/{thread[0]}/stat").read_text().rsplit(") ", 1)[1][0] == "S"
        asleep = asleep + 1 if is_asleep else 0
        os.sched_yield()


def test_a_chunk_that_has_waited_begins_without_a_word(executor: ThreadPoolExecutor) -> None:
    scheduler = Scheduler(BOUNDS, patience_s=0.01)
    assert scheduler.try_begin(OFFLOAD, 1) == Permit(0.01)
    scheduler.end(OFFLOAD, 1)
    scheduler.transfer_began()
    waited = executor.submit(scheduler.begin, OFFLOAD, 1).result(WAIT_S)
    assert waited == Permit(0.0), "it does not stand still for as long again"
    scheduler.end(OFFLOAD, 1)
    assert asyncio.run(scheduler.begin_async(DEMOTION, 1))
    assert scheduler.transfers == 1


def test_a_transfer_that_begins_later_does_not_take_patience_away(executor: ThreadPoolExecutor) -> None:
    """Who waits for bytes alone, for ever, has to wait for the time as well from then on."""
    scheduler = Scheduler(BOUNDS, patience_s=0.01)
    assert scheduler.try_begin(OFFLOAD, 2 * MIB)
    answer = Asking(scheduler, executor).start(OFFLOAD)
    scheduler.end(OFFLOAD, 0)
    assert not answer.done()
    scheduler.transfer_began()
    scheduler.end(OFFLOAD, 2 * MIB)
    assert answer.result(WAIT_S)


@pytest.mark.parametrize("end", ["stop", "close"])
def test_who_stops_waiting_has_begun_nothing_and_holds_nobody_up(executor: ThreadPoolExecutor, end: str) -> None:
    scheduler = scheduler_of(patience_s=0)
    scheduler.transfer_began()
    asking = Asking(scheduler, executor)
    answers = [asking.start(RESTORE), asking.start(RESTORE)]
    other = Asking(scheduler, executor).start(OFFLOAD)
    if end == "stop":
        asking.stop = True
        scheduler.wake()
    else:
        scheduler.close()
    assert [one.result(WAIT_S) for one in answers] == [None, None]
    scheduler.transfer_ended()
    assert (other.result(WAIT_S) is not None) is (end == "stop")
    assert scheduler.bytes_in_flight == 3 + (end == "stop")
    assert (scheduler.try_begin(RESTORE, 1) is not None) is (end == "stop")
    assert not Scheduler(BOUNDS).begin(RESTORE, 1, lambda: True), "asked before anything begins"


def test_threads_and_a_loop_all_get_their_turns(executor: ThreadPoolExecutor) -> None:
    scheduler, chunks, seeds = Scheduler(BOUNDS, patience_s=0.001), 150, range(6)
    most, over = sum(BOUNDS.values()), threading.Event()

    def operation(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(chunks):
            operation_class, size = OperationClass(int(random.integers(3))), int(random.integers(1, BOUNDS[DEMOTION]))
            assert scheduler.begin(operation_class, size)
            if scheduler.bytes_in_flight > most:  # no step is larger than its bound
                over.set()
            scheduler.end(operation_class, size)

    async def operation_on_loop() -> None:
        for _ in range(chunks):
            assert await scheduler.begin_async(OFFLOAD, MIB)
            scheduler.end(OFFLOAD, MIB)

    def transfers(done: Callable[[], bool]) -> None:
        while not done():
            scheduler.transfer_began()
            scheduler.transfer_ended()

    workers = [executor.submit(operation, seed) for seed in seeds]
    workers.append(executor.submit(asyncio.run, operation_on_loop()))
    transfers(lambda: all(one.done() for one in workers))
    assert [one.exception() for one in workers] == [None] * len(workers)
    assert not over.is_set()
    assert scheduler.bytes_in_flight == 0

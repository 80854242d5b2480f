"""The daemon's threads: started before any may be refused, with their slices of time, and as many as copy best."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import struct
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.process.thread_count import AGAIN_S, MIN_BYTES, TRIES, TRIES_AGAIN, WORTH, ThreadCount
from kvferry.daemon.process.threads import on_thread, started_threads
from kvferry.daemon.process.time_slices import NICE, SHORTEST_NS, be_as_others, be_prompt, run_in_background
from kvferry.protocol.errors import OutOfMemoryError
from tests import kit

PATIENCE_S = 20.0
KIND = "short"
SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
FORM = "=IIQiIQQQ"


# -- where no more may be had


def no_more(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")  # as where pthread_create fails


def test_all_threads_run_before_the_first_task(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = started_threads(3, "early")
    monkeypatch.setattr(threading.Thread, "start", no_more)
    together = threading.Barrier(3)
    assert {one.result(PATIENCE_S) for one in [executor.submit(together.wait) for _ in range(3)]} == {0, 1, 2}
    executor.shutdown()


def test_a_thread_that_is_refused_has_a_name_and_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_more)
    with pytest.raises(OutOfMemoryError, match="no thread for early") as refused:
        started_threads(1, "early")
    assert "TasksMax" in refused.value.remedy


# -- a call that a coroutine waits for


class Calls(NamedTuple):
    """One thread, the calls that were made on it, and the results that were given back."""

    executor: ThreadPoolExecutor
    begun: asyncio.Event
    may_end: threading.Event
    made: list[str]
    given_back: list[str]

    async def call(self, name: str) -> str:
        """Call what lasts as long as the test says, on the thread."""
        loop = asyncio.get_running_loop()

        def call() -> str:
            self.made.append(name)
            loop.call_soon_threadsafe(self.begun.set)
            assert self.may_end.wait(PATIENCE_S)
            return name

        return await on_thread(self.executor, call, self.given_back.append)


@pytest.fixture
async def calls(anyio_backend: object) -> AsyncIterator[Calls]:  # noqa: ARG001  runs on the test's loop
    one = Calls(started_threads(1, "calls"), asyncio.Event(), threading.Event(), [], [])
    yield one
    one.may_end.set()
    await asyncio.to_thread(one.executor.shutdown)


@pytest.mark.anyio
async def test_a_call_is_not_made_that_is_given_up_before_it_has_begun(calls: Calls) -> None:
    first = asyncio.create_task(calls.call("first"))
    await calls.begun.wait()
    second = asyncio.create_task(calls.call("second"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second], timeout=PATIENCE_S)
    assert second.cancelled()
    calls.may_end.set()
    assert await first == "first"
    assert await calls.call("third") == "third"
    assert (calls.made, calls.given_back) == (["first", "third"], [])


@pytest.mark.anyio
async def test_a_call_that_has_begun_is_waited_for_and_what_nobody_takes_is_given_back(calls: Calls) -> None:
    task = asyncio.create_task(calls.call("first"))
    await calls.begun.wait()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
    calls.may_end.set()
    await asyncio.wait([task], timeout=PATIENCE_S)
    assert task.cancelled()
    assert await calls.call("second") == "second"
    assert calls.given_back == ["first"]


# -- how many copy


class Machine:
    """Copies at the speeds that it was given for each number of threads, by a clock of its own."""

    def __init__(self, speeds: dict[int, float], most: int) -> None:
        self.now_s = 0.0
        self.speeds = speeds
        self.count = ThreadCount(most, clock=lambda: self.now_s)

    def copy(self, size_bytes: int = MIN_BYTES, *, alone: bool = True) -> int:
        """Copy so much, and return on how many threads."""
        trial = self.count.begin(KIND, size_bytes, alone=alone)
        self.now_s += size_bytes / self.speeds[trial.threads]
        self.count.end(trial)
        return trial.threads

    def settle(self) -> set[int]:
        """Copy until every number was tried; return what was."""
        return {self.copy() for _ in range(TRIES * len(self.speeds))}


@pytest.mark.parametrize(("most", "counts"), [(1, {1}), (2, {1, 2}), (3, {1, 2, 3}), (8, {1, 2, 4, 8})])
def test_each_number_is_tried_and_no_other(most: int, counts: set[int]) -> None:
    assert Machine(dict.fromkeys(range(1, most + 1), 1e9), most).count.best(KIND) == most
    assert Machine(dict.fromkeys(counts, 1e9), most).settle() == counts


@given(st.lists(st.floats(1e8, 1e11), min_size=4, max_size=4))
def test_the_fewest_that_are_about_as_fast_are_taken(speeds: list[float]) -> None:
    machine = Machine(dict(zip((1, 2, 4, 8), speeds, strict=True)), 8)
    machine.settle()
    assert machine.count.best("another kind") == 8, "kinds have numbers of their own"
    chosen = machine.copy()
    assert all(machine.speeds[more] < WORTH * machine.speeds[chosen] for more in machine.speeds if more > chosen)
    for fewer in (one for one in machine.speeds if one < chosen):
        assert machine.speeds[chosen] > machine.speeds[fewer], "more threads that bring nothing"


def test_a_disturbed_moment_does_not_decide_for_ever() -> None:
    machine = Machine({1: 9e9, 2: 4e9}, 2)  # somebody else has the second core
    machine.settle()
    assert machine.copy() == 1
    machine.speeds = {1: 9e9, 2: 17e9}
    assert machine.copy() == 1, "what is known holds for a while"
    machine.now_s += AGAIN_S
    assert sorted(machine.copy() for _ in range(2 * TRIES_AGAIN)) == [1] * TRIES_AGAIN + [2] * TRIES_AGAIN
    assert {machine.copy() for _ in range(TRIES)} == {2}


@pytest.mark.parametrize(("size_bytes", "alone"), [(MIN_BYTES - 1, True), (MIN_BYTES, False)])
def test_what_is_small_or_not_alone_is_no_trial(size_bytes: int, *, alone: bool) -> None:
    machine = Machine({1: 1e9, 2: 1e9}, 2)
    assert {machine.copy(size_bytes, alone=alone) for _ in range(2 * TRIES)} == {2}
    assert machine.settle() == {1, 2}


def test_who_is_never_alone_for_long_does_not_try_one_number_for_ever() -> None:
    machine = Machine({1: 1e9, 2: 2e9}, 2)
    begun = [machine.count.begin(KIND, MIN_BYTES, alone=True).threads for _ in range(2 * TRIES)]  # none ends alone
    assert sorted(begun) == [1] * TRIES + [2] * TRIES
    assert {machine.copy() for _ in range(4)} == {2}, "nothing is known: all"


# -- slices of processor time


class Attributes(NamedTuple):
    """What the kernel says of a thread."""

    size: int
    policy: int
    flags: int
    nice: int
    priority: int
    slice_ns: int
    deadline_ns: int
    period_ns: int


def attributes_of(thread: int) -> Attributes:
    found = ctypes.create_string_buffer(struct.calcsize(FORM))
    assert not ctypes.CDLL(None).syscall(SCHED_GETATTR[platform.machine()], thread, found, len(found), 0)
    return Attributes(*struct.unpack(FORM, found.raw))


def attributes_after(action: Callable[[], None]) -> Attributes:
    """Return a thread's after it has called that, and check that it has changed no other one's."""
    before = attributes_of(0)

    def called() -> Attributes:
        action()
        return attributes_of(0)

    with ThreadPoolExecutor(1) as executor:
        found = executor.submit(called).result()
    assert attributes_of(0) == before
    return found


def test_a_thread_has_the_slices_that_it_should_and_no_other_one_has() -> None:
    least = os.getpriority(os.PRIO_PROCESS, 0)
    for action, policy, nice in ((run_in_background, os.SCHED_BATCH, NICE), (be_prompt, os.SCHED_OTHER, 0)):
        found = attributes_after(action)
        assert (found.policy, found.nice) == (policy, max(nice, least))
        assert found.slice_ns in {0, SHORTEST_NS}, "a kernel before 6.12 knows no slices"

    def usual_again() -> Attributes:
        be_prompt()
        assert attributes_after(lambda: None) == attributes_of(0), "threads inherit it"
        return attributes_after(be_as_others)

    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(usual_again).result() == attributes_of(0)


def test_a_process_that_is_nicer_stays_so() -> None:
    def nicer() -> set[int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE + 2)
        return {attributes_after(action).nice for action in (be_prompt, run_in_background, be_as_others)}

    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(nicer).result() == {NICE + 2}


def test_a_daemons_loop_waits_for_nobody_and_nobody_for_what_is_in_the_background() -> None:
    with kit.daemon() as daemon:
        pid = daemon.process.pid
        threads = [int(one.name) for one in Path(f"/proc/{pid}/task").iterdir()]
        found = {thread: attributes_of(thread) for thread in threads}
    assert found[pid].policy == os.SCHED_OTHER
    assert found[pid].slice_ns in {0, SHORTEST_NS}
    in_background = [one for one in found.values() if one.policy == os.SCHED_BATCH]
    assert in_background
    assert {one.slice_ns for one in in_background} <= {0, SHORTEST_NS}
    assert {one.nice for one in in_background} == {max(NICE, found[pid].nice)}
    others = [one.slice_ns for one in found.values() if one.policy == os.SCHED_OTHER]
    assert found[pid].slice_ns == 0 or max(others) > SHORTEST_NS, "transfers have longer ones"

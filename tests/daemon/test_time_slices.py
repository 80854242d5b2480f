"""Threads have the slices of processor time that they should; others stay as they are."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kvferry.daemon.process.time_slices import (
    NICE,
    SHORTEST_NS,
    be_as_others,
    be_prompt,
    run_in_background,
)
from tests import kit

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
FORM = "=IIQiIQQQ"


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
    """Return a thread's, by its native id."""
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

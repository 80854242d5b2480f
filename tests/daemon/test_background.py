"""Threads that copy in the background give way to all that wakes up; others stay as they are."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from kvferry.daemon.process import background
from kvferry.daemon.process.background import NICE, SLICE_NS, run_in_background

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


def own_attributes() -> Attributes:
    """Return the calling thread's."""
    found = ctypes.create_string_buffer(struct.calcsize(FORM))
    assert not ctypes.CDLL(None).syscall(SCHED_GETATTR[platform.machine()], 0, found, len(found), 0)
    return Attributes(*struct.unpack(FORM, found.raw))


def attributes_after() -> Attributes:
    run_in_background()
    return own_attributes()


def test_a_thread_gives_way_and_no_other_one_does() -> None:
    before = own_attributes()
    with ThreadPoolExecutor(1) as executor:
        found = executor.submit(attributes_after).result()
    assert (found.policy, found.nice) == (os.SCHED_BATCH, NICE)
    assert found.slice_ns in {0, SLICE_NS}, "a kernel before 6.12 knows no slices"
    assert own_attributes() == before


def test_where_there_is_no_such_call_it_is_nice_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background.platform, "machine", lambda: "unheard of")  # type: ignore[attr-defined]

    def niceness() -> int:
        run_in_background()
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(niceness).result() == NICE

"""The control loop runs first on a busy processor. Background copies yield to everything else.

Niceness alone is not enough: since Linux 6.6 the kernel lets a running thread finish its slice before one that wakes up
(EEVDF, RUN_TO_PARITY): some milliseconds that the control loop and engines would wait. From 6.12 on a thread that wakes
up does not wait for one with longer slices. So the loop has the shortest slices, as have Mooncake's threads, which wake
each other every few microseconds; transfers have the default. Offloads and restores yield their processor
(``native_copies.h``), which sets a thread back by its slice, so theirs are the shortest, too. Threads that sometimes
hold Python's lock should not be in the background: others that want the lock would wait until they run.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from typing import Final

NICE: Final = 10
SHORTEST_NS: Final = 100_000
"""``sched_setattr`` takes 0.1 to 100 ms."""

_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
"""The number of the system call; C libraries know it since glibc 2.41."""

_ATTRIBUTES: Final = "=IIQiIQQQ"
"""``struct sched_attr``, first version: size, policy, flags, nice, priority, runtime, deadline, period."""


def be_prompt() -> None:
    """Let the calling thread, and those that it starts from now on, wait for no slice of others."""
    _set(_packed(os.SCHED_OTHER, _nice(), SHORTEST_NS))


def be_as_others() -> None:
    """Let the calling thread, and those that it starts from now on, have slices as processes of others have."""
    _set(as_others())


def run_in_background() -> None:
    """Let the calling thread, and no other one, give way to all that wakes up, and mostly to all that runs."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(_nice(), NICE))
    _set(background())


def as_others() -> bytes:
    """Return what ``be_as_others`` says to the kernel, for threads that know no Python."""
    return _packed(os.SCHED_OTHER, _nice(), 0)


def background() -> bytes:
    """Return what ``run_in_background`` says to the kernel, for threads that know no Python."""
    return _packed(os.SCHED_BATCH, max(_nice(), NICE), SHORTEST_NS)


def _nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())  # Linux: of this thread alone


def _packed(policy: int, nice: int, slice_ns: int) -> bytes:
    return struct.pack(_ATTRIBUTES, struct.calcsize(_ATTRIBUTES), policy, 0, nice, 0, slice_ns, 0, 0)


def _set(attributes: bytes) -> None:
    """Set it as far as this kernel can: an older one ignores the slice, or refuses."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)

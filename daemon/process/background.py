"""Threads that copy in the background, and that must not keep anyone waiting who has something to do at once.

Niceness alone is not enough: since Linux 6.6 the kernel lets a thread that runs finish its slice before one that
wakes up has its turn (EEVDF, RUN_TO_PARITY), some milliseconds that the control loop and engines would wait. From 6.12
on a thread that wakes up with a shorter slice does not wait, so these threads have a very long one.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from typing import Final

NICE: Final = 10
SLICE_NS: Final = 100_000_000
"""The longest that there is: of ``sched_setattr``, which takes 0.1 to 100 ms."""

_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
"""The number of the system call; C libraries know it since glibc 2.41."""

_ATTRIBUTES: Final = "=IIQiIQQQ"
"""``struct sched_attr``, first version: size, policy, flags, nice, priority, runtime, deadline, period."""


def run_in_background() -> None:
    """Let the calling thread, and no other one, give way to all that wakes up; as far as this kernel can do that."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # Linux: of this thread alone
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        return
    size = struct.calcsize(_ATTRIBUTES)
    attributes = struct.pack(_ATTRIBUTES, size, os.SCHED_BATCH, 0, NICE, 0, SLICE_NS, 0, 0)
    # An older kernel ignores the slice, or refuses: then the thread is nice, and no more.
    ctypes.CDLL(None).syscall(number, 0, attributes, 0)

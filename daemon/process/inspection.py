"""Whom the kernel lets look into this process: nobody but root.

Two users' pools lie in one daemon, and another process of the daemon's own user could open and write them by
``/proc/PID/fd/N``, or trace the daemon, as long as it is *dumpable*: see PR_SET_DUMPABLE in prctl(2).

What it costs: no core file, whatever its limit; debuggers and samplers (gdb, strace, py-spy) work as root only. What a
process does with itself goes on: ``process_vm_readv``, ``/proc/self/fd``; so do pidfds, and descriptors that it passes.
"""

from __future__ import annotations

import ctypes
from typing import Final

_PR_SET_DUMPABLE: Final = 4


def forbid_inspection() -> None:
    """Let no other process than root's open what this one has open, read its memory or trace it, until it execs."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)

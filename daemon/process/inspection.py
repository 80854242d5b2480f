"""Whom the kernel lets look into this process, nobody but root, and what the process says of itself when it fails.

Two users' pools lie in one daemon, and another process of the daemon's own user could open and write them by
``/proc/PID/fd/N``, or trace the daemon, as long as it is *dumpable*: see PR_SET_DUMPABLE in prctl(2).

What it costs: no core file, whatever its limit; debuggers and samplers (gdb, strace, py-spy) work as root only. What a
process does with itself goes on: ``process_vm_readv``, ``/proc/self/fd``; so do pidfds, and descriptors that it passes.
"""

from __future__ import annotations

import ctypes
import faulthandler
from typing import Final

_PR_SET_DUMPABLE: Final = 4
_SS_DISABLE: Final = 2


class _Stack(ctypes.Structure):
    """``stack_t`` of sigaltstack(2)."""

    _fields_ = (("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def forbid_inspection() -> None:
    """Let no other process than root's open what this one has open, read its memory or trace it, until it execs."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def report_faults() -> None:
    """Write where each thread stands to standard error on SIGABRT, which a watchdog sends, and on faults.

    Without the stack of its own that Python's reporter makes for all signal handlers: a few dozen signals at once, each
    with a frame of kilobytes, overflow it, and that ends the process.
    """
    faulthandler.enable()
    sigaltstack = getattr(ctypes.CDLL(None), "sigaltstack", None)
    if sigaltstack is not None:
        sigaltstack(ctypes.byref(_Stack(None, _SS_DISABLE, 0)), None)

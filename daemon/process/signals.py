"""Signal handling: signals to end make the daemon end in order, and no other signal that an operator sends ends it.

========================  ==============================================================================================
signal                    effect
========================  ==============================================================================================
SIGTERM, SIGINT, SIGQUIT  an orderly end: running transfers get ``service.drain_timeout_s``; no core file
SIGHUP, SIGUSR1, SIGUSR2  logged and ignored: ``kvferry upgrade`` reads a new configuration
timers, real-time, …      the same: all others that would end a process and have no meaning here
SIGSEGV, SIGABRT, …       the default, as they indicate a fault, after where each thread stands was written to the log
========================  ==============================================================================================

Before the control loop runs and after it has ended, the second kind is blocked; signals from before are logged as soon
as the loop runs. A daemon that takes another one's place blocks the first kind, too: it ends in order. The store
process blocks the second kind for its whole life, since it ends with its daemon, and `systemctl kill` and `docker kill`
send to every process of a unit or container. SIGPIPE and SIGXFSZ are ignored by Python itself.

Libraries use signals too, and Mooncake unblocks SIGPROF in a thread of its own, so the store process ignores these
signals as well. A signal with a library's handler is left to it, and real-time signals are not blocked in the store
process, where a library may use one.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import structlog

ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
REAL_TIME: Final = tuple(range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
"""Without those that the C library reserves."""

IGNORED: Final = (
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGIO,
    signal.SIGPWR,
    signal.SIGXCPU,
    signal.SIGSTKFLT,
    *REAL_TIME,
)
REMEDY: Final = "kvferry upgrade, or systemctl reload kvferry@NAME, reads a new configuration"
log = structlog.get_logger(__name__)


def hold_back(numbers: Iterable[int] = IGNORED) -> None:
    """Block signals on this thread and all that it starts, until they are ``answered``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def ignore_but_for_libraries() -> None:
    """Ignore these signals, for threads that unblock them; real-time ones are unblocked, as a library may use one."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REAL_TIME)


def end_within(timeout_s: float) -> None:
    """End this process after ``timeout_s``, if it still runs then: by SIGALRM, which is unblocked for this."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, timeout_s)


@contextlib.contextmanager
def held_back(numbers: Iterable[int]) -> Iterator[None]:
    """Block signals on this thread; a process started meanwhile inherits that for its whole life."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def answered(loop: asyncio.AbstractEventLoop, stopping: asyncio.Event) -> Iterator[None]:
    """Set ``stopping`` on a signal to end, and log the others, on the loop; afterwards those stay blocked."""
    for ending in ENDING:
        loop.add_signal_handler(ending, _end, ending, stopping)
    ignored = sorted({*IGNORED} - _of_libraries())
    for number in ignored:
        loop.add_signal_handler(number, _ignore, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*IGNORED, *ENDING))
    try:
        yield
    finally:
        hold_back()
        for number in ignored:
            loop.remove_signal_handler(number)  # a closing loop restores default handlers
            signal.signal(number, signal.SIG_IGN)  # for threads that do not block them


def _of_libraries() -> set[int]:
    """Return the signals for which this process has a handler that is not Python's."""
    _, _, after = Path("/proc/self/status").read_text().partition("SigCgt:")
    caught = int(after.split()[0], 16)
    return {number for number in IGNORED if caught >> (number - 1) & 1 and not callable(signal.getsignal(number))}


def _end(number: signal.Signals, stopping: asyncio.Event) -> None:
    log.info("asked to end", signal=number.name)
    stopping.set()


def _ignore(number: int) -> None:
    known = number in set(signal.Signals)
    name = signal.Signals(number).name if known else f"SIGRTMIN+{number - signal.SIGRTMIN}"
    log.warning("signal ignored", signal=name, cause="it has no meaning here", remedy=REMEDY)

"""What signals do to the daemon: asked to end it ends in order, and no other that an operator sends ends it.

========================  ==============================================================================================
signal                    what it does
========================  ==============================================================================================
SIGTERM, SIGINT, SIGQUIT  the end: running transfers get ``service.drain_timeout_s``; no core file
SIGHUP, SIGUSR1, SIGUSR2  logged, and nothing else: there is no reload yet
timers, real-time, …      the same: whatever else would end a process and means nothing here
SIGSEGV, SIGABRT, …       what they always do: they tell of a fault
========================  ==============================================================================================

Before the control loop runs and after it has ended the second kind is held back: what comes before is logged as soon as
the loop runs. The store process holds them back for its whole life, since it ends with its daemon: `systemctl kill` and
`docker kill` send to every process of a unit or container. SIGPIPE and SIGXFSZ are ignored by Python itself.

Libraries use signals too, and Mooncake lets SIGPROF through to a thread of its own: so the store process ignores them
as well. One that has a library's handler already is left to it, and real-time signals are not held back from the store
process, where a library may ask for one.
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
"""Without those that the C library keeps for itself."""

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
REMEDY: Final = "a new configuration is read by a restart only: systemctl restart kvferry@NAME, or SIGTERM and a start"
log = structlog.get_logger(__name__)


def hold_back() -> None:
    """Keep the ignored signals waiting on this thread, and on all that it starts from now on."""
    signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)


def ignore_but_for_libraries() -> None:
    """Ignore what is held back, for threads that take it all the same; a library may ask for a real-time signal."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REAL_TIME)


def end_within(span_s: float) -> None:
    """End this process after so long, if it still runs then: by SIGALRM, though that was held back."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, span_s)


@contextlib.contextmanager
def held_back(numbers: Iterable[int]) -> Iterator[None]:
    """Keep signals waiting on this thread; a process that it starts meanwhile does so for its whole life."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def answered(loop: asyncio.AbstractEventLoop, stopping: asyncio.Event) -> Iterator[None]:
    """Set ``stopping`` at a signal to end and log the others, on the loop; afterwards they are held back for good."""
    for ending in ENDING:
        loop.add_signal_handler(ending, _end, ending, stopping)
    ours = sorted({*IGNORED} - _of_libraries())
    for number in ours:
        loop.add_signal_handler(number, _ignore, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    try:
        yield
    finally:
        hold_back()
        for number in ours:
            loop.remove_signal_handler(number)  # a loop that closes gives signals back what they do by default
            signal.signal(number, signal.SIG_IGN)  # threads that still run take them as well


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
    log.warning("signal ignored", signal=name, cause="it means nothing here: there is no reload yet", remedy=REMEDY)

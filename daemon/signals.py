"""What signals do to the daemon: asked to end it ends in order, and no other that an operator sends ends it.

========================  ==============================================================================================
signal                    what it does
========================  ==============================================================================================
SIGTERM, SIGINT, SIGQUIT  the end: running hand-offs get ``service.drain_timeout_s``; no core file
SIGHUP, SIGUSR1, SIGUSR2  logged, and nothing else: there is no reload yet
========================  ==============================================================================================

Before the control loop runs and after it has ended the second kind is held back: what comes before is logged as soon as
the loop runs. The store process holds all of them back for its whole life, since it ends with its daemon: `systemctl
kill` and `docker kill` send to every process of a unit or container. SIGPIPE is ignored by Python itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterable, Iterator
from typing import Final

import structlog

ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
IGNORED: Final = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
REMEDY: Final = "a new configuration is read by a restart only: systemctl restart kvferry@NAME, or SIGTERM and a start"
log = structlog.get_logger(__name__)


def hold_back() -> None:
    """Keep the ignored signals waiting on this thread, and on all that it starts from now on."""
    signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)


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
    for number in ENDING:
        loop.add_signal_handler(number, _end, number, stopping)
    for number in IGNORED:
        loop.add_signal_handler(number, _ignore, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    try:
        yield
    finally:
        hold_back()
        for number in IGNORED:
            loop.remove_signal_handler(number)  # a loop that closes gives signals back what they do by default
            signal.signal(number, signal.SIG_IGN)  # threads that still run take them as well


def _end(number: signal.Signals, stopping: asyncio.Event) -> None:
    log.info("asked to end", signal=number.name)
    stopping.set()


def _ignore(number: signal.Signals) -> None:
    log.warning("signal ignored", signal=number.name, cause="there is no reload yet", remedy=REMEDY)

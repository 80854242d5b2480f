"""Which of Mooncake's writes have ended: asked on a thread, as the loop's timers take a millisecond at least.

In that time a fast link moves a bounce buffer, and no other write begins before the end of this one is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import structlog

from kvferry.daemon.transports.mooncake_native import DONE, FAILED, NativeEngine
from kvferry.protocol.errors import TransferFailedError

_POLL_AT_LEAST_S = 0.0002
_POLL_AT_MOST_S = 0.02
_POLL_FRACTION = 16  # a poll comes late by at most a sixteenth of what its write has taken
log = structlog.get_logger(__name__)

W = TypeVar("W")


class CompletionPoller(Generic[W]):
    """Asks an engine for the ends of its writes: the more often, the more recently one began or ended.

    Mooncake gives the id of a write that has ended to the next one, before the loop hears of it: so what is reported is
    what the id stood for. All but the thread's own methods are for the control loop.
    """

    def __init__(self, on_completed: Callable[[list[tuple[W, int]]], None]) -> None:
        """``on_completed`` is called on the loop with the writes that have ended, each with DONE or FAILED."""
        self._on_completed = on_completed
        self._loop = asyncio.get_running_loop()
        self._news = SimpleQueue[None]()  # waiting for it costs less than for a condition
        self._lock = threading.Lock()  # guards all below
        self._native: list[NativeEngine] = []
        self._watched: list[tuple[int, W]] = []  # the id of each write
        self._progress_s = 0.0  # when a write last began or ended
        self._closed = False

    def __repr__(self) -> str:
        """Show how many writes have not ended."""
        return f"<CompletionPoller writes={len(self._watched)}>"

    def start(self) -> None:
        """Start the thread.

        Raises:
            TransferFailedError: there is none to be had.
        """
        try:
            threading.Thread(target=self._poll, name="mooncake-ends", daemon=True).start()
        except RuntimeError as error:
            raise TransferFailedError(f"no thread to ask Mooncake for the ends of writes: {error}") from error

    def watch(self, native: list[NativeEngine], batch_id: int, write: W) -> None:
        """Report the end of a write, once."""
        with self._lock:
            self._native = native
            self._watched.append((batch_id, write))
            self._progress_s = time.monotonic()
        self._news.put(None)

    def forget(self) -> None:
        """Ask for no write any more, so that its engine can be destroyed; what was found already is still reported."""
        with self._lock:
            self._watched.clear()
            self._native = []

    def close(self) -> None:
        """End the thread; it reports nothing any more."""
        with self._lock:
            self._closed = True
        self._news.put(None)

    def _poll(self) -> None:
        while not self._closed:
            with contextlib.suppress(Empty):
                self._news.get(timeout=self._pause_s())
            with self._lock:
                self._ask()

    def _pause_s(self) -> float | None:
        if not self._watched:
            return None
        quiet_s = (time.monotonic() - self._progress_s) / _POLL_FRACTION
        return min(max(quiet_s, _POLL_AT_LEAST_S), _POLL_AT_MOST_S)

    def _ask(self) -> None:
        completed = []
        for one in tuple(self._watched):
            batch_id, write = one
            try:
                status = self._native[0].transfer_check_status(batch_id)
            except Exception as error:  # whatever it is, the write is asked for again
                log.exception("Mooncake does not report the end of a write", cause=str(error))
                continue
            if status in (DONE, FAILED):  # asking again aborts the process
                self._watched.remove(one)
                completed.append((write, status))
        if completed and not self._closed:
            self._progress_s = time.monotonic()
            self._loop.call_soon_threadsafe(self._on_completed, completed)

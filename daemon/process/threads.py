"""Threads that are there from the start: later, where no more may be had, a request would fail in the middle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvferry.protocol.errors import OutOfMemoryError

MORE_THREADS: Final = "raise TasksMax= in the unit, or ulimit -u"


def started_threads(count: int, name: str, *, initializer: Callable[[], None] | None = None) -> ThreadPoolExecutor:
    """Return an executor whose threads all run, each after it has called ``initializer``.

    Raises:
        OutOfMemoryError: the system gives no more threads.
    """
    executor, all_run = ThreadPoolExecutor(count, name, initializer), threading.Event()
    try:
        for _ in range(count):  # each waits, so that the next one needs a thread of its own
            executor.submit(all_run.wait)
    except RuntimeError as cause:
        raise OutOfMemoryError(f"no thread for {name}: {cause}", remedy=MORE_THREADS) from cause
    finally:
        all_run.set()
    return executor

"""Threads that run from the start: if the system gave no more later, a request would fail in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final, TypeVar

from kvferry.protocol.errors import OutOfMemoryError

MORE_THREADS: Final = "raise TasksMax= in the unit, or ulimit -u"
T = TypeVar("T")


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


async def on_thread(executor: Executor, call: Callable[[], T], give_back: Callable[[T], object] | None = None) -> T:
    """Return what a call returns that is made on a thread.

    Cancelled before the call has begun, it is not made. Later, this waits for its end, and ``give_back`` is called with
    what it has returned, on the same thread.
    """
    job = executor.submit(call)
    try:
        return await asyncio.wrap_future(job)
    except asyncio.CancelledError:
        if not job.cancel():
            ended = asyncio.wrap_future(job)
            while not ended.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([ended])
            if ended.exception() is None and give_back is not None:
                executor.submit(give_back, ended.result())
        raise

"""The copies of transfers between hosts, with their digests: by copy threads, or by Python's threads.

What is in host memory, in not too many rows, the control loop lists and gives to copy threads, which know no Python:
nobody waits for its lock. All else (devices, very many short rows, and everything where no copy threads hash) is for
Python's threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Final, NamedTuple

import numpy as np

from kvferry.pools import copy_kernel
from kvferry.pools.copy_kernel import Copies, CopyThreads, Digests, Hashing
from kvferry.protocol.errors import CancelledError

MOST_ROWS: Final = 1 << 12
"""What the loop lists in some ten microseconds."""

OnCopied = Callable[[int, Exception | None], None]
"""Called once, on the loop, when nothing is copied any more, with the digest of the copied bytes, or with an error."""


class _Copying(NamedTuple):
    digests: Digests
    on_copied: OnCopied


class NetworkCopier:
    """Gathers, and scatters. For the control loop."""

    def __init__(self, executor: Executor, copy_threads: CopyThreads | None = None) -> None:
        """Both are the copier's: ``close`` ends them. Without copy threads that hash, all is for the executor."""
        self._loop = asyncio.get_running_loop()
        self._executor = executor
        self._copy_threads = copy_threads if copy_threads is not None and copy_threads.hashes else None
        self._closed = False
        if self._copy_threads is not None:
            self._loop.add_reader(self._copy_threads.fileno(), self._copy_threads_told, self._copy_threads)

    def __repr__(self) -> str:
        """Show who copies."""
        return f"<NetworkCopier {'threads' if self._copy_threads is None else 'copy threads'}>"

    def copy(self, rows: int, list_copies: Callable[[], Copies], on_copied: OnCopied) -> None:
        """Copy what ``list_copies`` returns, at most so many rows, and hash it.

        Raises:
            CancelledError: the copier is closed.
            RuntimeError: no thread can be had.
        """
        self._check_open()
        if self._copy_threads is None or rows > MOST_ROWS:
            self.run(lambda: copy_kernel.copy_with_digest(list_copies()), on_copied)
            return
        copies, copying = list_copies(), _Copying(np.zeros(1, np.uint64), on_copied)
        hashing = Hashing(np.array([len(copies)]), copying.digests, copy_kernel.new_hash())
        self._copy_threads.submit(copies, 1, copying, hashing)

    def run(self, function: Callable[[], int], on_copied: OnCopied) -> None:
        """Let a thread copy and return the digest.

        Raises:
            CancelledError: the copier is closed.
            RuntimeError: no thread can be had.
        """
        self._check_open()
        copying = self._executor.submit(function)
        # No future of asyncio's: it costs as much as the call, and a turn of the loop.
        copying.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._thread_told, on_copied, done))

    async def close(self, waiter: Executor) -> None:
        """Begin and report nothing any more; return when no byte moves. ``waiter``: where that is waited for."""
        self._closed = True
        await self._loop.run_in_executor(waiter, self._executor.shutdown)
        if self._copy_threads is not None:
            await self._loop.run_in_executor(waiter, self._copy_threads.withdraw_all)
            self._loop.remove_reader(self._copy_threads.fileno())
            self._copy_threads.take_ended()  # what was withdrawn, and would keep this alive

    def _check_open(self) -> None:
        if self._closed:  # the memory may be unmapped
            raise CancelledError("this daemon ends")

    def _thread_told(self, on_copied: OnCopied, copying: Future[int]) -> None:
        error = copying.exception()
        if error is None:
            self._report(on_copied, copying.result(), None)
        else:
            self._report(on_copied, 0, error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def _copy_threads_told(self, copy_threads: CopyThreads) -> None:
        for copying in copy_threads.take_ended():
            self._report(copying.on_copied, int(copying.digests[0]), None)

    def _report(self, on_copied: OnCopied, digest: int, error: Exception | None) -> None:
        if self._closed:
            return
        try:
            on_copied(digest, error)
        except Exception as cause:  # noqa: BLE001  it keeps no other from being reported
            self._loop.call_exception_handler({"message": "the end of a copy was not heard", "exception": cause})

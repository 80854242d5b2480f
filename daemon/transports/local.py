"""The local transport: copies within this process's mappings, on a few threads that release the GIL.

Pieces take turns: a thread copies one chunk of the piece at the head of the queue and puts it back at the tail, so a
large hand-off does not hold up a small one. Expanding a plan into blocks happens on the threads as well.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from itertools import pairwise

import numpy as np
import structlog

from kvferry.daemon.rooms.effects import StartPiece
from kvferry.daemon.transports.base import OnPieceDone
from kvferry.pools.copies import (
    CopyBlocks,
    chunk_bounds,
    copy_by_size,
    copy_one_by_one,
    split_blocks,
    vectored_copy_works,
)
from kvferry.pools.plan import Blocks
from kvferry.protocol.errors import CancelledError, InternalError, KvferryError

MAX_BLOCK_BYTES = 1 << 20
log = structlog.get_logger(__name__)


def best_copy() -> CopyBlocks:
    """Return the fastest copy that works here; warn once where it is not the fast one."""
    if vectored_copy_works():
        return copy_by_size
    log.warning(
        "copies are slower than they could be",
        cause="process_vm_readv is forbidden here",
        remedy="allow it in the container's seccomp profile (or add CAP_SYS_PTRACE)",
    )
    return copy_one_by_one


class _Job:
    """One piece: chunks not begun, chunks under way, and the first error. Guarded by the transport's lock."""

    def __init__(self, piece: StartPiece) -> None:
        self.piece = piece
        self.blocks: Blocks | None = None
        self.bounds: deque[tuple[int, int]] = deque()
        self.under_way = 0
        self.error: KvferryError | None = None


class LocalTransport:
    """See ``Transport``. ``threads`` copy at a time, ``chunk_bytes`` between two looks at the queue."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_piece_done: OnPieceDone,
        *,
        threads: int,
        chunk_bytes: int,
        copy: CopyBlocks,
    ) -> None:
        self._loop = loop
        self._on_piece_done = on_piece_done
        self._chunk_bytes = chunk_bytes
        self._copy = copy
        self._jobs: dict[int, _Job] = {}
        self._queue: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"copy-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        """Show how many pieces are under way."""
        return f"<LocalTransport pieces={len(self._jobs)} threads={len(self._threads)}>"

    def start(self, piece: StartPiece) -> None:
        """See ``Transport.start``."""
        job = _Job(piece)
        with self._changed:
            self._jobs[piece.piece_id] = job
            self._queue.append(job)
            self._changed.notify()

    def stop(self, piece_id: int) -> None:
        """See ``Transport.stop``."""
        with self._changed:
            job = self._jobs.get(piece_id)
            if job is not None and job.error is None:
                job.error = CancelledError("the hand-off ended before all was copied")

    def close(self) -> None:
        """See ``Transport.close``."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                job = self._queue.popleft()
                if job.error is not None:
                    self._finish_if_idle(job)
                    continue
                if job.blocks is None:
                    chunk = None
                else:
                    chunk = job.bounds.popleft()
                    if job.bounds:
                        self._queue.append(job)
                        self._changed.notify()
                job.under_way += 1
            error = self._step(job, chunk)
            with self._changed:
                job.under_way -= 1
                if job.error is None:
                    job.error = error
                if chunk is None and job.bounds and job.error is None:
                    self._queue.append(job)
                    self._changed.notify()
                else:
                    self._finish_if_idle(job)

    def _step(self, job: _Job, chunk: tuple[int, int] | None) -> KvferryError | None:
        """Expand the piece, or copy one chunk of it; return what went wrong."""
        try:
            if chunk is None:
                job.blocks = _absolute_blocks(job.piece)
                bounds = chunk_bounds(job.blocks, self._chunk_bytes).tolist()
                job.bounds.extend(pairwise(bounds))
                if len(job.bounds) == 1:  # a small piece takes one turn, on one thread
                    chunk = job.bounds.popleft()
            if chunk is not None and job.blocks is not None:
                self._copy(job.blocks[chunk[0] : chunk[1]])
        except KvferryError as error:
            return error
        except Exception as error:  # a thread that dies would leave its piece unsettled for ever
            log.exception("copy failed", piece=job.piece.piece_id)
            return InternalError(f"the copy failed: {type(error).__name__}: {error}")
        return None

    def _finish_if_idle(self, job: _Job) -> None:
        """Report the piece once nothing of it is under way and nothing is left to do. Needs the lock."""
        if job.under_way or (job.bounds and job.error is None):
            return
        if self._jobs.pop(job.piece.piece_id, None) is not None:
            self._loop.call_soon_threadsafe(self._report, job.piece.piece_id, job.error)

    def _report(self, piece_id: int, error: KvferryError | None) -> None:
        if not self._closing:
            self._on_piece_done(piece_id, error)


def _absolute_blocks(piece: StartPiece) -> Blocks:
    """Return the piece's copies as absolute addresses, no block above MAX_BLOCK_BYTES."""
    blocks = np.concatenate([plan.blocks() for plan in piece.plans])
    blocks[:, 0] += np.uint64(piece.source.region.address)
    blocks[:, 1] += np.uint64(piece.destination.region.address)
    return split_blocks(blocks, MAX_BLOCK_BYTES)

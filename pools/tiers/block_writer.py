"""Writing one cached block's file in bounded steps.

A writer writes under a temporary name and renames the file at the end, so nobody sees an incomplete block. It is used
by one thread at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from kvferry.pools.tiers.block_file import BlockHeader, disk_errors, encode_header, file_bytes
from kvferry.pools.tiers.page_bytes import Cursor, PageDigests

DEFAULT_STEP_BYTES = 1 << 20


class BlockWriter:
    """A block being written: call ``step`` until it returns True, then ``finish``; otherwise ``abandon``.

    As a context manager it abandons a block that was not finished. The buffers must not change until then.
    """

    def __init__(
        self,
        part: Path,
        fd: int,
        header: BlockHeader,
        buffers: Sequence[memoryview],
        publish: Callable[[BlockWriter], None],
    ) -> None:
        """Write into ``fd``.

        Args:
            part: the temporary name under which ``fd`` is open.
            fd: closed at the end.
            header: digests that it lacks are computed.
            buffers: the pages.
            publish: called once everything is written, to give the file its final name.
        """
        self.key = header.key
        self.part = part
        self.fd = fd
        self.size_bytes = file_bytes(self.key.namespace, header.page_bytes)
        """Size of the whole file."""
        self._header = header
        self._cursor = Cursor(buffers)
        self._digests = None if header.digests else PageDigests()
        self._publish = publish

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abandon the block unless it is finished."""
        self.abandon()

    def step(self, max_bytes: int = DEFAULT_STEP_BYTES) -> bool:
        """Write at most ``max_bytes`` bytes; return whether all pages are written.

        Raises:
            DiskFullError: no space is left. The block is abandoned.
            DiskFailedError: the disk failed. The block is abandoned.
        """
        if self._cursor.left_bytes:
            with self._abandoning():
                self._write(max_bytes)
        return not self._cursor.left_bytes

    def finish(self) -> int:
        """Give the file its final name, as durably as the store's fsync policy says; return its size.

        Raises:
            DiskFullError: no space is left. The block is abandoned.
            DiskFailedError: the disk failed. The block is abandoned.
        """
        assert self.fd >= 0, "already finished or abandoned"
        assert not self._cursor.left_bytes, "not everything is written"
        with self._abandoning():
            self._write_header()
            self._publish(self)
        self._end()
        return self.size_bytes

    def abandon(self) -> None:
        """Remove what was written. Does nothing after ``finish`` or when called again."""
        if self.fd >= 0:
            with suppress(OSError):  # the next scan removes what cannot be removed now
                self.part.unlink(missing_ok=True)
            self._end()

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """Turn OSErrors into disk errors, and abandon the block on any error."""
        try:
            with disk_errors(self.part):
                yield
        except BaseException:
            self.abandon()
            raise

    def _write(self, max_bytes: int) -> None:
        position = self.size_bytes - self._cursor.left_bytes
        count = os.pwritev(self.fd, [one.view for one in self._cursor.peek(max_bytes)], position)
        written = self._cursor.advance(count)
        if self._digests is not None:
            self._digests.update(written)
        if self._cursor.left_bytes:
            # Starts writeback of these bytes, and drops from the page cache those of earlier steps that are on disk.
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _write_header(self) -> None:
        """Write the header, last: an incomplete file never has one."""
        if self._digests is not None:
            self._header = msgspec.structs.replace(self._header, digests=tuple(self._digests.done))
        data = memoryview(encode_header(self._header))
        written = 0
        while written < len(data):
            written += os.pwrite(self.fd, data[written:], written)

    def _end(self) -> None:
        os.close(self.fd)
        self.fd = -1
        self._cursor.release()

"""Writing one cached block's file, a bounded step at a time. What is on disk otherwise is the store's.

A writer writes under a temporary name and takes the block's own at the end, so nobody sees half a block. One thread at
a time uses it.
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
    """A block being written. ``step`` until it says so, then ``finish``; whatever else happens, ``abandon``.

    As a context manager it abandons what was not finished. The buffers must keep their bytes until then.
    """

    def __init__(
        self,
        part: Path,
        fd: int,
        header: BlockHeader,
        buffers: Sequence[memoryview],
        publish: Callable[[BlockWriter], None],
    ) -> None:
        """Write into ``fd``, open under the name ``part``; ``publish`` gives it its name.

        Args:
            part: the temporary name.
            fd: closed at the end.
            header: without digests these are computed.
            buffers: the pages.
            publish: is called once all is written.
        """
        self.key = header.key
        self.part = part
        self.fd = fd
        self.size_bytes = file_bytes(self.key.namespace, header.page_bytes)
        """Of the whole file."""
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
        """Write at most ``max_bytes`` bytes; return whether all are written.

        Raises:
            DiskFullError: no space is left. The block is abandoned.
            DiskFailedError: the disk failed. The block is abandoned.
        """
        if self._cursor.left_bytes:
            with self._abandoning():
                self._write(max_bytes)
        return not self._cursor.left_bytes

    def finish(self) -> int:
        """Give the file its name, as durably as the store's policy says; return its bytes.

        Raises:
            DiskFullError: no space is left. The block is abandoned.
            DiskFailedError: the disk failed. The block is abandoned.
        """
        assert self.fd >= 0, "finished or abandoned before"
        assert not self._cursor.left_bytes, "not all is written"
        with self._abandoning():
            self._write_header()
            self._publish(self)
        self._end()
        return self.size_bytes

    def abandon(self) -> None:
        """Remove what was written. Does nothing after ``finish``, or a second time."""
        if self.fd >= 0:
            with suppress(OSError):  # the next scan removes what cannot be removed now
                self.part.unlink(missing_ok=True)
            self._end()

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """Turn the system's errors into ours, and abandon the block at any."""
        try:
            with disk_errors(self.part):
                yield
        except BaseException:
            self.abandon()
            raise

    def _write(self, max_bytes: int) -> None:
        position = self.size_bytes - self._cursor.left_bytes
        written = os.pwritev(self.fd, [piece.view for piece in self._cursor.ahead(max_bytes)], position)
        pieces = self._cursor.advance(written)
        if self._digests is not None:
            self._digests.update(pieces)
        if self._cursor.left_bytes:
            # Begins to write these bytes out, and drops from memory those of earlier steps that are out already.
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _write_header(self) -> None:
        """Write the header, last: a file without its end has no beginning either."""
        if self._digests is not None:
            self._header = msgspec.structs.replace(self._header, digests=tuple(self._digests.done))
        data = memoryview(encode_header(self._header))
        written = 0
        while written < len(data):
            written += os.pwrite(self.fd, data[written:], written)

    def _end(self) -> None:
        os.close(self.fd)
        self.fd = -1
        self._cursor.forget()

"""Reading one cached block's file in bounded steps; no byte counts before its checksum was verified.

A reader is used by one thread at a time.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from kvferry.pools.tiers.block_file import (
    ALIGNMENT,
    BlockHeader,
    DamagedBlockError,
    MissingBlockError,
    NotABlockError,
    announced_bytes,
    decode_header,
    disk_errors,
)
from kvferry.pools.tiers.namespaces import BlockKey
from kvferry.pools.tiers.page_bytes import Cursor, PageDigests

READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Somebody may have put a link or a pipe under a block's name: neither is followed or waited for."""
DEFAULT_STEP_BYTES = 1 << 20

Damaged = Callable[[BlockKey, int], None]
"""Called with the key and the open file descriptor if a file is not the block it should be."""


class OpenBlock(NamedTuple):
    """A block's file, open for reading, its header, and its size with the header."""

    fd: int
    header: BlockHeader
    size_bytes: int


class BlockReader:
    """A block being read into its buffers. Call ``step`` until it returns True: only then the buffers are valid.

    As a context manager it closes its file. A block that is removed meanwhile can still be read to its end.
    """

    def __init__(
        self,
        path: Path,
        key: BlockKey,
        buffers: Sequence[memoryview],
        damaged: Damaged,
    ) -> None:
        """Open the file and check its header; ``damaged`` is called if it is not the block.

        Raises:
            MissingBlockError: there is no such file.
            DamagedBlockError: the header is wrong, or of another block or page size, or the file's length is wrong.
            DiskFailedError: the disk failed.
        """
        self.key = key
        self._path = path
        self._cursor = Cursor(buffers)
        self._damaged = damaged
        self._digests = PageDigests()
        self._is_whole = False
        self.fd, self.header, self.size_bytes = open_block(path, key, damaged)
        self._position = self.size_bytes - self._cursor.left_bytes
        if [buffer.nbytes for buffer in buffers] != [self.header.page_bytes] * self.header.block_pages:
            raise self._not_the_block(f"it has {self.header.block_pages} pages of {self.header.page_bytes} bytes")
        with suppress(OSError):  # affects only the read-ahead
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()

    def step(self, max_bytes: int = DEFAULT_STEP_BYTES) -> bool:
        """Read and check at most ``max_bytes`` bytes; return whether the whole block was read and is correct.

        Raises:
            DamagedBlockError: a page's checksum is wrong, or the file has become shorter. The buffers are invalid.
            DiskFailedError: the disk failed. The buffers are invalid.
        """
        if self._is_whole:
            return True
        try:
            self._read(max_bytes)
        except BaseException:
            self.close()
            raise
        if not self._cursor.left_bytes:
            self._is_whole = True
            self._used()
            self.close()
        return self._is_whole

    def close(self) -> None:
        """Close the file, at any point. Closing twice does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._cursor.release()

    def _read(self, max_bytes: int) -> None:
        with disk_errors(self._path):
            views = [one.view for one in self._cursor.peek(max_bytes)]
            count = os.preadv(self.fd, views, self._position)
        if not count:
            raise self._not_the_block(f"it ends after {self._position} of {self.size_bytes} bytes")
        self._position += count
        before = len(self._digests.done)
        self._digests.update(self._cursor.advance(count))
        for page in range(before, len(self._digests.done)):
            if self._digests.done[page] != self.header.digests[page]:
                raise self._not_the_block(f"the checksum of page {page} is wrong")

    def _not_the_block(self, why: str) -> DamagedBlockError:
        self._damaged(self.key, self.fd)
        self.close()
        return DamagedBlockError(f"{self._path}: {why}")

    def _used(self) -> None:
        """Set the file's time of last use, for the scan after a restart, and drop it from the page cache."""
        with suppress(OSError):  # neither affects what was read
            os.utime(self.fd)
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def open_block(path: Path, key: BlockKey, damaged: Damaged) -> OpenBlock:
    """Open a block's file for reading, and check its header and length.

    Args:
        path: of the file.
        key: of the block that it must hold.
        damaged: called if the file is not that block, while it is open.

    Raises:
        MissingBlockError: there is none, or something other than a file has its name.
        DamagedBlockError: the header or the length is wrong, or it is another block.
        DiskFailedError: the disk failed, or too many files are open.
    """
    fd, size_bytes = _open(path)
    try:
        with disk_errors(path):
            header = _header_of(fd, key, size_bytes)
    except NotABlockError as cause:
        damaged(key, fd)
        os.close(fd)
        raise DamagedBlockError(f"{path}: {cause}") from cause
    except BaseException:
        os.close(fd)
        raise
    return OpenBlock(fd, header, size_bytes)


def ask_for_header(path: Path) -> None:
    """Ask the kernel to prefetch a file's header: a disk serves many such requests at once."""
    with suppress(OSError):
        fd = os.open(path, READ_FLAGS)
        try:
            os.posix_fadvise(fd, 0, ALIGNMENT, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


def _open(path: Path) -> tuple[int, int]:
    """Return the file descriptor and the file's size."""
    with disk_errors(path):
        try:
            fd = os.open(path, READ_FLAGS)
        except OSError as cause:
            if cause.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                raise MissingBlockError(f"{path}: {cause.strerror}") from cause
            raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise MissingBlockError(f"{path}: not a regular file")
    return fd, status.st_size


def _header_of(fd: int, key: BlockKey, size_bytes: int) -> BlockHeader:
    """Return the header of this block, and check that the file is as long as it says."""
    data = os.pread(fd, ALIGNMENT, 0)
    if (needed := announced_bytes(data)) > ALIGNMENT:
        data += os.pread(fd, needed - ALIGNMENT, ALIGNMENT)
    header = decode_header(data)
    if header.key != key:
        raise NotABlockError("it is another block")
    if size_bytes != needed + header.block_pages * header.page_bytes:
        raise NotABlockError(f"{size_bytes} bytes are not {header.block_pages} pages of {header.page_bytes}")
    return header

"""The file format of a cached block on disk, and the file's name. Opens no file.

A file is ``header | page 0 | page 1 | ...``. The header fills whole 4096 bytes::

    8  magic "kvfblock"
    4  version of this format, little-endian like all numbers here
    4  size of the header in bytes
    4  size of the description in bytes
       description: a msgpack array of BlockHeader's fields
       zeros
    8  XXH3-64 of all preceding bytes of the header

So each byte of the file is covered by one checksum: the header by its own, each page by the page's. Files are stored
under ``TENANT/LAYOUT_DIGEST-IDENTITY/GROUP-BLOCK_PAGES/HH/HASH``, HH being the first two digits of HASH. The header
names the namespace, so a file of another one is rejected wherever it lies. Format 1, in folders ``LAYOUT_DIGEST``, did
not say which model's KV a file holds: such files are left alone and never served.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import xxhash

from kvferry.pools.tiers.cached_block import BlockKey, Namespace

# -- errors of the disk tier. None of these is sent to an engine, which sees a miss.
#
# A damaged or missing block is computed again; the caller stops using a full or failing disk for a while.


FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No space, a quota, or a file size limit: removing blocks may help."""


class DiskError(Exception):
    """Base class. The text names the file and the cause, never contents of the file."""


class MissingBlockError(DiskError):
    """There is no file for the block."""


class DamagedBlockError(DiskError):
    """The file is not what was written under that name. It was removed and counted."""


class DiskFullError(DiskError):
    """No space left, a quota reached, or a file larger than this process may write."""


class DiskFailedError(DiskError):
    """The operating system refused: an I/O error, a file system that became read-only, too many open files."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into one of the errors above.

    Raises:
        DiskFullError: there is no space.
        DiskFailedError: anything else.
    """
    try:
        yield
    except OSError as cause:
        kind = DiskFullError if cause.errno in FULL else DiskFailedError
        raise kind(f"{os.path.realpath(path)}: {cause.strerror}") from cause  # the root is a descriptor in it


LOCK_FILE = "kvferry.lock"
"""In the root: held by the one daemon that keeps its blocks there."""

MAGIC = b"kvfblock"
FORMAT_VERSION = 2
ALIGNMENT = 4096
MAX_HEADER_BYTES = 1 << 24
HASH_BYTES = 16

_PREFIX = struct.Struct("<8sIII")
_CHECKSUM = struct.Struct("<Q")
MAX_LABEL_BYTES = 512
_FIXED_BYTES = 1024
"""Upper bound of the description without the group's name and the digests."""
_DIGEST_BYTES = 9

TENANT_NAME = re.compile(r"(0|[1-9][0-9]{0,9})\Z")
FORM_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\Z")
OUTDATED_NAME = re.compile(r"[0-9a-f]{32}\Z")
"""A folder of format 1, at the level of ``FORM_NAME``."""
GROUP_NAME = re.compile(r"([a-z][a-z0-9_]{0,63})-([1-9][0-9]{0,6})\Z")
LEAF_NAME = re.compile(r"[0-9a-f]{2}\Z")
BLOCK_NAME = re.compile(r"[0-9a-f]{32}\Z")
PART_NAME = re.compile(r"[0-9a-f]{32}\.([0-9a-f]{16})-[0-9a-f]+\.part\Z")


class BlockHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The header of a file: the block's key, its parent, and the size and XXH3-64 digest of each page.

    ``model`` is a label for people; ``identity`` is what distinguishes models.
    """

    tenant: int
    layout_digest: str
    identity: str
    group: str
    block_pages: int
    hash: bytes
    parent: bytes | None
    page_bytes: int
    digests: tuple[int, ...]
    model: str = ""

    @property
    def key(self) -> BlockKey:
        """Return the block's key."""
        return BlockKey(
            Namespace(self.tenant, self.layout_digest, self.identity, self.group, self.block_pages), self.hash
        )


class NotABlockError(ValueError):
    """The bytes are not a header of this format, or a damaged one."""


def new_header(
    key: BlockKey, page_bytes: int, digests: tuple[int, ...], parent: bytes | None, model: str = ""
) -> BlockHeader:
    """Return the header of a block's file: ``page_bytes`` bytes and one digest for each of its pages.

    A model label longer than ``MAX_LABEL_BYTES`` is truncated.
    """
    label = model.encode()[:MAX_LABEL_BYTES].decode(errors="ignore")
    return BlockHeader(*key.namespace, key.hash, parent, page_bytes, digests, label)


def header_bytes(namespace: Namespace) -> int:
    """Return the header size in a namespace: the same for all its blocks, so that a file's size is known beforehand."""
    needed = _PREFIX.size + _FIXED_BYTES + len(namespace.group) + _DIGEST_BYTES * namespace.block_pages + _CHECKSUM.size
    return needed + -needed % ALIGNMENT


def file_bytes(namespace: Namespace, page_bytes: int) -> int:
    """Return the size of a block's file, header included."""
    return header_bytes(namespace) + namespace.block_pages * page_bytes


def encode_header(header: BlockHeader) -> bytes:
    """Return the header as the file's first bytes."""
    size = header_bytes(header.key.namespace)
    description = msgspec.msgpack.encode(header)
    checked = _PREFIX.pack(MAGIC, FORMAT_VERSION, size, len(description)) + description
    checked += bytes(size - len(checked) - _CHECKSUM.size)
    return checked + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(checked))


def announced_bytes(beginning: bytes) -> int:
    """Return the size of the header that starts with these bytes.

    Args:
        beginning: the file's first bytes, up to 4096.

    Raises:
        NotABlockError: they are not the start of a header of this format.
    """
    if len(beginning) < ALIGNMENT:
        raise NotABlockError(f"{len(beginning)} bytes are too few for a header")
    magic, version, size, _ = _PREFIX.unpack_from(beginning)
    if magic != MAGIC:
        raise NotABlockError("it does not begin with the magic number of a block")
    if version != FORMAT_VERSION:
        raise NotABlockError(f"format {version}, not {FORMAT_VERSION}")
    if not ALIGNMENT <= size <= MAX_HEADER_BYTES or size % ALIGNMENT:
        raise NotABlockError(f"a header of {size} bytes")
    return int(size)


def decode_header(data: bytes) -> BlockHeader:
    """Decode a whole header.

    Args:
        data: ``announced_bytes`` bytes.

    Raises:
        NotABlockError: the header is damaged or truncated.
    """
    if announced_bytes(data) != len(data):
        raise NotABlockError("the header is truncated")
    (checksum,) = _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
    if checksum != xxhash.xxh3_64_intdigest(memoryview(data)[: -_CHECKSUM.size]):
        raise NotABlockError("the header's checksum is wrong")
    *_, described = _PREFIX.unpack_from(data)
    try:
        header = msgspec.msgpack.decode(data[_PREFIX.size : _PREFIX.size + described], type=BlockHeader)
    except (msgspec.MsgspecError, ValueError) as cause:  # a text that is not UTF-8 is a ValueError
        raise NotABlockError(f"the header's description: {cause}") from cause
    if len(header.digests) != header.block_pages or header_bytes(header.key.namespace) != len(data):
        raise NotABlockError(f"a header of {len(data)} bytes and {len(header.digests)} digests")
    return header


def folder_of(key: BlockKey) -> Path:
    """Return the folder that a block's file is in, relative to the root.

    Raises:
        ValueError: a name that could escape the root, or that no scan would find.
    """
    where = key.namespace
    names = (str(where.tenant), f"{where.layout_digest}-{where.identity}", f"{where.group}-{where.block_pages}")
    for name, pattern in zip(names, (TENANT_NAME, FORM_NAME, GROUP_NAME), strict=True):
        if not pattern.match(name):
            raise ValueError(f"{name!r} is not a valid folder name for blocks")
    return Path(*names, file_name(key)[:2])


def namespace_of(folder: Path) -> Namespace:
    """Return the namespace of the blocks in a folder, which is named ``.../TENANT/FORM/GROUP-BLOCK_PAGES/HH``."""
    tenant, form, named, _ = folder.parts[-4:]
    layout_digest, identity = form.split("-")
    group, block_pages = named.rsplit("-", 1)
    return Namespace(int(tenant), layout_digest, identity, group, int(block_pages))


def file_name(key: BlockKey) -> str:
    """Return the name of a block's file.

    Raises:
        ValueError: the hash does not have 16 bytes.
    """
    if len(key.hash) != HASH_BYTES:
        raise ValueError(f"a hash of {len(key.hash)} bytes, not {HASH_BYTES}")
    return key.hash.hex()


# -- the bytes of several pages, processed in bounded steps. Independent of files.


_MOST_VIEWS = 1024
"""The system's bound on the buffers of one call (IOV_MAX)."""


class BufferSlice(NamedTuple):
    """Consecutive bytes of one buffer; ``ends``: they are its last."""

    view: memoryview
    ends: bool


class Cursor:
    """A position in several buffers, treated as one."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        """Start at the first byte of ``buffers``."""
        self._left = deque(buffer.cast("B") for buffer in buffers)  # the rest of the first one, and the others
        self.left_bytes = sum(buffer.nbytes for buffer in self._left)

    def peek(self, max_bytes: int) -> list[memoryview]:
        """Return the next ``max_bytes`` bytes; fewer at the end, or if they span more buffers than a call takes."""
        assert max_bytes > 0
        views: list[memoryview] = []
        for buffer in islice(self._left, _MOST_VIEWS):
            if max_bytes <= 0:
                break
            views.append(buffer[:max_bytes])
            max_bytes -= views[-1].nbytes
        return views

    def advance(self, count: int) -> list[BufferSlice]:
        """Advance by ``count`` bytes, at most what ``peek`` returned, and return them."""
        self.left_bytes -= count
        slices: list[BufferSlice] = []
        while count > 0:
            buffer = self._left.popleft()
            if buffer.nbytes > count:
                self._left.appendleft(buffer[count:])
            slices.append(BufferSlice(buffer[:count], buffer.nbytes <= count))
            count -= slices[-1].view.nbytes
        return slices

    def release(self) -> None:
        """Drop the buffers: memory cannot be unmapped while views of it exist."""
        self._left.clear()


class PageDigests:
    """The XXH3-64 of pages whose bytes arrive incrementally; ``done`` holds those of complete pages, in order."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self._running = xxhash.xxh3_64()

    def update(self, slices: Sequence[BufferSlice]) -> None:
        """Add the next bytes."""
        for one in slices:
            self._running.update(one.view)
            if one.ends:
                self.done.append(self._running.intdigest())
                self._running.reset()


# -- writing one cached block's file in bounded steps.
#
# A writer writes under a temporary name and renames the file at the end, so nobody sees an incomplete block. It is used
# by one thread at a time.


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

    def __exit__(self, *_: object) -> None:
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
        count = os.pwritev(self.fd, self._cursor.peek(max_bytes), position)
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


# -- reading one cached block's file in bounded steps; no byte counts before its checksum was verified.
#
# A reader is used by one thread at a time.


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

    def __exit__(self, *_: object) -> None:
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
            count = os.preadv(self.fd, self._cursor.peek(max_bytes), self._position)
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

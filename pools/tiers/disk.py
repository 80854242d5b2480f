"""The files of the disk tier: one file per cached block, under a root that one daemon holds.

Synchronous, for I/O threads: any method may be called from any of them. The caller decides which blocks to keep, and
counts the bytes that they take.

Correctness does not depend on the fsync policy: readers verify checksums, so a file torn by a power cut is a miss. The
policy decides how much of the cache survives a power cut::

    never      what the kernel has written out by then
    interval   what was stored before the last ``sync_dirty``
    block      everything stored: ``finish`` returns once the file and its name are on the disk
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Literal, NamedTuple, Self, TypeVar

import numpy as np
import xxhash

from kvferry.pools.integrity import Problem
from kvferry.pools.tiers.block_file import (
    BLOCK_NAME,
    FORM_NAME,
    GROUP_NAME,
    HASH_BYTES,
    LEAF_NAME,
    LOCK_FILE,
    OUTDATED_NAME,
    PART_NAME,
    READ_FLAGS,
    TENANT_NAME,
    BlockHeader,
    BlockReader,
    BlockWriter,
    DamagedBlockError,
    DiskError,
    MissingBlockError,
    ask_for_header,
    disk_errors,
    file_name,
    folder_of,
    namespace_of,
    new_header,
    open_block,
)
from kvferry.pools.tiers.cached_block import BlockKey, Namespace
from kvferry.pools.tiers.own_folder import OTHERS_WRITE, OwnFolder
from kvferry.protocol.errors import ConfigError

# -- the root of the disk tier: private enough to hold prompts, and held by one daemon at a time.


CONFIG_KEY = "tiers.disk.path"


def lock_root(root: Path) -> OwnFolder:
    """Lock the root, until the folder is closed.

    Raises:
        ConfigError: the root is missing, no directory, not writable, writable by others, or held by another daemon.
    """
    try:
        folder = OwnFolder(root, CONFIG_KEY, may_be_link=True)
    except OSError as cause:
        unmounted = isinstance(cause, FileNotFoundError)  # its file system may be mounted later
        raise ConfigError(f"{root}: {cause.strerror}", field=CONFIG_KEY, retryable=unmounted) from cause
    try:
        _check(folder)
        folder.lock(LOCK_FILE, "keeps its blocks in")
    except OSError as cause:
        folder.close()
        raise ConfigError(f"{root / LOCK_FILE}: {cause.strerror}", field=CONFIG_KEY) from cause
    except BaseException:
        folder.close()
        raise
    return folder


def _check(folder: OwnFolder) -> None:
    if folder.mode & OTHERS_WRITE:
        raise ConfigError(
            f"{folder.path} (mode {folder.mode:04o}) can be written by others, who could plant blocks: leave it as it "
            "is, and name a folder of the daemon's own, mode 0700",
            field=CONFIG_KEY,
        )
    if not os.access(folder.by_descriptor, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{folder.path} cannot be read and written by user {os.geteuid()}", field=CONFIG_KEY)


SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that say nothing of a file or folder: no descriptor or memory was left."""
SHORT_S = 0.05
"""After how long a scan tries again."""


def _is_short(error: DiskError) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in SHORT


_LEVELS = (TENANT_NAME, FORM_NAME, GROUP_NAME, LEAF_NAME)
_FORM_LEVEL = 1


class Candidate(NamedTuple):
    """A file with the name of block ``key``, and its last use: the modification time, Unix time."""

    key: BlockKey
    used_ns: int


class DiskCounts:
    """What a store has found since it was opened."""

    __slots__ = ("damaged", "foreign", "leftovers", "outdated", "unreadable")

    def __init__(self) -> None:
        self.damaged = 0
        """Files removed because their bytes are not what was written."""
        self.foreign = 0
        """Files and folders under the root that are not the store's, left alone."""
        self.leftovers = 0
        """Unfinished files of dead writers, removed."""
        self.outdated: list[str] = []
        """Folders of blocks in an older format, which does not name the model: never served, left alone."""
        self.unreadable = 0
        """Files and folders that the operating system did not allow a scan to read, left alone."""


class DiskWalk:
    """One walk through a root."""

    def __init__(self, root: Path, token: str, counts: DiskCounts, *, tidy: bool = True) -> None:
        """Walk through ``root``; unfinished files with ``token`` in their names still have a writer.

        ``tidy``: remove the others.
        """
        self._tidy = tidy
        self._root = root
        self._token = token
        self._counts = counts

    def steps(self) -> Iterator[list[Candidate]]:
        """Yield the block files of one folder after another; each step takes about a millisecond."""
        return self._folders(self._root, 0)

    def _folders(self, folder: Path, level: int) -> Iterator[list[Candidate]]:
        if level == len(_LEVELS):
            yield self._files(folder, (yield from self._entries(folder)))
            return
        for entry in (yield from self._entries(folder)):
            if entry.is_dir(follow_symlinks=False) and _LEVELS[level].match(entry.name):
                yield from self._folders(Path(entry.path), level + 1)
            elif level == _FORM_LEVEL and OUTDATED_NAME.match(entry.name):
                self._counts.outdated.append(str(Path(entry.path).relative_to(self._root)))
            elif level or entry.name != LOCK_FILE:
                self._counts.foreign += 1
        yield []

    def _files(self, folder: Path, entries: Sequence[os.DirEntry[str]]) -> list[Candidate]:
        found = []
        namespace = namespace_of(folder)
        for entry in entries:
            part = PART_NAME.match(entry.name)
            if not entry.is_file(follow_symlinks=False) or not (part or self._is_block(entry.name, folder)):
                self._counts.foreign += 1
            elif part is None:
                found += self._candidate(entry, namespace)
            elif part[1] != self._token and self._tidy:
                self._counts.leftovers += self._removed(entry)
        return found

    def _entries(self, folder: Path) -> Generator[list[Candidate], None, list[os.DirEntry[str]]]:
        """Return what is in a folder; yield nothing, time and again, while no descriptor is left to read it."""
        while True:
            try:
                with os.scandir(folder) as entries:
                    return list(entries)
            except FileNotFoundError:
                return []
            except OSError as cause:
                if cause.errno not in SHORT:
                    self._counts.unreadable += 1
                    return []
            time.sleep(SHORT_S)
            yield []

    @staticmethod
    def _is_block(name: str, folder: Path) -> re.Match[str] | None:
        return BLOCK_NAME.match(name) if name[:2] == folder.name else None

    @staticmethod
    def _candidate(entry: os.DirEntry[str], namespace: Namespace) -> list[Candidate]:
        try:
            used_ns = entry.stat(follow_symlinks=False).st_mtime_ns
        except OSError:
            return []  # removed since
        return [Candidate(BlockKey(namespace, bytes.fromhex(entry.name)), used_ns)]

    @staticmethod
    def _removed(entry: os.DirEntry[str]) -> bool:
        try:
            Path(entry.path).unlink()
        except OSError:
            return False
        return True


Fsync = Literal["never", "interval", "block"]

FOLDER_MODE = 0o700
FILE_MODE = 0o600
"""Cached blocks reveal what the prompts were."""
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
COOLING_FILES = 16
"""A file's last bytes can be dropped from the page cache only after writeback: this many files later."""

_T = TypeVar("_T")


class FoundBlock(NamedTuple):
    """A complete file found by a scan; ``size_bytes`` includes the header, ``used_ns`` is Unix time."""

    header: BlockHeader
    size_bytes: int
    used_ns: int


class ExaminedFiles(NamedTuple):
    """What a step of an examination found: files by block, with their sizes (-1: damaged), and what is wrong."""

    sizes: dict[BlockKey, int]
    problems: list[Problem]


class DiskStore:
    """The files under one root, which is this daemon's alone from ``__init__`` to ``close``. A context manager."""

    def __init__(self, root: Path, fsync: Fsync = "never") -> None:
        """Lock the root; its contents are unknown before ``scan``.

        Raises:
            ConfigError: the root is missing, not writable, writable by others, or held by another daemon.
        """
        self.root = root
        self.fsync = fsync
        self.counts = DiskCounts()
        self._folder = lock_root(root)
        self._base = self._folder.by_descriptor  # the root itself, whatever takes its place
        self._mutex = threading.Lock()
        self._folders: dict[tuple[Namespace, bytes], Path] = {}
        self._token = secrets.token_hex(8)
        self._numbers = count(1)
        self._written: set[BlockKey] | None = set()  # what a scan need not report; None once it has ended
        self._cooling: dict[BlockKey, int] = {}
        self._dirty: dict[BlockKey, None] = {}
        self._removed: list[BlockKey] = []
        self._dirty_folders: dict[Path, None] = {}

    def __repr__(self) -> str:
        return f"<DiskStore {self.root}: {self.counts.damaged} damaged>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the store."""
        self.close()

    def close(self) -> None:
        """Release the root, without a sync. Writers and readers must have ended."""
        if self._folder.fd < 0:
            return
        for fd in self._cooling.values():
            _drop_and_close(fd)
        self._cooling.clear()
        self._folder.close()

    def begin_write(
        self,
        key: BlockKey,
        buffers: Sequence[memoryview],
        digests: Sequence[int],
        parent: bytes | None = None,
        model: str = "",
    ) -> BlockWriter:
        """Begin to write a block; an existing one of that key stays until ``finish`` replaces it.

        Args:
            key: of the block, of ``namespace.block_pages`` pages.
            buffers: the bytes of each page, all of one length, at least 1; they must not change until the end.
            digests: the XXH3-64 of each page; () for the writer to compute them.
            parent: the hash of the block before it, 16 bytes, or None.
            model: the label of the model whose KV it is, for people.

        Raises:
            DiskFullError: no space is left, not even for the file's name.
            DiskFailedError: the disk failed.
            ValueError: the key does not give a valid file name.
        """
        pages, page_bytes = key.namespace.block_pages, buffers[0].nbytes
        assert len(buffers) == pages
        assert len(digests) in {0, pages}
        assert page_bytes > 0
        assert parent is None or len(parent) == HASH_BYTES
        assert all(buffer.nbytes == page_bytes for buffer in buffers)
        path = self._path(key)
        part = path.with_name(f"{path.name}.{self._token}-{next(self._numbers):x}.part")
        with disk_errors(part):
            fd = self._create(part)
        header = new_header(key, page_bytes, tuple(digests), parent, model)
        return BlockWriter(part, fd, header, buffers, self._publish)

    def begin_read(self, key: BlockKey, buffers: Sequence[memoryview]) -> BlockReader:
        """Begin to read a block into writable buffers, one per page, of the length that was written.

        Raises:
            MissingBlockError: there is no such block.
            DamagedBlockError: the file is not that block with pages of this size. It was removed.
            DiskFailedError: the disk failed.
        """
        return BlockReader(self._path(key), key, buffers, self._drop_damaged)

    def remove(self, key: BlockKey) -> None:
        """Remove a block, if it is there. Readers that have it open go on; a power cut may bring it back.

        Raises:
            DiskFailedError: the disk failed.
        """
        path = self._path(key)
        with self._mutex:
            try:
                with disk_errors(path):
                    path.unlink(missing_ok=True)
            finally:
                self._stop_cooling(key)
            self._dirty.pop(key, None)

    @property
    def dirty(self) -> int:
        """Return how many files ``sync_dirty`` has to write out."""
        return len(self._dirty)

    def sync_dirty(self, max_files: int = 64) -> int:
        """Write out what was stored since the last call, at most ``max_files`` files; return how many are left.

        Does nothing unless the fsync policy is ``interval``. A file that the disk does not take is removed, as it is
        unknown what the disk has of it: ``take_removed`` tells. One that cannot even be opened, as where no descriptor
        is left, stays, and is written out the next time.

        Raises:
            DiskFullError: no space is left after all.
            DiskFailedError: the disk failed, or a file could not be opened.
        """
        taken = self._taken(self._dirty, max_files)
        while taken:
            try:
                self._sync(taken[0])
            except BaseException:
                with self._mutex:
                    again = [key for key in taken if key not in self._removed]
                    self._dirty = {**dict.fromkeys(again), **self._dirty}
                raise
            taken.pop(0)
        if not self._dirty:
            for folder in self._taken(self._dirty_folders, len(self._dirty_folders)):
                with disk_errors(folder), suppress(FileNotFoundError):
                    _sync_folder(folder)
        return len(self._dirty)

    def take_removed(self) -> list[BlockKey]:
        """Return the blocks whose files were removed since the last call, because the disk did not take them."""
        with self._mutex:
            removed, self._removed = self._removed, []
            return removed

    def _sync(self, key: BlockKey) -> None:
        """Write out a file; what the disk did not take is removed."""
        path = self._path(key)
        with disk_errors(path):
            try:
                fd = os.open(path, READ_FLAGS)
            except FileNotFoundError:
                return
        try:
            with disk_errors(path):
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except DiskError:
            self.remove(key)
            with self._mutex:
                self._removed.append(key)
            raise
        finally:
            os.close(fd)

    def scan(self, files_a_step: int = 32) -> Generator[tuple[FoundBlock, ...], None, None]:
        """Yield, step by step, the complete blocks that exist under the root, least recently used first.

        A step takes about a millisecond and may yield none. Headers and lengths are checked; pages are checked when
        they are read. Leftovers of dead writers and damaged files are removed; foreign files are counted. Writers and
        readers may be used between the steps; blocks that this store has written are not yielded.

        Args:
            files_a_step: number of files to open in a step.
        """
        try:
            yield from self._scan(files_a_step)
        finally:
            self._written = None

    def _scan(self, files_a_step: int) -> Iterator[tuple[FoundBlock, ...]]:
        candidates: list[Candidate] = []
        for some in DiskWalk(self._base, self._token, self.counts).steps():
            candidates += some
            yield ()
        times = np.fromiter((one.used_ns for one in candidates), np.int64, len(candidates))
        order = np.argsort(times)  # sorting a list would hold the GIL for long
        step: list[Candidate] = []
        for first in range(0, len(order) + files_a_step, files_a_step):
            ahead = [candidates[index] for index in order[first : first + files_a_step].tolist()]
            for candidate in ahead:
                ask_for_header(self._path(candidate.key))
            while True:
                found, step = self._readable(step)
                yield found
                if not step:
                    break
                time.sleep(SHORT_S)
            step = ahead

    def examine(self, *, deep: bool) -> Iterator[ExaminedFiles]:
        """Look at every file, a step at a time, and change nothing; ``deep``: read all pages too.

        A step opens one folder's files, or reads one page, and may yield nothing. Blocks may be written and removed
        between the steps.
        """
        for candidates in DiskWalk(self._base, self._token, DiskCounts(), tidy=False).steps():
            yield ExaminedFiles({}, [])
            for candidate in candidates:
                yield from self._examine(candidate.key, deep=deep)

    def size_of(self, key: BlockKey) -> int | None:
        """Return the size of a block's file, or None where there is none."""
        try:
            return self._path(key).lstat().st_size
        except OSError:
            return None

    def _examine(self, key: BlockKey, *, deep: bool) -> Iterator[ExaminedFiles]:
        path = self._path(key)
        try:
            opened = open_block(path, key, lambda _key, _fd: None)
        except MissingBlockError:
            return  # removed since
        except DiskError as error:
            if _is_short(error):  # it says nothing of the file
                yield ExaminedFiles({} if (size := self.size_of(key)) is None else {key: size}, [])
                return
            yield ExaminedFiles({key: -1}, [Problem(str(error).replace(f"{self._base}/", ""))])
            return
        try:
            yield ExaminedFiles({key: opened.size_bytes}, [])
            for page in range(opened.header.block_pages if deep else 0):
                size_bytes = opened.header.page_bytes
                first = opened.size_bytes - (opened.header.block_pages - page) * size_bytes
                if xxhash.xxh3_64_intdigest(os.pread(opened.fd, size_bytes, first)) != opened.header.digests[page]:
                    yield ExaminedFiles(
                        {}, [Problem(f"{path.relative_to(self._base)}: the checksum of page {page} is wrong")]
                    )
                    return
                yield ExaminedFiles({}, [])
        finally:
            os.close(opened.fd)

    def find(self, keys: Sequence[BlockKey]) -> list[FoundBlock | None]:
        """Return those of these blocks that are on disk, whether a scan has come to them or not; None for the others.

        Raises:
            DiskError: no descriptor is left.
        """
        return [self._found(Candidate(key, 0)) for key in keys]

    def _readable(self, candidates: Sequence[Candidate]) -> tuple[tuple[FoundBlock, ...], list[Candidate]]:
        """Return the blocks, and those of the candidates that no descriptor was left for."""
        found: list[FoundBlock] = []
        again = []
        for one in candidates:
            try:
                block = self._found(one)
            except DiskError:
                again.append(one)
            else:
                found += [] if block is None else [block]
        return tuple(found), again

    def _found(self, candidate: Candidate) -> FoundBlock | None:
        """Return the block, unless this store has written it, or it is gone, damaged or cannot be read.

        Raises:
            DiskError: no descriptor is left.
        """
        key = candidate.key
        try:
            opened = open_block(self._path(key), key, self._drop_damaged)
        except (MissingBlockError, DamagedBlockError):
            return None
        except DiskError as error:
            if _is_short(error):
                raise
            self.counts.unreadable += 1
            return None
        os.close(opened.fd)
        with self._mutex:  # looked at last: a block may be published meanwhile
            if self._written is not None and key in self._written:
                return None
        return FoundBlock(opened.header, opened.size_bytes, candidate.used_ns)

    def _publish(self, writer: BlockWriter) -> None:
        """Give a written file its final name."""
        path = self._path(writer.key)
        if self.fsync == "block":
            os.fdatasync(writer.fd)
        os.posix_fadvise(writer.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with self._mutex:
            writer.part.rename(path)
            if self._written is not None:
                self._written.add(writer.key)
            self._stop_cooling(writer.key)
            if self.fsync == "interval":
                self._dirty[writer.key] = self._dirty_folders[path.parent] = None
        if self.fsync == "block":
            try:
                _sync_folder(path.parent)
            except OSError:
                self.remove(writer.key)
                raise
        else:
            with suppress(OSError):  # no descriptor is left; the block has its name already
                self._cool(writer.key, os.dup(writer.fd))

    def _create(self, part: Path) -> int:
        """Open a new file, creating missing folders."""
        try:
            return os.open(part, _WRITE_FLAGS, FILE_MODE)
        except FileNotFoundError:
            self._make_folder(part.parent)
            return os.open(part, _WRITE_FLAGS, FILE_MODE)

    def _make_folder(self, folder: Path) -> None:
        missing = [one for one in (folder, *folder.parents) if one != self._base and self._base in one.parents]
        for one in reversed(missing):
            with suppress(FileExistsError):
                one.mkdir(FOLDER_MODE)
                if self.fsync == "block":
                    _sync_folder(one.parent)
                elif self.fsync == "interval":
                    with self._mutex:
                        self._dirty_folders[one.parent] = None

    def _path(self, key: BlockKey) -> Path:
        """Return the path of a block's file; ValueError if the key does not give a valid name."""
        place = key.namespace, key.hash[:1]
        if place not in self._folders:
            self._folders[place] = self._base / folder_of(key)
        return self._folders[place] / file_name(key)

    def _stop_cooling(self, key: BlockKey) -> None:
        """Close a file that is removed: an open descriptor would keep its space. The caller holds the mutex."""
        if key in self._cooling:
            os.close(self._cooling.pop(key))

    def _drop_damaged(self, key: BlockKey, fd: int) -> None:
        """Count a damaged file and remove it, unless a new one has replaced it meanwhile."""
        path = self._path(key)
        with self._mutex, suppress(OSError):
            self.counts.damaged += 1
            if os.path.samestat(path.lstat(), os.fstat(fd)):
                path.unlink()
                self._stop_cooling(key)

    def _taken(self, dirty: dict[_T, None], most: int) -> list[_T]:
        """Remove and return the oldest dirty items."""
        with self._mutex:
            taken = list(islice(dirty, most))
            for one in taken:
                del dirty[one]
        return taken

    def _cool(self, key: BlockKey, fd: int) -> None:
        """Keep a file open until its last bytes are probably written out, then drop them from the page cache."""
        with self._mutex:
            cooled = [self._cooling.pop(key)] if key in self._cooling else []  # by another writer of the block
            self._cooling[key] = fd
            if len(self._cooling) > COOLING_FILES:
                cooled.append(self._cooling.pop(next(iter(self._cooling))))
        for one in cooled:
            _drop_and_close(one)


def _drop_and_close(fd: int) -> None:
    """Drop a file from the page cache and close it."""
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

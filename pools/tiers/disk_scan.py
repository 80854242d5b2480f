"""Scanning the disk tier's root: blocks by name, leftovers of writers that died, foreign files.

Opens no block's file. Anything not named like a block is left alone; links are never followed.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvferry.pools.tiers.block_file import (
    BLOCK_NAME,
    FORM_NAME,
    LEAF_NAME,
    OUTDATED_NAME,
    PART_NAME,
    SPACE_NAME,
    TENANT_NAME,
    namespace_of,
)
from kvferry.pools.tiers.namespaces import BlockKey, Namespace
from kvferry.protocol.errors import ConfigError

# -- the root of the disk tier: private enough to hold prompts, and held by one daemon at a time.


LOCK_FILE = "kvferry.lock"
CONFIG_KEY = "tiers.disk.path"

_HOLDER_BYTES = 256


def lock_root(root: Path) -> int:
    """Lock the root; return the file descriptor whose closing releases it.

    Raises:
        ConfigError: the root is missing, no directory, not writable, writable by others, or held by another daemon.
    """
    try:
        _check(root)
        fd = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as cause:
        error = ConfigError(f"{root}: {cause.strerror}", field=CONFIG_KEY)
        error.retryable = isinstance(cause, FileNotFoundError)  # its file system may not be mounted yet
        raise error from cause
    try:
        _lock(fd, root)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(root: Path) -> None:
    status = root.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{root} is not a directory", field=CONFIG_KEY)
    if status.st_uid not in {0, os.geteuid()} or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{root} (mode {stat.S_IMODE(status.st_mode):04o}, user {status.st_uid}) can be written by others, who "
            f"could plant blocks: leave it as it is, and name a folder of the daemon's own, mode 0700",
            field=CONFIG_KEY,
        )
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{root} cannot be read and written by user {os.geteuid()}", field=CONFIG_KEY)


def _lock(fd: int, root: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except BlockingIOError:
        holder = os.pread(fd, _HOLDER_BYTES, 0).decode(errors="replace").strip() or "of unknown pid"
        error = ConfigError(
            f"another daemon ({holder}) keeps its blocks in {root}: stop it, or use another directory",
            field=CONFIG_KEY,
        )
        error.retryable = True
        raise error from None
    except OSError as cause:
        raise ConfigError(f"{root / LOCK_FILE}: {cause.strerror}", field=CONFIG_KEY) from cause


_LEVELS = (TENANT_NAME, FORM_NAME, SPACE_NAME, LEAF_NAME)
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

    def __init__(self, root: Path, token: str, counts: DiskCounts) -> None:
        """Walk through ``root``; unfinished files with ``token`` in their names still have a writer."""
        self._root = root
        self._token = token
        self._counts = counts

    def steps(self) -> Iterator[list[Candidate]]:
        """Yield the block files of one folder after another; each step takes about a millisecond."""
        return self._folders(self._root, 0)

    def _folders(self, folder: Path, level: int) -> Iterator[list[Candidate]]:
        if level == len(_LEVELS):
            yield self._files(folder)
            return
        for entry in self._entries(folder):
            if entry.is_dir(follow_symlinks=False) and _LEVELS[level].match(entry.name):
                yield from self._folders(Path(entry.path), level + 1)
            elif level == _FORM_LEVEL and OUTDATED_NAME.match(entry.name):
                self._counts.outdated.append(str(Path(entry.path).relative_to(self._root)))
            elif level or entry.name != LOCK_FILE:
                self._counts.foreign += 1
        yield []

    def _files(self, folder: Path) -> list[Candidate]:
        found = []
        namespace = namespace_of(folder)
        for entry in self._entries(folder):
            part = PART_NAME.match(entry.name)
            if not entry.is_file(follow_symlinks=False) or not (part or self._is_block(entry.name, folder)):
                self._counts.foreign += 1
            elif part is None:
                found += self._candidate(entry, namespace)
            elif part[1] != self._token:
                self._counts.leftovers += self._removed(entry)
        return found

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return list(entries)
        except FileNotFoundError:
            return []
        except OSError:
            self._counts.unreadable += 1
            return []

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

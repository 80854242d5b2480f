"""The root of the disk tier: fit to hold prompts, and held by one daemon at a time."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from pathlib import Path

from kvferry.protocol.errors import ConfigError

LOCK_FILE = "kvferry.lock"
CONFIG_KEY = "tiers.disk.path"

_HOLDER_BYTES = 256


def lock_root(root: Path) -> int:
    """Return the descriptor whose closing gives the root up.

    Raises:
        ConfigError: the root is missing, no directory, not ours to write in, others', or another daemon holds it.
    """
    try:
        _check(root)
        fd = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as cause:
        error = ConfigError(f"{root}: {cause.strerror}", field=CONFIG_KEY)
        error.retryable = isinstance(cause, FileNotFoundError)  # what it is on may be mounted yet
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
        raise ConfigError(f"{root} is no directory", field=CONFIG_KEY)
    if status.st_uid not in {0, os.geteuid()} or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{root} (mode {stat.S_IMODE(status.st_mode):04o}, user {status.st_uid}) can be written by others, who "
            f"could slip in blocks: leave it to them, and name a folder that is the daemon's own, mode 0700",
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
            f"another daemon ({holder}) keeps its blocks in {root}: stop it, or take another directory",
            field=CONFIG_KEY,
        )
        error.retryable = True
        raise error from None
    except OSError as cause:
        raise ConfigError(f"{root / LOCK_FILE}: {cause.strerror}", field=CONFIG_KEY) from cause

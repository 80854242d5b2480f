"""The runtime directory: who may enter it, and a lock that admits one daemon at a time."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from kvferry.protocol.errors import AccessDeniedError, ConfigError
from kvferry.protocol.settings import CONTROL_SOCKET, PEER_SOCKET, SESSION_SOCKET

DIRECTORY_MODE = 0o750
SOCKET_MODE = 0o660
PEER_SOCKET_MODE = 0o600
"""Whoever may connect to it passes for a daemon, so engines may not."""
LOCK_FILE = "daemon.lock"
DEVICE_POOLS_FILE = "device-pools.json"
MAX_SOCKET_PATH_BYTES = 107


class RuntimeDirectory:
    """A locked runtime directory. Use as a context manager; leaving it removes the sockets and releases the lock."""

    def __init__(self, path: Path) -> None:
        """Name the directory; ``__enter__`` creates it."""
        self.path = path
        self._lock_fd = -1

    @property
    def control_socket(self) -> Path:
        """Return the control socket's path."""
        return self.path / CONTROL_SOCKET

    @property
    def session_socket(self) -> Path:
        """Return the session socket's path."""
        return self.path / SESSION_SOCKET

    @property
    def peer_socket(self) -> Path:
        """Return the path of the socket for other daemons of this host."""
        return self.path / PEER_SOCKET

    def check_path(self) -> None:
        """Check what depends on the path alone.

        Raises:
            ConfigError: the path is too long for sockets.
        """
        if len(os.fsencode(self.control_socket)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"{self.control_socket} is longer than the {MAX_SOCKET_PATH_BYTES} bytes of a socket's path",
                field="runtime_dir",
            )

    def __enter__(self) -> Self:
        """Create the directory, lock it, and remove what a dead daemon left.

        Raises:
            ConfigError: the path is too long or not a directory, the directory is shared with other things, or another
                daemon runs in it; the last is retryable.
            AccessDeniedError: it cannot be created or written.
        """
        self.check_path()
        try:
            self._make()
            self._lock()
            for socket in (self.control_socket, self.session_socket, self.peer_socket):
                socket.unlink(missing_ok=True)
        except OSError as cause:
            raise AccessDeniedError(f"{self.path}: {cause.strerror}", field="runtime_dir") from cause
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the sockets and release the lock."""
        for socket in (self.control_socket, self.session_socket, self.peer_socket):
            socket.unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, mode=DIRECTORY_MODE)
        except NotADirectoryError:
            raise ConfigError(f"{self.path}: a parent of it is a file", field="runtime_dir") from None
        except FileExistsError:
            self._close_to_others()
        else:
            self.path.chmod(DIRECTORY_MODE)  # whatever the umask is

    def _close_to_others(self) -> None:
        """Remove others' permissions from an existing directory, unless it is not the daemon's alone; never add any."""
        if not self.path.is_dir():
            raise ConfigError(f"{self.path} is not a directory", field="runtime_dir")
        mode = stat.S_IMODE(self.path.stat().st_mode)
        if not mode & ~DIRECTORY_MODE:
            return
        ours = {CONTROL_SOCKET, SESSION_SOCKET, PEER_SOCKET, LOCK_FILE, DEVICE_POOLS_FILE}
        foreign = {one.name for one in self.path.iterdir()} - ours
        if foreign or mode & stat.S_ISVTX:
            holds = f" and holds other files ({min(foreign)})" if foreign else ", which is shared by users"
            raise ConfigError(
                f"{self.path} has mode {mode:04o}{holds}: give the daemon a directory of its own",
                field="runtime_dir",
            )
        self.path.chmod(mode & DIRECTORY_MODE)

    def _lock(self) -> None:
        self._lock_fd = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock_fd)
            raise ConfigError(
                f"another daemon (pid {holder}) runs in {self.path}",
                field="runtime_dir",
                retryable=True,
                remedy="stop it, or use another directory",
            ) from None
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

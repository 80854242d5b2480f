"""The runtime directory: who may enter it, a lock that admits one daemon at a time, and the sockets in it.

It is opened once, see ``OwnFolder``; nothing is made or removed in another one that has its path later. A listening
socket is the service manager's, where that has passed one: its file stays there when the daemon ends, so that those
who connect meanwhile wait.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from kvferry.daemon.process.inherited import Inherited
from kvferry.pools.tiers.own_folder import OwnFolder
from kvferry.protocol.config.tenants import whose
from kvferry.protocol.errors import AccessDeniedError, ConfigError
from kvferry.protocol.settings import CONTROL_SOCKET, METRICS_SOCKET, PEER_SOCKET, SESSION_SOCKET

DIRECTORY_MODE = 0o710
"""Others may enter it, but not list it: a process that may open a directory may lock it."""
MOST_MODE: Final = 0o750
PARENT_MODE = 0o755
SOCKET_MODE = 0o660
PEER_SOCKET_MODE = 0o600
"""Whoever may connect to it passes for a daemon, so engines may not."""
LOCK_FILE = "daemon.lock"
_SO_PASSRIGHTS: Final = 83
DEVICE_POOLS_FILE = "device-pools.json"
HOLDER_SOCKET = "holder.sock"
KEEPER_SOCKET = "keeper.sock"
MAX_SOCKET_PATH_BYTES = 107
BACKLOG: Final = 1024
MOST_LINKS: Final = 40
"""Symbolic links on the way to a file: as the kernel's bound."""
DYING_MS: Final = 1000
"""For how long a killed daemon, whose lock is free already, may still have its sockets open."""
ACTIVATED: Final = (CONTROL_SOCKET, SESSION_SOCKET)
"""What a service manager may listen on for the daemon."""

MODES: Final = {
    CONTROL_SOCKET: SOCKET_MODE,
    SESSION_SOCKET: SOCKET_MODE,
    METRICS_SOCKET: SOCKET_MODE,
    PEER_SOCKET: PEER_SOCKET_MODE,
}
OURS: Final = {*MODES, LOCK_FILE, DEVICE_POOLS_FILE, f"{DEVICE_POOLS_FILE}.new", HOLDER_SOCKET, KEEPER_SOCKET}
_FIELD: Final = "runtime_dir"
SOCKETS: Final = "sockets"
"""What the socket unit calls those that it listens on (FileDescriptorName=)."""

OWN_SOCKETS: Final = "own-sockets"
LOCK: Final = "lock"
"""What one daemon hands over to the next: sockets that it has bound itself, and the lock."""


def may_see_all(tenant: int | None) -> bool:
    """Return whether a tenant is shown what is others'; None: unknown, as of a connection over the network."""
    return tenant in {0, os.geteuid()}


def check_operator(tenant: int | None, why: str) -> None:
    """Check that an operator asks for what operators alone may have; ``why`` says why.

    Raises:
        AccessDeniedError: another user does.
    """
    if not may_see_all(tenant):
        who = "the caller" if tenant is None else whose(tenant)
        raise AccessDeniedError(f"{why}: {who} is neither root nor the daemon's own user {os.geteuid()}")


def folder_of_others(path: Path) -> Path | None:
    """Return the first folder on the way to a path in which others may make or replace what comes next, if any.

    Others are all but root and the daemon's own user. Nothing behind that folder is looked at: it may be on a file
    system of theirs that never answers. Folders that are missing can only be made in the last one that is there.
    """
    folder, ahead, links = Path("/"), deque(path.parts), 0
    while ahead:
        found, name = os.lstat(folder), ahead.popleft()
        if name == "..":
            folder = folder.parent
            continue
        is_open = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        if not may_see_all(found.st_uid) or (is_open and not found.st_mode & stat.S_ISVTX):
            return folder
        try:
            child = os.lstat(folder / name)
        except (FileNotFoundError, NotADirectoryError):
            return folder if is_open else None
        if is_open and not may_see_all(child.st_uid):  # in a sticky folder, where only its owner replaces what is there
            return folder
        links += stat.S_ISLNK(child.st_mode)
        if links > MOST_LINKS:
            return folder
        if stat.S_ISLNK(child.st_mode):
            ahead.extendleft(reversed((folder / name).readlink().parts))
        else:
            folder /= name
    return None


class Listener(NamedTuple):
    """A listening Unix socket, and the path by which it is reached."""

    path: Path
    socket: socket.socket


class RuntimeDirectory:
    """A locked runtime directory. A context manager; leaving it removes its own sockets and releases the lock.

    Attributes:
        path: how clients find it.
        folder: it, by its descriptor, while it is locked.
    """

    folder: OwnFolder

    def __init__(self, path: Path, inherited: Inherited | None = None) -> None:
        """Name the directory; ``__enter__`` creates it.

        Args:
            path: absolute.
            inherited: of which it takes the ``SOCKETS`` that a service manager listens on, and what the daemon before
                this one has ``handed_over``.
        """
        self.path = path
        passed = inherited or Inherited()
        self._activated, self._handed = (
            [socket.socket(fileno=fd) for fd in passed.take(name)] for name in (SOCKETS, OWN_SOCKETS)
        )
        self._lock = passed.take(LOCK)
        self._sockets: dict[str, socket.socket] = {}
        self._listening: dict[str, socket.socket] = {}
        self._bound: dict[str, os.stat_result] = {}

    def check_path(self) -> None:
        """Check what depends on the path alone.

        Raises:
            ConfigError: the path is too long for sockets, or the service manager listens elsewhere.
        """
        control = self.path / CONTROL_SOCKET
        if len(os.fsencode(control)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"{control} is longer than the {MAX_SOCKET_PATH_BYTES} bytes of a socket's path", field=_FIELD
            )
        for one in self._activated:
            if not self._is_ours(one):
                raise ConfigError(
                    f"the service manager listens on {one.getsockname()!r}, which is none of "
                    f"{' and '.join(os.fspath(self.path / name) for name in ACTIVATED)}",
                    field=_FIELD,
                    remedy="name the same directory in ListenStream= of the socket unit and in --runtime-dir",
                )

    def __enter__(self) -> Self:
        """Create the directory, lock it, and remove what a dead daemon left.

        Raises:
            ConfigError: the path is too long or not a directory, others could have put something into it or in its
                place, it is shared with other things, or another daemon runs in it; the last is retryable.
            AccessDeniedError: it cannot be created or written.
        """
        self.check_path()
        try:
            made = self._make()
            self.folder = OwnFolder(self.path, _FIELD)
            try:
                self._prepare(made=made)
            except BaseException:
                self._close()
                raise
        except OSError as cause:
            raise AccessDeniedError(f"{self.path}: {cause.strerror}", field=_FIELD) from cause
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the sockets that are the daemon's own, and release the lock."""
        self._close()

    def listen(self, name: str) -> Listener:
        """Return the socket of this name, which listens from now on; the caller owns it.

        The kernel lets no descriptors through to its connections, where it can.
        """
        one = self._listening[name] = self._sockets.pop(name)
        pass_descriptors(one, allowed=False)
        if name in self._bound:
            one.listen(BACKLOG)
        return Listener(self.path / name, one)

    def handed_over(self) -> dict[str, list[int]]:
        """Return copies of the lock and of the sockets that listen, for the next daemon: leaving keeps both then."""
        handed: dict[str, list[int]] = {LOCK: [os.dup(fd) for fd in self.folder.locked]}
        for name, one in self._listening.items():
            handed.setdefault(OWN_SOCKETS if name in self._bound else SOCKETS, []).append(os.dup(one.fileno()))
        self._bound.clear()
        return handed

    def close(self) -> None:
        """Close the sockets that nobody has asked for."""
        for one in (*self._activated, *self._handed, *self._sockets.values()):
            one.close()

    def _close(self) -> None:
        self.close()
        for name, bound in self._bound.items():
            self.folder.remove(name, only=bound)
        self._bound.clear()
        self.folder.close()

    def _prepare(self, *, made: bool) -> None:
        if made:
            os.fchmod(self.folder.fd, DIRECTORY_MODE)  # whatever the umask is
        else:
            _close_to_others(self.folder)
        match self._lock:
            case [folder, lock]:
                self.folder.hold((folder, lock))
            case _:
                self.folder.lock(LOCK_FILE, "runs in")
        for one in (*self._activated, *self._handed):
            one.setblocking(False)  # noqa: FBT003  socket's own signature
            self._sockets[Path(one.getsockname()).name] = one
        for one in self._handed:
            name = Path(one.getsockname()).name
            self._bound[name] = self._checked_place(self.path / name)
        missing = MODES.keys() - self._sockets.keys()
        for name in missing:
            self._check_left_over(name)
        for name in missing:
            self.folder.remove(name)
            self._sockets[name] = bind(self.path / name, MODES[name])
            self._bound[name] = self._checked_place(self.path / name)

    def _check_left_over(self, name: str) -> None:
        """Check that nobody listens on a socket of this user or root, as a service manager does without its daemon.

        Raises:
            ConfigError: somebody does, who would never be connected to again.
        """
        found = self.folder.find(name)
        if found is None or not self.folder.is_own(found):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
            try:
                probe.connect(os.fspath(self.folder.by_descriptor / name))
            except BlockingIOError:
                pass  # many wait to be accepted
            except OSError:
                return
            hangs_up = select.poll()
            hangs_up.register(probe, 0)
            if hangs_up.poll(DYING_MS):
                return
        raise ConfigError(
            f"another process, as a service manager's socket unit, listens on {self.path / name}",
            field=_FIELD,
            retryable=True,
            remedy="start the daemon by its service manager, stop the socket unit, or use another directory",
        )

    def _checked_place(self, path: Path) -> os.stat_result:
        """Return the socket's file, which was bound in the locked directory: its name is the path, for `ss` and peers.

        Raises:
            ConfigError: another directory has taken the place of the locked one.
        """
        found = self.folder.find(path.name)
        if found is None or not os.path.samestat(found, path.lstat()):
            path.unlink()
            raise ConfigError(f"{self.path} is another directory by now than the one that is locked", field=_FIELD)
        return found

    def _is_ours(self, one: socket.socket) -> bool:
        return (
            one.family == socket.AF_UNIX
            and one.type == socket.SOCK_STREAM
            and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
            and one.getsockname() in {os.fspath(self.path / name) for name in ACTIVATED}
        )

    def _make(self) -> bool:
        """Create the directory and its parents where they are missing; return whether it is new."""
        try:
            for parent in reversed(self.path.parents):
                if not parent.exists():
                    parent.mkdir(PARENT_MODE)
            self.path.mkdir(DIRECTORY_MODE)
        except NotADirectoryError:
            raise ConfigError(f"{self.path}: a parent of it is a file", field=_FIELD) from None
        except FileExistsError:
            return False
        return True


def listen_on(path: Path, mode: int) -> socket.socket:
    """Return a new listening Unix socket, whose file has this mode from its first moment.

    Raises:
        OSError: it cannot be made.
    """
    made = bind(path, mode)
    made.listen(BACKLOG)
    return made


def bind(path: Path, mode: int) -> socket.socket:
    """Return a Unix socket that is bound, but does not listen yet; see ``listen_on``."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    umask = os.umask(0o777 & ~mode)
    try:
        made.bind(os.fspath(path))
    except BaseException:
        made.close()
        raise
    finally:
        os.umask(umask)
    return made


def pass_descriptors(one: socket.socket, *, allowed: bool) -> None:
    """Have the kernel let descriptors through to a Unix socket or not, where it can.

    Connections that are made to a listening socket have what it has.
    """
    try:
        one.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, int(allowed))
    except OSError as cause:
        if cause.errno not in {errno.ENOPROTOOPT, errno.EOPNOTSUPP}:  # before Linux 6.16
            raise


def _close_to_others(folder: OwnFolder) -> None:
    """Remove others' permissions from an existing directory, unless it is not the daemon's alone; never add any."""
    if not folder.mode & ~MOST_MODE:
        return
    foreign = {one.name for one in folder.by_descriptor.iterdir()} - OURS
    sticky = folder.mode & 0o1000
    if foreign or sticky:
        holds = f" and holds other files ({min(foreign)})" if foreign else ", which is shared by users"
        raise ConfigError(
            f"{folder.path} has mode {folder.mode:04o}{holds}: give the daemon a directory of its own", field=_FIELD
        )
    os.fchmod(folder.fd, folder.mode & DIRECTORY_MODE)

"""A folder of this process's own: opened once, checked, and worked in by its descriptor, so that nobody can swap it.

What another user could have put there, or could put in its place, is refused: a link, a foreign owner, a parent that
others write. Files are opened without following links, and are checked before a byte of them is changed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvferry.protocol.errors import ConfigError

OTHERS_READ: Final = stat.S_IRGRP | stat.S_IROTH
OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
FILE_MODE: Final = 0o600
MAX_FILE_BYTES: Final = 64 << 20
_HOLDER_BYTES: Final = 256
_NO_FILE: Final = {errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV}
"""What opening says of a symbolic link, a socket, a folder and a device."""

_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class OwnFolder:
    """A folder, from ``__init__`` to ``close``. Its files are named without a path."""

    def __init__(self, path: Path, field: str, *, may_be_link: bool = False) -> None:
        """Open the folder.

        Args:
            path: absolute.
            field: the configuration key that names it, for errors.
            may_be_link: to a folder elsewhere, made by this user or root.

        Raises:
            ConfigError: it is no directory, or is not this user's alone; see the module.
            OSError: it is not there, or cannot be opened.
        """
        self.path = path
        self._field = field
        self._lock_fd = -1
        for way in _ways(path, may_be_link=may_be_link):
            _check_way(way, path, field)
        try:
            found = os.path.realpath(path, strict=True) if may_be_link else os.fspath(path)
            self.fd = os.open(found, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except NotADirectoryError:
            raise ConfigError(f"{path} is not a directory", field=field) from None
        owner = os.fstat(self.fd).st_uid
        if owner not in _trusted():
            os.close(self.fd)
            raise ConfigError(f"{path} belongs to user {owner}: name a folder of the daemon's own", field=field)

    def __repr__(self) -> str:
        """Show the path, and whether it is locked."""
        return f"<OwnFolder {self.path}{' locked' if self._lock_fd >= 0 else ''}>"

    @property
    def mode(self) -> int:
        """Return its permissions."""
        return stat.S_IMODE(os.fstat(self.fd).st_mode)

    @property
    def by_descriptor(self) -> Path:
        """Return a path to it that leads to this very folder, whatever is at ``path`` by now."""
        return Path(f"/proc/self/fd/{self.fd}")

    def close(self) -> None:
        """Close it, and release its lock."""
        for fd in {self.fd, self._lock_fd} - {-1}:
            os.close(fd)
        self.fd = self._lock_fd = -1

    def lock(self, name: str, use: str) -> None:
        """Lock the folder, until it is closed; ``use`` says what for: "another daemon USE PATH".

        The lock is on the folder itself, which no cleaner of old files can replace, and on this file in it, which says
        who holds it, and which hosts of a network file system see. A process that may open either may lock it, so both
        are closed to others.

        Raises:
            ConfigError: another process has locked it (retryable), or the file is no file of this user's own.
            OSError: the file cannot be opened or written.
        """
        fd = self._open_lock(name)
        try:
            for one in (self.fd, fd):
                fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(fd, FILE_MODE)
            with suppress(PermissionError):  # root's folder
                os.fchmod(self.fd, self.mode & ~OTHERS_READ)
            self._sign(fd)
        except BlockingIOError:
            holder = os.pread(fd, _HOLDER_BYTES, 0).decode(errors="replace").strip() or "of unknown pid"
            os.close(fd)
            raise ConfigError(
                f"another daemon ({holder}) {use} {self.path}",
                field=self._field,
                retryable=True,
                remedy="stop it, or use another directory",
            ) from None
        except BaseException:
            os.close(fd)
            raise
        self._lock_fd = fd

    @property
    def locked(self) -> tuple[int, int]:
        """Return the descriptors that have the lock: it is held as long as anybody has them."""
        return self.fd, self._lock_fd

    def hold(self, locked: tuple[int, int]) -> None:
        """Take over the lock that another process has had; the descriptors are owned from now on.

        Raises:
            ConfigError: they are of another folder.
        """
        folder, fd = locked
        if not os.path.samestat(os.fstat(folder), os.fstat(self.fd)):
            for one in locked:
                os.close(one)
            raise ConfigError(f"{self.path} is another directory by now", field=self._field)
        os.close(self.fd)
        self.fd, self._lock_fd = locked
        self._sign(fd)

    def read(self, name: str) -> bytes:
        """Return a file's contents, at most ``MAX_FILE_BYTES`` of them.

        Raises:
            OSError: it is not there, or cannot be read.
            ConfigError: it is no file of this user's own.
        """
        with open(self._opened(name, os.O_RDONLY), "rb") as file:  # noqa: PTH123  a descriptor
            return file.read(MAX_FILE_BYTES)

    def replace(self, name: str, data: bytes) -> None:
        """Give a file new contents, at once or not at all.

        Raises:
            OSError: it cannot be written.
        """
        new = f"{name}.new"
        with suppress(FileNotFoundError):
            os.unlink(new, dir_fd=self.fd)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, FILE_MODE, dir_fd=self.fd)
        with open(fd, "wb") as file:  # noqa: PTH123  a descriptor
            file.write(data)
        os.replace(new, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def find(self, name: str) -> os.stat_result | None:
        """Return what is there under a name, without following a link; None: nothing."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def remove(self, name: str, only: os.stat_result | None = None) -> None:
        """Remove a file, link or socket, if there is one; with ``only``, nothing but this very one.

        Raises:
            OSError: it cannot be removed.
        """
        found = self.find(name)
        if found is not None and (only is None or os.path.samestat(found, only)):
            os.unlink(name, dir_fd=self.fd)

    def is_own(self, found: os.stat_result) -> bool:
        """Return whether something in it is this user's or root's."""
        return found.st_uid in _trusted()

    @staticmethod
    def _sign(lock: int) -> None:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _open_lock(self, name: str) -> int:
        return self._opened(name, os.O_RDWR | os.O_CREAT)

    def _opened(self, name: str, flags: int) -> int:
        try:
            fd = os.open(name, flags | _FLAGS, FILE_MODE, dir_fd=self.fd)
        except OSError as cause:
            if cause.errno in _NO_FILE:
                raise self._foreign(name, "no regular file") from None
            raise
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            wrong = "no regular file"
        elif found.st_uid not in _trusted():
            wrong = f"of user {found.st_uid}"
        elif found.st_nlink != 1:
            wrong = f"linked from {found.st_nlink} places"
        else:
            return fd
        os.close(fd)
        raise self._foreign(name, wrong)

    def _foreign(self, name: str, wrong: str) -> ConfigError:
        return ConfigError(
            f"{self.path / name} is {wrong}", field=self._field, remedy="see who put it there, and remove it"
        )


def _trusted() -> set[int]:
    """Return whom this process believes: itself, and root, who can do anything in any case."""
    return {0, os.geteuid()}


def _ways(path: Path, *, may_be_link: bool) -> Iterator[Path]:
    """Yield what leads to a path: as it is written, and without links."""
    yield from path.parents
    yield from (Path(os.path.realpath(path)) if may_be_link else Path(os.path.realpath(path.parent), path.name)).parents
    if may_be_link and path.is_symlink():
        yield path


def _check_way(way: Path, path: Path, field: str) -> None:
    """Check that nobody else can put another folder in the place of ``path``.

    Raises:
        ConfigError: somebody can.
    """
    try:
        found = way.lstat()
    except NotADirectoryError:
        raise ConfigError(f"{path}: a parent of it is a file", field=field) from None
    except FileNotFoundError:
        return  # opening it says so
    if found.st_uid not in _trusted():
        who = f"belongs to user {found.st_uid}"
    elif stat.S_ISDIR(found.st_mode) and found.st_mode & OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        who = f"can be written by others (mode {stat.S_IMODE(found.st_mode):04o})"
    else:
        return
    raise ConfigError(
        f"{way} {who}, who could put another folder in the place of {path}",
        field=field,
        remedy=f"name a folder elsewhere, or take {way} from them: chown root, chmod go-w",
    )

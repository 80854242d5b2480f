"""The host as the checks see it: its files below a root, the environment, a user, and the daemon's Python.

On a real host the root is ``/``; any folder with the same structure works as well.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import sys
from pathlib import Path, PurePath

import msgspec

from kvferry.protocol.errors import InvalidFieldError


class User(msgspec.Struct, frozen=True):
    """The user that will use the devices: name, user id, and the ids of all groups."""

    name: str
    uid: int
    groups: frozenset[int]

    @classmethod
    def of_this_process(cls) -> User:
        """Return the user of this process."""
        uid = os.geteuid()
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:
            name = str(uid)
        return cls(name, uid, frozenset((os.getegid(), *os.getgroups())))

    @classmethod
    def named(cls, name: str) -> User:
        """Return a user of this host.

        Raises:
            InvalidFieldError: there is no user of that name.
        """
        try:
            entry = pwd.getpwnam(name)
        except KeyError as cause:
            raise InvalidFieldError(f"this host has no user {name!r}", field="user") from cause
        return cls(name, entry.pw_uid, frozenset(os.getgrouplist(name, entry.pw_gid)))

    def may_use(self, file: os.stat_result) -> bool:
        """Return whether the mode lets this user read and write; root always may, as in the kernel."""
        if self.uid == 0:
            return True
        if file.st_uid == self.uid:
            wanted = stat.S_IRUSR | stat.S_IWUSR
        elif file.st_gid in self.groups:
            wanted = stat.S_IRGRP | stat.S_IWGRP
        else:
            wanted = stat.S_IROTH | stat.S_IWOTH
        return file.st_mode & wanted == wanted


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The host to check.

    Attributes:
        root: the folder that stands for ``/``.
        environ: the environment for child processes.
        user: the user that will use the devices.
        python: the command of the interpreter whose packages are checked.
    """

    root: Path
    environ: dict[str, str]
    user: User
    python: tuple[str, ...]

    @classmethod
    def this_one(cls, user_name: str | None = None) -> Host:
        """Return the host that this runs on, for a user, by default the one of this process."""
        user = User.named(user_name) if user_name else User.of_this_process()
        return cls(root=Path("/"), environ=dict(os.environ), user=user, python=(sys.executable,))

    def path(self, name: str | PurePath) -> Path:
        """Return an absolute path of the host below ``root``."""
        return self.root / str(name).lstrip("/")

    def text(self, name: str | PurePath) -> str:
        """Return a file's text, stripped; empty if it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, folder: str | PurePath) -> list[str]:
        """Return the names in a folder, sorted; empty if it cannot be read."""
        try:
            return sorted(os.listdir(self.path(folder)))  # noqa: PTH208  names are wanted, not paths
        except OSError:
            return []

    def group_id(self, name: str) -> int | None:
        """Return a group's id; None if the host has no such group."""
        for line in self.text("/etc/group").splitlines():
            fields = line.split(":")
            if fields[0] == name and len(fields) > 2 and fields[2].isdigit():  # noqa: PLR2004  name:password:id:members
                return int(fields[2])
        if self.root != Path("/"):
            return None
        try:
            return grp.getgrnam(name).gr_gid  # groups may come from a directory service
        except KeyError:
            return None


def values(text: str) -> dict[str, str]:
    """Return the ``NAME=VALUE`` lines of a text; if a name is given twice, the first one counts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, is_given, value = line.partition("=")
        if is_given:
            found.setdefault(name.strip(), value.strip())
    return found

"""Advice about folders that harms nobody: what is not plainly the daemon's own keeps its owner and its mode.

``chmod 0700 /tmp`` ends every other program of a host. So a folder is to be given away or closed only where nothing
says that others use it. Else the advice is a folder of its own, below it or, where others could replace it, elsewhere.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from pathlib import Path, PurePosixPath
from typing import Final

from kvferry.clients.cli.doctor.host import Host, User
from kvferry.pools.tiers.block_file import FORM_NAME, OUTDATED_NAME, TENANT_NAME
from kvferry.pools.tiers.disk_scan import LOCK_FILE

STATE_FOLDER: Final = PurePosixPath("/var/lib/kvferry")
"""The systemd unit makes it, closed to all others (StateDirectory=)."""

_OF_THE_SYSTEM: Final = frozenset(
    ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "snap", "sys", "usr")
)
_OF_ALL: Final = re.compile(r"/|/[^/]+|/var/[^/]+")
"""The root, what lies directly in it and in /var: never one program's."""

_OF_MANY: Final = re.compile(r"/(home|mnt|media)/[^/]+|/media/[^/]+/[^/]+")
"""Somebody's home, or a disk that has more on it."""

_HOME: Final = 5
"""Which field of /etc/passwd it is."""

_FOREIGN_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def make_own(path: PurePosixPath | str, user: User) -> str:
    """Return the command that makes a folder for a user alone."""
    return f"install -d -m 0700 -o {shlex.quote(user.name)} {shlex.quote(str(path))}"


def close_to_others(host: Host, path: str, user: User, key: str) -> str:
    """Return how a user comes to a folder that nobody else can write to or look into.

    Args:
        host: where the folder is.
        path: the folder, which is there.
        user: who is to have it.
        key: of the configuration that names it.
    """
    folder = host.path(path)
    if is_shared(host, path, user):
        mine = PurePosixPath(path) / "kvferry"
        if not may_hold(host, path):
            mine = STATE_FOLDER
        return f'others use {path}: leave it as it is; {make_own(mine, user)}, and {key} = "{mine}"'
    name, quoted = shlex.quote(user.name), shlex.quote(path)
    whole = f"chown -R {name} {quoted}" if any(folder.iterdir()) else f"chown {name} {quoted}"
    return f"{whole}; chmod 0700 {quoted}" if folder.stat().st_uid != user.uid else f"chmod 0700 {quoted}"


def is_shared(host: Host, path: str, user: User) -> bool:
    """Return whether anything says that others use a folder, or may: also where nobody can look.

    It is nobody else's where it is empty, or a disk tier has been in it and nothing else, and neither its mode nor its
    place is one that is made for many.
    """
    folder = host.path(path)
    try:
        if folder.stat().st_mode & stat.S_ISVTX or os.path.ismount(folder):
            return True
        return _is_a_place_for_many(host, _real(host, folder), user) or _holds_others(folder, user)
    except OSError:
        return True


def may_hold(host: Host, path: str) -> bool:
    """Return whether a folder of one's own may lie in another: no system's, and nobody could replace what is in it."""
    real = _real(host, host.path(path))
    if len(real.parts) == 1 or real.parts[1] in _OF_THE_SYSTEM:
        return False
    modes = [host.path(one).stat().st_mode for one in (real, *real.parents)]
    return all(mode & stat.S_ISVTX or not mode & _FOREIGN_WRITE for mode in modes)


def is_of_all(path: PurePosixPath) -> bool:
    """Return whether a path can be no program's own, by its name alone."""
    return bool(_OF_ALL.fullmatch(str(path))) or path.parts[1] in _OF_THE_SYSTEM


def _holds_others(folder: Path, user: User) -> bool:
    """Return whether anything in a folder is no disk tier's, or neither the user's nor root's."""
    tenants = [one for one in folder.iterdir() if one.name != LOCK_FILE]
    forms = [one for tenant in tenants if TENANT_NAME.match(tenant.name) for one in tenant.iterdir()]
    if not tenants and not (folder / LOCK_FILE).exists():
        return False
    return not (
        (folder / LOCK_FILE).is_file()
        and all(TENANT_NAME.match(one.name) for one in tenants)
        and all(FORM_NAME.match(one.name) or OUTDATED_NAME.match(one.name) for one in forms)
        and all(one.is_dir() and not one.is_symlink() for one in (*tenants, *forms))
        and all(one.lstat().st_uid in {0, user.uid} for one in (folder / LOCK_FILE, *tenants, *forms))
    )


def _is_a_place_for_many(host: Host, path: PurePosixPath, user: User) -> bool:
    if is_of_all(path) or _OF_MANY.fullmatch(str(path)):
        return True
    others = [line.split(":") for line in host.text("/etc/passwd").splitlines() if not line.startswith(f"{user.name}:")]
    homes = [PurePosixPath(fields[_HOME]) for fields in others if len(fields) > _HOME]
    return any(home.is_relative_to(path) for home in homes)


def _real(host: Host, folder: Path) -> PurePosixPath:
    """Return where a folder of the host really is: a link is as shared as what it leads to."""
    return PurePosixPath("/") / folder.resolve().relative_to(host.root.resolve())

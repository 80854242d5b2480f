"""Safe advice about folders: a folder that is not clearly the daemon's own keeps its owner and its mode.

``chmod 0700 /tmp`` breaks every other program on a host. So changing a folder's owner or mode is advised only if
nothing indicates that others use it. Otherwise the advice is a separate folder, below it or, if others could replace
that, elsewhere.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from pathlib import Path, PurePosixPath
from typing import Final

from kvferry.clients.cli.doctor.host import Host, User
from kvferry.pools.tiers.block_file import FORM_NAME, LOCK_FILE, OUTDATED_NAME, TENANT_NAME

STATE_FOLDER: Final = PurePosixPath("/var/lib/kvferry")
"""The systemd unit creates it, accessible to the daemon only (StateDirectory=)."""

_OF_THE_SYSTEM: Final = frozenset(
    ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "snap", "sys", "usr")
)
_OF_ALL: Final = re.compile(r"/|/[^/]+|/var/[^/]+")
"""The root, and what is directly in it or in /var: never one program's own."""

_OF_MANY: Final = re.compile(r"/(home|mnt|media)/[^/]+|/media/[^/]+/[^/]+")
"""Somebody's home, or a mounted disk that may hold more."""

_HOME: Final = 5
"""Index of the home directory in a line of /etc/passwd."""

_FOREIGN_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def make_own(path: PurePosixPath | str, user: User) -> str:
    """Return the command that creates a folder accessible to one user only."""
    return f"install -d -m 0700 -o {shlex.quote(user.name)} {shlex.quote(str(path))}"


def close_to_others(host: Host, path: str, user: User, key: str) -> str:
    """Return how to get a folder that only the user can read and write.

    Args:
        host: where the folder is.
        path: of the folder, which exists.
        user: who will own it.
        key: the configuration key that names it.
    """
    folder = host.path(path)
    if is_shared(host, path, user):
        mine = PurePosixPath(path) / "kvferry"
        if not may_hold(host, path):
            mine = STATE_FOLDER
        return f'others use {path}: leave it as it is; {make_own(mine, user)}, and set {key} = "{mine}"'
    name, quoted = shlex.quote(user.name), shlex.quote(path)
    whole = f"chown -R {name} {quoted}" if any(folder.iterdir()) else f"chown {name} {quoted}"
    return f"{whole}; chmod 0700 {quoted}" if folder.stat().st_uid != user.uid else f"chmod 0700 {quoted}"


def is_shared(host: Host, path: str, user: User) -> bool:
    """Return whether anything indicates that others use a folder or may do so; True also if it cannot be inspected.

    It is not shared if it is empty or holds only a disk tier, and neither its mode nor its location suggests sharing.
    """
    folder = host.path(path)
    try:
        if folder.stat().st_mode & stat.S_ISVTX or os.path.ismount(folder):
            return True
        return _is_a_place_for_many(host, _real(host, folder), user) or _holds_others(folder, user)
    except OSError:
        return True


def may_hold(host: Host, path: str) -> bool:
    """Return whether a private folder may be in this one: not a system folder, and not replaceable by others."""
    real = _real(host, host.path(path))
    if len(real.parts) == 1 or real.parts[1] in _OF_THE_SYSTEM:
        return False
    modes = [host.path(one).stat().st_mode for one in (real, *real.parents)]
    return all(mode & stat.S_ISVTX or not mode & _FOREIGN_WRITE for mode in modes)


def is_of_all(path: PurePosixPath) -> bool:
    """Return whether a path cannot be one program's own, judged by its name alone."""
    return bool(_OF_ALL.fullmatch(str(path))) or path.parts[1] in _OF_THE_SYSTEM


def _holds_others(folder: Path, user: User) -> bool:
    """Return whether anything in a folder does not belong to a disk tier, or to neither the user nor root."""
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
    """Return the resolved path of a folder of the host: a link is as shared as its target."""
    return PurePosixPath("/") / folder.resolve().relative_to(host.root.resolve())

"""Checks for the tiers: memory for the host tier, a folder for the disk tier, a store for the remote tier."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Final

from kvferry.clients.cli.doctor.folders import STATE_FOLDER, close_to_others, make_own
from kvferry.clients.cli.doctor.host import Finding, Host, User
from kvferry.clients.cli.doctor.kernel import size
from kvferry.clients.cli.doctor.needs import Needs, memory_limit
from kvferry.pools.tiers.own_folder import OwnFolder
from kvferry.protocol.errors import ConfigError

KEY: Final = "tiers.disk.path"
ANOTHER: Final = f"name a folder of the daemon's own in {KEY}, such as {STATE_FOLDER}"
CONNECT_S: Final = 2.0


def check_host_tier(host: Host, needs: Needs) -> Finding:
    """Compare the host tier, together with pools and store segment, with the host's memory."""
    tier_bytes, total = needs.host_tier_bytes(host), memory_limit(host, needs.daemon_pid).size_bytes
    if not tier_bytes:
        return _no_host_tier(needs, total)
    said = f"{size(tier_bytes)} for snapshots and cached blocks"
    if not total:
        return Finding("unknown", f"{said}; no /proc/meminfo", "mount /proc")
    if tier_bytes > total:
        return Finding("missing", f"{said}, of {size(total)} of memory", "lower tiers.host_bytes")
    given_bytes = needs.config.tiers.remote.segment_bytes if needs.store else 0
    given = f", {size(given_bytes)} for the store of all nodes" if given_bytes else ""
    together = tier_bytes + given_bytes + needs.pool_bytes(host)
    said = f"{said}{given}; with pools {size(together)} of {size(total)}"
    if together > total:
        fix = "lower tiers.host_bytes, tiers.remote.segment_bytes or pools.max_bytes: the kernel would end the daemon"
        return Finding("warning", said, fix)
    return Finding("ok", said)


def check_disk_tier(host: Host, needs: Needs, used_bytes: int) -> Finding | None:
    """Check the disk tier's folder as the daemon would, and its free space; None if the tier is not configured.

    ``used_bytes``: what the running daemon already has there.
    """
    disk = needs.config.tiers.disk
    if disk.path is None:
        return None
    try:
        folder = host.path(disk.path).stat()
        space = os.statvfs(host.path(disk.path))
    except OSError as error:
        return _no_folder(disk.path, error, host.user)
    fault = _folder_fault(host, disk.path, folder) or _refusal(host, disk.path)
    if fault is not None:
        return fault
    free = space.f_bavail * space.f_frsize
    said = f"{disk.path}: {size(free)} free, {size(used_bytes)} used, tiers.disk.max_bytes is {size(disk.max_bytes)}"
    if free + used_bytes < disk.max_bytes:
        fix = "lower tiers.disk.max_bytes, or make space: the tier pauses while its disk is full"
        return Finding("warning", said, fix)
    return Finding("ok", said)


def check_master(needs: Needs) -> Finding | None:
    """Check whether the store's master accepts connections; None if no store is configured. It may start later."""
    master = needs.config.tiers.remote.master
    if not needs.store:
        return None
    address, _, port = master.rpartition(":")
    try:
        with socket.create_connection((address.strip("[]"), int(port)), timeout=CONNECT_S):
            return Finding("ok", f"{master} accepts connections; open its port and the store's to nodes only")
    except (OSError, OverflowError) as error:
        fix = f"start mooncake_master there (it is in the wheel), or let this host reach it: --rpc_port={port}"
        reason = "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
        return Finding("warning", f"{master}: {reason}; the daemon runs without it", fix)


def _no_host_tier(needs: Needs, total: int) -> Finding:
    if needs.config.tiers.host_bytes is None and not total:
        return Finding("unknown", "a tenth of a memory of unknown size", "mount /proc")
    below = [key for key, wanted in (("disk", needs.config.tiers.disk.path), ("remote", needs.store)) if wanted]
    if below:
        said = f"tiers.host_bytes is 0, and tiers.{below[0]} needs it"
        return Finding("missing", said, "raise tiers.host_bytes: blocks of lower tiers are promoted through it")
    return Finding("ok", "none: tiers.host_bytes is 0")


def _no_folder(path: str, error: OSError, user: User) -> Finding:
    said = f"{path}: {error.strerror}"
    if isinstance(error, PermissionError):
        return Finding("unknown", said, "run as root, or as the daemon's user")
    if not isinstance(error, FileNotFoundError):
        return Finding("missing", said, ANOTHER)
    fix = f"{make_own(path, user)}; in the unit StateDirectory=kvferry creates {STATE_FOLDER}"
    return Finding("missing", said, fix)


def _refusal(host: Host, path: str) -> Finding | None:
    """Return why the daemon's own check refuses the folder, where this process may stand for the daemon."""
    if host.root != Path("/") or host.user.uid != os.geteuid():
        return None
    try:
        OwnFolder(Path(path), KEY, may_be_link=True).close()
    except ConfigError as error:
        return Finding("missing", error.detail, error.remedy)
    return None


def _folder_fault(host: Host, path: str, folder: os.stat_result) -> Finding | None:
    """Return why the daemon would refuse the folder, or a warning if others can read it."""
    user, mode = host.user, stat.S_IMODE(folder.st_mode)
    if not stat.S_ISDIR(folder.st_mode):
        return Finding("missing", f"{path} is not a directory", ANOTHER)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        said = f"{path} has mode {mode:04o}: others could plant blocks, so the daemon refuses it"
        return Finding("missing", said, close_to_others(host, path, user, KEY))
    if folder.st_uid != user.uid:
        said = f"{path} belongs to user {folder.st_uid}, not to {user.name}"
        if user.uid == 0:  # most likely run by an operator, not by the daemon's user
            return Finding("warning", said, "kvferry doctor --user NAME checks for the daemon's user")
        return Finding("missing", said, close_to_others(host, path, user, KEY))
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        said = f"{path} has mode {mode:04o}: others can read it"
        return Finding("warning", said, close_to_others(host, path, user, KEY))
    return None

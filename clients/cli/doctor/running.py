"""Checks of the runtime directory, and of the daemon that answers there, if any."""

from __future__ import annotations

import grp
import os
import shlex
import socket
import struct
import time
from pathlib import Path

import msgspec

from kvferry.clients import calls
from kvferry.clients.cli.doctor.host import Finding, Host
from kvferry.clients.daemon_socket import choose
from kvferry.clients.sync_client import Client
from kvferry.pools.host.members import members_of
from kvferry.protocol import VERSION
from kvferry.protocol.config.schema import Config
from kvferry.protocol.errors import (
    AccessDeniedError,
    ConfigError,
    InvalidFieldError,
    KvferryError,
    VersionMismatchError,
)
from kvferry.protocol.session_messages import Status, StatusReport
from kvferry.protocol.settings import CONTROL_SOCKET, runtime_dirs

RESTART = "systemctl restart kvferry@NAME, once engines can lose their device pools: host pools outlive it"


class Running(msgspec.Struct, frozen=True):
    """The directory, and what its daemon reported, or the error.

    ``pid`` is the daemon's process id in this process's namespace: 0 if the daemon is in a container that is not
    visible from here, None if no daemon answers.
    """

    directory: Path
    report: StatusReport | None = None
    error: KvferryError | None = None
    pid: int | None = None


def ask_daemon(
    host: Host,
    runtime_dir: str | os.PathLike[str] | None,
    configured: str | os.PathLike[str] | None,
    timeout_s: float,
    instance: str = "",
) -> Running:
    """Ask the daemon for its status, within ``timeout_s``; ``instance`` is looked for first, if it is given."""
    ends_at = time.monotonic() + timeout_s
    named = runtime_dir or configured
    dirs = [os.fspath(named)] if named else runtime_dirs(host.environ)
    below = [Path(one, instance) for one in dirs if instance and not named]
    places = [host.path(Path(one).absolute()) for one in (*below, *dirs)]
    directory = places[0 if named else -1]
    try:
        directory = Path(choose([*map(os.fspath, places)]))
        with Client.connect(directory, name="doctor", session=False, timeout_s=timeout_s) as client:
            report = client.call(calls.asked(Status()), deadline_s=_left_s(ends_at), margin_s=0.0)
    except KvferryError as error:
        return Running(directory, error=error)
    return Running(directory, report, pid=process_behind(directory / CONTROL_SOCKET, report.pid, _left_s(ends_at)))


def _left_s(ends_at: float) -> float:
    return max(0.001, ends_at - time.monotonic())


def check_directory(running: Running) -> Finding:
    """Check whether the directory exists and this user may use it."""
    directory = running.directory
    if isinstance(running.error, AccessDeniedError):
        return Finding("warning", running.error.detail, _way_in(directory))
    if isinstance(running.error, InvalidFieldError):
        return Finding("warning", running.error.detail, running.error.remedy)
    try:
        group = directory.group()
    except KeyError:
        group = f"{directory.stat().st_gid}, which has no name"
    except OSError:
        fix = "the daemon creates it; if it is elsewhere, give --runtime-dir, or set KVFERRY_RUNTIME_DIR"
        return Finding("warning", f"no {directory}", fix)
    if not directory.is_dir():
        return Finding("missing", f"{directory} is not a directory", "name another one in --runtime-dir or runtime_dir")
    return Finding("ok", f"{directory}, of group {group}")


def check_daemon(running: Running) -> Finding:
    """Report which daemon answers, and its health."""
    report = running.report
    if report is None:
        return _no_answer(running)
    said = f"{report.daemon_version}, pid {report.pid}, up for {report.uptime_ms // 1000} s"
    if report.network and report.network.state == "broken":
        return Finding(
            "missing", f"{said}; the network transport is broken: nothing comes in from other hosts", RESTART
        )
    if report.daemon_version != VERSION:
        return Finding("warning", f"{said}; this command is {VERSION}", f"after an upgrade: {RESTART}")
    if report.draining:
        return Finding("warning", f"{said}; it is draining and accepts no new transfers", "wait until it ends")
    if report.drained:
        return Finding("warning", f"{said}; it is drained and accepts no new transfers", "kvferry undrain")
    return Finding("ok", said)


def check_tenants(config: Config) -> Finding | None:
    """Look up the users and groups that tenants name, if there are any."""
    if not config.tenants:
        return None
    try:
        members = members_of(config.tenants)
    except ConfigError as error:
        return Finding("missing", error.detail, error.remedy)
    said = [f"{name} of {len([one for one in members if one.tenant == name])}" for name in config.tenants]
    return Finding("ok", f"tenants, with their users and groups: {', '.join(said)}")


def check_descriptors(running: Running) -> dict[str, Finding]:
    """Report the running daemon's descriptors, where it says how many it has."""
    said = running.report.descriptors if running.report else None
    if said is None:
        return {}
    text = f"{said.open} of {said.limit} open, {said.promised} of {said.room} promised to engines and pools"
    fix = "delete pools and end sessions that are not needed (kvferry status), or raise LimitNOFILE= in the unit"
    if not said.listening:
        return {"descriptors": Finding("missing", f"{text}; none is left, and new connections wait", fix)}
    if said.promised > said.room * 3 // 4:
        return {"descriptors": Finding("warning", f"{text}: new ones are refused soon", fix)}
    return {"descriptors": Finding("ok", text)}


def check_devices(running: Running) -> dict[str, Finding]:
    """Report the state of the devices that the daemon uses."""
    findings = {}
    for device in running.report.devices if running.report else ():
        if device.state == "ready":
            said = f"ready, {device.free_bytes >> 20} of {device.total_bytes >> 20} MiB free"
            finding = Finding("ok", said)
            if device.keeper.startswith("lost"):
                finding = Finding("warning", f"{said}; its pools end with the daemon, keeper {device.keeper}", RESTART)
        elif device.state.startswith("unavailable"):  # somebody requested a pool on it; that does not need to work
            fix = "kvferry doctor --npu shows what is missing, if this host should have one"
            finding = Finding("warning", device.state, fix)
        else:
            fix = "check the device (npu-smi info, nvidia-smi); the daemon ends by itself and has to be restarted"
            finding = Finding("missing", device.state, fix)
        findings[f"device {device.device}"] = finding
    return findings


def check_tiers(running: Running) -> dict[str, Finding]:
    """Report the tiers of the running daemon that do not work."""
    fix = 'what it had is computed again; docs/operations.md, "Tiers", says what to do'
    return {
        f"tier {tier.tier}": Finding("warning", f"the daemon says: {tier.state}", fix)
        for tier in (running.report.tiers if running.report else ())
        if tier.state not in {"ready", "off"}
    }


def used_bytes(running: Running, tier: str) -> int:
    """Return the bytes that the running daemon has in a tier; 0 if none runs."""
    return sum(one.used_bytes for one in running.report.tiers if one.tier == tier) if running.report else 0


def _no_answer(running: Running) -> Finding:
    error = running.error
    if isinstance(error, AccessDeniedError):
        return Finding("unknown", "this user may not use it", "see runtime directory")
    if (running.directory / CONTROL_SOCKET).exists():
        if isinstance(error, VersionMismatchError):
            return Finding("missing", error.detail, error.remedy)
        fix = f"check its log: journalctl -u kvferry@NAME; {RESTART}"
        reason = error.detail if error else "no reason given"
        return Finding("missing", f"its socket exists, but nobody answers: {reason}", fix)
    return Finding("warning", "none is running", "systemctl start kvferry@NAME, or kvferry daemon")


def _way_in(directory: Path) -> str:
    """Return how this user can get access to the directory: by its group, unless that is root's."""
    try:
        number = directory.stat().st_gid
        group = grp.getgrgid(number).gr_name
    except (OSError, KeyError):
        return "run as the daemon's user, or as root, to see who owns it"
    if number == 0:
        return "run the daemon as a separate user and group (User= and Group= in the unit): its group is root's now"
    return f"usermod -aG {shlex.quote(group)} USER for each user of it, then a new login"


def process_behind(control_socket: Path, reported: int, timeout_s: float) -> int:
    """Return the daemon's process id in this process's namespace; the daemon in a container reports another one."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(timeout_s)
            probe.connect(str(control_socket))
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return reported
    pid: int = struct.unpack("3i", credentials)[0]
    return reported if pid == 1 else pid  # 1: the service manager created the socket

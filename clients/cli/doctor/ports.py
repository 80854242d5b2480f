"""Checks of the ports that other hosts connect to: the configured one, and those that Mooncake chooses itself."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence

from kvferry.clients.cli.doctor.findings import Finding
from kvferry.clients.cli.doctor.needs import Needs
from kvferry.clients.cli.doctor.running import RESTART
from kvferry.clients.cli.doctor.sockets import Listener

_FENCE = "let only the cluster's hosts reach them: systemd/hosts.conf, or the firewall"


def check_listen(needs: Needs, sockets: Sequence[Listener], daemon_pid: int | None) -> Finding:
    """Check whether ``peers.listen`` is an address of this host with a port that is free, or held by the daemon."""
    name = "peers.listen"
    listen = needs.config.peers.listen
    if listen is None:
        return Finding(name, "ok", "not set: only daemons of this host find this one")
    if not listen.startswith("tcp://"):
        return Finding(name, "ok", f"{listen}, on this host only")
    address, _, number = listen.removeprefix("tcp://").rpartition(":")
    address, port = address.strip("[]"), int(number)
    problem = _foreign(address)
    if problem:
        return Finding(name, "missing", f"{listen}: {problem}", "name an address of this host (ip -brief address)")
    return _held(listen, [one for one in sockets if one.port == port and one.covers(address)], daemon_pid)


def check_mooncake(needs: Needs, sockets: Sequence[Listener], daemon_pid: int | None) -> Finding | None:
    """Report the ports that Mooncake listens on; None if it is not used."""
    name = "mooncake ports"
    if not needs.mooncake:
        return None
    if daemon_pid is None:
        return Finding(name, "ok", f"chosen by Mooncake when the daemon starts; {_FENCE}")
    chosen = needs.config.peers.listen.rpartition(":")[2] if needs.config.peers.listen else ""
    ports = [one.name for one in sockets if one.pid == daemon_pid and str(one.port) != chosen]
    if not ports:
        return Finding(name, "unknown", "this user may not see the daemon's sockets", "run as root or as its user")
    return Finding(name, "ok", f"{', '.join(sorted(ports))}; {_FENCE}")


def _held(listen: str, holders: Sequence[Listener], daemon_pid: int | None) -> Finding:
    name = "peers.listen"
    if not holders:
        if daemon_pid is None:
            return Finding(name, "ok", f"{listen} is free")
        fix = f"with this configuration: {RESTART}"
        return Finding(name, "warning", f"nothing listens at {listen}, though a daemon runs", fix)
    if daemon_pid is not None and (not daemon_pid or any(one.pid in {daemon_pid, None} for one in holders)):
        return Finding(name, "ok", f"{listen}, held by the daemon (pid {daemon_pid or 'not seen from here'})")
    fix = "choose another port and tell the other hosts, or stop the process that holds it if nobody needs it"
    return Finding(name, "missing", f"{listen} is held by {holders[0].owner}", fix)


def _foreign(address: str) -> str:
    """Return why nothing can listen at an address; empty if it is this host's. Binds only an ephemeral port."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET  # noqa: PLR2004
    except ValueError:
        return "not a numeric address"
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return "not an address of this host" if error.errno == errno.EADDRNOTAVAIL else os.strerror(error.errno or 0)
    return ""

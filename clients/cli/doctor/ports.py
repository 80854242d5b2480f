"""Checks of the ports that other hosts connect to: the configured one, and those that Mooncake chooses itself."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvferry.clients.cli.doctor.host import Finding, Host, State, run_child
from kvferry.clients.cli.doctor.needs import Needs
from kvferry.clients.cli.doctor.running import RESTART, Running
from kvferry.clients.cli.doctor.trials import attempt
from kvferry.clients.cli.doctor.unit import NAME, read_unit
from kvferry.protocol.addresses import is_loopback
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.node_keys import read_keys

# -- which process listens where, from /proc: a port that is listened on is not tried


_LISTENING: Final = "0A"
_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_WORD: Final = 8


class Listener(msgspec.Struct, frozen=True):
    """A listening socket. ``pid`` is None if this user may not see its owner."""

    address: str
    port: int
    pid: int | None
    command: str = ""

    @property
    def name(self) -> str:
        """Return ``address:port``, with IPv6 addresses in brackets."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    @property
    def owner(self) -> str:
        """Return the owning process as text."""
        return "a process that this user may not see" if self.pid is None else f"{self.command} (pid {self.pid})"

    def covers(self, address: str) -> bool:
        """Return whether this socket conflicts with one at another address: equal, or one of them is unspecified."""
        own, other = ipaddress.ip_address(self.address), ipaddress.ip_address(address)
        return own == other or own.is_unspecified or other.is_unspecified


def listeners(host: Host) -> list[Listener]:
    """Return every listening TCP socket of this network namespace."""
    rows = [line.split() for table in _TABLES for line in host.text(table).splitlines()[1:]]
    found = [(row[1], row[9]) for row in rows if len(row) > 9 and row[3] == _LISTENING]  # noqa: PLR2004  local, inode
    owners = _owners(host, {inode for _, inode in found})
    return [_listener(host, local, owners.get(inode)) for local, inode in found]


def _listener(host: Host, local: str, pid: int | None) -> Listener:
    address, _, port = local.partition(":")
    command = host.text(f"/proc/{pid}/comm") if pid is not None else ""
    return Listener(_address(address), int(port, 16), pid, command)


def _address(text: str) -> str:
    """Return an address from /proc/net/tcp, where each 32-bit word is in host byte order (here: little-endian)."""
    words = [bytes.fromhex(text[start : start + _WORD])[::-1] for start in range(0, len(text), _WORD)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _owners(host: Host, inodes: set[str]) -> dict[str, int]:
    """Return the process of each socket that this user may inspect."""
    found: dict[str, int] = {}
    for pid in host.names("/proc"):
        if not pid.isdigit():
            continue
        for number in host.names(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(host.path(f"/proc/{pid}/fd/{number}"))  # noqa: PTH115  not a path, but socket:[N]
            except OSError:
                continue
            match = re.match(r"socket:\[(\d+)\]\Z", target)
            if match and match[1] in inodes:
                found[match[1]] = int(pid)
    return found


_FENCE: Final = "let only the cluster's hosts reach them: hosts.conf, or kvferry.nft from beside the unit's file"
_NFT_S: Final = 5.0


def check_listen(host: Host, needs: Needs, sockets: Sequence[Listener], running: Running) -> Finding:
    """Check whether the daemon listens at ``peers.listen`` or, where it does not, could."""
    listen = needs.config.peers.listen
    if listen is None:
        return Finding("ok", "not set: only daemons of this host find this one")
    if running.report is not None and listen in running.report.addresses:
        return Finding("ok", f"{listen}, held by the daemon (pid {running.pid or 'not seen from here'})")
    holders = _holders(listen, sockets)
    if holders:
        fix = "choose another port and tell the other hosts, or stop the process that holds it if nobody needs it"
        return Finding("missing", f"{listen} is held by {holders[0].owner}", fix)
    finding = attempt(host, needs, "peers.listen", f"{listen} is free")
    if finding.state == "ok" and running.report is not None:
        fix = f"with this configuration: {RESTART}"
        return Finding("warning", f"the daemon that runs does not listen at {listen}", fix)
    return finding


def check_keys(host: Host, needs: Needs) -> Finding | None:
    """Check what daemons of other hosts must prove; None where none can connect."""
    peers = needs.config.peers
    if peers.listen is None:
        return None
    if peers.keys is None:
        if is_loopback(peers.listen):
            return Finding("ok", f"none: only this host reaches {peers.listen}")
        fix = 'kvferry keys make, and peers.keys: see docs/operations.md, "Keys"'
        return Finding("warning", f"any process that reaches {peers.listen} may act as a daemon (peers.insecure)", fix)
    try:
        found = read_keys(Path(host.path(peers.keys)))
    except ConfigError as error:
        return Finding("missing", error.detail, error.remedy)
    own, nodes = found.own[0], {key.name for key in found.allowed.values()}
    problems = list(found.problems)
    if own.address != peers.listen:
        problems.insert(0, f"this node's key is for {own.address}, peers.listen is {peers.listen}")
    state: State = "missing" if own.address != peers.listen else "warning" if problems else "ok"
    fix = "kvferry keys make, in an empty folder, and allow write such files anew" if problems else ""
    return Finding(
        state, "; ".join(problems) or f"{own.name} has {own.short}, and allows {len(nodes)} other nodes", fix
    )


def check_metrics(host: Host, needs: Needs, sockets: Sequence[Listener], daemon_pid: int | None) -> Finding | None:
    """Check whether the daemon listens at ``metrics.listen`` or, where it does not, could; None if it is not set."""
    listen = needs.config.metrics.listen
    if listen is None:
        return None
    holders = _holders(listen, sockets)
    if not holders:
        return attempt(host, needs, "metrics.listen", f"{listen} is free")
    if daemon_pid is not None and holders[0].pid in {None, daemon_pid}:
        return Finding("ok", f"{listen}, held by the daemon (pid {daemon_pid}); let only who reads metrics reach it")
    fix = "choose another port, or stop the process that holds it if nobody needs it"
    return Finding("missing", f"{listen} is held by {holders[0].owner}", fix)


def _holders(listen: str, sockets: Sequence[Listener]) -> list[Listener]:
    """Return the listening sockets that conflict with one at an address."""
    address, _, number = listen.removeprefix("tcp://").rpartition(":")
    return [one for one in sockets if one.port == int(number) and one.covers(address.strip("[]"))]


def check_mooncake(host: Host, needs: Needs, sockets: Sequence[Listener], daemon_pid: int | None) -> Finding | None:
    """Report the ports that Mooncake listens on, and what keeps others from them; None if it is not used."""
    if not needs.mooncake and not needs.store:
        return None
    fence = _fence(host, daemon_pid)
    state: State = "ok" if fence else "warning"
    said = fence or "nothing is seen that keeps anybody from them"
    fix = "" if fence else _FENCE
    if daemon_pid is None:
        return Finding(state, f"chosen by Mooncake when the daemon starts; {said}", fix)
    listens = (needs.config.peers.listen, needs.config.metrics.listen)
    chosen = {one.rpartition(":")[2] for one in listens if one}
    processes = {daemon_pid, *_children(host, daemon_pid)}
    ports = [one.name for one in sockets if one.pid in processes and str(one.port) not in chosen]
    if not ports:
        return Finding("unknown", "this user may not see the daemon's sockets", "run as root or as its user")
    return Finding(state, f"{', '.join(sorted(ports))}; {said}", fix)


def _children(host: Host, pid: int) -> set[int]:
    """Return the processes that a process has started: one listens for the store."""
    found = host.text(f"/proc/{pid}/task/{pid}/children").split()
    return {int(one) for one in found}


def _fence(host: Host, daemon_pid: int | None) -> str:
    """Return what lets only some hosts reach Mooncake's ports, as far as this user may see it; empty if nothing."""
    unit = read_unit(host)
    is_service = daemon_pid is None or NAME.removesuffix(".service") in host.text(f"/proc/{daemon_pid}/cgroup")
    if unit is not None and is_service and "any" in unit.words("IPAddressDeny"):
        return f"the unit lets only {' '.join(sorted(unit.words('IPAddressAllow'))) or 'nobody'} reach it"
    outcome = run_child(["nft", "list", "table", "inet", "kvferry"], host.environ, _NFT_S)
    return "fenced by the table inet kvferry of nftables" if outcome.status == 0 else ""

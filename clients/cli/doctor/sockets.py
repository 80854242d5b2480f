"""Which process listens on which TCP port, from /proc alone: probing a port by binding it could disturb a daemon."""

from __future__ import annotations

import ipaddress
import os
import re
from typing import Final

import msgspec

from kvferry.clients.cli.doctor.host import Host

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

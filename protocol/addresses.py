"""The addresses that daemons listen at for each other: checks of their form, and of their being the canonical one.

A daemon is identified by the address that it announces, so an address is usable only where it is spelt as its owner's
socket spells it. Knows nothing of sockets or configuration.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket

IPC, TCP = "ipc", "tcp"
MAX_PATH_BYTES = 107
"""A Unix socket's path, without the terminating zero byte of ``sockaddr_un``."""
MAX_PORT = 65_535


def scheme(address: str) -> str:
    """Return ``ipc`` or ``tcp``."""
    return address.partition("://")[0]


def is_v6(address: str) -> bool:
    """Return whether it is a TCP address with an IPv6 host."""
    return address.startswith("tcp://[")


def is_loopback(address: str) -> bool:
    """Return whether only this host reaches a numeric TCP address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.removeprefix("tcp://").rpartition(":")[0].strip("[]")).is_loopback
    return False


def is_numeric(address: str, *, or_all: bool = False) -> bool:
    """Return whether a TCP address has a numeric host, spelt canonically, with ``or_all`` also that of all hosts."""
    host = address.partition("://")[2].rpartition(":")[0]
    bare, family = (host[1:-1], socket.AF_INET6) if host.startswith("[") else (host, socket.AF_INET)
    with contextlib.suppress(OSError, ValueError):
        packed = socket.inet_pton(family, bare)
        return (or_all or any(packed)) and socket.inet_ntop(family, packed) == bare and is_v6(address) == (host != bare)
    return False


def canonical(address: str) -> str:
    """Return a TCP address with its numeric IPv6 host spelt canonically; any other one as it is."""
    start, port = address.rpartition(":")[::2]
    with contextlib.suppress(ValueError):
        return f"tcp://[{ipaddress.IPv6Address(start.removeprefix('tcp://').strip('[]'))}]:{port}"
    return address


def unreachable_host(host: str) -> str:
    """Return why other hosts cannot reach this one by a host's name or address; empty if they might."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        if ":" not in bare:
            return ""  # a name
        return "is no IPv6 address; if it has a port, leave that out: it is chosen when the daemon starts"
    if address.is_unspecified:
        return "stands for all addresses of this host: name the one by which other hosts reach it"
    if address.version == 6 and address.is_link_local:  # noqa: PLR2004
        return "is a link-local address, which another host cannot know the interface of: name a global or fd00::/8 one"
    if address.is_multicast or bare == "255.255.255.255":
        return "is no single host's address"
    return ""


def wrong_port(address: str, least: int) -> str:
    """Return what is wrong with a TCP address's port, which must be ``least`` or more; empty if nothing is."""
    port = address.rpartition(":")[2]
    if port.isascii() and port.isdecimal() and str(int(port)) == port and least <= int(port) <= MAX_PORT:
        return ""
    return f"{address}: the port must be {least} to {MAX_PORT}"


def wrong_address(address: str) -> str:
    """Return what is wrong with another daemon's address; empty if a connection can be tried."""
    if scheme(address) == TCP:
        if is_numeric(address):
            return wrong_port(address, 1)
        return f"{address}: give the numeric address of the daemon's own peers.listen"
    path = address.partition("://")[2]
    if not path.startswith("/"):
        return f"{address}: give the whole path of the daemon's peer.sock"
    if not path.isprintable():
        return f"{address!r}: the path has unprintable characters"
    size_bytes = len(os.fsencode(path))
    if size_bytes > MAX_PATH_BYTES:
        return f"{address}: the path has {size_bytes} bytes; a socket's may have at most {MAX_PATH_BYTES}"
    return ""

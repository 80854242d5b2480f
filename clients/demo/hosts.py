"""Several hosts on one machine: network namespaces joined by a bridge, with links that can be cut. Needs root.

Each host has its own addresses and ports, and the filesystem of the machine: Unix sockets with a path reach across. The
hosts reach each other and nothing else, so that runs beside each other may all use the same addresses. Knows nothing of
what runs on the hosts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvferry.clients.demo.errors import DemoError

NETWORK: Final = ipaddress.IPv4Network("10.213.0.0/24")
MAX_HOSTS: Final = 64
COMMAND_S: Final = 30.0
NAMESPACES: Final = Path("/var/run/netns")
BRIDGE: Final = "bridge"
UPLINK: Final = "uplink"
"""A host's end of its cable. The bridge's end is called as the host's number says."""

_OURS: Final = re.compile(r"kvferry-([0-9]+)-([0-9]+)-[0-9]+-(?:bridge|[0-9]+)")
_serials: Final = itertools.count(1)


class Host:
    """One host, made by ``Hosts``.

    Attributes:
        number: from 1.
        name: its network namespace's.
        address: its IPv4 address on the network that all hosts share.
    """

    def __init__(self, number: int, name: str, bridge: str) -> None:
        self.number = number
        self.name = name
        self.address = str(NETWORK[number])
        self._bridge = bridge

    def __repr__(self) -> str:
        """Show where it is."""
        return f"<Host {self.number} {self.address} namespace={self.name}>"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs these arguments on this host, as the very process that is started."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def cut_link(self) -> None:
        """Let nothing in or out any more. Neither side is told: what is sent is lost, and connections stay open."""
        _ip("-n", self._bridge, "link", "set", _port(self.number), "nomaster")

    def restore_link(self) -> None:
        """Join the host to the others again; does nothing where it is joined."""
        _ip("-n", self._bridge, "link", "set", _port(self.number), "master", BRIDGE)


class Hosts:
    """``with Hosts(3) as hosts``: so many hosts; ``hosts[0]`` is number 1. Leaving ends what still runs on them."""

    def __init__(self, count: int) -> None:
        """Make ``count`` hosts on entering.

        Raises:
            ValueError: none, or more than MAX_HOSTS.
        """
        if not 1 <= count <= MAX_HOSTS:
            raise ValueError(f"{count} hosts; 1 to {MAX_HOSTS} are possible")
        prefix = f"kvferry-{os.getpid()}-{_start_ticks(os.getpid())}-{next(_serials)}"
        self._bridge = f"{prefix}-bridge"
        self._hosts = tuple(Host(number, f"{prefix}-{number}", self._bridge) for number in range(1, count + 1))

    def __repr__(self) -> str:
        """Show the hosts."""
        return f"<Hosts {list(self._hosts)}>"

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._hosts)

    def __getitem__(self, index: int) -> Host:
        """Return a host."""
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        """Yield the hosts by their numbers."""
        return iter(self._hosts)

    def __enter__(self) -> Self:
        """Make the hosts, after removing what runs that were killed have left behind.

        Raises:
            DemoError: not root, no ``ip`` command, or the machine allows no network namespaces; says which.
        """
        check_hosts_possible()
        remove_leftovers()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what still runs on the hosts, and remove them."""
        self._remove()

    def _make(self) -> None:
        _ip("netns", "add", self._bridge)
        # Multicast snooping and IPv6 would only make noise on a network of a few IPv4 hosts.
        _ip("-n", self._bridge, "link", "add", BRIDGE, "type", "bridge", "mcast_snooping", "0")
        _ip("-n", self._bridge, "link", "set", BRIDGE, "addrgenmode", "none", "up")
        for host in self._hosts:
            port = _port(host.number)
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
            # Both ends are born where they belong: the machine's own namespace is never touched.
            far_end = ("peer", "name", port, "netns", self._bridge)
            _ip("link", "add", UPLINK, "netns", host.name, "type", "veth", *far_end)
            _ip("-n", self._bridge, "link", "set", port, "addrgenmode", "none", "master", BRIDGE, "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/{NETWORK.prefixlen}", "dev", UPLINK)
            _ip("-n", host.name, "link", "set", UPLINK, "addrgenmode", "none", "up")

    def _remove(self) -> None:
        present = _namespaces()
        for name in (*(host.name for host in self._hosts), self._bridge):
            if name in present:
                _remove(name)


def check_hosts_possible() -> None:
    """Check that this process may make hosts.

    Raises:
        DemoError: it may not; says what is missing and how to get it.
    """
    if shutil.which("ip") is None:
        raise DemoError("several hosts need the command `ip`: apt-get install iproute2")
    if os.geteuid() != 0:
        raise DemoError("several hosts are network namespaces, which only root can make: run this as root")


def remove_leftovers() -> None:
    """Remove the hosts of processes that have died without doing so, and end what still runs on them."""
    for name in _namespaces():
        found = _OURS.fullmatch(name)
        if found and _start_ticks(int(found[1])) != int(found[2]):
            _remove(name)


def _port(number: int) -> str:
    return f"host{number}"


def _namespaces() -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(file.name for file in NAMESPACES.iterdir())
    return []


def _remove(name: str) -> None:
    """Remove a namespace with what runs in it; a process would keep it, and its cable, without a name."""
    try:
        for pid in _ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "delete", name)
    except DemoError:
        if name in _namespaces():  # else another run was faster
            raise


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot: with it a pid names one process for good."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    is_dead = fields[0] in {"Z", "X"}
    return None if is_dead else int(fields[19])


def _ip(*arguments: str) -> str:
    """Run ``ip`` and return what it prints.

    Raises:
        DemoError: it failed; with its own words.
    """
    command = ["ip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_S)  # noqa: S603  no shell
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise DemoError(f"`{' '.join(command)}` failed: {said}")
    return done.stdout

"""Several hosts on one machine: network namespaces connected by a bridge, with links that can be cut. Needs root.

Each host has its own addresses and ports, but the filesystem of the machine: Unix sockets with a path work across
hosts. The hosts reach each other and nothing else, so concurrent runs may use the same addresses.
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

from examples.demo.errors import DemoError

NETWORK: Final = ipaddress.IPv4Network("10.213.0.0/24")
MAX_HOSTS: Final = 64
COMMAND_S: Final = 30.0
NAMESPACES: Final = Path("/var/run/netns")
BRIDGE: Final = "bridge"
UPLINK: Final = "uplink"
"""A host's end of its veth pair. The bridge's end is named by the host's number."""

_OURS: Final = re.compile(r"kvferry-([0-9]+)-([0-9]+)-[0-9]+-(?:bridge|[0-9]+)")
_serials: Final = itertools.count(1)


class Host:
    """One host, made by ``Hosts``.

    Attributes:
        number: from 1.
        name: of its network namespace.
        address: its IPv4 address on the network that all hosts share.
    """

    def __init__(self, number: int, name: str, bridge: str) -> None:
        self.number = number
        self.name = name
        self.address = str(NETWORK[number])
        self._bridge = bridge

    def __repr__(self) -> str:
        """Show number, address and namespace."""
        return f"<Host {self.number} {self.address} namespace={self.name}>"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on this host, in the started process itself."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def cut_link(self) -> None:
        """Drop all traffic in both directions, unnoticed: what is sent is lost, and connections stay open."""
        _ip("-n", self._bridge, "link", "set", _port(self.number), "nomaster")

    def restore_link(self) -> None:
        """Connect the host to the others again; does nothing if it is connected."""
        _ip("-n", self._bridge, "link", "set", _port(self.number), "master", BRIDGE)


class Hosts:
    """``with Hosts(3) as hosts``: three hosts; ``hosts[0]`` is number 1. Leaving ends the processes still on them."""

    def __init__(self, count: int) -> None:
        """Choose the names of ``count`` hosts, which are created on entering.

        Raises:
            ValueError: ``count`` is not between 1 and MAX_HOSTS.
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
        """Return the number of hosts."""
        return len(self._hosts)

    def __getitem__(self, index: int) -> Host:
        """Return a host."""
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        """Yield the hosts in the order of their numbers."""
        return iter(self._hosts)

    def __enter__(self) -> Self:
        """Create the hosts, after removing what killed runs have left behind.

        Raises:
            DemoError: not root, no ``ip`` command, or no network namespaces allowed; says which.
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
        """End the processes still on the hosts, and remove the hosts."""
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
            # Both ends are created in their namespaces: the machine's own namespace is never touched.
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
    """Check that this process may create hosts.

    Raises:
        DemoError: it may not; says what is missing and how to get it.
    """
    if shutil.which("ip") is None:
        raise DemoError("several hosts need the command `ip`: apt-get install iproute2")
    if os.geteuid() != 0:
        raise DemoError("several hosts are network namespaces, which only root can make: run this as root")


def remove_leftovers() -> None:
    """Remove hosts that dead processes left behind, and end the processes still on them."""
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
    """Remove a namespace and end its processes: they would keep it, and its links, alive without a name."""
    try:
        for pid in _ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "delete", name)
    except DemoError:
        if name in _namespaces():  # otherwise another run removed it
            raise


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, which makes its pid unique; None if it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    is_dead = fields[0] in {"Z", "X"}
    return None if is_dead else int(fields[19])


def _ip(*arguments: str) -> str:
    """Run ``ip`` and return what it prints.

    Raises:
        DemoError: it failed; contains its error output.
    """
    command = ["ip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_S)  # noqa: S603  no shell
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise DemoError(f"`{' '.join(command)}` failed: {said}")
    return done.stdout

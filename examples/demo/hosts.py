"""Several hosts on one machine: network namespaces connected by a bridge, with links that can be cut. Needs root.

Each host has its own addresses and ports, but the filesystem of the machine: Unix sockets with a path work across
hosts. The hosts reach each other and nothing else, so concurrent runs may use the same addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import secrets
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

NETWORK: Final = ipaddress.IPv4Network("10.213.0.0/24")
NAMESPACES: Final = Path("/var/run/netns")
"""Where ``ip netns`` keeps them."""
BRIDGE: Final = "bridge"
UPLINK: Final = "uplink"
"""A host's end of its veth pair. The bridge's end is named by the host's number."""

_OURS: Final = "kvferry-"
_COMMAND_S: Final = 60.0
_CLONE_NEWNET: Final = 0x40000000
"""From <sched.h>."""


class Host(NamedTuple):
    """One host, made by ``hosts``: a network namespace, linked to a bridge in a namespace of its own."""

    number: int
    namespace: str
    bridge: str

    @property
    def address(self) -> str:
        """Return its IPv4 address on the network that all hosts share."""
        return str(NETWORK[self.number])

    @property
    def port(self) -> str:
        """Return the name of the bridge's end of its link."""
        return f"host{self.number}"

    def enter(self) -> None:
        """Move the calling thread here for good, and what it starts from now on.

        Raises:
            OSError: the host is gone, or this process may not.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        with (NAMESPACES / self.namespace).open("rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on this host, in the started process itself."""
        return ["nsenter", f"--net={NAMESPACES / self.namespace}", *arguments]

    def cut_link(self) -> None:
        """Drop all traffic in both directions, unnoticed: what is sent is lost, and connections stay open."""
        _run("ip", "-n", self.bridge, "link", "set", self.port, "nomaster")

    def restore_link(self) -> None:
        """Connect the host to the others again; does nothing if it is connected."""
        _run("ip", "-n", self.bridge, "link", "set", self.port, "master", BRIDGE)

    def slow_down(self, mbit_s: int) -> None:
        """Let no more than this leave the host."""
        shaped = ("root", "tbf", "rate", f"{mbit_s}mbit", "burst", "64kb", "latency", "50ms")
        _run("tc", "-n", self.namespace, "qdisc", "add", "dev", UPLINK, *shaped)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Make hosts; leaving ends the processes still on them. Removes what killed runs have left behind, too.

    Raises:
        OSError: not root, no ``ip`` of iproute2, or no network namespaces allowed; says which.
    """
    check_hosts_possible()
    remove_leftovers()
    ours = f"{_OURS}{os.getpid()}-{secrets.token_hex(4)}"
    made = [Host(number, f"{ours}-{number}", f"{ours}-0") for number in range(1, count + 1)]
    try:
        try:
            _make(made)
        except OSError as cause:
            raise OSError(f"cannot make hosts: {cause}") from cause
        yield made
    finally:
        _remove(name for name in _namespaces() if name.startswith(f"{ours}-"))


def check_hosts_possible() -> None:
    """Check that this process may create hosts.

    Raises:
        PermissionError: it may not.
    """
    if os.geteuid() != 0:
        raise PermissionError("several hosts are network namespaces, which only root can make: run this as root")


def remove_leftovers() -> None:
    """Remove hosts that dead processes left behind, and end the processes still on them."""
    ours = [name for name in _namespaces() if name.startswith(_OURS)]
    _remove(name for name in ours if not Path("/proc", name.split("-")[1]).exists())


def _make(made: Sequence[Host]) -> None:
    """Make the namespaces and links; both ends in theirs, so that the machine's own is never touched.

    None speaks IPv6: its neighbour discovery would only make noise.
    """
    bridge = made[0].bridge
    _run("ip", "-batch", "-", lines=[f"netns add {name}" for name in (bridge, *(host.namespace for host in made))])
    links = [f"link add {BRIDGE} type bridge mcast_snooping 0", f"link set {BRIDGE} addrgenmode none up"]
    for host in made:
        links.append(f"link add {host.port} type veth peer name {UPLINK} netns {host.namespace}")
        links.append(f"link set {host.port} master {BRIDGE} addrgenmode none up")
    _run("ip", "-n", bridge, "-batch", "-", lines=links)
    for host in made:
        address = f"address add {host.address}/{NETWORK.prefixlen} dev {UPLINK}"
        lines = ["link set lo up", address, f"link set {UPLINK} addrgenmode none up"]
        _run("ip", "-n", host.namespace, "-batch", "-", lines=lines)


def _namespaces() -> list[str]:
    return [file.name for file in NAMESPACES.glob("*")]


def _remove(names: Iterable[str]) -> None:
    """Remove namespaces and end their processes: they would keep them, and their links, alive without a name."""
    for name in names:
        with contextlib.suppress(OSError):  # another run removed it
            for pid in _run("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _run("ip", "netns", "delete", name)


def _run(*command: str, lines: Iterable[str] = ()) -> str:
    """Run a tool of iproute2 with lines for its input, and return its output.

    Raises:
        OSError: it cannot be run, failed, or did not end; says why.
    """
    text = "".join(f"{line}\n" for line in lines)
    try:
        done = subprocess.run(  # noqa: S603  names of ours
            command, check=False, input=text, capture_output=True, text=True, timeout=_COMMAND_S
        )
    except FileNotFoundError as cause:
        raise OSError(f"{command[0]} is missing: install iproute2") from cause
    except subprocess.TimeoutExpired as cause:
        raise OSError(str(cause)) from cause
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout

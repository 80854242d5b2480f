"""Several hosts on one machine: network namespaces connected by a bridge, with links that can be cut. Needs root.

Each host has its own addresses and ports, but the filesystem of the machine: Unix sockets with a path work across
hosts. The hosts reach each other and nothing else, so concurrent runs may use the same addresses.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NamedTuple, Self

from pyroute2 import IPRoute, netns
from pyroute2.netlink.exceptions import NetlinkError

NETWORK: Final = ipaddress.IPv4Network("10.213.0.0/24")
NAMESPACES: Final = Path(netns.NETNS_RUN_DIR)
BRIDGE: Final = "bridge"
UPLINK: Final = "uplink"
"""A host's end of its veth pair. The bridge's end is named by the host's number."""

_OURS: Final = "kvferry-"
_MAKE_S: Final = 20.0
_ATTEMPTS: Final = 3
_WITHOUT_IPV6: Final = {"attrs": [("AF_INET6", {"attrs": [("IFLA_INET6_ADDR_GEN_MODE", 1)]})]}
"""Its neighbour discovery would only make noise."""


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
        """Move the calling thread here for good, and what it starts from now on."""
        netns.setns(self.namespace, flags=0)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on this host, in the started process itself."""
        return ["nsenter", f"--net={NAMESPACES / self.namespace}", *arguments]

    def cut_link(self) -> None:
        """Drop all traffic in both directions, unnoticed: what is sent is lost, and connections stay open."""
        with _Links(self.bridge) as links:
            links.set(self.port, master=0)

    def restore_link(self) -> None:
        """Connect the host to the others again; does nothing if it is connected."""
        with _Links(self.bridge) as links:
            links.set(self.port, master=links.index(BRIDGE))

    def slow_down(self, mbit_s: int) -> None:
        """Let no more than this leave the host."""
        with _Links(self.namespace) as links:
            rate = mbit_s * 1_000_000 // 8
            links.netlink.tc("add", "tbf", links.index(UPLINK), handle="1:", rate=rate, burst=1 << 16, latency="50ms")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Make hosts; leaving ends the processes still on them. Removes what killed runs have left behind, too.

    Raises:
        OSError: not root, or no network namespaces allowed; says which.
    """
    check_hosts_possible()
    remove_leftovers()
    ours = f"{_OURS}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        try:
            made = _made(ours, count)
        except (NetlinkError, OSError) as cause:
            raise OSError(f"cannot make hosts: {cause}") from cause
        yield made
    finally:
        _remove(name for name in netns.listnetns() if name.startswith(f"{ours}-"))


def check_hosts_possible() -> None:
    """Check that this process may create hosts.

    Raises:
        PermissionError: it may not.
    """
    if os.geteuid() != 0:
        raise PermissionError("several hosts are network namespaces, which only root can make: run this as root")


def remove_leftovers() -> None:
    """Remove hosts that dead processes left behind, and end the processes still on them."""
    ours = [name for name in netns.listnetns() if name.startswith(_OURS)]
    _remove(name for name in ours if not Path("/proc", name.split("-")[1]).exists())


def _made(ours: str, count: int) -> list[Host]:
    """Return new hosts. pyroute2 0.9.7 was seen to wait for ever for an answer, so a thread has a bounded time for it.

    Raises:
        TimeoutError: it came to no end, three times.
    """
    for attempt in range(_ATTEMPTS):
        run = f"{ours}-{attempt}"
        hosts = [Host(number, f"{run}-{number}", f"{run}-0") for number in range(1, count + 1)]
        making: Future[None] = Future()
        threading.Thread(target=_make_in_thread, args=(hosts, making), daemon=True).start()
        with contextlib.suppress(TimeoutError):
            making.result(_MAKE_S)
            return hosts
    raise TimeoutError(f"no answer from netlink within {_MAKE_S:g} s, {_ATTEMPTS} times")


def _make_in_thread(hosts: Sequence[Host], making: Future[None]) -> None:
    try:
        _make(hosts)
    except Exception as cause:  # noqa: BLE001  whoever waits raises it
        making.set_exception(cause)
    else:
        making.set_result(None)


def _make(made: Sequence[Host]) -> None:
    """Make the namespaces and links; both ends in theirs, so that the machine's own is never touched."""
    netns.create(made[0].bridge)
    with _Links(made[0].bridge) as bridge:
        bridge.netlink.link("add", ifname=BRIDGE, kind="bridge", br_mcast_snooping=0)
        bridge.set(BRIDGE, state="up", IFLA_AF_SPEC=_WITHOUT_IPV6)
        for host in made:
            netns.create(host.namespace)
            with _Links(host.namespace) as links:
                links.set("lo", state="up")
                far_end = {"ifname": host.port, "net_ns_fd": host.bridge}
                links.netlink.link("add", ifname=UPLINK, kind="veth", peer=far_end)
                bridge.set(host.port, master=bridge.index(BRIDGE), state="up", IFLA_AF_SPEC=_WITHOUT_IPV6)
                address = {"address": host.address, "prefixlen": NETWORK.prefixlen}
                links.netlink.addr("add", index=links.index(UPLINK), **address)
                links.set(UPLINK, state="up", IFLA_AF_SPEC=_WITHOUT_IPV6)


def _remove(names: Iterator[str]) -> None:
    """Remove namespaces and end their processes: they would keep them, and their links, alive without a name."""
    pids = netns.ns_pids()
    for name in names:
        for pid in pids.get(name, ()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(FileNotFoundError):  # another run removed it
            netns.remove(name)


class _Links:
    """The links of one namespace, by their names."""

    def __init__(self, namespace: str) -> None:
        self.netlink = IPRoute(netns=namespace, flags=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.netlink.close()

    def index(self, name: str) -> int:
        index: int = self.netlink.link_lookup(ifname=name)[0]
        return index

    def set(self, name: str, **values: object) -> None:
        self.netlink.link("set", index=self.index(name), **values)

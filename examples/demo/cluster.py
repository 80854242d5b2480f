"""Where the demo's daemons and engines run: on this host with one daemon, or on several hosts with one daemon each.

With several hosts the last one decodes, and each of the others prefills one pipeline stage of the model.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from examples.demo.errors import DemoError
from examples.demo.hosts import Host, Hosts, check_hosts_possible
from examples.demo.processes import Child, start_daemon

PEER_PORT: Final = 7801
STAGE_PORT: Final = 7802


class Node(NamedTuple):
    """A daemon, and where it and its engines run. ``host`` is None for this host."""

    runtime_dir: Path
    daemon: Child
    host: Host | None = None

    def called(self, what: str) -> str:
        """Return ``what``, with the host's number if there are several hosts."""
        return f"{what} of host {self.host.number}" if self.host else what

    @property
    def peer_address(self) -> str:
        """Return the address at which other nodes' daemons reach this one; only with several hosts."""
        assert self.host is not None
        return f"tcp://{self.host.address}:{PEER_PORT}"

    @property
    def stage_endpoint(self) -> str:
        """Return the endpoint that the previous stage connects to; only with several hosts."""
        assert self.host is not None
        return f"{self.host.address}:{STAGE_PORT}"


class Cluster(NamedTuple):
    """All nodes. ``prefill`` has a node for each pipeline stage, in order; one node may be both prefill and decode."""

    prefill: tuple[Node, ...]
    decode: Node

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Return each node once."""
        return tuple(dict.fromkeys((*self.prefill, self.decode)))

    @property
    def daemons(self) -> list[Child]:
        """Return all daemons."""
        return [node.daemon for node in self.nodes]

    def prefill_arguments(self, stage: int) -> list[str]:
        """Return the arguments that tell a prefill engine about the other nodes."""
        stages = len(self.prefill)
        arguments = ["--stage", str(stage), "--stages", str(stages)]
        if stage > 0:
            arguments += ["--listen", self.prefill[stage].stage_endpoint]
        if stage < stages - 1:
            arguments += ["--next-stage", self.prefill[stage + 1].stage_endpoint]
        return arguments

    def decode_arguments(self) -> list[str]:
        """Return the arguments that tell the decode engine about the other nodes."""
        arguments = ["--sources", str(len(self.prefill))]
        if self.decode.host is not None:
            arguments += [word for node in self.prefill for word in ("--source-daemon", node.peer_address)]
        return arguments


def check_possible(hosts: int) -> None:
    """Check that this many hosts can be created and connected.

    Raises:
        DemoError: says what is missing and how to get it.
    """
    if hosts == 1:
        return
    check_hosts_possible()
    if importlib.util.find_spec("mooncake") is None:
        raise DemoError(
            "not installed: mooncake-transfer-engine-non-cuda; in a checkout run `make demo`, elsewhere "
            "`pip install --no-deps mooncake-transfer-engine-non-cuda` and `apt-get install libibverbs1`"
        )


def start_cluster(
    hosts: int, runtime_dir: Path, folder: Path, stack: contextlib.ExitStack, config: str = ""
) -> Cluster:
    """Return running daemons; ``stack`` ends them.

    Args:
        hosts: how many; 1 is this host.
        runtime_dir: for the daemons' sockets; with several hosts each has a subfolder.
        folder: for logs and configurations.
        stack: everything that must be ended is pushed on it.
        config: of the daemon if there is one host, as TOML.

    Raises:
        DemoError: a daemon does not start, or the hosts cannot be created.
    """
    if hosts == 1:
        node = Node(runtime_dir, stack.enter_context(start_daemon(runtime_dir, folder, config)))
        return Cluster((node,), node)
    nodes = [_start_node(host, runtime_dir, folder, stack) for host in stack.enter_context(Hosts(hosts))]
    return Cluster(tuple(nodes[:-1]), nodes[-1])


def daemon_config(host: Host) -> str:
    """Return the configuration of a host's daemon, as TOML."""
    return f'[peers]\nlisten = "tcp://{host.address}:{PEER_PORT}"\n\n[network]\ntransport = "mooncake"\n'


def start_engine(node: Node, name: str, module: str, arguments: Sequence[str], environment: dict[str, str]) -> Child:
    """Start an engine on a node, connected to its daemon."""
    own = ["--runtime-dir", os.fspath(node.runtime_dir)]
    return Child(node.called(name), module, [*arguments, *own], environment, node.daemon.folder, node.host)


def _start_node(host: Host, runtime_dir: Path, folder: Path, stack: contextlib.ExitStack) -> Node:
    own_folder = folder / f"host-{host.number}"
    own_folder.mkdir()
    own_runtime_dir = runtime_dir / f"host-{host.number}"
    daemon = stack.enter_context(start_daemon(own_runtime_dir, own_folder, daemon_config(host), host))
    return Node(own_runtime_dir, daemon, host)

"""Several hosts, each with a daemon, an engine and a pool; and transfers between them over Mooncake."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from examples.demo.hosts import Host, hosts
from kvferry.clients import AttachedPool, Client, MhaSpec
from kvferry.daemon.daemon import Tuning
from kvferry.daemon.transports.network_memory import NetworkTuning
from kvferry.protocol.session_messages import NetworkStatus
from tests import kit
from tests.kit.daemons import Daemon

PORT = 7801
LAYERS = 8
PAGE_SIZE = 16
PAGES = 256
POOL = "kv"
PATIENCE_S = 20.0
"""How long a test waits for what must come: far longer than any deadline."""
CONFIG = """
[peers]
listen = "tcp://{address}:{port}"
timeout_ms = {timeout_ms}
[network]
transport = "mooncake"
bounce_buffer_bytes = 1048576
bounce_buffers = 8
direct = {direct}
[service]
drain_timeout_s = 1
"""
ENVIRONMENT = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "2", "MC_TRANSFER_TIMEOUT": "5", "MC_TCP_STATUS_TIMEOUT_SEC": "2"}


class Node(NamedTuple):
    """One host with its daemon, one engine, and the engine's pool."""

    host: Host
    daemon: Daemon
    client: Client
    pool: AttachedPool

    @property
    def address(self) -> str:
        """Return where other daemons find this one."""
        return f"tcp://{self.host.address}:{PORT}"

    def fill(self, ids: npt.NDArray[np.int64], seed: int) -> None:
        """Write to each page what no other page holds."""
        for role in ("k", "v"):
            tensor = self.pool.tensor("main", role)
            shape = tensor[:, ids].shape
            noise = np.random.default_rng([seed, ord(role)]).standard_normal(shape, np.float32)
            tensor[:, ids] = torch.from_numpy(noise)

    def content(self, ids: npt.NDArray[np.int64], layers: slice = slice(None)) -> torch.Tensor:
        """Return a copy of what pages hold: ``(2, layers, pages, page_size, heads, head_dim)``."""
        roles = [self.pool.tensor("main", role)[layers][:, ids] for role in ("k", "v")]
        return torch.stack(roles).clone()

    def network(self) -> NetworkStatus:
        """Return how the daemon's bounce buffers are."""
        status = self.client.status().network
        assert status is not None
        return status

    def counters(self) -> dict[str, int]:
        """Return the daemon's counters."""
        return dict(self.client.status().counters)


def spec(first_layer: int = 0, layers: int = LAYERS) -> MhaSpec:
    """Return a pool's spec: all layers, or a pipeline stage's."""
    return MhaSpec(
        layers=layers,
        first_layer=first_layer,
        tokens=PAGES * PAGE_SIZE,
        page_size=PAGE_SIZE,
        kv_heads=4,
        head_dim=64,
        dtype="float32",
    )


@contextlib.contextmanager
def cluster(
    tmp_path: Path, specs: Sequence[MhaSpec], timeout_ms: int = 600, *, direct: bool = False
) -> Iterator[list[Node]]:
    """Run a host with a daemon and an engine for each of the specs; a silent peer is lost after ``timeout_ms``.

    With ``direct`` pages are written without bounce buffers, and what rests does so for its time.
    """
    with hosts(len(specs)) as made, contextlib.ExitStack() as stack:
        nodes = []
        for host, one in zip(made, specs, strict=True):
            folder = tmp_path / f"host{host.number}"
            folder.mkdir()
            config = CONFIG.format(address=host.address, port=PORT, timeout_ms=timeout_ms, direct=str(direct).lower())
            network = NetworkTuning(
                quarantined_bytes=1 << 30 if direct else 0,
                quarantined_s=60.0 if direct else 1.5,  # as in production: pages do not wait for it
                drain_timeout_s=0.2,
                write_timeout_s=5,
            )
            tuning = Tuning(whole_below_bytes=0, network=network)
            daemon = stack.enter_context(
                kit.daemon(config, environment=ENVIRONMENT, prefix=host.command([]), tuning=tuning)
            )
            client = stack.enter_context(contextlib.closing(Client.connect(daemon.runtime_dir, name=f"{host.number}")))
            nodes.append(Node(host, daemon, client, client.create_pool(POOL, one)))
        yield nodes

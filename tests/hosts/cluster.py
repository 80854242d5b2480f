"""Hosts with a daemon and an engine each, for tests of what happens between them, and hosts with nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from examples.demo.hosts import Host, hosts
from kvferry.clients import AttachedPool, Client, MhaSpec, Transfer, new_request_id, pages
from kvferry.daemon.daemon import Tuning
from kvferry.daemon.transports.network_memory import NetworkTuning
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.session_messages import StatusReport
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.node_keys import KeyFolder, key_folders

DEADLINE_S = 4.0
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
keys = "{keys}"
timeout_ms = {timeout_ms}
[network]
transport = "mooncake"
bounce_buffer_bytes = 1048576
bounce_buffers = 8
direct = {direct}
[service]
drain_timeout_s = 1
"""
SPEC = MhaSpec(layers=LAYERS, tokens=PAGES * PAGE_SIZE, page_size=PAGE_SIZE, kv_heads=4, head_dim=64, dtype="float32")
ENVIRONMENT = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "2", "MC_TRANSFER_TIMEOUT": "5", "MC_TCP_STATUS_TIMEOUT_SEC": "2"}


class Node(NamedTuple):
    """One host with its daemon, one engine, and the engine's pool."""

    host: Host
    daemon: Daemon
    client: Client
    pool: AttachedPool
    keys: KeyFolder

    @property
    def status(self) -> StatusReport:
        return self.client.status()

    @property
    def quarantined_bytes(self) -> int:
        assert self.status.network is not None
        return self.status.network.quarantined_bytes

    @property
    def address(self) -> str:
        return f"tcp://{self.host.address}:{PORT}"

    def fill(self, ids: PageIds, seed: int) -> None:
        for role in ("k", "v"):
            tensor = self.pool.tensor("main", role)
            shape = tensor[:, ids].shape
            noise = np.random.default_rng([seed, ord(role)]).standard_normal(shape, np.float32)
            tensor[:, ids] = torch.from_numpy(noise)

    def content(self, ids: PageIds) -> torch.Tensor:
        """Return a copy of what pages hold: ``(2, layers, pages, page_size, heads, head_dim)``."""
        roles = [self.pool.tensor("main", role)[:, ids] for role in ("k", "v")]
        return torch.stack(roles).clone()


@contextlib.contextmanager
def cluster(tmp_path: Path, number: int = 2, timeout_ms: int = 600, *, direct: bool = False) -> Iterator[list[Node]]:
    """Run so many hosts with a daemon and an engine each."""
    with hosts(number) as made, nodes_of(tmp_path, made, timeout_ms, direct=direct) as nodes:
        yield nodes


@contextlib.contextmanager
def nodes_of(tmp_path: Path, made: Sequence[Host], timeout_ms: int, *, direct: bool = False) -> Iterator[list[Node]]:
    """Run a daemon and an engine on each host; a silent peer is lost after ``timeout_ms``.

    With ``direct`` pages are written without bounce buffers, and what rests does so for its time.
    """
    folders = key_folders(tmp_path / "keys", *(f"tcp://{host.address}:{PORT}" for host in made))
    network = NetworkTuning(
        quarantined_bytes=1 << 30 if direct else 0,
        quarantined_s=60.0 if direct else 1.5,  # as in production: pages do not wait for it
        drain_timeout_s=0.2,
        write_timeout_s=5,
    )
    tuning = Tuning(whole_below_bytes=0, network=network)
    with contextlib.ExitStack() as stack:
        nodes = []
        for host, keys in zip(made, folders, strict=True):
            config = CONFIG.format(
                address=host.address, port=PORT, keys=keys.path, timeout_ms=timeout_ms, direct=str(direct).lower()
            )
            daemon = stack.enter_context(
                kit.daemon(config, environment=ENVIRONMENT, prefix=host.command([]), tuning=tuning)
            )
            client = stack.enter_context(contextlib.closing(Client.connect(daemon.runtime_dir, name=f"{host.number}")))
            nodes.append(Node(host, daemon, client, client.create_pool(POOL, SPEC), keys))
        yield nodes


def outcome(node: Node, transfer: Transfer) -> str:
    """Wait until a side is finished; return OK or the error's code."""
    try:
        node.client.wait_finished(transfer, timeout_s=PATIENCE_S)
    except KvferryError as error:
        return error.code
    return "OK"


def hand_over(source: Node, destination: Node, count: int, seed: int) -> None:
    sent, received = source.client.allocate(POOL, count), destination.client.allocate(POOL, count)[::-1].copy()
    source.fill(sent, seed)
    request = new_request_id()
    transfer = destination.client.receive(POOL, request, [pages(received)], source_daemons=[source.address])
    send_request = source.client.send(POOL, request, [pages(sent)], first_token=seed, payload=b"sampler state")
    finished = destination.client.wait_finished(transfer, timeout_s=PATIENCE_S)
    assert (finished.first_token, finished.payload) == (seed, b"sampler state")
    assert torch.equal(destination.content(received), source.content(sent))
    source.client.wait_settled(send_request)
    destination.client.wait_settled(transfer)
    source.client.free(POOL, sent)
    destination.client.free(POOL, received)


class Begun(NamedTuple):
    """A transfer of which some bytes have arrived, and whose last layer waits until ``go_on`` is called."""

    request: str
    sent: PageIds
    received: PageIds
    sending: Transfer
    receiving: Transfer
    go_on: Callable[[], None]


def begin(prefill: Node, decode: Node, *, slow: bool = True, deadline_s: float = DEADLINE_S) -> Begun:
    """Begin one of 200 pages over a link that takes 2 s for them; or of 30, which arrive at once but for a layer."""
    sent, received = (one.client.allocate(POOL, 200 if slow else 30) for one in (prefill, decode))
    request = new_request_id()
    prefill.fill(sent, 2)
    if slow:
        prefill.host.slow_down(mbit_s=200)
    ring = prefill.client.open_events()
    steps = [ring.step(0, LAYERS - 1), ring.step(LAYERS - 1, 1)]
    before = prefill.status.counters.get("network.sent_bytes", 0)
    receiving = decode.client.receive(
        POOL, request, [pages(received)], source_daemons=[prefill.address], deadline_s=deadline_s
    )
    sending = prefill.client.send(POOL, request, [pages(sent)], steps=steps, deadline_s=deadline_s)
    ring.record(steps[0])
    assert soon(lambda: prefill.status.counters.get("network.sent_bytes", 0) > before + (3 << 20 if slow else 0))
    return Begun(request, sent, received, sending, receiving, lambda: ring.record(steps[1]))

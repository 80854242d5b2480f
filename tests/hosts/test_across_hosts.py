"""Transfers between hosts, each in a network namespace of its own, over the real Mooncake engine; and cut links."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
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
def cluster(tmp_path: Path, count: int = 2, timeout_ms: int = 600, *, direct: bool = False) -> Iterator[list[Node]]:
    """Run so many hosts with a daemon and an engine each; a silent peer is lost after ``timeout_ms``.

    With ``direct`` pages are written without bounce buffers, and what rests does so for its time.
    """
    with hosts(count) as made, contextlib.ExitStack() as stack:
        nodes = []
        for host in made:
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
            nodes.append(Node(host, daemon, client, client.create_pool(POOL, SPEC)))
        yield nodes


@pytest.fixture(autouse=True)
def _possible(require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root, for network namespaces")
    require(importlib.util.find_spec("mooncake"), "the Mooncake wheel: the extra `mooncake`")


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


def begin(prefill: Node, decode: Node, *, slow: bool = True) -> Begun:
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
        POOL, request, [pages(received)], source_daemons=[prefill.address], deadline_s=DEADLINE_S
    )
    sending = prefill.client.send(POOL, request, [pages(sent)], steps=steps, deadline_s=DEADLINE_S)
    ring.record(steps[0])
    assert soon(lambda: prefill.status.counters.get("network.sent_bytes", 0) > before + (3 << 20 if slow else 0))
    return Begun(request, sent, received, sending, receiving, lambda: ring.record(steps[1]))


def give_back(node: Node, transfer: Transfer, ids: PageIds) -> None:
    """Wait until nothing reads or writes a side's pages, and free them."""
    node.client.wait_settled(transfer, timeout_s=PATIENCE_S)
    node.client.free(POOL, ids)


def marked_pages(node: Node) -> tuple[PageIds, torch.Tensor]:
    """Return pages that others had before, and what is in them now."""
    ids = node.client.allocate(POOL, 200)
    node.fill(ids, 3)
    return ids, node.content(ids)


@pytest.mark.parametrize(
    "direct", [False, pytest.param(True, marks=pytest.mark.full)], ids=["bounce buffers", "direct"]
)
def test_a_link_is_cut_in_the_middle_of_a_transfer(tmp_path: Path, *, direct: bool) -> None:
    """Its pages are others' at once; those that are written directly not before a fence."""
    with cluster(tmp_path, direct=direct) as (prefill, decode):
        hand_over(prefill, decode, 20, seed=1)
        assert decode.status.counters.get("network.direct_bytes", 0) == 20 * LAYERS * 2 * 16384 * direct
        begun = begin(prefill, decode)
        began = time.monotonic()
        decode.host.cut_link()
        begun.go_on()
        assert {outcome(decode, begun.receiving), outcome(prefill, begun.sending)} <= {"PEER_LOST", "DEADLINE"}
        assert time.monotonic() - began < DEADLINE_S + 1.0
        decode.client.free(POOL, begun.received)
        decode.client.wait_settled(begun.receiving, timeout_s=PATIENCE_S)
        assert not direct or decode.status.counters["network.fences"] == 1, "the pages were free before the fence"
        if not direct:
            give_back(prefill, begun.sending, begun.sent)  # once its writes end
            assert prefill.status.pools[0].busy == 0
        marked, before = marked_pages(decode)
        decode.host.restore_link()
        if direct:
            give_back(prefill, begun.sending, begun.sent)
        assert soon(lambda: decode.quarantined_bytes == 0)  # fenced, or reported by the sender
        assert torch.equal(decode.content(marked), before), "a late write reached a page"
        assert decode.status.counters["network.fences"] >= 1
        hand_over(prefill, decode, 20, seed=4)  # with it come the bytes that the link had held, if any do
        assert torch.equal(decode.content(marked), before), "a late write reached a page"
        decode.client.free(POOL, marked)
        decode.client.delete_pool(POOL)
        hand_over(prefill, decode._replace(pool=decode.client.create_pool(POOL, SPEC)), 20, seed=5)


@pytest.mark.full
@pytest.mark.parametrize("direct", [False, True], ids=["bounce buffers", "direct"])
def test_a_sender_that_stands_still_and_goes_on_later_writes_into_no_page(tmp_path: Path, *, direct: bool) -> None:
    with cluster(tmp_path, direct=direct) as (prefill, decode):
        hand_over(prefill, decode, 20, seed=1)
        begun = begin(prefill, decode)
        begun.go_on()
        with prefill.daemon.stopped():
            assert outcome(decode, begun.receiving) == "PEER_LOST"
            give_back(decode, begun.receiving, begun.received)
            marked, before = marked_pages(decode)
        assert outcome(prefill, begun.sending) == "PEER_LOST"
        prefill.client.wait_settled(begun.sending, timeout_s=PATIENCE_S)
        assert soon(lambda: decode.quarantined_bytes == 0)
        prefill.client.free(POOL, begun.sent)
        hand_over(prefill, decode, 20, seed=4)  # with it come the bytes that were held back, if any do
        assert torch.equal(decode.content(marked), before), "a late write reached a page"
        assert decode.status.counters["network.fences"] >= 1


@pytest.mark.full
def test_a_partition_that_nobody_notices_ends_at_the_deadline(tmp_path: Path) -> None:
    with cluster(tmp_path, timeout_ms=60_000) as (prefill, decode):
        begun = begin(prefill, decode, slow=False)
        decode.host.cut_link()
        begun.go_on()
        assert [outcome(decode, begun.receiving), outcome(prefill, begun.sending)] == ["DEADLINE", "DEADLINE"]
        give_back(decode, begun.receiving, begun.received)
        give_back(prefill, begun.sending, begun.sent)
        decode.host.restore_link()
        hand_over(prefill, decode, 20, seed=4)


@pytest.mark.full
def test_a_daemon_is_killed_on_either_side_and_another_source_takes_over(tmp_path: Path) -> None:
    with cluster(tmp_path, 3) as (first, second, decode):
        begun = begin(first, decode, slow=False)
        first.daemon.kill()
        assert outcome(decode, begun.receiving) == "PEER_LOST"
        decode.client.wait_settled(begun.receiving, timeout_s=PATIENCE_S)
        again = decode.client.receive(POOL, begun.request, [pages(begun.received)], source_daemons=[second.address])
        other = second.client.allocate(POOL, 30)
        second.fill(other, 9)
        sending = second.client.send(POOL, begun.request, [pages(other)])
        finished = decode.client.wait_finished(again, timeout_s=PATIENCE_S)
        assert finished.generation == 2
        assert torch.equal(decode.content(begun.received), second.content(other))
        give_back(second, sending, other)
        begun = begin(second, decode, slow=False)
        decode.daemon.kill()
        assert outcome(second, begun.sending) == "PEER_LOST"
        give_back(second, begun.sending, begun.sent)
        assert second.status.pools[0].busy == 0

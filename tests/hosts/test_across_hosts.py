"""Transfers between hosts, each in a network namespace of its own, over the real Mooncake engine; and cut links."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from examples.demo.hosts import Host, hosts
from kvferry.clients import AttachedPool, Client, MhaSpec, Transfer, new_request_id, pages
from kvferry.clients.cli.main import main as command_line
from kvferry.daemon.daemon import Tuning
from kvferry.daemon.transports.network_memory import NetworkTuning
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.node_keys import NodeKey, read_keys
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
    """Run so many hosts with a daemon and an engine each; a silent peer is lost after ``timeout_ms``.

    With ``direct`` pages are written without bounce buffers, and what rests does so for its time.
    """
    with hosts(number) as made, contextlib.ExitStack() as stack:
        nodes = []
        folders = key_folders(tmp_path / "keys", *(f"tcp://{host.address}:{PORT}" for host in made))
        for host, keys in zip(made, folders, strict=True):
            folder = tmp_path / f"host{host.number}"
            folder.mkdir()
            config = CONFIG.format(
                address=host.address, port=PORT, keys=keys.path, timeout_ms=timeout_ms, direct=str(direct).lower()
            )
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
            nodes.append(Node(host, daemon, client, client.create_pool(POOL, SPEC), keys))
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


def replace_key(node: Node, others: list[Node], certificate: Path) -> None:
    """Do what docs/operations.md says an operator does, and wait until nobody uses the old key."""
    old = read_keys(node.keys.path).own[0]
    keys = "--keys", str(node.keys.path)
    assert command_line(["keys", "make", *keys]) == 0
    new = read_keys(node.keys.path).own[1]
    certificate.write_text(new.certificate)
    for other in others:
        assert command_line(["keys", "allow", "--keys", str(other.keys.path), str(certificate)]) == 0
    assert command_line(["keys", "revoke", *keys, old.name]) == 0
    for other in others:
        with Client.connect(other.daemon.runtime_dir, name="operator") as client:
            assert soon(partial(uses_only, client, new))
    for other in others:
        assert command_line(["keys", "revoke", "--keys", str(other.keys.path), old.name, old.short]) == 0


def uses_only(client: Client, key: NodeKey) -> bool:
    return [one.keys for one in client.status().peers if one.address == key.address] == [(key.short,)]


def test_keys_of_three_are_replaced_under_load_and_no_transfer_is_lost(tmp_path: Path) -> None:
    with cluster(tmp_path, 3) as nodes, ThreadPoolExecutor(1) as operator:
        pairs = list(permutations(nodes, 2))
        for pair in pairs:
            hand_over(*pair, 2, seed=1)
        assert [one.status.peers_prove for one in nodes] == ["key"] * 3
        for node in nodes:
            others = [one for one in nodes if one is not node]
            replacing = operator.submit(replace_key, node, others, tmp_path / "certificate")
            for number, pair in enumerate(cycle(pairs)):
                hand_over(*pair, 2, seed=number)
                if replacing.done() and number >= len(pairs):
                    break
            replacing.result()
        for pair in pairs:
            hand_over(*pair, 2, seed=2)
        assert [one.status.counters.get("peers.lost", 0) for one in nodes] == [0] * 3


def test_that_nobody_needs_a_key_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hosts(1) as (host,):
        file = tmp_path / "daemon.toml"
        file.write_text(f'[peers]\nlisten = "tcp://{host.address}:{PORT}"\ninsecure = true\n')
        with kit.daemon(file.read_text(), prefix=host.command([])) as daemon:
            assert command_line(["status", "--runtime-dir", str(daemon.runtime_dir)]) == 0
            assert "INSECURE: any process that reaches it may act as a daemon" in capsys.readouterr().out
            assert "any process that reaches peers.listen may act as a daemon" in daemon.log.read_text()
        command_line(["doctor", "--config", str(file)])
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "peers.keys" in line and "may act" in line]
        assert "warning" in line


def test_who_has_no_key_or_a_revoked_one_gets_no_transfer(tmp_path: Path) -> None:
    """It knows the request id: without a key it is told neither the first token nor the payload."""
    with cluster(tmp_path) as (prefill, decode):
        hand_over(prefill, decode, 2, seed=1)
        prefill.keys.revoke(decode.keys.key)
        assert soon(lambda: not prefill.status.peers)
        sent, received = prefill.client.allocate(POOL, 2), decode.client.allocate(POOL, 2)
        request = new_request_id()
        sending = prefill.client.send(
            POOL, request, [pages(sent)], first_token=7, payload=b"secret", deadline_s=DEADLINE_S
        )
        receiving = decode.client.receive(
            POOL, request, [pages(received)], source_daemons=[prefill.address], deadline_s=DEADLINE_S
        )
        assert {outcome(decode, receiving), outcome(prefill, sending)} == {"DEADLINE"}
        (known,) = decode.status.peers
        assert (known.state, "does not allow this node's key" in known.why) == ("lost", True)
        assert prefill.status.counters["peers.refused"] >= 1
        prefill.keys.allow(decode.keys.key)
        assert soon(lambda: [one.state for one in decode.status.peers] == ["up"])
        hand_over(prefill, decode, 2, seed=3)


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

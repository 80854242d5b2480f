"""Transfers between hosts, each in a network namespace of its own, over the real Mooncake engine; and cut links."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, permutations
from pathlib import Path

import pytest
import torch

from examples.demo.hosts import hosts
from kvferry.clients import Client, Transfer, new_request_id, pages
from kvferry.clients.cli.main import main as command_line
from kvferry.protocol.codec import PageIds
from kvferry.protocol.node_keys import NodeKey, read_keys
from tests import kit
from tests.hosts.cluster import (
    DEADLINE_S,
    LAYERS,
    PATIENCE_S,
    POOL,
    PORT,
    SPEC,
    Node,
    begin,
    cluster,
    hand_over,
    outcome,
)
from tests.kit.daemons import soon


@pytest.fixture(autouse=True)
def _possible(require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root, for network namespaces")
    require(importlib.util.find_spec("mooncake"), "the Mooncake wheel: the extra `mooncake`")


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

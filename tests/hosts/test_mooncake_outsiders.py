"""What Mooncake's TCP protects, and what not: each claim of docs/security.md tried by somebody on the same network."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import torch

from examples.demo.hosts import Host, hosts
from kvferry.daemon.transports.mooncake import host_and_port
from tests.hosts.cluster import PATIENCE_S, POOL, PORT, Node, begin, hand_over, nodes_of, outcome
from tests.kit import mooncake_outsider as outsider
from tests.kit.daemons import soon
from tests.kit.mooncake import running_peer

MIB: Final = 1 << 20
FENCE: Final = Path(__file__).parents[2] / "systemd" / "kvferry.nft"
PORTS: Final = range(15000, 17001)
LONG_MS: Final = 60_000
OTHER_USER: Final = 65533


@pytest.fixture(autouse=True)
def _possible(require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root, for network namespaces")
    require(importlib.util.find_spec("mooncake"), "the Mooncake wheel: the extra `mooncake`")
    require(shutil.which("nft"), "Debian's nftables")


@pytest.fixture
def three() -> Iterator[tuple[list[Host], ThreadPoolExecutor]]:
    """Two hosts, and a thread on a third one of the same network, which has neither daemon nor key."""
    with hosts(3) as made, ThreadPoolExecutor(1, initializer=made[2].enter) as elsewhere:
        yield made[:2], elsewhere


def find(host: str) -> outsider.Segment:
    """Find an engine's ports as somebody does who knows nothing, and ask for its memory."""
    for port in PORTS:
        with contextlib.suppress(OSError, ValueError):
            return outsider.look_up(host, port)
    raise AssertionError(f"no engine of Mooncake at {host}")


def fence(node: Node, allowed: Host) -> None:
    """Load the package's file on a host, with another one as the only address that may connect."""
    text = FENCE.read_text().replace("10.0.0.0/24", allowed.address).replace('"kvferry"', '"nobody"')
    subprocess.run(node.host.command(["nft", "-f", "-"]), input=text, text=True, check=True, timeout=PATIENCE_S)


def become_another_user(host: Host) -> None:
    """Let this thread be another user of a host, whose sockets are that user's."""
    host.enter()
    ctypes.CDLL(None).setfsuid(OTHER_USER)


@contextlib.contextmanager
def control_is_cut(node: Node) -> Iterator[None]:
    """Let what daemons tell a node wait, while Mooncake's bytes arrive."""
    nft = partial(subprocess.run, text=True, check=True, timeout=PATIENCE_S)
    rules = f"table ip cut {{ chain input {{ type filter hook input priority 0; tcp dport {PORT} drop; }}; }}"
    nft(node.host.command(["nft", "-f", "-"]), input=rules)
    try:
        yield
    finally:
        nft(node.host.command(["nft", "delete", "table", "ip", "cut"]))


def test_who_connects_reads_and_writes_what_is_registered_and_nothing_else() -> None:
    """By an address that is not the engine's own: it listens on all of them."""
    with running_peer(MIB) as peer:
        segment = outsider.look_up("127.0.0.9", host_and_port(peer.session_name)[1])
        assert segment.buffers == [(peer.address, MIB)]
        outsider.write(segment, peer.address + 5, b"forged")
        assert outsider.read(segment, peer.address, 12) == b"\0\0\0\0\0forged\0"
        for address in (0, peer.address - 1, peer.address + MIB - 11):
            for forbidden in (partial(outsider.read, size_bytes=12), partial(outsider.write, data=b"x" * 12)):
                with pytest.raises(outsider.RefusedError):
                    forbidden(segment, address)


def test_one_silent_connection_holds_up_whoever_comes_next() -> None:
    with running_peer(MIB) as peer:
        host, port = host_and_port(peer.session_name)
        with socket.create_connection((host, port)), pytest.raises(TimeoutError):
            outsider.look_up(host, port, timeout_s=0.3)
        assert outsider.look_up(host, port).buffers  # the control


@pytest.mark.parametrize("forged", [pytest.param(False, marks=pytest.mark.full), True])
def test_bytes_that_are_forged_in_a_bounce_buffer_reach_no_engine(
    tmp_path: Path, three: tuple[list[Host], ThreadPoolExecutor], *, forged: bool
) -> None:
    """Without a fence; the control is the same without the forger."""
    made, elsewhere = three
    with nodes_of(tmp_path, made, LONG_MS) as (prefill, decode):
        hand_over(prefill, decode, 20, seed=1)
        segment = elsewhere.submit(find, decode.host.address).result()
        begun = begin(prefill, decode, deadline_s=PATIENCE_S)
        with control_is_cut(decode):
            sent = prefill.status.counters["network.sent_bytes"]
            assert soon(lambda: prefill.status.counters["network.sent_bytes"] >= sent + MIB)
            if forged:
                for address, size_bytes in segment.buffers:
                    elsewhere.submit(outsider.write, segment, address, b"\xa5" * size_bytes).result()
        begun.go_on()
        if forged:
            assert outcome(decode, begun.receiving) == "TRANSFER_FAILED"
            assert decode.status.counters["network.refused"] >= 1
        else:
            assert outcome(decode, begun.receiving) == "OK"
            assert torch.equal(decode.content(begun.received), prefill.content(begun.sent))


@pytest.mark.parametrize(
    "direct", [False, pytest.param(True, marks=pytest.mark.full)], ids=["bounce buffers", "direct"]
)
def test_only_direct_opens_pools(tmp_path: Path, three: tuple[list[Host], ThreadPoolExecutor], *, direct: bool) -> None:
    made, elsewhere = three
    with nodes_of(tmp_path, made, LONG_MS, direct=direct) as (prefill, decode):
        hand_over(prefill, decode, 20, seed=1)
        ids = decode.client.allocate(POOL, 256)
        decode.fill(ids, seed=2)
        before = decode.content(ids)
        segment = elsewhere.submit(find, decode.host.address).result()
        for address, size_bytes in segment.buffers:
            elsewhere.submit(outsider.write, segment, address, b"\xa5" * size_bytes).result()
        assert torch.equal(decode.content(ids), before) is not direct
        assert (sum(size for _, size in segment.buffers) > before.nbytes) is direct


def test_behind_the_fence_only_nodes_reach_it(tmp_path: Path, three: tuple[list[Host], ThreadPoolExecutor]) -> None:
    made, elsewhere = three
    with nodes_of(tmp_path, made, LONG_MS) as (prefill, decode):
        hand_over(prefill, decode, 20, seed=1)
        segment = elsewhere.submit(find, decode.host.address).result()  # the control
        fence(decode, prefill.host)
        fence(decode, prefill.host)  # again, as after a change
        ((address, _), *_) = segment.buffers
        with pytest.raises(ConnectionRefusedError):
            elsewhere.submit(outsider.read, segment, address, 1).result()
        with pytest.raises(AssertionError, match="no engine"):
            elsewhere.submit(find, decode.host.address).result()
        with ThreadPoolExecutor(1, initializer=become_another_user, initargs=(decode.host,)) as local:
            reading = local.submit(outsider.read, segment, address, 1)
            assert isinstance(reading.exception(), ConnectionRefusedError)
        hand_over(prefill, decode, 20, seed=2)
        hand_over(decode, prefill, 20, seed=3)

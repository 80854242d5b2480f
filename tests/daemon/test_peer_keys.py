"""Keys between daemons: who has none gets nothing, who has one speaks for itself alone, and keys change under load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import structlog.testing
import zmq
import zmq.asyncio

from kvferry.daemon.peers import curve_listener
from kvferry.daemon.peers import links as peers
from kvferry.daemon.peers.key_ring import KeyRing
from kvferry.daemon.peers.link import Heartbeat
from kvferry.protocol.errors import ErrorInfo, InvalidFieldError
from kvferry.protocol.ids import new_boot_id, new_key
from kvferry.protocol.node_keys import NodeKey
from kvferry.protocol.peer_messages import HalfAbandoned, OpEnded, PeerEnvelope, PeerHello, encode_peer
from tests.kit.links import Daemon
from tests.kit.node_keys import KeyFolder, key_folders, new_node_key
from tests.kit.servers import free_ports

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]
MakeNodes = Callable[..., list["Node"]]
PATIENT = Heartbeat(10_000, 60_000)
ALIVE = Heartbeat(50, 10_000)
"""No busy machine is taken for a lost peer."""
EVERY_PROTOCOL = 3
"""ETH_P_ALL of Linux."""
SECRET = HalfAbandoned(
    tenant=0,
    request_id="ab" * 16,
    direction="send",
    error=ErrorInfo(code="CANCELLED", detail="what nobody else may read"),
)


class Node(Daemon):
    """Links with keys, and the folder of these."""

    def __init__(self, path: Path, folder: KeyFolder, ring: KeyRing, heartbeat: Heartbeat) -> None:
        super().__init__(path, folder.key.address, heartbeat, ring)
        self.folder = folder

    def state_of(self, other: Node) -> str:
        return next((one.state for one in self.links.status() if one.address == other.address), "none")

    def why_of(self, other: Node) -> str:
        return next((one.why for one in self.links.status() if one.address == other.address), "")

    def keys_with(self, other: Node) -> tuple[str, ...]:
        return next((one.keys for one in self.links.status() if one.address == other.address), ())

    def heard_from(self, other: Node) -> list[int]:
        return [body.op for peer, body in self.said if peer == other.incarnation and isinstance(body, OpEnded)]

    async def meets_all(self, count: int) -> None:
        await self.until(lambda: len(self.up) == count)

    async def uses_only(self, other: Node, key: NodeKey) -> None:
        """Wait until both connections with another node are made with this key of it."""
        await self.until(lambda: self.keys_with(other) == (key.short,))

    async def hears(self, other: Node, count: int) -> None:
        await self.until(lambda: len(self.heard_from(other)) == count)

    async def refuses(self, count: int = 1) -> None:
        await self.until(lambda: self.counters.snapshot().get("peers.refused", 0) >= count)


class Outsider:
    """Something that connects to a daemon with keys of its own, or with none.

    Attributes:
        key: what it proves to have.
    """

    def __init__(self, key: NodeKey | None = None, server: NodeKey | None = None) -> None:
        self._context = zmq.asyncio.Context()
        self.dealer = self._context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.LINGER, 0)
        if key is not None and server is not None:
            self.dealer.setsockopt(zmq.CURVE_SERVERKEY, server.public.encode())
            self.dealer.setsockopt(zmq.CURVE_PUBLICKEY, key.public.encode())
            self.dealer.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())

    def greet(self, to: Daemon, address: str, to_key: str = "") -> None:
        """Say PEER_HELLO, as the daemon at an address."""
        hello = PeerHello(boot_id=new_boot_id(), protocol_min=1, protocol_max=9, dialled=to.address)
        self.dealer.connect(to.address)
        self.dealer.send_multipart(encode_peer(PeerEnvelope(address, new_key(), to_key, hello)))

    def close(self) -> None:
        self._context.destroy(0)


@pytest.fixture
async def outside(anyio_backend: object) -> AsyncIterator[Callable[..., Outsider]]:  # noqa: ARG001  on the test's loop
    with contextlib.ExitStack() as stack:
        yield lambda *keys: stack.enter_context(contextlib.closing(Outsider(*keys)))


@pytest.fixture
async def make(tmp_path: Path, anyio_backend: object, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakeNodes]:  # noqa: ARG001
    """Return a function that starts nodes, each of which allows the others."""
    monkeypatch.setattr(peers, "KEYS_S", 0.02)
    made: list[Node] = []
    addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(3)]
    folders = await asyncio.to_thread(key_folders, tmp_path / "keys", *addresses)
    rings = [await asyncio.to_thread(one.ring) for one in folders]

    def start(count: int, heartbeat: Heartbeat = ALIVE) -> list[Node]:
        numbered = enumerate(zip(folders[:count], rings, strict=False))
        made.extend(Node(tmp_path / f"{number}.sock", *keys, heartbeat) for number, keys in numbered)
        return made

    yield start
    for one in made:
        one.links.close()


async def test_who_has_no_key_is_refused_and_nothing_is_read(make: MakeNodes, outside: Callable[..., Outsider]) -> None:
    one, other = make(2)
    await one.meets(other)
    received = other.counters.snapshot()["peers.received"]
    outside().greet(other, one.address)
    await other.until(lambda: other.counters.snapshot().get("peers.handshakes_failed"))
    with socket.create_connection(("127.0.0.1", int(other.address.rpartition(":")[2]))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    await other.until(lambda: other.state_of(one) == "up")
    assert other.lost == []
    assert other.counters.snapshot()["peers.received"] - received < 100
    assert [each.address for each in other.links.status()] == [one.address]


async def test_a_key_that_is_not_allowed_is_refused_and_logged_once_with_its_address(
    make: MakeNodes, outside: Callable[..., Outsider]
) -> None:
    one, other = make(2)
    await one.meets(other)
    stranger = new_node_key("stranger", "tcp://127.0.0.1:9")
    with structlog.testing.capture_logs() as said:
        for _ in range(2):
            outside(stranger, other.folder.key).greet(other, one.address)
        await other.refuses(2)
    refusals = [each for each in said if each["event"].startswith("a node was refused")]
    assert [(each["key"], each["address"]) for each in refusals] == [(stranger.public, "127.0.0.1")]
    assert other.said == []
    assert other.lost == []


async def test_a_node_cannot_speak_for_another(make: MakeNodes, outside: Callable[..., Outsider]) -> None:
    one, other, third = make(3)
    await one.meets(other)
    with structlog.testing.capture_logs() as said:
        outside(third.folder.key, other.folder.key).greet(other, one.address)
        await other.counts("peers.malformed", 1)
    dropped = next(each for each in said if each["event"] == "a peer's message was dropped")
    assert dropped["origin"] == "node-2"
    assert f"node-2 speaks for {one.address}" in dropped["cause"]
    assert other.lost == []
    assert one.links.send(other.incarnation, OpEnded(op=1))
    await other.until(lambda: other.said)


async def test_who_listens_in_the_place_of_a_node_hears_nothing(make: MakeNodes) -> None:
    one, other = make(2)
    other.links.close()
    context = zmq.asyncio.Context()
    impostor = context.socket(zmq.ROUTER)
    impostor.setsockopt(zmq.CURVE_SERVER, 1)
    impostor.setsockopt(zmq.CURVE_SECRETKEY, new_node_key("impostor", other.address).secret.encode())
    impostor.bind(other.address)
    try:
        one.links.connect(other.address)
        await one.until(lambda: "another key" in one.why_of(other))
        assert one.state_of(other) == "connecting"
        with pytest.raises(zmq.Again):
            await impostor.recv(zmq.NOBLOCK)
    finally:
        context.destroy(0)


async def test_who_is_on_the_path_reads_nothing(
    make: MakeNodes, tmp_path: Path, require: Callable[[object, str], None]
) -> None:
    """Without keys all can be read there: that is the control."""
    require(os.geteuid() == 0, "root, who may listen to an interface")
    plain = [Daemon(tmp_path / f"plain-{port}.sock", f"tcp://127.0.0.1:{port}", ALIVE) for port in free_ports(2)]
    try:
        for (one, other), readable in ((make(2), False), (plain, True)):
            await one.meets(other)
            with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL)) as path:
                path.bind(("lo", 0))
                assert one.links.send(other.incarnation, SECRET)
                await other.until(lambda: (one.incarnation, SECRET) in other.said)  # noqa: B023  awaited here
                assert (SECRET.error.detail.encode() in all_of(path)) == readable
    finally:
        for each in plain:
            each.links.close()


def all_of(path: socket.socket) -> bytes:
    """Return the packets that have come."""
    packets = []
    with contextlib.suppress(BlockingIOError):
        while True:
            packets.append(path.recv(1 << 17, socket.MSG_DONTWAIT))
    return b"".join(packets)


async def test_a_node_without_an_allowed_key_is_not_called(make: MakeNodes) -> None:
    (one,) = make(1)
    with pytest.raises(InvalidFieldError, match="no key of a node is allowed") as refused:
        one.links.connect("tcp://127.0.0.1:9", "source_daemons[0]")
    assert (refused.value.field, "kvferry keys allow" in refused.value.remedy) == ("source_daemons[0]", True)


async def test_a_revoked_key_counts_no_more(make: MakeNodes) -> None:
    one, other, third = make(3)
    await one.meets(other)
    await third.meets(other)
    await other.until(lambda: len(other.up) == 2)
    await asyncio.to_thread(other.folder.revoke, one.folder.key)
    await other.until(lambda: other.lost)
    assert other.lost == [one.incarnation]
    await one.until(lambda: one.lost)
    assert third.lost == []
    assert other.state_of(one) == "none"
    await other.refuses()
    await asyncio.to_thread(other.folder.allow, one.folder.key)
    await one.until(lambda: len(one.up) == 2)


class Talk:
    """What one node says to another, numbers from 0 on, until it is over."""

    def __init__(self, one: Node, other: Node) -> None:
        self.one, self.other = one, other
        self.said = 0
        self.is_over = False

    async def go_on(self) -> None:
        while not self.is_over:
            assert self.one.links.send(self.other.incarnation, OpEnded(op=self.said))
            self.said += 1
            await asyncio.sleep(0.001)


async def replace_key(one: Node, others: list[Node]) -> None:
    """Do what an operator does, in the order of docs/operations.md."""
    old, new = one.folder.key, new_node_key(one.folder.key.name, one.address)
    await asyncio.to_thread(one.folder.prepare, new)
    for other in others:
        await asyncio.to_thread(other.folder.allow, new)
    await asyncio.to_thread(one.folder.replace)
    for other in others:
        await other.uses_only(one, new)
    for other in others:
        await asyncio.to_thread(other.folder.revoke, old)


async def test_keys_of_three_are_replaced_under_load_and_no_message_is_lost(make: MakeNodes) -> None:
    """Every node says numbers to both others all the time; each hears all of them in order, and no link breaks."""
    nodes = make(3)
    for one, other in itertools.permutations(nodes, 2):
        one.links.connect(other.address)
    for one in nodes:
        await one.meets_all(2)
    talks = [Talk(*pair) for pair in itertools.permutations(nodes, 2)]
    talking = [asyncio.ensure_future(talk.go_on()) for talk in talks]
    for one in nodes:
        await replace_key(one, [other for other in nodes if other is not one])
    for talk in talks:
        talk.is_over = True
    await asyncio.gather(*talking)
    for talk in talks:
        await talk.other.hears(talk.one, talk.said)
        assert talk.other.heard_from(talk.one) == list(range(talk.said))
    assert [one.lost for one in nodes] == [[], [], []]


def read_to_end(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass


async def test_connections_that_prove_nothing_are_few(make: MakeNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve_listener, "MAX_UNPROVEN_CONNECTIONS", 8)
    one, other = make(2, PATIENT)  # no handshake is too long
    await one.meets(other)
    place = ("127.0.0.1", int(other.address.rpartition(":")[2]))
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(await asyncio.to_thread(socket.create_connection, place, 20.0)) for _ in range(40)]
        for oldest in many[:30]:
            await asyncio.to_thread(read_to_end, oldest)
        assert one.links.send(other.incarnation, OpEnded(op=1))
        await other.until(lambda: other.said)
    assert (one.lost, other.lost) == ([], [])

"""Two daemons on a link that breaks at each phase of a transfer: both halves end, and the next transfer works."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
import zmq

from kvferry.clients import AttachedPool, Client, MhaSpec, Transfer, new_request_id, pages
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.peer_messages import PeerEnvelope, PeerHello, encode_peer
from kvferry.protocol.session_messages import PeerStatus
from kvferry.protocol.settings import PEER_SOCKET
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.faults import connected
from tests.kit.tcp_proxy import PATIENCE_S, Proxy

TIMEOUT_MS = 600
CONFIG = f"[peers]\ntimeout_ms = {TIMEOUT_MS}\n"
SPEC = MhaSpec(layers=2, tokens=512, page_size=16, kv_heads=2, head_dim=16, dtype="float32")
PAGES = 8
HELLO = PeerHello(boot_id="f" * 32, protocol_min=4, protocol_max=4, dialled="ipc:///run/kvferry/peer.sock")
LOST = ("PEER_LOST", "PEER_LOST")
PHASES = {
    "before the announcement": (b"ANNOUNCE", ("OK", "OK")),
    "before the chunk": (b"SEND_REQUEST", LOST),
    "between copy and question": (b"\xa7CONFIRM", LOST),
    "between question and answer": (b"\xa9CONFIRMED", LOST),
    "before the end": (b"RECEIVE_CLOSED", ("PEER_LOST", "OK")),
}
"""The message that each ends with, and the outcomes where the link is lost then: what had not begun goes on, what had
begun fails on both sides; at the end all had arrived, and the source does not hear of it."""


class Side(NamedTuple):
    """A daemon, an engine of its, and the engine's pool and pages."""

    daemon: Daemon
    client: Client
    pool: AttachedPool
    pages: PageIds

    @classmethod
    def of(cls, daemon: Daemon, client: Client) -> Side:
        return cls(daemon, client, client.create_pool("kv", SPEC), client.allocate("kv", PAGES))

    @property
    def address(self) -> str:
        return self.client.status().addresses[0]

    @property
    def peer(self) -> PeerStatus:
        (peer,) = self.client.status().peers
        return peer

    def lost(self) -> int:
        return self.client.status().counters.get("peers.lost", 0)

    def fill(self, seed: int) -> None:
        """Write what no other seed's pages hold."""
        for role in ("k", "v"):
            self.pool.tensor("main", role)[:, torch.from_numpy(self.pages)] = float(seed)

    def content(self) -> torch.Tensor:
        ids = torch.from_numpy(self.pages)
        return torch.stack([self.pool.tensor("main", role)[:, ids] for role in ("k", "v")]).clone()

    def outcome(self, transfer: Transfer) -> str:
        """Wait until its half has settled; return OK or the error's code."""
        code = "OK"
        try:
            self.client.wait_finished(transfer, timeout_s=PATIENCE_S)
        except KvferryError as error:
            code = error.code
        self.client.wait_settled(transfer, timeout_s=PATIENCE_S)
        return code

    def busy(self) -> int:
        return sum(pool.busy for pool in self.client.status().pools)


class Pair:
    """A source and a home, and what is between them.

    Attributes:
        to_source: what the home's messages go through.
        to_home: what the source's messages go through.
    """

    def __init__(self, source: Side, home: Side, to_source: Proxy, to_home: Proxy) -> None:
        self.source, self.home = source, home
        self.sides = source, home
        self.proxies = self.to_source, self.to_home = to_source, to_home
        self._seed = 0

    @property
    def is_up(self) -> bool:
        """Return whether each daemon hears the other's answers."""
        return all(side.peer.state == "up" for side in self.sides)

    def lost(self) -> tuple[int, int]:
        """Return how often each daemon has lost the other one."""
        return self.source.lost(), self.home.lost()

    def begin(self, deadline_s: float = 60.0) -> tuple[Transfer, Transfer]:
        """Begin a transfer of new bytes; return both halves, the sender's first."""
        self._seed += 1
        self.source.fill(self._seed)
        self.home.fill(-self._seed)
        request = new_request_id()
        received = self.home.client.receive(
            "kv", request, [pages(self.home.pages)], source_daemons=[self.source.address], deadline_s=deadline_s
        )
        sent = self.source.client.send("kv", request, [pages(self.source.pages)], deadline_s=deadline_s)
        for client, one in ((self.home.client, received), (self.source.client, sent)):
            while one.accepted is None and one.error is None:
                client.poll(PATIENCE_S)
        return sent, received

    def end(self, halves: tuple[Transfer, Transfer]) -> tuple[str, str]:
        """Wait for the end of both halves, compare what arrived, and return their outcomes."""
        outcomes = self.source.outcome(halves[0]), self.home.outcome(halves[1])
        if outcomes[1] == "OK":
            assert torch.equal(self.home.content(), self.source.content())
        assert (self.source.busy(), self.home.busy()) == (0, 0)
        assert soon(lambda: not any(side.peer.announced or side.peer.waiting for side in self.sides))
        return outcomes

    def hand_over(self) -> None:
        assert self.end(self.begin()) == ("OK", "OK")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with (
        kit.daemon(CONFIG) as source,
        kit.daemon(CONFIG) as home,
        Proxy() as to_source,
        Proxy() as to_home,
        Client.connect(source.runtime_dir, name="prefill") as prefill,
        Client.connect(home.runtime_dir, name="decode") as decode,
    ):
        to_source.route_unix(source.runtime_dir / PEER_SOCKET)
        to_home.route_unix(home.runtime_dir / PEER_SOCKET)
        made = Pair(Side.of(source, prefill), Side.of(home, decode), to_source, to_home)
        made.hand_over()
        yield made


@pytest.fixture(autouse=True)
def _whole(pair: Pair) -> Iterator[None]:
    """Let each test begin and end with a link that is up."""
    assert soon(lambda: pair.is_up)
    yield
    for proxy in pair.proxies:
        proxy.heal()
    assert soon(lambda: pair.is_up)
    pair.hand_over()


def broken_at(pair: Pair, phase: str, action: Callable[[Proxy], None]) -> tuple[Transfer, Transfer]:
    """Begin a transfer, and break both ways where it comes to a phase; return its halves."""
    reached = [proxy.hold_at(PHASES[phase][0], passes=False) for proxy in pair.proxies]
    halves = pair.begin()
    ends_at = time.monotonic() + PATIENCE_S
    while not any(one(0.01) for one in reached):
        assert time.monotonic() < ends_at, phase
    for proxy in pair.proxies:
        action(proxy)
        proxy.unmark()
    return halves


@pytest.mark.parametrize("phase", PHASES)
def test_a_link_is_silent_for_less_than_the_timeout(pair: Pair, phase: str) -> None:
    lost = pair.lost()
    assert pair.end(broken_at(pair, phase, Proxy.heal)) == ("OK", "OK")
    assert pair.lost() == lost


@pytest.mark.parametrize("phase", PHASES)
def test_a_link_is_cut_and_is_there_again_at_once(pair: Pair, phase: str) -> None:
    def cut(proxy: Proxy) -> None:
        proxy.drop_connections()
        proxy.heal()

    assert pair.end(broken_at(pair, phase, cut)) == PHASES[phase][1]


@pytest.mark.parametrize("phase", PHASES)
def test_a_link_is_half_open_for_longer_than_the_timeout(pair: Pair, phase: str) -> None:
    lost = pair.lost()
    halves = broken_at(pair, phase, Proxy.black_hole)
    assert soon(lambda: all(now > before for now, before in zip(pair.lost(), lost, strict=True)))
    for side in pair.sides:
        assert (side.peer.state, bool(side.peer.why)) == ("lost", True)
    for proxy in pair.proxies:
        proxy.drop_connections()  # as a host that comes back answers what it does not know
        proxy.heal()
    assert pair.end(halves) == PHASES[phase][1]


@pytest.mark.parametrize("way", ["to_source", "to_home"])
def test_one_way_alone_is_half_open(pair: Pair, way: str) -> None:
    """Both daemons notice: who cannot be heard, and who hears nothing any more although it is heard."""
    lost = pair.lost()
    proxy: Proxy = getattr(pair, way)
    pinged = proxy.hold_at(b"\4PING", passes=True)  # who listens knows from the first one how often they come
    assert pinged(PATIENCE_S)
    proxy.heal()
    marker, outcomes = PHASES["before the announcement" if way == "to_source" else "before the chunk"]
    reached = proxy.hold_at(marker, passes=False)
    halves = pair.begin()
    assert reached(PATIENCE_S)
    assert soon(lambda: all(now > before for now, before in zip(pair.lost(), lost, strict=True)))
    proxy.drop_connections()
    proxy.heal()
    assert pair.end(halves) == outcomes


def test_a_daemon_is_stopped_for_longer_than_the_timeout(pair: Pair) -> None:
    lost = pair.home.lost()
    reached = pair.to_source.hold_at(PHASES["between copy and question"][0], passes=False)
    halves = pair.begin()
    assert reached(PATIENCE_S)
    with pair.source.daemon.stopped():
        pair.to_source.heal()
        assert soon(lambda: pair.home.lost() > lost)
        assert pair.home.peer.state == "lost"
    assert pair.end(halves) == LOST


@pytest.mark.parametrize("direction", ["send", "receive"])
def test_an_abandoned_half_ends_the_other_one_at_another_daemon(
    pair: Pair, direction: Literal["send", "receive"]
) -> None:
    request, (source, home) = new_request_id(), pair.sides
    waits, gives_up = (home, source) if direction == "send" else (source, home)
    if direction == "send":
        waiting = home.client.receive("kv", request, [pages(home.pages)], source_daemons=[source.address])
    else:
        waiting = source.client.send("kv", request, [pages(source.pages)])
    gives_up.client.abandon(request, direction, reason="it gave up", daemons=[waits.address])
    assert waits.outcome(waiting) == "PEER_CANCELLED"
    assert (pair.source.busy(), pair.home.busy()) == (0, 0)


def test_a_flood_at_the_peers_socket_harms_no_transfer(pair: Pair) -> None:
    """Unauthenticated peers who say what they can, as fast as can be; who stop within a frame; who never read."""
    lost = pair.lost()
    unproven = pair.home.client.status().counters.get("peers.unproven", 0)
    address = f"{pair.home.address}.aside"  # past the proxy
    forged = encode_peer(PeerEnvelope(pair.source.address, new_request_id(), new_request_id(), HELLO))
    stop = threading.Event()

    def flood(*frames: bytes) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger, dealer.sndtimeo, dealer.sndhwm = 0, 100, 10
            dealer.connect(address)
            while not stop.is_set():
                with contextlib.suppress(zmq.Again):
                    dealer.send_multipart(frames)

    with contextlib.ExitStack() as stack:
        for frames in (forged, [forged[0], b"\0" * (4 << 20)], [b"\xc1" * 9] * 30):
            thread = threading.Thread(target=flood, args=[bytes(one) for one in frames])
            stack.callback(thread.join, PATIENCE_S)
            thread.start()
        stack.callback(stop.set)
        for _ in range(20):
            half = stack.enter_context(connected(Path(address.removeprefix("ipc://"))))
            half.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01NULL")
        assert soon(lambda: pair.home.client.status().counters.get("peers.unproven", 0) > unproven + 100)
        for _ in range(5):
            pair.hand_over()
    assert pair.lost() == lost


def test_a_daemon_is_killed_and_started_again_at_once() -> None:
    """No timeout can be what notices it: that is a minute here."""
    patient = "[peers]\ntimeout_ms = 60000\n"
    with (
        kit.daemon(patient) as source,
        kit.daemon(patient) as home,
        Client.connect(home.runtime_dir, name="decode") as decode,
    ):
        survivor = Side.of(home, decode)
        address = f"ipc://{source.runtime_dir / PEER_SOCKET}"
        with Client.connect(source.runtime_dir, name="prefill") as prefill:
            dying = Side.of(source, prefill)
            request = new_request_id()
            received = decode.receive("kv", request, [pages(survivor.pages)], source_daemons=[address])
            prefill.send("kv", request, [pages(dying.pages[:1])], last=False)
            assert soon(lambda: "last SEND" in decode.status().transfers[0].waits_for)
            old = survivor.peer
            source.kill()
        assert survivor.outcome(received) == "PEER_LOST"
        assert survivor.busy() == 0
        source.start()
        with Client.connect(source.runtime_dir, name="prefill") as prefill:
            other = Side.of(source, prefill)
            assert (old.state, old.address) == ("up", address)
            request = new_request_id()
            received = decode.receive("kv", request, [pages(survivor.pages)], source_daemons=[address])
            other.fill(5)
            sent = prefill.send("kv", request, [pages(other.pages)])
            assert (other.outcome(sent), survivor.outcome(received)) == ("OK", "OK")
            assert torch.equal(survivor.content(), other.content())

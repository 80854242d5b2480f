"""Connections between daemons, on real sockets: who is there, who has gone, and what is never delivered late."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import structlog.testing
import zmq
import zmq.asyncio

from kvferry.daemon.control import control_socket
from kvferry.daemon.control.zmtp import GREETING, frame
from kvferry.daemon.peers import link as one_link
from kvferry.daemon.peers import links as peers
from kvferry.daemon.peers.key_ring import KeyRing
from kvferry.daemon.peers.link import Heartbeat
from kvferry.daemon.process.descriptors import PER_LINK, Descriptors
from kvferry.daemon.transfer.endpoints import Incarnation
from kvferry.protocol.base import PageList
from kvferry.protocol.config.schema import PeersConfig
from kvferry.protocol.errors import ErrorInfo, InvalidFieldError, TooLargeError
from kvferry.protocol.ids import new_boot_id, new_key
from kvferry.protocol.peer_messages import (
    OpEnded,
    PeerBody,
    PeerEnvelope,
    PeerHeartbeat,
    PeerHello,
    PeerSend,
    ReceiveClosed,
    ReceiveName,
    decode_peer,
    encode_peer,
)
from tests.kit.links import HEARTBEAT, PATIENCE_S, Daemon
from tests.kit.node_keys import key_folders
from tests.kit.servers import free_ports
from tests.protocol.samples import PEER_MESSAGES

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]
PATIENT = Heartbeat(10_000, 30_000)
LOOPBACK = {"tcp": "tcp://127.0.0.1:0", "tcp6": "tcp://[::1]:0"}
WITHOUT_KEYS = pytest.mark.parametrize("make", ["ipc", *LOOPBACK], indirect=True)
LARGE = ReceiveClosed(
    receive_request=ReceiveName("0" * 32, "pool", 0, 1), error=ErrorInfo(code="POOL_LOST", detail="x" * 600_000)
)
"""600 kB: more than a Unix socket buffers."""


class ScriptedPeer:
    """Something that speaks as a daemon does, but reads what it is told only when the test says so.

    Attributes:
        key: its key for the daemon that it speaks to.
        told_key: what that daemon has told it, once it has read so far.
    """

    def __init__(self, address: str, takes_messages: int = 1) -> None:
        self.boot_id = new_boot_id()
        self.key, self.told_key = new_key(), ""
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.RCVHWM, takes_messages)
        self._router.bind(address)
        self.address = address
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.IPV6, 1)
        self._told: set[str] = set()
        self._heard_by = b""

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self.address, self.boot_id)

    async def tell(self, to: Daemon, *messages: Sequence[bytes | memoryview], address: str = "") -> None:
        """Send frames to a daemon, in order, at its address that is of this kind."""
        called = to.links.addresses[(address or self.address).partition("://")[0]]
        if called not in self._told:
            self._told.add(called)
            self._dealer.connect(called)
        for frames in messages:
            await self._dealer.send_multipart(frames)

    async def say(self, to: Daemon, body: PeerBody, *, address: str = "", times: int = 1, **head: str) -> None:
        """Say something to a daemon, as the daemon at ``address``, which is its own by default."""
        keys = {"key": self.key, "to_key": self.told_key, **head}
        frames = encode_peer(PeerEnvelope(address or self.address, body=body, **keys))
        await self.tell(to, *[frames] * times, address=address)

    async def greet(self, to: Daemon, *, times: int = 1, anew: bool = False, **more: Any) -> None:  # noqa: ANN401  of PEER_HELLO
        """Say who it is, each time with another key if it is to be ``anew``; it has read the daemon's greeting before.

        ``more`` are fields of PEER_HELLO.
        """
        fields = {"boot_id": self.boot_id, "protocol_min": 1, "protocol_max": 9, "dialled": to.address, **more}
        for _ in range(times):
            self.key = new_key() if anew else self.key
            await self.say(to, PeerHello(**fields))

    async def meet(self, to: Daemon, **more: Any) -> None:  # noqa: ANN401  of PEER_HELLO
        """Become a peer that is up: be called, hear the daemon's key, and greet with it."""
        to.links.connect(self.address)
        while not isinstance((await self.hears()).body, PeerHello):
            pass
        await self.greet(to, **more)
        await to.until(lambda: self.incarnation in to.up)

    async def speak_on_the_connection(self) -> None:
        """Say on the connection by which the daemon speaks more than libzmq keeps by default."""
        for _ in range(3000):
            await self._router.send_multipart([self._heard_by, b""])

    def leave(self) -> None:
        """Close that connection once all is sent."""
        self._router.close(linger=1000)

    async def hears(self) -> PeerEnvelope:
        async with asyncio.timeout(PATIENCE_S):
            self._heard_by, *frames = await self._router.recv_multipart()
        envelope = decode_peer(frames).envelope
        self.told_key = envelope.key
        return envelope

    async def hears_until(self, kind: type[PeerBody]) -> PeerEnvelope:
        while not isinstance((envelope := await self.hears()).body, kind):
            pass
        return envelope

    def close(self) -> None:
        self._context.destroy(0)


@pytest.fixture
async def scripted(tmp_path: Path, anyio_backend: object) -> AsyncIterator[ScriptedPeer]:  # noqa: ARG001  see ``start``
    """Return a scripted peer, to whom little can be on its way: a Unix socket buffers less than one large message."""
    one = ScriptedPeer(f"ipc://{tmp_path}/scripted")
    yield one
    one.close()


def states(daemon: Daemon) -> list[tuple[str, str]]:
    return [(one.address, one.state) for one in daemon.links.status()]


MakeDaemon = Callable[..., Daemon]


@pytest.fixture
async def start(anyio_backend: object) -> AsyncIterator[MakeDaemon]:  # noqa: ARG001  it runs on the test's loop
    """Return a function that starts links, which end with the test."""
    made: list[Daemon] = []

    def start_one(
        path: Path, listen: str | None = None, heartbeat: Heartbeat = HEARTBEAT, keys: KeyRing | None = None
    ) -> Daemon:
        made.append(Daemon(path, listen, heartbeat, keys))
        return made[-1]

    yield start_one
    for one in made:
        one.links.close()


@pytest.fixture(params=["ipc", *LOOPBACK, "keys"])
def make(request: pytest.FixtureRequest, tmp_path: Path, start: MakeDaemon) -> MakeDaemon:
    """Return a function that starts links, at the same address if it is given one."""
    numbers = itertools.count()
    rings: dict[str, KeyRing] = {}
    if request.param == "keys":
        addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(4)]
        rings = {one.key.address: one.ring() for one in key_folders(tmp_path / "keys", *addresses)}
    unused = iter(rings)

    def make_one(address: str | None = None) -> Daemon:
        if rings:
            listen = address or next(unused)
            return start(tmp_path / f"{next(numbers)}.sock", listen, keys=rings[listen])
        if request.param != "ipc":
            return start(tmp_path / f"{next(numbers)}.sock", address or LOOPBACK[request.param])
        return start(Path(address.removeprefix("ipc://")) if address else tmp_path / f"{next(numbers)}.sock")

    return make_one


@pytest.fixture
async def daemon(tmp_path: Path, start: MakeDaemon) -> Daemon:
    """Return links that listen on TCP as well and bear with a peer that does not read."""
    return start(tmp_path / "peer.sock", LOOPBACK["tcp"], PATIENT)


async def test_both_learn_who_the_other_is_and_can_speak(make: MakeDaemon) -> None:
    one, other = make(), make()
    assert one.links.connect(other.address) is None
    await one.meets(other)
    assert (one.up, other.up) == ([other.incarnation], [one.incarnation])
    assert one.links.connect(other.address) == other.incarnation
    for number in range(3):
        assert one.links.send(other.incarnation, OpEnded(op=number))
        assert other.links.send(one.incarnation, OpEnded(op=10 + number))
    await other.until(lambda: len(other.said) == 3)
    await one.until(lambda: len(one.said) == 3)
    assert other.said == [(one.incarnation, OpEnded(op=number)) for number in range(3)]
    assert one.said == [(other.incarnation, OpEnded(op=10 + number)) for number in range(3)]
    await one.until(lambda: one.links.status()[0].round_trip_us)  # of a heartbeat that was answered
    await one.until(lambda: states(one) == [(other.address, "up")])


async def test_a_restart_is_noticed_and_nothing_old_is_delivered(make: MakeDaemon) -> None:
    one, other = make(), make()
    await one.meets(other)
    old = other.incarnation
    other.links.close()
    await one.until(lambda: one.lost)
    assert one.lost == [old]
    assert not one.links.send(old, OpEnded(op=1)), "nobody is there"
    again = make(old.address)
    await one.until(lambda: len(one.up) == 2)
    assert one.up[1] == again.incarnation != old
    assert not one.links.send(old, OpEnded(op=2)), "not the same incarnation"
    assert one.links.send(again.incarnation, OpEnded(op=3))
    await again.until(lambda: again.said)
    assert [body for _, body in again.said] == [OpEnded(op=3)]


async def test_an_error_of_who_is_told_of_a_loss_ends_no_link(
    make: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(peer: Incarnation, why: str) -> None:
        monkeypatch.undo()
        raise ArithmeticError(f"{why}: {peer}")

    one, other = make(), make()
    await one.meets(other)
    monkeypatch.setattr(one, "on_lost", fails)
    with structlog.testing.capture_logs() as said:
        other.links.close()
        await one.counts("peers.failed", 1)
        again = make(other.address)
        await one.until(lambda: len(one.up) == 2)
    assert one.up[1] == again.incarnation
    assert "a link failed" in {each["event"] for each in said}


@WITHOUT_KEYS
async def test_an_unauthenticated_peer_can_neither_part_two_daemons_nor_speak_for_one(
    make: MakeDaemon, scripted: ScriptedPeer
) -> None:
    """He knows both addresses and boot ids, says each kind of message, and repeats what was said at another time."""
    one, other = make(), make()
    await one.meets(other)
    before = [said_by(one, other, OpEnded(op=7))]
    await scripted.tell(other, *before, address=one.address)
    await other.until(lambda: other.said)
    assert other.said == [(one.incarnation, OpEnded(op=7))], "on the path he could"
    other.said.clear()
    await break_once(other, one)
    stolen = {"key": one.links.boot_id, "to_key": other.links.boot_id}
    hello = PeerHello(boot_id=one.links.boot_id, protocol_min=4, protocol_max=4, dialled=other.address)
    restarted = msgspec.structs.replace(hello, boot_id=scripted.boot_id)
    samples = [one for one, _ in PEER_MESSAGES.values() if isinstance(one, PeerEnvelope)]
    bodies = [hello, restarted, *(one.body for one in samples if not one.body.page_counts())]
    up, lost = list(other.up), list(other.lost)
    unproven = other.counters.snapshot()["peers.unproven"]
    for body in bodies:
        for head in ({}, stolen, {"key": scripted.key, "to_key": ""}):
            await scripted.say(other, body, address=one.address, **head)
    junk: list[list[bytes]] = [[b"\xc1 no message at all"], [b""] * 40, [b"x" * 600, b"\x80"]]
    await scripted.tell(other, *before, *junk, address=one.address)
    await other.counts("peers.malformed", 3)
    await other.until(lambda: other.counters.snapshot()["peers.unproven"] > unproven + 3 * len(bodies))
    assert other.links.send(one.incarnation, OpEnded(op=8))
    assert one.links.send(other.incarnation, OpEnded(op=9))
    await one.until(lambda: one.said)
    await other.until(lambda: other.said)
    assert other.said == [(one.incarnation, OpEnded(op=9))]
    assert (other.up, other.lost) == (up, lost)
    assert states(one) == [(other.address, "up")]
    assert (one.address, "up") in states(other)


def said_by(one: Daemon, other: Daemon, body: PeerBody) -> Sequence[bytes | memoryview]:
    key, to_key = (next(key for key, link in each.links.by_key.items() if link.peer) for each in (one, other))
    return encode_peer(PeerEnvelope(one.address, key, to_key, body))


async def break_once(one: Daemon, other: Daemon) -> None:
    """Let both daemons lose each other, and meet again."""
    up = len(one.up), len(other.up)
    for link in list(one.links.by_key.values()):
        one.links.overflowed(link)  # what it does with a peer that reads too slowly: the connection is made anew
    await one.until(lambda: len(one.up) > up[0])
    await other.until(lambda: len(other.up) > up[1])


async def test_what_a_peer_said_before_it_greeted_anew_is_void(daemon: Daemon, scripted: ScriptedPeer) -> None:
    await scripted.meet(daemon)
    old = scripted.key
    await scripted.greet(daemon, anew=True)
    await scripted.say(daemon, OpEnded(op=1), key=old)  # by a connection of before, say, which comes late
    await scripted.say(daemon, OpEnded(op=2))
    await daemon.until(lambda: daemon.said)
    assert daemon.said == [(scripted.incarnation, OpEnded(op=2))]
    assert daemon.counters.snapshot()["peers.stale"] == 1
    assert (len(daemon.up), len(daemon.lost)) == (2, 1)


async def test_a_peer_whose_daemon_does_not_answer_is_silent_and_then_lost(
    tmp_path: Path, start: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its libzmq answers ZMTP's own heartbeats all the time."""
    monkeypatch.setattr(one_link, "SILENCE_S", 0.3)
    daemon = start(tmp_path / "peer.sock", None, Heartbeat(20, 100))
    with contextlib.closing(ScriptedPeer(f"ipc://{tmp_path}/mute", takes_messages=0)) as mute:
        await mute.meet(daemon)
        seen = set()
        while not daemon.lost:
            seen.add(daemon.links.status()[0].state)
            await mute.hears()
        assert daemon.lost == [mute.incarnation]
        assert "silent" in seen
        assert daemon.links.status()[0].state == "lost"
        assert "did not answer for" in daemon.links.status()[0].why
        await mute.hears_until(PeerHello)
        await mute.greet(daemon)
        await daemon.until(lambda: len(daemon.up) == 2)


async def test_two_that_have_no_protocol_in_common_refuse_each_other(daemon: Daemon, scripted: ScriptedPeer) -> None:
    daemon.links.connect(scripted.address)
    await scripted.hears()
    assert states(daemon) == [(scripted.address, "greeting")]
    await scripted.greet(daemon, protocol_min=90, protocol_max=99)
    await daemon.counts("peers.received", 1)
    (status,) = daemon.links.status()
    assert status.state == "refused"
    assert "90..99" in status.why
    assert daemon.up == []
    await scripted.greet(daemon)
    await daemon.until(lambda: daemon.up)
    assert states(daemon) == [(scripted.address, "up")]


async def test_the_smaller_of_both_sides_counts(daemon: Daemon, scripted: ScriptedPeer) -> None:
    small = {"max_frame_bytes": 4096, "max_message_bytes": 6000, "bounce_buffer_bytes": 1 << 40}
    await scripted.meet(daemon, **small)
    assert daemon.links.terms_with(scripted.incarnation) == (4096, 6000, 0)
    lists = PageList(pages=400), PageList(pages=400)
    name = LARGE.receive_request
    chunk = PeerSend(receive_request=name, send_request=1, chunk=0, pool="p", last=True, lists=lists)
    for body, ids in ((LARGE, ()), (chunk, (np.arange(400), np.arange(400)))):  # a frame, or all of them together
        with pytest.raises(TooLargeError) as refused:
            daemon.links.send(scripted.incarnation, body, ids)
        assert refused.value.field == "limits.max_frame_bytes"
    assert daemon.links.send(scripted.incarnation, OpEnded(op=2))
    assert (await scripted.hears_until(OpEnded)).body == OpEnded(op=2)
    assert daemon.lost == []


async def test_unauthenticated_peers_can_have_few_addresses_called(
    tmp_path: Path, start: MakeDaemon, scripted: ScriptedPeer
) -> None:
    daemon, other = start(tmp_path / "peer.sock", LOOPBACK["tcp"]), start(tmp_path / "other.sock", LOOPBACK["tcp"])
    for port in range(1, 1 + 4 * peers.GUESTS_PER_HOST):
        await scripted.say(daemon, OpEnded(op=1), address=f"tcp://127.0.0.1:{port}")

    def all_are_counted() -> bool:
        counts, called = daemon.counters.snapshot(), len(states(daemon))
        assert called <= peers.GUESTS_PER_HOST
        called += counts.get("peers.dropped", 0)  # one that was slow to be called gives way to the next
        return counts.get("peers.guests_refused", 0) + called == 4 * peers.GUESTS_PER_HOST

    await daemon.until(all_are_counted)
    assert daemon.counters.snapshot()["peers.guests_refused"] > 0
    await daemon.meets(other)
    await daemon.until(lambda: states(daemon) == [(other.address, "up")])


@WITHOUT_KEYS
async def test_who_proves_nothing_for_long_is_cut_off(
    make: MakeDaemon, scripted: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "MAX_UNPROVEN", 20)
    one, other = make(), make()
    await one.meets(other)
    for _ in range(3):
        await scripted.say(other, OpEnded(op=1), address=one.address, times=20)
        await scripted.say(other, LARGE, address=one.address)
    await other.until(lambda: other.counters.snapshot().get("peers.closed"))
    assert one.links.send(other.incarnation, OpEnded(op=2))
    await other.until(lambda: other.said)
    assert (one.lost, other.lost) == ([], [])


async def test_what_comes_over_tcp_names_no_unix_socket(daemon: Daemon, scripted: ScriptedPeer) -> None:
    """The daemon would connect to whatever socket of this host an unauthenticated peer on another one names."""
    frames = encode_peer(PeerEnvelope(scripted.address, scripted.key, "", OpEnded(op=1)))
    await scripted.tell(daemon, frames, address="tcp://")
    own = encode_peer(PeerEnvelope(daemon.address, scripted.key, "", OpEnded(op=1)))
    await scripted.tell(daemon, own, address="tcp://")
    await daemon.counts("peers.malformed", 2)
    assert states(daemon) == []


async def test_who_cannot_be_called_or_could_not_call_back_is_refused(tmp_path: Path, start: MakeDaemon) -> None:
    links = start(tmp_path / "one.sock").links
    for refuse, address, why in (
        (links.check_reachable, "tcp://127.0.0.1:7801", r"set peers\.listen"),
        (links.check_reachable, "ipc:///" + "x" * 150, "151 bytes"),
        (links.connect, "ipc:///a\0b", "unprintable"),
        (links.connect, "ipc://@anybody", "the whole path"),
        (links.connect, "ipc:///tmp/anybody/peer.sock", "others than root and the daemon's user"),
    ):
        with pytest.raises(InvalidFieldError, match=why) as refused:
            refuse(address, "source_daemons[0]")
        assert refused.value.field == "source_daemons[0]"
    assert links.status() == ()
    links.check_reachable(f"ipc://{tmp_path}/other.sock", "source_daemons[0]")


async def test_who_speaks_where_it_is_only_to_listen_is_hung_up_on(daemon: Daemon, scripted: ScriptedPeer) -> None:
    await scripted.meet(daemon)
    await scripted.speak_on_the_connection()
    await daemon.counts("peers.spoke", 1)
    assert daemon.lost == [scripted.incarnation]
    assert states(daemon) == []


async def test_who_speaks_where_it_is_only_to_listen_and_leaves_ends_no_process(
    tmp_path: Path, start: MakeDaemon, scripted: ScriptedPeer
) -> None:
    """Heartbeats of libzmq are due before and after; with another peer they go on."""
    daemon = start(tmp_path / "peer.sock", None, Heartbeat(20, 10_000))
    with contextlib.closing(ScriptedPeer(f"ipc://{tmp_path}/another")) as another:
        await another.meet(daemon)
        daemon.links.connect(scripted.address)
        await scripted.hears()
        await scripted.speak_on_the_connection()
        scripted.leave()
        for _ in range(60):
            await another.hears_until(PeerHeartbeat)


async def test_a_greeting_from_where_nobody_listens_is_no_peer(daemon: Daemon, scripted: ScriptedPeer) -> None:
    nowhere = "tcp://127.0.0.1:1"
    for _ in range(2000):
        hello = PeerHello(boot_id=scripted.boot_id, protocol_min=1, protocol_max=9, dialled=daemon.address)
        await scripted.say(daemon, hello, address=nowhere)
    await scripted.say(daemon, OpEnded(op=1), address=nowhere)
    await daemon.counts("peers.unproven", 2001)
    peer = Incarnation(nowhere, scripted.boot_id)
    assert states(daemon) == [(nowhere, "connecting")]
    assert daemon.links.connect(nowhere) is None
    assert not daemon.links.send(peer, OpEnded(op=1))
    assert "waiting=0" in repr(daemon.links)
    assert not daemon.up
    assert not daemon.said


async def test_a_peer_that_missed_our_greeting_hears_it_again(tmp_path: Path, start: MakeDaemon) -> None:
    daemon = start(tmp_path / "peer.sock", None, Heartbeat(10, 30_000))
    with contextlib.closing(ScriptedPeer(f"ipc://{tmp_path}/deaf")) as scripted:
        daemon.links.connect(scripted.address)
        for _ in range(3):
            assert isinstance((await scripted.hears()).body, PeerHello)


async def _fill(daemon: Daemon, scripted: ScriptedPeer) -> None:
    """Tell a peer more than can be on its way, so that the rest waits, here or in libzmq, until it reads."""
    await scripted.meet(daemon)
    for _ in range(20):
        assert daemon.links.send(scripted.incarnation, LARGE)


async def test_one_answer_to_a_greeting_waits_however_often_a_peer_greets(
    daemon: Daemon, scripted: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_link, "QUEUED_MESSAGES", 1)
    await _fill(daemon, scripted)
    assert "waiting=0" not in repr(daemon.links)
    await scripted.greet(daemon, times=50, anew=True)
    await daemon.until(lambda: len(daemon.up) == 51)
    assert any(f"waiting={most}>" in repr(daemon.links) for most in (0, 1, 2)), daemon.links  # and a heartbeat


@pytest.mark.parametrize("bound", ["WAITING_MESSAGES", "WAITING_BYTES"])
async def test_a_peer_that_takes_too_slowly_what_it_is_told_is_lost(
    daemon: Daemon, scripted: ScriptedPeer, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(one_link, "QUEUED_MESSAGES", 1)
    await _fill(daemon, scripted)
    monkeypatch.setattr(one_link, bound, 5 if bound == "WAITING_MESSAGES" else 1 << 20)
    said = [daemon.links.send(scripted.incarnation, LARGE) for _ in range(50)]
    assert said.count(True) < 50, "what waits is not bounded"
    assert daemon.lost == [], "reported from within"
    await daemon.until(lambda: daemon.lost)
    assert daemon.lost == [scripted.incarnation]
    assert daemon.counters.snapshot()["peers.overflowed"] == 1
    assert daemon.links.connect(scripted.address) is None
    old = scripted.told_key
    while scripted.told_key == old:
        await scripted.hears()
    await scripted.greet(daemon)
    await daemon.until(lambda: len(daemon.up) == 2)


async def test_the_last_words_are_heard(daemon: Daemon, tmp_path: Path) -> None:
    with contextlib.closing(ScriptedPeer(f"ipc://{tmp_path}/listener", takes_messages=0)) as listener:
        await listener.meet(daemon)
        for number in range(500):
            assert daemon.links.send(listener.incarnation, OpEnded(op=number))
        daemon.links.close()
        for number in range(500):
            assert (await listener.hears_until(OpEnded)).body == OpEnded(op=number)


async def test_what_a_peer_said_before_it_ended_is_heard_before_its_end(make: MakeDaemon) -> None:
    one, other = make(), make()
    await one.meets(other)
    assert one.links.send(other.incarnation, OpEnded(op=1))
    one.links.close()
    await other.until(lambda: other.lost)
    assert other.in_order == ["said", "lost"]


async def test_the_end_waits_for_nobody_who_does_not_listen(daemon: Daemon, scripted: ScriptedPeer) -> None:
    await _fill(daemon, scripted)
    began = time.monotonic()
    daemon.links.close()
    assert time.monotonic() - began < 20 * peers.LINGER_MS / 1000


EVIL, TENANT = 4001, 4002
OWN_FILES = 64
"""More than the links need for themselves, whoever the peers are."""


async def test_as_many_peers_as_are_planned(tmp_path: Path, require: Callable[[object, str], None]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = peers.MAX_PEERS
    require(hard >= 2 * PER_LINK * most or hard == resource.RLIM_INFINITY, "enough open files")
    process = psutil.Process()
    before = process.num_fds()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with contextlib.closing(Daemon(tmp_path / "peer.sock", None, PATIENT).links) as links:
            for number in range(most):
                links.connect(f"ipc://{tmp_path}/{number}")
            with pytest.raises(InvalidFieldError, match=f"{most} other daemons") as refused:
                links.connect(f"ipc://{tmp_path}/one-more", "source_daemons[3]")
            assert refused.value.field == "source_daemons[3]"
            assert process.num_fds() - before <= PER_LINK * most + OWN_FILES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("bound", "value"),
    [("MAX_PEERS", 4), ("Descriptors", lambda: Descriptors(4 * 8 * PER_LINK))],
    ids=["most", "files"],
)
async def test_the_longest_unused_link_makes_room(
    tmp_path: Path, start: MakeDaemon, monkeypatch: pytest.MonkeyPatch, bound: str, value: object
) -> None:
    clock = SimpleNamespace(now=time.monotonic())
    for module in (peers, one_link):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(peers, bound, value)
    daemon, other = start(tmp_path / "peer.sock"), start(tmp_path / "other.sock")
    needed, first, second, used, late, last = (f"ipc://{tmp_path}/{number}" for number in range(6))
    daemon.needed = needed
    await daemon.meets(other)
    for address in (needed, first, second):
        daemon.links.connect(address)
    with pytest.raises(InvalidFieldError, match="4 other daemons"):
        daemon.links.connect(used)
    clock.now += 3  # more than the timeout: they have had their chance
    daemon.links.connect(second)
    daemon.links.connect(used)
    assert [address for address, _ in states(daemon)] == [other.address, needed, second, used]
    clock.now += 3
    daemon.links.connect(used)
    daemon.links.connect(late)
    assert [address for address, _ in states(daemon)] == [other.address, needed, used, late]
    with pytest.raises(InvalidFieldError, match="4 other daemons"):
        daemon.links.connect(last)


async def test_what_one_tenant_names_leaves_room_for_the_next_and_for_who_calls(
    tmp_path: Path, start: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "Descriptors", lambda: Descriptors(32 * 8 * PER_LINK))
    daemon, other, third = (start(tmp_path / f"{name}.sock") for name in ("peer", "other", "third"))

    def name_all(tenant: int) -> int:
        """Name addresses until no more are taken; return how many were."""
        for number in range(peers.MAX_PEERS):
            try:
                daemon.links.connect(f"ipc://{tmp_path}/{tenant}-{number}", tenant=tenant)
            except InvalidFieldError:
                return number
        raise AssertionError

    daemon.links.connect(other.address, tenant=EVIL)
    await daemon.until(lambda: daemon.up)
    assert daemon.links.known_to(TENANT) == {other.address}, "it has proved itself"
    assert name_all(EVIL) == 26
    assert name_all(TENANT) == 1
    await third.meets(daemon)
    assert len(daemon.links.known_to(EVIL)) == 26 + 2
    assert daemon.links.known_to(TENANT) == {other.address, third.address, f"ipc://{tmp_path}/{TENANT}-0"}
    assert daemon.links.known_to(None) == {other.address, third.address}


async def test_a_tenant_at_its_bound_gives_up_what_only_it_has_named_and_nobody_needs(
    tmp_path: Path, start: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=time.monotonic())
    for module in (peers, one_link):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(peers, "Descriptors", lambda: Descriptors(4 * 8 * PER_LINK))
    daemon = start(tmp_path / "peer.sock")
    first, second, third, last = (f"ipc://{tmp_path}/{number}" for number in range(4))
    daemon.links.connect(first, tenant=EVIL)
    daemon.links.connect(second, tenant=EVIL)
    with pytest.raises(InvalidFieldError, match="your bound") as refused:
        daemon.links.connect(third, "source_daemons[3]", EVIL)
    assert refused.value.field == "source_daemons[3]"
    clock.now += 3  # more than the timeout: they have had their chance
    daemon.links.connect(second, tenant=TENANT)
    daemon.links.connect(third, tenant=EVIL)
    assert [address for address, _ in states(daemon)] == [second, third]
    daemon.needed = third
    clock.now += 3
    with pytest.raises(InvalidFieldError, match="your bound"):
        daemon.links.connect(last, tenant=EVIL)
    assert [address for address, _ in states(daemon)] == [second, third], "one that another has named, one it needs"


async def test_links_that_nobody_needs_are_dropped(
    tmp_path: Path, start: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "TIDY_S", 0.01)
    monkeypatch.setattr(peers, "QUIET_S", 0.0)
    daemon, other = start(tmp_path / "peer.sock"), start(tmp_path / "other.sock")
    needed = f"ipc://{tmp_path}/needed"
    daemon.needed = needed
    for address in (needed, other.address, *(f"ipc://{tmp_path}/{number}" for number in range(3))):
        daemon.links.connect(address)
    await daemon.counts("peers.dropped", 3)
    assert [address for address, _ in states(daemon)] == [needed, other.address]
    other.links.close()
    await daemon.counts("peers.dropped", 4)
    assert states(daemon) == [(needed, "connecting")]
    assert daemon.lost == [other.incarnation]


async def test_what_libzmq_refuses_leaves_nothing_behind(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "wrong_address", lambda _address: "")
    with pytest.raises(InvalidFieldError) as refused:
        daemon.links.connect("ipc:///" + "x" * 150, "source_daemons[0]")
    assert refused.value.field == "source_daemons[0]"
    assert daemon.links.status() == ()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.to_thread(daemon.links.context.term)  # waits for every socket


@pytest.mark.parametrize("timeout_ms", [50, 3000, 200_000, 600_000])
def test_an_idle_link_is_heard_from_before_its_time_is_up(timeout_ms: int) -> None:
    peers = PeersConfig(timeout_ms=timeout_ms)
    assert 3 * peers.heartbeat_ms <= timeout_ms
    assert Heartbeat(peers.heartbeat_ms, timeout_ms).time_to_live_ms > 2 * peers.heartbeat_ms


async def test_who_never_shakes_hands_or_is_silent_for_longer_than_it_said_is_closed(
    tmp_path: Path, start: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "HANDSHAKE_S", 0.05)
    daemon = start(tmp_path / "peer.sock")
    hands = frame(4, b"\5READY\x0bSocket-Type\0\0\0\6DEALER")
    async with asyncio.timeout(PATIENCE_S):
        idle, to_idle = await asyncio.open_unix_connection(tmp_path / "peer.sock")
        to_idle.write(GREETING + hands)
        silent, to_silent = await asyncio.open_unix_connection(tmp_path / "peer.sock")
        to_silent.write(GREETING)
        assert (await silent.read()).startswith(GREETING), "to its end"
        assert daemon.counters.snapshot()["connections.closed.silent"] == 1
        to_idle.write(frame(4, b"\4PING\0\0there"))
        assert (await idle.readuntil(b"there")).endswith(b"\4PONGthere")
        to_idle.write(frame(4, b"\4PING\0\1again"))  # and then no more for 100 ms
        assert (await idle.read()).endswith(b"\4PONGagain"), "to its end"
        assert daemon.counters.snapshot()["connections.closed.silent"] == 2
        for one in (to_idle, to_silent):
            one.close()
            with contextlib.suppress(ConnectionError):
                await one.wait_closed()

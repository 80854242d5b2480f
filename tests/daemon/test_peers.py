"""Connections between daemons, on real sockets: who is there, who has gone, and what is never delivered late."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import zmq

from kvferry.daemon.metrics import Counters
from kvferry.daemon.peers import Heartbeat, PeerLinks, is_numeric
from kvferry.daemon.rooms.remote import Incarnation
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import ConfigError, InvalidFieldError
from kvferry.protocol.ids import new_boot_id
from kvferry.protocol.limits import Limits
from kvferry.protocol.peer_codec import encode_peer
from kvferry.protocol.peer_messages import PeerBody, PeerEnvelope, PieceOver

pytestmark = pytest.mark.anyio
PATIENCE_S = 20.0
HEARTBEAT = Heartbeat(50, 400)


class _Counters(Counters):
    """Counters that say when they change."""

    def __init__(self, changed: asyncio.Event) -> None:
        super().__init__()
        self._changed = changed

    def add(self, name: str, count: int = 1) -> None:
        super().add(name, count)
        self._changed.set()


class Daemon:
    """Links, and what they reported."""

    def __init__(self, path: Path, listen: str | None = None) -> None:
        self.changed = asyncio.Event()
        self.counters = _Counters(self.changed)
        self.links = PeerLinks(new_boot_id(), path, listen, HEARTBEAT, Limits(), self.counters)
        self.up: list[Incarnation] = []
        self.lost: list[Incarnation] = []
        self.said: list[tuple[Incarnation, PeerBody]] = []
        self.links.on_up = self._noted(self.up.append)
        self.links.on_lost = lambda peer, _why: self._noted(self.lost.append)(peer)
        self.links.on_message = self._heard
        self.links.start(asyncio.get_running_loop())

    @property
    def address(self) -> str:
        """Return where it listens: on TCP, if it does."""
        return self.links.addresses.get("tcp", self.links.addresses["ipc"])

    @property
    def incarnation(self) -> Incarnation:
        """Return what others should take it for."""
        return Incarnation(self.address, self.links.boot_id)

    async def until(self, what: Callable[[], object]) -> None:
        """Wait until something holds; it is looked at after each report."""
        async with asyncio.timeout(PATIENCE_S):
            while not what():
                self.changed.clear()
                await self.changed.wait()

    def _noted(self, note: Callable[[Incarnation], None]) -> Callable[[Incarnation], None]:
        def noted(peer: Incarnation) -> None:
            note(peer)
            self.changed.set()

        return noted

    def _heard(self, peer: Incarnation, body: PeerBody, _ids: tuple[PageIds, ...]) -> None:
        self.said.append((peer, body))
        self.changed.set()


MakeDaemon = Callable[..., Daemon]


@pytest.fixture(params=["ipc", "tcp"])
async def make(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    anyio_backend: object,  # noqa: ARG001  this fixture runs on the test's loop
) -> AsyncIterator[MakeDaemon]:
    """Return a function that starts links, at the same address if it is given one."""
    made: list[Daemon] = []
    numbers = itertools.count()

    def start(address: str | None = None) -> Daemon:
        tcp = request.param == "tcp"
        path = tmp_path / f"{next(numbers)}.sock" if tcp or address is None else Path(address.removeprefix("ipc://"))
        daemon = Daemon(path, (address or "tcp://127.0.0.1:0") if tcp else None)
        made.append(daemon)
        return daemon

    yield start
    for one in made:
        one.links.close()


async def test_both_learn_who_the_other_is_and_can_speak(make: MakeDaemon) -> None:
    one, other = make(), make()
    assert one.links.connect(other.address) is None
    await one.until(lambda: one.up)
    await other.until(lambda: other.up)
    assert (one.up, other.up) == ([other.incarnation], [one.incarnation])
    assert one.links.connect(other.address) == other.incarnation
    for number in range(3):
        assert one.links.send(other.incarnation, PieceOver(piece=number))
        assert other.links.send(one.incarnation, PieceOver(piece=10 + number))
    await other.until(lambda: len(other.said) == 3)
    await one.until(lambda: len(one.said) == 3)
    assert other.said == [(one.incarnation, PieceOver(piece=number)) for number in range(3)]
    assert one.said == [(other.incarnation, PieceOver(piece=10 + number)) for number in range(3)]
    assert one.links.status() == ((other.address, "up"),)


async def test_a_peer_that_starts_later_is_found(make: MakeDaemon) -> None:
    first = make()
    address = first.address
    first.links.close()
    one = make()
    one.links.connect(address)
    later = make(address)
    await one.until(lambda: one.up)
    assert one.up == [later.incarnation]


async def test_a_restart_is_noticed_and_nothing_old_is_delivered(make: MakeDaemon) -> None:
    one, other = make(), make()
    one.links.connect(other.address)
    await one.until(lambda: one.up)
    old = other.incarnation
    other.links.close()
    await one.until(lambda: one.lost)
    assert one.lost == [old]
    assert not one.links.send(old, PieceOver(piece=1)), "nobody is there"
    again = make(old.address)
    await one.until(lambda: len(one.up) == 2)
    assert one.up[1] == again.incarnation != old
    assert not one.links.send(old, PieceOver(piece=2)), "not the same incarnation"
    assert one.links.send(again.incarnation, PieceOver(piece=3))
    await again.until(lambda: again.said)
    assert [body for _, body in again.said] == [PieceOver(piece=3)]


async def test_what_is_meant_for_another_incarnation_is_dropped(make: MakeDaemon) -> None:
    one, other = make(), make()
    one.links.connect(other.address)
    await other.until(lambda: other.up)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(other.address)
    for sender, to in ((one.links.boot_id, new_boot_id()), (new_boot_id(), other.links.boot_id)):
        stranger.send_multipart(encode_peer(PeerEnvelope(one.address, sender, to, PieceOver(piece=1))))
    stranger.send(b"\xc1 no message at all")
    stranger.send_multipart([b""] * 40)
    await one.until(lambda: one.links.send(other.incarnation, PieceOver(piece=2)))
    await other.until(lambda: other.said)
    await other.until(lambda: other.counters.snapshot().get("peers.malformed", 0) == 2)
    await other.until(lambda: other.counters.snapshot().get("peers.stale", 0) == 2)
    assert other.said == [(one.incarnation, PieceOver(piece=2))]
    stranger.close(0)
    context.term()


async def test_a_peer_that_alone_has_noticed_a_break_begins_anew(make: MakeDaemon) -> None:
    one, other = make(), make()
    one.links.connect(other.address)
    await other.until(lambda: other.up)
    await one.until(lambda: one.up)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    new_connection = context.socket(zmq.DEALER)
    new_connection.connect(other.address)
    new_connection.send_multipart(one.links.hello(other.address, answers=True))
    marker = PeerEnvelope(one.address, one.links.boot_id, other.links.boot_id, PieceOver(piece=1))
    new_connection.send_multipart(encode_peer(marker))
    await other.until(lambda: other.said)
    assert other.lost == [], "an answer says nothing of a break"
    new_connection.send_multipart(one.links.hello(other.address, answers=False))
    await other.until(lambda: other.lost)
    assert other.lost == [one.incarnation]
    assert other.up == [one.incarnation, one.incarnation]
    assert one.lost == []
    new_connection.close(0)
    context.term()


@pytest.mark.parametrize("address", ["tcp://node-1:7801", "tcp://0.0.0.0:7801", "tcp://*:7801"])
async def test_an_address_that_is_no_name_for_a_daemon_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Daemon(tmp_path / "peer.sock", address)
    assert refused.value.field == "peers.listen"


async def test_an_address_in_use_is_refused(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "one.sock", "tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match="in use"):
        Daemon(tmp_path / "two.sock", daemon.address)
    daemon.links.close()


async def test_peers_must_be_reachable_in_both_directions(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "one.sock")
    with pytest.raises(InvalidFieldError, match=r"set peers\.listen") as refused:
        daemon.links.check_reachable("tcp://127.0.0.1:7801", "source_daemons[0]")
    assert refused.value.field == "source_daemons[0]"
    daemon.links.check_reachable(f"ipc://{tmp_path}/other.sock", "source_daemons[0]")
    daemon.links.close()


def test_numeric_addresses() -> None:
    assert is_numeric("tcp://[fd00::1]:7801")
    assert not is_numeric("tcp://[::]:7801")

"""Connections to other daemons: one ROUTER that listens, one DEALER to each peer. Knows nothing of hand-offs.

Each side speaks on its own connection and hears on the other's, so each notices the other's end by itself: libzmq
closes a connection at once when the peer's process ends, and after ``timeout_ms`` without a sign of life (ZMTP
heartbeats). What was queued for a connection that has broken is dropped, never delivered late: whoever is told of the
break begins anew. There is no authentication: see docs/operations.md for what to fence.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvferry.daemon.control_socket import ControlSocket, ReceivedMessage
from kvferry.daemon.metrics import Counters
from kvferry.daemon.rooms.remote import Incarnation
from kvferry.protocol.codec import Frames, PageIds
from kvferry.protocol.errors import ConfigError, InvalidFieldError, KvferryError
from kvferry.protocol.ids import NO_BOOT, BootId
from kvferry.protocol.limits import Limits
from kvferry.protocol.peer_codec import IncomingPeerMessage, decode_peer, encode_peer
from kvferry.protocol.peer_messages import PeerBody, PeerEnvelope, PeerHello
from kvferry.protocol.versions import PROTOCOL_MAX, PROTOCOL_MIN, agree

RECONNECT_MS = 100
RECONNECT_MAX_MS = 2000
RETRY_S = 0.01
MAX_PEERS = 1024
log = structlog.get_logger(__name__)

OnPeerMessage = Callable[[Incarnation, PeerBody, tuple[PageIds, ...]], None]


class Heartbeat(NamedTuple):
    """How often a sign of life is asked for, and after how long without one a connection counts as broken."""

    interval_ms: int
    timeout_ms: int


class PeerLinks:
    """Serves between ``start`` and ``close``. Callbacks come on the loop, never from within ``send``.

    Attributes:
        on_message: takes what a peer says.
        on_up: takes the incarnation of a peer that can be spoken to from now on.
        on_lost: takes an incarnation that is gone, or cut off, and why.
    """

    def __init__(
        self,
        boot_id: BootId,
        socket_path: Path,
        listen: str | None,
        heartbeat: Heartbeat,
        limits: Limits,
        counters: Counters,
    ) -> None:
        """Listen on a Unix socket for daemons of this host and, where ``listen`` says so, on TCP.

        Raises:
            ConfigError: the TCP address cannot be listened on, or others could not call it.
        """
        if listen and not is_numeric(listen):
            raise ConfigError(f"{listen}: give an address of this host in numbers", field="peers.listen")
        self.boot_id = boot_id
        self.heartbeat = heartbeat
        self.counters = counters
        self.loop: asyncio.AbstractEventLoop | None = None
        self.on_message: OnPeerMessage = lambda _peer, _body, _ids: None
        self.on_up: Callable[[Incarnation], None] = lambda _peer: None
        self.on_lost: Callable[[Incarnation, str], None] = lambda _peer, _why: None
        self._router = ControlSocket(socket_path, limits, counters, self._received, also=listen)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.addresses = {"ipc": f"ipc://{socket_path}"}
        if listen:
            self.addresses["tcp"] = self._router.endpoint
        self._links: dict[str, _Link] = {}

    def __repr__(self) -> str:
        """Show the peers."""
        return f"<PeerLinks {list(self._links.values())}>"

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve on this loop."""
        self.loop = loop
        self._router.start(loop)

    def close(self) -> None:
        """Break every connection and stop listening. Closing twice does nothing."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._router.close()
        self.context.term()
        self.loop = None

    def check_reachable(self, address: str, field: str) -> None:
        """Check that this daemon can speak to an address, and be answered.

        Raises:
            InvalidFieldError: it listens on nothing that such a peer could reach, or knows too many peers.
        """
        if _scheme(address) not in self.addresses:
            raise InvalidFieldError(
                f"{address}: this daemon listens on no TCP address; set peers.listen in its configuration", field=field
            )
        if _scheme(address) == "tcp" and not is_numeric(address):
            raise InvalidFieldError(
                f"{address}: name a daemon by the address that its own peers.listen gives, in numbers", field=field
            )
        if address not in self._links and len(self._links) >= MAX_PEERS:
            raise InvalidFieldError(f"{address}: {MAX_PEERS} other daemons are known already", field=field)

    def is_own(self, address: str) -> bool:
        """Return whether an address is this daemon's."""
        return address in self.addresses.values()

    def connect(self, address: str) -> Incarnation | None:
        """Make sure that there is a connection; return who is there, once it is known."""
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = _Link(self, address)
        return link.peer

    def send(self, peer: Incarnation, body: PeerBody, ids: Sequence[PageIds] = ()) -> bool:
        """Say something to an incarnation; return False where it is gone: nothing was said then."""
        link = self._links.get(peer.address)
        if link is None or link.peer != peer:
            self.counters.add("peers.unsent")
            return False
        link.put(encode_peer(PeerEnvelope(self.own_address(peer.address), self.boot_id, peer.boot_id, body), ids))
        return True

    def own_address(self, address: str) -> str:
        """Return the address at which that peer reaches this daemon."""
        return self.addresses[_scheme(address)]

    def status(self) -> tuple[tuple[str, str], ...]:
        """Return each peer's address and state: ``up``, or ``down``."""
        return tuple((address, "up" if link.peer else "down") for address, link in self._links.items())

    def hello(self, address: str, *, answers: bool) -> Frames:
        """Return the frames of our PEER_HELLO."""
        body = PeerHello(protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, answers=answers, dialled=address)
        return encode_peer(PeerEnvelope(self.own_address(address), self.boot_id, NO_BOOT, body))

    def _received(self, message: ReceivedMessage) -> None:
        self.counters.add("peers.received")
        try:
            self._take(decode_peer([] if message.too_large else message.frames))
        except KvferryError as error:
            self.counters.add("peers.malformed")
            log.warning("a peer's message was dropped", cause=str(error))
        except Exception as error:  # a bug must not end the loop
            self.counters.add("peers.failed")
            log.exception("a peer's message failed", cause=str(error))

    def _take(self, incoming: IncomingPeerMessage) -> None:
        envelope = incoming.envelope
        if envelope.to_boot_id not in {self.boot_id, NO_BOOT}:
            self.counters.add("peers.stale")
            return
        if isinstance(envelope.body, PeerHello):
            self._greeted(envelope, envelope.body)
            return
        link = self._links.get(envelope.address)
        if link is None or link.peer is None or link.peer.boot_id != envelope.boot_id:
            self.counters.add("peers.stale")
            return
        self.on_message(link.peer, envelope.body, incoming.ids)

    def _greeted(self, envelope: PeerEnvelope, hello: PeerHello) -> None:
        agree(hello.protocol_min, hello.protocol_max)
        if not self.is_own(hello.dialled):
            log.warning("a peer calls this daemon by another name", name=hello.dialled, peer=envelope.address)
        self.check_reachable(envelope.address, "address")
        self.connect(envelope.address)
        link = self._links[envelope.address]
        if not hello.answers:
            link.put(self.hello(envelope.address, answers=True))
        link.greeted(envelope.boot_id, anew=not hello.answers)


class _Link:
    """The connection to one address."""

    def __init__(self, owner: PeerLinks, address: str) -> None:
        self._owner = owner
        self._address = address
        self.peer: Incarnation | None = None
        self._connected = False
        self._outbox: list[Frames] = []
        self._socket = owner.context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 0),  # bounded by what is under way in the rooms
            (zmq.IMMEDIATE, 1),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
            (zmq.CONNECT_TIMEOUT, owner.heartbeat.timeout_ms),
            (zmq.HANDSHAKE_IVL, owner.heartbeat.timeout_ms),
            (zmq.HEARTBEAT_IVL, owner.heartbeat.interval_ms),
            (zmq.HEARTBEAT_TIMEOUT, owner.heartbeat.timeout_ms),
            (zmq.TCP_MAXRT, owner.heartbeat.timeout_ms),
        ):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        if owner.loop is not None:
            owner.loop.add_reader(self._monitor.FD, self._changed)
            owner.loop.call_soon(self._changed)  # the descriptor signals only what comes after a first look
        self._socket.connect(address)

    def __repr__(self) -> str:
        """Show address and state."""
        return f"<_Link {self._address} {'up' if self.peer else 'down'}>"

    def put(self, frames: Frames) -> None:
        """Send, or keep until connected."""
        self._outbox.append(frames)
        if self._connected and len(self._outbox) == 1:
            self._flush()

    def greeted(self, boot_id: str, *, anew: bool) -> None:
        """Take a PEER_HELLO's word on who is there.

        ``anew``: its connection to us is a new one. If it was known already, only the peer has noticed a break: it has
        failed what we had with it, and what it said meanwhile is lost.
        """
        peer = Incarnation(self._address, boot_id)
        if self.peer == peer and not anew:
            return
        self._lose("it has begun anew")
        self.peer = peer
        log.info("peer up", address=self._address, boot_id=boot_id)
        self._owner.counters.add("peers.up")
        self._owner.on_up(peer)

    def close(self) -> None:
        """Break the connection."""
        if self._owner.loop is not None:
            self._owner.loop.remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _flush(self) -> None:
        while self._connected and self._outbox and not self._socket.closed:
            try:
                self._socket.send_multipart(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:  # the connection has just broken, and the monitor will say so, or is not quite there
                if self._owner.loop is not None:
                    self._owner.loop.call_later(RETRY_S, self._flush)
                return
            self._outbox.pop(0)

    def _changed(self) -> None:
        while not self._monitor.closed:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._opened()
            elif event == zmq.EVENT_DISCONNECTED:
                self._broken()

    def _opened(self) -> None:
        self._connected = True
        self._outbox.insert(0, self._owner.hello(self._address, answers=False))
        self._flush()

    def _broken(self) -> None:
        self._connected = False
        self._outbox.clear()
        self._lose(f"its connection closed, or was silent for {self._owner.heartbeat.timeout_ms} ms")

    def _lose(self, why: str) -> None:
        peer, self.peer = self.peer, None
        if peer is not None:
            log.warning("peer lost", address=self._address, boot_id=peer.boot_id, cause=why)
            self._owner.counters.add("peers.lost")
            self._owner.on_lost(peer, why)


def is_numeric(address: str) -> bool:
    """Return whether a TCP address has a host in numbers, and not that of any interface."""
    host = address.partition("://")[2].rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _scheme(address: str) -> str:
    return address.partition("://")[0]

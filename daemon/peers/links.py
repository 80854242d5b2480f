"""Connections to other daemons: one ROUTER that listens, and one link to each peer. Knows nothing of transfers.

Each side sends on its own connection and receives on the other's, so each detects the other's end by itself: at once
where the peer's process ends and its host closes the connection, otherwise once the peer has not answered a ZMTP
heartbeat for ``timeout_ms``. Then the peer is *lost*: unsent messages are dropped, and so are its messages that are
received only later. Both start over with PEER_HELLO on the next connection; nothing before it counts. The two
directions may break at different times, so the last messages of one side may have been processed by the other before
that one noticed. A peer that reads too slowly is lost in the same way.

A link that is down is kept while a receive request waits for the peer, and for a minute after its last use; where there
are too many, the least recently used one is dropped for a new one. There is no authentication: see docs/operations.md
for what to firewall.
"""

from __future__ import annotations

import asyncio
import heapq
import resource
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvferry.daemon.control.control_socket import ControlSocket
from kvferry.daemon.control.metrics import Counters, about
from kvferry.daemon.control.zmtp import ReceivedMessage
from kvferry.daemon.process.access import Listener
from kvferry.daemon.transfer.endpoints import Incarnation
from kvferry.protocol.addresses import is_numeric, is_v6, scheme, wrong_address, wrong_port
from kvferry.protocol.codec import Frames, PageIds
from kvferry.protocol.errors import ConfigError, InvalidFieldError, KvferryError
from kvferry.protocol.ids import NO_BOOT, BootId
from kvferry.protocol.limits import PROTOCOL_MAX, PROTOCOL_MIN, Limits, agree
from kvferry.protocol.peer_messages import (
    IncomingPeerMessage,
    PeerBody,
    PeerEnvelope,
    PeerHello,
    decode_peer,
    encode_peer,
)

MAX_PEERS = 1024
FILES_PER_PEER = 8
"""Open files that a peer may cost; a low RLIMIT_NOFILE lowers the number of peers."""
TIDY_S = 10.0
QUIET_S = 60.0
NEEDED_CHECKS = 32
"""How many links are checked at a time for being needed, as each check scans all receive requests."""
LINGER_MS = 300
"""How long the last messages may take to leave when the daemon ends."""

RECONNECT_MS = 100
RECONNECT_MAX_MS = 2000
RETRY_S = 0.01
TTL_STEP_MS = 100
MAX_TTL_STEPS = 655
"""libzmq keeps milliseconds in 16 bits: at most 65.5 s, which is longer than any interval."""
QUEUED_MESSAGES = 1000
"""libzmq's send queue per connection; further messages wait in the outbox."""
WAITING_MESSAGES = 65_536
WAITING_BYTES = 256 << 20
SOCKETS_PER_LINK = 3
"""The DEALER and both ends of its monitor."""

log = structlog.get_logger(__name__)


class Heartbeat(NamedTuple):
    """The heartbeat interval, and the time without an answer after which a connection counts as broken."""

    interval_ms: int
    timeout_ms: int

    @property
    def time_to_live_ms(self) -> int:
        """Return the silence after which the peer closes the connection, rounded up to libzmq's steps."""
        steps = -(-(self.interval_ms + self.timeout_ms) // TTL_STEP_MS)
        return min(steps, MAX_TTL_STEPS) * TTL_STEP_MS


class PeerListener(Protocol):
    """Is notified about other daemons, on the loop, never from within ``PeerLinks.send``."""

    def on_message(self, peer: Incarnation, body: PeerBody, ids: tuple[PageIds, ...]) -> None:
        """Process a peer's message."""

    def on_up(self, peer: Incarnation) -> None:
        """Process that an incarnation of a peer can be sent to from now on."""

    def on_lost(self, peer: Incarnation, why: str) -> None:
        """Process that an incarnation is gone or cut off."""

    def is_needed(self, address: str) -> bool:
        """Return whether the link to an address is to be kept although it is down."""


class PeerLink:
    """The connection by which this daemon sends to one other: a DEALER that only sends, and a monitor that watches it.

    Connects on construction, and again whenever the connection breaks, until it is closed. The peer is *up* once its
    PEER_HELLO was received and the connection stands; nothing is queued before. The outbox is bounded: a peer that
    reads too slowly is treated as lost, and its connection is made anew.
    """

    def __init__(self, owner: PeerLinks, address: str, field: str) -> None:
        """Start connecting.

        Raises:
            InvalidFieldError: libzmq refuses the address, or has no socket left.
        """
        self.address = address
        self.used_at = time.monotonic()
        self._owner = owner
        self._incarnation: Incarnation | None = None
        self._connected = False
        self._up = False
        self._overflowed = False
        self._outbox: deque[Frames] = deque()
        self._outbox_bytes = 0
        self._retry: asyncio.TimerHandle | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        try:
            self._connect()
        except zmq.ZMQError as cause:
            self.close()
            raise InvalidFieldError(f"{address}: {cause.strerror}", field=field) from cause

    def __repr__(self) -> str:
        """Show address and state."""
        return f"<PeerLink {self.address} {'up' if self.peer else 'down'} waiting={len(self._outbox)}>"

    @property
    def peer(self) -> Incarnation | None:
        """Return the incarnation that can be sent to, if any."""
        return self._incarnation if self._up and not self._overflowed else None

    @property
    def waiting(self) -> int:
        """Return the number of messages that libzmq has not taken yet."""
        return len(self._outbox)

    def quiet_s(self, now: float) -> float:
        """Return for how many seconds it has been down and unused; 0 while it is up."""
        return 0.0 if self._up else now - self.used_at

    def put(self, frames: Frames) -> None:
        """Send in order. Ignored while not connected: a new connection starts with PEER_HELLO anyway."""
        if not self._connected or self._overflowed:
            return
        self._outbox.append(frames)
        self._outbox_bytes += _size_bytes(frames)
        if self._retry is None:
            self._flush()
        if len(self._outbox) > WAITING_MESSAGES or self._outbox_bytes > WAITING_BYTES:
            self._overflowed = True
            if self._owner.loop is not None:  # the listener is never called from within
                self._owner.loop.call_soon(self._owner.overflowed, self)

    def greeted(self, boot_id: str, *, anew: bool) -> None:
        """Process a PEER_HELLO, which names the peer's incarnation.

        ``anew``: the peer's connection to us is new, and it awaits an answer. If the incarnation was known already,
        only the peer has noticed a break: it has failed what we shared, and its messages in between are lost.
        """
        peer = Incarnation(self.address, boot_id)
        if self._incarnation == peer and not anew:
            return
        self.lose("it connected anew")
        self._incarnation = peer
        if anew and self._connected:
            self._clear()  # from before; the peer drops all messages that precede the answer
            self.put(self._owner.hello(self.address, answers=True))
        self._set_up()

    def greet_again(self) -> None:
        """Send PEER_HELLO again, where the connection stands and no answer came."""
        if self._incarnation is None and not self._outbox:
            self.put(self._owner.hello(self.address, answers=False))

    def lose(self, why: str) -> None:
        """Mark the peer as lost and notify the listener."""
        peer, self._incarnation = self._incarnation, None
        was_up, self._up = self._up, False
        if was_up and peer is not None:
            self.used_at = time.monotonic()
            log.warning("peer lost", address=self.address, boot_id=peer.boot_id, cause=why)
            self._owner.counters.add("peers.lost")
            if self._owner.listener is not None:
                self._owner.listener.on_lost(peer, why)

    def close(self, linger_ms: int = 0) -> None:
        """Close the connection.

        Queued messages have ``linger_ms`` to leave if the peer is up, and are dropped otherwise.
        """
        if self._up and linger_ms:
            self._flush()
        if self._retry is not None:
            self._retry.cancel()
        if self._monitor is not None and self._owner.loop is not None:
            self._owner.loop.remove_reader(self._monitor.FD)
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger_ms if self._up else 0)
        if self._monitor is not None:
            self._monitor.close(0)
        self._connected = False
        self._clear()

    def _connect(self) -> None:
        owner = self._owner
        dealer = self._socket = owner.context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, QUEUED_MESSAGES),
            (zmq.RCVHWM, 1),  # nothing is ever read here
            (zmq.MAXMSGSIZE, owner.limits.max_frame_bytes),
            (zmq.IMMEDIATE, 1),
            (zmq.IPV6, int(is_v6(self.address))),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
            (zmq.CONNECT_TIMEOUT, owner.heartbeat.timeout_ms),
            (zmq.HANDSHAKE_IVL, owner.heartbeat.timeout_ms),
            (zmq.HEARTBEAT_IVL, owner.heartbeat.interval_ms),
            (zmq.HEARTBEAT_TIMEOUT, owner.heartbeat.timeout_ms),
            (zmq.HEARTBEAT_TTL, owner.heartbeat.time_to_live_ms),  # the ROUTER there sends no heartbeats itself
            (zmq.TCP_MAXRT, owner.heartbeat.timeout_ms),
        ):
            dealer.setsockopt(option, value)
        self._monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        if owner.loop is not None:
            owner.loop.add_reader(self._monitor.FD, self._on_monitor_events)
            owner.loop.call_soon(self._on_monitor_events)  # the descriptor is edge-triggered: read once first
        dealer.connect(self.address)

    def _flush(self) -> None:
        self._retry = None
        while self._connected and self._outbox and self._socket is not None:
            try:
                self._socket.send_multipart(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:  # full, or the connection just broke, which the monitor reports
                if self._owner.loop is not None:
                    self._retry = self._owner.loop.call_later(RETRY_S, self._flush)
                return
            self._outbox_bytes -= _size_bytes(self._outbox.popleft())

    def _on_monitor_events(self) -> None:
        while self._monitor is not None and not self._monitor.closed:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._on_connected()
            elif event == zmq.EVENT_DISCONNECTED:
                self._on_disconnected()

    def _on_connected(self) -> None:
        self._connected = True
        self.put(self._owner.hello(self.address, answers=False))
        self._set_up()

    def _on_disconnected(self) -> None:
        self._owner.drain_received()  # an ending peer reports on its transfers, then closes
        self._connected = False
        self._clear()
        self.lose(f"its connection was closed, or silent for {self._owner.heartbeat.timeout_ms} ms")

    def _set_up(self) -> None:
        if self._incarnation is None or self._up or not self._connected:
            return
        self._up = True
        log.info("peer up", address=self.address, boot_id=self._incarnation.boot_id)
        self._owner.counters.add("peers.up")
        if self._owner.listener is not None:
            self._owner.listener.on_up(self._incarnation)

    def _clear(self) -> None:
        self._outbox.clear()
        self._outbox_bytes = 0


class PeerLinks:
    """All links, and the listening socket. Serves between ``start`` and ``close``."""

    def __init__(
        self,
        boot_id: BootId,
        listener: Listener,
        listen: str | None,
        heartbeat: Heartbeat,
        limits: Limits,
        counters: Counters,
    ) -> None:
        """Take over a Unix socket for daemons of this host and, with ``listen``, listen on TCP.

        Raises:
            ConfigError: the TCP address cannot be listened on, or peers could not connect to it.
        """
        if listen and not is_numeric(listen):
            raise ConfigError(f"{listen}: give a numeric address of this host", field="peers.listen")
        if listen and (wrong := wrong_port(listen, 0)):
            raise ConfigError(wrong, field="peers.listen")
        self.boot_id = boot_id
        self.heartbeat = heartbeat
        self.limits = limits
        self.counters = counters
        self.loop: asyncio.AbstractEventLoop | None = None
        self.listener: PeerListener | None = None
        self._router = ControlSocket(listener, limits, counters, also=listen, name="peers")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 2 * SOCKETS_PER_LINK * MAX_PEERS)  # a closed socket counts a little longer
        self._max_links = _max_peers()
        self.addresses = {"ipc": f"ipc://{listener.path}"}
        if listen:
            self.addresses["tcp"] = self._router.endpoint
        self._links: dict[str, PeerLink] = {}
        self._tidying: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        """Show the peers."""
        return f"<PeerLinks {list(self._links.values())}>"

    def start(self, loop: asyncio.AbstractEventLoop, listener: PeerListener) -> None:
        """Serve on this loop, and notify the listener."""
        self.loop = loop
        self.listener = listener
        self._router.start(loop, self._received)
        self._tidying = loop.call_later(TIDY_S, self._tidy)

    def close(self) -> None:
        """Close all connections and stop listening; the last messages have LINGER_MS to leave. Idempotent."""
        if self._tidying is not None:
            self._tidying.cancel()
        for link in self._links.values():
            link.close(LINGER_MS)
        self._links.clear()
        self.context.term()  # before our ROUTER closes, which peers take for our end
        self._router.close()
        self.loop = None

    def check_reachable(self, address: str, field: str) -> None:
        """Check that this daemon can send to an address, and be answered.

        Raises:
            InvalidFieldError: no daemon can listen there, or this daemon does not listen where that one could connect.
        """
        if scheme(address) not in self.addresses:
            raise InvalidFieldError(
                f"{address}: this daemon listens on no TCP address; set peers.listen in its configuration", field=field
            )
        if wrong := wrong_address(address):
            raise InvalidFieldError(wrong, field=field)

    def is_own(self, address: str) -> bool:
        """Return whether an address is one of this daemon's."""
        return address in self.addresses.values()

    def connect(self, address: str, field: str = "address") -> Incarnation | None:
        """Ensure that there is a link; return the incarnation that can be sent to, if it is up.

        Raises:
            InvalidFieldError: the address is invalid, or too many other daemons are known.
        """
        link = self._links.get(address)
        if link is None:
            self.check_reachable(address, field)
            if len(self._links) >= self._max_links and not self._drop_one():
                raise InvalidFieldError(f"{address}: {len(self._links)} other daemons are known already", field=field)
            link = self._links[address] = PeerLink(self, address, field)
        link.used_at = time.monotonic()
        return link.peer

    def send(self, peer: Incarnation, body: PeerBody, ids: Sequence[PageIds] = ()) -> bool:
        """Send a message to an incarnation; return False, with nothing sent, where it is gone."""
        link = self._links.get(peer.address)
        if link is None or link.peer != peer:
            self.counters.add("peers.unsent")
            return False
        link.put(encode_peer(PeerEnvelope(self.own_address(peer.address), self.boot_id, peer.boot_id, body), ids))
        return True

    def own_address(self, address: str) -> str:
        """Return the address by which the peer at ``address`` reaches this daemon."""
        return self.addresses[scheme(address)]

    def up(self) -> list[Incarnation]:
        """Return all peers that can be sent to."""
        return [link.peer for link in self._links.values() if link.peer is not None]

    def status(self) -> tuple[tuple[str, str], ...]:
        """Return each peer's address and state: ``up``, or ``down``."""
        return tuple((address, "up" if link.peer else "down") for address, link in self._links.items())

    def hello(self, address: str, *, answers: bool) -> Frames:
        """Return the frames of our PEER_HELLO."""
        body = PeerHello(protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, answers=answers, dialled=address)
        return encode_peer(PeerEnvelope(self.own_address(address), self.boot_id, NO_BOOT, body))

    def _received(self, message: ReceivedMessage) -> None:
        self.counters.add("peers.received")
        incoming = None
        try:
            incoming = decode_peer([] if message.too_large else message.frames)
            self._process(incoming)
        except KvferryError as error:
            self.counters.add("peers.malformed")
            log.warning("a peer's message was dropped", cause=str(error), **_about(incoming))
        except Exception as error:  # a bug must not end the loop
            self.counters.add("peers.failed")
            log.exception("a peer's message failed", cause=str(error), **_about(incoming))

    def _process(self, incoming: IncomingPeerMessage) -> None:
        envelope = incoming.envelope
        if envelope.to_boot_id not in {self.boot_id, NO_BOOT}:
            self.counters.add("peers.stale")
            return
        if isinstance(envelope.body, PeerHello):
            self._on_hello(envelope, envelope.body)
            return
        link = self._links.get(envelope.address)
        if link is None:  # it has not noticed that we dropped its link: connecting makes it start over
            self.counters.add("peers.stale")
            self.connect(envelope.address)
        elif link.peer is None or link.peer.boot_id != envelope.boot_id:
            self.counters.add("peers.stale")
        elif self.listener is not None:
            self.listener.on_message(link.peer, envelope.body, incoming.ids)

    def _on_hello(self, envelope: PeerEnvelope, hello: PeerHello) -> None:
        agree(hello.protocol_min, hello.protocol_max)
        if not self.is_own(hello.dialled):
            log.warning(
                "a peer connected by an address that is not this daemon's own",
                name=hello.dialled,
                peer=envelope.address,
            )
        self.connect(envelope.address)
        self._links[envelope.address].greeted(envelope.boot_id, anew=not hello.answers)

    def overflowed(self, link: PeerLink) -> None:
        """Replace a link whose peer reads too slowly."""
        if self._links.get(link.address) is not link:
            return
        self.counters.add("peers.overflowed")
        del self._links[link.address]
        waiting = link.waiting
        link.close()
        link.lose(f"it read too slowly: {waiting} messages were waiting")
        try:
            self.connect(link.address)
        except InvalidFieldError as error:
            log.warning("a peer was not connected to again", cause=str(error))

    def drain_received(self) -> None:
        """Process the messages that peers have sent by now."""
        self._router.drain_received()

    def _tidy(self) -> None:
        if self.loop is None:
            return
        self._tidying = self.loop.call_later(TIDY_S, self._tidy)
        for link in self._links.values():
            link.greet_again()
        while self._drop_one(QUIET_S):
            pass

    def _drop_one(self, quiet_s: float = 0.0) -> bool:
        """Drop the least recently used link that is down and not needed; return whether there was one.

        Even when links are short, each has ``timeout_ms`` to come up.
        """
        now = time.monotonic()
        min_s = max(quiet_s, self.heartbeat.timeout_ms / 1000)
        quiet = [link for link in self._links.values() if link.quiet_s(now) > min_s]
        for link in heapq.nsmallest(NEEDED_CHECKS, quiet, key=lambda link: link.used_at):
            if self.listener is not None and self.listener.is_needed(link.address):
                link.used_at = now
                continue
            self._links.pop(link.address).close()
            self.counters.add("peers.dropped")
            return True
        return False


def _max_peers() -> int:
    """Return the maximum of peers, which leaves files for sessions."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_PEERS if files == resource.RLIM_INFINITY else min(MAX_PEERS, files // FILES_PER_PEER)


def _about(incoming: IncomingPeerMessage | None) -> dict[str, str]:
    return about(incoming.envelope) if incoming else {}


def _size_bytes(frames: Frames) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)

"""The connection by which this daemon sends to one other: a DEALER that only sends, and a monitor that watches it.

The peer is *up* once its PEER_HELLO was received and the connection stands; nothing is queued before. The outbox is
bounded: a peer that reads too slowly is treated as lost, and its connection is made anew. Knows nothing of transfers;
the owner receives the peer's messages and passes its PEER_HELLO on.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import NamedTuple, Protocol

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvferry.daemon.config.addresses import is_v6
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.transfer.remote import Incarnation
from kvferry.protocol.codec import Frames, PageIds
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.limits import Limits
from kvferry.protocol.peer_messages import PeerBody

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


class LinkOwner(Protocol):
    """What a link uses of ``PeerLinks``."""

    context: zmq.Context[zmq.Socket[bytes]]
    loop: asyncio.AbstractEventLoop | None
    heartbeat: Heartbeat
    limits: Limits
    counters: Counters
    listener: PeerListener | None

    def hello(self, address: str, *, answers: bool) -> Frames:
        """Return the frames of our PEER_HELLO."""

    def overflowed(self, link: PeerLink) -> None:
        """Replace a link whose peer reads too slowly."""

    def drain_received(self) -> None:
        """Process the messages that peers have sent by now."""


class PeerLink:
    """Connects on construction, and again whenever the connection breaks, until it is closed."""

    def __init__(self, owner: LinkOwner, address: str, field: str) -> None:
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


def _size_bytes(frames: Frames) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)

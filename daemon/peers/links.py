"""Connections to other daemons: one ROUTER that listens, and one link to each peer. Knows nothing of transfers.

Each side sends on its own connection and receives on the other's. A link has two *keys*: each side makes a new one for
each new connection and tells it, in PEER_HELLO, to the address that it connected to. Every message carries its sender's
key, and the key that the receiver has told the sender's address. So a message proves that its sender hears what is said
to the address that it names; no boot id, restart or end is believed without this proof. A message without proof has
only its address read, bounded in size, rate and number: the daemon greets that address, and a daemon there may answer.
A third party that is not on the path between two daemons can neither speak for one of them, nor part them, nor repeat
old messages. Without keys of nodes, one that is on the path, or that listens at an address of its own, is not kept out.

With keys of nodes (``key_ring``) TCP connections are encrypted by CURVE, and each side proves which node it is before
anything is read: see ``curve_listener``. A node speaks only for the address that its key is for. Where keys change, a
link moves to a new connection with the new ones and no message is lost: the peer has handled all that was said on the
old one before the first is sent on the new one. A link whose keys are revoked is cut off.

The peer is *up* once it has said our key again. Each side detects the other's end by itself: at once where the peer's
process ends and its host closes one of the two connections, otherwise once one of them was silent for ``timeout_ms``
and a heartbeat. Its daemon answers heartbeats of ours as well: it is *silent* while one is unanswered. Where it is for
too long, or reads too slowly, it is lost, too. When a peer is *lost*, unsent messages are dropped, and a new key makes
its messages void that are received only later. The two directions may break at different times, so the last messages of
one side may have been processed by the other before that one noticed.

A link that is down is kept while a receive request waits for the peer, and for a minute after its last use; where there
are too many, the least recently used one is dropped for a new one, and first those that only an unauthenticated peer
has named.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, Protocol

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvferry.daemon.control.control_socket import ControlSocket
from kvferry.daemon.control.kept_bytes import ConnectionBytes
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.zmtp import ReceivedMessage
from kvferry.daemon.peers.curve_listener import CurveListener
from kvferry.daemon.peers.key_ring import KeyRing
from kvferry.daemon.process.access import Listener
from kvferry.daemon.process.descriptors import Descriptors
from kvferry.daemon.transfer.endpoints import Incarnation
from kvferry.protocol.addresses import IPC, TCP, is_loopback, is_numeric, is_v6, scheme, wrong_address, wrong_port
from kvferry.protocol.codec import Frames, PageIds
from kvferry.protocol.errors import (
    AccessDeniedError,
    ConfigError,
    InvalidFieldError,
    KvferryError,
    MalformedError,
    OverloadedError,
    TooLargeError,
)
from kvferry.protocol.ids import BootId, new_key
from kvferry.protocol.limits import PROTOCOL_MAX, PROTOCOL_MIN, Limits, agree
from kvferry.protocol.node_keys import NodeKey
from kvferry.protocol.peer_messages import (
    PeerBody,
    PeerEnvelope,
    PeerHead,
    PeerHeartbeat,
    PeerHello,
    decode_peer_body,
    decode_peer_head,
    encode_peer,
)

MAX_PEERS = 1024
"""A low RLIMIT_NOFILE lowers it: see ``Descriptors``."""
MAX_GUESTS = 128
GUESTS_PER_HOST = 16
"""Links to addresses that only an unauthenticated peer has named: in all, and by one host or one user of this host."""
TIDY_S = 10.0
QUIET_S = 60.0
NEEDED_CHECKS = 32
"""How many links are checked at a time for being needed, as each check scans all receive requests."""
LINGER_MS = 300
"""How long the last messages may take to leave when the daemon ends."""
MAX_UNPROVEN = 4096
"""Messages that prove nothing until their connection is closed: more than a peer has under way when a link breaks."""
GREETING_S = 0.1
"""How often an address is greeted at most because of messages that prove nothing."""
SILENCE_S = 10.0
"""A connected peer whose daemon answers no heartbeat is lost after three times ``timeout_ms``, but not before this: a
daemon may be busy for seconds, with the first pool on a device say, and its transfers go on."""
WARNING_S = 1.0
"""How often a dropped message is logged at most; all are counted."""

RECONNECT_MS = 100
RECONNECT_MAX_MS = 500
TTL_STEP_MS = 100
MAX_TTL_STEPS = 655
"""libzmq keeps milliseconds in 16 bits: at most 65.5 s, which is longer than any interval."""
QUEUED_MESSAGES = 1000
"""libzmq's send queue per connection; further messages wait in the outbox."""
WAITING_MESSAGES = 65_536
WAITING_BYTES = 256 << 20
SOCKETS_PER_LINK = 3
"""The DEALER and both ends of its monitor."""

KEYS_S = 1.0
"""How often is looked whether files of keys have changed."""
RETIRING_S = 60.0
"""How long a replaced key of this node may still be used by peers that have connected with it."""
RENEWAL_S = 10.0
"""How long a link may take to move to a connection with other keys, and when it tries that again."""
LAST_WORDS_S = 0.1
"""How long the end of a peer's own connection is waited for, once ours to it has ended: its last words are on that."""

NOBLOCK: Final = int(zmq.NOBLOCK)  # an enum costs a microsecond a use
_HANDSHAKE_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What libzmq says where the process, not the address, is why there is no socket."""

LinkState = Literal["connecting", "greeting", "up", "silent", "refused", "lost"]
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

    @property
    def silence_s(self) -> float:
        """Return how long a connected peer's daemon may leave heartbeats unanswered before it is lost, in seconds."""
        return max(3 * self.timeout_ms / 1000, SILENCE_S)


class Terms(NamedTuple):
    """What both sides of a link can take: the smaller value of each.

    Attributes:
        max_frame_bytes, max_message_bytes: of one frame, and of all frames of a message.
        bounce_buffer_bytes: of one write between hosts; 0: one side has no transport between hosts.
    """

    max_frame_bytes: int
    max_message_bytes: int
    bounce_buffer_bytes: int

    def with_those_of(self, hello: PeerHello) -> Terms:
        """Return what both can take."""
        return Terms(
            min(self.max_frame_bytes, hello.max_frame_bytes or self.max_frame_bytes),
            min(self.max_message_bytes, hello.max_message_bytes or self.max_message_bytes),
            min(self.bounce_buffer_bytes, hello.bounce_buffer_bytes),
        )


class LinkStatus(NamedTuple):
    """A link as STATUS shows it.

    Attributes:
        address: the peer's.
        state: ``connecting`` until there is a connection, ``greeting`` until the peer has proved that it listens there,
            ``up`` while it answers heartbeats, ``silent`` while one is unanswered, ``refused`` where the two cannot
            speak with each other, ``lost`` where it was up.
        round_trip_us: of the last heartbeat that was answered; 0: none was.
        quiet_ms: since the last message that proved to be the peer's; 0: none did.
        why: why it is not up.
        node: the name of the node there, by its key; empty without keys.
        keys: the beginnings of the peer's keys that the connections of both are made with.
    """

    address: str
    state: LinkState
    round_trip_us: int
    quiet_ms: int
    why: str
    node: str
    keys: tuple[str, ...]


class LinkKeys(NamedTuple):
    """What a connection is made with: this node's key, and the key that the other one must prove to have."""

    own: NodeKey
    their: NodeKey


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

    Connects on construction, and again whenever the connection breaks, until it is closed. Nothing but PEER_HELLO is
    queued before the peer is up. The outbox is bounded: a peer that reads too slowly is treated as lost, and its
    connection is made anew.

    Attributes:
        key: ours for this peer.
        peer_key: the peer's for us; empty while it is not up.
        claimed_key: the last key that anybody named for this address: we greet with it.
        guest_of: the host, or user of this one, whose message alone has named this address; None once it is up, or an
            engine here asks for it.
        heard_on: the connection on which the peer last spoke.
        heard_key: the key with which it did; None without keys.
        left: the connection on which it spoke before that one: a late answer on it does not mean that it has returned.
        keys: what our connection is made with; None without keys.
        terms: what both sides can take, while the peer is up.
    """

    def __init__(self, owner: PeerLinks, address: str, field: str, guest_of: object) -> None:
        """Start connecting.

        Raises:
            InvalidFieldError: libzmq refuses the address.
            OverloadedError: no descriptor, or no memory, is left for it.
        """
        self.address = address
        self.used_at = time.monotonic()
        self.guest_of = guest_of
        self.key = new_key()
        self.peer_key = self.claimed_key = ""
        self.terms = owner.terms
        self._owner = owner
        self._incarnation: Incarnation | None = None
        self._connected = False
        self._overflowed = False
        self._why = f"no connection to {address} yet"
        self._refused = self._was_up = False
        self.heard_on = b""
        self.heard_key: NodeKey | None = None
        self.left = b""
        self._attempts = 0
        self._held = False
        self._renewing: asyncio.Task[None] | None = None
        self._not_renewed_at = -RENEWAL_S
        self._spare: tuple[zmq.asyncio.Socket, zmq.asyncio.Socket] | None = None
        self._awaited: tuple[int, asyncio.Event] | None = None
        self.keys = owner.keys_for(address)
        self._heard_at = 0.0
        self._hinted_at = 0.0
        self._beat_number = 0
        self._beat_at = 0.0
        self._unanswered_since: float | None = None
        self._round_trip_s = 0.0
        self._outbox: deque[Frames] = deque()
        self._outbox_bytes = 0
        self._sending: asyncio.Task[None] | None = None
        self._greeting: asyncio.TimerHandle | None = None
        try:
            self._socket, self._monitor = self._open(self.keys)
        except zmq.ZMQError as cause:
            if cause.errno in _NO_ROOM:
                raise OverloadedError(f"{address}: {cause.strerror}", field=field) from cause
            raise InvalidFieldError(f"{address}: {cause.strerror}", field=field) from cause
        self._at_once: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        self._watching = owner.loop.create_task(self._watch(), name=f"link to {address}")
        owner.by_key[self.key] = self

    def __repr__(self) -> str:
        """Show address and state."""
        return f"<PeerLink {self.address} {'up' if self.peer else 'down'} waiting={len(self._outbox)}>"

    @property
    def peer(self) -> Incarnation | None:
        """Return the incarnation that can be sent to, if any."""
        return None if self._overflowed else self._incarnation

    @property
    def waiting(self) -> int:
        """Return the number of messages that libzmq has not taken yet."""
        return len(self._outbox)

    def status(self, now: float) -> LinkStatus:
        """Return what STATUS shows."""
        state: LinkState
        if self.peer is not None:
            late = self._unanswered_since is not None and now - self._unanswered_since > self._owner.interval_s
            state = "silent" if late else "up"
        elif self._refused:
            state = "refused"
        else:
            state = "lost" if self._was_up else "greeting" if self._connected else "connecting"
        quiet_ms = round(1000 * (now - self._heard_at)) if self._heard_at else 0
        why = "" if state == "up" else "its daemon does not answer heartbeats" if state == "silent" else self._why
        keys = [key for key in (self.keys and self.keys.their, self.heard_key) if key is not None and self.peer]
        node = self.keys.their.name if self.keys else ""
        used = tuple(dict.fromkeys(key.short for key in keys))
        return LinkStatus(self.address, state, round(1e6 * self._round_trip_s), quiet_ms, why, node, used)

    def quiet_s(self, now: float) -> float:
        """Return for how many seconds it has been down and unused; 0 while it is up."""
        return 0.0 if self._incarnation is not None else now - self.used_at

    def put(self, frames: Frames, *, at_once: bool = False) -> None:
        """Send in order. Ignored while not connected: a new connection starts with PEER_HELLO anyway.

        With ``at_once`` it does not wait for another connection: two that move to one wait for each other's answers.
        """
        if not self._connected or self._overflowed:
            return
        if self._held and at_once:
            with contextlib.suppress(zmq.Again):
                self._at_once.send_multipart(frames, NOBLOCK)
            return
        self._outbox.append(frames)
        self._outbox_bytes += _size_bytes(frames)
        if self._sending is None and not self._held:
            self._flush()
        if len(self._outbox) > WAITING_MESSAGES or self._outbox_bytes > WAITING_BYTES:
            self._overflowed = True
            self._owner.loop.call_soon(self._owner.overflowed, self)  # the listener is never called from within

    def greeted(self, key: str, hello: PeerHello) -> None:
        """Process a PEER_HELLO that has proved to be the peer's.

        Where it has another key than before, it is a new incarnation, or it alone has noticed a break: then it has
        failed what we shared, and its messages in between are void.
        """
        peer = Incarnation(self.address, hello.boot_id)
        self.claimed_key = key
        if self._incarnation == peer and self.peer_key == key:
            return
        same = self._incarnation is None or self._incarnation == peer
        self._lose("it connected anew" if same else "another daemon has begun there")
        try:
            agree(hello.protocol_min, hello.protocol_max)
        except KvferryError as error:
            if not self._refused:
                log.warning("a peer speaks another protocol", address=self.address, cause=error.detail)
            self._refused, self._why = True, f"it speaks another protocol: {error.detail}"
            return
        self._clear()  # from before: it is void
        self.put(self._owner.hello(self))
        self.peer_key = key
        self.terms = self._owner.terms.with_those_of(hello)
        self.guest_of = None
        self._refused, self._was_up = False, True
        self._incarnation = peer
        log.info("peer up", address=self.address, boot_id=peer.boot_id)
        self._owner.counters.add("peers.up")
        if self._owner.listener is not None:
            self._owner.listener.on_up(peer)
        self.beat(time.monotonic())

    def hinted(self, key: str) -> None:
        """Greet, at most every ``GREETING_S``, as somebody has spoken for this address without a proof."""
        self.claimed_key = key
        if not self._connected or self._greeting is not None:
            return
        now = time.monotonic()
        wait_s = max(0.0, self._hinted_at + GREETING_S - now)
        self._hinted_at = now + wait_s
        self._greeting = self._owner.loop.call_later(wait_s, self._greet)

    def heard(self, connection: bytes, key: NodeKey | None) -> None:
        """Note that a message has come that proved to be the peer's, with this key of its node."""
        self._heard_at = time.monotonic()
        if connection == self.left:
            return
        if connection != self.heard_on:
            self.left = self.heard_on
        self.heard_on, self.heard_key = connection, key

    def heartbeat(self, body: PeerHeartbeat) -> None:
        """Answer a heartbeat, or process an answer."""
        if not body.answers:
            self._owner.say(self, PeerHeartbeat(number=body.number, answers=True), at_once=True)
            return
        self._unanswered_since = None
        if self._awaited is not None and body.number >= self._awaited[0]:
            self._awaited[1].set()
        if body.number == self._beat_number:
            self._round_trip_s = time.monotonic() - self._beat_at

    def beat(self, now: float) -> None:
        """Send a heartbeat, or PEER_HELLO while the peer has not answered it; notice that it is silent for too long."""
        if self._incarnation is None:
            if self._connected and not self._outbox:
                self._greet()
            return
        if self._unanswered_since is not None and now - self._unanswered_since > self._owner.heartbeat.silence_s:
            self._owner.drain_received()  # where we were busy ourselves, its answer waits there
            self._check_answered(now)
            return
        self._say_heartbeat(now)
        self.follow_keys(now)

    def _say_heartbeat(self, now: float) -> int:
        if self._unanswered_since is None:
            self._unanswered_since = now
        self._beat_number, self._beat_at = self._beat_number + 1, now
        self._owner.say(self, PeerHeartbeat(number=self._beat_number))
        return self._beat_number

    def _check_answered(self, now: float) -> None:
        if self._unanswered_since is not None and self._incarnation is not None:
            self.begin_anew(f"its daemon did not answer for {now - self._unanswered_since:.1f} s")

    def begin_anew(self, why: str) -> None:
        """Mark the peer as lost although our connection to it stands, and greet again."""
        self._lose(why)
        self._renew_key()
        self._clear()
        self._greet()

    def cut_off(self, why: str) -> None:
        """Mark the peer as lost for good, as this link is replaced."""
        self._lose(why)

    def close(self, linger_ms: int = 0) -> None:
        """Close the connection.

        Queued messages have ``linger_ms`` to leave if the peer is up, and are dropped otherwise.
        """
        is_up = self._incarnation is not None
        if is_up and linger_ms:
            self._flush()
        self._clear()
        if self._greeting is not None:
            self._greeting.cancel()
        self._stop_renewing()
        self._watching.cancel()
        _close(self._socket, self._monitor, linger_ms if is_up else 0)
        self._connected = False
        self._owner.by_key.pop(self.key, None)

    def _open(self, keys: LinkKeys | None) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
        """Return a DEALER that connects, and its monitor."""
        heartbeat = self._owner.heartbeat
        with contextlib.ExitStack() as unless_open:
            dealer = self._owner.context.socket(zmq.DEALER)
            unless_open.callback(dealer.close)
            for option, value in (
                (zmq.LINGER, 0),
                (zmq.SNDHWM, QUEUED_MESSAGES),
                (zmq.RCVHWM, 1),  # nothing is ever read here
                (zmq.MAXMSGSIZE, self._owner.limits.max_frame_bytes),
                (zmq.IMMEDIATE, 1),
                (zmq.IPV6, int(is_v6(self.address))),
                (zmq.RECONNECT_IVL, RECONNECT_MS),
                (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
                (zmq.CONNECT_TIMEOUT, heartbeat.timeout_ms),
                (zmq.HANDSHAKE_IVL, heartbeat.timeout_ms),
                (zmq.HEARTBEAT_IVL, heartbeat.interval_ms),
                (zmq.HEARTBEAT_TIMEOUT, heartbeat.timeout_ms),
                (zmq.HEARTBEAT_TTL, heartbeat.time_to_live_ms),  # the ROUTER there sends no heartbeats itself
                (zmq.TCP_MAXRT, heartbeat.timeout_ms),
            ):
                dealer.setsockopt(option, value)
            if keys is not None:
                _prove(dealer, keys)
            monitor = dealer.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED
            )
            unless_open.callback(monitor.close)
            unless_open.callback(dealer.disable_monitor)
            dealer.connect(self.address)
            unless_open.pop_all()
        return dealer, monitor

    def _flush(self) -> None:
        """Send what libzmq takes; the rest as soon as it takes more."""
        try:
            while self._outbox:
                self._at_once.send_multipart(self._outbox[0], NOBLOCK)
                self._outbox_bytes -= _size_bytes(self._outbox.popleft())
        except zmq.Again:  # full, or the connection just broke, which the monitor reports
            if self._sending is None:
                self._sending = self._owner.loop.create_task(self._send_on(), name=f"to {self.address}")

    async def _send_on(self) -> None:
        while self._outbox:
            await self._socket.poll(flags=zmq.POLLOUT)  # type: ignore[call-arg]  # its stub knows none
            self._flush()
        self._sending = None

    async def _watch(self) -> None:
        """Follow the connection until this link is closed."""
        while True:
            event = (await recv_monitor_message(self._monitor))["event"]
            with self._owner.going_on(self.address):
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._on_connected()
                elif event == zmq.EVENT_DISCONNECTED and self._connected:
                    await self._owner.last_words(self)
                    self._on_disconnected()
                elif event & _HANDSHAKE_FAILED and scheme(self.address) == TCP:
                    await self._try_again(event)

    def _on_connected(self) -> None:
        self._connected = True
        self._why = f"connected, but the daemon at {self.address} has not answered PEER_HELLO"
        self._greet()

    def _on_disconnected(self) -> None:
        self._owner.drain_received()  # an ending peer reports on its transfers, then closes
        self._connected = False
        self._clear()
        self._lose(f"its connection was closed, or silent for {self._owner.heartbeat.timeout_ms} ms")
        self._renew_key()

    async def _try_again(self, event: int) -> None:
        """Connect anew after a handshake that failed, with other keys where either node has two.

        libzmq itself gives up where it was refused, or where only one of the two uses keys.
        """
        self._owner.counters.add("peers.handshakes_failed")
        if self.keys is None:
            self._why = "the handshake failed: the daemon there may demand keys (peers.keys)"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._why = "the daemon there does not allow this node's key"
        else:
            self._why = "the daemon there has another key than those that are allowed here, or none"
        self._hang_up()
        self._attempts += 1
        await asyncio.sleep((RECONNECT_MS if self._attempts % 2 else RECONNECT_MAX_MS) / 1000)
        choices = self._owner.choices_of_keys(self.address)
        if choices:
            self._dial(choices[self._attempts % len(choices)])
        elif self.keys is None:
            self._dial(None)

    def _hang_up(self) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it does not call already
            self._socket.disconnect(self.address)

    def _dial(self, keys: LinkKeys | None) -> None:
        """Connect anew, with these keys."""
        self._hang_up()
        if keys is not None:
            _prove(self._socket, keys)
        self.keys = keys
        self._socket.connect(self.address)

    def follow_keys(self, now: float) -> None:
        """Move to the keys of the moment, where the connection was made with others that still count."""
        wanted = self._owner.keys_for(self.address)
        if wanted is None or wanted == self.keys or self._renewing is not None or self._overflowed:
            return
        if self._incarnation is None:
            if not self._connected:
                self._dial(wanted)
        elif now - self._not_renewed_at >= RENEWAL_S:
            self._renewing = self._owner.loop.create_task(self._renew(wanted), name=f"keys of {self.address}")

    async def _renew(self, keys: LinkKeys) -> None:
        """Move to a connection with these keys, without a break."""
        try:
            self._spare = socket, monitor = self._open(keys)
            async with asyncio.timeout(RENEWAL_S):
                while (event := (await recv_monitor_message(monitor))["event"]) != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    if event & _HANDSHAKE_FAILED:  # it does not allow the key yet, or listens with another one as well
                        socket.disconnect(self.address)
                        await asyncio.sleep(RECONNECT_MS / 1000)
                        socket.connect(self.address)
                while not await self._all_is_handled(hold=True):
                    pass
                self._spare = self._socket, self._monitor
                self._watching.cancel()
                self._socket, self._monitor, self.keys, self._held = socket, monitor, keys, False
                self._at_once = zmq.Socket.shadow(socket.underlying)
                self._watching = self._owner.loop.create_task(self._watch(), name=f"link to {self.address}")
                self._flush()
                await self._all_is_handled()  # the peer hears us on the new connection: the end of the old one is none
            log.info("a link has other keys", address=self.address, own=keys.own.short, their=keys.their.short)
        except TimeoutError:
            self._not_renewed_at = time.monotonic()
            log.warning("a link keeps its keys: its daemon does not take the others yet", address=self.address)
        except zmq.ZMQError as cause:
            self._not_renewed_at = time.monotonic()
            log.warning("a link keeps its keys", address=self.address, cause=cause.strerror)
        finally:
            if self._renewing is asyncio.current_task():
                self._stop_renewing()
                self._flush()

    async def _all_is_handled(self, *, hold: bool = False) -> bool:
        """Wait until the peer has handled all that was said, with ``hold`` while no more is said on this connection.

        Return False where libzmq had not taken all of it, and therefore nothing is held.
        """
        handled = asyncio.Event()
        self._awaited = (self._say_heartbeat(time.monotonic()), handled)
        self._held = is_held = hold and not self._outbox
        await handled.wait()
        return is_held

    def _stop_renewing(self) -> None:
        """Go on with the connection that is used now."""
        if self._spare is not None:
            _close(*self._spare)
        if self._renewing is not None and self._renewing is not asyncio.current_task():
            self._renewing.cancel()
        self._spare = self._renewing = self._awaited = None
        self._held = False

    def _lose(self, why: str) -> None:
        """Mark the peer as lost and notify the listener."""
        self._stop_renewing()
        peer, self._incarnation, self.peer_key = self._incarnation, None, ""
        self._unanswered_since = None
        self._why = why
        if peer is None:
            return
        self.used_at = time.monotonic()
        log.warning("peer lost", address=self.address, boot_id=peer.boot_id, cause=why)
        self._owner.counters.add("peers.lost")
        if self._owner.listener is not None:
            self._owner.listener.on_lost(peer, why)

    def _renew_key(self) -> None:
        """Make void all that the peer has said before it hears of the new key."""
        by_key = self._owner.by_key
        by_key.pop(self.key, None)
        self.key = new_key()
        by_key[self.key] = self

    def _greet(self) -> None:
        self._greeting = None
        self.put(self._owner.hello(self))

    def _clear(self) -> None:
        self._outbox.clear()
        self._outbox_bytes = 0
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None


def _prove(dealer: zmq.asyncio.Socket, keys: LinkKeys) -> None:
    """Make a DEALER prove to be this node, and demand the same of the other one."""
    dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.their.public.encode())
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public.encode())
    dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode())


def _close(dealer: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket, linger_ms: int = 0) -> None:
    dealer.disable_monitor()  # first: after the monitor has closed, libzmq would wait for its reader
    dealer.close(linger_ms)
    monitor.close(0)


class PeerLinks:
    """All links, and the listening socket. Serves between ``start`` and ``close``.

    Attributes:
        by_key: the links by our keys for them.
        terms: what this daemon can take.
    """

    def __init__(
        self,
        boot_id: BootId,
        listener: Listener,
        listen: str | None,
        heartbeat: Heartbeat,
        limits: Limits,
        counters: Counters,
        bounce_buffer_bytes: int = 0,
        descriptors: Descriptors | None = None,
        kept: ConnectionBytes | None = None,
        keys: KeyRing | None = None,
    ) -> None:
        """Take over a Unix socket for daemons of this host and, with ``listen``, listen on TCP.

        ``kept`` counts what connections to it keep. With ``keys`` all peers over TCP prove which node they are.

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
        self.terms = Terms(limits.max_frame_bytes, limits.max_message_bytes, bounce_buffer_bytes)
        self.counters = counters
        self.loop = asyncio.get_running_loop()
        self.listener: PeerListener | None = None
        self._descriptors = descriptors or Descriptors()
        self.keys = keys
        self._router = ControlSocket(
            listener,
            limits,
            counters,
            also=None if keys else listen,
            name="peers",
            max_connections=self._descriptors.peers // (2 if keys else 1),
            kept=kept,
        )
        self._curve: CurveListener | None = None
        if keys is not None and listen:
            most = self._descriptors.peers // 2
            try:
                self._curve = CurveListener(listen, keys, limits, counters, heartbeat.timeout_ms, most)
            except ConfigError:
                self._router.close()
                raise
        self.context = zmq.asyncio.Context()
        self.context.set(zmq.MAX_SOCKETS, 2 * SOCKETS_PER_LINK * MAX_PEERS)  # a closed socket counts a little longer
        self.context.socket(zmq.DEALER).close()  # its threads begin now: without a descriptor libzmq ends the process
        self._max_links = min(MAX_PEERS, self._descriptors.links)
        self.addresses = {"ipc": f"ipc://{listener.path}"}
        if listen:
            self.addresses["tcp"] = self._curve.endpoint if self._curve is not None else self._router.endpoint
        self.by_key: dict[str, PeerLink] = {}
        self._links: dict[str, PeerLink] = {}
        self._unproven: Counter[bytes] = Counter()
        self._tasks: list[asyncio.Task[None]] = []
        self._warned_at = -WARNING_S

    def __repr__(self) -> str:
        """Show the peers."""
        return f"<PeerLinks {list(self._links.values())}>"

    @property
    def interval_s(self) -> float:
        """Return the heartbeat interval in seconds."""
        return self.heartbeat.interval_ms / 1000

    def start(self, listener: PeerListener) -> None:
        """Serve on the running loop, and notify the listener."""
        self.listener = listener
        self._router.start(self.loop, self._received, self._spoken_on, self._ended)
        self._tasks = [
            self.loop.create_task(self._every(self.interval_s, self._beat), name="heartbeats"),
            self.loop.create_task(self._every(TIDY_S, self._tidy), name="unused links"),
        ]
        if self._curve is not None and self.keys is not None:
            self._curve.start(self._received, self._spoken_on, self._ended)
            self._tasks.append(self.loop.create_task(self._follow_keys(self.keys, self._curve), name="keys of nodes"))

    def close(self) -> None:
        """Close all connections and stop listening; the last messages have LINGER_MS to leave. Idempotent."""
        for task in self._tasks:
            task.cancel()
        for link in self._links.values():
            link.close(LINGER_MS)
        self._links.clear()
        self.context.term()  # before our ROUTER closes, which peers take for our end
        self._router.close()
        if self._curve is not None:
            self._curve.close()

    @property
    def is_listening(self) -> bool:
        """Return whether other daemons can connect."""
        return self._router.is_listening

    @property
    def peers_prove(self) -> Literal["", "key", "nothing"]:
        """Return what daemons of other hosts prove who they are by; empty where none can connect."""
        listen = self.addresses.get(TCP)
        if listen is None:
            return ""
        return "key" if self.keys is not None else "" if is_loopback(listen) else "nothing"

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
        if self.keys is not None and scheme(address) == TCP and not self.keys.keys_of(address):
            raise InvalidFieldError(
                f"{address}: no key of a node is allowed for this address",
                field=field,
                remedy="there: kvferry keys show --public, here: kvferry keys allow; or correct the address",
            )

    def keys_for(self, address: str) -> LinkKeys | None:
        """Return what a connection to an address is to be made with; None without keys."""
        return next(iter(self.choices_of_keys(address)), None)

    def choices_of_keys(self, address: str) -> list[LinkKeys]:
        """Return what a connection to an address may be made with, the best first."""
        if self.keys is None or scheme(address) != TCP:
            return []
        return [LinkKeys(own, their) for own in self.keys.own for their in self.keys.keys_of(address)]

    async def last_words(self, link: PeerLink) -> None:
        """Wait until what a peer said before its end has come: libzmq reads it by a thread of its own."""
        if self._curve is not None:
            await self._curve.until_ended(link.heard_on, LAST_WORDS_S)

    async def _follow_keys(self, keys: KeyRing, curve: CurveListener) -> None:
        """Follow changes of the files of keys."""
        retire_at = 0.0
        while True:
            await asyncio.sleep(KEYS_S)
            with self.going_on():
                now = time.monotonic()
                if await keys.reread():
                    retire_at = now + RETIRING_S
                    curve.update()
                    for link in list(self._links.values()):
                        with self.going_on(link.address):
                            self._check_keys(keys, link)
                curve.retire(at_once=now >= retire_at)

    def _check_keys(self, keys: KeyRing, link: PeerLink) -> None:
        """Cut a link off whose peer has proved itself by a key that is not allowed any more; let others follow."""
        used = [key for key in (link.keys and link.keys.their, link.heard_key) if key is not None]
        if all(keys.node_of(key.public) == key for key in used):
            link.follow_keys(time.monotonic())
        else:
            self._replace(link, "its key was revoked")

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
            if len(self._links) >= self._max_links and not (self._drop_guest() or self._drop_one()):
                raise InvalidFieldError(f"{address}: {len(self._links)} other daemons are known already", field=field)
            link = self._links[address] = PeerLink(self, address, field, None)
        link.guest_of = None
        link.used_at = time.monotonic()
        return link.peer

    def send(self, peer: Incarnation, body: PeerBody, ids: Sequence[PageIds] = ()) -> bool:
        """Send a message to an incarnation; return False, with nothing sent, where it is gone.

        Raises:
            TooLargeError: one of the two daemons does not take so large a message.
        """
        link = self._links.get(peer.address)
        if link is None or link.peer != peer:
            self.counters.add("peers.unsent")
            return False
        self.say(link, body, ids)
        return True

    def say(self, link: PeerLink, body: PeerBody, ids: Sequence[PageIds] = (), *, at_once: bool = False) -> None:
        """Send a message to a peer that is up; ``at_once``: see ``PeerLink.put``.

        Raises:
            TooLargeError: one of the two daemons does not take so large a message.
        """
        own, terms = self.own_address(link.address), link.terms
        frames = encode_peer(PeerEnvelope(own, link.key, link.peer_key, body), ids)
        largest, size = max(map(_frame_bytes, frames)), _size_bytes(frames)
        if largest > terms.max_frame_bytes or size > terms.max_message_bytes:
            raise TooLargeError(
                f"{size} bytes, one frame with {largest}, are too many for {link.address}: both daemons take frames of "
                f"{terms.max_frame_bytes} and messages of {terms.max_message_bytes} bytes",
                field="limits.max_frame_bytes",
                remedy="send smaller chunks, or give both daemons the same, larger limits.max_frame_bytes",
            )
        link.put(frames, at_once=at_once)

    def terms_with(self, peer: Incarnation) -> Terms:
        """Return what this daemon and an incarnation that is up can take; of one that is gone, what this one can."""
        link = self._links.get(peer.address)
        return self.terms if link is None else link.terms

    def own_address(self, address: str) -> str:
        """Return the address by which the peer at ``address`` reaches this daemon."""
        return self.addresses[scheme(address)]

    def up(self) -> list[Incarnation]:
        """Return all peers that can be sent to."""
        return [link.peer for link in self._links.values() if link.peer is not None]

    def status(self) -> tuple[LinkStatus, ...]:
        """Return each link as STATUS shows it."""
        now = time.monotonic()
        return tuple(link.status(now) for link in self._links.values())

    def hello(self, link: PeerLink) -> Frames:
        """Return the frames of our PEER_HELLO for a link, with the last key that was named for its address."""
        body = PeerHello(
            boot_id=self.boot_id,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            dialled=link.address,
            max_frame_bytes=self.terms.max_frame_bytes,
            max_message_bytes=self.terms.max_message_bytes,
            bounce_buffer_bytes=self.terms.bounce_buffer_bytes,
        )
        return encode_peer(PeerEnvelope(self.own_address(link.address), link.key, link.claimed_key, body))

    def _spoken_on(self) -> set[bytes]:
        """Return the connections on which peers that are up have spoken: no unauthenticated one takes their places."""
        return {link.heard_on for link in self._links.values() if link.peer is not None}

    def _ended(self, connection: bytes) -> None:
        """Process that a connection to this daemon has ended: who spoke on it cannot be heard any more."""
        self._unproven.pop(connection, None)
        for link in list(self._links.values()):
            if link.left == connection:
                link.left = b""
            if link.heard_on == connection and link.peer is not None:
                with self.going_on(link.address):
                    link.begin_anew("its connection to this daemon has ended, or was silent")

    @contextlib.contextmanager
    def going_on(self, address: str = "") -> Iterator[None]:
        """Let an error end nothing but this."""
        try:
            yield
        except Exception as error:
            self.counters.add("peers.failed")
            log.exception("a link failed", cause=str(error), peer=address)

    async def _every(self, interval_s: float, call: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(interval_s)
            with self.going_on():
                call()

    def _received(self, message: ReceivedMessage, key: NodeKey | None = None) -> None:
        self.counters.add("peers.received")
        head = None
        try:
            head = decode_peer_head(message.frames[0] if message.frames else b"")
            self._check_speaker(head, key)
            self._process(head, message, key)
        except KvferryError as error:
            self._dropped(error, head, message, key)
        except Exception as error:  # a bug must not end the loop
            self.counters.add("peers.failed")
            log.exception("a peer's message failed", cause=str(error), peer=head.address if head else "")

    def _check_speaker(self, head: PeerHead, key: NodeKey | None) -> None:
        """Check that whoever has proved to be a node speaks for that one, and who has not for none.

        Raises:
            AccessDeniedError: it speaks for another one.
        """
        if key is not None and head.address != key.address:
            raise AccessDeniedError(f"{key.name} speaks for {head.address}, and its key is for {key.address}")
        if key is None and self.keys is not None and scheme(head.address) == TCP:
            raise AccessDeniedError(f"who speaks for {head.address} has not proved its key")

    def _dropped(
        self,
        error: KvferryError,
        head: PeerHead | None,
        message: ReceivedMessage,
        key: NodeKey | None,
        body: PeerBody | None = None,
    ) -> None:
        """Count that a message was dropped, and log it; of many in a short time only the first."""
        self.counters.add("peers.malformed")
        now = time.monotonic()
        if now - self._warned_at >= WARNING_S:
            self._warned_at = now
            peer, origin = head.address if head else "", self._origin_of(message, key)
            request_id = body.request_id if body else ""
            log.warning(
                "a peer's message was dropped", cause=str(error), peer=peer, origin=origin, request_id=request_id
            )

    def _origin_of(self, message: ReceivedMessage, key: NodeKey | None) -> object:
        """Return whose a message is: a node's name, a user's number, or the address of a host."""
        return self._router.origin_of(message.identity) if key is None else key.name

    def _process(self, head: PeerHead, message: ReceivedMessage, key: NodeKey | None) -> None:
        link = self.by_key.get(head.to_key)
        if link is None or link.address != head.address:
            self._count_unproven(message.identity)
            self._hint(head, self._origin_of(message, key))
            return
        if message.too_large:
            raise MalformedError(f"a message of more than {self.limits.max_message_bytes} bytes")
        incoming = decode_peer_body(head, message.frames[1:])
        body = incoming.envelope.body
        if isinstance(body, PeerHello):
            link.heard(message.identity, key)
            self._warn_of_names(body, link)
            link.greeted(head.key, body)
            return
        if link.peer is None or link.peer_key != head.key:  # late, by an earlier connection
            self.counters.add("peers.stale")
            link.hinted(head.key)
            return
        link.heard(message.identity, key)
        if isinstance(body, PeerHeartbeat):
            link.heartbeat(body)
        elif self.listener is not None:
            try:
                self.listener.on_message(link.peer, body, incoming.ids)
            except KvferryError as error:
                self._dropped(error, head, message, key, body)

    def _count_unproven(self, connection: bytes) -> None:
        self.counters.add("peers.unproven")
        self._unproven[connection] += 1
        if self._unproven[connection] > MAX_UNPROVEN:
            self.counters.add("peers.closed")
            self._router.end(connection)

    def _hint(self, head: PeerHead, origin: object) -> None:
        """Greet the address that a message names, as it does not prove who has sent it. Nothing else is read of it.

        Raises:
            InvalidFieldError: no daemon can be at that address.
        """
        is_local = not isinstance(origin, str)  # a user of this host, not the address of another one
        if (scheme(head.address) == IPC) != is_local or self.is_own(head.address):
            raise MalformedError(f"{head.address} cannot be who speaks on this socket")
        link = self._links.get(head.address)
        if link is None:
            self.check_reachable(head.address, "address")
            guests = [one.guest_of for one in self._links.values() if one.guest_of is not None]
            full = len(guests) >= MAX_GUESTS or guests.count(origin) >= GUESTS_PER_HOST
            if full or (len(self._links) >= self._max_links and not self._drop_one()):
                self.counters.add("peers.guests_refused")
                return
            link = self._links[head.address] = PeerLink(self, head.address, "address", origin)
        link.hinted(head.key)

    def _warn_of_names(self, hello: PeerHello, link: PeerLink) -> None:
        if not self.is_own(hello.dialled):
            log.warning(
                "a peer connected by an address that is not this daemon's own", name=hello.dialled, peer=link.address
            )

    def overflowed(self, link: PeerLink) -> None:
        """Replace a link whose peer reads too slowly."""
        if self._links.get(link.address) is not link:
            return
        self.counters.add("peers.overflowed")
        self._replace(link, f"it read too slowly: {link.waiting} messages were waiting")

    def _replace(self, link: PeerLink, why: str) -> None:
        """Cut a link off, and connect anew."""
        del self._links[link.address]
        link.close()
        link.cut_off(why)
        try:
            self.connect(link.address)
        except (InvalidFieldError, OverloadedError) as error:
            log.warning("a peer was not connected to again", cause=str(error))

    def drain_received(self) -> None:
        """Process the messages that peers have sent by now."""
        self._router.drain_received()
        if self._curve is not None:
            self._curve.drain_received()

    def _beat(self) -> None:
        now = time.monotonic()
        for link in list(self._links.values()):
            link.beat(now)
        patience_s = self.heartbeat.timeout_ms / 1000
        for link in [one for one in self._links.values() if one.guest_of is not None]:
            if link.quiet_s(now) > patience_s:
                self._drop(link)

    def _tidy(self) -> None:
        while self._drop_one(QUIET_S):
            pass

    def _drop_guest(self) -> bool:
        """Drop a link that only an unauthenticated peer has asked for; return whether there was one."""
        guest = next((link for link in self._links.values() if link.guest_of is not None), None)
        if guest is not None:
            self._drop(guest)
        return guest is not None

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
            self._drop(link)
            return True
        return False

    def _drop(self, link: PeerLink) -> None:
        self._links.pop(link.address).close()
        self.counters.add("peers.dropped")


def _frame_bytes(frame: bytes | memoryview) -> int:
    return memoryview(frame).nbytes


def _size_bytes(frames: Frames) -> int:
    return sum(map(_frame_bytes, frames))

"""One connection to another daemon: its greeting, heartbeats, what waits to be sent, and its keys. See ``links``."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, Protocol

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.transfer.endpoints import Incarnation
from kvferry.protocol.addresses import IPC, TCP, is_v6, scheme
from kvferry.protocol.codec import Frames, PageIds
from kvferry.protocol.errors import (
    InvalidFieldError,
    KvferryError,
    OverloadedError,
)
from kvferry.protocol.ids import new_key
from kvferry.protocol.limits import Limits, agree
from kvferry.protocol.node_keys import NodeKey
from kvferry.protocol.peer_messages import (
    PeerBody,
    PeerHeartbeat,
    PeerHello,
)

GREETING_S = 0.1
"""How often an address is greeted at most because of messages that prove nothing."""
SILENCE_S = 10.0
"""A connected peer whose daemon answers no heartbeat is lost after three times ``timeout_ms``, but not before this: a
daemon may be busy for seconds, with the first pool on a device say, and its transfers go on."""
RECONNECT_MS = 100
RECONNECT_MAX_MS = 500
TTL_STEP_MS = 100
MAX_TTL_STEPS = 655
"""libzmq keeps milliseconds in 16 bits: at most 65.5 s, which is longer than any interval."""
ANSWER_BYTES = 4096
"""The most that libzmq takes at a time on a connection by which this daemon speaks: a peer has nothing to say there but
what belongs to the connection."""
QUEUED_MESSAGES = 1000
"""libzmq's send queue per connection; further messages wait in the outbox."""
WAITING_MESSAGES = 65_536
WAITING_BYTES = 256 << 20
RENEWAL_S = 10.0
"""How long a link may take to move to a connection with other keys, and when it tries that again."""
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


class LinkOwner(Protocol):
    """What a link needs of all links together; see ``PeerLinks``."""

    limits: Limits
    terms: Terms
    counters: Counters
    heartbeat: Heartbeat
    loop: asyncio.AbstractEventLoop
    context: zmq.asyncio.Context
    listener: PeerListener | None
    by_key: dict[str, PeerLink]

    @property
    def interval_s(self) -> float:
        """Return the time from one heartbeat to the next."""

    def hello(self, link: PeerLink) -> Frames:
        """Return the greeting."""

    def say(self, link: PeerLink, body: PeerBody, ids: Sequence[PageIds] = (), *, at_once: bool = False) -> None:
        """Send a message to a peer that is up."""

    def keys_for(self, address: str) -> LinkKeys | None:
        """Return what a connection to an address is to be made with."""

    def choices_of_keys(self, address: str) -> list[LinkKeys]:
        """Return what a connection to an address may be made with, the best first."""

    async def last_words(self, link: PeerLink) -> None:
        """Wait until what a peer said before its end has come."""

    def drain_received(self) -> None:
        """Process the messages that peers have sent by now."""

    def going_on(self, address: str = "") -> contextlib.AbstractContextManager[None]:
        """Let an exception end only what is within."""

    def overflowed(self, link: PeerLink) -> None:
        """Cut a peer off that reads too slowly."""

    def spoke(self, link: PeerLink) -> None:
        """Cut a peer off that has spoken on a link."""


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
        named_by: the tenants whose transfers have named this address.
        heard_on: the connection on which the peer last spoke.
        heard_key: the key with which it did; None without keys.
        left: the connection on which it spoke before that one: a late answer on it does not mean that it has returned.
        keys: what our connection is made with; None without keys.
        terms: what both sides can take, while the peer is up.
    """

    def __init__(self, owner: LinkOwner, address: str, field: str, guest_of: object) -> None:
        """Start connecting.

        Raises:
            InvalidFieldError: libzmq refuses the address.
            OverloadedError: no descriptor, or no memory, is left for it.
        """
        self.address = address
        self.used_at = time.monotonic()
        self.guest_of = guest_of
        self.named_by: set[int] = set()
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
        self._listening: set[asyncio.Task[None]] = set()
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

    @property
    def is_proven(self) -> bool:
        """Return whether the peer is up, and no engine in its place: it has a node's key, or a trusted folder."""
        return self.peer is not None and (self.keys is not None or scheme(self.address) == IPC)

    @property
    def is_public(self) -> bool:
        """Return whether more than some tenants' transfers speak for a daemon there: it has answered or called here."""
        return self._was_up or not self.named_by

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
        self._outbox_bytes += size_bytes(frames)
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
        self._socket.get(zmq.EVENTS)  # wakes who polls: of what came while a message was sent, libzmq tells the sender
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
        for listening in self._listening:
            listening.cancel()
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
                (zmq.RCVHWM, 0),  # see _listen_for_nothing
                (zmq.MAXMSGSIZE, ANSWER_BYTES),
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
        listening = self._owner.loop.create_task(self._listen_for_nothing(dealer), name=f"silence of {self.address}")
        self._listening.add(listening)
        listening.add_done_callback(self._listening.discard)
        return dealer, monitor

    async def _listen_for_nothing(self, dealer: zmq.asyncio.Socket) -> None:
        """Have this link dropped where the peer says something here: it has a connection of its own for that.

        libzmq (4.3.5) would end the process once such messages wait, the peer hangs up, and libzmq's own heartbeat is
        due; so they must not wait, however many there are.
        """
        await dealer.poll()
        self._owner.spoke(self)

    def _flush(self) -> None:
        """Send what libzmq takes; the rest as soon as it takes more."""
        try:
            while self._outbox:
                self._at_once.send_multipart(self._outbox[0], NOBLOCK)
                self._outbox_bytes -= size_bytes(self._outbox.popleft())
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


def frame_bytes(frame: bytes | memoryview) -> int:
    """Return the size of a frame."""
    return memoryview(frame).nbytes


def size_bytes(frames: Frames) -> int:
    """Return the size of a message."""
    return sum(map(frame_bytes, frames))

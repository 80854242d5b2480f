"""Where daemons of other hosts connect, with keys: libzmq's CURVE. Knows nothing of links.

One socket for each key of this node, all at one address: two while a key is replaced, as the old one's connections go
on. The kernel gives each new connection to either of them, so a peer tries again until it reaches the one whose key it
asks for. They are DEALERs that only receive: a ROUTER would let a peer choose its routing id, and libzmq ends the
process where one of them is the id that it would make up next.

Who connects is asked by libzmq over ZAP, and answered here, from the allow-list of the moment. pyzmq's authenticator is
not used: it tells its callback the key alone and not the address, and its task ends with the first error.

libzmq accepts without a bound. Of connections that no peer has proved to be its own, only so many stay open: beyond
that the oldest is shut down, by the descriptor that libzmq's monitor names. If that number is another connection's by
now, that one is lost too, and made anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

import structlog
import zmq
import zmq.asyncio
from zmq.utils import z85

from kvferry.daemon.control.control_socket import listening_on
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.zmtp import ReceivedMessage
from kvferry.daemon.peers.key_ring import KeyRing
from kvferry.protocol.addresses import is_v6
from kvferry.protocol.limits import Limits
from kvferry.protocol.node_keys import NodeKey

MAX_UNPROVEN_CONNECTIONS: Final = 128
DRAIN_BOUND: Final = 32
"""Messages handled in a row, before others have their turn."""

DRAIN_RECEIVED_BOUND: Final = 16
"""Turns in a row, before something that happened later is handled."""

WAITING_MESSAGES: Final = 64
"""Of one connection, before it is read no further."""

REFUSAL_S: Final = 60.0
MAX_REFUSALS: Final = 256
"""How often a refused key at an address is logged at most, and how many of them are told apart."""

DOMAIN: Final = b"peers"
_ZAP: Final = "inproc://zeromq.zap.01"
_EVENT: Final = struct.Struct("=hi")
_EVENTS: Final = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
log = structlog.get_logger(__name__)
OnMessage = Callable[[ReceivedMessage, NodeKey], None]


class _Socket(NamedTuple):
    """A key's socket, its listening socket, and its monitor."""

    key: NodeKey
    number: int
    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    listening: socket.socket

    def identity(self, descriptor: int) -> bytes:
        return b"curve %d %d" % (self.number, descriptor)


class CurveListener:
    """Binds on construction; serves between ``start`` and ``close``.

    Attributes:
        endpoint: where it listens.
    """

    def __init__(
        self, listen: str, keys: KeyRing, limits: Limits, counters: Counters, timeout_ms: int, most: int
    ) -> None:
        """Listen with each of this node's keys; a handshake may take ``timeout_ms``.

        At most ``most`` connections are kept on which no peer that is up speaks, nor MAX_UNPROVEN_CONNECTIONS.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        self.endpoint = listen
        self._keys = keys
        self._limits = limits
        self._counters = counters
        self._timeout_ms = timeout_ms
        self._most = min(most, MAX_UNPROVEN_CONNECTIONS)
        self._on_message: OnMessage | None = None
        self._on_end: Callable[[bytes], None] | None = None
        self._spared: Callable[[], Collection[bytes]] = tuple
        self._loop = asyncio.get_running_loop()
        self._sockets: list[_Socket] = []
        self._made = 0
        self._connections: dict[bytes, str] = {}
        """Those that are open, the oldest first, by the public key that has spoken on it, or an empty text."""
        self._ended = asyncio.Event()
        self._refused: dict[tuple[str, str], float] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zap = zmq.asyncio.Context.shadow(self._context.underlying).socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._answering: asyncio.Task[None] | None = None
        try:
            self._listen()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        """Show the address and how many are connected."""
        return f"<CurveListener {self.endpoint} connections={len(self._connections)}>"

    def start(
        self,
        on_message: OnMessage,
        spared: Callable[[], Collection[bytes]],
        on_end: Callable[[bytes], None],
    ) -> None:
        """Serve: each message of an allowed node goes to ``on_message``, with the key that proves whose it is.

        ``spared`` returns the connections that are never closed for others; ``on_end`` is told each that has ended.
        """
        self._on_message, self._spared, self._on_end = on_message, spared, on_end
        self._answering = self._loop.create_task(self._answer(), name="keys of peers")
        for one in self._sockets:
            self._serve(one)

    def close(self) -> None:
        """Stop listening, and close all connections. Idempotent."""
        if self._answering is not None:
            self._answering.cancel()
        for one in self._sockets:
            self._close(one)
        self._sockets.clear()
        self._zap.close(0)
        self._context.term()

    def update(self) -> None:
        """Follow the keys: listen with those of this node, and shut down connections of nodes that have none now."""
        self._listen()
        for identity, public in list(self._connections.items()):
            if public and self._keys.node_of(public) is None:
                self._shut(identity)

    def retire(self, *, at_once: bool) -> None:
        """Stop listening with keys that are this node's no more, once no peer speaks on a connection made with them.

        With ``at_once``, who still does is cut off.
        """
        own, spared = set(self._keys.own), set(self._spared())
        for one in [one for one in self._sockets if one.key not in own]:
            connections = self._identities(one)
            if at_once or spared.isdisjoint(connections):
                log.info("a key of this node has ended", key=one.key.short, cut_off=len(spared & set(connections)))
                self._sockets.remove(one)
                self._close(one)
                for identity in connections:
                    self._over(identity)

    async def until_ended(self, identity: bytes, patience_s: float) -> None:
        """Wait until a connection has ended and all that was received on it is handled."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while identity in self._connections:
                    self._ended.clear()
                    await self._ended.wait()

    def drain_received(self) -> None:
        """Handle what has been received by now."""
        for one in self._sockets:
            self._drain_received(one)

    # -- sockets

    def _listen(self) -> None:
        known = {one.key for one in self._sockets}
        for key in self._keys.own:
            if key not in known:
                self._sockets.append(self._open(key))
                if self._on_message is not None:
                    self._serve(self._sockets[-1])

    def _open(self, key: NodeKey) -> _Socket:
        for one in self._sockets:
            one.listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with contextlib.ExitStack() as unless_open:
            listening = listening_on(self.endpoint, "peers.listen", shared=bool(self._sockets))
            unless_open.callback(listening.close)
            self.endpoint = f"{self.endpoint.rpartition(':')[0]}:{listening.getsockname()[1]}"
            dealer = self._context.socket(zmq.DEALER)
            unless_open.callback(dealer.close, 0)
            for option, value in (
                (zmq.CURVE_SERVER, 1),
                (zmq.CURVE_SECRETKEY, key.secret.encode()),
                (zmq.ZAP_DOMAIN, DOMAIN),
                (zmq.LINGER, 0),
                (zmq.SNDHWM, 1),  # nothing is ever sent here
                (zmq.RCVHWM, WAITING_MESSAGES),
                (zmq.MAXMSGSIZE, self._limits.max_frame_bytes),
                (zmq.IPV6, int(is_v6(self.endpoint))),
                (zmq.HANDSHAKE_IVL, self._timeout_ms),
                (zmq.USE_FD, os.dup(listening.fileno())),
            ):
                dealer.setsockopt(option, value)
            monitor = dealer.get_monitor_socket(_EVENTS)
            unless_open.callback(monitor.close, 0)
            unless_open.callback(dealer.disable_monitor)
            dealer.bind(self.endpoint)
            unless_open.pop_all()
        self._made += 1
        return _Socket(key, self._made, dealer, monitor, listening)

    def _serve(self, one: _Socket) -> None:
        self._loop.add_reader(one.dealer.FD, self._receive, one)
        self._loop.add_reader(one.monitor.FD, self._watch, one)
        self._receive(one)
        self._watch(one)

    def _close(self, one: _Socket) -> None:
        if self._on_message is not None:
            self._loop.remove_reader(one.dealer.FD)
            self._loop.remove_reader(one.monitor.FD)
        one.dealer.disable_monitor()
        one.dealer.close(0)
        one.monitor.close(0)
        one.listening.close()

    def _identities(self, one: _Socket) -> list[bytes]:
        prefix = one.identity(0)[:-1]
        return [identity for identity in self._connections if identity.startswith(prefix)]

    # -- messages

    def _receive(self, one: _Socket) -> None:
        """Handle some of the messages; libzmq tells of further ones only once none is left."""
        if not one.dealer.closed and not self._drain(one):
            self._loop.call_soon(self._receive, one)

    def _drain(self, one: _Socket) -> bool:
        """Handle what has been received by now, some messages at most; return whether none is left."""
        for _ in range(DRAIN_BOUND):
            try:
                frames = one.dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            first = frames[0]
            public, identity = str(first.get("User-Id")), one.identity(int(first.get(zmq.SRCFD)))
            node = self._keys.node_of(public)
            if node is None:
                self._counters.add("peers.revoked")
                continue
            if identity in self._connections:
                self._connections[identity] = public
            data = [frame.bytes for frame in frames]
            too_large = sum(map(len, data)) > self._limits.max_message_bytes
            if self._on_message is not None:
                self._on_message(ReceivedMessage(identity, data[:1] if too_large else data, too_large), node)
        return False

    # -- connections

    def _watch(self, one: _Socket) -> None:
        """Follow what libzmq reports of connections.

        A descriptor may be the next connection's before the end of the last one is handled, and that may have spoken
        already: libzmq reports it before it speaks, so that it is among the reports by then.
        """
        reports = _reports(one)
        while reports:
            self._drain_received(one)  # what came before an end
            later = _reports(one)
            for number, (kind, descriptor) in enumerate(reports):
                identity = one.identity(descriptor)
                if kind == zmq.EVENT_ACCEPTED:
                    self._connections.pop(identity, None)  # to its end
                    self._connections[identity] = ""
                    self._make_room()
                elif kind == zmq.EVENT_DISCONNECTED:
                    is_next_there = (int(zmq.EVENT_ACCEPTED), descriptor) in [*reports[number + 1 :], *later]
                    self._over(identity, tell=not is_next_there)
                else:  # it does not speak CURVE, say, or with another key of this node
                    self._counters.add("peers.handshakes_failed")
            reports = later

    def _drain_received(self, one: _Socket) -> None:
        if not any(self._drain(one) for _ in range(DRAIN_RECEIVED_BOUND)):
            self._loop.call_soon(self._receive, one)

    def _over(self, identity: bytes, *, tell: bool = True) -> None:
        if self._connections.pop(identity, None) is not None:
            self._ended.set()
            if tell and self._on_end is not None:
                self._on_end(identity)

    def _make_room(self) -> None:
        spared = set(self._spared())
        unproven = [identity for identity in self._connections if identity not in spared]
        for identity in unproven[: max(0, len(unproven) - self._most)]:
            self._counters.add("connections.closed.for_others")
            self._shut(identity)

    def _shut(self, identity: bytes) -> None:
        """Shut a connection down, which libzmq then closes, unless its descriptor is no connection to here by now."""
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=os.dup(int(identity.rpartition(b" ")[2])))
            with contextlib.closing(connection):
                if connection.getsockname()[1] == int(self.endpoint.rpartition(":")[2]):
                    connection.shutdown(socket.SHUT_RDWR)
        self._connections.pop(identity, None)

    # -- who may connect

    async def _answer(self) -> None:
        """Answer libzmq's questions whether a key may connect: https://rfc.zeromq.org/spec/27."""
        while True:
            version, request, _, address, _, mechanism, *credentials = await self._zap.recv_multipart()
            allowed, public = False, ""
            if mechanism == b"CURVE" and credentials:
                public = z85.encode(credentials[0]).decode()
                allowed = self._keys.node_of(public) is not None
            if not allowed:
                self._refuse(public, address.decode("ascii", "replace"))
            answer = (b"200", b"OK", public.encode()) if allowed else (b"400", b"this key is not allowed here", b"")
            await self._zap.send_multipart([version, request, *answer, b""])

    def _refuse(self, public: str, address: str) -> None:
        self._counters.add("peers.refused")
        now = time.monotonic()
        for known, at in list(self._refused.items()):
            if now - at < REFUSAL_S:
                break
            del self._refused[known]
        if (public, address) not in self._refused and len(self._refused) < MAX_REFUSALS:
            self._refused[public, address] = now
            log.warning("a node was refused: its key is not allowed", key=public, address=address)


def _reports(one: _Socket) -> list[tuple[int, int]]:
    """Return the kinds and descriptors that libzmq has reported by now."""
    found: list[tuple[int, int]] = []
    while not one.monitor.closed:
        try:
            event, _ = one.monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            break
        found.append(_EVENT.unpack(event))
    return found

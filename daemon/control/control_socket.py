"""The control socket: listens as a ZeroMQ ROUTER, drained fairly on the control loop. Frames are not interpreted here.

What connects is accepted by the control loop itself, one after another and never more than the bound: see ``zmtp`` for
why it is not libzmq that listens. At the bound a new connection takes the place of the one that was heard least
recently, of the tenant (or, over TCP, the host) that has most of them; those of live sessions are spared. So silent
unauthenticated connections neither keep others out nor cost an idle engine its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

import structlog

from kvferry.daemon.control.kept_bytes import ConnectionBytes
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.zmtp import IncomingStream, ReceivedMessage, encoded
from kvferry.daemon.process.access import BACKLOG, Listener
from kvferry.daemon.process.tenants import Tenants
from kvferry.protocol.addresses import is_v6
from kvferry.protocol.errors import ConfigError, KvferryError
from kvferry.protocol.limits import Limits

DRAIN_BOUND: Final = 32
"""Messages of one connection handled in a row before others have their turn."""

DRAIN_RECEIVED_BOUND: Final = 16
"""Turns of a connection in a row, in ``drain``."""

ACCEPT_BOUND: Final = 64
"""Connections accepted in a row."""

MAX_CONNECTIONS: Final = 1024
"""Besides those of sessions."""

ROOM_PART: Final = 16
"""A flood evicts a 16th of the largest origin's connections at once: choosing one for each new one is slow."""

ACCEPT_PAUSE_S: Final = 1.0
HANDSHAKE_S: Final = 10.0
"""A connection that has not said by then that it is a ZeroMQ client is closed; one that has may be idle."""

SWEEP_S: Final = 1.0
"""How often every connection is read. libuv reports a socket's error once and watches it no more, so a connection that
was reset with bytes unread would stay as it is for ever once they are read."""

LAST_WORDS_S: Final = 0.1
RECEIVE_BYTES: Final = 1 << 18
SENT_AT_ONCE: Final = 64
TURN_S: Final = 0.001
"""A connection's messages are handled for so long in a row, or one of them; then others have their turn.

Connections that are no session's, and those whose last turn took longer, share as much in each turn of the loop. So an
engine waits for little of them, however many unauthenticated connections there are, and however long another's lists
are.
"""

FLUSH_BYTES: Final = 1 << 20
"""Replies to messages that came together leave together, up to so many bytes."""

PAUSE_BYTES: Final = 4 << 20
"""With so many bytes that its peer has not read, no more of a connection's messages are handled."""

log = structlog.get_logger(__name__)
OnMessage = Callable[[ReceivedMessage], None]


def _nobody() -> Collection[bytes]:
    return ()


class ControlSocket:
    """Binds on construction; serves between ``start`` and ``close``.

    Attributes:
        max_connections: how many connections may be open, besides those that ``spared`` names.
    """

    def __init__(
        self,
        listener: Listener,
        limits: Limits,
        counters: Counters,
        *,
        also: str | None = None,
        name: str = "control",
        max_connections: int = MAX_CONNECTIONS,
        kept: ConnectionBytes | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        """Take over a listening Unix socket and, if given, listen on the TCP address ``also``.

        ``name`` is its name in the log; ``kept`` counts what connections keep, of other sockets too; ``tenants`` are
        who may connect to the Unix socket.

        Raises:
            ConfigError: the TCP address cannot be listened on.
        """
        self.limits = limits
        self.counters = counters
        self.max_connections = max_connections
        self.max_queued = limits.max_requests_per_session + 2 * limits.max_transfers_per_session
        self.kept = kept or ConnectionBytes()
        self._tenants = tenants or Tenants()
        self.buffer = bytearray(RECEIVE_BYTES)
        self.on_message: OnMessage | None = None
        self._name = name
        self._spared: Callable[[], Collection[bytes]] = _nobody
        self._on_end: Callable[[bytes], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._numbers = itertools.count(1)
        self._connections: dict[bytes, _Connection] = {}
        self.kept.watch(self._connections.values)
        self._background: deque[_Connection] = deque()
        self._paused: set[socket.socket] = set()
        self._listeners = [listener.socket]
        self.endpoint = f"ipc://{listener.path}"
        """The address bound last: the TCP address with its port, if there is one."""
        if also:
            try:
                self._listeners.append(listening_on(also, "peers.listen"))
            except ConfigError:
                self._listeners[0].close()
                raise
            self.endpoint = f"{also.rpartition(':')[0]}:{self._listeners[1].getsockname()[1]}"

    def __repr__(self) -> str:
        """Show how many connections there are."""
        return f"<ControlSocket {self.endpoint} connections={len(self._connections)}>"

    def __len__(self) -> int:
        """Return how many connections are open."""
        return len(self._connections)

    @property
    def is_listening(self) -> bool:
        """Return whether it accepts connections: not where the process has no descriptor left."""
        return self._loop is not None and not self._paused

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: OnMessage,
        spared: Callable[[], Collection[bytes]] = _nobody,
        on_end: Callable[[bytes], None] | None = None,
    ) -> None:
        """Serve on this loop: each message goes to ``on_message``.

        ``spared`` returns the identities whose connections are never closed for others; ``on_end`` is told, on its own
        turn of the loop, the identity of each connection that has ended, after all of its messages.
        """
        self._loop = loop
        self.on_message = on_message
        self._spared = spared
        self._on_end = on_end
        for listener in self._listeners:
            loop.add_reader(listener, self._accept, listener)
        self._sweeping = loop.call_later(SWEEP_S, self._sweep)

    def close(self) -> None:
        """Stop serving; queued replies have ``LAST_WORDS_S`` to leave. Closing twice does nothing."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._loop is not None:
            for listener in self._listeners:
                self._loop.remove_reader(listener)
        for listener in self._listeners:
            listener.close()
        ends_at = time.monotonic() + LAST_WORDS_S
        for connection in list(self._connections.values()):
            connection.finish(ends_at)
            connection.close()
        self._loop = None

    def send(self, identity: bytes, frames: Sequence[bytes | memoryview], *, more: bool = False) -> bool:
        """Queue a message; return False, with nothing queued, if the peer is gone or its queue is full.

        With ``more``, another one follows at once, and both leave together.
        """
        connection = self._connections.get(identity)
        if connection is None:
            self.counters.add("replies.peer_gone")
            return False
        return connection.put(encoded(frames), more=more)

    def origin_of(self, identity: bytes) -> object:
        """Return whose connection it is: a tenant or, over TCP, the address of a host; None where it is gone."""
        connection = self._connections.get(identity)
        return None if connection is None else connection.origin

    def end(self, identity: bytes) -> None:
        """Close a connection, if it is there."""
        connection = self._connections.get(identity)
        if connection is not None:
            connection.close()

    def drain_received(self) -> None:
        """Handle what has arrived by now on spared connections, before something that happened after it is handled."""
        for one in self._spared():
            self.drain(one)

    def drain(self, identity: bytes) -> None:
        """Handle what has arrived by now on one connection: an engine's last words count, which has ended since."""
        connection = self._connections.get(identity)
        for _ in range(DRAIN_RECEIVED_BOUND):
            if connection is None or not connection.take_turn():
                return

    def tenant_of(self, identity: bytes) -> int | None:
        """Return the tenant who made a connection; None over the network, or where it is gone."""
        connection = self._connections.get(identity)
        return connection.origin if connection is not None and isinstance(connection.origin, int) else None

    def forget(self, identity: bytes) -> None:
        """Remove a connection that was closed."""
        if self._connections.pop(identity, None) is not None and self._on_end is not None and self._loop is not None:
            self._loop.call_soon(self._on_end, identity)

    def is_of_session(self, identity: bytes) -> bool:
        """Return whether a session is answered there; always where nobody is spared: its connections are all alike."""
        return self._spared is _nobody or identity in self._spared()

    def in_background(self, connection: _Connection) -> None:
        """Give a connection its turn once those that wait already have had theirs."""
        self._background.append(connection)
        if len(self._background) == 1 and self._loop is not None:
            self._loop.call_soon(self._serve_background)

    def _serve_background(self) -> None:
        ends_at = time.perf_counter() + TURN_S
        try:
            for _ in range(len(self._background)):
                connection = self._background.popleft()
                connection.awaits_turn = False
                connection.take_turn()
                if time.perf_counter() >= ends_at:
                    break
        finally:  # no failure of one keeps the others from their turns
            if self._background and self._loop is not None:
                self._loop.call_soon(self._serve_background)

    def _sweep(self) -> None:
        if self._loop is not None:
            for connection in self._connections.values():
                connection.await_turn()
            self._sweeping = self._loop.call_later(SWEEP_S, self._sweep)

    def _accept(self, listener: socket.socket) -> None:
        ends_at = time.perf_counter() + TURN_S
        for _ in range(ACCEPT_BOUND):
            try:
                channel, address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as cause:
                self._pause(listener, cause)
                return
            if self._loop is None:
                channel.close()
                return
            self._make_room()
            identity = next(self._numbers).to_bytes(8)
            self._connections[identity] = _Connection(
                self, self._loop, channel, identity, self._origin(channel, address)
            )
            if time.perf_counter() >= ends_at:
                return

    def _origin(self, channel: socket.socket, address: object) -> object:
        """Return whose connection it is: a tenant, or the address of a host."""
        if channel.family == socket.AF_UNIX:
            return self._tenants.of(channel)
        with contextlib.suppress(OSError):  # the connection may have ended already
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return address[0] if isinstance(address, tuple) else address

    def _make_room(self) -> None:
        if len(self._connections) < self.max_connections:
            return
        spared = self._spared()
        unauthenticated = [one for one in self._connections.values() if one.identity not in spared]
        if len(unauthenticated) < self.max_connections:
            return
        counts = Counter(one.origin for one in unauthenticated)
        most = max(counts, key=counts.__getitem__)
        oldest = sorted([one for one in unauthenticated if one.origin == most], key=lambda one: one.heard_at)
        for one in oldest[: max(1, len(oldest) // ROOM_PART)]:
            self.counters.add("connections.closed.for_others")
            one.close()

    def _pause(self, listener: socket.socket, cause: OSError) -> None:
        """Out of descriptors: accept later, instead of retrying in a busy loop."""
        if self._loop is None or listener in self._paused:
            return
        log.warning("connections wait", socket=self._name, cause=cause.strerror, remedy="raise LimitNOFILE (ulimit -n)")
        self._paused.add(listener)
        self._loop.remove_reader(listener)
        self._loop.call_later(ACCEPT_PAUSE_S, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        self._paused.discard(listener)
        if self._loop is not None:
            self._loop.add_reader(listener, self._accept, listener)


class _Connection:
    """One connection, from its acceptance to its end."""

    def __init__(
        self,
        owner: ControlSocket,
        loop: asyncio.AbstractEventLoop,
        channel: socket.socket,
        identity: bytes,
        origin: object,
    ) -> None:
        self.identity = identity
        self.origin = origin
        self.accepted_at = self.heard_at = time.monotonic()
        self._owner = owner
        self._loop = loop
        self._channel = channel
        self._stream = IncomingStream(identity, owner.limits)
        self._held_bytes = self._counted_bytes = 0
        self._waiting: list[ReceivedMessage] = []
        self._out: deque[bytes | memoryview] = deque()
        self._queued_bytes = 0
        self._paused = False
        self._corked = False
        self._writing = False
        self._has_more = False
        self._more: asyncio.Handle | None = None
        self._is_of_session = False
        self._is_heavy = False
        self.awaits_turn = False
        self._closed = False
        self._silence_ms = 0
        self._looking: asyncio.Handle = loop.call_later(HANDSHAKE_S, self._look)
        channel.setblocking(False)  # noqa: FBT003  socket's own signature
        loop.add_reader(channel, self.read)

    @property
    def kept_bytes(self) -> int:
        return self._held_bytes + self._queued_bytes

    def close_for_others(self) -> None:
        is_held = self._held_bytes > self._queued_bytes
        self._owner.counters.add(f"connections.closed.{'held' if is_held else 'unread'}")
        self.close()

    def put(self, data: bytes, *, more: bool = False) -> bool:
        owner, size_bytes = self._owner, len(data)
        if len(self._out) >= owner.max_queued or self._queued_bytes > owner.limits.max_message_bytes:
            owner.counters.add("replies.queue_full")
            if not self._writing and not self._corked:  # what this one was to follow
                self._flush()
            return False
        self._out.append(data)
        self._queued_bytes += size_bytes
        if not self._writing and (not (self._corked or more) or self._queued_bytes > FLUSH_BYTES):
            self._flush()
        self._count()
        return not self._closed

    def read(self) -> None:
        """Handle what has arrived: now, or in the background."""
        if self._is_of_session and not self._is_heavy:
            self.take_turn()
        else:
            self.await_turn()

    def await_turn(self) -> None:
        """Handle what has arrived in the background."""
        if not self.awaits_turn and not self._closed:
            self.awaits_turn = True
            self._owner.in_background(self)

    def take_turn(self) -> bool:
        """Handle what has arrived, within a bound; return whether there may be more."""
        if self._closed or self._corked or self._paused:
            return False
        self._corked = True  # the replies to what came together leave together
        try:
            return (self._has_more or bool(self._waiting) or self._receive()) and self._handle()
        except Exception:  # no memory, say: what is lost of its messages is not known, so its client connects anew
            self.close()
            raise
        finally:
            self._corked = False
            if not self._writing and (self._out or self._stream.answers):
                self._flush()

    def close(self) -> None:
        """Close it, with what is queued. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        self._looking.cancel()
        if self._more is not None:
            self._more.cancel()
        if not self._paused:
            self._loop.remove_reader(self._channel)
        if self._writing:
            self._loop.remove_writer(self._channel)
        self._channel.close()
        self._out.clear()
        self._waiting = []
        self._held_bytes = self._queued_bytes = 0
        self._count()
        self._owner.forget(self.identity)

    def finish(self, ends_at: float) -> None:
        """Send what is queued, waiting until ``ends_at`` at most."""
        self._flush()
        while self._out and not self._closed:
            left_s = ends_at - time.monotonic()
            poll = select.poll()
            poll.register(self._channel, select.POLLOUT)
            if left_s <= 0 or not poll.poll(left_s * 1000):
                return
            self._flush()

    def _look(self) -> None:
        """Close the connection if it has been silent for too long; else look again when that could be."""
        if self._closed:
            return
        now, silence_s = time.monotonic(), self._silence_ms / 1000
        ends_at = self.heard_at + silence_s if silence_s else float("inf")
        if not self._stream.is_ready:
            ends_at = min(ends_at, self.accepted_at + HANDSHAKE_S)
        if ends_at <= now and (self._paused or self.awaits_turn or self._is_unread()):  # it is not it that is silent
            self._looking = self._loop.call_later(silence_s or HANDSHAKE_S, self._look)
        elif ends_at <= now:
            self._owner.counters.add("connections.closed.silent")
            self.close()
        elif ends_at < float("inf"):
            self._looking = self._loop.call_later(ends_at - now, self._look)

    def _is_unread(self) -> bool:
        """Return whether something has come that the loop, which may have been busy, has not read."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        return bool(poll.poll(0))

    def _receive(self) -> bool:
        """Read once; return whether there was anything."""
        buffer = self._owner.buffer
        try:
            size = self._channel.recv_into(buffer)
        except BlockingIOError:
            return False
        except OSError:
            size = 0
        if not size:
            self.close()
            return False
        self.heard_at = time.monotonic()
        self._stream.feed(bytes(memoryview(buffer)[:size]))
        return True

    def _handle(self) -> bool:
        """Handle messages, within a bound; return whether there may be more."""
        self._has_more = False
        try:
            messages = self._waiting or self._stream.take(DRAIN_BOUND)
        except KvferryError:
            self.close()
            return False
        if self._stream.silence_ms != self._silence_ms:
            self._silence_ms = self._stream.silence_ms
            self._looking.cancel()
            self._looking = self._loop.call_soon(self._look)
        handle, started, number = self._owner.on_message, time.perf_counter(), 0
        if messages and handle is not None:
            for number, message in enumerate(messages, 1):
                handle(message)
                if self._queued_bytes > PAUSE_BYTES:
                    self._pause(messages[number:])
                    return False
                if time.perf_counter() - started > TURN_S:
                    break
            self._is_of_session = self._is_of_session or self._owner.is_of_session(self.identity)
        self._is_heavy = time.perf_counter() - started > TURN_S
        self._keep(messages[number:])
        if (self._waiting or self._stream.has_more) and not self._closed:
            self._has_more = True
            self._more = self._loop.call_soon(self.read)
        return not self._closed

    def _pause(self, rest: list[ReceivedMessage]) -> None:
        """Read and handle no more until the peer has read: its next replies would wait here as well."""
        self._paused = True
        self._owner.counters.add("connections.paused")
        self._loop.remove_reader(self._channel)
        self._keep(rest)

    def _keep(self, waiting: list[ReceivedMessage]) -> None:
        """Keep the messages that wait; count them, and what is not complete."""
        if not self._closed:
            self._waiting = waiting
            self._held_bytes = self._stream.held_bytes + sum([one.size_bytes for one in waiting])
            self._count()

    def _resume(self) -> None:
        self._paused = False
        self._loop.add_reader(self._channel, self.read)
        self._has_more = True
        self._more = self._loop.call_soon(self.read)  # also what was taken from the stream, or is complete in it

    def _count(self) -> None:
        """Count what is kept, where that has changed."""
        more = self.kept_bytes - self._counted_bytes
        if more:
            self._counted_bytes += more
            self._owner.kept.changed(more)

    def _flush(self) -> None:
        """Send what the socket takes; the rest as soon as it takes more."""
        answers, out = self._stream.answers, self._out
        if self._closed:
            return
        if answers:
            out.append(bytes(answers))
            self._queued_bytes += len(answers)
            answers.clear()
        try:
            while out:
                sent = self._channel.sendmsg(list(itertools.islice(out, SENT_AT_ONCE)))
                self._queued_bytes -= sent
                _drop(out, sent)
        except BlockingIOError:
            pass
        except OSError:
            self._owner.counters.add("replies.peer_gone")
            self.close()
            return
        if bool(out) != self._writing:
            self._writing = bool(out)
            if out:
                self._loop.add_writer(self._channel, self._flush)
            else:
                self._loop.remove_writer(self._channel)
        self._count()
        if self._is_paused_no_more():
            self._resume()

    def _is_paused_no_more(self) -> bool:
        """Return whether its peer has read enough; not where it was closed meanwhile."""
        return self._paused and not self._closed and self._queued_bytes <= PAUSE_BYTES


def _drop(out: deque[bytes | memoryview], sent: int) -> None:
    """Remove the first ``sent`` bytes."""
    while sent:
        first = out.popleft()
        if len(first) > sent:
            out.appendleft(memoryview(first)[sent:])
            return
        sent -= len(first)


def listening_on(address: str, field: str, *, shared: bool = False) -> socket.socket:
    """Return a TCP socket that listens on a numeric address, which ``field`` of the configuration names.

    With ``shared`` another socket of this process that has SO_REUSEPORT may listen there too.

    Raises:
        ConfigError: it cannot be listened on.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    listener = socket.socket(socket.AF_INET6 if is_v6(address) else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
        listener.bind((host.strip("[]"), int(port)))
        listener.listen(BACKLOG)
        listener.setblocking(False)  # noqa: FBT003  socket's own signature
    except OSError as cause:
        listener.close()
        raise ConfigError(
            f"cannot listen on {address}: {cause.strerror}",
            field=field,
            retryable=True,  # the process that has the port may end, and the address may come up
            remedy="see who has the port (ss -ltanp), or name another port or address of this host",
        ) from cause
    return listener

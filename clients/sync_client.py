"""The synchronous client: for engine schedulers, which are loops that must never wait unasked.

``send`` and ``receive`` return at once; ``poll(0)`` takes what has arrived and says which transfers changed. The other
calls wait for their reply. One thread at a time; no threads of its own.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self

import zmq

from kvferry.clients.connection import Connection, given_back_with
from kvferry.clients.daemon_socket import LAST_WORDS_MS, open_control_socket
from kvferry.clients.exclusive_use import ExclusiveUse
from kvferry.clients.sync_requests import SyncRequests
from kvferry.protocol.client_core import Outgoing
from kvferry.protocol.errors import ClientClosedError, DaemonLostError, DeadlineError, MisuseError

NOBLOCK = int(zmq.NOBLOCK)  # an enum costs a microsecond at every use
CLOSED = "the client was closed while this call waited"


class Client(SyncRequests):
    """One session with the daemon of this node. Leaving it gives back everything that the session owns.

    One thread at a time: a call that comes while another thread's is under way raises ConcurrentUseError and sends
    nothing. It may be handed from one thread to another between two calls, and any thread may ``close`` it. A forked
    child has neither the session nor the pools: every call there is a ForkedError; connect and attach anew.
    """

    _use: ExclusiveUse

    def __init__(self, connection: Connection | None = None, *_: object, **__: object) -> None:
        super().__init__(connection)
        assert connection is not None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_control_socket(self._context, connection.runtime_dir)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if self._channel is not None:
            self._poller.register(self._channel.socket.fileno(), zmq.POLLIN)
        # Where no session's socket can, these two wake a call that waits when the client is closed.
        self._bell: tuple[socket.socket, ...] = socket.socketpair() if self._channel is None else ()
        for one in self._bell:
            self._poller.register(one.fileno(), zmq.POLLIN)
        self._give_back = given_back_with(self, self._channel, (self._socket, *self._bell), self._context)
        self._use = ExclusiveUse(self._end, self._release)

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        self.close()

    async def __aenter__(self) -> NoReturn:
        """Say what to write instead."""
        raise MisuseError("a Client is entered by `with`: `async with` is for an AsyncClient")

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: it cannot be entered so."""

    def close(self) -> None:
        """End the session. Closing twice does nothing.

        Any thread may close a client: a call that waits in another one ends with a ClientClosedError. In a forked child
        this gives back the child's copies only, and the parent's session goes on.
        """
        if self._use.in_child:
            if self._channel is not None:
                self._channel.close()
            return
        self._use.close()

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.end()  # wakes the call that is under way, if any
        for one in self._bell:
            with contextlib.suppress(OSError):  # another thread has closed the client at the same time
                one.shutdown(socket.SHUT_RDWR)

    def _release(self) -> None:
        self._give_back()

    def _has_reply(self, message_id: int) -> bool:
        while message_id not in self._replies and self._take(0.0):
            pass
        return message_id in self._replies

    def _take_reply(self, message_id: int, left_s: float, timeout_s: float) -> None:
        ends_at = time.monotonic() + left_s
        self._take_until_at(lambda: message_id in self._replies, ends_at, timeout_s, "the daemon's reply")

    def _take_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        self._take_until_at(condition, time.monotonic() + timeout_s, timeout_s, what)

    def _take_until_at(self, condition: Callable[[], bool], ends_at: float, timeout_s: float, what: str) -> None:
        while not condition():
            left = ends_at - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"{what} did not come within {timeout_s:g} s")
            self._take(left)

    def _take_changes(self, timeout_s: float) -> None:
        ends_at = time.monotonic() + timeout_s
        while self._take(0.0 if self._changed else max(0.0, ends_at - time.monotonic())):
            pass

    def _put(self, outgoing: Outgoing) -> None:
        self._socket.send_multipart(outgoing.frames, NOBLOCK)

    def _take(self, timeout_s: float) -> bool:
        """Take one message, waiting for it up to ``timeout_s``; return whether one came."""
        ready = self._poller.poll(math.ceil(timeout_s * 1000))
        if not ready:
            return False
        if ready[0][0] is not self._socket:
            if self._channel is None:
                raise ClientClosedError(CLOSED)
            try:
                self._channel.receive()
            except DaemonLostError:
                if self._use.closing:
                    raise ClientClosedError(CLOSED) from None
                if not self._socket.poll(LAST_WORDS_MS):
                    raise
            else:
                return False
        news = self._core.feed(self._socket.recv_multipart(NOBLOCK))
        if news is not None:
            self._hear(news)
        return True

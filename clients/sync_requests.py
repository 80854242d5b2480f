"""One session's requests, synchronously: sent at once, their replies taken when somebody waits or looks.

Knows no kind of request: the client's own methods are in ``sync_client``. One thread at a time, see ``ExclusiveUse``.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NoReturn, Self, TypeVar

import zmq

from kvferry.clients.arguments import seconds
from kvferry.clients.calls import Call
from kvferry.clients.connection import (
    LAST_WORDS_MS,
    REPLY_MARGIN_S,
    Connection,
    given_back_with,
    open_control_socket,
)
from kvferry.clients.exclusive_use import ExclusiveUse
from kvferry.clients.submissions import Submissions
from kvferry.clients.submitting import PendingReply
from kvferry.protocol.client_core import BatchAnswered, News, Outgoing, ReplyArrived
from kvferry.protocol.errors import ClientClosedError, DaemonLostError, DeadlineError, MisuseError
from kvferry.protocol.session_messages import MemoryFollows, ShareFollows

NOBLOCK = int(zmq.NOBLOCK)  # an enum costs a microsecond at every use
CLOSED = "the client was closed while this call waited"
T = TypeVar("T")


class SyncRequests(Submissions):
    """The connection of one session."""

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
        self._replies: dict[int, ReplyArrived] = {}
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

    def is_ready(self, pending: PendingReply[T]) -> bool:
        """Return whether ``wait`` would return at once; never waits.

        Raises:
            DaemonLostError: the daemon has gone.
        """
        self._check_pending(pending)
        with self._use:
            while pending.message_id not in self._replies and self._take(0.0):
                pass
            return pending.message_id in self._replies

    def wait(self, pending: PendingReply[T]) -> T:
        """Return what the daemon replies; once only.

        Raises:
            KvferryError: it was refused, or no reply came in time, or the daemon has gone.
        """
        self._check_pending(pending)
        with self._use:
            return self._reply(pending)

    def _reply(self, pending: PendingReply[T]) -> T:
        number, pending.taken = pending.message_id, True
        left_s = max(0.0, pending.ends_at - time.monotonic())
        try:
            self._take_until(lambda: number in self._replies, left_s, "the daemon's reply")
        except DeadlineError:
            self._core.forget(number)
            raise
        reply = self._replies.pop(number)
        if reply.error is not None:
            raise reply.error
        return pending.call.read(reply)

    def call(
        self,
        call: Call[T],
        *,
        deadline_s: float | None = None,
        margin_s: float = REPLY_MARGIN_S,
    ) -> T:
        """Send a request and wait for its reply.

        Raises:
            KvferryError: it was refused, or no reply came in time, or the daemon has gone.
        """
        return self._round_trip(call, deadline_s=deadline_s, margin_s=margin_s)[1]

    def _round_trip(
        self,
        call: Call[T],
        *,
        deadline_s: float | None = None,
        margin_s: float = REPLY_MARGIN_S,
        said: Callable[[int], Sequence[ShareFollows | MemoryFollows]] | None = None,
        fds: Sequence[int] = (),
    ) -> tuple[Outgoing, T]:
        """Send a request and wait for its reply; see ``_exchange``."""
        with self._use:
            return self._exchange(call, deadline_s=deadline_s, margin_s=margin_s, said=said, fds=fds)

    def _exchange(
        self,
        call: Call[T],
        *,
        deadline_s: float | None = None,
        margin_s: float = REPLY_MARGIN_S,
        said: Callable[[int], Sequence[ShareFollows | MemoryFollows]] | None = None,
        fds: Sequence[int] = (),
    ) -> tuple[Outgoing, T]:
        """Send a request and wait for its reply, in a call that is under way.

        ``said`` is what the session socket has to say of it before, ``fds`` what goes with it.
        """
        deadline_ms, timeout_s = self._times(call, deadline_s, margin_s)
        outgoing = self._core.request(call.body, call.ids, deadline_ms=deadline_ms)
        if said is not None and self._channel is not None:
            frames = said(outgoing.message_id)
            if frames:
                self._channel.send(frames, fds)
        self._put(outgoing)
        return outgoing, self._reply(PendingReply(self._core.token, call, outgoing.message_id, timeout_s))

    def _put(self, outgoing: Outgoing) -> None:
        self._socket.send_multipart(outgoing.frames, NOBLOCK)

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        timeout_s = seconds(timeout_s, "timeout_s")
        with self._use:
            self._take_until(condition, timeout_s, what)

    def _take_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        ends_at = time.monotonic() + timeout_s
        while not condition():
            left = ends_at - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"{what} did not come within {timeout_s:g} s")
            self._take(left)

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

    def _hear(self, news: News | BatchAnswered) -> None:
        if isinstance(news, BatchAnswered):
            for one in news.news:
                self._hear(one)
        elif isinstance(news, ReplyArrived):
            self._replies[news.message_id] = news
        else:
            self._note(news)

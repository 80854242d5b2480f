"""The synchronous client: for engine schedulers, which are loops that must never wait unasked.

``send`` and ``receive`` return at once; ``poll(0)`` takes what has arrived and says which transfers changed. The other
calls wait for their reply. One thread at a time; no threads of its own.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self

import zmq

from kvferry.clients.connection import Connection, Reconnected, given_back_with
from kvferry.clients.daemon_socket import has_message, receive_frames, send_frames
from kvferry.clients.exclusive_use import ExclusiveUse
from kvferry.clients.resuming import LOOK_S
from kvferry.clients.sync_requests import SyncRequests
from kvferry.protocol.codec import Frames
from kvferry.protocol.errors import ClientClosedError, DaemonLostError, DeadlineError, KvferryError, MisuseError

AT_ONCE = 64
"""Messages that are taken before the other sockets are looked at again."""

CLOSED = "the client was closed while this call waited"


class Client(SyncRequests):
    """One session with the daemon of this node. Leaving it gives back all that the session owns.

    One thread at a time: a call during another thread's call raises ConcurrentUseError and sends nothing. It may be
    handed to another thread between two calls, and any thread may ``close`` it. A forked child has neither the session
    nor the pools: every call there raises ForkedError; connect and attach anew.
    """

    _use: ExclusiveUse

    def __init__(self, connection: Connection | None = None, *_: object, **__: object) -> None:
        super().__init__(connection)
        if self._channel is None:  # where no session's socket can, these two wake a call that waits when it is closed
            self._link.bells = socket.socketpair()
        self._connected()
        self._give_back = given_back_with(self, self._link)
        self._use = ExclusiveUse(self._wake, self._free)

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

        Any thread may close a client: a call that waits in another one raises ClientClosedError. In a forked child this
        only releases the child's copies, and the parent's session goes on.
        """
        if self._use.in_child:
            if self._channel is not None:
                self._channel.close()
            return
        self._use.close()

    def _wake(self) -> None:
        """Wake the call that is under way, if any, in whichever thread."""
        if self._channel is not None:
            self._channel.end()
        for one in self._link.bells:
            with contextlib.suppress(OSError):  # another thread has closed the client at the same time
                one.shutdown(socket.SHUT_RDWR)

    def _free(self) -> None:
        self._give_back()

    def _connected(self) -> None:
        self._poller = select.poll()
        self._watched = -1 if self._link.watch is None else self._link.watch.FD
        for one in (*self.sockets, *self._link.bells):
            self._poller.register(one.FD if isinstance(one, zmq.Socket) else one, select.POLLIN)

    def _disconnected(self) -> None:
        self._poller = select.poll()

    def _tell(self, event: Reconnected) -> None:
        if self._on_reconnect is not None:
            self._on_reconnect(event)

    def _failed(self, error: KvferryError) -> None:
        """Do nothing: whoever waits takes the next step himself."""

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
            if self._take_all() and self._changed:
                return

    def _transmit(self, frames: Frames) -> None:
        send_frames(self._socket, frames)

    def _take(self, timeout_s: float) -> bool:
        """Take one message, waiting for it up to ``timeout_s``; return whether there may be more to take."""
        if self._loss is not None:
            return self._take_lost(timeout_s)
        return self._take_ready(timeout_s)

    def _take_ready(self, timeout_s: float) -> bool:
        if not has_message(self._socket):
            ready = self._poller.poll(math.ceil(timeout_s * 1000))
            if not ready:
                return False
            if not has_message(self._socket):
                others = [descriptor for descriptor, _ in ready if descriptor != self._socket.FD]
                if others:
                    self._look_at(others[0])
                return True
        self._take_message()
        return True

    def _take_all(self) -> bool:
        """Take what else the control socket has, without a look at the other sockets; return whether that was all."""
        for _ in range(AT_ONCE):
            if self._loss is not None:
                return False
            if not has_message(self._socket):
                return True
            self._take_message()
        return False

    def _take_message(self) -> None:
        news = self._core.feed(receive_frames(self._socket))
        if news is not None:
            self._hear(news)

    def _look_at(self, descriptor: int) -> None:
        """Read from another socket than the control socket."""
        if descriptor == self._watched:
            if self._link.is_cut():
                self._control_lost()
            return
        if self._channel is None or self._use.closing:
            raise ClientClosedError(CLOSED)
        try:
            self._channel.receive()
        except KvferryError as error:
            if self._use.closing:
                raise ClientClosedError(CLOSED) from None
            self._poller.unregister(descriptor)  # it would be readable for ever
            self._session_lost(error if isinstance(error, DaemonLostError) else DaemonLostError(error.detail))

    def _take_lost(self, timeout_s: float) -> bool:
        """Go a step towards the daemon, as ``_take`` does towards a message."""
        if self._dead is not None:
            raise self._dead
        if self._use.closing:
            raise ClientClosedError(CLOSED)
        if self._is_heard and self._take_ready(0.0):
            return True
        idle_s = min(self._seek(), timeout_s, LOOK_S)
        if self._dead is not None:
            raise self._dead
        if self._loss is None:
            return True
        if self._is_heard:
            self._take_ready(idle_s)
        elif self._link.opening is not None:
            self._link.opening.wait(idle_s)
        else:
            time.sleep(idle_s)  # nothing tells that a daemon listens again
        return timeout_s > 0.0

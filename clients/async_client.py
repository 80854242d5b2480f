"""The asynchronous client: the same calls as ``Client``, on any asyncio loop; what waits there is awaited here."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self

from kvferry.clients.async_requests import AsyncRequests
from kvferry.clients.connection import Connection, Reconnected, given_back_with
from kvferry.clients.core.client_core import BatchAnswered, News, ReplyArrived
from kvferry.clients.daemon_socket import has_message, receive_frames, send_frames
from kvferry.clients.exclusive_use import check_process
from kvferry.clients.resuming import Loss
from kvferry.protocol.codec import Frames
from kvferry.protocol.errors import (
    ClientClosedError,
    ConcurrentUseError,
    DaemonLostError,
    DeadlineError,
    KvferryError,
    MisuseError,
)

DRAIN_BOUND = 64


class AsyncClient(AsyncRequests):
    """One session with the daemon of this node. Leaving it gives back all that the session owns.

    Calls that wait are awaited: ``connect``, ``wait_finished`` and all others except those that return at once, as in
    ``Client``: ``send``, ``receive``, ``offload``, ``restore``, ``store``, ``load``, ``update_tables``, ``begin``,
    ``batched``, ``is_ready`` and ``close``. Any number of tasks of the event loop that connected it may use it at a
    time; a call on another loop, or in a thread without one, raises ConcurrentUseError and sends nothing. Any thread
    may ``close`` it. A forked child has neither the session nor the pools: every call there raises ForkedError; connect
    and attach anew.
    """

    _use: LoopUse

    def __init__(self, connection: Connection | None = None, *_: object, **__: object) -> None:
        super().__init__(connection)
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._news = asyncio.Event()
        self._drain_scheduled = False
        self._readers: list[int] = []
        self._seeking: asyncio.TimerHandle | None = None
        self._sought = -1
        self._give_back = given_back_with(self, self._link)
        self._use = LoopUse(self._loop)
        self._connected()

    async def __aenter__(self) -> Self:
        """Return self."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        self.close()

    def __enter__(self) -> NoReturn:
        """Say what to write instead."""
        self.close()
        raise MisuseError("an AsyncClient is entered by `async with AsyncClient.connect(...) as client`")

    def __exit__(self, *_: object) -> None:
        """Do nothing: it cannot be entered so."""

    def close(self) -> None:
        """End the session. Closing twice does nothing.

        Any thread may close a client: a call that waits in another one raises ClientClosedError. In a forked child this
        only releases the child's copies, and the parent's session goes on.
        """
        if self._use.in_child:
            if self._channel is not None:
                self._channel.close()
        elif self._loop.is_running() and running_loop() is not self._loop:
            self._loop.call_soon_threadsafe(self._free)
        else:
            self._free()

    def _free(self) -> None:
        if self._use.closed:
            return
        self._use.closed = True
        if not self._loop.is_closed():
            self._seek_later(None)
            self._disconnected()
        self._failed(ClientClosedError("the client was closed while this call waited"))
        self._give_back()

    def _connected(self) -> None:
        self._listen(self._socket.FD, self._drain)  # zmq.asyncio costs more: docs/performance.md
        if self._channel is not None:
            self._listen(self._channel.socket.fileno(), self._session_readable)
        if self._link.watch is not None:
            self._listen(self._link.watch.FD, self._watch_readable)
        self._schedule_drain()

    def _disconnected(self) -> None:
        for one in self._readers:
            self._loop.remove_reader(one)
        self._readers.clear()

    def _listen(self, descriptor: int, call: Callable[[], None]) -> None:
        self._loop.add_reader(descriptor, call)
        self._readers.append(descriptor)

    def _tell(self, event: Reconnected) -> None:
        if self._on_reconnect is not None:
            self._loop.call_soon(self._on_reconnect, event)

    def _has_reply(self, message_id: int) -> bool:
        self._drain()
        if self._dead is not None:
            raise self._dead
        return message_id in self._replies

    async def _take_reply(self, message_id: int, left_s: float, timeout_s: float) -> None:
        if self._dead is not None:
            raise self._dead
        arrived = self._waiting[message_id] = self._loop.create_future()
        try:
            async with asyncio.timeout(left_s):
                await arrived
        except TimeoutError as cause:
            raise DeadlineError(f"the daemon's reply did not come within {timeout_s:g} s") from cause
        finally:
            del self._waiting[message_id]

    async def _take_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        self._drain()
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._next_news()
        except TimeoutError as cause:
            raise DeadlineError(f"{what} did not come within {timeout_s:g} s") from cause

    async def _take_changes(self, timeout_s: float) -> None:
        self._drain()
        if timeout_s > 0.0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while not self._changed:
                        await self._next_news()
        else:
            await asyncio.sleep(0)  # the loop has to see that the daemon goes, too
        if self._dead is not None and not self._changed:
            raise self._dead

    async def _next_news(self) -> None:
        if self._dead is not None:
            raise self._dead
        self._news.clear()
        await self._news.wait()

    def _transmit(self, frames: Frames) -> None:
        send_frames(self._socket, frames)
        self._schedule_drain()

    def _schedule_drain(self) -> None:
        """Make sure that a message which arrived unsignalled is seen: the descriptor signals changes only."""
        if not self._drain_scheduled and self._has_message():
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _has_message(self) -> bool:
        return not self._socket.closed and has_message(self._socket)

    def _drain(self) -> None:
        self._drain_scheduled = False
        for _ in range(DRAIN_BOUND):
            if not self._has_message():
                return
            self._feed(receive_frames(self._socket))
        self._schedule_drain()

    def _feed(self, frames: list[bytes]) -> None:
        try:
            news = self._core.feed(frames)
        except KvferryError as error:
            self._end(DaemonLostError(f"what answers is no daemon of ours: {error.detail}"))
            return
        if news is not None:
            self._hear(news)

    def _hear(self, news: News | BatchAnswered) -> None:
        super()._hear(news)
        if not isinstance(news, ReplyArrived):
            self._news.set()

    def _replied(self, reply: ReplyArrived) -> None:
        super()._replied(reply)
        if (arrived := self._waiting.get(reply.message_id)) is not None and not arrived.done():
            arrived.set_result(None)

    def _session_readable(self) -> None:
        if self._channel is None:
            return
        try:
            self._channel.receive()
        except KvferryError as error:
            self._loop.remove_reader(self._channel.socket)
            self._session_lost(error if isinstance(error, DaemonLostError) else DaemonLostError(error.detail))

    def _watch_readable(self) -> None:
        while self._has_message():  # what came before the connection was lost
            self._drain()
        if self._loss is not None:
            self._seek_on()
        elif self._link.is_cut():
            self._control_lost()

    def _begin_loss(self, loss: Loss) -> None:
        super()._begin_loss(loss)
        self._seek_later(0.0)

    def _seek_later(self, wait_s: float | None) -> None:
        """Take the next step towards the daemon in so many seconds, or as soon as it answers; None: no more."""
        if self._seeking is not None:
            self._seeking.cancel()
        self._seeking = None if wait_s is None else self._loop.call_later(wait_s, self._seek_on)
        opening = self._link.opening.socket.fileno() if self._link.opening and wait_s is not None else -1
        if self._sought >= 0:
            self._loop.remove_reader(self._sought)
        if opening >= 0:
            self._loop.add_reader(opening, self._seek_on)
        self._sought = opening

    def _seek_on(self) -> None:
        if self._sought >= 0:
            self._loop.remove_reader(self._sought)  # before it may be closed
            self._sought = -1
        wait_s = self._seek()
        self._seek_later(wait_s if self._loss is not None and self._dead is None else None)

    def _failed(self, error: KvferryError) -> None:
        self._dead = error
        self._news.set()
        for arrived in self._waiting.values():
            if not arrived.done():
                arrived.set_exception(error)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class LoopUse:
    """A context in which every call of an asynchronous client is started.

    Attributes:
        closed: set once the client is closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pid = os.getpid()
        self.closed = False

    def __repr__(self) -> str:
        """Show the loop."""
        return f"<LoopUse {self._loop!r}{' closed' if self.closed else ''}>"

    def __enter__(self) -> None:
        """Check that a call may be made from here.

        Raises:
            ForkedError: this is a child of the client's process.
            ConcurrentUseError: no event loop runs in this thread, or another one than the client's.
            ClientClosedError: the client is closed.
        """
        check_process(self._pid)
        loop = running_loop()
        if loop is not self._loop:
            where = "another event loop" if loop else "a thread without a running event loop"
            raise ConcurrentUseError(f"the client was connected on {self._loop!r} and is called from {where}")
        if self.closed:
            raise ClientClosedError("the client was closed")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: awaited calls may interleave."""

    @property
    def in_child(self) -> bool:
        """Return whether this process was forked from the client's."""
        return os.getpid() != self._pid

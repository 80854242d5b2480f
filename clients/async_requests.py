"""One session's requests on an asyncio loop: each awaits its reply. Knows no kind of request.

The client's own methods are in ``async_client``. On the event loop that connected it, see ``LoopUse``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NoReturn, Self, TypeVar, cast

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
from kvferry.clients.loop_use import LoopUse, running_loop
from kvferry.clients.submissions import Submissions
from kvferry.clients.submitting import PendingReply
from kvferry.protocol.client_core import BatchAnswered, News, Outgoing, ReplyArrived
from kvferry.protocol.errors import ClientClosedError, DaemonLostError, DeadlineError, KvferryError, MisuseError
from kvferry.protocol.session_messages import MemoryFollows, ShareFollows

DRAIN_BOUND = 64
NOBLOCK, EVENTS, POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)  # enums are slow
T = TypeVar("T")


class AsyncRequests(Submissions):
    """The connection of one session."""

    _use: LoopUse

    def __init__(self, connection: Connection | None = None, *_: object, **__: object) -> None:
        super().__init__(connection)
        assert connection is not None
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_control_socket(self._context, connection.runtime_dir)
        self._replies: dict[int, asyncio.Future[ReplyArrived]] = {}
        self._news = asyncio.Event()
        self._drain_scheduled = False
        self._lost: KvferryError | None = None
        self._give_back = given_back_with(self, self._channel, (self._socket,), self._context)
        self._use = LoopUse(self._loop)
        self._loop.add_reader(self._socket.FD, self._drain)
        if self._channel is not None:
            self._loop.add_reader(self._channel.socket, self._session_readable)

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

        Any thread may close a client: a call that waits in another one ends with a ClientClosedError. In a forked child
        this gives back the child's copies only, and the parent's session goes on.
        """
        if self._use.in_child:
            if self._channel is not None:
                self._channel.close()
        elif self._loop.is_running() and running_loop() is not self._loop:
            self._loop.call_soon_threadsafe(self._release)
        else:
            self._release()

    def _release(self) -> None:
        if self._use.closed:
            return
        self._use.closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket.FD)
            if self._channel is not None:
                self._loop.remove_reader(self._channel.socket)
        self._fail_all(ClientClosedError("the client was closed while this call waited"))
        self._give_back()

    def is_ready(self, pending: PendingReply[T]) -> bool:
        """Return whether ``wait`` would return at once; never waits.

        Raises:
            DaemonLostError: the daemon has gone.
        """
        self._check_pending(pending)
        with self._use:
            self._drain()
            if self._lost is not None:
                raise self._lost
            return self._replies[pending.message_id].done()

    async def wait(self, pending: PendingReply[T]) -> T:
        """Return what the daemon replies; once only.

        Raises:
            KvferryError: it was refused, or no reply came in time, or the daemon has gone.
        """
        self._check_pending(pending)
        with self._use:
            future, pending.taken = self._replies[pending.message_id], True
        try:
            async with asyncio.timeout(max(0.0, pending.ends_at - time.monotonic())):
                reply = await future
        except TimeoutError as cause:
            raise DeadlineError(f"the daemon's reply did not come within {pending.timeout_s:g} s") from cause
        finally:
            self._replies.pop(pending.message_id, None)
            self._core.forget(pending.message_id)
        if reply.error is not None:
            raise reply.error
        return pending.call.read(reply)

    async def call(
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
        return (await self._round_trip(call, deadline_s=deadline_s, margin_s=margin_s))[1]

    async def _round_trip(
        self,
        call: Call[T],
        *,
        deadline_s: float | None = None,
        margin_s: float = REPLY_MARGIN_S,
        said: Callable[[int], Sequence[ShareFollows | MemoryFollows]] | None = None,
        fds: Sequence[int] = (),
    ) -> tuple[Outgoing, T]:
        """Send a request and wait for its reply; ``said`` is what the session socket says of it before."""
        deadline_ms, timeout_s = self._times(call, deadline_s, margin_s)
        with self._use:
            outgoing = self._core.request(call.body, call.ids, deadline_ms=deadline_ms)
            if said is not None:
                frames = await asyncio.to_thread(said, outgoing.message_id)
                if frames and self._channel is not None:
                    await asyncio.to_thread(self._channel.send, frames, fds)
            self._expect(outgoing.message_id)
            try:
                self._put(outgoing)
            except BaseException:
                del self._replies[outgoing.message_id]
                raise
        return outgoing, await self.wait(PendingReply(self._core.token, call, outgoing.message_id, timeout_s))

    def _expect(self, message_id: int) -> None:
        future: asyncio.Future[ReplyArrived] = self._loop.create_future()
        future.add_done_callback(_seen)  # nobody may come for it
        self._replies[message_id] = future

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        timeout_s = seconds(timeout_s, "timeout_s")
        with self._use:
            self._drain()
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._next_news()
        except TimeoutError as cause:
            raise DeadlineError(f"{what} did not come within {timeout_s:g} s") from cause

    async def _next_news(self) -> None:
        if self._lost is not None:
            raise self._lost
        self._news.clear()
        await self._news.wait()

    def _put(self, outgoing: Outgoing) -> None:
        if self._lost is not None:
            raise self._lost
        self._socket.send_multipart(outgoing.frames, NOBLOCK)
        self._schedule_drain()

    def _schedule_drain(self) -> None:
        """Make sure that a message which arrived unsignalled is seen: the descriptor signals changes only."""
        if not self._drain_scheduled and not self._socket.closed and self._readable():
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _readable(self) -> bool:
        return bool(cast("int", self._socket.getsockopt(EVENTS)) & POLLIN)

    def _drain(self) -> None:
        self._drain_scheduled = False
        if self._socket.closed:
            return
        for _ in range(DRAIN_BOUND):
            if not self._readable():
                return
            self._feed(self._socket.recv_multipart(NOBLOCK))
        self._schedule_drain()

    def _feed(self, frames: list[bytes]) -> None:
        try:
            news = self._core.feed(frames)
        except KvferryError as error:
            self._fail_all(DaemonLostError(f"what answers is no daemon of ours: {error.detail}"))
            return
        if news is not None:
            self._hear(news)

    def _hear(self, news: News | BatchAnswered) -> None:
        if isinstance(news, BatchAnswered):
            for one in news.news:
                self._hear(one)
        elif isinstance(news, ReplyArrived):
            future = self._replies.get(news.message_id)
            if future is not None and not future.done():
                future.set_result(news)
        else:
            self._note(news)
            self._news.set()

    def _session_readable(self) -> None:
        if self._channel is None:
            return
        try:
            self._channel.receive()
        except KvferryError as error:
            self._loop.remove_reader(self._channel.socket)
            lost = error if isinstance(error, DaemonLostError) else DaemonLostError(error.detail)
            self._loop.call_later(LAST_WORDS_MS / 1000, self._fail_all, lost)

    def _fail_all(self, error: KvferryError) -> None:
        self._lost = error
        self._news.set()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)


def _seen(future: asyncio.Future[ReplyArrived]) -> None:
    if not future.cancelled():
        future.exception()

"""One session's requests on an asyncio loop: each awaits its reply. Knows no kind of request.

The client's own methods are in ``async_client``. See ``SyncRequests`` for what each call means and raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, cast

import zmq

from kvferry.clients.connection import LAST_WORDS_MS, REPLY_MARGIN_S, milliseconds, open_control_socket
from kvferry.clients.devices import EngineDevices
from kvferry.clients.operations import Operation
from kvferry.clients.session_channel import SessionChannel
from kvferry.clients.sync_requests import DEFAULT_DEADLINE_S
from kvferry.protocol.client_core import ClientCore, HandOffChanged, Outgoing, ReplyArrived, WorkChanged
from kvferry.protocol.errors import DaemonLostError, DeadlineError, KvferryError
from kvferry.protocol.ids import NO_BOOT, BootId
from kvferry.protocol.session_messages import ShareFollows

DRAIN_BOUND = 64
NOBLOCK, EVENTS, POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)  # enums are slow
T = TypeVar("T")


class AsyncRequests:
    """The connection of one session."""

    def __init__(
        self, runtime_dir: Path, channel: SessionChannel | None, devices: Mapping[str, str] | None = None
    ) -> None:
        """Use ``AsyncClient.connect``."""
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_control_socket(self._context, runtime_dir)
        self._channel = channel
        self._devices = EngineDevices(devices or {})
        self._core = (
            ClientCore(BootId(channel.opened.boot_id), channel.opened.secret) if channel else ClientCore(NO_BOOT)
        )
        self._replies: dict[int, asyncio.Future[ReplyArrived]] = {}
        self._changed = asyncio.Event()
        self._drain_scheduled = False
        self._lost: DaemonLostError | None = None
        self._loop.add_reader(self._socket.FD, self._drain)
        if channel is not None:
            self._loop.add_reader(channel.socket, self._session_readable)

    async def __aenter__(self) -> Self:
        """Return self."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        self.close()

    def __repr__(self) -> str:
        """Show the session and what is pending."""
        session = self._channel.opened.session if self._channel else None
        return f"<AsyncClient session={session} {self._core!r}>"

    def close(self) -> None:
        """End the session. Closing twice does nothing."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._socket.FD)
        if self._channel is not None:
            self._loop.remove_reader(self._channel.socket)
            self._channel.close()
        self._fail_all(DaemonLostError("the client was closed"))
        self._socket.close()
        self._context.term()

    async def call(
        self,
        operation: Operation[T],
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        margin_s: float = REPLY_MARGIN_S,
    ) -> T:
        """See ``Client.call``."""
        return (await self._round_trip(operation, deadline_s=deadline_s, margin_s=margin_s))[1]

    async def _round_trip(
        self,
        operation: Operation[T],
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        margin_s: float = REPLY_MARGIN_S,
        said: Callable[[int], Sequence[ShareFollows]] | None = None,
    ) -> tuple[Outgoing, T]:
        """Send a request and wait for its reply; ``said`` is what the session socket has to say of it before."""
        outgoing = self._core.request(operation.body, operation.ids, deadline_ms=milliseconds(deadline_s))
        if said is not None:
            frames = await asyncio.to_thread(said, outgoing.message_id)
            if frames and self._channel is not None:
                await asyncio.to_thread(self._channel.say, frames)
        future: asyncio.Future[ReplyArrived] = self._loop.create_future()
        self._replies[outgoing.message_id] = future
        try:
            self._put(outgoing)
            async with asyncio.timeout(deadline_s + margin_s):
                reply = await future
        except TimeoutError as cause:
            raise DeadlineError(f"the daemon's reply did not come within {deadline_s + margin_s:g} s") from cause
        finally:
            self._replies.pop(outgoing.message_id, None)
            self._core.forget(outgoing.message_id)
        if reply.error is not None:
            raise reply.error
        return outgoing, operation.read(reply)

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    if self._lost is not None:
                        raise self._lost
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as cause:
            raise DeadlineError(f"{what} did not come within {timeout_s:g} s") from cause

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
        if isinstance(news, ReplyArrived):
            future = self._replies.get(news.message_id)
            if future is not None and not future.done():
                future.set_result(news)
        elif isinstance(news, HandOffChanged | WorkChanged):
            self._changed.set()

    def _session_readable(self) -> None:
        if self._channel is None:
            return
        try:
            self._channel.receive()
        except KvferryError as error:
            self._loop.remove_reader(self._channel.socket)
            lost = error if isinstance(error, DaemonLostError) else DaemonLostError(error.detail)
            self._loop.call_later(LAST_WORDS_MS / 1000, self._fail_all, lost)

    def _fail_all(self, error: DaemonLostError) -> None:
        self._lost = error
        self._changed.set()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)

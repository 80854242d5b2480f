"""The asynchronous client: the same calls as ``Client``, awaited, on any asyncio loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, cast

import numpy.typing as npt
import zmq

from kvferry.clients import operations
from kvferry.clients.connection import (
    LAST_WORDS_MS,
    REPLY_MARGIN_S,
    find_runtime_dir,
    milliseconds,
    open_control_socket,
)
from kvferry.clients.events import COUNTER_BYTES, EventRing
from kvferry.clients.operations import Operation, Pages
from kvferry.clients.pool import AttachedPool
from kvferry.clients.session_channel import SessionChannel
from kvferry.clients.sync_client import DEFAULT_DEADLINE_S
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.client_core import ClientCore, HandOff, HandOffChanged, Outgoing, ReplyArrived
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import DaemonLostError, DeadlineError, KvferryError
from kvferry.protocol.events import Finished
from kvferry.protocol.ids import MAIN, NO_BOOT, BootId
from kvferry.protocol.manifests import PoolSpec
from kvferry.protocol.pool_messages import Freed
from kvferry.protocol.room_messages import Cancelled, LayerStep, RoomResult, Side
from kvferry.protocol.session_messages import StatusReport, Welcome

DRAIN_BOUND = 64
NOBLOCK, EVENTS, POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)  # enums are slow
T = TypeVar("T")


class AsyncClient:
    """One session with the daemon of this node; see ``Client`` for what each call means and raises."""

    def __init__(self, runtime_dir: Path, channel: SessionChannel | None) -> None:
        """Use ``connect``."""
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_control_socket(self._context, runtime_dir)
        self._channel = channel
        self._core = (
            ClientCore(BootId(channel.opened.boot_id), channel.opened.secret) if channel else ClientCore(NO_BOOT)
        )
        self._replies: dict[int, asyncio.Future[ReplyArrived]] = {}
        self._changed = asyncio.Event()
        self._drain_scheduled = False
        self._lost: DaemonLostError | None = None
        self.welcome: Welcome | None = None
        self._loop.add_reader(self._socket.FD, self._drain)
        if channel is not None:
            self._loop.add_reader(channel.socket, self._session_readable)

    @classmethod
    async def connect(
        cls,
        runtime_dir: Path | str | None = None,
        *,
        name: str = "",
        session: bool = True,
        timeout_s: float = 5.0,
    ) -> AsyncClient:
        """Connect, open a session and agree on the protocol; see ``Client.connect``."""
        directory = await asyncio.to_thread(find_runtime_dir, runtime_dir)
        channel = await asyncio.to_thread(SessionChannel.open, directory, name) if session else None
        client = cls(directory, channel)
        try:
            client.welcome = await client.call(operations.hello(name), deadline_s=timeout_s, margin_s=0.0)
        except DeadlineError as cause:
            client.close()
            raise DaemonLostError(f"no daemon answers at {directory} within {timeout_s:g} s") from cause
        except BaseException:
            client.close()
            raise
        return client

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

    async def ping(self) -> float:
        """Return the seconds of one round trip."""
        started = time.perf_counter()
        await self.call(operations.ping())
        return time.perf_counter() - started

    async def status(self) -> StatusReport:
        """Return what the daemon holds and does."""
        return await self.call(operations.status())

    async def create_pool(self, name: str, spec: PoolSpec, *, deadline_s: float = DEFAULT_DEADLINE_S) -> AttachedPool:
        """See ``Client.create_pool``."""
        created = await self.call(operations.create_pool(name, spec), deadline_s=deadline_s)
        return await self.attach_pool(name, created.manifest.layout_digest)

    async def attach_pool(self, name: str, layout_digest: str = "") -> AttachedPool:
        """See ``Client.attach_pool``."""
        outgoing, attached = await self._round_trip(operations.attach_pool(name, layout_digest))
        if self._channel is None:
            raise ValueError("attaching a pool needs a session")
        self._channel.receive()
        [fd] = self._channel.take_fds(outgoing.message_id)
        return AttachedPool(name, attached.manifest, HostRegion(fd, attached.manifest.region_bytes))

    async def open_events(self) -> EventRing:
        """Return this session's event ring, by which ``send(steps=…)`` says when which layers are ready."""
        outgoing, opened = await self._round_trip(operations.open_events())
        if self._channel is None:
            raise ValueError("an event ring needs a session")
        self._channel.receive()
        counters, eventfd = self._channel.take_fds(outgoing.message_id)
        return EventRing(HostRegion(counters, opened.slots * COUNTER_BYTES), eventfd)

    async def delete_pool(self, name: str) -> None:
        """See ``Client.delete_pool``."""
        await self.call(operations.delete_pool(name))

    async def allocate(self, pool: str, count: int, space: str = MAIN) -> PageIds:
        """See ``Client.allocate``."""
        return await self.call(operations.allocate(pool, count, space))

    async def free(self, pool: str, ids: npt.ArrayLike, space: str = MAIN) -> Freed:
        """See ``Client.free``."""
        return await self.call(operations.free(pool, ids, space))

    def send(
        self,
        pool: str,
        request_id: str,
        lists: Sequence[Pages],
        *,
        first_token: int | None = None,
        payload: bytes = b"",
        last: bool = True,
        destinations: int = 1,
        steps: Sequence[LayerStep] = (),
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> HandOff:
        """See ``Client.send``; await ``finished`` or ``settled``."""
        body = operations.send_body(
            pool,
            request_id,
            lists,
            last=last,
            destinations=destinations,
            first_token=first_token,
            payload=payload,
            steps=steps,
        )
        hand_off, outgoing = self._core.hand_off(body, [one.ids for one in lists], deadline_ms=milliseconds(deadline_s))
        self._put(outgoing)
        return hand_off

    def receive(
        self,
        pool: str,
        request_id: str,
        lists: Sequence[Pages],
        *,
        sources: int = 1,
        source_daemons: Sequence[str] = (),
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> HandOff:
        """See ``Client.receive``; await ``finished`` or ``settled``."""
        body = operations.receive_body(pool, request_id, lists, sources, source_daemons)
        hand_off, outgoing = self._core.hand_off(body, [one.ids for one in lists], deadline_ms=milliseconds(deadline_s))
        self._put(outgoing)
        return hand_off

    async def cancel(self, hand_off: HandOff, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Cancelled:
        """See ``Client.cancel``."""
        key = hand_off.key
        return await self.call(operations.cancel(key.pool, key.request_id, key.side), deadline_s=deadline_s)

    async def result(self, pool: str, request_id: str, side: Side) -> RoomResult:
        """See ``Client.result``."""
        return await self.call(operations.result(pool, request_id, side))

    async def finished(self, hand_off: HandOff, timeout_s: float = DEFAULT_DEADLINE_S) -> Finished:
        """See ``Client.wait_finished``."""
        await self._wait_until(lambda: hand_off.is_finished, timeout_s, "the outcome of the hand-off")
        return hand_off.outcome()

    async def settled(self, hand_off: HandOff, timeout_s: float = DEFAULT_DEADLINE_S) -> None:
        """See ``Client.wait_settled``."""
        await self._wait_until(lambda: hand_off.is_settled, timeout_s, "the end of the hand-off")

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
    ) -> tuple[Outgoing, T]:
        outgoing = self._core.request(operation.body, operation.ids, deadline_ms=milliseconds(deadline_s))
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
        elif isinstance(news, HandOffChanged):
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

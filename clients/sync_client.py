"""The synchronous client: for engine schedulers, which are loops that must never wait unasked.

``send`` and ``receive`` return at once; ``poll(0)`` takes what has arrived and says which hand-offs changed. The other
calls wait for their reply. One thread at a time; no threads of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

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
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.client_core import ClientCore, HandOff, HandOffChanged, Outgoing, ReplyArrived
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import DaemonLostError, DeadlineError
from kvferry.protocol.events import Finished
from kvferry.protocol.ids import MAIN, NO_BOOT, BootId
from kvferry.protocol.manifests import PoolSpec
from kvferry.protocol.pool_messages import Freed
from kvferry.protocol.room_messages import Cancelled, LayerStep, RoomResult, Side
from kvferry.protocol.session_messages import StatusReport, Welcome

DEFAULT_DEADLINE_S = 30.0
NOBLOCK = int(zmq.NOBLOCK)  # an enum costs a microsecond at every use
T = TypeVar("T")


class Client:
    """One session with the daemon of this node. Leaving it gives back everything that the session owns."""

    def __init__(self, runtime_dir: Path, channel: SessionChannel | None) -> None:
        """Use ``connect``."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_control_socket(self._context, runtime_dir)
        self._channel = channel
        self._core = (
            ClientCore(BootId(channel.opened.boot_id), channel.opened.secret) if channel else ClientCore(NO_BOOT)
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if channel is not None:
            self._poller.register(channel.socket.fileno(), zmq.POLLIN)
        self._replies: dict[int, ReplyArrived] = {}
        self._changed: list[HandOff] = []
        self.welcome: Welcome | None = None

    @classmethod
    def connect(
        cls,
        runtime_dir: Path | str | None = None,
        *,
        name: str = "",
        session: bool = True,
        timeout_s: float = 5.0,
    ) -> Client:
        """Connect, open a session and agree on the protocol.

        Args:
            runtime_dir: where the daemon's sockets are; by default as ``kvferry daemon`` chooses it.
            name: shown in the daemon's status and logs.
            session: without one, only ping and status work.
            timeout_s: how long to wait for the daemon's first reply.

        Raises:
            DaemonLostError: no daemon answers.
            AccessDeniedError: this user may not use it.
            VersionMismatchError: it speaks other versions of the protocol.
        """
        directory = find_runtime_dir(runtime_dir)
        channel = SessionChannel.open(directory, name) if session else None
        client = cls(directory, channel)
        try:
            client.welcome = client.call(operations.hello(name), deadline_s=timeout_s, margin_s=0.0)
        except DeadlineError as cause:
            client.close()
            raise DaemonLostError(f"no daemon answers at {directory} within {timeout_s:g} s") from cause
        except BaseException:
            client.close()
            raise
        return client

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        self.close()

    def __repr__(self) -> str:
        """Show the session and what is pending."""
        session = self._channel.opened.session if self._channel else None
        return f"<Client session={session} {self._core!r}>"

    @property
    def boot_id(self) -> str:
        """Return which incarnation of the daemon this session is with."""
        return self._core.boot_id

    def close(self) -> None:
        """End the session. Closing twice does nothing."""
        if self._channel is not None:
            self._channel.close()
        self._socket.close()
        self._context.term()

    # -- the daemon

    def ping(self) -> float:
        """Return the seconds of one round trip."""
        started = time.perf_counter()
        self.call(operations.ping())
        return time.perf_counter() - started

    def status(self) -> StatusReport:
        """Return what the daemon holds and does."""
        return self.call(operations.status())

    # -- pools and pages

    def create_pool(self, name: str, spec: PoolSpec, *, deadline_s: float = DEFAULT_DEADLINE_S) -> AttachedPool:
        """Create a pool, or find it as it was created before, and map it.

        Raises:
            PoolExistsError: the name has another layout or size.
            InvalidFieldError: the spec makes no sense.
            OutOfMemoryError: the host cannot give it.
        """
        created = self.call(operations.create_pool(name, spec), deadline_s=deadline_s)
        return self.attach_pool(name, created.manifest.layout_digest)

    def attach_pool(self, name: str, layout_digest: str = "") -> AttachedPool:
        """Map a pool of this user.

        Raises:
            UnknownPoolError: none of that name.
            LayoutMismatchError: it has another layout than the digest given.
        """
        outgoing, attached = self._round_trip(operations.attach_pool(name, layout_digest))
        if self._channel is None:
            raise ValueError("attaching a pool needs a session")
        self._channel.receive()
        [fd] = self._channel.take_fds(outgoing.message_id)
        return AttachedPool(name, attached.manifest, HostRegion(fd, attached.manifest.region_bytes))

    def open_events(self) -> EventRing:
        """Return this session's event ring, by which ``send(steps=…)`` says when which layers are ready."""
        outgoing, opened = self._round_trip(operations.open_events())
        if self._channel is None:
            raise ValueError("an event ring needs a session")
        self._channel.receive()
        counters, eventfd = self._channel.take_fds(outgoing.message_id)
        return EventRing(HostRegion(counters, opened.slots * COUNTER_BYTES), eventfd)

    def delete_pool(self, name: str) -> None:
        """Delete a pool that has no owned page.

        Raises:
            PoolInUseError: pages are owned or in flight.
        """
        self.call(operations.delete_pool(name))

    def allocate(self, pool: str, count: int, space: str = MAIN) -> PageIds:
        """Return ``count`` pages for this session, ascending, ``(count,)`` int64.

        Raises:
            PoolFullError: fewer are free; says how many.
        """
        return self.call(operations.allocate(pool, count, space))

    def free(self, pool: str, ids: npt.ArrayLike, space: str = MAIN) -> Freed:
        """Give pages back; those in flight follow when their hand-offs settle.

        Raises:
            NotOwnerError, DuplicatePageError, PageOutOfRangeError, EmptyPagesError: nothing was freed.
        """
        return self.call(operations.free(pool, ids, space))

    # -- hand-offs

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
        """Offer filled pages to the request's rooms. Returns at once; watch the hand-off with ``poll`` or ``wait_…``.

        The pages may not be written before the hand-off has settled. A prompt may be sent in chunks: ``last`` is false
        for all but the last one, and they share one hand-off.

        Args:
            pool: the pool of the pages.
            request_id: what the receiving side names too.
            lists: the pages, one list a component; see ``pages``.
            first_token: the token that prefill sampled, delivered with completion.
            payload: up to 64 KiB more to deliver with it.
            last: whether no further chunk follows.
            destinations: how many rooms take these pages.
            steps: which layers are ready after which event, in that order; none: the pages are filled.
            deadline_s: for the whole hand-off.
        """
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
        """Make a room for the request in pages of this session. Returns at once, like ``send``.

        The pages may not be touched before the hand-off has finished, nor used otherwise before it has settled.

        Args:
            pool: the pool of the pages.
            request_id: what the sending sides name too.
            lists: the pages to fill, one list a component; see ``pages``.
            sources: how many pools send.
            source_daemons: the addresses of the daemons they belong to, as those daemons' ``peers.listen`` gives them;
                none for this client's own daemon only.
            deadline_s: for the whole hand-off.
        """
        body = operations.receive_body(pool, request_id, lists, sources, source_daemons)
        hand_off, outgoing = self._core.hand_off(body, [one.ids for one in lists], deadline_ms=milliseconds(deadline_s))
        self._put(outgoing)
        return hand_off

    def cancel(self, hand_off: HandOff, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Cancelled:
        """Give up this side; returns when no byte can move any more.

        Raises:
            UnknownRoomError: the daemon has no such side, or its end was acknowledged before.
        """
        key = hand_off.key
        return self.call(operations.cancel(key.pool, key.request_id, key.side), deadline_s=deadline_s)

    def result(self, pool: str, request_id: str, side: Side) -> RoomResult:
        """Return a side's state by the daemon's word.

        Raises:
            UnknownRoomError: neither live nor unacknowledged.
        """
        return self.call(operations.result(pool, request_id, side))

    def poll(self, timeout_s: float = 0.0) -> list[HandOff]:
        """Take what has arrived; wait for the first change up to ``timeout_s``, not at all by default.

        Returns:
            The hand-offs that changed since the last call, each once.

        Raises:
            DaemonLostError: the daemon has gone; every hand-off of this session has failed.
        """
        ends_at = time.monotonic() + timeout_s
        while self._take(0.0 if self._changed else max(0.0, ends_at - time.monotonic())):
            pass
        changed, self._changed = list(dict.fromkeys(self._changed)), []
        return changed

    def wait_finished(self, hand_off: HandOff, timeout_s: float = DEFAULT_DEADLINE_S) -> Finished:
        """Wait until the outcome is known and return it.

        Raises:
            KvferryError: the hand-off failed or was refused; or DEADLINE, and it is still under way.
        """
        self._wait_until(lambda: hand_off.is_finished, timeout_s, "the outcome of the hand-off")
        return hand_off.outcome()

    def wait_settled(self, hand_off: HandOff, timeout_s: float = DEFAULT_DEADLINE_S) -> None:
        """Wait until the daemon holds the hand-off's pages no longer, whatever its outcome.

        Raises:
            DeadlineError: it is still under way.
        """
        self._wait_until(lambda: hand_off.is_settled, timeout_s, "the end of the hand-off")

    # -- requests

    def call(
        self,
        operation: Operation[T],
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        margin_s: float = REPLY_MARGIN_S,
    ) -> T:
        """Send a request and wait for its reply.

        Raises:
            KvferryError: it was refused, or no reply came in time, or the daemon has gone.
        """
        return self._round_trip(operation, deadline_s=deadline_s, margin_s=margin_s)[1]

    def _round_trip(
        self,
        operation: Operation[T],
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        margin_s: float = REPLY_MARGIN_S,
    ) -> tuple[Outgoing, T]:
        outgoing = self._core.request(operation.body, operation.ids, deadline_ms=milliseconds(deadline_s))
        self._put(outgoing)
        number = outgoing.message_id
        try:
            self._wait_until(lambda: number in self._replies, deadline_s + margin_s, "the daemon's reply")
        except DeadlineError:
            self._core.forget(number)
            raise
        reply = self._replies.pop(number)
        if reply.error is not None:
            raise reply.error
        return outgoing, operation.read(reply)

    def _put(self, outgoing: Outgoing) -> None:
        self._socket.send_multipart(outgoing.frames, NOBLOCK)

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
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
        if ready[0][0] is not self._socket and self._channel is not None:
            try:
                self._channel.receive()
            except DaemonLostError:
                if not self._socket.poll(LAST_WORDS_MS):
                    raise
            else:
                return False
        news = self._core.feed(self._socket.recv_multipart(NOBLOCK))
        if isinstance(news, ReplyArrived):
            self._replies[news.message_id] = news
        elif isinstance(news, HandOffChanged):
            self._changed.append(news.hand_off)
        return True

"""One session's requests, synchronously: sent at once, their replies taken when somebody waits or looks.

Knows no kind of request: the client's own methods are in ``sync_client``. One thread at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

import zmq

from kvferry.clients.connection import LAST_WORDS_MS, REPLY_MARGIN_S, milliseconds, open_control_socket
from kvferry.clients.devices import EngineDevices
from kvferry.clients.operations import Operation
from kvferry.clients.session_channel import SessionChannel
from kvferry.protocol.client_core import ClientCore, HandOff, HandOffChanged, Outgoing, ReplyArrived, WorkChanged
from kvferry.protocol.client_works import TierWork
from kvferry.protocol.errors import DaemonLostError, DeadlineError
from kvferry.protocol.ids import NO_BOOT, BootId
from kvferry.protocol.session_messages import ShareFollows

DEFAULT_DEADLINE_S = 30.0
NOBLOCK = int(zmq.NOBLOCK)  # an enum costs a microsecond at every use
T = TypeVar("T")


class PendingReply(Generic[T]):
    """A request that was sent and whose reply nobody has taken yet; see ``SyncRequests.begin``."""

    def __init__(self, operation: Operation[T], message_id: int, timeout_s: float) -> None:
        self.operation = operation
        self.message_id = message_id
        self.timeout_s = timeout_s
        self.ends_at = time.monotonic() + timeout_s


class SyncRequests:
    """The connection of one session."""

    def __init__(
        self, runtime_dir: Path, channel: SessionChannel | None, devices: Mapping[str, str] | None = None
    ) -> None:
        """Use ``Client.connect``."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_control_socket(self._context, runtime_dir)
        self._channel = channel
        self._devices = EngineDevices(devices or {})
        self._core = (
            ClientCore(BootId(channel.opened.boot_id), channel.opened.secret) if channel else ClientCore(NO_BOOT)
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if channel is not None:
            self._poller.register(channel.socket.fileno(), zmq.POLLIN)
        self._replies: dict[int, ReplyArrived] = {}
        self._changed: list[HandOff | TierWork] = []

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

    def begin(self, operation: Operation[T], *, deadline_s: float = DEFAULT_DEADLINE_S) -> PendingReply[T]:
        """Send a request and return at once; ``wait`` takes its reply, ``is_ready`` says whether it has come."""
        outgoing = self._core.request(operation.body, operation.ids, deadline_ms=milliseconds(deadline_s))
        self._put(outgoing)
        return PendingReply(operation, outgoing.message_id, deadline_s + REPLY_MARGIN_S)

    def is_ready(self, pending: PendingReply[T]) -> bool:
        """Return whether ``wait`` would return at once; never waits.

        Raises:
            DaemonLostError: the daemon has gone.
        """
        while pending.message_id not in self._replies and self._take(0.0):
            pass
        return pending.message_id in self._replies

    def wait(self, pending: PendingReply[T]) -> T:
        """Return what the daemon replies; once only.

        Raises:
            KvferryError: it was refused, or no reply came in time, or the daemon has gone.
        """
        number = pending.message_id
        left_s = max(0.0, pending.ends_at - time.monotonic())
        try:
            self._wait_until(lambda: number in self._replies, left_s, "the daemon's reply")
        except DeadlineError:
            self._core.forget(number)
            raise
        reply = self._replies.pop(number)
        if reply.error is not None:
            raise reply.error
        return pending.operation.read(reply)

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
        said: Callable[[int], Sequence[ShareFollows]] | None = None,
    ) -> tuple[Outgoing, T]:
        """Send a request and wait for its reply; ``said`` is what the session socket has to say of it before."""
        outgoing = self._core.request(operation.body, operation.ids, deadline_ms=milliseconds(deadline_s))
        if said is not None and self._channel is not None:
            frames = said(outgoing.message_id)
            if frames:
                self._channel.say(frames)
        self._put(outgoing)
        return outgoing, self.wait(PendingReply(operation, outgoing.message_id, deadline_s + margin_s))

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
        elif isinstance(news, WorkChanged):
            self._changed.append(news.work)
        return True

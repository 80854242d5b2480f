"""The client's end of the session socket: opens a session, or resumes it, receives descriptors, notices its end."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self, TypeAlias, TypeVar

from kvferry.clients.daemon_socket import no_answer
from kvferry.protocol.errors import (
    AccessDeniedError,
    DaemonLostError,
    KvferryError,
    MalformedError,
    OverloadedError,
    SessionLostError,
    raised,
)
from kvferry.protocol.session_stream import (
    EventsFollow,
    FrameSplitter,
    MemoryFollows,
    RegionFollows,
    SessionEnd,
    SessionFrame,
    SessionOpen,
    SessionOpened,
    SessionRefused,
    ShareFollows,
    TablesFollow,
    pack,
    unpack_frame,
)
from kvferry.protocol.settings import SESSION_SOCKET

OPENING_TIMEOUT_S = 10.0
_RECEIVE_BYTES = 4096
_MAX_FDS = 8

Following: TypeAlias = RegionFollows | EventsFollow | ShareFollows | TablesFollow
"""What the daemon says of a request before it replies."""

FollowingT = TypeVar("FollowingT", bound=Following)


class Followed(NamedTuple):
    """A frame that came for a request, and its descriptors."""

    frame: Following | None
    fds: list[int]


class SessionChannel:
    """An open session. Its socket is non-blocking; a shell waits until it is readable and calls ``receive``."""

    def __init__(self, channel: socket.socket, opened: SessionOpened, *, kept: bool = False) -> None:
        """Take a socket over whose session is open; ``kept``: the daemon has to be told when it ends."""
        self.socket = channel
        self.opened = opened
        self._kept = kept
        self._ended = False
        self._frames = FrameSplitter()
        self._fds: deque[int] = deque()
        self._followed: dict[int, Followed] = {}
        self._saying = threading.Lock()
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)

    @property
    def is_kept(self) -> bool:
        """Return whether the session outlives its socket."""
        return self._kept

    @classmethod
    def open(
        cls, runtime_dir: str | os.PathLike[str], opening: SessionOpen, timeout_s: float = OPENING_TIMEOUT_S
    ) -> SessionChannel:
        """Connect and open a session; blocks for as long as the daemon takes to answer, at most ``timeout_s``.

        Raises:
            DaemonLostError: no daemon listens there, or it does not answer.
            SessionLostError: it has nothing of the session to resume.
            AccessDeniedError: this user may not connect.
            OverloadedError: too many clients connect at once.
            KvferryError: the daemon refuses the session.
        """
        ends_at = time.monotonic() + timeout_s
        with SessionOpening(runtime_dir, opening) as under_way:
            while (channel := under_way.advance()) is None:
                left_s = ends_at - time.monotonic()
                if left_s <= 0:
                    raise no_answer(runtime_dir, timeout_s)
                under_way.wait(left_s)
        return channel

    @property
    def is_readable(self) -> bool:
        """Return whether something has come, or the end."""
        return bool(self._poll.poll(0))

    def receive(self) -> None:
        """Take what has arrived, without waiting.

        Raises:
            DaemonLostError: the daemon closed the session: it ended, or threw us out.
        """
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.socket, _RECEIVE_BYTES, _MAX_FDS)
            except BlockingIOError:
                return
            except OSError as cause:
                raise DaemonLostError(f"the session's socket: {cause.strerror}") from cause
            self._fds.extend(fds)
            if not data:
                raise DaemonLostError("the daemon closed the session")
            for frame in self._frames.feed(data):
                message = unpack_frame(frame)
                count = _fds_of(message)
                if isinstance(message, Following) and len(self._fds) >= count:
                    fds = [self._fds.popleft() for _ in range(count)]
                    self._followed[message.message_id] = Followed(message, fds)

    def has(self, message_id: int) -> bool:
        """Return whether something came for a request, which ``take`` has not returned yet."""
        return message_id in self._followed

    def take(self, message_id: int, kind: type[FollowingT]) -> tuple[FollowingT, list[int]]:
        """Return what came for a request, and its descriptors, which the caller owns.

        Raises:
            MalformedError: no such frame came, or without its descriptors: the daemon sends them before the reply.
        """
        frame, fds = self._followed.pop(message_id, Followed(None, []))
        if not isinstance(frame, kind):
            raise MalformedError(f"no {kind.__name__} came with the reply to message {message_id}")
        return frame, fds

    def send(self, frames: Sequence[ShareFollows | MemoryFollows], fds: Sequence[int] = ()) -> None:
        """Say what a request registers, before the request; waits where the daemon is slow to read.

        ``fds`` go with the first byte; they stay the caller's.

        Raises:
            DaemonLostError: the daemon closed the session, or does not read.
        """
        data = memoryview(b"".join(pack(frame) for frame in frames))
        ends_at = time.monotonic() + OPENING_TIMEOUT_S
        with self._saying:  # what two say must not mix
            while data:
                try:
                    sent = socket.send_fds(self.socket, [data], fds) if fds else self.socket.send(data)
                    data, fds = data[sent:], ()
                except BlockingIOError:
                    self._wait_until_writable(ends_at - time.monotonic())
                except OSError as cause:
                    raise DaemonLostError(f"the session's socket: {cause.strerror or cause}") from cause

    def _wait_until_writable(self, timeout_s: float) -> None:
        """Wait, and leave the socket as it is for whoever receives meanwhile: one that had a timeout would block."""
        poll = select.poll()
        poll.register(self.socket.fileno(), select.POLLOUT)
        if timeout_s <= 0 or not poll.poll(timeout_s * 1000):
            raise DaemonLostError("the session's socket: the daemon does not read")

    def end(self) -> bool:
        """End the session: the daemon takes back what it owns, though a forked child has the socket too.

        Return False if the daemon does not hear it, as the socket is lost, and keeps the session.
        """
        if not self._ended:
            self._ended = not self._kept
            with contextlib.suppress(OSError):  # ended by the daemon, or closed
                if self._kept:
                    self.socket.send(pack(SessionEnd()))
                    self._ended = True
                self.socket.shutdown(socket.SHUT_RDWR)
        return self._ended

    def close(self) -> None:
        """Give this process's descriptors back. Closing twice does nothing."""
        self.socket.close()
        for fd in (*self._fds, *(fd for one in self._followed.values() for fd in one.fds)):
            os.close(fd)
        self._fds.clear()
        self._followed.clear()


def close_left(fds: list[int]) -> None:
    """Close the descriptors that nobody has taken out of the list."""
    while fds:
        os.close(fds.pop())


def _fds_of(message: SessionFrame) -> int:
    """Return how many descriptors come with a frame."""
    return {RegionFollows: 1, EventsFollow: 2, TablesFollow: 2}.get(type(message), 0)


class SessionOpening:
    """A session that is being opened, without waiting: ``advance`` it when its socket is readable."""

    def __init__(self, runtime_dir: str | os.PathLike[str], opening: SessionOpen) -> None:
        """Connect, and ask for the session.

        Raises:
            DaemonLostError: no daemon listens there.
            AccessDeniedError: this user may not connect.
            OverloadedError: too many clients connect at once.
        """
        path = os.path.join(runtime_dir, SESSION_SOCKET)  # noqa: PTH118  see ``protocol.settings``
        self._opening = opening
        self._path = path
        self._frames = FrameSplitter()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self.socket.connect(path)
            self.socket.send(pack(opening))  # a fresh socket's buffer holds it
        except OSError as cause:
            self.socket.close()
            raise self._failed(cause) from cause

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the socket, unless a channel has it."""
        if error is not None:
            self.close()

    def advance(self) -> SessionChannel | None:
        """Read what has arrived; return the open session, which has the socket then, or None: not yet.

        Raises:
            DaemonLostError: the daemon closed the socket.
            SessionLostError: it has nothing of the session to resume.
            KvferryError: it refuses the session.
        """
        while True:
            try:
                data = self.socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return None
            except OSError as cause:
                raise self._failed(cause) from cause
            if not data:
                raise DaemonLostError("the daemon closed the session socket without an answer")
            for frame in self._frames.feed(data):
                return SessionChannel(self.socket, self._opened(unpack_frame(frame)), kept=self._opening.keep)

    def end(self) -> None:
        """Say that the session is to end as soon as it is open; the daemon hears it though the socket is closed."""
        with contextlib.suppress(OSError):
            self.socket.send(pack(SessionEnd()))
        self.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until there is something to read, at most so long."""
        poll = select.poll()
        poll.register(self.socket.fileno(), select.POLLIN)
        poll.poll(timeout_s * 1000)

    def close(self) -> None:
        """Give it up."""
        self.socket.close()

    def _opened(self, message: SessionFrame) -> SessionOpened:
        if isinstance(message, SessionRefused):
            raise raised(message.error)
        if not isinstance(message, SessionOpened):
            raise MalformedError(f"the daemon opened with {type(message).__name__}")
        if self._opening.resume and not message.resumed:
            raise SessionLostError("this daemon has nothing of the session that was to be resumed")
        return message

    def _failed(self, cause: OSError) -> KvferryError:
        if isinstance(cause, PermissionError):
            return AccessDeniedError(f"{self._path}: {cause.strerror}")
        if isinstance(cause, BlockingIOError):
            return OverloadedError(f"{self._path}: too many clients wait to be accepted")
        return DaemonLostError(f"no daemon answers at {self._path}: {cause.strerror or cause}")

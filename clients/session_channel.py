"""The client's end of the session socket: opens the session, receives descriptors, notices the daemon's end."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from kvferry.protocol.errors import AccessDeniedError, DaemonLostError, MalformedError, OverloadedError, raised
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

FollowingT = TypeVar("FollowingT", RegionFollows, EventsFollow, ShareFollows, TablesFollow)


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
        self._frames = FrameSplitter()
        self._fds: deque[int] = deque()
        self._followed: dict[int, Followed] = {}
        self._saying = threading.Lock()

    @classmethod
    def open(cls, runtime_dir: str | os.PathLike[str], opening: SessionOpen) -> SessionChannel:
        """Connect and open a session; blocks for as long as the daemon takes to answer, at most ten seconds.

        Raises:
            DaemonLostError: no daemon listens there, or it does not answer, or has nothing of the session to resume.
            AccessDeniedError: this user may not connect.
            OverloadedError: too many clients connect at once.
            KvferryError: the daemon refuses the session.
        """
        path = os.path.join(runtime_dir, SESSION_SOCKET)  # noqa: PTH118  see ``protocol.settings``
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            channel.settimeout(OPENING_TIMEOUT_S)
            channel.connect(path)
            channel.sendall(pack(opening))
            opened = _opened(channel, opening)
        except PermissionError as cause:
            channel.close()
            raise AccessDeniedError(f"{path}: {cause.strerror}") from cause
        except BlockingIOError as cause:
            channel.close()
            raise OverloadedError(f"{path}: too many clients wait to be accepted") from cause
        except OSError as cause:
            channel.close()
            raise DaemonLostError(f"no daemon answers at {path}: {cause.strerror or cause}") from cause
        except BaseException:
            channel.close()
            raise
        channel.setblocking(False)  # noqa: FBT003  socket's own signature
        return cls(channel, opened, kept=opening.keep)

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

    def end(self) -> None:
        """End the session: the daemon takes back what it owns, though a forked child has the socket too."""
        with contextlib.suppress(OSError):  # ended by the daemon, or closed
            if self._kept:
                self.socket.send(pack(SessionEnd()))
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give this process's descriptors back. Closing twice does nothing."""
        self.socket.close()
        for fd in (*self._fds, *(fd for one in self._followed.values() for fd in one.fds)):
            os.close(fd)
        self._fds.clear()
        self._followed.clear()


def _fds_of(message: SessionFrame) -> int:
    """Return how many descriptors come with a frame."""
    if isinstance(message, TablesFollow):
        return 2 if message.share is None else 1
    return {RegionFollows: 1, EventsFollow: 2}.get(type(message), 0)


def _opened(channel: socket.socket, opening: SessionOpen) -> SessionOpened:
    frames = FrameSplitter()
    while True:
        data = channel.recv(_RECEIVE_BYTES)
        if not data:
            raise DaemonLostError("the daemon closed the session socket without an answer")
        for frame in frames.feed(data):
            message = unpack_frame(frame)
            if isinstance(message, SessionRefused):
                raise raised(message.error)
            if isinstance(message, SessionOpened) and opening.resume and not message.resumed:
                raise DaemonLostError("this daemon has nothing of the session that was to be resumed")
            if isinstance(message, SessionOpened):
                return message
            raise MalformedError(f"the daemon opened with {type(message).__name__}")

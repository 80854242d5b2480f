"""The connection of the quick commands: one conversation over the daemon's control socket, with or without a session.

Independent of message types; imports neither the clients nor numpy nor an event loop: see ``conversation``.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, cast

import zmq

from kvferry.clients.cli.progress import INTERVAL_S, Progress
from kvferry.clients.daemon_socket import LAST_WORDS_MS, find_runtime_dir, no_answer, open_control_socket
from kvferry.protocol.base import AnsweredBy, ReplyBody, RequestBody
from kvferry.protocol.conversation import Arrived, Conversation
from kvferry.protocol.errors import DaemonLostError, DeadlineError
from kvferry.protocol.limits import PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.protocol.printable import printable
from kvferry.protocol.session_messages import Hello, Welcome

if TYPE_CHECKING:
    from kvferry.clients.session_channel import SessionChannel

ReplyT = TypeVar("ReplyT", bound=ReplyBody)
NOBLOCK = int(zmq.NOBLOCK)
LOOK_S = 0.1


class Connection:
    """A conversation with the daemon of this node. Leaving the context ends its session."""

    welcome: Welcome

    def __init__(self, name: str, runtime_dir: str, channel: SessionChannel | None, ends_at: float) -> None:
        """Use ``open``."""
        self._name = name
        self._ends_at = ends_at
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_control_socket(self._context, runtime_dir)
        self._channel = channel
        opened = channel.opened if channel else None
        self._conversation = Conversation(opened.boot_id, opened.secret) if opened else Conversation()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if channel is not None:
            self._poller.register(channel.socket.fileno(), zmq.POLLIN)

    @classmethod
    def open(
        cls,
        runtime_dir: str | os.PathLike[str] | None,
        name: str,
        *,
        timeout_s: float,
        session: bool = False,
        instance: str = "",
        wait_s: float = 0.0,
    ) -> Connection:
        """Connect and negotiate the protocol version.

        Args:
            runtime_dir: where the daemon's sockets are; by default the directory that ``kvferry daemon`` chooses.
            name: shown in the daemon's status and logs.
            timeout_s: how long to wait for the daemon.
            session: whether to open one.
            instance: whose session it is to be; see ``SessionOpen``.
            wait_s: how long to wait for a daemon that is not there, as while it restarts; says so on standard error.

        Raises:
            DaemonLostError: no daemon answers.
            AccessDeniedError: this user may not use the daemon.
            VersionMismatchError: the daemon supports other versions of the protocol.
        """
        waits_until, told = time.monotonic() + wait_s, False
        while True:
            try:
                return cls._open(runtime_dir, name, timeout_s, session=session, instance=instance)
            except DaemonLostError as error:
                if time.monotonic() >= waits_until:
                    raise
                if not told:
                    waiting = f"kvferry {name}: {error.detail}; waiting for a daemon, at most {wait_s:g} s"
                    print(printable(waiting), file=sys.stderr, flush=True)
                told = True
                time.sleep(LOOK_S)  # nothing tells that a daemon listens again

    @classmethod
    def _open(
        cls, runtime_dir: str | os.PathLike[str] | None, name: str, timeout_s: float, *, session: bool, instance: str
    ) -> Connection:
        directory, ends_at = find_runtime_dir(runtime_dir), time.monotonic() + timeout_s
        channel = None
        if session:
            from kvferry.clients.session_channel import SessionChannel  # noqa: PLC0415  ping and status do not need it
            from kvferry.protocol.session_stream import SessionOpen  # noqa: PLC0415  the same

            opening = SessionOpen(protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, name=name, instance=instance)
            channel = SessionChannel.open(directory, opening, timeout_s)
        connection = cls(name, directory, channel, ends_at)
        hello = Hello(protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, client=name)
        try:
            connection.welcome = connection.call(hello, timeout_s=max(0.0, ends_at - time.monotonic()))
        except DeadlineError as cause:
            connection.close()
            raise no_answer(directory, timeout_s) from cause
        except BaseException:
            connection.close()
            raise
        return connection

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self.close()

    def __repr__(self) -> str:
        """Show the session."""
        return f"<Connection session={self._channel.opened.session if self._channel else None}>"

    @property
    def boot_id(self) -> str:
        """Return the daemon's boot id."""
        return self._conversation.boot_id

    @property
    def left_s(self) -> float:
        """Return what is left of the time that ``open`` was given: a command's first request has that."""
        return max(0.0, self._ends_at - time.monotonic())

    def close(self) -> None:
        """End the session. Closing twice does nothing."""
        if self._channel is not None:
            self._channel.close()
        self._socket.close()
        self._context.term()

    def send(self, body: RequestBody, frames: Sequence[bytes] = (), *, deadline_s: float) -> int:
        """Send a request with this deadline; return its message id."""
        number, outgoing = self._conversation.request(body, frames, deadline_ms=max(1, round(deadline_s * 1000)))
        self._socket.send_multipart(outgoing, NOBLOCK)
        return number

    def take(self, timeout_s: float, also: int | None = None) -> Arrived | None:
        """Return the next message; None if none comes in time, or ``also`` becomes readable first.

        Args:
            timeout_s: how long to wait; ``math.inf`` to wait forever.
            also: another descriptor to wait for, such as standard input's.

        Raises:
            DaemonLostError: the daemon is gone.
        """
        waited_ms = None if math.isinf(timeout_s) else math.ceil(timeout_s * 1000)
        if also is not None:
            self._poller.register(also, zmq.POLLIN)
        try:
            ready = dict(self._poller.poll(waited_ms))
        finally:
            if also is not None:
                self._poller.unregister(also)
        if self._channel is not None and self._channel.socket.fileno() in ready:
            try:
                self._channel.receive()
            except DaemonLostError:
                if not self._socket.poll(LAST_WORDS_MS):
                    raise
                ready[self._socket] = zmq.POLLIN
        if self._socket in ready:
            return self._conversation.feed(self._socket.recv_multipart(NOBLOCK))
        return None

    def call(self, body: AnsweredBy[ReplyT], *, timeout_s: float, deadline_s: float | None = None) -> ReplyT:
        """Send a request and return its reply.

        Args:
            body: the message.
            timeout_s: how long to wait for the reply.
            deadline_s: how long the daemon may take; by default as long.

        Raises:
            KvferryError: it was refused, no reply came in time, or the daemon is gone.
        """
        ends_at = time.monotonic() + timeout_s
        progress = Progress(self._name, "the daemon has not answered yet")
        number = self.send(body, deadline_s=timeout_s if deadline_s is None else deadline_s)
        try:
            while (left_s := ends_at - time.monotonic()) > 0:
                arrived = self.take(min(left_s, INTERVAL_S))
                if arrived is None or arrived.message_id != number:
                    progress.look()
                    continue
                if arrived.error is not None:
                    raise arrived.error
                return cast("ReplyT", arrived.body)  # decoded as its reply
        finally:
            progress.end()
        raise DeadlineError(f"the daemon's reply did not come within {timeout_s:g} s")

"""How a client goes on after it has lost its daemon: what both clients do, a step at a time, without waiting.

A loss is noticed by the session's socket or by the control socket's connection. Where only the latter broke, it is
opened anew. Else the session is resumed by its secret: within ``limits.resume_grace_ms``, at the same daemon or at the
one after it, which may have adopted the session. Until then requests are kept; ``protocol.client_core`` decides what
becomes of those that were under way.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvferry.clients import calls
from kvferry.clients.calls import Call
from kvferry.clients.connection import Connection, Link, Reconnected
from kvferry.clients.daemon_socket import LAST_WORDS_MS
from kvferry.clients.session_channel import SessionChannel, SessionOpening
from kvferry.clients.submissions import Submissions
from kvferry.protocol.client_core import BatchAnswered, News, Outgoing, ReplyArrived
from kvferry.protocol.errors import DaemonLostError, KvferryError
from kvferry.protocol.reconnection import Reconnection
from kvferry.protocol.session_stream import MemoryFollows, SessionOpen, ShareFollows

LOOK_S: Final = 0.05
"""How long a wait for the daemon's return may be at a time: a client that is closed meanwhile is told after it."""

REOPEN_S: Final = 0.01
"""After how long a control socket is opened anew: by then it is known whether the session is gone, too."""


class Said(NamedTuple):
    """What the session's socket says of a request before it, by the request's number, and what goes with it."""

    frames: Callable[[int], Sequence[ShareFollows | MemoryFollows]]
    fds: Sequence[int] = ()


class Loss:
    """A daemon that is gone."""

    def __init__(self, error: KvferryError, until_s: float, *, session: bool) -> None:
        """``until_s``: of the session, how long its last words are listened to; else when a new connection is due."""
        self.error = error
        self.until_s = until_s
        self.session = session
        self.attempts: Reconnection | None = None


Steps = Generator[Call[Any], ReplyArrived | None, None]
"""Requests that the client sends by itself, one after another; each gets its reply, the first one None."""


class Resuming(Submissions):
    """One session, across losses of its daemon."""

    def __init__(self, connection: Connection | None = None, *_: object, **__: object) -> None:
        super().__init__(connection)
        assert connection is not None
        self._name = connection.opening.name
        resumption = None
        if connection.reconnect and connection.channel is not None:
            secret = connection.channel.opened.secret
            resumption = msgspec.structs.replace(connection.opening, resume=secret)
        self._link = Link(connection.runtime_dir, connection.channel, resumption)
        self._socket = self._link.control
        self._on_reconnect = connection.on_reconnect
        self._held = False
        self._loss: Loss | None = None
        self._dead: KvferryError | None = None
        self._said: dict[int, Said] = {}
        self._steps: Steps | None = None
        self._asked = 0
        self._epoch = 0

    # -- what each kind of client does in its own way

    @abstractmethod
    def _transmit(self, outgoing: Outgoing) -> None:
        """Send a message."""

    @abstractmethod
    def _connected(self) -> None:
        """Listen to the sockets that ``self._link`` has now."""

    @abstractmethod
    def _disconnected(self) -> None:
        """Listen to the sockets no longer: they are about to be closed."""

    @abstractmethod
    def _tell(self, event: Reconnected) -> None:
        """Call ``on_reconnect``, if there is one."""

    @abstractmethod
    def _failed(self, error: KvferryError) -> None:
        """Wake whoever waits: the daemon is lost for good."""

    # -- sending

    def _put(self, outgoing: Outgoing) -> None:
        if self._dead is not None:
            raise self._dead
        outgoing = self._core.sent(outgoing, time.monotonic(), connected=not self._held)
        if not self._held:
            self._transmit(outgoing)

    def _release(self) -> None:
        """Send what was kept."""
        self._held = False
        limits = self._limits()
        for outgoing in self._core.waiting(time.monotonic(), limits.default_deadline_ms):
            said = self._said.get(outgoing.message_id)
            if said is not None and self._say(said.frames(outgoing.message_id), said.fds):
                return
            self._transmit(outgoing)

    def _say(self, frames: Sequence[ShareFollows | MemoryFollows], fds: Sequence[int]) -> bool:
        """Say it over the session's socket; return whether that is lost, which its reader finds, too."""
        try:
            if frames and self._channel is not None:
                self._channel.send(frames, fds)
        except DaemonLostError:
            return True
        return False

    # -- losing the daemon

    def _read_channel(self) -> SessionChannel:
        """Take what has come by the session's socket; return it."""
        channel = self._open_channel()
        try:
            channel.receive()
        except DaemonLostError as error:
            self._session_lost(error)
        return channel

    def _was_lost_since(self, epoch: int) -> bool:
        """Return whether a connection was lost since ``self._epoch`` had this value."""
        return self._epoch != epoch or self._loss is not None

    @property
    def _is_heard(self) -> bool:
        """Return whether, while the daemon is lost, the sockets of before are still there."""
        return self._loss is not None and self._loss.attempts is None and self._dead is None

    def _session_lost(self, error: KvferryError) -> None:
        """Begin a loss. The daemon's last words may still be read from the control socket."""
        if self._loss is None or not self._loss.session:
            self._begin_loss(Loss(error, time.monotonic() + LAST_WORDS_MS / 1000, session=True))

    def _control_lost(self) -> None:
        """Begin the loss of the control socket alone: the session is there still."""
        if self._loss is None and self._channel is not None:
            lost = DaemonLostError("the control socket's connection was closed")
            self._begin_loss(Loss(lost, time.monotonic() + REOPEN_S, session=False))

    def _begin_loss(self, loss: Loss) -> None:
        self._held, self._steps = True, None
        self._core.forget(self._asked)
        self._loss = loss

    def _forsake(self, loss: Loss) -> None:
        """Close the sockets: no word can come any more."""
        assert self._channel is not None
        self._disconnected()
        self._link.drop()
        self._channel.close()
        grace_s = self._limits().resume_grace_ms / 1000
        if not grace_s or self._link.resumption is None or self.welcome is None:
            self._end(loss.error)
            return
        loss.attempts = Reconnection(loss.error, time.monotonic(), grace_s)
        self._cut()

    def _end(self, error: KvferryError) -> None:
        """Give up: this client is dead, and so is everything that it began."""
        self._disconnected()
        self._link.drop()
        self._begin_loss(Loss(error, 0.0, session=True))
        self._dead = error
        self._core.lost(error)
        self._failed(error)

    def _cut(self) -> None:
        for one in self._core.disconnected():
            self._hear(one)

    # -- finding it again

    def _seek(self) -> float:
        """Take the next step towards the daemon; return for how many seconds there is nothing to do.

        Unless a socket becomes readable before: that of ``self._link.opening``, or while there is none those of before.
        """
        loss, now_s = self._loss, time.monotonic()
        if loss is None or self._dead is not None:
            return 0.0
        if loss.attempts is not None:
            assert self._link.resumption is not None
            return self._attempt(loss.attempts, self._link.resumption, now_s)
        if now_s < loss.until_s and not (loss.session and self._link.is_cut()):
            return loss.until_s - now_s
        if loss.session:
            self._forsake(loss)
        else:
            self._cut()
            self._connect(None)
        return 0.0

    def _attempt(self, attempts: Reconnection, resumption: SessionOpen, now_s: float) -> float:
        try:
            if self._link.opening is None:
                if pause_s := attempts.pause_s(now_s):
                    return pause_s
                self._link.opening = SessionOpening(self._link.runtime_dir, resumption)
            channel = self._link.opening.advance()
        except KvferryError as error:
            self._link.give_up_opening()
            final = attempts.failed(error, now_s)
        else:
            if channel is not None:
                self._link.opening = None
                self._connect(channel)
                return 0.0
            final = attempts.overdue(now_s)
        if final is not None:
            self._end(final)
        return LOOK_S if self._link.opening is not None else 0.0

    def _connect(self, channel: SessionChannel | None) -> None:
        """Go on by a new control socket; ``channel``: the session's new socket, None: it has its old one."""
        self._disconnected()
        self._loss = None
        self._channel = channel or self._channel
        self._link.renew(channel)
        self._go_on(channel or self._channel)

    def _go_on(self, channel: SessionChannel | None) -> None:
        assert channel is not None
        self._socket = self._link.control
        self._epoch += 1
        self._connected()
        if channel.opened.boot_id == self._core.boot_id:
            self._begin_steps(self._greet())
        else:
            self._end(DaemonLostError("another daemon"))

    def _greet(self) -> Steps:
        """Go on with the same daemon, which has everything still."""
        self._release()
        yield from self._hello()
        self._tell(Reconnected(self.boot_id, self.boot_id))

    def _hello(self) -> Steps:
        call = calls.hello(self._name)
        reply = yield call
        assert reply is not None
        if reply.error is not None:
            self._end(reply.error)
        else:
            self.welcome = call.read(reply)

    def _begin_steps(self, steps: Steps) -> None:
        self._steps = steps
        self._advance(None)

    def _advance(self, reply: ReplyArrived | None) -> None:
        steps = self._steps
        assert steps is not None
        try:
            call = steps.send(reply)
        except StopIteration:
            self._steps = None
            return
        if self._steps is steps:  # it was not lost meanwhile
            outgoing = self._core.request(call.body, call.ids)
            self._asked = outgoing.message_id
            self._transmit(self._core.sent(outgoing, time.monotonic(), connected=True))

    def _hear(self, news: News | BatchAnswered) -> None:
        super()._hear(news)
        if self._steps is not None and isinstance(news, ReplyArrived) and news.message_id == self._asked:
            self._advance(self._replies.pop(news.message_id))

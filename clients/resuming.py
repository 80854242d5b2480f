"""How both clients go on after they have lost their daemon: a step at a time, without waiting.

The session's socket or the control socket's connection shows a loss. If only the latter broke, it is opened anew. Else
the session is resumed by its secret: within ``limits.resume_grace_ms``, at the same daemon or the next one, which may
have adopted the session. Until then requests are kept; ``core.client_core`` decides what becomes of those under way.
"""

from __future__ import annotations

import os
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import zmq

from kvferry.clients import calls
from kvferry.clients.calls import Call, asked
from kvferry.clients.connection import Connection, Link, Reconnected
from kvferry.clients.core.client_core import Ended, Outgoing, ReplyArrived, stale
from kvferry.clients.core.held_pages import HeldPages
from kvferry.clients.core.reconnection import Reconnection
from kvferry.clients.daemon_socket import LAST_WORDS_MS
from kvferry.clients.events import EventRing, RingPlan
from kvferry.clients.session_channel import SessionChannel, SessionOpening
from kvferry.clients.submissions import Submissions
from kvferry.clients.tables import Place
from kvferry.protocol.base import ErrorReply, ReplyBody
from kvferry.protocol.codec import Frames, PageIds, unpacked
from kvferry.protocol.errors import (
    DaemonLostError,
    DeadlineError,
    KvferryError,
    OverloadedError,
    PoolLostError,
    UnknownPoolError,
)
from kvferry.protocol.ids import BootId
from kvferry.protocol.pool_messages import AttachPool, Free, Freed
from kvferry.protocol.session_stream import MemoryFollows, SessionOpen, ShareFollows, TablesFollow

LOOK_S: Final = 0.05
"""How long a wait for the daemon's return may be at a time: a client that is closed meanwhile is told after it."""

BUSY_TRIES: Final = 100
"""How often a daemon that has just begun may say BUSY to what a client asks it first."""

REOPEN_S: Final = 0.01
"""After how long a control socket is opened anew: by then it is known whether the session is gone, too."""


class Said(NamedTuple):
    """What the session's socket says of a request before it, by the request's number, and what goes with it."""

    frames: Callable[[int], Sequence[ShareFollows | MemoryFollows]]
    fds: Sequence[int] = ()


class Registration(NamedTuple):
    """How a pool is registered: it holds the memory."""

    call: Call[Any]
    frames: Callable[[int], Sequence[ShareFollows | MemoryFollows]]
    fds: tuple[int, ...] = ()


class Keeps:
    """What a client has of its daemon, and compares with the next one's.

    Attributes:
        regions: the number of each attached pool's memory: its tensors may live longer than who attached it.
        rings: the session's event rings.
        registered: how each pool was registered.
        places: where each pool is that was attached or registered.
    """

    def __init__(self) -> None:
        self.regions: dict[str, int] = {}
        self.rings: weakref.WeakSet[EventRing] = weakref.WeakSet()
        self.registered: dict[str, Registration] = {}
        self.places: dict[str, Place] = {}
        self._plan = RingPlan()

    def __repr__(self) -> str:
        """Show the pools."""
        return f"<Keeps {list(self.regions)} {list(self.registered)}>"

    def plan_of(self, ring: int) -> RingPlan:
        """Return which events were made of the session's ring, by the daemon's number of it."""
        if self._plan.number != ring:
            self._plan = RingPlan(ring)
        return self._plan

    def add_registration(self, name: str, one: Registration) -> None:
        """Remember how a pool was registered, and hold its memory."""
        self.forget_pool(name)
        self.registered[name] = one._replace(fds=tuple(os.dup(fd) for fd in one.fds))

    def forget_pool(self, name: str) -> None:
        """Forget a pool that is deleted."""
        gone = self.registered.pop(name, None)
        for fd in gone.fds if gone else ():
            os.close(fd)
        self.regions.pop(name, None)
        self.places.pop(name, None)

    def close(self) -> None:
        """Give the registered pools' descriptors back, and close the rings."""
        for ring in list(self.rings):
            ring.close()
        for name in list(self.registered):
            self.forget_pool(name)


class Loss:
    """A daemon that is gone."""

    def __init__(self, error: KvferryError, until_s: float, *, session: bool) -> None:
        """``until_s``: of the session, how long its last words are listened to; else when a new connection is due."""
        self.error = error
        self.until_s = until_s
        self.session = session
        self.attempts: Reconnection | None = None


class TablesAfterwards(NamedTuple):
    """The names of tables that are no more, and of those whose contents the daemon does not believe."""

    lost: tuple[str, ...]
    emptied: tuple[str, ...]


Steps = Generator[Call[Any] | Registration, ReplyArrived | None, None]
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
        self._keeps = Keeps()
        self._link.closes.append(self._keeps)
        self._recovered = self.boot_id
        self._ended: list[Ended] = []

    @property
    def is_away(self) -> bool:
        """Return whether it has lost its daemon: requests are kept, or, once it has given up, refused."""
        return self._loss is not None

    @property
    def sockets(self) -> list[zmq.Socket[bytes] | int]:
        """Return what becomes readable when there may be something for ``poll``.

        An engine that waits for other things, too, waits for all of them with one ``zmq.Poller``, and calls ``poll(0)``
        then. They are others after each loss of the daemon, and none while it is away: ask each time.
        """
        if self._loss is not None or self._socket.closed:
            return []
        found: list[zmq.Socket[bytes] | int] = [self._socket]
        if self._channel is not None:
            found.append(self._channel.socket.fileno())
        if self._link.watch is not None:
            found.append(self._link.watch.FD)
        return found

    # -- what each kind of client does in its own way

    @abstractmethod
    def _transmit(self, frames: Frames) -> None:
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

    def _put(self, outgoing: Outgoing, frames: Frames | None = None) -> None:
        if self._dead is not None:
            raise self._dead
        if self._loss is None and self._core.is_idle and self._channel is not None and self._channel.is_readable:
            self._read_channel()  # the daemon may have been restarted since somebody looked
        now = None if self._held else frames or self._core.frames(outgoing)  # before it is on the books: it may fail
        self._core.sent(outgoing, time.monotonic(), connected=now is not None)
        if now is not None:
            self._transmit(now)

    def _release(self) -> None:
        """Send what was kept."""
        self._held = False
        limits = self._limits()
        for outgoing in self._core.waiting(time.monotonic(), limits.default_deadline_ms):
            said = self._said.get(outgoing.message_id)
            if said is not None and self._say(said.frames(outgoing.message_id), said.fds):
                return
            self._transmit(self._core.frames(outgoing))

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
        """Return whether, while the daemon is lost, the previous sockets still exist."""
        return self._loss is not None and self._loss.attempts is None and self._dead is None

    def _session_lost(self, error: KvferryError) -> None:
        """Begin a loss. The daemon's last words may still be read from the control socket."""
        if self._loss is None or not self._loss.session:
            self._begin_loss(Loss(error, time.monotonic() + LAST_WORDS_MS / 1000, session=True))

    def _other_daemon(self, boot_id: BootId) -> None:
        if self._channel is not None:
            self._session_lost(DaemonLostError(f"the daemon was restarted: another one answers, {boot_id[:8]}"))
        elif boot_id != self.boot_id:  # without a session nothing can be lost
            for one in self._core.restarted(boot_id, b"").news:
                self._hear(one)
        if self._channel is None:
            self._release()

    def _control_lost(self) -> None:
        """Begin the loss of the control socket alone: the session still exists."""
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
        opened = channel.opened
        if opened.boot_id != self._core.boot_id:
            ended = self._core.restarted(BootId(opened.boot_id), opened.secret)
            self._ended.append(ended)
            for one in ended.news:
                self._hear(one)
        self._begin_steps(self._greet() if opened.boot_id == self._recovered else self._recover())

    # -- going on with the next daemon

    def _recover(self) -> Steps:
        """Go on with the daemon that has adopted the session: see what it has of ours, and believe what is proved."""
        keeps, old = self._keeps, self._recovered
        if not (yield from self._hello()):
            return
        for ring in keeps.rings:
            ring.outlive()
        rings = bool(keeps.rings)
        for name, region in list(keeps.regions.items()):
            yield from self._see_again(name, region)
        for name, one in list(keeps.registered.items()):
            yield from self._register_again(name, one)
        tables = yield from self._go_on_with_tables()
        if tables is None:
            return
        pages: dict[tuple[str, str], PageIds] = {}
        frees = [one for ended in self._ended for one in ended.frees]
        held = self._core.held
        if held is not None:
            for name in sorted((held.pools | {_freed(one).pool for one in frees}) - keeps.registered.keys()):
                its = [one for one in frees if _freed(one).pool == name]
                yield from self._settle_books(held, name, its, pages)
        ended, self._ended = self._ended, []
        keeps.rings.clear()
        self._recovered = self.boot_id
        self._release()
        self._tell(
            Reconnected(
                old,
                self.boot_id,
                transfers=tuple(one for each in ended for one in each.transfers),
                operations=tuple(one for each in ended for one in each.operations),
                tables=tables.lost,
                emptied=tables.emptied,
                rings=rings,
                pools=tuple(sorted(self._lost_pools)),
                pages=pages,
            )
        )

    def _see_again(self, name: str, region: int) -> Steps:
        """Ask whether the daemon's pool of that name is the memory that is mapped here; else it is lost."""
        if name in self._keeps.registered:
            return
        reply = yield from _answer(asked(AttachPool(pool=name, region=region)), OverloadedError, DeadlineError)
        if reply.error is not None:
            self._lost_pools.add(name)
            self._keeps.forget_pool(name)

    def _register_again(self, name: str, one: Registration) -> Steps:
        reply = yield from _answer(one)
        if reply.error is not None:
            self._lost_pools.add(name)
            self._keeps.forget_pool(name)

    def _go_on_with_tables(self) -> Generator[Call[Any] | Registration, ReplyArrived | None, TablesAfterwards | None]:
        """Share tables in this process's memory anew, and let others go; return None: the daemon is lost again."""
        lost, emptied = [], []
        for tables in sorted(self._tables, key=lambda one: one.name):
            created = None
            if tables.memory is not None and tables.body.pool not in self._lost_pools:
                call = asked(msgspec.structs.replace(tables.body, shown=tables.shown()))
                reply = yield from _answer(Registration(call, tables.memory.frames))
                channel = self._read_channel()
                if self._loss is not None:
                    return None
                if reply.error is None:
                    created, (_, fds) = call.read(reply), channel.take(reply.message_id, TablesFollow)
                    tables.renew(created, fds)
            if created is None:
                self._tables.discard(tables)
                lost.append(tables.name)
            elif not created.adopted:
                emptied.append(tables.name)
        return TablesAfterwards(tuple(lost), tuple(emptied))

    def _settle_books(
        self, held: HeldPages, pool: str, frees: Sequence[Outgoing], lost: dict[tuple[str, str], PageIds]
    ) -> Steps:
        """Compare who owns which page of a pool: what nobody here knows of goes back, what is missing is said."""
        call = calls.list_owned(pool)
        reply = yield from _answer(call, OverloadedError, DeadlineError)
        owned: dict[str, PageIds] = {}
        if reply.error is None:
            owned = call.read(reply)
        elif isinstance(reply.error, UnknownPoolError | PoolLostError):
            owned = dict.fromkeys(held.spaces_of(pool), np.zeros(0, np.int64))
        for one in frees:
            body, [ids] = _freed(one), unpacked(one.ids)
            still = bool(np.isin(ids, owned.get(body.space, ids[:0])).any())
            if reply.error is not None:
                result: ReplyBody | KvferryError = reply.error
            elif still and body.after is not None:
                result = stale("the daemon was restarted before the pages were free: their event is no more", "absent")
            else:
                held.gave(pool, body.space, ids)
                result = Freed(freed=len(ids), deferred=0)
            for news in self._core.resolve(one, result):
                self._hear(news)
        for space, ids in owned.items():
            unknown, missing = held.compare(pool, space, ids)
            if len(missing):
                lost[pool, space] = missing
            if len(unknown):
                yield calls.free(pool, unknown, space, None)

    def _greet(self) -> Steps:
        """Go on with the same daemon, which still has everything."""
        self._release()
        if (yield from self._hello()):
            self._tell(Reconnected(self.boot_id, self.boot_id))

    def _hello(self) -> Generator[Call[Any] | Registration, ReplyArrived | None, bool]:
        """Hear what the daemon's limits are; return False if it refuses that: this client is dead then."""
        call = calls.hello(self._name)
        reply = yield from _answer(call)
        if reply.error is not None:
            self._end(reply.error)
            return False
        self.welcome = call.read(reply)
        return True

    def _begin_steps(self, steps: Steps) -> None:
        self._steps = steps
        self._advance(None)

    def _advance(self, reply: ReplyArrived | None) -> None:
        steps = self._steps
        assert steps is not None
        try:
            asks = steps.send(reply)
        except StopIteration:
            self._steps = None
            return
        if self._steps is steps:  # it was not lost meanwhile
            one = asks if isinstance(asks, Registration) else Registration(asks, lambda _: ())
            outgoing = self._core.request(one.call.body, one.call.ids)
            self._asked = outgoing.message_id
            try:
                frames = one.frames(self._asked)
            except KvferryError as error:  # of memory that is no more
                self._core.forget(self._asked)
                self._advance(ReplyArrived(self._asked, ErrorReply(error=error.info()), (), error))
                return
            if self._say(frames, one.fds):
                return  # the loss of the socket is about to be found
            self._core.sent(outgoing, time.monotonic(), connected=True)
            self._transmit(self._core.frames(outgoing))

    def _replied(self, reply: ReplyArrived) -> None:
        super()._replied(reply)
        if self._steps is not None and reply.message_id == self._asked:
            self._advance(self._replies.pop(reply.message_id))


def _answer(
    call: Call[Any] | Registration, *again: type[KvferryError]
) -> Generator[Call[Any] | Registration, ReplyArrived | None, ReplyArrived]:
    """Ask, ``again`` where the daemon is busy, or has not adopted the pool, and return the reply."""
    tries = 0
    while True:
        reply = yield call
        assert reply is not None
        tries += 1
        if tries == BUSY_TRIES or not isinstance(reply.error, again or OverloadedError):
            return reply


def _freed(request: Outgoing) -> Free:
    body = request.body
    assert isinstance(body, Free), body
    return body

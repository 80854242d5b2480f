"""The session socket: a Unix stream that lives as long as its session, and passes file descriptors.

A session ends at end-of-file or when the process that opened it ends, whichever is seen first: a forked child keeps the
socket open. A session with ``keep`` survives end-of-file for a while, but not its process. After the opening frame, an
engine may only send shares of memory that it registers, host memory descriptors (one with each MEMORY frame), and the
end of its session; any other descriptor ends the session, and is closed where nobody waits for it: see ``Closer``.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from kvferry.daemon.control.kept_bytes import SHARES
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.sessions import Peer, Session, SessionRegistry
from kvferry.daemon.process.access import Listener, pass_descriptors
from kvferry.daemon.process.closer import Closer, is_memory
from kvferry.daemon.process.descriptors import PER_SESSION, Descriptors
from kvferry.daemon.process.host import started_at
from kvferry.daemon.process.tenants import CREDENTIALS
from kvferry.daemon.quota import Quota
from kvferry.pools.devices.base import Region
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.config.tenants import whose
from kvferry.protocol.errors import (
    RETRY_LATER_MS,
    AccessDeniedError,
    KvferryError,
    MalformedError,
    NoSessionError,
    OutOfDescriptorsError,
    OverloadedError,
)
from kvferry.protocol.ids import BootId
from kvferry.protocol.limits import agree
from kvferry.protocol.session_stream import (
    FrameSplitter,
    MemoryFollows,
    RegionFollows,
    RegionRequest,
    SessionEnd,
    SessionFrame,
    SessionOpen,
    SessionOpened,
    SessionRefused,
    ShareFollows,
    pack,
    unpack_attachment,
    unpack_open,
)

OPENING_TIMEOUT_S: Final = 5.0
ACCEPT_BOUND: Final = 16
"""Connections accepted in a row."""
ACCEPT_PAUSE_S: Final = 1.0
_RECEIVE_BYTES: Final = 4096
MAX_DESCRIPTORS: Final = 2
"""Descriptors taken by one read: the expected one, and a second to detect surplus ones."""
_ANCILLARY_BYTES: Final = socket.CMSG_LEN(MAX_DESCRIPTORS * array.array("i").itemsize)

NOT_KEPT: Final = -1
"""In place of a descriptor that its user may not have any more: it was closed."""
_NO_ROOM: Final = frozenset({errno.ETOOMANYREFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
MAX_MESSAGES_SHARED: Final = 16
MAX_SHARES_SAID: Final = 16_384
SHARE_COPIES: Final = 4
"""So many times as much as on the wire a share takes in memory."""
_SO_PEERPIDFD: Final = 77

MAX_BYTES_SAID_AHEAD: Final = 8 << 20
"""More than a socket's buffer holds, so that everything sent before a message is read."""

REFUSAL_LOG_S: Final = 1.0
"""Of the connections that open no session in such a time the first is logged; anybody may make any number of them."""

log = structlog.get_logger(__name__)


class Attachments:
    """The shares and descriptors that came ahead of their messages; owns the descriptors until they are taken."""

    def __init__(self) -> None:
        self._shares: dict[int, ShareFollows] = {}
        self._fds: list[int] = []  # received, and not named by a frame yet
        self._memory: dict[int, int] = {}

    def __repr__(self) -> str:
        """Show how many there are; never their contents."""
        return f"<Attachments shares={len(self._shares)} descriptors={len(self._fds) + len(self._memory)}>"

    @property
    def unexplained(self) -> int:
        """Return how many descriptors came that no frame has named yet."""
        return len(self._fds)

    @property
    def has_shares(self) -> bool:
        """Return whether it keeps shares for any message."""
        return bool(self._shares)

    @property
    def kept(self) -> int:
        """Return how many descriptors it owns."""
        return sum(fd != NOT_KEPT for fd in (*self._fds, *self._memory.values()))

    def take_share(self, message_id: int) -> ShareFollows | None:
        """Return the shares for a message, or None."""
        return self._shares.pop(message_id, None)

    def take_memory(self, message_id: int) -> int | None:
        """Return the descriptor for a message, or None; the caller owns it from now on."""
        return self._memory.pop(message_id, None)

    def add_descriptors(self, fds: Sequence[int]) -> None:
        """Add received descriptors."""
        self._fds += fds

    def note(self, said: ShareFollows | MemoryFollows) -> None:
        """Keep the contents of a frame for its message.

        Raises:
            MalformedError: the frame names a descriptor that did not come, or a second one for its message.
            OverloadedError: too much is kept for messages that have not come.
        """
        if isinstance(said, ShareFollows):
            self._note_share(said)
        else:
            self._note_memory(said.message_id)

    def close(self) -> None:
        """Drop everything and close the descriptors."""
        for fd in (*self._fds, *self._memory.values()):
            if fd != NOT_KEPT:
                os.close(fd)
        self._fds.clear()
        self._memory.clear()
        self._shares.clear()

    def _note_share(self, said: ShareFollows) -> None:
        known = self._shares.get(said.message_id)
        if known is not None:
            both = (*known.shares, *said.shares)
            said = ShareFollows(message_id=said.message_id, shares=both, events=said.events or known.events)
        elif len(self._shares) >= MAX_MESSAGES_SHARED:
            raise OverloadedError(f"shares for {MAX_MESSAGES_SHARED} messages that never came")
        self._shares[said.message_id] = said
        if sum(len(one.shares) for one in self._shares.values()) > MAX_SHARES_SAID:
            raise OverloadedError(f"more than {MAX_SHARES_SAID} shares for messages that have not come")

    def _note_memory(self, message_id: int) -> None:
        if not self._fds or message_id in self._memory:
            raise MalformedError("each MEMORY frame needs one descriptor, and a message one such frame")
        if len(self._memory) >= MAX_MESSAGES_SHARED:
            raise OverloadedError(f"descriptors for {MAX_MESSAGES_SHARED} messages that never came")
        self._memory[message_id] = self._fds.pop(0)


def _descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
    return fds.tolist()


def peer_of(channel: socket.socket) -> Peer:
    """Return who connected (SO_PEERCRED)."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return Peer(*CREDENTIALS.unpack(credentials))


def pidfd_of(channel: socket.socket, peer: Peer) -> int:
    """Return a descriptor that becomes readable when the peer's process ends, or -1 if the kernel gives none.

    SO_PEERPIDFD (Linux 6.5) identifies the process that connected, even if its pid has been reused since.
    """
    try:
        return channel.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(peer.pid) if peer.pid > 0 else -1
    except OSError:
        return -1


class SessionSocket:
    """Listens on construction; serves between ``start`` and ``close``."""

    def __init__(
        self,
        listener: Listener,
        boot_id: BootId,
        sessions: SessionRegistry,
        counters: Counters,
        began: Callable[[Session], None],
        ended: Callable[[Session], None],
        region_of: Callable[[RegionRequest], Region],
        descriptors: Descriptors,
        kept: Quota,
        *,
        resume_grace_s: float = 0.0,
    ) -> None:
        """Take over a listening socket.

        ``began`` is called with a session that was opened, adopted or resumed by a peer, which may be another process;
        ``ended``, once it was removed from the registry. ``region_of`` returns the memory that another daemon of this
        host asks for, or raises. A session with ``keep`` whose socket is lost may resume for ``resume_grace_s``
        seconds.
        """
        self.resume_grace_s = resume_grace_s
        self.boot_id = boot_id
        self.sessions = sessions
        self.counters = counters
        self.region_of = region_of
        self.descriptors = descriptors
        self.closer = Closer(descriptors)
        self.kept = kept
        self._began = began
        self._ended = ended
        self._drain: Callable[[bytes], None] | None = None
        self._unopened: dict[_Connection, int] = {}
        self._refusal_logged_at = -REFUSAL_LOG_S
        self._connections: dict[int, _Connection] = {}
        self._kept: dict[int, _Connection | _Awaited] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_paused = False
        self._listener = listener.socket

    def start(self, loop: asyncio.AbstractEventLoop, drain: Callable[[bytes], None]) -> None:
        """Serve on this loop.

        ``drain`` handles what has come on a control connection: what an engine said before its end comes first.
        """
        self._loop = loop
        self._drain = drain
        loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """End every session and stop serving."""
        for connection in self._stop():
            connection.close("the daemon ends")

    def leave(self) -> None:
        """Stop serving, and close every socket, but end no session: the next daemon may adopt it."""
        for connection in self._stop():
            connection.release()

    def _stop(self) -> list[_Connection | _Awaited]:
        """Stop listening; return the connections of all sessions."""
        if self._loop is not None:
            self._loop.remove_reader(self._listener)
        self._listener.close()
        return [*self._unopened, *self._connections.values(), *self._kept.values()]

    def adopt(self, session: Session, started: int, loop: asyncio.AbstractEventLoop) -> bool:
        """Keep an earlier daemon's session as if its socket were just lost; return False if its process has ended.

        ``started`` is the process's start time, 0 if unknown: another process may have its pid by now.
        """
        pid, pidfd = session.peer.pid, -1
        if pid > 0:
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                return False
            if started not in {0, started_at(pid)}:
                os.close(pidfd)
                return False
        self._kept[session.session_id] = _Awaited(self, session, pidfd, loop)
        self._began(session)
        return True

    @property
    def is_listening(self) -> bool:
        """Return whether it accepts connections: not where the process has no descriptor left."""
        return self._loop is not None and not self._is_paused

    def is_connected(self, session: Session) -> bool:
        """Return whether the session's socket is open."""
        return session.session_id in self._connections

    def pass_frame(self, session: Session, frame: SessionFrame, fds: Sequence[int]) -> None:
        """Send a frame and descriptors to a session's engine, without blocking.

        Raises:
            NoSessionError: the session has just ended.
            OverloadedError: its socket is full, because the engine does not read.
        """
        connection = self._connections.get(session.session_id)
        if connection is None:
            raise NoSessionError("the session's socket is closed", field="secret")
        connection.pass_frame(frame, fds)

    def take_share(self, session: Session, message_id: int) -> ShareFollows:
        """Return the shares that an engine sent for a message, before the message itself; empty if none came."""
        found = self._attachments(session)
        share = found.take_share(message_id) if found is not None else None
        if found is not None and not found.has_shares:
            self.kept.drop(session.session_id, SHARES)
        return share or ShareFollows(message_id=message_id)

    def take_memory(self, session: Session, message_id: int) -> int | None:
        """Return the descriptor that an engine sent for a message, or None; the caller owns it.

        Raises:
            OutOfDescriptorsError: it was not kept, as its tenant has too many.
        """
        found = self._attachments(session)
        fd = found.take_memory(message_id) if found is not None else None
        if fd == NOT_KEPT:
            raise OutOfDescriptorsError(f"a descriptor of {whose(session.tenant)} more (your bound) was not kept")
        if found is not None:
            self.descriptors.keep(found, found.kept)
        return fd

    def _attachments(self, session: Session) -> Attachments | None:
        connection = self._connections.get(session.session_id)
        return connection.read_all() if connection is not None else None

    def came(self, connection: _Connection) -> None:
        """Record a connection without a session; the oldest such one of the tenant who has most makes room for it.

        What that one has said by now counts: in a flood it may not have been read yet.
        """
        while len(self._unopened) >= self.descriptors.unopened:
            counts = Counter(self._unopened.values())
            most = max(counts.values())
            oldest = next(one for one, tenant in self._unopened.items() if counts[tenant] == most)
            oldest.read_all()
            if oldest in self._unopened:
                oldest.refuse(OverloadedError("too many clients connect and open no session"))
        self._unopened[connection] = connection.tenant

    def refused(self, why: str) -> None:
        """Count a connection that has opened no session; of many in a short time only the first is logged."""
        self.counters.add("sessions.refused")
        now = time.monotonic()
        if now - self._refusal_logged_at >= REFUSAL_LOG_S:
            self._refusal_logged_at = now
            log.info("session refused", cause=why)

    def left(self, connection: _Connection) -> None:
        """Record that a connection has opened its session, or is closed. Twice does nothing."""
        self._unopened.pop(connection, None)

    def opened(self, connection: _Connection, session: Session) -> None:
        """Record a new session's connection."""
        self._connections[session.session_id] = connection
        self._began(session)

    def keep(self, connection: _Connection, session: Session) -> None:
        """Keep a session that has lost its socket, so that it can be resumed."""
        self._connections.pop(session.session_id, None)
        self._kept[session.session_id] = connection

    def resume(self, connection: _Connection, opening: SessionOpen, peer: Peer) -> Session:
        """Attach a kept session to the new connection that knows its secret.

        Raises:
            NoSessionError: no session of that user has this secret, or it has not lost its socket.
        """
        session = self.sessions.by_secret(opening.resume)
        if session is None or session.peer.uid != peer.uid:
            raise NoSessionError("no session of this user has this secret: it has ended", field="resume")
        kept = self._kept.pop(session.session_id, None)
        if kept is None:
            raise NoSessionError(
                f"session {session.session_id} still has its socket: there is nothing to resume",
                field="resume",
                retryable=True,  # its loss may not have been noticed yet
            )
        kept.release()
        session.resumed_by(peer, keep=opening.keep)
        self._connections[session.session_id] = connection
        self._began(session)
        return session

    def closed(self, session: Session) -> None:
        """Close a session whose connection is gone."""
        try:
            if session.identity is not None and self._drain is not None:
                self._drain(session.identity)
        finally:
            self._end(session)

    def _end(self, session: Session) -> None:
        self._connections.pop(session.session_id, None)
        self._kept.pop(session.session_id, None)
        self.sessions.close(session)
        self.descriptors.give(session)
        self._ended(session)

    def _accept(self) -> None:
        for _ in range(ACCEPT_BOUND):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as cause:
                self._pause(cause)
                return
            if self._loop is None:
                connection.close()
                return
            self.came(_Connection(self, connection, self._loop))

    def _pause(self, cause: OSError) -> None:
        """Out of descriptors: accept later, instead of retrying in a busy loop."""
        if self._loop is not None and not self._is_paused:
            self._is_paused = True
            log.warning("new sessions wait", cause=str(cause), remedy="raise LimitNOFILE")
            self._loop.remove_reader(self._listener)
            self._loop.call_later(ACCEPT_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._is_paused = False
        if self._loop is not None and self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)


class _Awaited:
    """A session of an earlier daemon, which waits to be resumed; like a connection that has lost its socket."""

    def __init__(self, owner: SessionSocket, session: Session, pidfd: int, loop: asyncio.AbstractEventLoop) -> None:
        """Own ``pidfd``, which becomes readable when the session's process ends; -1 where there is none."""
        self._owner = owner
        self._session = session
        self._pidfd = pidfd
        self._loop = loop
        grace_s = owner.resume_grace_s
        self._timeout = loop.call_later(grace_s, self.close, f"not resumed within {grace_s:g} s")
        if pidfd >= 0:
            loop.add_reader(pidfd, self.close, "its process ended")

    def release(self) -> None:
        """Release everything but the session."""
        self._timeout.cancel()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def close(self, why: str) -> None:
        """End the session."""
        self.release()
        log.info("session ended", session=self._session.session_id, pid=self._session.peer.pid, cause=why)
        self._owner.closed(self._session)


class _Connection:
    """One connection: unopened, then a session, then closed."""

    def __init__(self, owner: SessionSocket, channel: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._channel = channel
        self.tenant = owner.sessions.tenants.of(channel)
        self._loop = loop
        self._frames = FrameSplitter()
        self._session: Session | None = None
        self._pidfd = -1
        self._closed = False
        self._served = False
        self._is_kept = False
        self._attachments = Attachments()
        channel.setblocking(False)  # noqa: FBT003  socket's own signature
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)  # or a read passes over bytes, and closes theirs
        loop.add_reader(channel, self.read_all)  # to its end: libuv reports an error once, and watches it no more
        self._timeout = loop.call_later(OPENING_TIMEOUT_S, self.close, "no opening frame in time")

    def read_all(self) -> Attachments:
        """Read what was sent before a message, in any number of frames, but bounded; return what has come so far."""
        for _ in range(MAX_BYTES_SAID_AHEAD // _RECEIVE_BYTES):
            if self._closed or self._is_kept or not self._readable():
                break
        return self._attachments

    def pass_frame(self, frame: SessionFrame, fds: Sequence[int]) -> None:
        data = pack(frame)
        try:
            sent = socket.send_fds(self._channel, [data], fds) if fds else self._channel.send(data)
        except BlockingIOError as cause:
            raise OverloadedError("the session's socket is full: read it") from cause
        except OSError as cause:
            if cause.errno in _NO_ROOM:
                raise OverloadedError(f"the session's socket: {cause.strerror}") from cause
            raise NoSessionError(f"the session's socket: {cause.strerror}", field="secret") from cause
        if sent != len(data):
            self.close("its socket is full in the middle of a frame")
            raise OverloadedError("the session's socket is full: read it")

    def close(self, why: str) -> None:
        if self._closed:
            return
        self.release()
        self._owner.left(self)
        if self._session is None and not self._served:
            self._owner.refused(why)
        elif self._session is not None:
            log.info("session ended", session=self._session.session_id, pid=self._session.peer.pid, cause=why)
            self._owner.closed(self._session)

    def refuse(self, error: KvferryError) -> None:
        """Say why there is no session, and close it."""
        self._answer(pack(SessionRefused(error=error.info())))
        self.close(str(error))

    def release(self) -> None:
        """Release everything but the session, which another connection takes over, or which ends."""
        self._closed = True
        self._timeout.cancel()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        if not self._is_kept:
            self._loop.remove_reader(self._channel)
            self._close_socket()

    def _close_socket(self) -> None:
        self._owner.closer.hang_up(self._channel, self.tenant)
        self._attachments.close()
        self._owner.descriptors.give(self._attachments)
        if self._session is not None:
            self._owner.kept.drop(self._session.session_id, SHARES)

    def _process_ended(self) -> None:
        """Read what the process has said last, of its children say, and end its session."""
        if self._session is not None:
            self._session.keep = False  # nobody is left to resume it
        self.read_all()
        self.close("its process ended")

    def _lost(self, why: str) -> None:
        """Handle the loss of the socket: keep a session with ``keep`` for the grace period while its process lives."""
        session, grace_s = self._session, self._owner.resume_grace_s
        if session is None or not session.keep or grace_s <= 0 or self._pidfd < 0:
            self.close(why)
            return
        self._is_kept = True
        self._loop.remove_reader(self._channel)
        self._close_socket()
        self._timeout = self._loop.call_later(grace_s, self.close, f"not resumed within {grace_s:g} s")
        self._owner.keep(self, session)
        log.info("session kept", session=session.session_id, pid=session.peer.pid, cause=why, grace_s=grace_s)

    def _readable(self) -> bool:
        """Read and handle what has arrived; return whether there was anything.

        Whoever reads a message closes those of its descriptors for which it has no room. So this looks before it reads:
        a message is read once its descriptors are here, and wait for nobody.
        """
        try:
            data, ancillary, flags, _ = self._channel.recvmsg(
                _RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_PEEK | socket.MSG_CMSG_CLOEXEC
            )
            fds = _descriptors_in(ancillary)
            if flags & socket.MSG_CTRUNC or not all(map(is_memory, fds)):
                self._owner.closer.close(fds, self.tenant)
                self._fail(MalformedError("a descriptor came that no frame names, or that is not of a memfd"))
                return False
            self._channel.recv(len(data))
        except BlockingIOError:
            return False
        except OSError as cause:
            self._lost(cause.strerror or "its socket failed")
            return False
        self._keep(fds)
        if not data:
            self._lost("its socket was closed")
            return False
        try:
            for frame in self._frames.feed(data):
                if self._closed:
                    break
                if self._session is None:
                    self._open(frame)
                else:
                    self._handle_frame(unpack_attachment(frame), self._session.session_id, SHARE_COPIES * len(frame))
            self._check_descriptors()
        except KvferryError as error:
            self._fail(error)
        return True

    def _fail(self, error: KvferryError) -> None:
        if self._session is None:
            self.refuse(error)
        self.close(str(error))

    def _keep(self, fds: list[int]) -> None:
        """Keep received descriptors, as far as their user may have them."""
        if fds and self._session is not None:
            try:
                self._owner.descriptors.take(self._attachments, self._session.tenant, "pools", len(fds))
            except OutOfDescriptorsError:
                for at, fd in enumerate(fds):
                    os.close(fd)
                    fds[at] = NOT_KEPT
        self._attachments.add_descriptors(fds)

    def _handle_frame(self, frame: ShareFollows | MemoryFollows | SessionEnd, session_id: int, size_bytes: int) -> None:
        if isinstance(frame, SessionEnd):
            self.close("its engine ended it")
        else:
            self._owner.kept.check(session_id, size_bytes)
            self._attachments.note(frame)
            if isinstance(frame, ShareFollows):
                self._owner.kept.keep(session_id, SHARES, size_bytes)

    def _check_descriptors(self) -> None:
        """Check that no descriptor has come except one for a frame that is still incomplete."""
        awaited = 0 if self._session is None or self._frames.between_frames else 1
        if not self._closed and self._attachments.unexplained > awaited:
            raise MalformedError("descriptors came that no frame names")

    def _open(self, frame: bytes) -> None:
        opening = unpack_open(frame)
        if isinstance(opening, RegionRequest):
            self._pass_region(opening)
            return
        agree(opening.protocol_min, opening.protocol_max)
        peer = peer_of(self._channel)
        self._pidfd = pidfd_of(self._channel, peer)
        if opening.resume:
            session = self._owner.resume(self, opening, peer)
        else:
            session = self._owner.sessions.open(opening.name, peer, opening.instance, self.tenant)
            try:
                self._owner.descriptors.take(session, self.tenant, "sessions", PER_SESSION)
            except OutOfDescriptorsError as error:
                self._owner.sessions.close(session)
                raise OverloadedError(error.detail, remedy=error.remedy).after(RETRY_LATER_MS) from None
            session.keep = opening.keep
        self._session = session
        pass_descriptors(self._channel, allowed=True)
        self._timeout.cancel()
        self._owner.left(self)
        if not opening.resume:
            self._owner.opened(self, session)
        self._owner.counters.add("sessions.resumed" if opening.resume else "sessions.opened")
        log.info(
            "session resumed" if opening.resume else "session opened",
            session=session.session_id,
            name=session.name,
            instance=session.instance,
            pid=peer.pid,
            tenant=session.tenant,
        )
        opened = SessionOpened(
            session=session.session_id,
            secret=session.secret,
            boot_id=self._owner.boot_id,
            resumed=bool(opening.resume),
            last_message=session.last_message,
        )
        self._answer(pack(opened))
        if self._pidfd >= 0 and not self._closed:
            self._loop.add_reader(self._pidfd, self._process_ended)

    def _pass_region(self, asked: RegionRequest) -> None:
        """Pass a pool's memory, read-only, to another daemon of this host.

        It runs as root or as our own user, and ``region_of`` looks at its key: other processes do so, too.
        """
        peer = peer_of(self._channel)
        if peer.uid not in {0, os.getuid()}:
            raise AccessDeniedError(
                f"a daemon of user {peer.uid} may not read pools here: run both daemons as one user", field="pool"
            )
        region = self._owner.region_of(asked)
        if not isinstance(region, HostRegion):
            raise AccessDeniedError(
                f"pool {asked.pool!r} is on {region.device}, which daemons cannot share: name its daemon by the tcp:// "
                "address of its peers.listen, and configure network",
                field="source_daemons",
            )
        try:
            fd = region.read_only_fd()
        except OSError as cause:
            raise OverloadedError(f"the pool cannot be passed: {cause.strerror}") from cause
        try:
            socket.send_fds(self._channel, [pack(RegionFollows(message_id=0, pool=asked.pool))], [fd])
        finally:
            os.close(fd)
        self._owner.counters.add("peers.regions_given")
        self._served = True
        self.close("a region was passed to a daemon")

    def _answer(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # end-of-file will tell that the peer is gone
            self._channel.send(data)

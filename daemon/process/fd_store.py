"""Where descriptors are kept from one life of the daemon to the next: with systemd, with a holder process, or nowhere.

A descriptor is kept under a name of its own, which begins with ``PREFIX``. Knows nothing of what they are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import structlog

from kvferry.daemon.process import detached, holder
from kvferry.daemon.process.access import HOLDER_SOCKET
from kvferry.daemon.process.inherited import Inherited

PREFIX: Final = "kvferry."
ANSWER_S: Final = 5.0
"""How long the keeper of the descriptors may take to answer."""

_FULL: Final = frozenset({errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM})
"""What sending says where the other side is to read first."""

log = structlog.get_logger(__name__)


class FdStoreError(Exception):
    """Descriptors were not kept; the text says why."""


class FdStore(Protocol):
    """Keeps descriptors for the next daemon. ``put`` and ``remove`` may block, and are for any thread.

    Attributes:
        where: who keeps them, in words; empty where nobody does.
        pid: the process that does, for whoever watches it; 0 where it needs no watching.
    """

    where: str
    pid: int

    def take(self) -> dict[str, int]:
        """Return what the daemon before this one left; the caller owns the descriptors, and they stay in the store."""

    def put(self, descriptors: Mapping[str, int]) -> None:
        """Keep descriptors under their names; returns when they are kept, whatever becomes of this process.

        Raises:
            FdStoreError: they may not be kept.
        """

    def remove(self, names: Iterable[str]) -> None:
        """Keep these no longer; says in the log if that fails."""

    def silent_s(self) -> float:
        """Return for how long the process that is to be watched has left a request unanswered; 0: it has not."""

    def leave(self, grace_s: float | None) -> None:
        """Keep everything for a daemon that comes within ``grace_s`` seconds; None: nothing needs to be kept."""


class NoStore:
    """Keeps nothing: what the daemon holds ends with it."""

    where = ""
    pid = 0

    def take(self) -> dict[str, int]:
        """See ``FdStore.take``: nothing."""
        return {}

    def put(self, descriptors: Mapping[str, int]) -> None:
        """See ``FdStore.put``."""
        raise FdStoreError(f"{len(descriptors)} descriptors without a holder")

    def remove(self, names: Iterable[str]) -> None:
        """See ``FdStore.remove``: there is nothing to remove."""

    def silent_s(self) -> float:
        """See ``FdStore.silent_s``."""
        return 0.0

    def leave(self, grace_s: float | None) -> None:
        """See ``FdStore.leave``: there is nothing to keep."""


class SystemdStore:
    """systemd's store, see FDSTORE=1 in sd_notify(3). It outlives the process, but not ``systemctl stop``."""

    where = "systemd"
    pid = 0

    def __init__(self, inherited: Inherited, environ: Mapping[str, str]) -> None:
        """Use the store of this unit: ``NOTIFY_SOCKET`` is its address, ``FDSTORE`` how many it takes."""
        address = environ["NOTIFY_SOCKET"]
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._most = int(environ["FDSTORE"])
        self._inherited = inherited
        self._names: set[str] = set()
        self._unanswered: list[int] = []

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<SystemdStore {len(self._names)} of {self._most}>"

    def take(self) -> dict[str, int]:
        """See ``FdStore.take``. Of a name that was given twice, nobody knows which is meant: both are removed."""
        found: dict[str, int] = {}
        for name in [one for one in self._inherited.names if one.startswith(PREFIX)]:
            fds = self._inherited.take(name)
            self._names.add(name)
            if len(fds) == 1:
                found[name] = fds[0]
                continue
            for fd in fds:
                os.close(fd)
            self.remove([name])
        return found

    def put(self, descriptors: Mapping[str, int]) -> None:
        """See ``FdStore.put``."""
        if len(self._names) + len(descriptors) > self._most:
            raise FdStoreError(f"systemd keeps {self._most} descriptors: raise FileDescriptorStoreMax= of the unit")
        if not self._answers():
            raise FdStoreError("systemd has still not answered")
        try:
            for name, fd in descriptors.items():
                self._send(f"FDSTORE=1\nFDNAME={name}", fd)
                self._names.add(name)
            self._wait()
        except OSError as cause:
            raise FdStoreError(f"systemd was not reached: {cause}") from cause

    def remove(self, names: Iterable[str]) -> None:
        """See ``FdStore.remove``."""
        try:
            for name in names:
                self._names.discard(name)
                self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")
        except OSError as cause:
            log.warning("descriptors not removed", where=self.where, cause=str(cause))

    def silent_s(self) -> float:
        """See ``FdStore.silent_s``: systemd is no process of ours."""
        return 0.0

    def leave(self, grace_s: float | None) -> None:
        """See ``FdStore.leave``: systemd keeps them while it restarts the unit."""

    def _send(self, state: str, *fds: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.settimeout(ANSWER_S)
            channel.connect(self._address)
            socket.send_fds(channel, [state.encode()], fds)

    def _wait(self) -> None:
        """Wait until systemd has processed what was sent so far: it then closes the descriptor of a BARRIER=1."""
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            self._send("BARRIER=1", write)
            os.close(write)
            write = -1
            if not _hung_up(read, ANSWER_S):
                self._unanswered.append(read)
                read = -1
                raise FdStoreError(f"systemd has not answered within {ANSWER_S:g} s")
        finally:
            for fd in {read, write} - {-1}:
                os.close(fd)

    def _answers(self) -> bool:
        """Return whether systemd has processed all that it was waited for in vain; else nobody waits anew."""
        for read in [one for one in self._unanswered if _hung_up(one, 0)]:
            self._unanswered.remove(read)
            os.close(read)
        return not self._unanswered


class HolderStore:
    """A holder process of this runtime directory, see ``holder``.

    Only ``take`` waits for it: what is put waits in its socket, where it outlives this process, and what is to be
    removed waits here where that is full.
    """

    where = "a holder process"

    def __init__(self, channel: socket.socket) -> None:
        """Use the holder at the other end of this channel.

        Raises:
            FdStoreError: it does not answer, as it serves another daemon say.
        """
        self._channel = channel
        channel.settimeout(ANSWER_S)
        self._lock = threading.Lock()
        self._found: dict[str, int] = {}
        self._unsent: deque[str] = deque()
        self._unanswered: deque[tuple[str, float]] = deque()
        self.pid = 0
        try:
            self._greet()
        except FdStoreError:
            channel.close()
            raise
        self._names = set(self._found)
        channel.setblocking(False)  # noqa: FBT003  socket's own signature

    def __repr__(self) -> str:
        """Show the holder's process."""
        return f"<HolderStore pid={self.pid}>"

    def take(self) -> dict[str, int]:
        """See ``FdStore.take``."""
        found, self._found = self._found, {}
        return found

    def _greet(self) -> None:
        channel = self._channel
        credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid = int.from_bytes(credentials[:4], sys.byteorder)
        if int.from_bytes(credentials[4:8], sys.byteorder) != os.getuid():
            raise FdStoreError("the holder is another user's")
        self._found = self._listed()

    def _listed(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with self._asking():
            self._channel.send(b"LIST")
            while True:
                data, fds, _, _ = socket.recv_fds(self._channel, holder.MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                if len(fds) != 1:
                    _check(data)
                    return found
                found[data.decode().removeprefix("FD ")] = fds[0]

    def put(self, descriptors: Mapping[str, int]) -> None:
        """See ``FdStore.put``."""
        with self._asking():
            self._exchange()
            if taken := self._names & descriptors.keys():
                raise FdStoreError(f"the holder has {min(taken)} already: that name is taken")
            if len(self._names) + len(descriptors) > holder.MAX_DESCRIPTORS:
                raise FdStoreError(f"the holder keeps {holder.MAX_DESCRIPTORS} descriptors")
            for name, fd in descriptors.items():
                if self._unsent or not self._sent(f"PUT {name}", fd):
                    raise FdStoreError("the holder stands still, and its socket is full")
                self._names.add(name)

    def remove(self, names: Iterable[str]) -> None:
        """See ``FdStore.remove``."""
        gone = list(names)
        self._tell(*(f"REMOVE {name}" for name in gone))
        self._names.difference_update(gone)

    def silent_s(self) -> float:
        """See ``FdStore.silent_s``."""
        self._tell()
        return time.monotonic() - self._unanswered[0][1] if self._unanswered else 0.0

    def leave(self, grace_s: float | None) -> None:
        """See ``FdStore.leave``. It is waited for, unless it was silent before."""
        ends_at = time.monotonic() + (ANSWER_S if self.silent_s() < ANSWER_S else 0.0)
        self._tell("END" if grace_s is None else f"LEAVE {round(grace_s)}")
        poll = select.poll()
        while self._channel.fileno() >= 0 and self._unanswered and (left_s := ends_at - time.monotonic()) > 0:
            poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            poll.poll(left_s * 1000)
            self._tell()
        if self._unanswered:
            log.warning("the holder did not do as told", cause="it does not answer")
        self._channel.close()

    def _tell(self, *requests: str) -> None:
        try:
            with self._asking():
                self._unsent.extend(requests)
                self._exchange()
        except FdStoreError as cause:
            self._unsent.clear()
            self._unanswered.clear()
            if requests:
                log.warning("the holder did not do as told", cause=str(cause))

    def _exchange(self) -> None:
        """Take the answers that have come, and send what waits, as far as the socket takes it."""
        with contextlib.suppress(BlockingIOError):
            while self._unanswered:
                answer = self._channel.recv(holder.MAX_PACKET_BYTES)
                if not answer:
                    raise BrokenPipeError(errno.EPIPE, "it has ended")
                request, _ = self._unanswered.popleft()
                try:
                    _check(answer)
                except FdStoreError as cause:
                    log.warning("the holder did not do as told", request=request, cause=str(cause))
        while self._unsent and self._sent(self._unsent[0]):
            self._unsent.popleft()

    def _sent(self, request: str, *fds: int) -> bool:
        """Send a request; return False where the socket is full."""
        try:
            socket.send_fds(self._channel, [request.encode()], fds)
        except OSError as cause:
            if cause.errno not in _FULL:
                raise
            return False
        self._unanswered.append((request, time.monotonic()))
        return True

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except OSError as cause:
                self._channel.close()  # an answer that comes late would be taken for another one's
                raise FdStoreError(f"the holder does not answer: {cause}") from cause


def _check(answer: bytes) -> None:
    if answer != b"OK":
        raise FdStoreError(f"the holder says: {answer.decode(errors='replace') or 'nothing'}")


def _hung_up(fd: int, within_s: float) -> bool:
    """Return whether nobody has the other end of a pipe within this time."""
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(within_s * 1000))


def open_store(
    directory: Path, inherited: Inherited, environ: Mapping[str, str] = os.environ, *, keep: bool = False
) -> FdStore:
    """Return where this daemon keeps descriptors: with systemd if that does, with a holder if it is told to ``keep``.

    systemd would end a holder with the unit, so it is not asked for there. A holder that nobody asks for any more is
    told to end. ``directory`` is the runtime directory, locked.
    """
    path = directory / HOLDER_SOCKET
    stores = (
        environ.get("NOTIFY_SOCKET") and environ.get("FDSTORE", "0").isdecimal() and int(environ.get("FDSTORE", "0"))
    )
    try:
        if keep and not stores:
            return HolderStore(_connected(path) or _started(path))
        left = _connected(path)
        if left is not None:
            HolderStore(left).leave(None)
            path.unlink(missing_ok=True)
    except (FdStoreError, OSError, subprocess.SubprocessError) as cause:
        said = "a holder is not ended" if stores else "nothing outlives this daemon"
        log.warning(said, cause=str(cause), remedy="end that process (holder.py), and start this daemon again")
    return SystemdStore(inherited, environ) if stores else NoStore()


def _connected(path: Path) -> socket.socket | None:
    return detached.connected(path, ANSWER_S)


def _started(path: Path) -> socket.socket:
    """Start a holder that listens at ``path``, and return a connection to it."""
    detached.start(path, holder.__file__, timeout_s=ANSWER_S)
    channel = _connected(path)
    if channel is None:
        raise FdStoreError("the holder that was started does not listen")
    return channel

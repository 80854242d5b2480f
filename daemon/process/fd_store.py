"""Where descriptors are kept from one life of the daemon to the next: with systemd, with a holder process, or nowhere.

A descriptor is kept under a name of its own, which begins with ``PREFIX``. Knows nothing of what they are.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import structlog

from kvferry.daemon.process import holder
from kvferry.daemon.process.access import HOLDER_SOCKET
from kvferry.daemon.process.inherited import Inherited

PREFIX: Final = "kvferry."
ANSWER_S: Final = 5.0
"""How long the keeper of the descriptors may take to answer."""

_HOLDER_MODE: Final = 0o600
log = structlog.get_logger(__name__)


class FdStoreError(Exception):
    """Descriptors were not kept; the text says why."""


class FdStore(Protocol):
    """Keeps descriptors for the next daemon. ``put`` and ``remove`` block, and are for any thread.

    Attributes:
        where: who keeps them, in words; empty where nobody does.
        pid: the process that does, for whoever watches it; 0 where it needs no watching.
    """

    where: str
    pid: int

    def take(self) -> dict[str, int]:
        """Return what the daemon before this one left; the caller owns the descriptors, and they stay in the store."""

    def put(self, descriptors: Mapping[str, int]) -> None:
        """Keep descriptors under their names; returns when they are kept.

        Raises:
            FdStoreError: they may not be kept.
        """

    def remove(self, names: Iterable[str]) -> None:
        """Keep these no longer; says in the log if that fails."""

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
        raise FdStoreError(f"{len(descriptors)} descriptors, and nobody who keeps them")

    def remove(self, names: Iterable[str]) -> None:
        """See ``FdStore.remove``: there is nothing to remove."""

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
            poll = select.poll()
            poll.register(read, 0)
            if not poll.poll(ANSWER_S * 1000):
                raise FdStoreError(f"systemd has not answered within {ANSWER_S:g} s")
        finally:
            os.close(read)
            if write >= 0:
                os.close(write)


class HolderStore:
    """A holder process of this runtime directory, see ``holder``."""

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
        self.pid = 0
        try:
            self._greet()
        except FdStoreError:
            channel.close()
            raise

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
            for name, fd in descriptors.items():
                socket.send_fds(self._channel, [f"PUT {name}".encode()], [fd])
                _check(self._channel.recv(holder.MAX_PACKET_BYTES))

    def remove(self, names: Iterable[str]) -> None:
        """See ``FdStore.remove``."""
        self._tell(*(f"REMOVE {name}" for name in names))

    def leave(self, grace_s: float | None) -> None:
        """See ``FdStore.leave``."""
        self._tell("END" if grace_s is None else f"LEAVE {round(grace_s)}")
        self._channel.close()

    def _tell(self, *requests: str) -> None:
        try:
            with self._asking():
                for request in requests:
                    self._channel.send(request.encode())
                    _check(self._channel.recv(holder.MAX_PACKET_BYTES))
        except FdStoreError as cause:
            log.warning("the holder did not do as told", cause=str(cause))

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
    """Return a connection to the holder that listens there; None if none does."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    channel.settimeout(ANSWER_S)
    try:
        channel.connect(os.fspath(path))
    except (FileNotFoundError, ConnectionRefusedError):
        channel.close()
        return None
    return channel


def _started(path: Path) -> socket.socket:
    """Start a holder that listens at ``path``, and return a connection to it."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as listener:
        before = os.umask(0o777 & ~_HOLDER_MODE)
        try:
            listener.bind(os.fspath(path))
        finally:
            os.umask(before)
        path.chmod(_HOLDER_MODE)
        subprocess.run(  # noqa: S603  ourselves, no shell
            [sys.executable, "-I", "-S", holder.__file__, str(listener.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            check=True,
            timeout=ANSWER_S,
        )
    channel = _connected(path)
    if channel is None:
        raise FdStoreError("the holder that was started does not listen")
    return channel

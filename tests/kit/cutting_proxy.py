"""A daemon's sockets behind a proxy that cuts connections: where, and which of them, a test says."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kvferry.protocol.settings import CONTROL_SOCKET, SESSION_SOCKET

CHUNK_BYTES: Final = 1 << 16
MAX_FDS: Final = 4
SOON_S: Final = 20.0


class _End(NamedTuple):
    """One end of a connection: what it reads goes to ``other``."""

    kind: str
    socket: socket.socket
    other: socket.socket


class _Stop(NamedTuple):
    """What is done when a chunk is read."""

    kind: str
    chunk: int
    then: Callable[[], object]


class CuttingProxy:
    """Forwards what a client and its daemon say to each other, descriptors too, on a thread of its own.

    Attributes:
        runtime_dir: where clients find it.
        chunks: how many chunks were read so far.
        cuts: how often it has cut.
    """

    def __init__(self, daemon_dir: Path, folder: Path) -> None:
        self.runtime_dir = folder
        self.chunks = 0
        self.cuts = 0
        self._daemon_dir = daemon_dir
        self._cut_at = 0
        self._kinds: tuple[str, ...] = ()
        self._forwards = True
        self._stop: _Stop | None = None
        self._selector = selectors.DefaultSelector()
        self._ends: dict[socket.socket, _End] = {}
        self._bell, self._ring = socket.socketpair()
        self._selector.register(self._bell, selectors.EVENT_READ, "bell")
        self._listeners = []
        for kind in (CONTROL_SOCKET, SESSION_SOCKET):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(os.fspath(folder / kind))
            listener.listen()
            self._selector.register(listener, selectors.EVENT_READ, kind)
            self._listeners.append(listener)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut_at(self, chunk: int, *kinds: str, forwards: bool = True) -> None:
        """Cut the connections of these kinds at the chunk of that number from now on.

        ``forwards``: whether the chunk itself still gets through, where its own connection is cut.
        """
        self._kinds, self._forwards = kinds, forwards
        self._cut_at = self.chunks + chunk

    def stop_at(self, chunk: int, kind: str, then: Callable[[], object]) -> None:
        """Keep the chunk of that number of this kind back, do something, and cut all connections."""
        self._stop = _Stop(kind, chunk, then)

    def cut(self, *kinds: str) -> None:
        """Cut the connections of these kinds now."""
        self._kinds = kinds
        self._ring.send(b"c")

    def close(self) -> None:
        """End the thread, and close everything."""
        self._ring.send(b"q")
        self._thread.join(SOON_S)
        for one in (*self._ends, *self._listeners, self._bell, self._ring):
            one.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                one = key.fileobj
                assert isinstance(one, socket.socket)
                if key.data == "bell":
                    if one.recv(1) == b"q":
                        return
                    self._cut_now()
                elif isinstance(key.data, str):
                    self._accept(one, key.data)
                elif one in self._ends:
                    self._forward(self._ends[one])

    def _accept(self, listener: socket.socket, kind: str) -> None:
        client, _ = listener.accept()
        daemon = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            daemon.connect(os.fspath(self._daemon_dir / kind))
        except OSError:  # there is none now
            daemon.close()
            client.close()
            return
        for one in (_End(kind, client, daemon), _End(kind, daemon, client)):
            self._ends[one.socket] = one
            self._selector.register(one.socket, selectors.EVENT_READ, one)

    def _forward(self, end: _End) -> None:
        if not select.select([end.socket], [], [], 0)[0]:  # read already, with a message
            return
        try:
            data, fds, _, _ = socket.recv_fds(end.socket, CHUNK_BYTES, MAX_FDS)
        except OSError:
            data, fds = b"", []
        if end.kind == CONTROL_SOCKET:
            self._forward_said_before()
        self.chunks += bool(data)
        if data and self._is_stopped(end):
            return
        cuts = bool(data) and self.chunks == self._cut_at
        gone = end.socket not in self._ends  # cut with what was said before
        if data and not gone and not (cuts and end.kind in self._kinds and not self._forwards):
            with contextlib.suppress(OSError):  # the other end is gone: it is read next
                sent = socket.send_fds(end.other, [data], fds)
                end.other.sendall(data[sent:])
        for one in fds:
            os.close(one)
        if not data:
            self._drop(end)
        if cuts:
            self._cut_now()

    def _forward_said_before(self) -> None:
        """Forward what the session sockets have: what comes with a message was said there before the message."""
        for one in [one for one in self._ends.values() if one.kind == SESSION_SOCKET]:
            if one.socket in self._ends:
                self._forward(one)

    def _is_stopped(self, end: _End) -> bool:
        stop = self._stop
        if stop is None or stop.kind != end.kind:
            return False
        self._stop = stop._replace(chunk=stop.chunk - 1)
        if self._stop.chunk:
            return False
        self._stop, self._kinds = None, (CONTROL_SOCKET, SESSION_SOCKET)
        stop.then()
        self._cut_now()
        return True

    def _cut_now(self) -> None:
        self.cuts += 1
        for one in [one for one in self._ends.values() if one.kind in self._kinds]:
            self._drop(one)

    def _drop(self, end: _End) -> None:
        for one in (end.socket, end.other):
            if self._ends.pop(one, None) is not None:
                self._selector.unregister(one)
                one.close()


@contextlib.contextmanager
def cutting_proxy(daemon_dir: Path, folder: Path) -> Iterator[CuttingProxy]:
    """Run a proxy of the daemon at ``daemon_dir`` in a folder of its own, whose path is short."""
    proxy = CuttingProxy(daemon_dir, folder)
    try:
        yield proxy
    finally:
        proxy.close()

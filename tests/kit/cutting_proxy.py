"""A daemon's sockets behind a proxy that cuts connections: where, and which of them, a test says."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvferry.protocol.settings import CONTROL_SOCKET, SESSION_SOCKET
from tests.kit.tcp_proxy import WAYS, Proxy, Through, Way


class _Stop(NamedTuple):
    """What is done when a chunk is read."""

    kind: str
    chunk: int
    then: Callable[[], object]


class CuttingProxy(Proxy):
    """Forwards what a client and its daemon say to each other, and counts it: a route for each kind of connection."""

    def __init__(self, daemon_dir: Path, folder: Path) -> None:
        super().__init__()
        self.runtime_dir = folder  # where clients find it
        self.chunks = 0  # how many chunks were read so far
        self.cuts = 0  # how often it has cut
        self._cut_at = 0
        self._kinds: tuple[str, ...] = ()
        self._forwards = True
        self._stop: _Stop | None = None
        for kind in (CONTROL_SOCKET, SESSION_SOCKET):
            self.listen_unix(folder / kind, daemon_dir / kind, kind)

    def cut_at(self, chunk: int, *kinds: str, forwards: bool = True) -> None:
        """Cut the connections of these kinds at the chunk of that number from now on; 0: cut none, from its return on.

        ``forwards``: whether the chunk itself still gets through, where its own connection is cut.
        """

        def arm() -> None:
            self._kinds, self._forwards = kinds, forwards
            self._cut_at = self.chunks + chunk if chunk else 0

        self._call(arm)

    def stop_at(self, chunk: int, kind: str, then: Callable[[], object]) -> None:
        """Keep the chunk of that number of this kind back, do something, and cut all connections."""
        self._stop = _Stop(kind, chunk, then)

    def cut(self, *kinds: str) -> None:
        self._call(lambda: self._cut_now(kinds))

    async def forward(self, through: Through, way: Way, data: bytes, fds: list[int]) -> None:
        if through.route == CONTROL_SOCKET:
            await self._forward_said_before()
        self.chunks += 1
        is_stopped = self._is_stopped(through.route)
        number, kinds = self.chunks, self._kinds
        cuts = not is_stopped and number == self._cut_at
        is_lost = cuts and through.route in kinds and not self._forwards
        if is_lost or through not in self._through:  # cut, perhaps with what was said before
            for fd in fds:
                os.close(fd)
        else:
            with contextlib.suppress(OSError):  # the other end is gone: it is read next
                await super().forward(through, way, data, fds)
        if cuts and number == self._cut_at:  # else it was called off while the chunk went through
            self._cut_now(kinds)

    async def _forward_said_before(self) -> None:
        """Forward what the session sockets have: what comes with a message was said there before the message."""
        for one in [one for one in self._through if one.route == SESSION_SOCKET]:
            for way in WAYS:
                with contextlib.suppress(OSError):  # nothing, or it is no more: its own task sees that
                    data, fds = one.read(way)
                    if data:
                        await self.forward(one, way, data, fds)
                    else:
                        self.end(one)

    def _is_stopped(self, kind: str) -> bool:
        stop = self._stop
        if stop is None or stop.kind != kind:
            return False
        self._stop = stop._replace(chunk=stop.chunk - 1)
        if self._stop.chunk:
            return False
        self._stop = None
        stop.then()
        self._cut_now((CONTROL_SOCKET, SESSION_SOCKET))
        return True

    def _cut_now(self, kinds: tuple[str, ...]) -> None:
        self.cuts += 1
        if kinds:
            self._reset(*kinds)


@contextlib.contextmanager
def cutting_proxy(daemon_dir: Path) -> Iterator[CuttingProxy]:
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as folder, CuttingProxy(daemon_dir, Path(folder)) as proxy:
        yield proxy

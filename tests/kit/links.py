"""Links between daemons, on real sockets, and what they report; the rest of a daemon is a test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.peers.key_ring import KeyRing
from kvferry.daemon.peers.link import Heartbeat
from kvferry.daemon.peers.links import PeerLinks
from kvferry.daemon.process.access import PEER_SOCKET_MODE, Listener, listen_on
from kvferry.daemon.transfer.endpoints import Incarnation
from kvferry.protocol.codec import PageIds
from kvferry.protocol.ids import new_boot_id
from kvferry.protocol.limits import Limits
from kvferry.protocol.peer_messages import PeerBody

PATIENCE_S = 20.0
HEARTBEAT = Heartbeat(50, 2_000)


class _Counters(Counters):
    """Counters that say when they change."""

    def __init__(self, changed: asyncio.Event) -> None:
        super().__init__()
        self._changed = changed

    def add(self, name: str, count: int = 1) -> None:
        super().add(name, count)
        self._changed.set()


class Daemon:
    """Links, and what they reported."""

    def __init__(
        self, path: Path, listen: str | None = None, heartbeat: Heartbeat = HEARTBEAT, keys: KeyRing | None = None
    ) -> None:
        self.changed = asyncio.Event()
        self.counters = _Counters(self.changed)
        path.unlink(missing_ok=True)  # as the runtime directory does
        listener = Listener(path, listen_on(path, PEER_SOCKET_MODE))
        with contextlib.ExitStack() as unless_made:
            unless_made.callback(listener.socket.close)
            self.links = PeerLinks(new_boot_id(), listener, listen, heartbeat, Limits(), self.counters, keys=keys)
            unless_made.pop_all()
        self.up: list[Incarnation] = []
        self.lost: list[Incarnation] = []
        self.said: list[tuple[Incarnation, PeerBody]] = []
        self.in_order: list[str] = []
        self.needed = ""
        self.links.start(self)

    @property
    def address(self) -> str:
        """Return where it listens: on TCP, if it does."""
        return self.links.addresses.get("tcp", self.links.addresses["ipc"])

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self.address, self.links.boot_id)

    async def until(self, what: Callable[[], object]) -> None:
        """Wait until something holds; it is looked at after each report."""
        async with asyncio.timeout(PATIENCE_S):
            while not what():
                self.changed.clear()
                await self.changed.wait()

    async def counts(self, name: str, count: int) -> None:
        await self.until(lambda: self.counters.snapshot().get(name) == count)

    async def meets(self, other: Daemon) -> None:
        """Connect to another daemon; both learn who the other is."""
        self.links.connect(other.address)
        await self.until(lambda: self.up)
        await other.until(lambda: other.up)

    def on_up(self, peer: Incarnation) -> None:
        self.up.append(peer)
        self.changed.set()

    def on_lost(self, peer: Incarnation, why: str) -> None:  # noqa: ARG002  as links call it
        self.lost.append(peer)
        self.in_order.append("lost")
        self.changed.set()

    def on_message(self, peer: Incarnation, body: PeerBody, ids: tuple[PageIds, ...]) -> None:  # noqa: ARG002
        self.said.append((peer, body))
        self.in_order.append("said")
        self.changed.set()

    def is_needed(self, address: str) -> bool:
        return address == self.needed

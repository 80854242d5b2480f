"""Connections to other daemons: one ROUTER that listens, and one link to each peer. Knows nothing of transfers.

Each side sends on its own connection and receives on the other's, so each detects the other's end by itself: at once
where the peer's process ends and its host closes the connection, otherwise once the peer has not answered a ZMTP
heartbeat for ``timeout_ms``. Then the peer is *lost*: unsent messages are dropped, and so are its messages that are
received only later. Both start over with PEER_HELLO on the next connection; nothing before it counts. The two
directions may break at different times, so the last messages of one side may have been processed by the other before
that one noticed. A peer that reads too slowly is lost in the same way.

A link that is down is kept while a receive request waits for the peer, and for a minute after its last use; where there
are too many, the least recently used one is dropped for a new one. There is no authentication: see docs/operations.md
for what to firewall.
"""

from __future__ import annotations

import asyncio
import heapq
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import structlog
import zmq

from kvferry.daemon.config.addresses import is_numeric, scheme, wrong_address, wrong_port
from kvferry.daemon.control.control_socket import ControlSocket, ReceivedMessage
from kvferry.daemon.control.metrics import Counters, about
from kvferry.daemon.peers.link import SOCKETS_PER_LINK, Heartbeat, PeerLink, PeerListener
from kvferry.daemon.process.access import PEER_SOCKET_MODE
from kvferry.daemon.transfer.remote import Incarnation
from kvferry.protocol.codec import Frames, PageIds
from kvferry.protocol.errors import ConfigError, InvalidFieldError, KvferryError
from kvferry.protocol.ids import NO_BOOT, BootId
from kvferry.protocol.limits import Limits
from kvferry.protocol.peer_codec import IncomingPeerMessage, decode_peer, encode_peer
from kvferry.protocol.peer_messages import PeerBody, PeerEnvelope, PeerHello
from kvferry.protocol.versions import PROTOCOL_MAX, PROTOCOL_MIN, agree

MAX_PEERS = 1024
FILES_PER_PEER = 8
"""Open files that a peer may cost; a low RLIMIT_NOFILE lowers the number of peers."""
TIDY_S = 10.0
QUIET_S = 60.0
NEEDED_CHECKS = 32
"""How many links are checked at a time for being needed, as each check scans all receive requests."""
LINGER_MS = 300
"""How long the last messages may take to leave when the daemon ends."""

log = structlog.get_logger(__name__)


class PeerLinks:
    """All links, and the listening socket. Serves between ``start`` and ``close``."""

    def __init__(
        self,
        boot_id: BootId,
        socket_path: Path,
        listen: str | None,
        heartbeat: Heartbeat,
        limits: Limits,
        counters: Counters,
    ) -> None:
        """Listen on a Unix socket for daemons of this host and, with ``listen``, on TCP.

        Raises:
            ConfigError: the TCP address cannot be listened on, or peers could not connect to it.
        """
        if listen and not is_numeric(listen):
            raise ConfigError(f"{listen}: give a numeric address of this host", field="peers.listen")
        if listen and (wrong := wrong_port(listen, 0)):
            raise ConfigError(wrong, field="peers.listen")
        self.boot_id = boot_id
        self.heartbeat = heartbeat
        self.limits = limits
        self.counters = counters
        self.loop: asyncio.AbstractEventLoop | None = None
        self.listener: PeerListener | None = None
        self._router = ControlSocket(socket_path, limits, counters, also=listen, mode=PEER_SOCKET_MODE)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 2 * SOCKETS_PER_LINK * MAX_PEERS)  # a closed socket counts a little longer
        self._max_links = _max_peers()
        self.addresses = {"ipc": f"ipc://{socket_path}"}
        if listen:
            self.addresses["tcp"] = self._router.endpoint
        self._links: dict[str, PeerLink] = {}
        self._tidying: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        """Show the peers."""
        return f"<PeerLinks {list(self._links.values())}>"

    def start(self, loop: asyncio.AbstractEventLoop, listener: PeerListener) -> None:
        """Serve on this loop, and notify the listener."""
        self.loop = loop
        self.listener = listener
        self._router.start(loop, self._received)
        self._tidying = loop.call_later(TIDY_S, self._tidy)

    def close(self) -> None:
        """Close all connections and stop listening; the last messages have LINGER_MS to leave. Idempotent."""
        if self._tidying is not None:
            self._tidying.cancel()
        for link in self._links.values():
            link.close(LINGER_MS)
        self._links.clear()
        self.context.term()  # before our ROUTER closes, which peers take for our end
        self._router.close()
        self.loop = None

    def check_reachable(self, address: str, field: str) -> None:
        """Check that this daemon can send to an address, and be answered.

        Raises:
            InvalidFieldError: no daemon can listen there, or this daemon does not listen where that one could connect.
        """
        if scheme(address) not in self.addresses:
            raise InvalidFieldError(
                f"{address}: this daemon listens on no TCP address; set peers.listen in its configuration", field=field
            )
        if wrong := wrong_address(address):
            raise InvalidFieldError(wrong, field=field)

    def is_own(self, address: str) -> bool:
        """Return whether an address is one of this daemon's."""
        return address in self.addresses.values()

    def connect(self, address: str, field: str = "address") -> Incarnation | None:
        """Ensure that there is a link; return the incarnation that can be sent to, if it is up.

        Raises:
            InvalidFieldError: the address is invalid, or too many other daemons are known.
        """
        link = self._links.get(address)
        if link is None:
            self.check_reachable(address, field)
            if len(self._links) >= self._max_links and not self._drop_one():
                raise InvalidFieldError(f"{address}: {len(self._links)} other daemons are known already", field=field)
            link = self._links[address] = PeerLink(self, address, field)
        link.used_at = time.monotonic()
        return link.peer

    def send(self, peer: Incarnation, body: PeerBody, ids: Sequence[PageIds] = ()) -> bool:
        """Send a message to an incarnation; return False, with nothing sent, where it is gone."""
        link = self._links.get(peer.address)
        if link is None or link.peer != peer:
            self.counters.add("peers.unsent")
            return False
        link.put(encode_peer(PeerEnvelope(self.own_address(peer.address), self.boot_id, peer.boot_id, body), ids))
        return True

    def own_address(self, address: str) -> str:
        """Return the address by which the peer at ``address`` reaches this daemon."""
        return self.addresses[scheme(address)]

    def up(self) -> list[Incarnation]:
        """Return all peers that can be sent to."""
        return [link.peer for link in self._links.values() if link.peer is not None]

    def status(self) -> tuple[tuple[str, str], ...]:
        """Return each peer's address and state: ``up``, or ``down``."""
        return tuple((address, "up" if link.peer else "down") for address, link in self._links.items())

    def hello(self, address: str, *, answers: bool) -> Frames:
        """Return the frames of our PEER_HELLO."""
        body = PeerHello(protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, answers=answers, dialled=address)
        return encode_peer(PeerEnvelope(self.own_address(address), self.boot_id, NO_BOOT, body))

    def _received(self, message: ReceivedMessage) -> None:
        self.counters.add("peers.received")
        incoming = None
        try:
            incoming = decode_peer([] if message.too_large else message.frames)
            self._process(incoming)
        except KvferryError as error:
            self.counters.add("peers.malformed")
            log.warning("a peer's message was dropped", cause=str(error), **_about(incoming))
        except Exception as error:  # a bug must not end the loop
            self.counters.add("peers.failed")
            log.exception("a peer's message failed", cause=str(error), **_about(incoming))

    def _process(self, incoming: IncomingPeerMessage) -> None:
        envelope = incoming.envelope
        if envelope.to_boot_id not in {self.boot_id, NO_BOOT}:
            self.counters.add("peers.stale")
            return
        if isinstance(envelope.body, PeerHello):
            self._on_hello(envelope, envelope.body)
            return
        link = self._links.get(envelope.address)
        if link is None:  # it has not noticed that we dropped its link: connecting makes it start over
            self.counters.add("peers.stale")
            self.connect(envelope.address)
        elif link.peer is None or link.peer.boot_id != envelope.boot_id:
            self.counters.add("peers.stale")
        elif self.listener is not None:
            self.listener.on_message(link.peer, envelope.body, incoming.ids)

    def _on_hello(self, envelope: PeerEnvelope, hello: PeerHello) -> None:
        agree(hello.protocol_min, hello.protocol_max)
        if not self.is_own(hello.dialled):
            log.warning(
                "a peer connected by an address that is not this daemon's own",
                name=hello.dialled,
                peer=envelope.address,
            )
        self.connect(envelope.address)
        self._links[envelope.address].greeted(envelope.boot_id, anew=not hello.answers)

    def overflowed(self, link: PeerLink) -> None:
        """See ``LinkOwner``."""
        if self._links.get(link.address) is not link:
            return
        self.counters.add("peers.overflowed")
        del self._links[link.address]
        waiting = link.waiting
        link.close()
        link.lose(f"it read too slowly: {waiting} messages were waiting")
        try:
            self.connect(link.address)
        except InvalidFieldError as error:
            log.warning("a peer was not connected to again", cause=str(error))

    def drain_received(self) -> None:
        """See ``LinkOwner``."""
        self._router.drain_received()

    def _tidy(self) -> None:
        if self.loop is None:
            return
        self._tidying = self.loop.call_later(TIDY_S, self._tidy)
        for link in self._links.values():
            link.greet_again()
        while self._drop_one(QUIET_S):
            pass

    def _drop_one(self, quiet_s: float = 0.0) -> bool:
        """Drop the least recently used link that is down and not needed; return whether there was one.

        Even when links are short, each has ``timeout_ms`` to come up.
        """
        now = time.monotonic()
        min_s = max(quiet_s, self.heartbeat.timeout_ms / 1000)
        quiet = [link for link in self._links.values() if link.quiet_s(now) > min_s]
        for link in heapq.nsmallest(NEEDED_CHECKS, quiet, key=lambda link: link.used_at):
            if self.listener is not None and self.listener.is_needed(link.address):
                link.used_at = now
                continue
            self._links.pop(link.address).close()
            self.counters.add("peers.dropped")
            return True
        return False


def _max_peers() -> int:
    """Return the maximum of peers, which leaves files for sessions."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_PEERS if files == resource.RLIM_INFINITY else min(MAX_PEERS, files // FILES_PER_PEER)


def _about(incoming: IncomingPeerMessage | None) -> dict[str, str]:
    return about(incoming.envelope) if incoming else {}

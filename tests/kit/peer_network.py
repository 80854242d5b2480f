"""A network of daemons without sockets: messages wait until a test delivers them, connections break when it says so.

As with ``daemon.peers``, each side speaks on its own connection and hears on the other's; a connection keeps its order.
What is on a connection that breaks is lost; its owner notices later, by itself, and begins anew with PEER_HELLO.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvferry.daemon.peers.link import LinkStatus, PeerListener
from kvferry.daemon.transfer.endpoints import Incarnation
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import InvalidFieldError, TooLargeError
from kvferry.protocol.ids import BootId
from kvferry.protocol.peer_messages import (
    IncomingPeerMessage,
    PeerBody,
    PeerEnvelope,
    PeerHello,
    decode_peer,
    encode_peer,
)

ANSWER = "a" * 32
"""The receiver's key in a PEER_HELLO that answers one; in all else the boot ids of this network are its keys."""


class Connection:
    """From one daemon to an address: what is on its way, and who is known to be there.

    One that has broken takes messages and loses them until that is noticed; then it keeps them.
    """

    def __init__(self, owner: ScriptedLinks, address: str) -> None:
        self.owner = owner
        self.address = address
        self.on_its_way: deque[list[bytes]] = deque()  # messages as bytes, oldest first
        self.peer: Incarnation | None = None  # who is there, once it is known
        self.broken = False
        self._noticed = False

    def put(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send, or keep until connected."""
        if not self.broken or self._noticed:
            self.on_its_way.append([bytes(frame) for frame in frames])

    def break_off(self) -> None:
        """Lose what is on its way, and all that is said until the owner has noticed."""
        self.broken, self._noticed = True, False
        self.on_its_way.clear()

    def notice(self) -> None:
        """Let the owner see that it has broken; once is enough."""
        if self.broken and not self._noticed:
            self._noticed = True
            self.lose("its connection closed")

    def reopen(self) -> None:
        assert self.broken, "a connection that is up"
        self.notice()
        self.broken = self._noticed = False
        hello = self.owner.hello(self.address, answers=False)
        self.on_its_way.appendleft([bytes(frame) for frame in hello])

    def greeted(self, boot_id: str, *, anew: bool) -> None:
        """Take a PEER_HELLO's word on who is there; ``anew``: the peer has lost what it knew of us."""
        peer = Incarnation(self.address, boot_id)
        if self.peer == peer and not anew:
            return
        self.lose("it has begun anew")
        self.peer = peer
        self.owner.told.on_up(peer)

    def lose(self, why: str) -> None:
        peer, self.peer = self.peer, None
        if peer is not None:
            self.owner.told.on_lost(peer, why)


class ScriptedLinks:
    """What ``PeerLinks`` is to a daemon's receive requests, for one incarnation of one daemon."""

    def __init__(self, network: Network, boot_id: BootId, addresses: dict[str, str]) -> None:
        self.boot_id = boot_id
        self.addresses = addresses
        self.connections: dict[str, Connection] = {}
        self.void = 0  # how many messages were void
        self.max_ids = 1 << 30  # how many page ids its peers take in one message
        self.listener: PeerListener | None = None
        network.links.append(self)

    @property
    def told(self) -> PeerListener:
        assert self.listener is not None
        return self.listener

    def connect(
        self,
        address: str,
        field: str = "address",  # noqa: ARG002  takes any address
        tenant: int | None = None,  # noqa: ARG002  of any tenant
    ) -> Incarnation | None:
        return self._connection(address).peer

    def send(self, peer: Incarnation, body: PeerBody, ids: Sequence[PageIds] = ()) -> bool:
        connection = self.connections.get(peer.address)
        if connection is None or connection.peer != peer:
            return False
        if sum(map(len, ids)) > self.max_ids:
            raise TooLargeError("too large", field="limits.max_frame_bytes")
        own = self.own_address(peer.address)
        connection.put(encode_peer(PeerEnvelope(own, self.boot_id, peer.boot_id, body), ids))
        return True

    def is_own(self, address: str) -> bool:
        return address in self.addresses.values()

    def check_reachable(self, address: str, field: str) -> None:
        if address.partition("://")[0] not in self.addresses:
            raise InvalidFieldError(address, field=field)

    def own_address(self, address: str) -> str:
        return self.addresses[address.partition("://")[0]]

    def up(self) -> list[Incarnation]:
        return [one.peer for one in self.connections.values() if one.peer is not None]

    def status(self) -> tuple[LinkStatus, ...]:
        return tuple(
            LinkStatus(address, "up" if one.peer else "greeting", 0, 0, "", "", ())
            for address, one in self.connections.items()
        )

    def hello(self, address: str, *, answers: bool) -> Sequence[bytes | memoryview]:
        body = PeerHello(boot_id=self.boot_id, protocol_min=4, protocol_max=4, dialled=address)
        to_key = ANSWER if answers else ""
        return encode_peer(PeerEnvelope(self.own_address(address), self.boot_id, to_key, body))

    def take(self, incoming: IncomingPeerMessage) -> None:
        envelope = incoming.envelope
        if isinstance(envelope.body, PeerHello):
            connection = self._connection(envelope.address)
            if not envelope.to_key:
                connection.put(self.hello(envelope.address, answers=True))
            connection.greeted(envelope.body.boot_id, anew=not envelope.to_key)
            return
        if envelope.to_key != self.boot_id:
            self.void += 1
            return
        known = self.connections.get(envelope.address)
        if known is None or known.peer is None or known.peer.boot_id != envelope.key:
            self.void += 1
            return
        self.told.on_message(known.peer, envelope.body, incoming.ids)

    def _connection(self, address: str) -> Connection:
        if address not in self.connections:
            connection = self.connections[address] = Connection(self, address)
            connection.put(self.hello(address, answers=False))
        return self.connections[address]


class Network:
    """All daemons that live."""

    def __init__(self) -> None:
        self.links: list[ScriptedLinks] = []  # of each daemon

    def at(self, address: str) -> ScriptedLinks | None:
        return next((one for one in self.links if one.is_own(address)), None)

    def connections(self) -> list[Connection]:
        return [one for links in self.links for one in links.connections.values()]

    def busy(self) -> list[Connection]:
        return [one for one in self.connections() if one.on_its_way and not one.broken and self.at(one.address)]

    def deliver(self, connection: Connection) -> PeerBody:
        incoming = decode_peer(connection.on_its_way.popleft())
        receiver = self.at(connection.address)
        assert receiver is not None, connection.address
        receiver.take(incoming)
        return incoming.envelope.body

    def leave(self, links: ScriptedLinks) -> None:
        self.links.remove(links)
        for connection in self.connections():
            if links.is_own(connection.address):
                connection.break_off()

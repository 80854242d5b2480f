"""Several daemons' rooms without sockets, threads or clock: real books, pools and peer services, a scripted network."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized
from typing import cast

from kvferry.daemon.metrics import Counters
from kvferry.daemon.peers import PeerLinks
from kvferry.daemon.pool_service import PoolService
from kvferry.daemon.rooms.effects import Effect, StartPiece, StopPiece, Tell
from kvferry.daemon.rooms.peer_service import PeerService
from kvferry.daemon.rooms.remote import Incarnation, RemotePool
from kvferry.daemon.transports.remote import RemoteTransports
from kvferry.pools.devices.base import Region
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import KvferryError, PeerLostError
from kvferry.protocol.ids import BootId
from kvferry.protocol.peer_messages import PeerBody
from tests.rooms.peer_network import Connection, Network, ScriptedLinks
from tests.rooms.room_world import RoomWorld
from tests.rooms.scripted_remote import ScriptedRemote, SendingKey


class Node(RoomWorld):
    """One incarnation of a daemon, on a host of its own and on a host that all share: a test says which by address.

    Attributes:
        name: where it listens.
        links: what it says to others, and hears.
        remote: what moves between it and others.
    """

    def __init__(self, world: PeerWorld, name: str, boot_id: str) -> None:
        super().__init__()
        self.name = name
        self.now = world.now
        self._fillings = itertools.count(int(boot_id, 16) << 40 | 0xABCDEF, 0x0101)
        self._world = world
        self._carrying_out = False
        self.links = ScriptedLinks(world.network, BootId(boot_id), {"ipc": self.ipc, "tcp": self.tcp})
        self.remote = ScriptedRemote(
            self.links.send, self.book.peers, self._piece_done, self._carry_out, world.memory_of
        )
        self.peers = PeerService(
            cast("PeerLinks", self.links),
            self.book.peers,
            cast("PoolService", None),
            cast("RemoteTransports", self.remote),
            self._carry_out,
            Counters(),
            clock=lambda: self.now,
        )

    @property
    def ipc(self) -> str:
        """Return its address for daemons of the same host."""
        return f"ipc:///run/{self.name}/peer.sock"

    @property
    def tcp(self) -> str:
        """Return its address for daemons of other hosts."""
        return f"tcp://{self.name}:7801"

    def events(self, session: int, *values: int) -> None:
        """Let a session's event ring hold these counters."""
        self.book.events_reached(session, list(values), self.now)
        self._carry_out()

    def remote_pages(self, pool: Pool) -> set[int]:
        """Return the pages that copies between daemons may write."""
        return {
            int(start) + at
            for arriving in (*self.remote.mapped.values(), *self.remote.landing.values())
            if arriving.piece.room.pool is pool
            for promise in arriving.piece.promises
            for start, count in zip(promise.plan.runs.destination, promise.plan.runs.pages, strict=True)
            for at in range(int(count))
        }

    def check(self) -> None:
        """Check what must hold at any time, also of copies between daemons."""
        super().check()
        for pool in self.pools:
            assert self.remote_pages(pool) <= self.held_pages(pool), "a page may be written that nobody holds"

    def leftovers(self) -> dict[str, int]:
        """Return how much is live of what must be gone once all is over."""
        sides, remote = self.book.sides, self.remote
        live: dict[str, Sized] = {
            "offers": sides.offers,
            "rooms": sides.rooms,
            "remote offers": sides.remote_offers,
            "announcements": sides.announcements,
            "targets": sides.targets,
            "pieces": sides.pieces,
            "effects": sides.effects,
            "local copies": self.transport.under_way,
            "mapped": remote.mapped,
            "landing": remote.landing,
            "sending": remote.sending,
        }
        return {name: len(some) for name, some in live.items() if some}

    def _carry_out(self) -> None:
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while effects := self.book.effects():
                for effect in effects:
                    self._do(effect)
        finally:
            self._carrying_out = False
        self.check()
        self.remote.report()

    def _do(self, effect: Effect) -> None:
        if isinstance(effect, Tell):
            if effect.session_id in self.told:
                self.told[effect.session_id].append(effect.event)
        elif isinstance(effect, StartPiece | StopPiece):
            piece = self.book.sides.pieces[effect.piece_id]
            if isinstance(effect, StartPiece) and piece.offer.origin is not None:
                self.remote.start(piece)
            elif isinstance(effect, StartPiece):
                self.transport.start(effect)
            elif piece.offer.origin is not None:
                self.remote.stop(effect.piece_id)
            else:
                self.transport.stop(effect.piece_id)
        else:
            self.peers.carry_out(effect)


class PeerWorld:
    """Daemons and the network between them.

    Attributes:
        now: the time of all of them, in seconds.
        nodes: the daemons that live, by name.
    """

    def __init__(self, *names: str) -> None:
        self.now = 100.0
        self.network = Network()
        self.nodes: dict[str, Node] = {}
        self._boots = itertools.count(1)
        self._memory: dict[tuple[str, str, int], Region] = {}
        for name in names:
            self.start(name)

    # -- daemons

    def start(self, name: str) -> Node:
        """Start a daemon."""
        node = self.nodes[name] = Node(self, name, f"{next(self._boots):032x}")
        return node

    def end(self, node: Node) -> None:
        """Let a daemon die; what was on its way from and to it is lost."""
        del self.nodes[node.name]
        self.network.leave(node.links)

    def restart(self, node: Node) -> Node:
        """Let a daemon die and another incarnation begin; the others have not noticed yet."""
        self.end(node)
        return self.start(node.name)

    def memory_of(self, pool: RemotePool) -> Region:
        """Return the memory that a peer's pool has, or had: a mapping outlives its owner.

        Raises:
            PeerLostError: its owner died before anybody had mapped it.
        """
        for node in self.nodes.values():
            for one in node.pools:
                if node.links.boot_id == pool.peer.boot_id:
                    self._memory[pool.peer.boot_id, one.name, one.region.identity] = one.region
        known = self._memory.get((pool.peer.boot_id, pool.name, pool.region_id))
        if known is None:
            raise PeerLostError("nobody is there")
        return known

    def pass_time(self, seconds: float) -> None:
        """Let time pass everywhere, and deadlines come."""
        self.now += seconds
        for node in self.nodes.values():
            node.pass_time(seconds)

    # -- the network

    def connection(self, sender: Node, receiver: Node) -> Connection:
        """Return the connection from one daemon to another."""
        (found,) = [one for address, one in sender.links.connections.items() if receiver.links.is_own(address)]
        return found

    def deliver(self, sender: Node, receiver: Node) -> PeerBody:
        """Deliver the oldest message between two daemons."""
        return self.network.deliver(self.connection(sender, receiver))

    def deliver_until(self, sender: Node, receiver: Node, kind: type[PeerBody]) -> None:
        """Deliver messages between two daemons up to the first of a kind."""
        while not isinstance(self.deliver(sender, receiver), kind):
            pass

    def deliver_all(self) -> None:
        """Deliver all that is on its way, and what comes of it; no copy goes on."""
        while busy := self.network.busy():
            self.network.deliver(busy[0])

    def cut(self, one: Node, other: Node) -> None:
        """Break both connections between two daemons; neither has noticed yet."""
        for connection in self._between(one, other):
            connection.break_off()

    def notice(self, node: Node, lost: Node) -> None:
        """Let a daemon notice that its connection to another one has broken."""
        for connection in node.links.connections.values():
            if lost.links.is_own(connection.address):
                connection.notice()

    def heal(self) -> None:
        """Let every broken connection to a daemon that lives be made anew, and all be said."""
        for connection in self.network.connections():
            if connection.broken and self.network.at(connection.address):
                connection.reopen()
        self.deliver_all()

    # -- copies

    def write(self, node: Node, key: SendingKey, error: KvferryError | None = None) -> None:
        """Write what a home granted to its slot, and say so."""
        home = self.network.at(key[0].address)
        node_at = next((one for one in self.nodes.values() if one.links is home), None)
        if node_at is not None and home is not None and home.boot_id == key[0].boot_id:
            arriving = node_at.remote.landing.get(key[1])
            node_at.remote.slots[node.links.boot_id, key[1]] = arriving.gathered() if arriving else []
        node.remote.end_write(key, error)

    def steps(self) -> Iterator[tuple[Node, str, object]]:
        """Yield what can go on of each copy."""
        for node in self.nodes.values():
            yield from ((node, "local", piece) for piece in node.transport.under_way)
            yield from ((node, "mapped", n) for n, one in node.remote.mapped.items() if not one.confirming)
            yield from ((node, "write", key) for key in node.remote.writing())

    def step(self, node: Node, kind: str, what: object, error: KvferryError | None = None) -> None:
        """Bring one copy to its end."""
        if kind == "write":
            self.write(node, cast("tuple[Incarnation, int]", what), error)
            return
        piece = cast("int", what)
        if kind == "local":
            if error is None:
                node.transport.copy(piece)
            node.transport.end(piece, error)
            return
        if error is None:
            node.remote.mapped[piece].copy()
        node.remote.end_copy(piece, error)
        node.remote.report()

    def run(self) -> None:
        """Deliver all messages and finish all copies, until nothing goes on."""
        self.deliver_all()
        while (next_step := next(self.steps(), None)) is not None:
            self.step(*next_step)
            self.deliver_all()

    def check_nothing_left(self) -> None:
        """Check that no daemon keeps anything of a hand-off that is over."""
        for node in self.nodes.values():
            node.check()
            assert not node.leftovers(), (node.name, node.leftovers())
            assert node.book.next_deadline() is None

    def _between(self, one: Node, other: Node) -> list[Connection]:
        return [
            connection
            for sender, receiver in ((one, other), (other, one))
            for connection in sender.links.connections.values()
            if receiver.links.is_own(connection.address)
        ]

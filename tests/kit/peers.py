"""Several daemons' transfers without sockets, threads or clock: a scripted network, the rest is real."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Final, Literal, TypeAlias, cast

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.peers.links import PeerLinks
from kvferry.daemon.services.peer_transfers import PeerMessenger, PeerTransferService
from kvferry.daemon.transfer.endpoints import Incarnation, RemotePool, TransferOp
from kvferry.daemon.transfer.registry import (
    AnnounceReceive,
    Effect,
    SendToDaemon,
    SendToPeer,
    StartOp,
    StopOp,
    StopSending,
)
from kvferry.daemon.transfer.transitions import TRANSITIONS, Transitions
from kvferry.daemon.transports.remote import RemoteTransports
from kvferry.pools.devices.base import Region
from kvferry.protocol.errors import KvferryError, PeerLostError
from kvferry.protocol.ids import BootId
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.peer_messages import PeerBody, ReceiveName
from tests.kit.peer_network import Connection, Network, ScriptedLinks
from tests.kit.scripted_remote import ScriptedRemote, SendingKey
from tests.kit.transfers import ORDERS, PAGE_BYTES, REQUEST, Engine, TransferHarness


class Node(TransferHarness):
    """One incarnation of a daemon, on a host of its own and on a host that all share: a test says which by address.

    Attributes:
        name: where it listens.
        links: what it says to others, and hears.
        remote: what moves between it and others.
    """

    def __init__(self, harness: PeerHarness, name: str, boot_id: str) -> None:
        super().__init__(transitions=harness.transitions)
        self.name = name
        self.now = harness.now
        self._fillings = itertools.count(int(boot_id, 16) << 40 | 0xABCDEF, 0x0101)
        self._harness = harness
        self._executing = False
        self.links = ScriptedLinks(harness.network, BootId(boot_id), {"ipc": self.ipc, "tcp": self.tcp})
        self.remote = ScriptedRemote(self.links.send, self.state_machine.peers, harness.memory_of)
        links, remote, clock = cast("PeerLinks", self.links), cast("RemoteTransports", self.remote), lambda: self.now
        self.messenger = PeerMessenger(links, self.state_machine.peers, remote, clock)
        self.peers = PeerTransferService(
            links, self.state_machine, remote, self.messenger, self._execute, Counters(), clock
        )
        self.links.listener = self.peers
        self._executors: dict[type[Effect], Callable[[Any], None]] = {
            AnnounceReceive: self.messenger.announce,
            SendToPeer: self.messenger.send_to_peer,
            SendToDaemon: self.messenger.send_to_daemon,
        }

    @property
    def ipc(self) -> str:
        """Return its address for daemons of the same host."""
        return f"ipc:///run/{self.name}/peer.sock"

    @property
    def tcp(self) -> str:
        """Return its address for daemons of other hosts."""
        return f"tcp://{self.name}:7801"

    def written(self) -> Iterable[TransferOp]:
        return [*super().written(), *self.remote.written_here()]

    def leftovers(self) -> dict[str, int]:
        """Return how much is live of what must be gone once all is over."""
        endpoints, remote = self.state_machine.endpoints, self.remote
        live: dict[str, Sized] = {
            "send_requests": endpoints.send_requests,
            "receive_requests": endpoints.receive_requests,
            "remote send requests": endpoints.remote_sends,
            "announcements": endpoints.announcements,
            "remote_endpoints": endpoints.remote_endpoints,
            "ops": endpoints.ops,
            "effects": endpoints.effects,
            "local copies": self.transport.under_way,
            "mapped": remote.mapped,
            "network": remote.network,
            "sending": remote.sending,
        }
        return {name: len(some) for name, some in live.items() if some}

    def _execute(self) -> None:
        if self._executing:
            return
        self._executing = True
        try:
            while effects := self.state_machine.effects():
                for effect in effects:
                    self.do(effect)
        finally:
            self._executing = False
        self.check()
        self.remote.report()

    def do(self, effect: Effect) -> None:
        if isinstance(effect, StartOp | StopOp) and (op := self.state_machine.endpoints.ops[effect.op_id]):
            if op.send_request.origin is None:
                super().do(effect)
            elif isinstance(effect, StartOp):
                self.remote.start(op, self._op_done)
            else:
                self.remote.stop(effect.op_id)
        elif isinstance(effect, StopSending):
            self.remote.stop_sending(effect.remote_endpoint)
        elif (execute := self._executors.get(type(effect))) is not None:
            execute(effect)
        else:
            super().do(effect)


class PeerHarness:
    """Daemons and the network between them.

    Attributes:
        now: the time of all of them, in seconds.
        nodes: the daemons that live, by name.
    """

    def __init__(self, *names: str, transitions: Transitions = TRANSITIONS) -> None:
        self.now = 100.0
        self.transitions = transitions
        self.network = Network()
        self.nodes: dict[str, Node] = {}
        self._boots = itertools.count(1)
        self._memory: dict[tuple[str, str, int], Region] = {}
        for name in names:
            self.start(name)

    # -- daemons

    def start(self, name: str) -> Node:
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
        self.now += seconds
        for node in self.nodes.values():
            node.pass_time(seconds)

    # -- the network

    def connection(self, sender: Node, receiver: Node) -> Connection:
        (found,) = [one for address, one in sender.links.connections.items() if receiver.links.is_own(address)]
        return found

    def deliver(self, sender: Node, receiver: Node) -> PeerBody:
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
        """Write what a home gave a write credit for to its slot, and say so."""
        home = self.network.at(key[0].address)
        node_at = next((one for one in self.nodes.values() if one.links is home), None)
        if node_at is not None and home is not None and home.boot_id == key[0].boot_id:
            arriving = node_at.remote.network.get(key[1])
            node_at.remote.slots[node.links.boot_id, key[1]] = arriving.gathered() if arriving else []
        node.remote.end_write(key, error)

    def steps(self) -> Iterator[tuple[Node, str, object]]:
        """Yield what can go on of each copy."""
        for node in self.nodes.values():
            yield from ((node, "local", op) for op in node.transport.under_way)
            yield from ((node, "mapped", n) for n, one in node.remote.mapped.items() if not one.confirming)
            yield from ((node, "write", key) for key in node.remote.writing())

    def step(self, node: Node, kind: str, what: object, error: KvferryError | None = None) -> None:
        if kind == "write":
            self.write(node, cast("tuple[Incarnation, int]", what), error)
            return
        op = cast("int", what)
        if kind == "local":
            if error is None:
                node.transport.copy(op)
            node.transport.end(op, error)
            return
        if error is None:
            node.remote.mapped[op].copy()
        node.remote.end_copy(op, error)
        node.remote.report()

    def run(self) -> None:
        """Deliver all messages and finish all copies, until nothing goes on."""
        self.deliver_all()
        while (next_step := next(self.steps(), None)) is not None:
            self.step(*next_step)
            self.deliver_all()

    def check_nothing_left(self) -> None:
        for node in self.nodes.values():
            node.check()
            assert not node.bugs, (node.name, node.bugs)
            assert not node.leftovers(), (node.name, node.leftovers())
            assert node.state_machine.next_deadline() is None

    def _between(self, one: Node, other: Node) -> list[Connection]:
        return [
            connection
            for sender, receiver in ((one, other), (other, one))
            for connection in sender.links.connections.values()
            if receiver.links.is_own(connection.address)
        ]


Way: TypeAlias = Literal["here", "ipc", "tcp"]
WAYS: Final[tuple[Way, ...]] = ("here", "ipc", "tcp")
"""Within one daemon, by mapping as between daemons of one host, and by bounce buffers as between hosts."""
PAGES: Final = 3
BYTES: Final = PAGES * 4 * PAGE_BYTES


class Transfer:
    """An engine that sends and one that receives, at one daemon or at two.

    Attributes:
        source: the daemon of ``prefill``.
        home: that of ``decode``.
        third: a daemon that has nothing to do with them, until a test says so.
    """

    def __init__(self, way: Way = "here", transitions: Transitions = TRANSITIONS) -> None:
        self.way = way
        names = ("here", "third") if way == "here" else ("source", "home", "third")
        self.harness = PeerHarness(*names, transitions=transitions)
        self.source, self.third = self.harness.nodes[names[0]], self.harness.nodes["third"]
        self.home = self.source if way == "here" else self.harness.nodes["home"]
        self.prefill, self.decode = self.source.engine("prefill"), self.home.engine("decode")

    # -- what happens

    def address(self, node: Node) -> str:
        return node.ipc if self.way == "ipc" else node.tcp

    def greet(self) -> None:
        """Let the home and the source know each other."""
        self.home.links.connect(self.address(self.source))
        self.harness.deliver_all()

    def send(self, first: int = 0, stop: int | None = None, **more: Any) -> None:  # noqa: ANN401  what ``Engine.send`` takes
        self.prefill.send(first, stop, **more)

    def receive(self, *daemons: Node, into: Engine | None = None, **more: Any) -> int:  # noqa: ANN401  what ``Engine.receive`` takes
        """RECEIVE into the pages of decode, from these daemons, by default the source; return the generation."""
        into = into or self.decode
        named = daemons or (self.source,)
        addresses = tuple(self.address(one) for one in named if one is not into.harness)
        return into.receive(source_daemons=addresses, **more).generation

    def begin(self, first: str = "send", **more: Any) -> None:  # noqa: ANN401  what ``Engine.send`` takes
        """Let both speak, in this order, and hear all that is said; ``more`` is of the SEND."""
        for direction in ORDERS[first]:
            if direction == "send":
                self.send(**more)
                self.harness.deliver_all()
            else:
                self.announce()

    def announce(self, *daemons: Node, **more: Any) -> None:  # noqa: ANN401  what ``Engine.receive`` takes
        """RECEIVE, and let these daemons, by default the source, hear of it."""
        self.receive(*daemons, **more)
        self.harness.deliver_all()

    def meet(self, first: str = "send", *, last: bool = True) -> None:
        """Bring both sides together: one copy is under way; without ``last`` of the first page."""
        self.begin(first, stop=PAGES if last else 1, last=last)
        assert self.under_way()

    def under_way(self) -> tuple[Node, str, object]:
        """Return the one copy or write that is under way."""
        (step,) = self.harness.steps()
        return step

    def end_copy(self, error: KvferryError | None = None) -> None:
        self.harness.step(*self.under_way(), error)

    def lose_daemon(self, lost: Node, other: Node) -> None:
        """Let a daemon die, and the other one notice."""
        self.harness.end(lost)
        self.harness.notice(other, lost)

    # -- what can be seen

    @property
    def told(self) -> tuple[str, str]:
        return self.prefill.told, self.decode.told

    @property
    def held(self) -> tuple[int, int]:
        return self.prefill.held, self.decode.held

    @property
    def waits_for(self) -> str:
        (receive_request,) = self.home.state_machine.endpoints.receive_requests.values()
        return receive_request.waits_for()

    def ends(self, sender: str, receiver: str) -> None:
        """Let all go on to its end: both are told this and that it has settled, and nothing is left."""
        self.harness.run()
        self.check_over(sender, receiver)

    def check_over(self, sender: str, receiver: str) -> None:
        """Check that both were told this and that it has settled, and that nothing is left."""
        assert self.told == tuple(f"{outcome} settled" if outcome else "" for outcome in (sender, receiver))
        self.harness.check_nothing_left()
        assert self.held == (0, 0)

    def succeeds(self) -> None:
        self.ends("OK", "OK")
        assert self.decode.content == self.prefill.content


MEETING_PAGES: Final = 2


class Meeting:
    """A node that is home of one transfer and source of another one, both with the same peer.

    ``sent``: whether the peer has sent what the node's receive request waits for.
    """

    def __init__(self, way: Literal["ipc", "tcp"], *, sent: bool) -> None:
        self.harness = PeerHarness("node", "peer")
        self.node, self.peer = self.harness.nodes.values()
        self.names: list[ReceiveName] = []
        for home, source, request in ((self.node, self.peer, REQUEST), (self.peer, self.node, "e" * 32)):
            self._begin(home, source, request, way, send=sent or source is self.node)
        self.harness.deliver_all()

    def _begin(self, home: Node, source: Node, request: str, way: Literal["ipc", "tcp"], *, send: bool) -> None:
        decode, prefill = home.session(), source.session()
        pool, its_pool = home.pool("decode"), source.pool("prefill")
        ids = home.filled(pool, decode, MEETING_PAGES)
        address = source.ipc if way == "ipc" else source.tcp
        home.receive(decode, pool, ids, request=request, source_daemons=(address,))
        its_ids = source.filled(its_pool, prefill, MEETING_PAGES)
        if send:
            source.send(prefill, its_pool, its_ids, request=request)
        (receive_request,) = home.state_machine.endpoints.receive_requests.values()
        self.names.append(receive_request.name)

    @property
    def speaker(self) -> Incarnation:
        (connection,) = self.node.links.connections.values()
        assert connection.peer is not None
        return connection.peer

    @property
    def manifest(self) -> Manifest:
        return self.peer.pools[0].manifest

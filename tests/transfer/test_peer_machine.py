"""Everything at once, between daemons: messages in any interleaving, links that break, daemons that restart.

Whatever happens: an accepted side is told one outcome and later, once, that it has settled; a success has the bytes
that were sent, though sources use their pages anew as soon as they may; no page is written after its receive request
has settled; and once all is said nothing is left over at any daemon.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvferry.daemon.transfer.endpoints import EndpointKey, SendRequest
from kvferry.pools.pool import Pool
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import KvferryError, TransferFailedError
from kvferry.protocol.transfer_messages import LayerStep
from tests.kit.devices import DEVICE
from tests.kit.peers import Node, PeerHarness
from tests.kit.sides_machine import Life, SidesMachine
from tests.kit.transfers import TransferHarness, layers

NAMES: Final = ("a", "b", "c")
REQUESTS: Final = ("a" * 32, "b" * 32, "c" * 32)
PROMPT_PAGES: Final = 2
PAGES: Final = 9
WHOLE, STAGES, DECODE = "whole", ("stage0", "stage1"), "decode"
ENTRIES: Final = {WHOLE: layers(2), "stage0": layers(1), "stage1": layers(1, first=1), DECODE: layers(2)}
STEPS: Final = tuple(LayerStep(first_layer=layer, layers=1, event=layer, value=1) for layer in (0, 1))
DEADLINES: Final = st.sampled_from([5.0, 20.0, 20.0])


class Resting(NamedTuple):
    """Pages whose receive request has settled, and what they held then."""

    node: TransferHarness
    pool: Pool
    ids: PageIds
    content: list[dict[str, bytes]]


class PeerMachine(SidesMachine):
    """Two or three daemons. Messages are mostly sensible, so that transfers get somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.harness = PeerHarness()
        self.engines: dict[str, int] = {}
        self.resting: list[Resting] = []
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        node = self.harness.start(name)
        self.engines[name] = node.session()
        for pool, entries in ENTRIES.items():
            node.pool(pool, entries, pages=PAGES)

    def draw_node(self, data: st.DataObject) -> Node:
        return self.harness.nodes[data.draw(st.sampled_from(NAMES))]

    def fresh(self, node: Node, pool: Pool) -> PageIds | None:
        """Return pages for a prompt, or None; those of settled transfers come back where there are no others."""
        if pool.allocator.free_count < PROMPT_PAGES:
            session = self.engines[node.name]
            for page in range(1, PAGES):
                one = np.array([page])
                try:
                    pool.allocator.begin_write(session, one, "")
                except KvferryError:
                    continue
                pool.allocator.end_write(one)
                pool.allocator.free(session, one)
                self.forget_resting(pool, one)
        if pool.allocator.free_count < PROMPT_PAGES:
            return None
        ids = node.filled(pool, self.engines[node.name], PROMPT_PAGES)
        self.forget_resting(pool, ids)
        return ids

    def forget_resting(self, pool: Pool, ids: PageIds) -> None:
        self.resting = [one for one in self.resting if one.pool is not pool or not set(ids) & set(one.ids)]

    def try_send(self, node: Node, name: str, request: str, data: st.DataObject) -> None:
        pool, session = self.pool(node, name), self.engines[node.name]
        key = EndpointKey(pool.tenant, request, name, "send")
        live = node.state_machine.endpoint(session, key)
        start = 0
        if isinstance(live, SendRequest):
            start = live.pages
        if start >= PROMPT_PAGES:
            return
        pages = self.fresh(node, pool)
        if pages is None:
            return
        stop = PROMPT_PAGES if start else data.draw(st.sampled_from([PROMPT_PAGES, PROMPT_PAGES, 1]))
        try:
            node.send(
                session,
                pool,
                pages[start:stop],
                request=request,
                first_page=start,
                last=stop == PROMPT_PAGES,
                destinations=data.draw(st.sampled_from([1, 1, 1, 2])),
                steps=data.draw(st.sampled_from([(), (), STEPS])),
                deadline_s=data.draw(DEADLINES),
            )
        except KvferryError:
            return
        self.lives[Life(node, session, key)] += live is None
        self.note_sent(node, pool, pages[start:stop], request, start)

    def try_receive(
        self,
        node: Node,
        request: str,
        daemons: tuple[str, ...],
        sources: int,
        deadline_s: float = 20.0,
        *,
        again: bool = False,
    ) -> None:
        """RECEIVE a prompt; ``again``: into the pages that the request had before."""
        pool, session = self.pool(node, DECODE), self.engines[node.name]
        life = Life(node, session, EndpointKey(pool.tenant, request, DECODE, "receive"))
        pages = self.received.get(life, (0, None))[1] if again else self.fresh(node, pool)
        if pages is None:
            return
        try:
            accepted = node.receive(
                session, pool, pages, request=request, sources=sources, source_daemons=daemons, deadline_s=deadline_s
            )
        except KvferryError:
            return
        self.forget_resting(pool, pages)
        self.lives[life] += 1
        self.received[life] = (0, pages)
        assert accepted.generation == self.lives[life]

    def addresses(self, node: Node, others: list[Node], data: st.DataObject) -> tuple[str, ...]:
        """Return how a daemon calls others: as of its host, or not."""
        return tuple(data.draw(st.sampled_from([one.ipc, one.tcp])) for one in others if one is not node)

    @rule(data=st.data(), request=st.sampled_from(REQUESTS), name=st.sampled_from([WHOLE, WHOLE, *STAGES]))
    def send(self, data: st.DataObject, request: str, name: str) -> None:
        self.try_send(self.draw_node(data), name, request, data)

    @rule(data=st.data(), request=st.sampled_from(REQUESTS), sources=st.sampled_from([1, 1, 2]), again=st.booleans())
    def receive(self, data: st.DataObject, request: str, sources: int, *, again: bool) -> None:
        node = self.draw_node(data)
        others = data.draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
        daemons = self.addresses(node, [self.harness.nodes[name] for name in others], data)
        self.try_receive(node, request, daemons, sources, data.draw(DEADLINES), again=again)

    @rule(data=st.data(), request=st.sampled_from(REQUESTS), first=st.sampled_from(["send", "receive"]))
    def transfer(self, data: st.DataObject, request: str, first: str) -> None:
        source, home = data.draw(st.permutations(self.daemons()))[:2]
        if first == "send":
            self.try_send(source, WHOLE, request, data)
        self.try_receive(home, request, self.addresses(home, [source], data), 1)
        if first == "receive":
            self.try_send(source, WHOLE, request, data)

    @precondition(
        lambda self: any(
            node.state_machine.endpoints.receive_requests or node.state_machine.endpoints.send_requests
            for node in self.daemons()
        )
    )
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        endpoints = [(node, direction) for node in self.daemons() for direction in node.state_machine.endpoints]
        node, direction = data.draw(st.sampled_from(endpoints))
        if isinstance(direction, SendRequest):
            home = self.draw_node(data)
            sources = 1 if direction.pool.name == WHOLE else 2
            daemons = self.addresses(home, self.daemons() if sources == 2 else [node], data)
            self.try_receive(home, direction.request_id, daemons, sources)
            return
        addressed = [one for one in self.daemons() if {one.ipc, one.tcp} & set(direction.source_daemons)]
        for name in (WHOLE,) if direction.sources == 1 else STAGES:
            source = data.draw(st.sampled_from(addressed or [node]))
            self.try_send(source, name, direction.request_id, data)

    @rule(data=st.data(), values=st.sampled_from([(1, 0), (1, 1), (1, 1)]))
    def events(self, data: st.DataObject, values: tuple[int, int]) -> None:
        node = self.draw_node(data)
        node.events(self.engines[node.name], *values)

    @precondition(lambda self: self.harness.network.busy())
    @rule(data=st.data(), count=st.integers(1, 8))
    def deliver(self, data: st.DataObject, count: int) -> None:
        busy = self.harness.network.busy()
        connection = busy[data.draw(st.integers(0, len(busy) - 1))]
        for _ in range(min(count, len(connection.on_its_way))):
            if connection.on_its_way:
                self.harness.network.deliver(connection)

    @precondition(lambda self: any(True for _ in self.harness.steps()))
    @rule(data=st.data(), how=st.sampled_from(["finish", "finish", "finish", "fail"]))
    def step_a_copy(self, data: st.DataObject, how: str) -> None:
        steps = list(self.harness.steps())
        step = steps[data.draw(st.integers(0, len(steps) - 1))]
        self.harness.step(*step, TransferFailedError("scripted") if how == "fail" else None)

    @precondition(lambda self: any(node.remote.mapped for node in self.daemons()))
    @rule(data=st.data())
    def copy_only(self, data: st.DataObject) -> None:
        """Let the bytes of a mapped copy move without an end: it may go on for as long as it is under way."""
        copies = [one for node in self.daemons() for one in node.remote.mapped.values() if not one.confirming]
        if copies:
            data.draw(st.sampled_from(copies)).copy()

    @precondition(lambda self: self.harness.network.busy())
    @rule()
    def deliver_all(self) -> None:
        self.harness.deliver_all()

    @rule()
    def run(self) -> None:
        self.harness.run()

    @rule(data=st.data())
    def disturb(self, data: st.DataObject) -> None:
        kinds = [self.cancel, self.lose, self.pass_time, self.acknowledge, self.break_a_link, self.heal, self.restart]
        data.draw(st.sampled_from(kinds))(data)

    def lose(self, data: st.DataObject) -> None:
        node = self.draw_node(data)
        session = self.engines[node.name]
        node.lose(session)
        self.engines[node.name] = node.session()
        self.resting = [one for one in self.resting if one.node is not node]
        self.forget(node, session)

    def break_a_link(self, data: st.DataObject) -> None:
        connections = self.harness.network.connections()
        if not connections:
            return
        connection = connections[data.draw(st.integers(0, len(connections) - 1))]
        how = data.draw(st.sampled_from(["cut", "cut both", "notice", "reopen"]))
        connection.break_off()
        if how == "cut both":
            for one in connections:
                if connection.owner.is_own(one.address) and one.owner.is_own(connection.address):
                    one.break_off()
        elif how == "notice":
            connection.notice()
        elif how == "reopen" and self.harness.network.at(connection.address):
            connection.reopen()

    def heal(self, _data: st.DataObject) -> None:
        """Make every broken connection anew; what is said then is on its way."""
        for connection in self.harness.network.connections():
            if connection.broken:
                connection.reopen()

    def restart(self, data: st.DataObject) -> None:
        node = self.draw_node(data)
        self.harness.end(node)
        self.resting = [one for one in self.resting if one.node is not node]
        self.forget(node)
        self.start(node.name)

    def pass_time(self, data: st.DataObject) -> None:
        self.harness.pass_time(data.draw(st.sampled_from([0.5, 3.0, 10.0])))

    def daemons(self) -> list[Node]:
        return list(self.harness.nodes.values())

    def settled(self, life: Life) -> None:
        pool, (_, ids) = self.pool(life.daemon, DECODE), self.received[life]
        self.resting.append(Resting(life.daemon, pool, ids, life.daemon.content(pool, ids)))

    @invariant()
    def sources_use_settled_pages_anew(self) -> None:
        for node in self.daemons():
            for pool in node.pools:
                if pool.name != DECODE:
                    idle = set(range(1, PAGES)) - node.held_pages(pool)
                    node.fill(pool, np.array(sorted(idle)))

    @invariant()
    def settled_pages_rest(self) -> None:
        for one in self.resting:
            assert one.node.content(one.pool, one.ids) == one.content, one.ids

    def teardown(self) -> None:
        """Let time pass, whatever links are broken still: nothing may be left over."""
        self.harness.run()
        self.harness.pass_time(1000.0)
        self.harness.run()
        self.every_side_is_told_once()
        self.what_succeeded_has_the_right_bytes()
        self.harness.check_nothing_left()
        for node in self.daemons():
            assert all(not pool.allocator.busy_count for pool in node.pools)


TestPeers = PeerMachine.TestCase
TestPeers.settings = DEVICE.examples(40, stateful_step_count=50)

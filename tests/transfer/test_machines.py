"""Everything at once, within a daemon and between several: messages, deaths, cancels, deadlines, links that break.

Whatever happens: an accepted side is told one outcome and later, once, that it has settled; pages are held exactly as
long as a side is live, and are never free while a copy may write them; a success has the bytes that were sent, though
sources use their pages anew as soon as they may; a refusal changes nothing; a half hears that the other side has ended
only after that has, and has not begun anew; and in the end nothing is left over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.daemon.transfer.endpoints import EndpointKey, Half, SendRequest
from kvferry.daemon.transfer.transitions import State
from kvferry.pools.pool import Pool
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import CancelledError, KvferryError, TransferFailedError
from kvferry.protocol.events import Finished, Settled
from kvferry.protocol.transfer_messages import LayerStep
from tests.kit.devices import DEVICE
from tests.kit.peers import Node, PeerHarness
from tests.kit.transfers import TransferHarness, layers

REQUESTS: Final = ("a" * 32, "b" * 32, "c" * 32)
DEADLINES: Final = st.sampled_from([5.0, 20.0, 20.0])


class Life(NamedTuple):
    """One side as its session is told of it."""

    daemon: TransferHarness
    session: int
    key: EndpointKey


class SidesMachine(RuleBasedStateMachine):
    """Daemons and the sides that they have accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.lives: dict[Life, int] = defaultdict(int)  # how often each side of a session that lives has begun
        self.sent: dict[tuple[str, int, str], set[bytes]] = defaultdict(set)  # by request, logical page and entry
        self.received: dict[Life, tuple[int, PageIds]] = {}  # the first logical page and the pages of each RECEIVE
        self.checked: dict[tuple[TransferHarness, int], int] = defaultdict(int)  # events of each session that were seen

    harness: TransferHarness | PeerHarness

    def daemons(self) -> Sequence[TransferHarness]:
        raise NotImplementedError

    def pass_time(self, data: st.DataObject) -> None:
        self.harness.pass_time(data.draw(st.sampled_from([0.5, 3.0, 10.0])))

    def settled(self, life: Life) -> None:
        """Hear that the pages of a RECEIVE are its session's again."""

    def pool(self, daemon: TransferHarness, name: str) -> Pool:
        (found,) = [one for one in daemon.pools if one.name == name]
        return found

    def note_sent(self, daemon: TransferHarness, pool: Pool, ids: PageIds, request: str, first_page: int) -> None:
        for logical, content in enumerate(daemon.content(pool, ids), first_page):
            for name, value in content.items():
                self.sent[request, logical, name].add(value)

    def forget(self, daemon: TransferHarness, session: int | None = None) -> None:
        for life in [one for one in self.lives if one.daemon is daemon and session in {None, one.session}]:
            del self.lives[life]

    def cancel(self, data: st.DataObject) -> None:
        live = [(one, side) for one in self.daemons() for side in one.state_machine.endpoints]
        live = [(one, side) for one, side in live if side.session_id in one.told]
        if live:
            daemon, side = data.draw(st.sampled_from(live))
            assert isinstance(side.pool, Pool)
            daemon.cancel(side.session_id, side.pool, side.direction, side.request_id)

    def acknowledge(self, _data: st.DataObject) -> None:
        for daemon, session, key in self.lives:
            daemon.acknowledge(session, self.pool(daemon, key.pool), key.direction, key.request_id)

    @invariant()
    def pages_are_held_as_they_must(self) -> None:
        for daemon in self.daemons():
            daemon.check()
            assert not daemon.bugs

    @invariant()
    def every_side_is_told_once(self) -> None:
        for (daemon, session, key), lives in self.lives.items():
            told = [
                "finished" if isinstance(event, Finished) else "settled"
                for event in daemon.told[session]
                if (event.request_id, event.pool, event.direction) == key[1:]
            ]
            assert told == ["finished", "settled"] * (len(told) // 2) + ["finished"] * (len(told) % 2)
            side = daemon.state_machine.endpoint(session, key)
            expected = 2 * lives if side is None else 2 * lives - (2 if side.state is State.OPEN else 1)
            assert len(told) == expected

    @invariant()
    def what_succeeded_has_the_right_bytes(self) -> None:
        """Check the pages of every success as it is told, before anything else can happen to them."""
        for daemon in self.daemons():
            for session, events in daemon.told.items():
                for event in events[self.checked[daemon, session] :]:
                    tenant = self.pool(daemon, event.pool).tenant
                    life = Life(daemon, session, EndpointKey(tenant, event.request_id, event.pool, event.direction))
                    if event.direction == "receive" and isinstance(event, Settled):
                        self.settled(life)
                    elif event.direction == "receive" and isinstance(event, Finished) and event.error is None:
                        self.check_bytes(life)
                self.checked[daemon, session] = len(events)

    def check_bytes(self, life: Life) -> None:
        first_page, ids = self.received[life]
        for logical, content in enumerate(life.daemon.content(self.pool(life.daemon, life.key.pool), ids), first_page):
            for name, value in content.items():
                assert value in self.sent[life.key.request_id, logical, name], (name, logical)


# -- one daemon, several pools

PROMPT: Final = 3
POOL_PAGES: Final = 14
SOURCES: Final = {"whole": layers(2), "stage0": layers(1), "stage1": layers(1, first=1)}
DESTINATIONS: Final = ("decode0", "decode1")
STRANGER: Final = 8
MAX_SESSIONS: Final = 4


class TransferMachine(SidesMachine):
    """Messages that are mostly sensible, so that transfers get somewhere; refusals are part of the game."""

    harness: TransferHarness

    def __init__(self) -> None:
        super().__init__()
        self.harness = TransferHarness()
        self.sources = [self.harness.pool(name, entries, pages=POOL_PAGES) for name, entries in SOURCES.items()]
        self.destinations = [self.harness.pool(name, pages=POOL_PAGES) for name in DESTINATIONS]
        self.foreign = self.harness.pool("foreign", pages=POOL_PAGES, tenant=STRANGER)
        self.ended: set[Half] = set()

    def daemons(self) -> list[TransferHarness]:
        return [self.harness]

    def draw_session(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.harness.told)))

    def draw_pages(self, data: st.DataObject, pool: Pool, session: int, count: int) -> PageIds:
        """Return pages: fresh ones where there are any; sometimes those the session has already."""
        fresh = pool.allocator.free_count >= count and data.draw(st.integers(0, 3)) > 0
        if fresh:
            return self.harness.filled(pool, session, count)
        mine = [page for page in range(1, POOL_PAGES) if self.owns(pool, session, page)]
        pages = data.draw(st.lists(st.sampled_from(mine or [1]), min_size=count, max_size=count))
        return np.array(pages, np.int64)

    def owns(self, pool: Pool, session: int, page: int) -> bool:
        try:
            pool.allocator.check_owned(session, np.array([page]), "")
        except KvferryError:
            return False
        return True

    def try_send(self, session: int, pool: Pool, ids: PageIds, request: str, **fields: Any) -> None:  # noqa: ANN401
        key = EndpointKey(pool.tenant, request, pool.name, "send")
        before, live = self.snapshot(), self.harness.state_machine.endpoint(session, key)
        try:
            self.harness.send(session, pool, ids, request=request, **fields)
        except KvferryError:
            assert self.snapshot() == before
            return
        self.lives[Life(self.harness, session, key)] += live is None
        if live is None:
            self.check_late(session, key)
        self.note_sent(self.harness, pool, ids, request, fields.get("first_page", 0))

    def try_receive(
        self,
        session: int,
        pool: Pool,
        ids: PageIds,
        request: str,
        first_page: int,
        **fields: Any,  # noqa: ANN401
    ) -> None:
        life = Life(self.harness, session, EndpointKey(pool.tenant, request, pool.name, "receive"))
        before = self.snapshot()
        try:
            accepted = self.harness.receive(session, pool, ids, request=request, first_page=first_page, **fields)
        except KvferryError:
            assert self.snapshot() == before
            return
        self.received[life] = (first_page, ids)
        self.lives[life] += 1
        assert accepted.generation == self.lives[life]
        self.check_late(session, life.key)

    def check_late(self, session: int, key: EndpointKey) -> None:
        """Check what a side that has just begun was told of the other one; it has begun anew itself."""
        error = next((e.error for e in reversed(self.harness.told[session]) if isinstance(e, Finished)), None)
        is_over = self.harness.state_machine.endpoint(session, key) is None
        if is_over and error is not None and error.detail.startswith("the other side ended"):
            assert Half(key.tenant, key.request_id, "receive" if key.direction == "send" else "send") in self.ended
        self.ended.discard(Half(key.tenant, key.request_id, key.direction))

    @precondition(lambda self: len(self.harness.told) < MAX_SESSIONS)
    @rule()
    def open_session(self) -> None:
        self.harness.session()

    @precondition(lambda self: self.harness.told)
    @rule(data=st.data(), request=st.sampled_from(REQUESTS), token=st.booleans())
    def send(self, data: st.DataObject, request: str, *, token: bool) -> None:
        session = self.draw_session(data)
        pool = data.draw(st.sampled_from([*self.sources, *self.sources, self.foreign]))
        key = EndpointKey(pool.tenant, request, pool.name, "send")
        live = self.harness.state_machine.endpoint(session, key)
        before = live.last_range("main") if isinstance(live, SendRequest) else None
        start = before.end_page if before else 0
        if isinstance(live, SendRequest) and live.complete and data.draw(st.integers(0, 9)):
            return
        if data.draw(st.integers(0, 9)) == 0:
            start = data.draw(st.integers(0, PROMPT))
        count = data.draw(st.integers(1, max(1, PROMPT - start)))
        ids = self.draw_pages(data, pool, session, count)
        last = start + count >= PROMPT or data.draw(st.integers(0, 9)) == 0
        self.try_send(
            session,
            pool,
            ids,
            request,
            first_page=start,
            last=last,
            first_token=1 if token and last else None,
            deadline_s=data.draw(DEADLINES),
        )

    @precondition(lambda self: self.harness.told)
    @rule(data=st.data(), request=st.sampled_from(REQUESTS), first_page=st.sampled_from([0, 0, 1]))
    def receive(self, data: st.DataObject, request: str, first_page: int) -> None:
        session = self.draw_session(data)
        pool = data.draw(st.sampled_from([*self.destinations, *self.destinations, self.foreign]))
        ids = self.draw_pages(data, pool, session, PROMPT - first_page)
        sources = data.draw(st.sampled_from([1, 1, 2, ("whole",), ("stage1", "stage0")]))
        self.try_receive(
            session,
            pool,
            ids,
            request,
            first_page,
            sources=sources,
            destinations=data.draw(st.sampled_from([1, 1, 1, 2])),
            deadline_s=data.draw(DEADLINES),
        )

    @precondition(lambda self: self.harness.told and any(True for _ in self.harness.state_machine.endpoints))
    @rule(data=st.data(), first_token=st.booleans())
    def answer(self, data: st.DataObject, *, first_token: bool) -> None:
        direction = data.draw(st.sampled_from(list(self.harness.state_machine.endpoints)))
        session, request = self.draw_session(data), direction.request_id
        if direction.pool is self.foreign or not all(
            pool.allocator.free_count >= PROMPT for pool in self.harness.pools
        ):
            return
        if isinstance(direction, SendRequest):
            pool = data.draw(st.sampled_from(self.destinations))
            start = min(one.first_page or 0 for one in direction.chunks[0].ranges)
            ids = self.harness.filled(pool, session, max(1, PROMPT - start))
            sources = 1 if direction.pool is self.sources[0] else 2
            self.try_receive(session, pool, ids, request, start, sources=sources)
            return
        pools = self.sources[:1] if direction.sources == 1 else self.sources[1:]
        for pool in pools:
            ids = self.harness.filled(pool, session, PROMPT)
            self.try_send(session, pool, ids, request, first_token=1 if first_token else None)

    @precondition(lambda self: self.harness.told)
    @rule(data=st.data(), request=st.sampled_from(REQUESTS), again=st.booleans(), sources=st.sampled_from([1, 2]))
    def come_late(self, data: st.DataObject, request: str, *, again: bool, sources: int) -> None:
        """RECEIVE what was sent and cancelled before anybody came; ``again``: and then sent once more."""
        session, pool = self.draw_session(data), self.sources[0]
        home = data.draw(st.sampled_from(self.destinations))
        if self.harness.state_machine.endpoints.of_request(pool.tenant, request) or home.allocator.free_count < PROMPT:
            return
        key = EndpointKey(pool.tenant, request, pool.name, "send")
        for _ in range(1 + again):
            if pool.allocator.free_count < PROMPT:
                return
            direction = self.harness.state_machine.endpoint(session, key)
            if direction is not None:
                self.harness.cancel(session, pool, "send", request)
                self.ended.add(Half(key.tenant, request, "send"))
            self.harness.acknowledge(session, pool, "send", request)
            self.try_send(session, pool, self.harness.filled(pool, session, PROMPT), request)
        if not again and self.harness.state_machine.endpoint(session, key) is not None:
            self.harness.cancel(session, pool, "send", request)
            self.ended.add(Half(key.tenant, request, "send"))
        self.try_receive(session, home, self.harness.filled(home, session, PROMPT), request, 0, sources=sources)

    @precondition(lambda self: self.harness.transport.under_way)
    @rule(data=st.data(), how=st.sampled_from(["finish", "finish", "finish", "copy", "stop", "fail"]))
    def step_a_copy(self, data: st.DataObject, how: str) -> None:
        transport = self.harness.transport
        op = data.draw(st.sampled_from(sorted(transport.under_way)))
        if how == "copy":
            transport.copy(op)
        elif how == "fail":
            transport.end(op, TransferFailedError("scripted"))
        elif how == "stop" and op in transport.stopped:
            transport.end(op, CancelledError("stopped"))
        else:
            transport.finish(op)

    @rule(data=st.data())
    def disturb(self, data: st.DataObject) -> None:
        disturbance = data.draw(st.sampled_from([self.cancel, self.lose, self.pass_time, self.free, self.acknowledge]))
        open_before = {
            direction: direction.key
            for direction in self.harness.state_machine.endpoints
            if direction.state is State.OPEN
        }
        disturbance(data)
        for direction, key in open_before.items():
            if direction.state is not State.OPEN:
                self.ended.add(Half(key.tenant, key.request_id, key.direction))

    def lose(self, data: st.DataObject) -> None:
        if not self.harness.told:
            return
        session = self.draw_session(data)
        self.harness.lose(session)
        self.forget(self.harness, session)

    def free(self, data: st.DataObject) -> None:
        """FREE everything a session has in a pool, idle or not."""
        for session in self.harness.told:
            for pool in self.harness.pools:
                mine = [page for page in range(1, POOL_PAGES) if self.owns(pool, session, page)]
                if data.draw(st.booleans()) and mine:
                    pool.allocator.free(session, np.array(mine))

    def snapshot(self) -> list[object]:
        harness = self.harness
        return [
            {session: len(events) for session, events in harness.told.items()},
            list(harness.transport.under_way),
            [(pool.allocator.free_count, harness.held_pages(pool)) for pool in harness.pools],
            [
                (one.key, one.state, one.pages, one.waits_for(), one.deadline_at)
                for one in harness.state_machine.endpoints
            ],
            harness.state_machine.results.total,
        ]

    def teardown(self) -> None:
        self.harness.transport.finish_all()
        self.harness.pass_time(1000)
        self.every_side_is_told_once()
        assert not list(self.harness.state_machine.endpoints)
        assert self.harness.state_machine.next_deadline() is None
        for session in list(self.harness.told):
            self.harness.lose(session)
        assert all(pool.allocator.idle for pool in self.harness.pools)
        assert self.harness.state_machine.results.total == 0


TestReceives = TransferMachine.TestCase
TestReceives.settings = DEVICE.examples(60, stateful_step_count=50)


# -- two or three daemons

NAMES: Final = ("a", "b", "c")
PROMPT_PAGES: Final = 2
PAGES: Final = 9
WHOLE, STAGES, DECODE = "whole", ("stage0", "stage1"), "decode"
ENTRIES: Final = {WHOLE: layers(2), "stage0": layers(1), "stage1": layers(1, first=1), DECODE: layers(2)}
STEPS: Final = tuple(LayerStep(first_layer=layer, layers=1, event=layer, value=1) for layer in (0, 1))


class Resting(NamedTuple):
    """Pages whose receive request has settled, and what they held then."""

    node: TransferHarness
    pool: Pool
    ids: PageIds
    content: list[dict[str, bytes]]


class PeerMachine(SidesMachine):
    """Two or three daemons. Messages are mostly sensible, so that transfers get somewhere."""

    harness: PeerHarness

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
        sources: int | tuple[str, ...],
        deadline_s: float = 20.0,
        *,
        destinations: int = 1,
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
                session,
                pool,
                pages,
                request=request,
                sources=sources,
                destinations=destinations,
                source_daemons=daemons,
                deadline_s=deadline_s,
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

    @rule(
        data=st.data(),
        request=st.sampled_from(REQUESTS),
        sources=st.sampled_from([1, 1, 2, (WHOLE,), STAGES]),
        again=st.booleans(),
    )
    def receive(self, data: st.DataObject, request: str, sources: int | tuple[str, ...], *, again: bool) -> None:
        node = self.draw_node(data)
        others = data.draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
        daemons = self.addresses(node, [self.harness.nodes[name] for name in others], data)
        destinations = data.draw(st.sampled_from([1, 1, 1, 2]))
        self.try_receive(node, request, daemons, sources, data.draw(DEADLINES), destinations=destinations, again=again)

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

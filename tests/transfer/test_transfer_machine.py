"""Everything at once: random messages, deaths, cancels, deadlines and copies, on one state machine with several pools.

Whatever happens: an accepted side is told one outcome and later, once, that it has settled; pages are held exactly as
long as a side is live, and are never free while a copy may write them; a success has the right bytes; a refusal
changes nothing; who is told that the other side has ended comes after one that did, and that has not begun anew; and in
the end nothing is left over.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvferry.daemon.transfer.endpoints import EndpointKey, Half, SendRequest
from kvferry.daemon.transfer.transitions import State
from kvferry.pools.pool import Pool
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import CancelledError, KvferryError, TransferFailedError
from kvferry.protocol.events import Finished
from tests.kit.devices import DEVICE
from tests.kit.sides_machine import Life, SidesMachine
from tests.kit.transfers import TransferHarness, layers

PROMPT_PAGES: Final = 3
PAGES: Final = 14
REQUESTS: Final = ("a" * 32, "b" * 32, "c" * 32)
SOURCES: Final = {"whole": layers(2), "stage0": layers(1), "stage1": layers(1, first=1)}
DESTINATIONS: Final = ("decode0", "decode1")
STRANGER: Final = 8
MAX_SESSIONS: Final = 4
DEADLINES: Final = st.sampled_from([5.0, 20.0])


class TransferMachine(SidesMachine):
    """Messages that are mostly sensible, so that transfers get somewhere; refusals are part of the game."""

    def __init__(self) -> None:
        super().__init__()
        self.harness = TransferHarness()
        self.sources = [self.harness.pool(name, entries, pages=PAGES) for name, entries in SOURCES.items()]
        self.destinations = [self.harness.pool(name, pages=PAGES) for name in DESTINATIONS]
        self.foreign = self.harness.pool("foreign", pages=PAGES, tenant=STRANGER)
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
        mine = [page for page in range(1, PAGES) if self.owns(pool, session, page)]
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
            start = data.draw(st.integers(0, PROMPT_PAGES))
        count = data.draw(st.integers(1, max(1, PROMPT_PAGES - start)))
        ids = self.draw_pages(data, pool, session, count)
        last = start + count >= PROMPT_PAGES or data.draw(st.integers(0, 9)) == 0
        self.try_send(
            session,
            pool,
            ids,
            request,
            first_page=start,
            last=last,
            destinations=data.draw(st.sampled_from([1, 1, 1, 2])),
            first_token=1 if token and last else None,
            deadline_s=data.draw(DEADLINES),
        )

    @precondition(lambda self: self.harness.told)
    @rule(data=st.data(), request=st.sampled_from(REQUESTS), first_page=st.sampled_from([0, 0, 1]))
    def receive(self, data: st.DataObject, request: str, first_page: int) -> None:
        session = self.draw_session(data)
        pool = data.draw(st.sampled_from([*self.destinations, *self.destinations, self.foreign]))
        ids = self.draw_pages(data, pool, session, PROMPT_PAGES - first_page)
        sources = data.draw(st.sampled_from([1, 1, 2]))
        self.try_receive(session, pool, ids, request, first_page, sources=sources, deadline_s=data.draw(DEADLINES))

    @precondition(lambda self: self.harness.told and any(True for _ in self.harness.state_machine.endpoints))
    @rule(data=st.data(), first_token=st.booleans())
    def answer(self, data: st.DataObject, *, first_token: bool) -> None:
        direction = data.draw(st.sampled_from(list(self.harness.state_machine.endpoints)))
        session, request = self.draw_session(data), direction.request_id
        if direction.pool is self.foreign or not all(
            pool.allocator.free_count >= PROMPT_PAGES for pool in self.harness.pools
        ):
            return
        if isinstance(direction, SendRequest):
            pool = data.draw(st.sampled_from(self.destinations))
            start = min(one.first_page or 0 for one in direction.chunks[0].ranges)
            ids = self.harness.filled(pool, session, max(1, PROMPT_PAGES - start))
            sources = 1 if direction.pool is self.sources[0] else 2
            self.try_receive(session, pool, ids, request, start, sources=sources)
            return
        pools = self.sources[:1] if direction.sources == 1 else self.sources[1:]
        for pool in pools:
            ids = self.harness.filled(pool, session, PROMPT_PAGES)
            self.try_send(session, pool, ids, request, first_token=1 if first_token else None)

    @precondition(lambda self: self.harness.told)
    @rule(data=st.data(), request=st.sampled_from(REQUESTS), again=st.booleans(), sources=st.sampled_from([1, 2]))
    def come_late(self, data: st.DataObject, request: str, *, again: bool, sources: int) -> None:
        """RECEIVE what was sent and cancelled before anybody came; ``again``: and then sent once more."""
        session, pool = self.draw_session(data), self.sources[0]
        home = data.draw(st.sampled_from(self.destinations))
        if self.harness.state_machine.endpoints.of_request(request) or home.allocator.free_count < PROMPT_PAGES:
            return
        key = EndpointKey(pool.tenant, request, pool.name, "send")
        for _ in range(1 + again):
            if pool.allocator.free_count < PROMPT_PAGES:
                return
            direction = self.harness.state_machine.endpoint(session, key)
            if direction is not None:
                self.harness.cancel(session, pool, "send", request)
                self.ended.add(Half(key.tenant, request, "send"))
            self.harness.acknowledge(session, pool, "send", request)
            self.try_send(session, pool, self.harness.filled(pool, session, PROMPT_PAGES), request)
        if not again and self.harness.state_machine.endpoint(session, key) is not None:
            self.harness.cancel(session, pool, "send", request)
            self.ended.add(Half(key.tenant, request, "send"))
        self.try_receive(session, home, self.harness.filled(home, session, PROMPT_PAGES), request, 0, sources=sources)

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

    def pass_time(self, data: st.DataObject) -> None:
        self.harness.pass_time(data.draw(st.sampled_from([0.5, 3.0, 10.0])))

    def free(self, data: st.DataObject) -> None:
        """FREE everything a session has in a pool, idle or not."""
        for session in self.harness.told:
            for pool in self.harness.pools:
                mine = [page for page in range(1, PAGES) if self.owns(pool, session, page)]
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

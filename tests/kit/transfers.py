"""A daemon's transfers without sockets, threads or clock: the state machine, real pools, a scripted transport."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias
from unittest.mock import patch

import msgspec
import numpy as np
import pytest

from kvferry.daemon.quota import Quota
from kvferry.daemon.transfer import state_machine
from kvferry.daemon.transfer.endpoints import Clocked, EndpointKey, Half, SendChunk, SendRequest, TransferOp
from kvferry.daemon.transfer.registry import Effect, Notify, ReportBug, StartOp, StopOp, WarnTrimmed
from kvferry.daemon.transfer.state_machine import RequestContext, TransferStateMachine
from kvferry.daemon.transfer.transitions import TRANSITIONS, Transitions
from kvferry.pools.integrity import check
from kvferry.pools.planning.manifest import lay_out
from kvferry.pools.planning.page_ranges import page_ranges
from kvferry.pools.pool import Pool
from kvferry.protocol.base import PageList
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import KvferryError, PeerCancelledError
from kvferry.protocol.events import Finished, Matched, Settled
from kvferry.protocol.limits import MAX_PAYLOAD_BYTES
from kvferry.protocol.manifests import Component, Entry, Manifest
from kvferry.protocol.transfer_messages import Accepted, LayerStep
from tests.kit.bytes import read_pages, write_pages
from tests.kit.devices import new_region
from tests.kit.scripted_transport import ScriptedTransport

PAGE_TOKENS = 4
PAGE_BYTES = 8
REQUEST = "0123456789abcdef0123456789abcdef"
Direction: TypeAlias = Literal["send", "receive"]
Told: TypeAlias = Finished | Settled
Lists: TypeAlias = PageIds | dict[str, PageIds] | list[tuple[PageList, PageIds]]
"""What a SEND or RECEIVE names: pages of main, pages by component, or lists as they are on the wire."""

FIRST: Final = pytest.mark.parametrize("first", ["send", "receive"])
ORDERS: Final[dict[str, tuple[Direction, Direction]]] = {"send": ("send", "receive"), "receive": ("receive", "send")}
"""Who speaks first, and then, by the first one."""


def layers(count: int, *, first: int = 0, component: str = "main") -> list[Entry]:
    """Return k and v of some layers, in pages of 4 tokens and 8 bytes."""
    return [
        Entry(
            component=component,
            role=role,
            layer=layer,
            base=0,
            pages=1,
            page_bytes=PAGE_BYTES,
            page_tokens=PAGE_TOKENS,
            heads=1,
            dtype="uint8",
        )
        for role in ("k", "v")
        for layer in range(first, first + count)
    ]


class TransferHarness:
    """Sessions, pools and their transfers. Every step ends with the allocators' integrity checked."""

    def __init__(
        self, whole_below_bytes: int = 0, transitions: Transitions = TRANSITIONS, payloads: Quota | None = None
    ) -> None:
        self.now = 100.0  # the time in seconds, for tests to advance
        self.activity: list[str] = []  # ``began`` and ``ended`` of what was written to other daemons
        self.bugs: list[str] = []  # what the table of transitions has no row for
        self.matched: list[tuple[int, Matched]] = []  # who was told of receivers that came, and what
        self.state_machine = TransferStateMachine(
            self, payloads or Quota("payload", 1 << 30, 1 << 30), whole_below_bytes, transitions
        )
        self.transport = ScriptedTransport()
        self.pools: list[Pool] = []
        self.told: dict[int, list[Told]] = {}  # the events of each session, in order; a lost one is told nothing
        self.warned: list[WarnTrimmed] = []  # the lists that were cut to one length
        self._session_ids = itertools.count(1)
        self._fillings = itertools.count(0xABCDEF0123456789, 0x0101010101)

    # -- what there is

    def transfer_began(self) -> None:
        self.activity.append("began")

    def transfer_ended(self) -> None:
        self.activity.append("ended")

    def session(self) -> int:
        session = next(self._session_ids)
        self.told[session] = []
        self.state_machine.results.open_session(session)
        return session

    def pool(
        self,
        name: str,
        entries: Sequence[Entry] | None = None,
        *,
        pages: int = 17,
        tenant: int = 7,
        components: Sequence[Component] = (),
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> Pool:
        placed = [msgspec.structs.replace(one, pages=pages) for one in (layers(2) if entries is None else entries)]
        pool = self.pool_of(name, lay_out(placed, components), tenant=tenant)
        pool.max_payload_bytes = max_payload_bytes
        return pool

    def pool_of(self, name: str, manifest: Manifest, *, tenant: int = 7) -> Pool:
        pool = Pool(tenant, name, manifest, new_region(manifest.region_bytes, name))
        self.pools.append(pool)
        return pool

    def filled(self, pool: Pool, session: int, count: int) -> PageIds:
        ids = pool.allocator.allocate(session, count)
        self.fill(pool, ids)
        return ids

    def fill(self, pool: Pool, ids: PageIds) -> None:
        """Write to each page what no other page holds."""
        entries = pool.manifest.entries
        content = [[next(self._fillings).to_bytes(PAGE_BYTES, "little") for _ in entries] for _ in ids]
        together = b"".join(of_page[entry] for entry in range(len(entries)) for of_page in content)
        write_pages(pool.region, entries, ids, np.frombuffer(together, np.uint8))

    def engine(self, name: str, entries: Sequence[Entry] | None = None, *, count: int = 3, **of_pool: Any) -> Engine:  # noqa: ANN401  what ``pool`` takes
        session, pool = self.session(), self.pool(name, entries, **of_pool)
        return Engine(self, session, pool, self.filled(pool, session, count) if count else np.empty(0, np.int64))

    # -- what happens

    def send(  # noqa: PLR0913  as many as SEND has fields
        self,
        session: int,
        pool: Pool,
        ids: Lists,
        *,
        request: str = REQUEST,
        first_page: int = 0,
        tokens: int | None = None,
        last: bool = True,
        first_token: int | None = None,
        payload: bytes = b"",
        steps: tuple[LayerStep, ...] = (),
        deadline_s: float = 30.0,
    ) -> Accepted:
        lists, frames = _lists(ids, first_page, tokens)
        try:
            ranges = page_ranges(lists, frames, pool.manifest, may_end_inside=last, may_lack=not last)
            chunk = SendChunk(ranges, last, first_token, payload, steps)
            return self.state_machine.send(self._context(session, pool, request, deadline_s), chunk)
        finally:
            self._execute()

    def receive(
        self,
        session: int,
        pool: Pool,
        ids: Lists,
        *,
        request: str = REQUEST,
        first_page: int = 0,
        tokens: int | None = None,
        sources: int | tuple[str, ...] = 1,
        destinations: int = 1,
        source_daemons: tuple[str, ...] = (),
        deadline_s: float = 30.0,
    ) -> Accepted:
        lists, frames = _lists(ids, first_page, tokens)
        count, names = (sources, ()) if isinstance(sources, int) else (len(sources), sources)
        try:
            ranges = page_ranges(lists, frames, pool.manifest, may_end_inside=True, may_be_in_place=True)
            context = self._context(session, pool, request, deadline_s)
            return self.state_machine.receive(context, ranges, count, destinations, source_daemons, names)
        finally:
            self._execute()

    def cancel(self, session: int, pool: Pool, direction: Direction, request: str = REQUEST) -> None:
        self.state_machine.cancel(session, EndpointKey(pool.tenant, request, pool.name, direction), self.now)
        self._execute()

    def abandon(
        self,
        direction: Direction,
        *daemons: str,
        reason: str = "the peer abandoned the request",
        request: str = REQUEST,
        tenant: int = 7,
    ) -> int:
        half, error = Half(tenant, request, direction), PeerCancelledError(reason)
        failed = self.state_machine.abandon(half, error, self.now, daemons)
        self._execute()
        return failed

    def lose(self, session: int) -> None:
        """Let a session's engine die: what the daemon does then, in its order."""
        del self.told[session]
        self.state_machine.session_lost(session, self.now)
        self._execute()
        for pool in self.pools:
            for allocator in pool.allocators.values():
                allocator.release_owner(session)
        self.check()

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and deadlines come, one at a time."""
        self.now += seconds
        with patch.object(state_machine, "EXPIRED_AT_ONCE", 1):
            while (due_at := self.state_machine.next_deadline()) is not None and due_at <= self.now:
                self.state_machine.expire(self.now)
        self._execute()

    def events(self, session: int, *values: int) -> None:
        self.state_machine.events_reached(session, list(values), self.now)
        self._execute()

    def drain(self) -> None:
        self.state_machine.drain(self.now)
        self._execute()

    def acknowledge(self, session: int, pool: Pool, direction: Direction, request: str = REQUEST) -> None:
        key = EndpointKey(pool.tenant, request, pool.name, direction)
        known = self.state_machine.results.get(session, key)
        if known is not None and known.settled is not None:
            self.state_machine.results.acknowledged(session, key, known.settled.generation)

    # -- what can be seen

    def outcomes(self, session: int) -> list[str]:
        """Return what a session was told so far, in short: OK or an error's code, and ``settled``."""
        return [
            "settled" if isinstance(one, Settled) else one.error.code if one.error else "OK"
            for one in self.told[session]
        ]

    def finished(self, session: int) -> Finished:
        return next(one for one in reversed(self.told[session]) if isinstance(one, Finished))

    def content(self, pool: Pool, ids: PageIds) -> list[dict[str, bytes]]:
        entries = pool.manifest.entries
        held = read_pages(pool.region, entries, ids).reshape(len(entries), len(ids), PAGE_BYTES)
        return [
            {entry.name: held[number, at].tobytes() for number, entry in enumerate(entries)} for at in range(len(ids))
        ]

    def free_pages(self, pool: Pool, space: str | None = None) -> set[int]:
        allocator, nobody_else = pool.allocator if space is None else pool.allocators[space], 1 << 30
        if not allocator.free_count:
            return set()
        ids = allocator.allocate(nobody_else, allocator.free_count)
        allocator.free(nobody_else, ids)
        return set(ids.tolist())

    def held_pages(self, pool: Pool, space: str | None = None) -> set[int]:
        """Return the pages of a pool, or of one of its spaces, that live sides hold, by what the state machine says."""
        held: set[int] = set()
        for direction in self.state_machine.endpoints:
            if direction.pool is not pool:
                continue
            if isinstance(direction, SendRequest):
                ranges = [one for chunk in direction.chunks for one in chunk.ranges]
            else:
                ranges = list(direction.ranges.values())
            for one in ranges:
                if space is None or pool.allocator_of(one.component) is pool.allocators[space]:
                    held.update(one.ids.tolist())
        return held

    def quarantined_pages(self, pool: Pool, space: str) -> set[int]:
        """Return the pages that are held for ever, because the ends of their sides raised."""
        return {
            page
            for one in self.state_machine.endpoints.quarantined
            for held in one.held
            if held.allocator is pool.allocators[space]
            for page in held.ids.tolist()
        }

    def check(self) -> None:
        quarantined = self.state_machine.endpoints.quarantined
        problems = [one for one in self.state_machine.endpoints.problems(self.now) if one is not None]
        assert len(problems) == bool(quarantined), problems
        for pool in self.pools:
            for space, allocator in pool.allocators.items():
                allocator.check_integrity()
                held = self.held_pages(pool, space)
                check(allocator.holder_problems(self.state_machine.endpoints.held_pages()))
                kept = self.quarantined_pages(pool, space)
                assert allocator.busy_count == len(held | kept), "pages are held by live sides, and quarantined ones"
                assert not kept & self.free_pages(pool, space), "a free page of which nobody knows who writes it"
                assert self._writable(pool, space) <= held | kept, "a copy under way may write a page that nobody holds"
                assert not held & self.free_pages(pool, space), "a free page that a live side holds"

    # -- how it works

    def written(self) -> Iterable[TransferOp]:
        return [self.state_machine.endpoints.ops[op_id] for op_id in self.transport.under_way]

    def _writable(self, pool: Pool, space: str) -> set[int]:
        return {
            int(start) + at
            for op in self.written()
            if op.receive_request.pool is pool
            for planned_copy in op.planned_copies
            if pool.allocator_of(planned_copy.component) is pool.allocators[space]
            for start, count in zip(planned_copy.plan.runs.destination, planned_copy.plan.runs.pages, strict=True)
            for at in range(int(count))
        }

    def _context(self, session: int, pool: Pool, request: str, deadline_s: float) -> RequestContext:
        return RequestContext(session, pool, request, Clocked(self.now, self.now + deadline_s), session)

    def _op_done(self, op_id: int, error: KvferryError | None) -> None:
        self.state_machine.op_done(op_id, error, self.now)
        self._execute()

    def _execute(self) -> None:
        for effect in self.state_machine.effects():
            self.do(effect)
        self.check()

    def do(self, effect: Effect) -> None:
        if isinstance(effect, StartOp):
            self.transport.start(effect, self._op_done)
        elif isinstance(effect, StopOp):
            self.transport.stop(effect.op_id)
        elif isinstance(effect, WarnTrimmed):
            self.warned.append(effect)
        elif isinstance(effect, ReportBug):
            self.bugs.append(effect.detail)
        elif isinstance(effect, Notify):
            session_id, event = effect
            if isinstance(event, Matched):
                self.matched.append((session_id, event))
            elif session_id in self.told:
                self.told[session_id].append(event)


class Engine:
    """A session with a pool and pages of it. What it sends and receives is all of its pages, or some of them."""

    def __init__(self, harness: TransferHarness, session: int, pool: Pool, pages: PageIds) -> None:
        self.harness = harness
        self.session = session
        self.pool = pool
        self.pages = pages

    def send(self, first: int = 0, stop: int | None = None, *, ids: Lists | None = None, **more: Any) -> Accepted:  # noqa: ANN401  what the harness takes
        what = self.pages[first:stop] if ids is None else ids
        return self.harness.send(self.session, self.pool, what, first_page=first, **more)

    def receive(self, first: int = 0, stop: int | None = None, *, ids: Lists | None = None, **more: Any) -> Accepted:  # noqa: ANN401  what the harness takes
        return self.harness.receive(self.session, self.pool, self.pages[first:stop] if ids is None else ids, **more)

    def come(self, direction: Direction, *, sources: int = 1, destinations: int = 1, **more: Any) -> Accepted:  # noqa: ANN401  what the harness takes
        """SEND, or RECEIVE of so many sources as one of so many destinations."""
        if direction == "send":
            return self.send(**more)
        return self.receive(sources=sources, destinations=destinations, **more)

    def cancel(self, direction: Direction, request: str = REQUEST) -> None:
        self.harness.cancel(self.session, self.pool, direction, request)

    def acknowledge(self, direction: Direction, request: str = REQUEST) -> None:
        self.harness.acknowledge(self.session, self.pool, direction, request)

    def lose(self) -> None:
        """Die."""
        self.harness.lose(self.session)

    @property
    def told(self) -> str:
        """Return what it was told, in short; nothing if it is dead."""
        return " ".join(self.harness.outcomes(self.session)) if self.session in self.harness.told else ""

    @property
    def finished(self) -> Finished:
        return self.harness.finished(self.session)

    @property
    def reason(self) -> str:
        error = self.finished.error
        assert error is not None
        return error.detail

    @property
    def content(self) -> list[dict[str, bytes]]:
        return self.harness.content(self.pool, self.pages)

    @property
    def held(self) -> int:
        return self.pool.allocator.busy_count


class Pair:
    """An engine that sends and one that receives, within a daemon."""

    harness: TransferHarness
    prefill: Engine
    decode: Engine

    def __init__(self, entries: Sequence[Entry] | None = None, *, count: int = 3, whole_below_bytes: int = 0) -> None:
        self.harness = TransferHarness(whole_below_bytes)
        self.prefill, self.decode = (self.harness.engine(name, entries, count=count) for name in ("prefill", "decode"))

    def finish(self) -> None:
        self.harness.transport.finish_all()

    def end_well(self, *engines: Engine) -> None:
        self.finish()
        for engine in engines or (self.prefill, self.decode):
            assert engine.told == "OK settled"

    @property
    def told(self) -> tuple[str, str]:
        return self.prefill.told, self.decode.told

    @property
    def held(self) -> tuple[int, int]:
        return self.prefill.held, self.decode.held

    @property
    def under_way(self) -> list[int]:
        return list(self.harness.transport.under_way)


def _lists(ids: Lists, first_page: int, tokens: int | None) -> tuple[list[PageList], list[PageIds]]:
    if isinstance(ids, list):
        return [one for one, _ in ids], [its_ids for _, its_ids in ids]
    by_component = ids if isinstance(ids, dict) else {"main": ids}
    lists = [
        PageList(component=component, first_page=first_page, pages=len(one), tokens=tokens)
        for component, one in by_component.items()
    ]
    return lists, list(by_component.values())

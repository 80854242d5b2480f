"""Works: accepted, ended once, reported after their reply, whatever ends them first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvferry.daemon.quota import Quota
from kvferry.daemon.tiers import operations
from kvferry.pools.allocator import PageAllocator
from kvferry.pools.tiers.index import BlockIndex
from kvferry.protocol import errors
from kvferry.protocol.tier_messages import CancelOperation, OperationCancelled
from tests.daemon.tiers.operation_states import TRANSITIONS, Event, Key, Outcome, State
from tests.kit.tiers import Engine, Harness, ScriptedCopier, harness, settle, until
from tests.transition_tables import markdown_of_operations, transitions_of

pytestmark = pytest.mark.anyio
"""All but one, which has its own test."""


@pytest.fixture
async def tiers() -> AsyncIterator[Harness]:
    """Return services over a host tier of 32 blocks, and a pool of 15 pages."""
    async with harness() as one:
        yield one


async def test_a_cancelled_operation_ends_once_its_bytes_rest(tiers: Harness, engine: Engine) -> None:
    ids = engine.allocate(3)
    offloading = engine.offload(ids)
    number = engine.cancel(offloading.operation)
    assert number not in engine.replies
    assert tiers.pool().allocator.busy_count == 3
    await tiers.finish()
    assert engine.reply(number, OperationCancelled).was_done is False
    assert engine.error(offloading.operation) is errors.CancelledError
    assert tiers.pool().allocator.busy_count == 0
    assert tiers.host.arena.used_bytes == 0
    again = engine.cancel(offloading.operation, acknowledge=False)
    assert engine.reply(again, OperationCancelled).was_done is True
    with pytest.raises(errors.UnknownOperationError):
        engine.ask(CancelOperation(operation=offloading.operation), OperationCancelled)


async def test_neither_another_session_nor_a_message_that_was_never_sent_names_an_operation(
    tiers: Harness, engine: Engine
) -> None:
    operation = engine.offload(engine.allocate(1)).operation
    with pytest.raises(errors.UnknownOperationError):
        tiers.engine().ask(CancelOperation(operation=operation), OperationCancelled)
    for named in (CancelOperation(request=1 << 40), CancelOperation()):
        with pytest.raises(errors.UnknownOperationError) as unknown:
            engine.ask(named, OperationCancelled)
        assert unknown.value.field == "request"
    await tiers.finish()
    assert engine.error(operation) is None


async def test_a_session_may_have_so_many(tiers: Harness, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MAX_OPERATIONS", 2)
    other = tiers.engine()
    ids = engine.allocate(2)
    for one in ids:
        engine.offload([one])
    with pytest.raises(errors.OverloadedError, match="2 operations of the session"):
        engine.offload(ids)
    other.offload(other.allocate(1))
    await tiers.finish()
    for one in ids:
        engine.offload([one])  # the first one acknowledges the events
    with pytest.raises(errors.OverloadedError):
        engine.offload(ids)
    assert tiers.pool().allocator.busy_count == 2  # the one that was refused holds nothing


async def test_a_daemon_that_ends_takes_nothing_new_and_waits_for_what_copies(tiers: Harness, engine: Engine) -> None:
    copying = engine.store([b"0" * 16], engine.allocate(1))
    tiers.operations.drain()
    with pytest.raises(errors.ShuttingDownError):
        engine.offload([1])
    assert engine.done(copying) is None
    tiers.copier.finish_all()
    await tiers.operations.drained()
    await settle()
    assert engine.error(copying) is None


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (ScriptedCopier, "start"),
        (PageAllocator, "end_read"),
        (PageAllocator, "end_write"),
        (BlockIndex, "commit"),
        (BlockIndex, "pin"),
        (Quota, "keep"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("kind", ["offload", "restore", "restore into pages that it takes", "store", "load"])
async def test_what_raises_ends_an_operation_and_what_it_held_comes_back(
    tiers: Harness,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,  # noqa: ANN401
    name: str,
    kind: str,
) -> None:
    ids, hashes = engine.allocate(2), [b"0" * 16, b"1" * 16]
    snapshot = engine.offload(ids).snapshot
    engine.store(hashes, ids)
    await tiers.finish()
    lease = engine.lookup(hashes).lease
    calls = 0
    real = getattr(owner, name)

    def fails_once(*arguments: Any, **more: Any) -> Any:  # noqa: ANN401
        nonlocal calls
        calls += 1
        if calls == 1:
            raise MemoryError("at first")
        return real(*arguments, **more)

    monkeypatch.setattr(owner, name, fails_once)
    operation: int | None = None
    with capture_logs():
        with contextlib.suppress(errors.InternalError):  # nothing has begun
            if kind == "offload":
                operation = engine.offload(ids).operation
            elif kind == "restore":
                operation = engine.restore(snapshot, ids)
            elif kind == "restore into pages that it takes":
                operation = engine.restore(snapshot)
            elif kind == "store":
                operation = engine.store([b"2" * 16, b"3" * 16], ids)
            else:
                operation = engine.load(lease, ids)
        await tiers.finish()
    if operation is not None:
        assert engine.error(operation) is (errors.InternalError if calls else None)
    monkeypatch.undo()
    tiers.check()
    assert not list(tiers.operations)
    assert not any(one.busy_count for pool in tiers.pools for one in pool.allocators.values())
    engine.free(ids)
    for _, lists in engine.events:
        for its in lists:
            engine.free(its)
    assert all(pool.idle for pool in tiers.pools), "each page came back once"


# -- the table of transitions


class Watched:
    """One engine's operation: a restore that waits for pages, or a store that copies."""

    def __init__(self, tiers: Harness) -> None:
        self.tiers, self.engine = tiers, tiers.engine()
        self.ids = self.engine.allocate(15)
        self.snapshot = self.engine.offload(self.ids).snapshot
        tiers.copier.finish_all()

    def begin(self, state: State, deadline_ms: int) -> None:
        """Begin an operation, and bring it into a state."""
        if state is State.WAITING:
            number = self.engine.restore(self.snapshot, deadline_ms=deadline_ms)
        else:
            number = self.engine.store([b"0" * 16], self.ids[:1], deadline_ms=deadline_ms)
        (self.operation,) = [one for one in self.tiers.operations if one.number == number]
        if state is State.STOPPING:
            self.engine.cancel(self.operation.number)

    @property
    def state(self) -> State:
        """Return the state of the operation."""
        if self.operation not in list(self.tiers.operations):
            return State.DONE
        if self.operation.job is None:
            return State.WAITING
        return State.COPYING if self.operation.stopped is None else State.STOPPING

    async def let(self, event: Event) -> None:
        """Let an event happen, and what follows from it."""
        copier = self.tiers.copier
        match event:
            case Event.BEGIN:
                self.engine.free(self.ids)
            case Event.CANCEL:
                self.engine.cancel(self.operation.number)
            case Event.GIVEN_UP:
                self.tiers.pools.remove(self.tiers.pool())
            case Event.SESSION_ENDED:
                self.tiers.lose(self.engine)
            case Event.DRAIN:
                self.tiers.operations.drain()
            case Event.JOB_DONE:
                copier.finish(copier.under_way[0])
            case Event.JOB_FAILED:
                copier.stopped.clear()
                copier.end(copier.under_way[0], errors.TransferFailedError("a copy failed"))
            case Event.DEADLINE:
                timer, loop = self.operation.timer, asyncio.get_running_loop()
                await until(lambda: timer is not None and timer.when() < loop.time())
        await settle()


@pytest.mark.parametrize(
    "key",
    [key for key in TRANSITIONS if key[1] is not Event.NOTHING_TO_DO],
    ids=lambda key: f"{key[0].name}-{key[1].name}",
)
async def test_a_row_of_the_table_is_what_happens_and_the_operation_ends_once(key: Key) -> None:
    state, event = key
    becomes, ends = TRANSITIONS[key]
    async with harness() as tiers:
        one = Watched(tiers)
        await settle()
        one.begin(state, deadline_ms=int(event is Event.DEADLINE))
        assert one.state is state
        stopped, pages = one.operation.stopped, one.operation.pages
        await one.let(event)
        assert one.state is becomes
        if becomes is not State.DONE:
            assert list(pages.held("it")), "pages are held until the job has ended"
            await tiers.finish()
        assert one.state is State.DONE
        assert not list(pages.held("it"))
        if event is not Event.SESSION_ENDED:
            was_stopped = None if stopped is None else type(stopped)
            expected = {
                Outcome.NOTHING: was_stopped,
                Outcome.SUCCESS: None,
                Outcome.CAUSE: errors.UnknownPoolError if event is Event.GIVEN_UP else errors.TransferFailedError,
                Outcome.STOPPED: was_stopped,
            }
            assert one.engine.error(one.operation.number) is (expected[ends] if isinstance(ends, Outcome) else ends)


async def test_an_operation_with_nothing_to_copy_is_done_at_once_and_its_event_follows_the_reply(
    tiers: Harness, engine: Engine
) -> None:
    ids = engine.allocate(1)
    for said in (["reply"], ["reply", "TierDone"]):
        tiers.said.clear()
        operation = engine.store([b"0" * 16], ids)
        assert [kind for _, kind in tiers.said] == said
        await tiers.finish()
        assert engine.error(operation) is None


async def test_the_documentation_shows_the_table() -> None:
    assert transitions_of("operation") == markdown_of_operations()

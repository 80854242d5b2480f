"""Works: accepted, ended once, reported after their reply, whatever ends them first."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from kvferry.daemon.tiers import operations
from kvferry.protocol.errors import (
    CancelledError,
    DeadlineError,
    InternalError,
    OverloadedError,
    ShuttingDownError,
    UnknownOperationError,
)
from kvferry.protocol.session_messages import OperationStatus
from kvferry.protocol.tier_messages import CancelOperation, OperationCancelled
from tests.daemon.tiers.tier_harness import Harness, harness, settle, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def tiers() -> AsyncIterator[Harness]:
    """Return services over a host tier of 32 blocks, and a pool of 15 pages."""
    async with harness() as one:
        yield one


async def test_the_event_comes_after_the_reply_also_where_the_operation_was_done_at_once(tiers: Harness) -> None:
    engine = tiers.engine()
    ids = engine.allocate(2)
    tiers.said.clear()
    engine.offload(ids)
    tiers.copier.finish_all()
    await settle()
    other = tiers.engine()
    other.store([b"0" * 16], other.allocate(1))
    tiers.copier.finish_all()
    await settle()
    kinds = [kind for _, kind in tiers.said]
    assert kinds == ["reply", "TierDone", "reply", "reply", "TierDone"]


async def test_an_operation_shows_what_it_waits_for(tiers: Harness) -> None:
    engine = tiers.engine()
    snapshot = engine.offload(engine.allocate(15)).snapshot
    operation = engine.restore(snapshot)
    [first, second] = tiers.operations.status()
    assert isinstance(first, OperationStatus)
    assert (first.kind, first.pages, first.waits_for) == ("offload", 15, "")
    assert (second.operation, second.kind, second.waits_for) == (operation, "restore", "the snapshot to be written")
    tiers.copier.finish_all()
    [second] = tiers.operations.status()
    assert second.waits_for == "15 free pages of pool 'pool'"


async def test_a_cancelled_operation_ends_once_its_bytes_rest(tiers: Harness) -> None:
    engine = tiers.engine()
    ids = engine.allocate(3)
    offloading = engine.offload(ids)
    number = engine.send(CancelOperation(operation=offloading.operation))
    assert number not in engine.replies
    assert tiers.pool().allocator.busy_count == 3
    tiers.copier.finish_all()
    await settle()
    assert engine.reply(number, OperationCancelled).was_done is False
    assert engine.error(offloading.operation) is CancelledError
    assert tiers.pool().allocator.busy_count == 0
    assert tiers.host.arena.used_bytes == 0
    again = engine.send(CancelOperation(operation=offloading.operation), acknowledge=False)
    assert engine.reply(again, OperationCancelled).was_done is True
    with pytest.raises(UnknownOperationError):
        engine.ask(CancelOperation(operation=offloading.operation), OperationCancelled)


async def test_another_session_cannot_cancel_it(tiers: Harness) -> None:
    engine = tiers.engine()
    operation = engine.offload(engine.allocate(1)).operation
    with pytest.raises(UnknownOperationError):
        tiers.engine().ask(CancelOperation(operation=operation), OperationCancelled)
    tiers.copier.finish_all()
    await settle()
    assert engine.error(operation) is None


async def test_an_operation_that_was_stopped_and_is_done_all_the_same_is_done(tiers: Harness) -> None:
    engine = tiers.engine()
    offloading = engine.offload(engine.allocate(2))
    engine.send(CancelOperation(operation=offloading.operation))
    tiers.copier.finish(tiers.copier.under_way[0])
    await settle()
    assert engine.error(offloading.operation) is None
    assert len(tiers.service.snapshots) == 1


async def test_a_deadline_ends_an_operation_that_waits_and_one_that_copies(tiers: Harness) -> None:
    engine = tiers.engine()
    snapshot = engine.offload(engine.allocate(15)).snapshot
    tiers.copier.finish_all()
    waiting = engine.restore(snapshot, deadline_ms=1)
    copying = engine.store([b"0" * 16], [1], deadline_ms=1)
    await until(lambda: engine.done(waiting) and tiers.copier.stopped)
    assert engine.error(waiting) is DeadlineError
    assert engine.done(copying) is None
    tiers.copier.finish_all()
    await settle()
    assert engine.error(copying) is DeadlineError


async def test_a_session_may_have_so_many(tiers: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MAX_OPERATIONS", 2)
    engine, other = tiers.engine(), tiers.engine()
    ids = engine.allocate(2)
    for one in ids:
        engine.offload([one])
    with pytest.raises(OverloadedError, match="2 operations of the session"):
        engine.offload(ids)
    other.offload(other.allocate(1))
    tiers.copier.finish_all()
    await settle()
    for one in ids:
        engine.offload([one])  # the first one acknowledges the events
    with pytest.raises(OverloadedError):
        engine.offload(ids)
    assert tiers.pool().allocator.busy_count == 2  # the one that was refused holds nothing


async def test_a_daemon_that_ends_takes_nothing_new_and_waits_for_what_copies(tiers: Harness) -> None:
    engine = tiers.engine()
    snapshot = engine.offload(engine.allocate(15)).snapshot
    tiers.copier.finish_all()
    waiting, copying = engine.restore(snapshot), engine.store([b"0" * 16], [1])
    tiers.operations.drain()
    await settle()
    assert engine.error(waiting) is ShuttingDownError
    with pytest.raises(ShuttingDownError):
        engine.offload([1])
    assert engine.done(copying) is None
    tiers.copier.finish_all()
    await tiers.operations.drained()
    await settle()
    assert engine.error(copying) is None


async def test_the_end_of_a_session_is_no_event_and_leaves_nothing(tiers: Harness) -> None:
    engine = tiers.engine()
    ids = engine.allocate(15)
    snapshot = engine.offload(ids).snapshot
    tiers.copier.finish_all()
    engine.restore(snapshot)
    engine.store([b"0" * 16], ids[:1])
    tiers.lose(engine)
    assert [operation.kind for operation in tiers.operations] == ["store"]
    tiers.copier.finish_all()
    await settle()
    assert not list(tiers.operations)
    assert tiers.pool().idle


async def test_a_bug_in_a_operations_end_is_that_operations_error(tiers: Harness) -> None:
    engine = tiers.engine()
    operation = engine.offload(engine.allocate(1)).operation

    def fails(*_: object) -> operations.Ending:
        raise RuntimeError

    [live] = tiers.operations
    real, live.finish = live.finish, fails
    with capture_logs() as logs:
        tiers.copier.finish_all()
        await settle()
    assert "ending an operation failed" in {one["event"] for one in logs}
    assert engine.error(operation) is InternalError
    await tiers.operations.drained()
    real(live, None)  # what it held

"""Works: accepted, ended once, reported after their reply, whatever ends them first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Final, TypeAlias

import pytest
from structlog.testing import capture_logs

from kvferry.daemon.tiers import operations
from kvferry.daemon.tiers.operations import TRANSITIONS, Event, Key, Operation, State, as_markdown
from kvferry.protocol.errors import (
    CancelledError,
    DeadlineError,
    InternalError,
    OverloadedError,
    PoolLostError,
    ShuttingDownError,
    TransferFailedError,
    UnknownOperationError,
)
from kvferry.protocol.session_messages import OperationStatus
from kvferry.protocol.tier_messages import CancelOperation, OperationCancelled
from tests.daemon.tiers.tier_harness import Engine, Harness, harness, settle, until
from tests.transition_tables import SeenRows, transitions_of

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
    await tiers.finish()
    other = tiers.engine()
    other.store([b"0" * 16], other.allocate(1))
    await tiers.finish()
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
    await tiers.finish()
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
    await tiers.finish()
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
    await tiers.finish()
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
    await tiers.finish()
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
    await tiers.finish()
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
        await tiers.finish()
    assert "ending an operation failed" in {one["event"] for one in logs}
    assert engine.error(operation) is InternalError
    await tiers.operations.drained()
    real(live, None)  # what it held


# -- the table of ``tiers.transitions``: a case reaches each row, and docs/architecture.md shows it.


GONE: Final = PoolLostError("it is gone")
SOON_MS: Final = 1


class Tiers:
    """One engine's operation: a restore that waits for pages, or a store that copies.

    Attributes:
        operation: it, once there is one.
    """

    def __init__(self, tiers: Harness, engine: Engine) -> None:
        self.tiers, self.engine = tiers, engine
        self.ids = engine.allocate(15)
        self.snapshot = engine.offload(self.ids).snapshot
        tiers.copier.finish_all()
        self.operation: Operation | None = None

    def wait(self, deadline_ms: int = 0) -> None:
        """Begin an operation that waits."""
        self.engine.restore(self.snapshot, deadline_ms=deadline_ms)
        (self.operation,) = self.tiers.operations

    def copy(self, deadline_ms: int = 0) -> None:
        """Begin an operation that copies."""
        self.engine.store([b"0" * 16], self.ids[:1], deadline_ms=deadline_ms)
        (self.operation,) = self.tiers.operations

    def stop(self) -> None:
        """Let the operation that copies be stopping."""
        self.copy()
        self.cancel()

    def cancel(self) -> None:
        """CANCEL_OPERATION."""
        self.engine.send(CancelOperation(operation=self._live().number))

    def give_up(self) -> None:
        """Say that what the operation needs is gone."""
        self.tiers.operations.give_up(self._live(), GONE)

    def nothing_to_do(self) -> None:
        """Say that there is nothing to copy."""
        self.tiers.operations.nothing_to_do(self._live())

    def lose(self) -> None:
        """End the session."""
        self.tiers.lose(self.engine)

    def drain(self) -> None:
        """End the daemon."""
        self.tiers.operations.drain()

    def end_job(self, *, well: bool = True) -> None:
        """End the job."""
        (job,) = self.tiers.copier.under_way
        if well:
            self.tiers.copier.finish(job)
        else:
            self.tiers.copier.end(job, TransferFailedError("a copy failed"))

    def run_after_the_end(self) -> None:
        """Begin a job of an operation that is over."""
        self.copy()
        (job,) = self.tiers.copier.under_way
        self.end_job()
        self.tiers.operations.start(self._live(), job)
        assert not self.tiers.copier.under_way

    def _live(self) -> Operation:
        assert self.operation is not None
        return self.operation


Case: TypeAlias = Callable[[Tiers], object]


def do(*steps: Case) -> Case:
    """Return a case of several steps."""

    def all_of_them(one: Tiers) -> None:
        for step in steps:
            step(one)

    return all_of_them


_STOPS: Final[dict[Event, Case]] = {
    Event.CANCEL: Tiers.cancel,
    Event.SESSION_ENDED: Tiers.lose,
    Event.GIVEN_UP: Tiers.give_up,
    Event.DRAIN: Tiers.drain,
}
CASES: Final[dict[Key, Case]] = {
    (State.WAITING, Event.BEGIN): Tiers.copy,
    (State.WAITING, Event.NOTHING_TO_DO): do(Tiers.wait, Tiers.nothing_to_do),
    (State.WAITING, Event.DEADLINE): lambda one: one.wait(SOON_MS),
    **{(State.WAITING, event): do(Tiers.wait, case) for event, case in _STOPS.items()},
    (State.COPYING, Event.JOB_DONE): do(Tiers.copy, Tiers.end_job),
    (State.COPYING, Event.JOB_FAILED): do(Tiers.copy, lambda one: one.end_job(well=False)),
    (State.COPYING, Event.DEADLINE): lambda one: one.copy(SOON_MS),
    **{(State.COPYING, event): do(Tiers.copy, case) for event, case in _STOPS.items()},
    (State.STOPPING, Event.JOB_DONE): do(Tiers.stop, Tiers.end_job),
    (State.STOPPING, Event.JOB_FAILED): do(Tiers.stop, lambda one: one.end_job(well=False)),
    (State.STOPPING, Event.DEADLINE): do(lambda one: one.copy(SOON_MS), Tiers.cancel),
    **{(State.STOPPING, event): do(Tiers.stop, case) for event, case in _STOPS.items()},
    (State.DONE, Event.BEGIN): Tiers.run_after_the_end,
    (State.DONE, Event.NOTHING_TO_DO): do(Tiers.wait, Tiers.give_up, Tiers.nothing_to_do),
    (State.DONE, Event.GIVEN_UP): do(Tiers.wait, Tiers.give_up, Tiers.give_up),
}


async def test_every_row_has_a_case() -> None:
    """Nobody adds a row that no test reaches."""
    assert set(CASES) == set(TRANSITIONS)


@pytest.mark.parametrize("key", CASES, ids=lambda key: f"{key[0].name}-{key[1].name}")
async def test_a_row_is_reached(key: Key) -> None:
    """What the case does looks the row up, and the operation ends, once."""
    seen = SeenRows(TRANSITIONS)
    with capture_logs() as logs:
        async with harness(transitions=seen) as tiers:
            one = Tiers(tiers, tiers.engine())
            CASES[key](one)
            await until(lambda: key in seen.rows)
            await tiers.finish()
            for operation in list(tiers.operations):
                tiers.operations.give_up(operation, GONE)
            await tiers.operations.drained()
            assert one.operation is not None
            assert one.operation.state is State.DONE
    assert not [one for one in logs if one["event"] == "unexpected event of an operation"]


async def test_an_event_without_a_row_is_a_bug_that_ends_what_waits() -> None:
    """It fails with INTERNAL, and the daemon's log has it."""
    seen = SeenRows(TRANSITIONS)
    del seen[State.WAITING, Event.CANCEL]
    async with harness(transitions=seen) as tiers:
        one = Tiers(tiers, tiers.engine())
        one.wait()
        with capture_logs() as logs:
            one.cancel()
            await settle()
        assert one.operation is not None
        assert one.engine.error(one.operation.number) is InternalError
        assert "unexpected event of an operation" in {one["event"] for one in logs}


async def test_the_documentation_shows_the_table() -> None:
    """What docs/architecture.md says is what is executed."""
    assert transitions_of("operation") == as_markdown()

"""The table of ``tiers.transitions``: a case reaches each row, and docs/architecture.md shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import pytest
from structlog.testing import capture_logs

from kvferry.daemon.tiers.operations import TRANSITIONS, Event, Key, Operation, State, as_markdown
from kvferry.protocol.errors import InternalError, PoolLostError, TransferFailedError
from kvferry.protocol.tier_messages import CancelOperation
from tests.daemon.tiers.tier_harness import Engine, Harness, harness, settle, until
from tests.transition_tables import SeenRows, transitions_of

pytestmark = pytest.mark.anyio

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
            tiers.copier.finish_all()
            await settle()
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

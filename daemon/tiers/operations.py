"""Operations: OFFLOAD, RESTORE, STORE and LOAD from their acceptance to the one event that reports their end.

An operation may wait (for pages, for lower tiers), then runs one job of the copier, then ends; ``TRANSITIONS``
says what each event does to it. Its ``finish`` callback releases what it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec
import structlog

from kvferry.daemon.control.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.control.kept_bytes import OPERATION, REQUEST_BYTES, SMALL_BYTES
from kvferry.daemon.control.later import Later
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.sessions import Session, SessionRegistry
from kvferry.daemon.tiers.copier import BlockJob, OnJobDone
from kvferry.daemon.tiers.host_tier import HostTier
from kvferry.daemon.tiers.snapshots import PageHold
from kvferry.pools.allocator import HeldPages
from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.accelerator_region import AcceleratorRegion
from kvferry.pools.integrity import Problem, Walk
from kvferry.pools.tiers.arena import Extent, Freed
from kvferry.pools.tiers.cached_block import CachedBlock
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    CancelledError,
    DeadlineError,
    InternalError,
    KvferryError,
    OutOfMemoryError,
    OverloadedError,
    ShuttingDownError,
    UnknownOperationError,
)
from kvferry.protocol.events import OperationKind, TierDone
from kvferry.protocol.ids import new_number
from kvferry.protocol.session_messages import OperationStatus
from kvferry.protocol.tier_messages import CancelOperation, OperationCancelled


class State(enum.Enum):
    """The state of an operation."""

    WAITING = "waiting"
    COPYING = "copying"
    STOPPING = "stopping"
    DONE = "done"


class Event(enum.Enum):
    """What can happen to an operation. The value describes it, in docs/architecture.md."""

    BEGIN = "its job begins"
    NOTHING_TO_DO = "there is nothing to copy"
    CANCEL = "CANCEL_OPERATION"
    DEADLINE = "its deadline passes"
    SESSION_ENDED = "its session ends"
    DRAIN = "the daemon ends"
    GIVEN_UP = "what it needs is gone"
    JOB_DONE = "its job is done"
    JOB_FAILED = "its job failed"


class Outcome(enum.Enum):
    """How an operation ends, where that is not an error class of its own."""

    NOTHING = ""
    SUCCESS = "success"
    CAUSE = "the cause"
    STOPPED = "what it was stopped for"


class Transition(NamedTuple):
    """The next state, and how the operation ends, or will end once its job has stopped."""

    state: State
    ends: type[KvferryError] | Outcome = Outcome.NOTHING


STOPS: Final = frozenset({Event.CANCEL, Event.DEADLINE, Event.SESSION_ENDED, Event.DRAIN, Event.GIVEN_UP})
"""The events that end an operation, or will, before its job is done."""

Key: TypeAlias = tuple[State, Event]
Transitions: TypeAlias = Mapping[Key, Transition]

_STOPPED_BY: Final[Mapping[Event, type[KvferryError] | Outcome]] = {
    Event.CANCEL: CancelledError,
    Event.DEADLINE: DeadlineError,
    Event.SESSION_ENDED: CancelledError,
    Event.GIVEN_UP: Outcome.CAUSE,
}

TRANSITIONS: Final[Transitions] = {
    (State.WAITING, Event.BEGIN): Transition(State.COPYING),
    (State.WAITING, Event.NOTHING_TO_DO): Transition(State.DONE, Outcome.SUCCESS),
    (State.WAITING, Event.DRAIN): Transition(State.DONE, ShuttingDownError),
    **{(State.WAITING, event): Transition(State.DONE, error) for event, error in _STOPPED_BY.items()},
    (State.COPYING, Event.JOB_DONE): Transition(State.DONE, Outcome.SUCCESS),
    (State.COPYING, Event.JOB_FAILED): Transition(State.DONE, Outcome.CAUSE),
    (State.COPYING, Event.DRAIN): Transition(State.COPYING),
    **{(State.COPYING, event): Transition(State.STOPPING, error) for event, error in _STOPPED_BY.items()},
    (State.STOPPING, Event.JOB_DONE): Transition(State.DONE, Outcome.SUCCESS),
    (State.STOPPING, Event.JOB_FAILED): Transition(State.DONE, Outcome.STOPPED),
    (State.STOPPING, Event.DRAIN): Transition(State.STOPPING),
    **{(State.STOPPING, event): Transition(State.STOPPING) for event in _STOPPED_BY},
    **{(State.DONE, event): Transition(State.DONE) for event in (Event.BEGIN, Event.NOTHING_TO_DO, Event.GIVEN_UP)},
}


def bug_in(state: State) -> Transition:
    """Return the transition for an event that the table has no row for: end what only waits; a job ends by itself."""
    return Transition(State.DONE, InternalError) if state is State.WAITING else Transition(state)


OVERDUE_S: Final = 5.0
"""A deadline that passed longer ago was forgotten; a loaded daemon is late by less."""

MAX_OPERATIONS = 1024
"""Per session, live or ended and not acknowledged."""

KEPT_PAGE_BYTES: Final = 32
"""What an operation keeps for a page: its number, the hash of its block, and where that lies."""

log = structlog.get_logger(__name__)


class Copier(Protocol):
    """Runs jobs; see ``TierCopier``."""

    def start(self, job: BlockJob, on_done: OnJobDone) -> None:
        """Run a job."""

    def stop(self, job: BlockJob) -> None:
        """End a job soon, with an error unless it completes first."""


class Ending(msgspec.Struct, frozen=True):
    """The fields of an operation's event, apart from its times and error."""

    done: TierDone
    ids: tuple[PageIds, ...] = ()


class Holdings(NamedTuple):
    """What an operation holds from its beginning to its end.

    Attributes:
        pages: of a pool; it may take them later.
        memory: that it writes in the host tier, as blocks of one size.
        writing: the blocks of the index that it writes there.
    """

    pages: PageHold | None = None
    memory: Freed | None = None
    writing: Sequence[CachedBlock] = ()


HOLDS_NOTHING: Final = Holdings()


class Operation:
    """One operation.

    Attributes:
        waits_for: what it waits for before its job begins, in words; empty while it copies.
        pages: the number of pages it covers.
        state: see ``operations``.
        stopped: the error it was stopped with, if any, also while its job still ends.
        asked_by: by which message its request came, and which of a BATCH that was.
        quiet: no session asked for it: its end sends no event, and it outlives the session.
        holdings: what it holds; ``finish`` releases it.
        after_job: what is done once its job has succeeded, some of it in each turn of the loop; it ends after that.
    """

    def __init__(
        self,
        number: int,
        session: Session,
        kind: OperationKind,
        pool: str,
        pages: int,
        finish: Finish,
        holdings: Holdings = HOLDS_NOTHING,
    ) -> None:
        self.number = number
        self.session = session
        self.kind = kind
        self.pool = pool
        self.pages = pages
        self.finish = finish
        self.holdings = holdings
        self.created_at = time.monotonic()
        self.first_copy_at: float | None = None
        self.waits_for = ""
        self.state = State.WAITING
        self.stopped: KvferryError | None = None
        self.job: BlockJob | None = None
        self.after_job: Iterator[None] = iter(())
        self.cancels: list[Call] = []
        self.timer: asyncio.TimerHandle | None = None
        self.asked_by = (0, 0)
        self.quiet = False

    def __repr__(self) -> str:
        """Show what it is and what it waits for."""
        return f"<Operation {self.number} {self.kind} {self.pool} pages={self.pages} {self.waits_for or 'copying'}>"

    @property
    def name(self) -> str:
        """Return what it is, in words."""
        return f"{self.kind.upper()} (operation {self.number} of session {self.session.session_id})"


Finish = Callable[[Operation, KvferryError | None], Ending]
"""Releases what an operation held and returns its event's fields; called once, when no byte of it can move any more."""


class Operations:
    """All live operations. For the control loop.

    A job starts once the devices that hold its pages have registered the host tier; one that cannot register so much
    memory copies through its driver's buffers, which is slower.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        sessions: SessionRegistry,
        counters: Counters,
        copier: Copier,
        host: HostTier,
        executor: Executor,
        transitions: Transitions = TRANSITIONS,
    ) -> None:
        """Register memory on ``executor``, since that may block."""
        self._transitions = transitions
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._counters = counters
        self._copier = copier
        self._host = host
        self._executor = executor
        self._registered: dict[str, asyncio.Future[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(new_number())
        self._live: dict[int, Operation] = {}
        self._by_job: dict[BlockJob, Operation] = {}
        self._unacknowledged: Counter[int] = Counter()
        self._later = Later()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        dispatcher.handle("CANCEL_OPERATION", self._cancel)
        dispatcher.handle_acknowledged(TierDone, self._acknowledged)

    def __iter__(self) -> Iterator[Operation]:
        """Yield the live operations, oldest first."""
        return iter(self._live.values())

    def __repr__(self) -> str:
        """Show the number of live operations."""
        return f"<Operations {len(self._live)}>"

    def check(self, session: Session) -> None:
        """Check that a session may begin another operation.

        Raises:
            ShuttingDownError: the daemon is ending.
            OverloadedError: the session has MAX_OPERATIONS live or unacknowledged ones, or keeps too many bytes.
        """
        if self._draining:
            raise ShuttingDownError("the daemon is ending and accepts no new operations")
        known = self._unacknowledged[session.session_id]
        if known >= MAX_OPERATIONS:
            raise OverloadedError(f"{known} operations of the session are live or unacknowledged")
        self._dispatcher.kept.check(session.session_id, SMALL_BYTES + 1)  # once it has begun it holds pages

    def begin(
        self,
        call: Call,
        kind: OperationKind,
        pool: str,
        pages: int,
        finish: Finish,
        holdings: Holdings = HOLDS_NOTHING,
    ) -> Operation:
        """Begin an operation with the deadline of its request. Raises what ``check`` does."""
        self.check(call.session)
        operation = self._add(call.session, kind, pool, pages, finish, holdings)
        operation.asked_by = self._dispatcher.asked_by(call)
        self._unacknowledged[call.session.session_id] += 1
        self._dispatcher.kept.keep(
            call.session.session_id, (OPERATION, operation.number), REQUEST_BYTES + pages * KEPT_PAGE_BYTES
        )
        late = f"the {kind} was not done within {call.deadline_s:g} s"
        operation.timer = self._loop.call_later(call.deadline_s, self._apply, operation, Event.DEADLINE, late)
        return operation

    def begin_quietly(self, session: Session, kind: OperationKind, pool: str, pages: int, finish: Finish) -> Operation:
        """Begin an operation that continues something of a session and that no session waits for."""
        operation = self._add(session, kind, pool, pages, finish)
        operation.quiet = True
        return operation

    def _add(
        self,
        session: Session,
        kind: OperationKind,
        pool: str,
        pages: int,
        finish: Finish,
        holdings: Holdings = HOLDS_NOTHING,
    ) -> Operation:
        operation = Operation(next(self._numbers), session, kind, pool, pages, finish, holdings)
        self._live[operation.number] = operation
        self._idle.clear()
        return operation

    def start(self, operation: Operation, job: BlockJob) -> None:
        """Run an operation's job, which ends the operation. Ignored for one that has ended meanwhile."""
        devices = {
            segment.region.accelerator.name: segment.region.accelerator
            for segment in job.segments
            if isinstance(segment.region, AcceleratorRegion)
        }
        for device in devices.values():
            registration = self._registered.get(device.name)
            if registration is None:
                registration = self._loop.run_in_executor(self._executor, self._register, device)
                self._registered[device.name] = registration
            if not registration.done():
                operation.waits_for = f"{device.name} to register the host tier"
                registration.add_done_callback(partial(self._on_registered, operation, job))
                return
            cause = CancelledError("the daemon is ending") if registration.cancelled() else registration.exception()
            if cause is not None:
                error = cause if isinstance(cause, KvferryError) else InternalError(f"{device.name}: {cause!r}")
                self._loop.call_soon(self.give_up, operation, error)
                return
        self._apply(operation, Event.BEGIN)
        if operation.state is not State.COPYING:
            return
        operation.waits_for = ""
        operation.first_copy_at = time.monotonic()
        operation.job = job
        self._by_job[job] = operation
        try:
            self._copier.start(job, self._on_job_done)
        except Exception as cause:  # no byte of it moves
            log.exception("a job could not begin", operation=operation.number, cause=str(cause))
            error = InternalError(f"the {operation.kind} could not begin: {cause!r}")
            self._loop.call_soon(self._on_job_done, job, error)

    @contextlib.contextmanager
    def guarded(self, operation: Operation) -> Iterator[None]:
        """End an operation with INTERNAL where the block raises: it was accepted, and nobody else would end it."""
        try:
            yield
        except Exception as cause:
            log.exception("an operation failed", operation=operation.number, kind=operation.kind, cause=str(cause))
            self._loop.call_soon(self.give_up, operation, InternalError(f"the {operation.kind} failed: {cause!r}"))

    def _register(self, device: Accelerator) -> None:
        try:
            device.register_host(self._host.region)
        except OutOfMemoryError as cause:
            log.warning(
                "the host tier is not registered with the device: copies go through the driver's buffers",
                device=device.name,
                cause=cause.detail,
                remedy="raise LimitMEMLOCK of the unit, or make tiers.host_bytes smaller",
            )

    def _on_registered(self, operation: Operation, job: BlockJob, done: asyncio.Future[None]) -> None:
        del done
        if operation.stopped is None:
            with self.guarded(operation):
                self.start(operation, job)

    def _on_job_done(self, job: BlockJob, error: KvferryError | None) -> None:
        operation = self._by_job.get(job)
        if operation is None:  # it was ended as one that could not begin, and began all the same
            return
        try:
            if error is None and next(operation.after_job, self) is not self:
                self._loop.call_soon(self._on_job_done, job, None)
                return
        except Exception as cause:
            log.exception("an operation failed", operation=operation.number, kind=operation.kind, cause=str(cause))
            error = InternalError(f"the {operation.kind} failed: {cause!r}")
        del self._by_job[job]
        operation.job = None
        self._apply(operation, Event.JOB_DONE if error is None else Event.JOB_FAILED, cause=error)

    def nothing_to_do(self, operation: Operation) -> None:
        """End an operation that needs no job."""
        self._apply(operation, Event.NOTHING_TO_DO)

    def give_up(self, operation: Operation, why: KvferryError) -> None:
        """End an operation soon, with this error; at once where it copies nothing."""
        self._apply(operation, Event.GIVEN_UP, cause=why)

    def _apply(self, operation: Operation, event: Event, detail: str = "", cause: KvferryError | None = None) -> None:
        """Apply an event to an operation, as the table says."""
        row = self._transitions.get((operation.state, event))
        if row is None:
            detail = f"no transition of an operation that is {operation.state.value}: {event.value}"
            log.error(
                "unexpected event of an operation", operation=operation.number, kind=operation.kind, detail=detail
            )
            row = bug_in(operation.state)
        if row.state is operation.state:
            return
        operation.state = row.state
        if not isinstance(row.ends, Outcome):
            cause = row.ends(detail, fault="daemon" if event is Event.DEADLINE else None)
        if event in STOPS:
            operation.stopped = cause
        if row.state is State.DONE:
            self._end(operation, operation.stopped if row.ends is Outcome.STOPPED else cause)
        elif row.state is State.STOPPING and operation.job is not None:
            self._copier.stop(operation.job)

    def _end(self, operation: Operation, error: KvferryError | None) -> None:
        """End an operation whose job is not running: release what it held, and notify its session."""
        del self._live[operation.number]
        if operation.timer is not None:
            operation.timer.cancel()
        session = None if operation.quiet else self._sessions.get(operation.session.session_id)
        if session is not None:
            # Later, as the caller may still have to reply: events never overtake the reply to their request. But before
            # what ``finish`` leaves for later.
            self._loop.call_soon(self._dispatcher.push_events, session)
        ending = self._finish(operation, error)
        done = self._with_times(operation, ending.done, error)
        if session is not None:
            session.add_event(done, ending.ids)
            for call in operation.cancels:
                self._dispatcher.answer(session, call.message_id, Answer(OperationCancelled(was_done=False)))
        if not self._live:
            self._idle.set()
        self._count(operation.kind, done)
        self._later.add(partial(self._log_done, operation, done))  # after its session hears of it

    def session_lost(self, session_id: int) -> None:
        """Stop a lost session's operations."""
        for operation in [live for live in self if live.session.session_id == session_id and not live.quiet]:
            operation.cancels.clear()
            if operation.state is not State.DONE:  # it may have ended with one that it waited for
                self._apply(operation, Event.SESSION_ENDED, "the session ended")
        self._unacknowledged.pop(session_id, None)

    def drain(self) -> None:
        """Accept no new operations, and end those that only wait."""
        self._draining = True
        for operation in list(self):
            if operation.state is not State.DONE:  # it may have ended with one that it waited for
                self._apply(operation, Event.DRAIN, "the daemon is ending")

    async def drained(self) -> None:
        """Wait until no operation is live."""
        await self._idle.wait()
        self.write_log()

    def write_log(self) -> None:
        """Write the lines of the log that wait."""
        self._later.make_all()

    # -- what all operations hold, for checks

    def held_pages(self) -> Iterator[HeldPages]:
        """Yield the pages of pools that each operation reads or writes."""
        for operation in list(self):
            if operation.holdings.pages is not None:
                yield from operation.holdings.pages.held(operation.name)

    def extents(self) -> Iterator[Extent]:
        """Yield the memory in the host tier that operations write for blocks that are not visible yet."""
        for operation in self:
            if operation.holdings.memory is not None:
                yield Extent(*operation.holdings.memory, operation.name)

    def writing(self) -> Iterator[Sequence[CachedBlock]]:
        """Yield the blocks that each operation writes."""
        return (operation.holdings.writing for operation in self)

    def problems(self) -> Walk:
        """Yield the operations that would never end."""
        for operation in list(self):
            if operation.state is State.DONE:
                yield Problem("an operation is done and still known", holder=operation.name)
            elif operation.timer is not None and operation.timer.when() + OVERDUE_S < self._loop.time():
                if operation.state is State.WAITING:
                    yield Problem("an operation's deadline has passed, and it waits", holder=operation.name)
            elif operation.timer is None and not operation.quiet:
                yield Problem("an operation has no deadline", holder=operation.name)
            if (operation.state in {State.COPYING, State.STOPPING}) is not (operation.job is not None):
                yield Problem(
                    f"an operation is {operation.state.value}, and its job says otherwise", holder=operation.name
                )
        yield None

    def status(self) -> Iterator[OperationStatus]:
        """Yield the live operations as STATUS shows them."""
        now = time.monotonic()
        for operation in self:
            yield OperationStatus(
                session=operation.session.session_id,
                operation=operation.number,
                kind=operation.kind,
                pool=operation.pool,
                pages=operation.pages,
                age_ms=round((now - operation.created_at) * 1000),
                waits_for=operation.waits_for,
            )

    def _finish(self, operation: Operation, error: KvferryError | None) -> Ending:
        try:
            return operation.finish(operation, error)
        except Exception as cause:  # a bug must not keep the session or shutdown waiting
            log.exception("ending an operation failed", operation=operation.number, kind=operation.kind)
            bug = InternalError(f"the end of the {operation.kind} failed: {type(cause).__name__}")
            try:  # as if its job had failed: what was released is not released again
                operation.finish(operation, bug)
            except Exception:
                log.exception("ending an operation failed again", operation=operation.number, kind=operation.kind)
            return Ending(TierDone(operation=operation.number, kind=operation.kind, error=bug.info()))

    def _with_times(self, operation: Operation, done: TierDone, error: KvferryError | None) -> TierDone:
        now = time.monotonic()
        began = now if operation.first_copy_at is None else operation.first_copy_at
        return msgspec.structs.replace(
            done,
            error=done.error or (error.info() if error else None),
            waited_us=round((began - operation.created_at) * 1e6),
            moved_us=round((now - began) * 1e6),
        )

    def _count(self, kind: OperationKind, done: TierDone) -> None:
        self._counters.add(f"operations.{kind}.{done.error.code.lower() if done.error else 'ok'}")
        if done.error is None:
            self._counters.add(f"operations.{kind}.moved_bytes", done.moved_bytes)

    def _log_done(self, operation: Operation, done: TierDone) -> None:
        failed = done.error
        log.info(
            "operation done",
            operation=operation.number,
            kind=operation.kind,
            pool=operation.pool,
            session=operation.session.session_id,
            outcome=failed.code if failed else "OK",
            detail=failed.detail if failed else "",
            pages=operation.pages,
            moved_bytes=done.moved_bytes,
        )

    def _cancel(self, call: Call) -> Answer | None:
        body = expect(call, CancelOperation)
        number, asked_by = body.operation, (body.request, body.part)
        for operation in self._live.values() if number is None else filter(None, [self._live.get(number)]):
            is_it = number is not None or operation.asked_by == asked_by
            if is_it and operation.session is call.session and not operation.quiet:
                operation.cancels.append(call)
                self._apply(operation, Event.CANCEL, "cancelled by its own session")
                return None
        if number is None:
            return self._cancel_request(call.session, body)
        ended = (event.body for event in call.session.unacknowledged)
        if any(isinstance(body, TierDone) and body.operation == number for body in ended):
            return Answer(OperationCancelled(was_done=True))
        raise UnknownOperationError(f"no operation {number} of this session, live or unacknowledged", field="operation")

    def _cancel_request(self, session: Session, body: CancelOperation) -> Answer:
        """Cancel an operation that has not begun, or has ended, by the request for it."""
        if not session.is_pending(body.request) and session.reply_to(body.request) is None:
            raise UnknownOperationError(f"no message {body.request} of this session asks for one", field="request")
        error = CancelledError("cancelled before its event was reached")
        given_up = self._dispatcher.give_up(session, (body.request, body.part), error)
        return Answer(OperationCancelled(was_done=not given_up))

    def _acknowledged(self, session: Session, event: TierDone) -> None:
        self._unacknowledged[session.session_id] -= 1
        self._dispatcher.kept.drop(session.session_id, (OPERATION, event.operation))

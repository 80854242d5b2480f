"""Operations: OFFLOAD, RESTORE, STORE and LOAD from their acceptance to the one event that reports their end.

The work of one is a coroutine. It may wait (for pages, for lower tiers), and can be stopped where it does; then it has
one job of the copier run, and ends with it. What it holds is released after that, when no byte of it can move any more.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import structlog

from kvferry.daemon.control import first_step
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


class Operation:
    """One operation.

    Attributes:
        call: the request for it; None where no session asked for it, is told of its end, or ends it with its own.
        count: of the pages it covers.
        pages: those of a pool that it holds; it may take them later.
        waits_for: what it waits for before it copies, in words; empty while it copies.
        done: its event, as far as it is known; without an error until it has ended.
        ids: the page lists of its event.
        stopped: the error it was stopped with, if any, also while its job still ends.
        job: what it copies, once it does: from then on only the job's end ends it.
        asked_by: by which message its request came, and which of a BATCH that was.
    """

    def __init__(
        self, number: int, session: Session, call: Call | None, kind: OperationKind, pool: str, count: int
    ) -> None:
        self.number = number
        self.session = session
        self.call = call
        self.kind = kind
        self.pool = pool
        self.count = count
        self.pages = PageHold(write=kind in {"restore", "load"})
        self.created_at = time.monotonic()
        self.first_copy_at: float | None = None
        self.waits_for = ""
        self.done = TierDone(operation=number, kind=kind)
        self.ids: tuple[PageIds, ...] = ()
        self.stopped: KvferryError | None = None
        self.job: BlockJob | None = None
        self.cancels: list[Call] = []
        self.timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Future[None] | None = None
        self.asked_by = (0, 0)

    def __repr__(self) -> str:
        """Show what it is and what it waits for."""
        return f"<Operation {self.number} {self.kind} {self.pool} pages={self.count} {self.waits_for or 'copying'}>"

    @property
    def name(self) -> str:
        """Return what it is, in words."""
        return f"{self.kind.upper()} (operation {self.number} of session {self.session.session_id})"


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
    ) -> None:
        """Register memory on ``executor``, since that may block."""
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

    def of_request(self, call: Call, kind: OperationKind, pool: str, count: int) -> Operation:
        """Return the operation of a request, which has not begun.

        Raises:
            ShuttingDownError: the daemon is ending.
            OverloadedError: the session has MAX_OPERATIONS live or unacknowledged ones, or keeps too many bytes.
        """
        if self._draining:
            raise ShuttingDownError("the daemon is ending and accepts no new operations")
        session_id = call.session.session_id
        known = self._unacknowledged[session_id]
        if known >= MAX_OPERATIONS:
            raise OverloadedError(f"{known} operations of the session are live or unacknowledged")
        self._dispatcher.kept.check(session_id, SMALL_BYTES + 1)  # once it has begun it holds pages
        return Operation(next(self._numbers), call.session, call, kind, pool, count)

    def of_nobody(self, session: Session, kind: OperationKind, pool: str, count: int) -> Operation:
        """Return an operation that continues something of a session, and that no session waits for."""
        return Operation(next(self._numbers), session, None, kind, pool, count)

    def begin(self, operation: Operation, holds: ExitStack, work: Coroutine[Any, Any, TierDone]) -> None:
        """Do an operation's work, the first step of it at once.

        Args:
            operation: with the deadline of its request.
            holds: what is to be released in the end, whatever that is, beside the operation's pages.
            work: returns the event of its success. It copies with ``copy``; what it raises ends the operation.

        Raises:
            Exception: it has not begun, and ``holds`` is still the caller's.
        """
        call, session_id = operation.call, operation.session.session_id
        try:
            if call is not None:
                operation.asked_by = self._dispatcher.asked_by(call)
                kept_bytes = REQUEST_BYTES + operation.count * KEPT_PAGE_BYTES
                self._dispatcher.kept.keep(session_id, (OPERATION, operation.number), kept_bytes)
        except BaseException:
            work.close()
            raise
        if call is not None:
            self._unacknowledged[session_id] += 1
            operation.timer = self._loop.call_later(call.deadline_s, self._late, operation, call.deadline_s)
        self._live[operation.number] = operation
        self._idle.clear()
        operation.task = first_step.begin(self._run(operation, holds.pop_all(), work))

    async def _run(self, operation: Operation, holds: ExitStack, work: Coroutine[Any, Any, TierDone]) -> None:
        error: KvferryError | None = None
        try:
            with holds, operation.pages:
                try:
                    done = await work
                except asyncio.CancelledError:
                    raise (operation.stopped or ShuttingDownError("the daemon is ending")) from None
            operation.done = done
        except KvferryError as cause:
            error = cause
        except Exception as cause:
            log.exception("an operation failed", operation=operation.number, kind=operation.kind, cause=str(cause))
            error = InternalError(f"the {operation.kind} failed: {cause!r}")
        self._end(operation, error)

    async def copy(self, operation: Operation, job: BlockJob) -> None:
        """Run an operation's job, and wait for its end: from here on nothing else ends the operation.

        Raises:
            KvferryError: what the operation was stopped for, or what is wrong: see ``TierCopier.start``.
        """
        for segment in job.segments:
            if isinstance(segment.region, AcceleratorRegion):
                await self._register_with(operation, segment.region.accelerator)
        operation.waits_for = ""
        operation.first_copy_at = time.monotonic()
        operation.job = job
        done: asyncio.Future[KvferryError | None] = self._loop.create_future()
        self._copier.start(job, partial(_report, done))
        error = await done
        if error is not None:
            raise operation.stopped or error

    async def _register_with(self, operation: Operation, device: Accelerator) -> None:
        """Have a device register the host tier, once for all operations."""
        registration = self._registered.get(device.name)
        if registration is None:
            registration = self._loop.run_in_executor(self._executor, self._register, device)
            self._registered[device.name] = registration
        if not registration.done():
            operation.waits_for = f"{device.name} to register the host tier"
            await asyncio.wait([registration])  # others wait for it, too: it is not cancelled with this one
        if registration.cancelled():
            raise CancelledError("the daemon is ending")
        registration.result()

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

    def stop(self, operation: Operation, why: KvferryError) -> None:
        """End an operation soon, with this error: where it waits, or once its job has stopped, unless that is done."""
        if operation.stopped is not None:
            return
        operation.stopped = why
        if operation.job is not None:
            self._copier.stop(operation.job)
        elif operation.task is not None:
            operation.task.cancel()

    def _late(self, operation: Operation, deadline_s: float) -> None:
        detail = f"the {operation.kind} was not done within {deadline_s:g} s"
        self.stop(operation, DeadlineError(detail, fault="daemon"))

    def _end(self, operation: Operation, error: KvferryError | None) -> None:
        """Notify an operation's session of its end: no byte of it moves any more, and it holds nothing."""
        del self._live[operation.number]
        if operation.timer is not None:
            operation.timer.cancel()
        done = operation.done = self._with_times(operation, error)
        session = self._sessions.get(operation.session.session_id) if operation.call is not None else None
        if session is not None:
            session.add_event(done, () if error else operation.ids)
            for call in operation.cancels:
                self._dispatcher.answer(session, call.message_id, Answer(OperationCancelled(was_done=False)))
            if operation.task is not None:  # else it was its first step, and the event follows the reply
                self._dispatcher.push_events(session)
        if not self._live:
            self._idle.set()
        self._count(operation.kind, done)
        self._later.add(partial(self._log_done, operation))  # after its session hears of it

    def session_lost(self, session_id: int) -> None:
        """Stop a lost session's operations."""
        for operation in [live for live in self if live.session.session_id == session_id and live.call is not None]:
            operation.cancels.clear()
            self.stop(operation, CancelledError("the session ended"))
        self._unacknowledged.pop(session_id, None)

    def drain(self) -> None:
        """Accept no new operations, and end those that only wait."""
        self._draining = True
        for operation in self:
            if operation.job is None:
                self.stop(operation, ShuttingDownError("the daemon is ending"))

    async def drained(self) -> None:
        """Wait until no operation is live."""
        await self._idle.wait()
        self.write_log()

    def write_log(self) -> None:
        """Write the lines of the log that wait."""
        self._later.make_all()

    async def close(self) -> None:
        """End what is live: the copier is closed."""
        tasks = [operation.task for operation in self if operation.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- what all operations hold, for checks

    def held_pages(self) -> Iterator[HeldPages]:
        """Yield the pages of pools that each operation reads or writes."""
        for operation in list(self):
            yield from operation.pages.held(operation.name)

    def problems(self) -> Walk:
        """Yield the operations that would never end."""
        for operation in list(self):
            if operation.task is not None and operation.task.done():
                yield Problem("an operation is done and still known", holder=operation.name)
            elif operation.timer is not None and operation.timer.when() + OVERDUE_S < self._loop.time():
                if operation.job is None:
                    yield Problem("an operation's deadline has passed, and it waits", holder=operation.name)
            elif operation.timer is None and operation.call is not None:
                yield Problem("an operation has no deadline", holder=operation.name)
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
                pages=operation.count,
                age_ms=round((now - operation.created_at) * 1000),
                waits_for=operation.waits_for,
            )

    def _with_times(self, operation: Operation, error: KvferryError | None) -> TierDone:
        now = time.monotonic()
        began = now if operation.first_copy_at is None else operation.first_copy_at
        done = operation.done if error is None else msgspec.structs.replace(operation.done, error=error.info())
        return msgspec.structs.replace(
            done,
            waited_us=round((began - operation.created_at) * 1e6),
            moved_us=round((now - began) * 1e6),
        )

    def _count(self, kind: OperationKind, done: TierDone) -> None:
        self._counters.add(f"operations.{kind}.{done.error.code.lower() if done.error else 'ok'}")
        if done.error is None:
            self._counters.add(f"operations.{kind}.moved_bytes", done.moved_bytes)

    def _log_done(self, operation: Operation) -> None:
        done, failed = operation.done, operation.done.error
        log.info(
            "operation done",
            operation=operation.number,
            kind=operation.kind,
            pool=operation.pool,
            session=operation.session.session_id,
            outcome=failed.code if failed else "OK",
            detail=failed.detail if failed else "",
            pages=operation.count,
            moved_bytes=done.moved_bytes,
        )

    def _cancel(self, call: Call) -> Answer | None:
        body = expect(call, CancelOperation)
        number, asked_by = body.operation, (body.request, body.part)
        for operation in self._live.values() if number is None else filter(None, [self._live.get(number)]):
            is_it = number is not None or operation.asked_by == asked_by
            if is_it and operation.session is call.session and operation.call is not None:
                operation.cancels.append(call)
                self.stop(operation, CancelledError("cancelled by its own session"))
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


def _report(done: asyncio.Future[KvferryError | None], _job: BlockJob, error: KvferryError | None) -> None:
    if not done.done():
        done.set_result(error)

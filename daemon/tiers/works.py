"""Works: what OFFLOAD, RESTORE, STORE and LOAD have under way, from their acceptance to the one event of their end.

A work may wait (for pages, for lower tiers), then runs one job of the copier, then is over; it can be stopped at any
time, by its session, its deadline or the session's end. Whoever begins one says by ``finish`` what to give back.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
import structlog

from kvferry.daemon.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.metrics import Counters
from kvferry.daemon.sessions import Session, SessionRegistry
from kvferry.daemon.tiers.copier import BlockJob
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    CancelledError,
    DeadlineError,
    InternalError,
    KvferryError,
    OverloadedError,
    ShuttingDownError,
    UnknownWorkError,
)
from kvferry.protocol.session_messages import WorkStatus
from kvferry.protocol.tier_messages import CancelWork, TierDone, WorkCancelled, WorkKind

MAX_WORKS = 1024
"""Of one session, live or over and not acknowledged."""

log = structlog.get_logger(__name__)


class Copier(Protocol):
    """Runs jobs, and reports the end of each to ``Works.job_done``, never from within a call; see ``TierCopier``."""

    def start(self, job: BlockJob) -> None:
        """Run a job."""

    def stop(self, job: BlockJob) -> None:
        """End a job soon, with an error unless it is done before."""


class Ending(msgspec.Struct, frozen=True):
    """What a work's event says beside its kind and its times."""

    done: TierDone
    ids: tuple[PageIds, ...] = ()


class Work:
    """One work.

    Attributes:
        waits_for: what it waits for before its job begins, in words; empty while it copies.
        pages: how many it is about.
        stopped: why it is to end, where it was stopped.
        quiet: nobody asked for it: its end is no event, and the session's end not its own.
    """

    def __init__(self, number: int, session: Session, kind: WorkKind, pool: str, pages: int, finish: Finish) -> None:
        self.number = number
        self.session = session
        self.kind = kind
        self.pool = pool
        self.pages = pages
        self.finish = finish
        self.created_at = time.monotonic()
        self.first_copy_at: float | None = None
        self.waits_for = ""
        self.stopped: KvferryError | None = None
        self.job: BlockJob | None = None
        self.cancels: list[Call] = []
        self.timer: asyncio.TimerHandle | None = None
        self.quiet = False

    def __repr__(self) -> str:
        """Show what it is and does."""
        return f"<Work {self.number} {self.kind} {self.pool} pages={self.pages} {self.waits_for or 'copying'}>"


Finish = Callable[[Work, KvferryError | None], Ending]
"""Gives back what a work held and returns what its event says; called once, when no byte of it can move any more."""


class Works:
    """All live works. For the control loop only."""

    def __init__(self, dispatcher: Dispatcher, sessions: SessionRegistry, counters: Counters, copier: Copier) -> None:
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._counters = counters
        self._copier = copier
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._live: dict[int, Work] = {}
        self._of_job: dict[BlockJob, Work] = {}
        self._unacknowledged: Counter[int] = Counter()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        dispatcher.handle("CANCEL_WORK", self._cancel)
        dispatcher.on_work_acknowledged = self._acknowledged

    def __iter__(self) -> Iterator[Work]:
        """Yield the live works, oldest first."""
        return iter(self._live.values())

    def __repr__(self) -> str:
        """Show how many are live."""
        return f"<Works {len(self._live)}>"

    def check(self, session: Session) -> None:
        """Check that a session may begin another work.

        Raises:
            ShuttingDownError: the daemon ends.
            OverloadedError: as many are live, or ended and not acknowledged, as a session may have.
        """
        if self._draining:
            raise ShuttingDownError("the daemon ends and takes no new work")
        known = self._unacknowledged[session.session_id]
        if known >= MAX_WORKS:
            raise OverloadedError(f"{known} works of the session are live or unacknowledged")

    def begin(self, call: Call, kind: WorkKind, pool: str, pages: int, finish: Finish) -> Work:
        """Note a new work; its deadline is the request's. Raises what ``check`` does."""
        self.check(call.session)
        work = self._enter(call.session, kind, pool, pages, finish)
        self._unacknowledged[call.session.session_id] += 1
        late = DeadlineError(f"the {kind} was not done within {call.deadline_s:g} s")
        work.timer = self._loop.call_later(call.deadline_s, self.stop, work, late)
        return work

    def begin_quietly(self, session: Session, kind: WorkKind, pool: str, pages: int, finish: Finish) -> Work:
        """Note a work that goes on from something of a session, which nobody waits for."""
        work = self._enter(session, kind, pool, pages, finish)
        work.quiet = True
        return work

    def _enter(self, session: Session, kind: WorkKind, pool: str, pages: int, finish: Finish) -> Work:
        work = Work(next(self._numbers), session, kind, pool, pages, finish)
        self._live[work.number] = work
        self._idle.clear()
        return work

    def run(self, work: Work, job: BlockJob) -> None:
        """Let the copier do a work's job; it ends the work. One that was stopped meanwhile ends at once."""
        if work.stopped is not None:
            self.end(work, work.stopped)
            return
        work.waits_for = ""
        work.job = job
        work.first_copy_at = time.monotonic()
        self._of_job[job] = work
        self._copier.start(job)

    def job_done(self, job: BlockJob, error: KvferryError | None) -> None:
        """Take the end of a job from the copier."""
        work = self._of_job.pop(job)
        work.job = None
        self.end(work, error if error is None else work.stopped or error)

    def end(self, work: Work, error: KvferryError | None) -> None:
        """End a work that has no job under way: give back what it held, and tell its session."""
        if self._live.pop(work.number, None) is None:
            return
        if work.timer is not None:
            work.timer.cancel()
        ending = self._finish(work, error)
        done = self._timed(work, ending.done, error)
        self._record(work, done)
        session = self._sessions.get(work.session.session_id)
        if session is not None and not work.quiet:
            session.add_event(done, ending.ids)
            for call in work.cancels:
                self._dispatcher.answer(session, call.message_id, Answer(WorkCancelled(was_done=False)))
            # After the reply that this call may still give: events never overtake their request's reply.
            self._loop.call_soon(self._dispatcher.push_events, session)
        if not self._live:
            self._idle.set()

    def stop(self, work: Work, why: KvferryError) -> None:
        """End a work soon, with this error; at once where it copies nothing."""
        if work.number not in self._live or work.stopped is not None:
            return
        work.stopped = why
        if work.job is not None:
            self._copier.stop(work.job)
        else:
            self.end(work, why)

    def session_lost(self, session_id: int) -> None:
        """Stop what died with a session."""
        for work in [one for one in self if one.session.session_id == session_id and not one.quiet]:
            work.cancels.clear()
            self.stop(work, CancelledError("the session ended"))
        self._unacknowledged.pop(session_id, None)

    def drain(self) -> None:
        """Take no new work, and end what only waits."""
        self._draining = True
        for work in [one for one in self if one.job is None]:
            self.stop(work, ShuttingDownError("the daemon ends"))

    async def drained(self) -> None:
        """Return once no work is live."""
        await self._idle.wait()

    def live(self, session_id: int) -> int:
        """Return how many works of a session are live, or over and not acknowledged."""
        return self._unacknowledged[session_id]

    def status(self) -> Iterator[WorkStatus]:
        """Yield the live works as STATUS shows them."""
        now = time.monotonic()
        for work in self:
            yield WorkStatus(
                session=work.session.session_id,
                work=work.number,
                kind=work.kind,
                pool=work.pool,
                pages=work.pages,
                age_ms=round((now - work.created_at) * 1000),
                waits_for=work.waits_for,
            )

    def _finish(self, work: Work, error: KvferryError | None) -> Ending:
        try:
            return work.finish(work, error)
        except Exception as cause:  # a bug in one work must leave neither its session nor the daemon's end waiting
            log.exception("a work did not end well", work=work.number, kind=work.kind)
            bug = InternalError(f"the end of the {work.kind} failed: {type(cause).__name__}")
            return Ending(TierDone(work=work.number, kind=work.kind, error=bug.info()))

    def _timed(self, work: Work, done: TierDone, error: KvferryError | None) -> TierDone:
        now = time.monotonic()
        began = now if work.first_copy_at is None else work.first_copy_at
        return msgspec.structs.replace(
            done,
            error=done.error or (error.info() if error else None),
            waited_us=round((began - work.created_at) * 1e6),
            moved_us=round((now - began) * 1e6),
        )

    def _record(self, work: Work, done: TierDone) -> None:
        failed = done.error
        outcome = failed.code if failed else "OK"
        self._counters.add(f"works.{work.kind}.{outcome.lower()}")
        if failed is None:
            self._counters.add(f"works.{work.kind}.moved_bytes", done.moved_bytes)
        log.info(
            "work done",
            work=work.number,
            kind=work.kind,
            pool=work.pool,
            session=work.session.session_id,
            outcome=outcome,
            detail=failed.detail if failed else "",
            pages=work.pages,
            moved_bytes=done.moved_bytes,
        )

    def _cancel(self, call: Call) -> Answer | None:
        number = expect(call, CancelWork).work
        work = self._live.get(number)
        if work is not None and work.session is call.session and not work.quiet:
            work.cancels.append(call)
            self.stop(work, CancelledError("cancelled by its own session"))
            return None
        ended = (event.body for event in call.session.unacknowledged)
        if any(isinstance(body, TierDone) and body.work == number for body in ended):
            return Answer(WorkCancelled(was_done=True))
        raise UnknownWorkError(f"no work {number} of this session, live or unacknowledged", field="work")

    def _acknowledged(self, session: Session, event: TierDone) -> None:
        del event
        self._unacknowledged[session.session_id] -= 1

"""Scheduling of background steps: they give way to transfers, and to each other by class.

A step is about a millisecond, or some where it can stop. None begins while a transfer op is in flight or a higher class
waits, and those that copy in host memory stop where they are; each class has a bound on its bytes in flight. So that
steady transfers cannot starve a restore, a step that has waited for ``patience_s`` starts despite them, one such step
in that time, and those that have stood still for so long go on. Waiters are woken and never poll. Knows nothing of what
a step does. All methods are thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from kvferry.pools.copy_kernel import Gate

PATIENCE_S: Final = 0.1

QUIET_S: Final = 0.25
"""Without a transfer for so long, the next one is not about to begin."""


class OperationClass(enum.IntEnum):
    """Classes of background work, the most urgent first; transfers precede all of them."""

    RESTORE = 0
    OFFLOAD = 1
    DEMOTION = 2


_ABOVE: Final = {one: tuple(other for other in OperationClass if other < one) for one in OperationClass}
"""The classes that are more urgent than each."""


class Permit(NamedTuple):
    """A step may begin; what it copies in host memory stands still until ``patience_s`` later while transfers copy."""

    patience_s: float


class _Ticket:
    """One step that waits to begin."""

    __slots__ = ("operation_class", "since_s", "size_bytes")

    def __init__(self, operation_class: OperationClass, size_bytes: int, since_s: float) -> None:
        self.operation_class = operation_class
        self.size_bytes = size_bytes
        self.since_s = since_s


def _never() -> bool:
    return False


class Scheduler:
    """The scheduler, see the module. Not bound to an event loop."""

    def __init__(
        self,
        max_bytes: Mapping[OperationClass, int],
        *,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bound the bytes in flight of each class; a single step may be larger.

        With ``patience_s`` 0 a step waits for as long as transfers are in flight.
        """
        self._in_flight = dict.fromkeys(OperationClass, 0)  # bytes of steps that have not ended
        self._max_bytes = {one: max_bytes[one] for one in OperationClass}
        self._patience_s = patience_s
        self._clock = clock
        self._changed = threading.Condition()
        self._gate = Gate()
        self._wakers: set[Callable[[], None]] = set()
        self._waiting: dict[OperationClass, deque[_Ticket]] = {one: deque() for one in OperationClass}
        self._transfers = 0
        self._transfers_begun = 0
        self._last_patient_s = float("-inf")
        self._last_transfer_s = float("-inf")
        self._closed = False

    def __repr__(self) -> str:
        """Show what is in flight and what waits."""
        waiting = {one.name: len(tickets) for one, tickets in self._waiting.items() if tickets}
        return f"<Scheduler transfers={self._transfers} in_flight={self.bytes_in_flight} waiting={waiting}>"

    @property
    def transfers(self) -> int:
        """Return the number of transfer ops in flight."""
        return self._transfers

    @property
    def transfers_begun(self) -> int:
        """Return how many transfer ops have begun so far."""
        return self._transfers_begun

    @property
    def quiet(self) -> bool:
        """Return whether no transfer op is in flight, nor was one lately."""
        return not self._transfers and self._clock() - self._last_transfer_s > QUIET_S

    @property
    def bytes_in_flight(self) -> int:
        """Return the bytes of all steps in flight."""
        return sum(self._in_flight.values())

    def transfer_began(self) -> None:
        """Count a transfer op as in flight."""
        with self._changed:
            self._transfers_begun += 1
            self._transfers += 1  # no wake: waiters see it when they are woken next
            if self._transfers == 1 and not self._closed:
                self._gate.shut()

    def transfer_ended(self) -> None:
        """Count a transfer op as ended; after the last one, background work resumes."""
        with self._changed:
            assert self._transfers, self
            self._transfers -= 1
            if not self._transfers:
                self._last_transfer_s = self._clock()
                self._gate.open()
                self._wake()

    def giving_way(self, permit: Permit) -> contextlib.AbstractContextManager[None]:
        """Let what the calling thread copies in host memory for a step, in this block, stop for transfers."""
        return self._gate.giving_way(permit.patience_s)

    def try_begin(self, operation_class: OperationClass, size_bytes: int) -> Permit | None:
        """Begin a step if it may start now and none of its class waits; a permit needs an ``end``."""
        with self._changed:
            if self._closed or self._waiting[operation_class]:
                return None
            now_s = self._clock()
            return self._start(_Ticket(operation_class, size_bytes, now_s), now_s)

    def begin(
        self, operation_class: OperationClass, size_bytes: int, stopped: Callable[[], bool] = _never
    ) -> Permit | None:
        """Block this thread until a step may start; a permit needs an ``end``.

        Return None, with no step begun, once ``stopped`` returns True or the scheduler is closed.

        Args:
            operation_class: the class to queue in.
            size_bytes: the bytes counted as in flight.
            stopped: called before waiting and after each ``wake``, with the scheduler locked: it must not call it.
        """
        with self._changed, self._queued(operation_class, size_bytes) as ticket:
            while not (self._closed or stopped()):
                now_s = self._clock()
                permit = self._start(ticket, now_s)
                if permit is not None:
                    return permit
                self._changed.wait(self._patience_left_s(ticket, now_s))
            return None

    async def begin_async(self, operation_class: OperationClass, size_bytes: int) -> bool:
        """Wait as ``begin`` does, on the running loop; False once the scheduler is closed. May be cancelled."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # a closed loop has no waiters
                loop.call_soon_threadsafe(woken.set)

        with contextlib.ExitStack() as queued:
            with self._changed:
                ticket = queued.enter_context(self._queued(operation_class, size_bytes, wake))
            while True:
                with self._changed:
                    if self._closed:
                        return False
                    now_s = self._clock()
                    if self._start(ticket, now_s) is not None:
                        return True
                    left_s = self._patience_left_s(ticket, now_s)
                    woken.clear()  # what happens from here on sets it again
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await woken.wait()

    def end(self, operation_class: OperationClass, size_bytes: int) -> None:
        """End a step that was begun."""
        with self._changed:
            self._in_flight[operation_class] -= size_bytes
            assert self._in_flight[operation_class] >= 0, self
            self._wake()

    def wake(self) -> None:
        """Make every waiting thread call ``stopped`` again."""
        with self._changed:
            self._wake()

    def close(self) -> None:
        """Begin nothing any more; waiters get False."""
        with self._changed:
            self._closed = True
            self._gate.open()
            self._wake()

    @contextlib.contextmanager
    def _queued(
        self, operation_class: OperationClass, size_bytes: int, waker: Callable[[], None] | None = None
    ) -> Iterator[_Ticket]:
        """Queue a ticket in its class; entered with the lock held, left with or without it."""
        ticket = _Ticket(operation_class, size_bytes, self._clock())
        self._waiting[operation_class].append(ticket)
        if waker is not None:
            self._wakers.add(waker)
        try:
            yield ticket
        finally:
            with self._changed:  # re-entrant
                if waker is not None:
                    self._wakers.discard(waker)
                if ticket in self._waiting[operation_class]:  # else it has begun
                    self._waiting[operation_class].remove(ticket)
                    self._wake()

    def _start(self, ticket: _Ticket, now_s: float) -> Permit | None:
        """Begin a step if it may start now, and remove it from its queue. Needs the lock."""
        if not self._may_start(ticket, now_s):
            return None
        tickets = self._waiting[ticket.operation_class]
        if self._transfers:
            self._last_patient_s = now_s
        if tickets and tickets[0] is ticket:
            tickets.popleft()
            self._wake()  # the next one of its class, or a lower class, may start as well
        self._in_flight[ticket.operation_class] += ticket.size_bytes
        # What starts despite transfers has waited for them already.
        return Permit(0.0 if self._transfers else self._patience_s or math.inf)

    def _may_start(self, ticket: _Ticket, now_s: float) -> bool:
        operation_class, tickets = ticket.operation_class, self._waiting[ticket.operation_class]
        if (tickets and tickets[0] is not ticket) or any(self._waiting[one] for one in _ABOVE[operation_class]):
            return False
        if self._transfers:
            return not self.bytes_in_flight and self._patient_at_s(ticket) <= now_s
        in_flight = self._in_flight[operation_class]
        return not in_flight or in_flight + ticket.size_bytes <= self._max_bytes[operation_class]

    def _patient_at_s(self, ticket: _Ticket) -> float:
        """Return the time from which a step may start despite transfers."""
        if not self._patience_s:
            return float("inf")
        return max(ticket.since_s, self._last_patient_s) + self._patience_s

    def _patience_left_s(self, ticket: _Ticket, now_s: float) -> float | None:
        """Return how long to wait for a wake at most; None: forever, as only a wake can let the step start.

        Uses the clock reading of the preceding check: otherwise a step that became due in between would wait forever.
        """
        left_s = self._patient_at_s(ticket) - now_s
        return left_s if self._transfers and 0 < left_s < float("inf") else None

    def _wake(self) -> None:
        self._changed.notify_all()
        for wake in self._wakers:
            wake()

"""Whose turn it is: background chunks give way to transfers, and to each other by class.

A chunk is at most about a millisecond of work. None begins while a piece of a transfer is under way or a higher class
waits, and each class has a bound of bytes in flight. So that steady transfers cannot starve a restore for ever, a chunk
that has waited longer than ``patience_s`` may start alone: one such chunk in that time. Who waits is woken, and never
looks again and again. Knows nothing of what a chunk does. Every method is for any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final

PATIENCE_S: Final = 0.1


class OperationClass(enum.IntEnum):
    """Classes of background work, the most urgent first; transfers come before all of them."""

    RESTORE = 0
    OFFLOAD = 1
    DEMOTION = 2


class ClassCounts:
    """What happened to the chunks of one class.

    Attributes:
        started: chunks that began.
        waited: chunks that could not begin at once.
        patient: chunks that began in the midst of transfers, after ``patience_s``.
        waited_s: how long they waited, together.
        bytes_in_flight: of chunks that have not ended.
    """

    __slots__ = ("bytes_in_flight", "patient", "started", "waited", "waited_s")

    def __init__(self) -> None:
        self.started = self.waited = self.patient = self.bytes_in_flight = 0
        self.waited_s = 0.0


class _Ticket:
    """One chunk that wants to begin."""

    __slots__ = ("operation_class", "since_s", "size_bytes", "waited")

    def __init__(self, operation_class: OperationClass, size_bytes: int, since_s: float) -> None:
        self.operation_class = operation_class
        self.size_bytes = size_bytes
        self.since_s = since_s
        self.waited = False


def _never() -> bool:
    return False


class Scheduler:
    """See above. Not bound to an event loop.

    Attributes:
        counts: of each class; read without a lock.
    """

    def __init__(
        self,
        max_bytes: Mapping[OperationClass, int],
        *,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bound each class to so many bytes in flight, or one chunk that is larger.

        With ``patience_s`` 0 a chunk waits for as long as transfers go on.
        """
        self.counts = {one: ClassCounts() for one in OperationClass}
        self._max_bytes = {one: max_bytes[one] for one in OperationClass}
        self._patience_s = patience_s
        self._clock = clock
        self._changed = threading.Condition()
        self._wakers: set[Callable[[], None]] = set()
        self._waiting: dict[OperationClass, deque[_Ticket]] = {one: deque() for one in OperationClass}
        self._transfers = 0
        self._last_patient_s = float("-inf")
        self._closed = False

    def __repr__(self) -> str:
        """Show what is under way and what waits."""
        waiting = {one.name: len(tickets) for one, tickets in self._waiting.items() if tickets}
        return f"<Scheduler transfers={self._transfers} in_flight={self.bytes_in_flight} waiting={waiting}>"

    @property
    def transfers(self) -> int:
        """Return how many pieces of transfers are under way."""
        return self._transfers

    @property
    def bytes_in_flight(self) -> int:
        """Return the bytes of all chunks that have begun and not ended."""
        return sum(one.bytes_in_flight for one in self.counts.values())

    def transfer_began(self) -> None:
        """Count a piece of a transfer that is under way from now on."""
        with self._changed:
            self._transfers += 1  # who waits need not know: what it waits for brings it a word, and then it sees

    def transfer_ended(self) -> None:
        """Count a piece as ended; with the last one, background work goes on."""
        with self._changed:
            assert self._transfers, self
            self._transfers -= 1
            if not self._transfers:
                self._wake()

    def try_begin(self, operation_class: OperationClass, size_bytes: int) -> bool:
        """Begin a chunk if it may start now, behind all that wait; it then needs ``end``."""
        with self._changed:
            if self._closed or self._waiting[operation_class]:
                return False
            now_s = self._clock()
            return self._start(_Ticket(operation_class, size_bytes, now_s), now_s)

    def begin(self, operation_class: OperationClass, size_bytes: int, stopped: Callable[[], bool] = _never) -> bool:
        """Wait on this thread until a chunk may start; it then needs ``end``.

        False, without a chunk begun, once ``stopped`` says so or the scheduler is closed.

        Args:
            operation_class: whose turn to wait for.
            size_bytes: what it counts as in flight.
            stopped: asked before waiting and after each ``wake``, with the scheduler locked: it may not call it.
        """
        with self._changed, self._queued(operation_class, size_bytes) as ticket:
            while not (self._closed or stopped()):
                now_s = self._clock()
                if self._start(ticket, now_s):
                    return True
                self._changed.wait(self._patience_left_s(ticket, now_s))
            return False

    async def begin_async(self, operation_class: OperationClass, size_bytes: int) -> bool:
        """Wait as ``begin`` does, on the running loop; False where the scheduler is closed. May be cancelled."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # a loop that is closed has nobody who waits
                loop.call_soon_threadsafe(news.set)

        with contextlib.ExitStack() as queued:
            with self._changed:
                ticket = queued.enter_context(self._queued(operation_class, size_bytes, wake))
            while True:
                with self._changed:
                    if self._closed:
                        return False
                    now_s = self._clock()
                    if self._start(ticket, now_s):
                        return True
                    left_s = self._patience_left_s(ticket, now_s)
                    news.clear()  # what is set from here on is news
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await news.wait()

    def end(self, operation_class: OperationClass, size_bytes: int) -> None:
        """End a chunk that has begun."""
        with self._changed:
            self.counts[operation_class].bytes_in_flight -= size_bytes
            assert self.counts[operation_class].bytes_in_flight >= 0, self
            self._wake()

    def wake(self) -> None:
        """Have every waiting thread ask ``stopped`` again."""
        with self._changed:
            self._wake()

    def close(self) -> None:
        """Let nothing begin any more; who waits gets False."""
        with self._changed:
            self._closed = True
            self._wake()

    @contextlib.contextmanager
    def _queued(
        self, operation_class: OperationClass, size_bytes: int, waker: Callable[[], None] | None = None
    ) -> Iterator[_Ticket]:
        """Stand in the queue of a class; entered with the lock held, left with or without it."""
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

    def _start(self, ticket: _Ticket, now_s: float) -> bool:
        """Begin a chunk if it may start now, and take it out of its queue. Needs the lock."""
        tickets, counts = self._waiting[ticket.operation_class], self.counts[ticket.operation_class]
        if not self._may_start(ticket, now_s):
            ticket.waited = True
            return False
        if self._transfers:
            self._last_patient_s = now_s
            counts.patient += 1
        if tickets and tickets[0] is ticket:
            tickets.popleft()
            self._wake()  # the next one of its class, or a lower class, may start as well
        counts.started += 1
        counts.waited += ticket.waited
        counts.waited_s += now_s - ticket.since_s
        counts.bytes_in_flight += ticket.size_bytes
        return True

    def _may_start(self, ticket: _Ticket, now_s: float) -> bool:
        operation_class, tickets = ticket.operation_class, self._waiting[ticket.operation_class]
        if (tickets and tickets[0] is not ticket) or any(
            self._waiting[one] for one in OperationClass if one < operation_class
        ):
            return False
        if self._transfers:
            return not self.bytes_in_flight and self._patient_at_s(ticket) <= now_s
        in_flight = self.counts[operation_class].bytes_in_flight
        return not in_flight or in_flight + ticket.size_bytes <= self._max_bytes[operation_class]

    def _patient_at_s(self, ticket: _Ticket) -> float:
        """Return from when on a chunk may start in the midst of transfers."""
        if not self._patience_s:
            return float("inf")
        return max(ticket.since_s, self._last_patient_s) + self._patience_s

    def _patience_left_s(self, ticket: _Ticket, now_s: float) -> float | None:
        """Return how long to wait for words at most; None: for ever, as nothing but words can let the chunk start.

        By the same clock reading as the look before: a chunk whose time came in between would wait for words for ever.
        """
        left_s = self._patient_at_s(ticket) - now_s
        return left_s if self._transfers and 0 < left_s < float("inf") else None

    def _wake(self) -> None:
        self._changed.notify_all()
        for wake in self._wakers:
            wake()

"""Space in the host tier for what needs more than is free: blocks are evicted for it a few at a time.

To evict a block takes some 15 us, and a long prompt has thousands of them: all other engines would wait for that. So
an operation that has begun, and holds its pages, waits until they have gone; and so does a request that has no pages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from kvferry.daemon.control.dispatch import Call, Dispatcher, Handler
from kvferry.daemon.tiers.operations import Operation, Operations, State
from kvferry.protocol.errors import KvferryError


class _Waiting(NamedTuple):
    steps: Iterator[None]
    then: Callable[[], None]
    still_waits: Callable[[], bool]
    guarded: Callable[[], AbstractContextManager[None]]
    """Around what may raise: it has who waits end."""
    call: Call | None = None
    """Of a request; None for an operation."""


class SpaceWaiter:
    """Operations and requests that wait for space in the host tier, in turns. For the control loop."""

    def __init__(self, dispatcher: Dispatcher, operations: Operations) -> None:
        self._dispatcher = dispatcher
        self._operations = operations
        self._waiting: deque[_Waiting] = deque()

    def __repr__(self) -> str:
        """Show how many wait."""
        return f"<SpaceWaiter waiting={len(self._waiting)}>"

    def make(self, operation: Operation, steps: Iterator[None], then: Callable[[], None]) -> None:
        """Make room for an operation in the next turns of the loop.

        Args:
            operation: it has begun, and waits.
            steps: end with those of ``HostTier.making_room``; the first one is done.
            then: called when they are done, unless the operation has ended; what they raise ends the operation.
        """
        operation.waits_for = "room in the host tier"
        self._wait(_Waiting(steps, then, lambda: operation.state is State.WAITING, lambda: self._guarded(operation)))

    def hold(self, call: Call, steps: Iterator[None], handle: Handler) -> None:
        """Handle a request that holds nothing yet once there is room, and answer it.

        Args:
            call: the request.
            steps: of ``HostTier.making_room``, of which the first one is done.
            handle: handles the request.
        """
        self._wait(
            _Waiting(
                steps,
                lambda: self._dispatcher.run_held(call, handle),
                lambda: call.session.is_pending(call.message_id) and not call.session.ended,
                lambda: self._answering(call),
                call,
            )
        )

    def held(self) -> list[Call]:
        """Return the requests that wait."""
        return [one.call for one in self._waiting if one.call is not None and one.still_waits()]

    def give_up(self, is_wanted: Callable[[Call], bool], error: KvferryError) -> bool:
        """Refuse the requests that wait and that ``is_wanted`` picks; return whether there was one."""
        found = [one for one in self.held() if is_wanted(one)]
        for one in found:  # once answered, it does not wait any more
            self._dispatcher.answer_error(one.session, one.message_id, error)
        return bool(found)

    def _wait(self, one: _Waiting) -> None:
        self._waiting.append(one)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        """Go a step for the first one, and have it wait behind the others."""
        first = self._waiting.popleft()
        if first.still_waits():
            with first.guarded():
                if next(first.steps, self) is not self:
                    self._waiting.append(first)
                else:
                    first.then()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._step)

    @contextlib.contextmanager
    def _guarded(self, operation: Operation) -> Iterator[None]:
        with self._operations.guarded(operation):
            try:
                yield
            except KvferryError as error:
                self._operations.give_up(operation, error)

    @contextlib.contextmanager
    def _answering(self, call: Call) -> Iterator[None]:
        try:
            yield
        except Exception as cause:  # noqa: BLE001  there cannot be room any more, or a bug
            self._dispatcher.answer_failure(call, cause)

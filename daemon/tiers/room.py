"""Room in the host tier for operations that need more than is free: blocks are evicted for them a few at a time.

To evict a block takes some 15 us, and a long prompt has thousands of them: all other engines would wait for that. So
an operation that has begun, and holds its pages, waits until they have gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvferry.daemon.tiers.operations import Operation, Operations, State
from kvferry.protocol.errors import KvferryError


class _Waiting(NamedTuple):
    operation: Operation
    steps: Iterator[None]
    then: Callable[[], None]


class Room:
    """Operations that wait for room, in turns. For the control loop."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._waiting: deque[_Waiting] = deque()

    def __repr__(self) -> str:
        """Show how many operations wait."""
        return f"<Room waiting={len(self._waiting)}>"

    def make(self, operation: Operation, steps: Iterator[None], then: Callable[[], None]) -> None:
        """Make room for an operation in the next turns of the loop.

        Args:
            operation: it has begun, and waits.
            steps: of ``HostTier.making_room``, of which the first one is done.
            then: called when they are done, unless the operation has ended; what it raises ends the operation.
        """
        operation.waits_for = "room in the host tier"
        self._waiting.append(_Waiting(operation, steps, then))
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        """Go a step for the first one, and have it wait behind the others."""
        first = self._waiting.popleft()
        if first.operation.state is State.WAITING:
            with self._operations.guarded(first.operation):
                if next(first.steps, self) is not self:
                    self._waiting.append(first)
                else:
                    self._go_on(first)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._step)

    def _go_on(self, one: _Waiting) -> None:
        try:
            one.then()
        except KvferryError as error:
            self._operations.give_up(one.operation, error)

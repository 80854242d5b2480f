"""What is due when. Knows nothing of what that is, and keeps nothing alive that has been dropped."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

FEW = 16

T = TypeVar("T")


class Deadlines(Generic[T]):
    """One deadline for each of some hashable things, in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # may name numbers that are no more: at most as many as live, and few
        self._things: dict[int, T] = {}
        self._numbers: dict[T, int] = {}
        self._next_numbers = itertools.count()

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<Deadlines {len(self._things)}>"

    def set(self, thing: T, deadline_at: float) -> None:
        """Let a thing be due at this time, and at no other."""
        self.drop(thing)
        number = self._numbers[thing] = next(self._next_numbers)
        self._things[number] = thing
        heapq.heappush(self._heap, (deadline_at, number))
        if len(self._heap) > FEW + 2 * len(self._things):
            self._heap = [one for one in self._heap if one[1] in self._things]
            heapq.heapify(self._heap)

    def drop(self, thing: T) -> None:
        """Let a thing not be due any more, if it was."""
        number = self._numbers.pop(thing, None)
        if number is not None:
            del self._things[number]

    def due(self, now: float) -> Iterator[T]:
        """Yield, and drop, what is due, earliest first. Others may be set and dropped meanwhile."""
        while self._heap and self._heap[0][0] <= now:
            thing = self._things.get(heapq.heappop(self._heap)[1])
            if thing is not None:
                self.drop(thing)
                yield thing

    def next(self) -> float | None:
        """Return when the next one is due, or None."""
        while self._heap and self._heap[0][1] not in self._things:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

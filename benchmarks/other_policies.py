"""Eviction policies that the daemon does not have: what its own are compared with, on a simulated cache.

They follow their papers, with exact counts instead of sketches, and where a paper leaves a share open it is chosen by
the first half of a trace. Keys are evicted one by one: a caller removes each victim, or skips it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Final

from kvferry.pools.tiers.policies import EvictionPolicy
from kvferry.pools.tiers.reuse_policy import Place

MOST_USES: Final = 3
"""S3-FIFO counts so far."""

Queue = OrderedDict[int, None]


class Sieve:
    """SIEVE (Zhang et al., NSDI '24): a queue that a hand sweeps from the oldest to the newest, over and over.

    A hit marks its key. The hand clears the mark of a marked key and moves on; an unmarked one is the victim.
    The queue begins where the hand is: what it has passed lies behind the newest, up to where a sweep begins.
    """

    def __init__(self) -> None:
        self._ahead: Queue = OrderedDict()
        self._behind: Queue = OrderedDict()
        self._marked: set[int] = set()

    def __len__(self) -> int:
        """Return how many keys there are."""
        return len(self._ahead) + len(self._behind)

    def add(self, key: int, place: Place) -> None:  # noqa: ARG002  it knows no prefixes
        """Add a new key as the newest, without a mark."""
        self._ahead[key] = None

    def hit(self, key: int) -> None:
        """Mark a key."""
        self._marked.add(key)

    def remove(self, key: int) -> None:
        """Remove a key."""
        self._marked.discard(key)
        (self._ahead if key in self._ahead else self._behind).pop(key)

    def victims(self) -> Iterator[int]:
        """Yield unmarked keys as the hand reaches them; a skipped key is passed like a marked one."""
        passed: set[int] = set()
        for _ in range(2 * len(self)):
            if not self._ahead:
                self._ahead, self._behind = self._behind, self._ahead
            key = next(iter(self._ahead), None)
            if key is None:
                return
            if key in self._marked:
                self._marked.remove(key)
            elif key not in passed:
                passed.add(key)
                yield key
            if key in self._ahead:
                del self._ahead[key]
                self._behind[key] = None


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP '23): a small queue, which sorts out what is asked for once, before the main one.

    What the small queue has sent away is remembered, as many keys as there are in the main one; whoever comes back goes
    to the main queue at once.
    """

    def __init__(self, small_share: float) -> None:
        """``small_share`` of all keys are in the small queue."""
        self._small_share = small_share
        self._small: Queue = OrderedDict()
        self._main: Queue = OrderedDict()
        self._ghosts: Queue = OrderedDict()
        self._uses: dict[int, int] = {}

    def __len__(self) -> int:
        """Return how many keys there are."""
        return len(self._uses)

    def add(self, key: int, place: Place) -> None:  # noqa: ARG002  it knows no prefixes
        """Add a new key to one of the queues."""
        self._uses[key] = 0
        known = self._ghosts.pop(key, self) is not self
        (self._main if known else self._small)[key] = None

    def hit(self, key: int) -> None:
        """Count a use."""
        self._uses[key] = min(MOST_USES, self._uses[key] + 1)

    def remove(self, key: int) -> None:
        """Remove a key; one of the small queue is remembered."""
        del self._uses[key]
        if key not in self._small:
            del self._main[key]
            return
        del self._small[key]
        self._ghosts[key] = None
        while len(self._ghosts) > len(self):
            self._ghosts.popitem(last=False)

    def victims(self) -> Iterator[int]:
        """Yield keys in eviction order, and move used ones on meanwhile."""
        passed: set[int] = set()
        while True:
            small, main = _first(self._small, passed), _first(self._main, passed)
            if small is None and main is None:
                return
            is_small = len(self._small) > self._small_share * len(self)
            key = main if small is None or (main is not None and not is_small) else small
            assert key is not None
            yield from self._look_at(key, passed)

    def _look_at(self, key: int, passed: set[int]) -> Iterator[int]:
        uses = self._uses[key]
        if key in self._small and uses > 1:
            del self._small[key]
            self._main[key] = None
            self._uses[key] = 0
        elif key in self._main and uses:
            self._uses[key] -= 1
            self._main.move_to_end(key)
        else:
            passed.add(key)
            yield key


class WTinyLfu:
    """W-TinyLFU (Einziger et al., 2017): a small LRU window; what leaves it must be used more than who makes way.

    The main part is a segmented LRU: keys on probation, and those that were used there, four fifths of it at most.
    """

    def __init__(self, window_share: float) -> None:
        """``window_share`` of all keys are in the window."""
        self._window_share = window_share
        self._window: Queue = OrderedDict()
        self._probation: Queue = OrderedDict()
        self._protected: Queue = OrderedDict()
        self._counts: dict[int, int] = {}
        self._counted = 0

    def __len__(self) -> int:
        """Return how many keys there are."""
        return len(self._window) + len(self._probation) + len(self._protected)

    def add(self, key: int, place: Place) -> None:  # noqa: ARG002  it knows no prefixes
        """Add a new key to the window, whose oldest ones go on probation."""
        self._count(key)
        self._window[key] = None
        while len(self._window) > 1 + self._window_share * len(self):
            self._probation[self._window.popitem(last=False)[0]] = None

    def hit(self, key: int) -> None:
        """Count a use; a key on probation becomes a protected one."""
        self._count(key)
        for queue in (self._window, self._protected):
            if key in queue:
                queue.move_to_end(key)
                return
        del self._probation[key]
        self._protected[key] = None
        while len(self._protected) > 0.8 * (len(self._probation) + len(self._protected)):
            self._probation[self._protected.popitem(last=False)[0]] = None

    def remove(self, key: int) -> None:
        """Remove a key."""
        for queue in (self._window, self._probation, self._protected):
            queue.pop(key, None)

    def victims(self) -> Iterator[int]:
        """Yield whichever was used less often, of the newest and the oldest one on probation."""
        passed: set[int] = set()
        while (oldest := _first(self._probation, passed)) is not None:
            newest = _first(reversed(self._probation), passed)
            assert newest is not None
            more = self._counts.get(newest, 0) > self._counts.get(oldest, 0)
            passed.add(oldest if more else newest)
            yield oldest if more else newest
        for queue in (self._protected, self._window):
            while (oldest := _first(queue, passed)) is not None:
                passed.add(oldest)
                yield oldest

    def _count(self, key: int) -> None:
        self._counts[key] = self._counts.get(key, 0) + 1
        self._counted += 1
        if self._counted > 10 * max(len(self), 100):
            self._counted = 0
            self._counts = {key: count // 2 for key, count in self._counts.items() if count > 1}


class Gdsf:
    """GreedyDual-Size-Frequency (Cherkasova, 1998) for blocks of one size: uses, plus the age of the cache."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[float, int]] = {}
        self._uses: dict[int, int] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._age = 0.0
        self._number = 0

    def __len__(self) -> int:
        """Return how many keys there are."""
        return len(self._values)

    def add(self, key: int, place: Place) -> None:  # noqa: ARG002  it knows no prefixes
        """Add a new key."""
        self._uses[key] = 0
        self.hit(key)

    def hit(self, key: int) -> None:
        """Count a use."""
        self._uses[key] += 1
        self._number += 1
        value = self._age + self._uses[key], self._number
        self._values[key] = value
        heapq.heappush(self._heap, (*value, key))

    def remove(self, key: int) -> None:
        """Remove a key; the cache is as old as its value."""
        self._age = max(self._age, self._values.pop(key)[0])
        del self._uses[key]

    def victims(self) -> Iterator[int]:
        """Yield the key of the least value, and so on."""
        skipped = []
        try:
            while self._heap:
                one = heapq.heappop(self._heap)
                if self._values.get(one[2]) != one[:2]:
                    continue
                skipped.append(one)
                yield one[2]
        finally:
            for one in skipped:
                if self._values.get(one[2]) == one[:2]:
                    heapq.heappush(self._heap, one)


def _first(queue: Iterable[int], passed: set[int]) -> int | None:
    return next((key for key in queue if key not in passed), None)


OTHERS: Final[Mapping[str, Mapping[str, Callable[[], EvictionPolicy[int]]]]] = {
    "sieve": {"": Sieve},
    "s3-fifo": {f"{percent} %": partial(S3Fifo, percent / 100) for percent in (5, 10, 30)},
    "w-tinylfu": {f"{percent} %": partial(WTinyLfu, percent / 100) for percent in (1, 10, 30)},
    "gdsf": {"": Gdsf},
}
"""Each policy with the settings of which the first half of a trace chooses one."""

"""How many threads copy one large operation: found by trying, since it is the memory that limits copies, not the cores.

On one machine a second thread brings nothing, on another one eight are six times as fast as one; and what more threads
do not bring, others could do with those cores meanwhile. So operations that run alone are copied by one, two, four …
threads in turns, and the fewest that are about as fast as the best are taken. After a while all are tried anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

TRIES: Final = 3
WORTH: Final = 1.1
"""How much faster more threads must be."""

AGAIN_S: Final = 60.0
OLDER_IS_WORSE: Final = 0.95
"""What a speed counts once everything is tried anew: a lucky moment must not decide for ever."""

MIN_BYTES: Final = 32 << 20
"""Less says little of how fast the memory is."""


class Trial(NamedTuple):
    """One operation with so many threads; ``counts`` is False where others run, or where it is too small."""

    kind: Hashable
    threads: int
    began_s: float
    size_bytes: int
    counts: bool


class _Tried:
    """What is known of one number of threads."""

    def __init__(self) -> None:
        self.tries = 0
        self.best_bytes_s = 0.0


class ThreadCount:
    """Chooses for each operation, by its kind; what is called by several threads needs their lock."""

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._counts = sorted({1 << power for power in range(most.bit_length())} | {most})
        self._tried: dict[Hashable, dict[int, _Tried]] = {}
        self._tried_s: dict[Hashable, float] = {}

    def __repr__(self) -> str:
        """Show the best number of each kind."""
        return f"<ThreadCount {', '.join(f'{kind}: {self.best(kind)}' for kind in self._tried)}>"

    def best(self, kind: Hashable) -> int:
        """Return the fewest threads that are about as fast as the best; what was never tried is all."""
        tried = self._tried.get(kind)
        if tried is None or not all(one.best_bytes_s for one in tried.values()):
            return self._counts[-1]
        chosen = self._counts[0]
        for count in self._counts[1:]:
            if tried[count].best_bytes_s >= WORTH * tried[chosen].best_bytes_s:
                chosen = count
        return chosen

    def begin(self, kind: Hashable, size_bytes: int, *, alone: bool) -> Trial:
        """Return how many threads an operation is to have; only one that is ``alone`` at the moment is a trial."""
        now_s = self._clock()
        counts = alone and size_bytes >= MIN_BYTES
        return Trial(kind, self._untried(kind, now_s) if counts else self.best(kind), now_s, size_bytes, counts)

    def end(self, trial: Trial) -> None:
        """Take note that an operation has ended well, alone all the time if it ``counts``."""
        now_s = self._clock()
        elapsed_s = now_s - trial.began_s
        if not trial.counts or elapsed_s <= 0:
            return
        one = self._of(trial.kind)[trial.threads]
        if one.tries >= TRIES:
            return
        one.tries += 1
        one.best_bytes_s = max(one.best_bytes_s, trial.size_bytes / elapsed_s)
        self._tried_s[trial.kind] = now_s

    def _of(self, kind: Hashable) -> dict[int, _Tried]:
        return self._tried.setdefault(kind, {count: _Tried() for count in self._counts})

    def _untried(self, kind: Hashable, now_s: float) -> int:
        """Return the number that was tried the least, and too seldom; else the best one."""
        tried = self._of(kind)
        if all(one.tries >= TRIES for one in tried.values()):
            if now_s - self._tried_s[kind] < AGAIN_S:
                return self.best(kind)
            for one in tried.values():
                one.tries = 0
                one.best_bytes_s *= OLDER_IS_WORSE
        return min(self._counts, key=lambda count: tried[count].tries)

"""How many threads copy one large operation: found by trying, since memory limits copies, not cores.

On one machine a second thread gains nothing, on another eight are six times as fast as one; and useless threads take
cores from others. So operations that run alone are copied by one, two, four … threads in turns, and the fewest that are
about as fast as the best are taken. After a while all are tried anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Final, Literal, NamedTuple

TRIES: Final = 6
"""The first ones say little: the copy kernel tries its variants meanwhile."""

WORTH: Final = 1.1
"""How much faster more threads must be."""

AGAIN_S: Final = 60.0
TRIES_AGAIN: Final = 2
OLDER_IS_WORSE: Final = 0.95
"""What a speed counts once everything is tried anew: a lucky moment must not decide for ever."""

MIN_BYTES: Final = 32 << 20
"""Less says little of how fast the memory is."""


LONG_BLOCK_BYTES: Final = 64 << 10


def length_of(size_bytes: int, blocks: int) -> Literal["long", "short"]:
    """Return how an operation's kind names its blocks: a thread waits for short ones more than for long ones."""
    return "long" if size_bytes >= LONG_BLOCK_BYTES * blocks else "short"


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
        count = self._untried(kind, now_s) if alone and size_bytes >= MIN_BYTES else None
        return Trial(kind, self.best(kind) if count is None else count, now_s, size_bytes, count is not None)

    def end(self, trial: Trial) -> None:
        """Take note that an operation has ended well, alone all the time if it ``counts``."""
        elapsed_s = self._clock() - trial.began_s
        if trial.counts and elapsed_s > 0:
            one = self._of(trial.kind)[trial.threads]
            one.best_bytes_s = max(one.best_bytes_s, trial.size_bytes / elapsed_s)

    def _of(self, kind: Hashable) -> dict[int, _Tried]:
        if kind not in self._tried:
            self._tried[kind] = {count: _Tried() for count in self._counts}
        return self._tried[kind]

    def _untried(self, kind: Hashable, now_s: float) -> int | None:
        """Return the number that was tried the least, which is one try more; None where each was tried often enough.

        A try that others disturb is one, too: who is seldom alone would otherwise try the same number for ever.
        """
        tried = self._of(kind)
        if all(one.tries >= TRIES for one in tried.values()):
            if now_s - self._tried_s[kind] < AGAIN_S:
                return None
            for one in tried.values():
                one.tries = TRIES - TRIES_AGAIN
                one.best_bytes_s *= OLDER_IS_WORSE
        count = min(self._counts, key=lambda count: tried[count].tries)
        tried[count].tries += 1
        self._tried_s[kind] = now_s
        return count

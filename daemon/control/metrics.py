"""Counters with stable names, shown by STATUS, and histograms; both are read as metrics. They only grow."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

SECONDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0,
)  # fmt: skip
"""Upper bounds of buckets for times, from a small copy to a request's deadline."""


class Distribution(NamedTuple):
    """What a histogram has seen: for each bound how many values were at most that, how many there were, their sum."""

    bounds: tuple[float, ...]
    at_most: tuple[int, ...]
    values: int
    total: float


class Histogram:
    """Counts values by buckets. For the control loop's thread only."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> Distribution:
        """Return what was seen so far."""
        *at_most, values = accumulate(self._counts)
        return Distribution(self._bounds, tuple(at_most), values, self._total)


class Counters:
    """Counts and times since the daemon started; they only grow. For the control loop's thread only."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._times: dict[str, Histogram] = {}

    def add(self, name: str, count: int = 1) -> None:
        """Add ``count`` to ``name``: dotted words, the noun first (``messages.malformed``)."""
        self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        """Return the counts so far, sorted by name."""
        return dict(sorted(self._counts.items()))

    def observe(self, name: str, seconds: float) -> None:
        """Count a time under ``name``, which is as one of a count; STATUS does not show it."""
        histogram = self._times.get(name)
        if histogram is None:
            histogram = self._times[name] = Histogram()
        histogram.observe(seconds)

    def times(self) -> dict[str, Distribution]:
        """Return the times so far, sorted by name."""
        return {name: one.snapshot() for name, one in sorted(self._times.items())}

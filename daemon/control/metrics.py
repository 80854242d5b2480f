"""Counters with stable names, shown by STATUS."""

from __future__ import annotations

from collections import Counter


class Counters:
    """Counts since the daemon started; they only grow. For the control loop's thread only."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Add ``count`` to ``name``: dotted words, the noun first (``messages.malformed``)."""
        self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        """Return the counts so far, sorted by name."""
        return dict(sorted(self._counts.items()))

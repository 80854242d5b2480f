"""Counters by stable names; they only grow. STATUS shows them."""

from __future__ import annotations

from collections import Counter


class Counters:
    """What has happened since the daemon started. For the control loop's thread only."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Count ``count`` more of ``name``: dotted words, the noun first (``messages.malformed``)."""
        self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        """Return the counts so far, sorted by name."""
        return dict(sorted(self._counts.items()))

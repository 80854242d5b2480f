"""Where the time of copies goes: how long each took and then waited to be handled, and when any byte was moving.

For the control loop. Knows the copies by their numbers alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, NamedTuple

from kvferry.daemon.control.metrics import Counters

Way = Literal["local", "pull", "network"]
MOST_GROUPS: Final = 16
"""Components whose bytes are counted by name; engines give the names."""

OTHER_GROUPS: Final = "others"


class _Copying(NamedTuple):
    way: Way
    began_s: float
    reported_s: float | None = None


class _Busy:
    """The time in which anything was under way."""

    def __init__(self) -> None:
        self.under_way = 0
        self.began_s = 0.0
        self.seconds = 0.0


class CopyTimes:
    """Counts ``stages.copied.WAY`` and ``stages.committed.WAY``, and bytes by way and by group."""

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.perf_counter) -> None:
        self._counters = counters
        self._clock = clock
        self._copying: dict[int, _Copying] = {}
        self._busy: dict[Way, _Busy] = {"local": _Busy(), "pull": _Busy(), "network": _Busy()}
        self._groups: set[str] = set()

    def __repr__(self) -> str:
        """Show how many copies are under way."""
        return f"<CopyTimes {len(self._copying)} copies>"

    def busy_seconds(self) -> Iterator[tuple[Way, float]]:
        """Yield how long so far at least one copy was under way, by way."""
        now_s = self._clock()
        for way, busy in self._busy.items():
            yield way, busy.seconds + (now_s - busy.began_s if busy.under_way else 0.0)

    def began(self, op_id: int, way: Way) -> None:
        """A copy begins."""
        now_s, busy = self._clock(), self._busy[way]
        if not busy.under_way:
            busy.began_s = now_s
        busy.under_way += 1
        self._copying[op_id] = _Copying(way, now_s)

    def reported(self, op_id: int) -> None:
        """No byte of a copy can move any more."""
        copying = self._copying.get(op_id)
        if copying is None or copying.reported_s is not None:
            return
        now_s, busy = self._clock(), self._busy[copying.way]
        self._copying[op_id] = copying._replace(reported_s=now_s)
        busy.under_way -= 1
        if not busy.under_way:
            busy.seconds += now_s - busy.began_s

    def ended(self, op_id: int, arrived: Iterable[tuple[str, int]] | None) -> float:
        """A copy's end was handled, with the bytes of each group that have arrived; None: it failed.

        Return how long it was under way, in seconds.
        """
        self.reported(op_id)
        copying = self._copying.pop(op_id, None)
        if copying is None or copying.reported_s is None:
            return 0.0
        way, copied_s = copying.way, copying.reported_s - copying.began_s
        if arrived is None:
            return copied_s
        self._counters.observe(f"stages.copied.{way}", copied_s)
        self._counters.observe(f"stages.committed.{way}", self._clock() - copying.reported_s)
        for group, size_bytes in arrived:
            self._counters.add(f"copies.{way}.bytes", size_bytes)
            self._counters.add(f"copies.groups.{self._name_of(group)}", size_bytes)
        return copied_s

    def _name_of(self, group: str) -> str:
        if group not in self._groups and len(self._groups) >= MOST_GROUPS:
            return OTHER_GROUPS
        self._groups.add(group)
        return group

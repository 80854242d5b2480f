"""Whether a lower tier stores blocks, and how long that takes: for STATUS, and for the log at a bounded rate."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, get_args

import structlog

LOG_INTERVAL_S: Final = 30.0
SLOW_S: Final = 0.1
SLOW_BYTES_S: Final = 50e6
"""A block should take no longer than SLOW_S, and what its bytes take at this rate: a single hard disk does that."""

JUDGED: Final = 8
"""Blocks, of which the mean counts."""

FEW: Final = 3
"""Blocks; after fewer no tier is called slow."""

FORGOTTEN_S: Final = 300.0
"""What is older does not count."""

Way = Literal["write", "read", "sync"]
"""A sync is of many blocks: their mean counts as one."""

WAYS: Final[tuple[Way, ...]] = get_args(Way)
log = structlog.get_logger(__name__)


class _Taken(NamedTuple):
    at_s: float
    seconds: float
    allowed_s: float


class TierHealth:
    """The writes of one tier that have failed since one last succeeded, and how long its last blocks took."""

    def __init__(self, tier: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._tier = tier
        self._clock = clock
        self._failing = ""
        self._since_s = 0.0
        self._failed = 0
        self._logged_s = -math.inf
        self._logged = False
        self._taken: dict[Way, deque[_Taken]] = {way: deque(maxlen=JUDGED) for way in WAYS}
        self._said_slow = False

    def __repr__(self) -> str:
        """Show the state."""
        return f"<TierHealth {self._tier} {self.state}>"

    @property
    def state(self) -> str:
        """Return ``ready``, ``full``, or ``failing: `` or ``slow: `` and the cause."""
        return self._failing or self._slow() or "ready"

    def failed(self, state: str, remedy: str, *, patience_s: float = 0.0) -> None:
        """Note that a write failed; log that, now and then, where writes have failed for ``patience_s``."""
        now_s = self._clock()
        if not self._failing:
            self._since_s, self._failed = now_s, 0
        self._failing = state
        self._failed += 1
        if now_s - self._since_s >= patience_s and now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s, self._logged = now_s, True
            log.warning(
                "a tier does not store blocks", tier=self._tier, cause=state, failed=self._failed, remedy=remedy
            )

    def succeeded(self) -> None:
        """Note that a write succeeded."""
        if self._logged:
            log.info("a tier stores blocks again", tier=self._tier, failed=self._failed)
        self._failing, self._logged = "", False

    def took(self, way: Way, seconds: float, size_bytes: int) -> None:
        """Note how long the tier itself took for a block; log when it becomes slow, and when it no longer is."""
        self._taken[way].append(_Taken(self._clock(), seconds, SLOW_S + size_bytes / SLOW_BYTES_S))
        slow = self._slow()
        if slow and not self._said_slow:
            log.warning(
                "a tier is slow",
                tier=self._tier,
                cause=slow,
                remedy="look at what else uses the disk or the network (iostat -x, sar -n DEV); blocks stay in memory",
            )
        elif self._said_slow and not slow:
            log.info("a tier is as fast as it should be again", tier=self._tier)
        self._said_slow = bool(slow)

    def mean_us(self, way: Way) -> int:
        """Return how long the last blocks took on average; 0: there was none lately."""
        lately = self._lately(way)
        return round(sum(one.seconds for one in lately) / len(lately) * 1e6) if lately else 0

    def _lately(self, way: Way) -> list[_Taken]:
        since_s = self._clock() - FORGOTTEN_S
        return [one for one in self._taken[way] if one.at_s >= since_s]

    def _slow(self) -> str:
        for way in WAYS:
            lately = self._lately(way)
            allowed_s = sum(one.allowed_s for one in lately)
            if len(lately) >= FEW and sum(one.seconds for one in lately) > allowed_s:
                return (
                    f"slow: the last {len(lately)} {way}s took {self.mean_us(way) / 1000:.0f} ms a block, "
                    f"{1000 * allowed_s / len(lately):.0f} ms would do"
                )
        return ""

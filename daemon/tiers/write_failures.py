"""What keeps a lower tier from storing blocks: for STATUS, and for the log at a bounded rate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

import structlog

LOG_INTERVAL_S: Final = 30.0
log = structlog.get_logger(__name__)


class WriteFailures:
    """The writes of one tier that have failed since one last succeeded."""

    def __init__(self, tier: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = ""
        """``full``, or ``failing: `` and the cause; empty while writes succeed."""
        self._tier = tier
        self._clock = clock
        self._since_s = 0.0
        self._failed = 0
        self._logged_s = -math.inf
        self._logged = False

    def __repr__(self) -> str:
        """Show the state."""
        return f"<WriteFailures {self._tier} {self.state or 'none'}>"

    def failed(self, state: str, remedy: str, *, patience_s: float = 0.0) -> None:
        """Note that a write failed; log that, now and then, where writes have failed for ``patience_s``."""
        now_s = self._clock()
        if not self.state:
            self._since_s, self._failed = now_s, 0
        self.state = state
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
        self.state, self._logged = "", False

"""The log of refused requests: one line a second for each cause, however many engines are refused."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import structlog

from kvferry.protocol.errors import ErrorInfo

INTERVAL_S: Final = 1.0
log = structlog.get_logger(__name__)


class Refusals:
    """Counts refusals by their code, and logs the first one of each second. For the control loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_s: dict[str, float] = {}
        self._since: Counter[str] = Counter()

    def __repr__(self) -> str:
        """Show how many refusals no line has told of."""
        return f"<Refusals untold={self._since.total()}>"

    def add(self, error: ErrorInfo, session: str = "") -> None:
        """Note a refusal, of this session if it has one."""
        code, now_s = error.code, self._clock()
        self._since[code] += 1
        if now_s - self._logged_s.get(code, now_s - INTERVAL_S) < INTERVAL_S:
            return
        self._logged_s[code] = now_s
        log.info(
            "requests refused",
            code=code,
            detail=error.detail,
            field=error.field,
            request_id=error.request_id,
            session=session,
            count=self._since.pop(code),
        )

"""How late the control loop is: a timer looks four times a second how long after its time it was called."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from kvferry.daemon.control.metrics import Histogram

INTERVAL_S: Final = 0.25


class LoopLag:
    """Watches the loop between ``start`` and ``close``.

    Attributes:
        seconds: by how much the timer was late.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.seconds = Histogram()
        self._loop = loop
        self._due_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        """Show how often it has looked."""
        return f"<LoopLag {self.seconds.snapshot().values} times>"

    def start(self) -> None:
        """Look from now on."""
        self._due_at = time.monotonic() + INTERVAL_S
        self._timer = self._loop.call_later(INTERVAL_S, self._look)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self.seconds.observe(max(0.0, time.monotonic() - self._due_at))
        self.start()

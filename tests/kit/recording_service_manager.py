"""A service manager that only listens."""

from __future__ import annotations

import asyncio

from kvferry.daemon.process.host import ServiceManager


class RecordingServiceManager(ServiceManager):
    """Keeps what the daemon says; sends nothing.

    Attributes:
        said: the states so far, in order: ``ready`` and ``stopping``.
        is_ready: set once the daemon serves.
        pings: how often the daemon has said that it is alive; it does where there is a ``watchdog_s``.
    """

    def __init__(self, watchdog_s: float | None = None) -> None:
        super().__init__({})
        self.watchdog_s = watchdog_s
        self.pings = 0
        self.said: list[str] = []
        self.is_ready = asyncio.Event()

    def ready(self, status: str) -> None:
        assert status
        self.said.append("ready")
        self.is_ready.set()

    def stopping(self) -> None:
        self.said.append("stopping")

    def alive(self) -> None:
        self.pings += 1

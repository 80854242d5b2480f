"""A service manager that only listens."""

from __future__ import annotations

import asyncio

from kvferry.daemon.process.host import ServiceManager


class RecordingServiceManager(ServiceManager):
    """Keeps what the daemon says; sends nothing.

    Attributes:
        said: the states so far, in order: ``ready`` and ``stopping``.
        is_ready: set once the daemon serves.
    """

    def __init__(self) -> None:
        super().__init__({})
        self.said: list[str] = []
        self.is_ready = asyncio.Event()

    def __repr__(self) -> str:
        """Show what was said."""
        return f"<RecordingServiceManager {self.said}>"

    def ready(self, status: str) -> None:
        """See ``ServiceManager.ready``."""
        assert status
        self.said.append("ready")
        self.is_ready.set()

    def stopping(self) -> None:
        """See ``ServiceManager.stopping``."""
        self.said.append("stopping")

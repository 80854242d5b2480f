"""Work on the control loop that outlives the request it began with: kept until it is done, and never lost silently."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import structlog

log = structlog.get_logger(__name__)


class Background:
    """The tasks of one service."""

    def __init__(self, what: str) -> None:
        """Call them ``what`` in the log."""
        self._what = what
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        """Show how many run."""
        return f"<Background {self._what} {len(self._tasks)}>"

    def __len__(self) -> int:
        """Return how many run."""
        return len(self._tasks)

    def spawn(self, operation: Coroutine[None, None, None]) -> None:
        """Begin a task; one that raises is logged."""
        task = asyncio.create_task(operation)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Cancel what still runs, and wait for its end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("work in the background failed", what=self._what, exc_info=task.exception())

"""Tasks on the control loop that outlive the request that started them: tracked until done, with errors logged."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import structlog

log = structlog.get_logger(__name__)


class Background:
    """The tasks of one service."""

    def __init__(self, what: str) -> None:
        """Name the tasks ``what`` in the log."""
        self._what = what
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        """Show how many are running."""
        return f"<Background {self._what} {len(self._tasks)}>"

    def __len__(self) -> int:
        """Return how many are running."""
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        """Start a task; an exception it raises is logged."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Cancel the running tasks and wait for them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task failed", what=self._what, exc_info=task.exception())

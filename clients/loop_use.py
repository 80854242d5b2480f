"""An asynchronous client is used on the event loop that connected it, in the process that opened it.

See ``ExclusiveUse`` for the synchronous client.
"""

from __future__ import annotations

import asyncio
import os
from types import TracebackType

from kvferry.clients.exclusive_use import check_process
from kvferry.protocol.errors import ClientClosedError, ConcurrentUseError


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class LoopUse:
    """A context in which every call of an asynchronous client is started.

    Attributes:
        closed: set once the client is closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pid = os.getpid()
        self.closed = False

    def __repr__(self) -> str:
        """Show the loop."""
        return f"<LoopUse {self._loop!r}{' closed' if self.closed else ''}>"

    def __enter__(self) -> None:
        """Check that a call may be made from here.

        Raises:
            ForkedError: this is a child of the client's process.
            ConcurrentUseError: no event loop runs in this thread, or another one than the client's.
            ClientClosedError: the client is closed.
        """
        check_process(self._pid)
        loop = running_loop()
        if loop is not self._loop:
            where = "another event loop" if loop else "a thread without a running event loop"
            raise ConcurrentUseError(f"the client was connected on {self._loop!r} and is called from {where}")
        if self.closed:
            raise ClientClosedError("the client was closed")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: awaited calls may interleave."""

    @property
    def in_child(self) -> bool:
        """Return whether this process was forked from the client's."""
        return os.getpid() != self._pid

"""A client is one conversation: one thread at a time has it, in the process that began it, until it is closed.

Two calls at a time would take each other's messages. They are refused instead of queued: a scheduler that only wants to
look must not wait until another thread's reply has come, and which of two threads that poll would hear of a transfer
nobody could say. What is refused has sent nothing, and the call that was under way goes on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, SupportsIndex

from kvferry.protocol.errors import ClientClosedError, ConcurrentUseError, ForkedError, MisuseError


def check_process(pid: int) -> None:
    """Check that this is the process of that number, and not a child of it.

    Raises:
        ForkedError: it is.
    """
    if os.getpid() != pid:
        raise ForkedError(f"process {pid} opened this client, not its child {os.getpid()}")


class OfOneProcess:
    """What can be neither copied nor pickled: a second one would share the first one's sockets and memory."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Say what to do instead.

        Raises:
            MisuseError: always.
        """
        kind = type(self).__name__
        raise MisuseError(
            f"{kind} belongs to the process that made it, and is neither copied nor pickled: hand the runtime_dir and "
            "the pool's name to the other process, connect and attach there"
        )


class ExclusiveUse:
    """Every call of a client is made ``with`` this. A client may change threads between two calls."""

    def __init__(self, end: Callable[[], None], release: Callable[[], None]) -> None:
        """Once, when the client is closed, call ``end`` at once, and ``release`` as soon as no call is under way."""
        self._end = end
        self._release = release
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._user = 0
        self._closing = False

    def __repr__(self) -> str:
        """Show whether a call is under way, or the client closed."""
        return f"<ExclusiveUse {'closed' if self._closing else 'busy' if self._lock.locked() else 'idle'}>"

    def __enter__(self) -> None:
        """Begin a call.

        Raises:
            ForkedError: this is a child of the client's process.
            ConcurrentUseError: another call is under way.
            ClientClosedError: the client is closed.
        """
        if os.getpid() != self._pid:
            check_process(self._pid)
        if not self._lock.acquire(blocking=False):
            if self._closing:
                raise ClientClosedError("the client is being closed")
            raise ConcurrentUseError(_both(threading.get_ident(), self._user))
        if self._closing:
            self._lock.release()
            self._release_once()
            raise ClientClosedError("the client was closed")
        self._user = threading.get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End a call."""
        self._lock.release()
        if self._closing:
            self._release_once()

    @property
    def in_child(self) -> bool:
        """Return whether this process was forked from the client's."""
        return os.getpid() != self._pid

    @property
    def closing(self) -> bool:
        """Return whether the client is closed, or will be when the call that is under way ends."""
        return self._closing

    def close(self) -> None:
        """Allow no further call; any thread may say so. Closing twice does nothing."""
        if not self._closing:
            self._closing = True
            self._end()
        self._release_once()

    def _release_once(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                release, self._release = self._release, _nothing
                release()
            finally:
                self._lock.release()


def _both(thread: int, user: int) -> str:
    if thread == user:
        return (
            f"{_name(thread)} is in a call of this client already: a signal handler or a finalizer calls it, or a "
            "signal's exception broke that call off, and the client is to be closed"
        )
    return f"{_name(thread)} calls a client that {_name(user)} calls"


def _name(thread: int) -> str:
    names = {one.ident: one.name for one in threading.enumerate()}
    return f"thread {names.get(thread, thread)!r}"


def _nothing() -> None:
    """Do nothing: everything was given back."""

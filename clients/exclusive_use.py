"""A client is one conversation: it is used by one thread at a time, in the process that opened it, until it is closed.

Two concurrent calls would take each other's messages. The second is refused instead of queued: a scheduler that only
polls must not block on another thread's reply, and if two threads polled, it would be random which of them learns of a
transfer. A refused call has sent nothing, and does not affect the call in progress.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, SupportsIndex

from kvferry.protocol.errors import ClientClosedError, ConcurrentUseError, ForkedError, MisuseError


class _Process:
    """Which process this is, without a call of the kernel's at each call of a client's.

    A fork that Python does not make is not noticed; nothing of Python's works after one.
    """

    pid = os.getpid()

    @classmethod
    def forked(cls) -> None:
        """Take note that this is a child."""
        cls.pid = os.getpid()


os.register_at_fork(after_in_child=_Process.forked)


def check_process(pid: int) -> None:
    """Check that this process has that id, and is not a forked child.

    Raises:
        ForkedError: it is a child.
    """
    if os.getpid() != pid:
        raise ForkedError(f"process {pid} opened this client, not its child {os.getpid()}")


class OfOneProcess:
    """Base of objects that can be neither copied nor pickled: a copy would share the original's sockets and memory."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse, and tell what to do instead.

        Raises:
            MisuseError: always.
        """
        kind = type(self).__name__
        raise MisuseError(
            f"{kind} belongs to the process that made it, and can be neither copied nor pickled: pass the runtime_dir "
            "and the pool's name to the other process, connect and attach there"
        )


class ExclusiveUse:
    """A context for every call of a client. A client may change threads between calls."""

    def __init__(self, end: Callable[[], None], release: Callable[[], None]) -> None:
        """When the client is closed, call ``end`` immediately, and ``release`` as soon as no call is in progress."""
        self._end = end
        self._release = release
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._user = 0
        self._closing = False

    def __repr__(self) -> str:
        """Show whether a call is in progress, or the client is closed."""
        return f"<ExclusiveUse {'closed' if self._closing else 'busy' if self._lock.locked() else 'idle'}>"

    def __enter__(self) -> None:
        """Begin a call.

        Raises:
            ForkedError: this is a child of the client's process.
            ConcurrentUseError: another call is in progress.
            ClientClosedError: the client is closed.
        """
        if _Process.pid != self._pid:
            check_process(self._pid)
        if not self._lock.acquire(False):  # noqa: FBT003  by name it costs twice as much
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
        """Return whether the client is closed, or will be when the call in progress ends."""
        return self._closing

    def close(self) -> None:
        """Refuse any further call. May be called from any thread. Closing twice does nothing."""
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
            f"{_name(thread)} is already in a call of this client: a signal handler or a finalizer calls it, or a "
            "signal's exception interrupted that call, and the client has to be closed"
        )
    return f"{_name(thread)} calls a client that is in use by {_name(user)}"


def _name(thread: int) -> str:
    names = {one.ident: one.name for one in threading.enumerate()}
    return f"thread {names.get(thread, thread)!r}"


def _nothing() -> None:
    """Do nothing: everything was released."""

"""Closes what a tenant has sent where nobody waits for it: closing may take as long as the tenant likes.

Whoever closes the last copy of a TCP socket waits for its peer, if the socket lingers; whoever closes a file of a FUSE
file system waits for its server. So the control loop never closes a descriptor that came, nor a socket in which there
may be one. Each tenant has one thread for it, while it has something to close, and what waits there counts as the
tenant's. Memory that the kernel keeps (``is_memory``) waits for nobody: it is closed anywhere.

Since Linux 6.16 a socket can refuse descriptors: ``access.pass_descriptors``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import termios
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from kvferry.daemon.process.descriptors import Descriptors

_COUNT_BYTES: Final = 4
log = structlog.get_logger(__name__)


def is_memory(fd: int) -> bool:
    """Return whether a descriptor is of memory that the kernel keeps: no call for it, and no close, can block."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # asks no file system
    except OSError:
        return False
    return True


def _on_a_thread(call: Callable[[], None]) -> None:
    threading.Thread(target=call, name="closer", daemon=True).start()


class _Waiting:
    """What is to be closed; counts as its tenant's while ``fd`` is not -1."""

    def __init__(self, fds: Sequence[int], channel: socket.socket | None) -> None:
        self.fd = 0
        self._fds = fds
        self._channel = channel

    def close(self) -> None:
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.close()
        self.fd = -1


class Closer:
    """Closes on threads that nobody waits for, one a tenant; for the control loop."""

    def __init__(
        self, descriptors: Descriptors, on_a_thread: Callable[[Callable[[], None]], None] = _on_a_thread
    ) -> None:
        """``on_a_thread`` begins a call that nobody waits for, or raises RuntimeError."""
        self._descriptors = descriptors
        self._on_a_thread = on_a_thread
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[_Waiting]] = {}
        self._running: set[int] = set()

    def __repr__(self) -> str:
        """Show how many tenants have something to close."""
        return f"<Closer of {len(self._waiting)} tenants>"

    def close(self, fds: Sequence[int], tenant: int) -> None:
        """Close descriptors that a tenant has sent."""
        if fds:
            self._add(_Waiting(fds, None), tenant, len(fds))

    def hang_up(self, channel: socket.socket, tenant: int) -> None:
        """Close a tenant's connection, in which there may be descriptors that were not read."""
        with contextlib.suppress(OSError):  # the other end is gone
            channel.shutdown(socket.SHUT_RDWR)  # from now on nothing more can be sent
        if any(fcntl.ioctl(channel, termios.FIONREAD, bytes(_COUNT_BYTES))):
            self._add(_Waiting((), channel), tenant, 1)
        else:
            channel.close()

    def _add(self, waiting: _Waiting, tenant: int, count: int) -> None:
        self._descriptors.promise(waiting, tenant, "sessions", count)
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(waiting)
            if tenant in self._running:
                return
            self._running.add(tenant)
        try:
            self._on_a_thread(lambda: self._close_all(tenant))
        except RuntimeError as cause:  # the next one that comes tries again
            self._running.discard(tenant)
            log.warning("no thread to close what a tenant has sent", tenant=tenant, cause=str(cause))

    def _close_all(self, tenant: int) -> None:
        while True:
            with self._lock:
                if not self._waiting[tenant]:
                    del self._waiting[tenant]
                    self._running.discard(tenant)
                    return
                first = self._waiting[tenant].popleft()
            first.close()

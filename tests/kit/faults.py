"""One catalogue of faults that tests do to processes, sockets and code; what breaks links is ``kit.tcp_proxy``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

END_MS: Final = 20_000
SOON_S: Final = 20.0


# -- processes


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Have a process do nothing meanwhile: what comes in this time it sees together. It may be killed."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def ending(pid: int) -> Iterator[None]:
    """Fail unless a process, which need not be a child, ends soon after this."""
    pidfd = os.pidfd_open(pid)
    try:
        yield
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(END_MS), f"process {pid} goes on"
    finally:
        os.close(pidfd)


def kill(pid: int) -> None:
    """Kill a process, which need not be a child, and wait for its end."""
    with ending(pid):
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def limited(pid: int, kind: int, most: int) -> Iterator[None]:
    """Lower a process's limit (``resource.RLIMIT_…``) meanwhile; it may end."""
    with contextlib.suppress(ProcessLookupError):
        before = resource.prlimit(pid, kind)
        resource.prlimit(pid, kind, (most, before[1]))
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, kind, before)
        return
    yield


# -- sockets


def connected(path: Path, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Return a bare connection to a Unix socket: what it says, and whether anything, is up to the test."""
    channel = socket.socket(socket.AF_UNIX, kind)
    channel.settimeout(SOON_S)
    try:
        channel.connect(os.fspath(path))
    except OSError:
        channel.close()
        raise
    return channel


@contextlib.contextmanager
def silent(path: Path, count: int) -> Iterator[list[socket.socket]]:
    """Connect so many times to a Unix socket, and say nothing."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connected(path)) for _ in range(count)]


def reset(pid: int, channels: Sequence[socket.socket]) -> None:
    """Reset connections, on which answers are unread, so that their process sees a last byte and the end together."""
    with stopped(pid):
        for channel in channels:
            channel.sendall(b"\0")
            channel.close()


# -- code and memory


class Once:
    """Raises at its first call, and does then what it stands for: for ``monkeypatch.setattr``, of methods too."""

    def __init__(self, instead_of: Callable[..., Any], error: type[Exception] = MemoryError) -> None:
        self.calls = 0
        self._instead_of = instead_of
        self._error = error

    def __get__(self, owner: object, kind: type[object]) -> Callable[..., Any]:
        """Be a method."""
        return partial(self, owner)

    def __call__(self, *arguments: Any, **more: Any) -> Any:  # noqa: ANN401
        """Raise, or not."""
        self.calls += 1
        if self.calls == 1:
            raise self._error("at first")
        return self._instead_of(*arguments, **more)


def flip_bit(address: int) -> None:
    """Damage a byte of this process's memory."""
    ctypes.c_uint8.from_address(address).value ^= 1

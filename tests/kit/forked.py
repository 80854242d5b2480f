"""Processes with torch, forked from one that has imported it: an import takes seconds, a fork milliseconds.

``Forked`` is started, watched and ended as ``subprocess.Popen`` is. On devices all programs are run so, with torch_npu;
on the host scripts of the tests alone: daemons and commands are started there as users start them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from kvferry.protocol.ids import HOST
from tests.kit.devices import DEVICE

PRELOADED: Final = ("torch", "kvferry.clients", "kvferry.daemon.daemon")
PRELOADED_FOR_DEVICES: Final = ("torch", "torch_npu", *PRELOADED[1:])
REPOSITORY: Final = Path(__file__).resolve().parents[2]
SERVER: Final = Path(__file__).with_name("fork_server.py")
START_S: Final = 240.0
_STATUS: Final = struct.Struct("<i")


class Forked:
    """A program, ``[FILE.py, ARGUMENT …]`` or ``["-m", MODULE, ARGUMENT …]``, in a process of its own.

    Attributes:
        pid: its number.
        returncode: as Popen's; None until its end was seen.
        stdin, stdout: pipes in text mode; None where not asked for.
    """

    def __init__(
        self,
        program: Sequence[str],
        environment: Mapping[str, str],
        *,
        stderr: int | None = None,
        pipes: bool = False,
        new_session: bool = False,
    ) -> None:
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        theirs = [os.open(os.devnull, os.O_RDONLY), os.dup(1), os.dup(2 if stderr is None else stderr)]
        if pipes:
            (read, write), (back_read, back_write) = os.pipe(), os.pipe()
            for place, fd in ((0, read), (1, back_write)):
                os.close(theirs[place])
                theirs[place] = fd
            self.stdin = os.fdopen(write, "w", buffering=1)
            self.stdout = os.fdopen(back_read)
        request = {"program": list(program), "environment": dict(environment), "new_session": new_session}
        try:
            self._ended, self.pid = _server().fork(json.dumps(request).encode(), theirs)
        finally:
            for fd in theirs:
                os.close(fd)

    def __repr__(self) -> str:
        """Show the process and how it ended."""
        return f"<Forked {self.pid} returncode={self.returncode}>"

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the pipes and wait for the end."""
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.wait()

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        with contextlib.suppress(TimeoutError):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, negative for a signal.

        Raises:
            TimeoutError: it runs still.
        """
        if self.returncode is None:
            self._ended.settimeout(timeout)
            try:
                said = self._ended.recv(_STATUS.size)
            except BlockingIOError:
                raise TimeoutError(repr(self)) from None
            self.returncode = os.waitstatus_to_exitcode(_STATUS.unpack(said)[0])
            self._ended.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Server:
    """The process that all are forked from; it ends with this one."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", os.fspath(SERVER), os.fspath(REPOSITORY)]
        with theirs:
            modules = PRELOADED if DEVICE.name == HOST else PRELOADED_FOR_DEVICES
            fd = theirs.fileno()
            self._process = subprocess.Popen([*command, str(fd), *modules], pass_fds=[fd])
        self._channel.settimeout(START_S)
        assert self._channel.recv(16) == b"ready"

    def fork(self, request: bytes, fds: Sequence[int]) -> tuple[socket.socket, int]:
        """Return a socket that tells how the process ends, and its number."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._channel, [request], [*fds, theirs.fileno()])
        return ours, _STATUS.unpack(ours.recv(_STATUS.size))[0]


@functools.cache
def _server() -> _Server:
    return _Server()

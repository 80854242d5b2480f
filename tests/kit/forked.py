"""Processes with torch, forked from one that has imported it: an import takes seconds, a fork milliseconds.

``Forked`` is started, watched and ended as ``subprocess.Popen`` is. On devices all programs are run so, with torch_npu;
on the host scripts of the tests alone: daemons and commands are started there as users start them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final, NoReturn, Self

from kvferry.protocol.ids import HOST
from tests.kit.devices import DEVICE

PRELOADED: Final = ("torch", "kvferry.clients", "kvferry.daemon.daemon")
PRELOADED_FOR_DEVICES: Final = ("torch", "torch_npu", *PRELOADED[1:])
REPOSITORY: Final = Path(__file__).resolve().parents[2]
START_S: Final = 240.0
_STATUS: Final = struct.Struct("<i")
_MAX_REQUEST: Final = 1 << 20


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
        command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {os.fspath(REPOSITORY)!r}); "]
        command[-1] += "from tests.kit.forked import main; main()"
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


def main() -> NoReturn:
    """Import modules, then serve on a socket, the first argument; in a child, run the program."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    channel.send(b"ready")
    program = _serve(channel)
    if program is None:
        sys.exit()
    random.seed()
    sys.argv = list(program)
    if program[0] == "-m":
        sys.argv = list(program[1:])
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")
    sys.exit()


def _serve(channel: socket.socket) -> Sequence[str] | None:
    """Fork for each request; return its program in a child, None here once nobody can ask any more."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(channel, selectors.EVENT_READ)
        children: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
        while True:
            for key, _ in waiting.select():
                if key.fileobj is not channel:
                    _bury(waiting, children, key.fd)
                    continue
                data, fds, _, _ = socket.recv_fds(channel, _MAX_REQUEST, 4)
                if not data:
                    return None
                *stdio, ended = fds
                pid = os.fork()
                if pid == 0:
                    for one in (channel.detach(), ended, *children, *(told.detach() for _, told in children.values())):
                        os.close(one)
                    return _become(json.loads(data), stdio)
                told = socket.socket(fileno=ended)
                told.send(_STATUS.pack(pid))
                pidfd = os.pidfd_open(pid)
                children[pidfd] = (pid, told)
                waiting.register(pidfd, selectors.EVENT_READ)
                for one in stdio:
                    os.close(one)


def _bury(waiting: selectors.BaseSelector, children: dict[int, tuple[int, socket.socket]], pidfd: int) -> None:
    pid, told = children.pop(pidfd)
    waiting.unregister(pidfd)
    os.close(pidfd)
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(BrokenPipeError), told:
        told.send(_STATUS.pack(status))


def _become(request: Mapping[str, object], stdio: Sequence[int]) -> Sequence[str]:
    if request["new_session"]:
        os.setsid()
    for place, fd in enumerate(stdio):
        os.dup2(fd, place)
        os.close(fd)
    os.environ.clear()
    environment, program = request["environment"], request["program"]
    assert isinstance(environment, dict)
    assert isinstance(program, list)
    os.environ.update(environment)
    return program

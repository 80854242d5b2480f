"""What ``forked`` forks programs from: ``fork_server.py REPOSITORY SOCKET MODULE …``; it imports no test code."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import runpy
import selectors
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

_STATUS: Final = struct.Struct("<i")
_MAX_REQUEST: Final = 1 << 20


def main() -> NoReturn:
    """Import the modules, then serve on the socket; in a child, run the program."""
    repository, fd, *modules = sys.argv[1:]
    sys.path.insert(0, repository)
    channel = socket.socket(fileno=int(fd))
    for name in modules:
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


if __name__ == "__main__":
    main()

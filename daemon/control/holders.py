"""Pipes whose writing ends go with mappings into forked children: the end of the last one is that of the last holder.

An engine that lets children inherit its pools passes the reading end of such a pipe. While the pipe is open somewhere,
a process may write to the pages that the engine had, though the engine is gone: they are not given to others.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat

from kvferry.daemon.control.sessions import Session
from kvferry.daemon.process.descriptors import Descriptors
from kvferry.protocol.errors import InvalidFieldError, OutOfDescriptorsError


class _Pipe:
    def __init__(self, fd: int, pid: int) -> None:
        self.fd = fd
        self.pid = pid

    def close(self) -> None:
        os.close(self.fd)
        self.fd = -1

    @property
    def is_held(self) -> bool:
        """Whether any process has its writing end; what is written does not matter, and is never read."""
        poll = select.poll()
        poll.register(self.fd, 0)
        return not poll.poll(0)


class Holders:
    """The pipes of all sessions, by the number of their instance; owns the descriptors."""

    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors
        self._pipes: dict[int, list[_Pipe]] = {}

    def __repr__(self) -> str:
        """Show how many instances have pipes."""
        return f"<Holders of {len(self._pipes)} instances>"

    def add(self, session: Session, fd: int) -> None:
        """Own the reading end of a session's pipe from now on, even if this raises.

        Raises:
            InvalidFieldError: it is none.
            OutOfDescriptorsError: its user has too many descriptors.
        """
        if not stat.S_ISFIFO(os.fstat(fd).st_mode) or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            os.close(fd)
            raise InvalidFieldError("HOLDERS needs the reading end of a pipe", field="holders")
        self.are_alive(session.owner_id)
        pipe = _Pipe(fd, session.peer.pid)
        try:
            self._descriptors.take(pipe, session.tenant, "sessions", 1)
        except OutOfDescriptorsError:
            pipe.close()
            raise
        self._pipes.setdefault(session.owner_id, []).append(pipe)

    def are_alive(self, owner_id: int) -> bool:
        """Return whether any process holds what the sessions of an instance had mapped; forget those that do not."""
        its = self._pipes.pop(owner_id, [])
        held = [one for one in its if one.is_held]
        for one in its:
            if one not in held:
                one.close()
        if held:
            self._pipes[owner_id] = held
        return bool(held)

    def inherits(self, owner_id: int) -> bool:
        """Return whether a session of the instance lets children inherit."""
        return owner_id in self._pipes

    def pids(self, owner_id: int) -> tuple[int, ...]:
        """Return the processes that had opened the sessions, and whose children hold the memory."""
        return tuple(one.pid for one in self._pipes.get(owner_id, ()))

    def close(self) -> None:
        """Close all descriptors."""
        for pipes in self._pipes.values():
            for one in pipes:
                one.close()
        self._pipes.clear()

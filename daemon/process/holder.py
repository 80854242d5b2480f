"""The holder: a process that does nothing but keep descriptors from one daemon for the next one.

``fd_store`` starts it as a program of its own, ``python -I -S holder.py DESCRIPTOR``, with a listening Unix socket. It
imports nothing but the standard library and reads none of the memory that it holds. One daemon at a time is connected;
the next one waits in the backlog until that one is gone. Each packet is a request, and is answered by one packet:

===============  ===================================================================================================
request          effect
===============  ===================================================================================================
PUT NAME         keep the descriptor that comes with it, under a name that is free
REMOVE NAME      close that descriptor, if there is one
LIST             answered by FD NAME with its descriptor for each of them, and then by OK
LEAVE SECONDS    if this daemon goes, wait only so long for the next one
END              end now
===============  ===================================================================================================

The answer is OK, or NO and why. A daemon need not wait for it: what it has sent counts, even if it ends before this
process comes to it. Without a daemon for ``HOLD_S``, or what LEAVE said, it ends, and the memory is free.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import struct
import sys
from typing import Final

HOLD_S: Final = 300.0
"""How long it waits for the next daemon after one that said nothing, as a killed one does."""

MAX_DESCRIPTORS: Final = 1024
MAX_PACKET_BYTES: Final = 256
_PR_SET_DUMPABLE: Final = 4
_CREDENTIALS: Final = struct.Struct("3i")
_FD_BYTES: Final = array.array("i").itemsize


class Holder:
    """Keeps descriptors by name, and serves one daemon at a time, until it is told to end or nobody comes."""

    def __init__(self, listener: socket.socket, hold_s: float = HOLD_S) -> None:
        self._listener = listener
        self._hold_s = hold_s
        self._wait_s = hold_s
        self._held: dict[str, int] = {}

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<Holder descriptors={len(self._held)}>"

    def serve(self) -> None:
        """Serve until told to end, or until no daemon comes in time."""
        told = False
        while not told and select.select([self._listener], [], [], self._wait_s)[0]:
            with contextlib.suppress(OSError), self._listener.accept()[0] as daemon:
                if _uid_of(daemon) == os.getuid():
                    self._wait_s = self._hold_s
                    told = self._serve(daemon)

    def _serve(self, daemon: socket.socket) -> bool:
        """Answer one daemon until it is gone; return whether it told the holder to end."""
        while True:
            data, fds, flags = _received(daemon)
            if not data:
                return False
            try:
                answer = self._answered(daemon, data, fds, truncated=bool(flags & socket.MSG_CTRUNC))
            finally:
                for fd in fds:  # those that were not kept
                    os.close(fd)
            with contextlib.suppress(OSError):  # it is gone; what it sent before counts
                daemon.send(answer)
            if data == b"END":
                return True

    def _answered(self, daemon: socket.socket, data: bytes, fds: list[int], *, truncated: bool) -> bytes:
        kind, _, rest = data.decode(errors="replace").partition(" ")
        if kind == "PUT":
            return b"NO it needs one descriptor" if truncated or len(fds) != 1 else self._put(rest, fds)
        if kind == "LEAVE" and rest.isdecimal():
            self._wait_s = min(float(rest), self._hold_s)
        elif kind == "LIST":
            for name, fd in self._held.items():
                socket.send_fds(daemon, [f"FD {name}".encode()], [fd])
        elif kind == "REMOVE":
            if rest in self._held:
                os.close(self._held.pop(rest))
        elif kind != "END":
            return b"NO such request"
        return b"OK"

    def _put(self, name: str, fds: list[int]) -> bytes:
        if name in self._held:
            return b"NO that name is taken"
        if len(self._held) >= MAX_DESCRIPTORS:
            return b"NO it holds as many as it may"
        self._held[name] = fds.pop()
        return b"OK"


def _received(daemon: socket.socket) -> tuple[bytes, list[int], int]:
    """Return the next packet, with its descriptors; b"" at the end."""
    most = MAX_PACKET_BYTES, socket.CMSG_SPACE(2 * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
    try:
        data, ancillary, flags, _ = daemon.recvmsg(*most)
    except ConnectionResetError:  # said once where it ended with answers unread; its packets are still there
        data, ancillary, flags, _ = daemon.recvmsg(*most)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) // _FD_BYTES * _FD_BYTES])
    return data, list(fds), flags


def _uid_of(channel: socket.socket) -> int:
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def main(arguments: list[str]) -> None:
    """Serve on the listening socket whose descriptor is given, detached from who started it."""
    done, ready = os.pipe()
    if os.fork():
        os.close(ready)
        os.read(done, 1)  # until the one that stays listens: whoever connects then is told its process
        os._exit(0)
    os.close(done)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with socket.socket(fileno=int(arguments[0])) as listener:
        listener.listen()
        os.close(ready)
        Holder(listener).serve()


if __name__ == "__main__":
    main(sys.argv[1:])

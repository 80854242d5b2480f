"""The process at the other end of a Unix socket, as reported by the kernel, and the detection of its end."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

from kvferry.daemon.control.sessions import Peer

_SO_PEERPIDFD: Final = 77
_CREDENTIALS: Final = struct.Struct("3i")


def peer_of(channel: socket.socket) -> Peer:
    """Return who connected (SO_PEERCRED)."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(credentials))


def pidfd_of(channel: socket.socket, peer: Peer) -> int:
    """Return a descriptor that becomes readable when the peer's process ends, or -1 if the kernel gives none.

    SO_PEERPIDFD (Linux 6.5) identifies the process that connected, even if its pid has been reused since.
    """
    try:
        return channel.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(peer.pid) if peer.pid > 0 else -1
    except OSError:
        return -1

"""Which process is at the other end of a Unix socket, by the kernel's word, and how its end is noticed."""

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
    """Return a descriptor that is readable once the peer's process has ended; -1 where the kernel shows none.

    SO_PEERPIDFD (Linux 6.5) names the process that connected, even if its number has been taken again since.
    """
    try:
        return channel.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(peer.pid) if peer.pid > 0 else -1
    except OSError:
        return -1

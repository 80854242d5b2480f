"""Where the daemon is, and a socket to it: for the clients, and for commands that must start fast.

Loads nothing that an engine's client needs beyond that.
"""

from __future__ import annotations

import os

import zmq

from kvferry.protocol.errors import AccessDeniedError, DaemonLostError
from kvferry.protocol.settings import CONTROL_SOCKET, control_address, default_runtime_dir

LAST_WORDS_MS = 50
"""How long a client listens for what the daemon said before it closed the session: it comes by another socket."""

REPLY_MARGIN_S = 2.0
"""How much longer than the request's own deadline a client waits for the daemon's word on it."""


def find_runtime_dir(runtime_dir: str | os.PathLike[str] | None) -> str:
    """Return the directory given, or the default one.

    Raises:
        DaemonLostError: no daemon has its sockets there.
        AccessDeniedError: this user may not use them.
    """
    path = os.fspath(runtime_dir) if runtime_dir else default_runtime_dir(os.environ)
    socket = os.path.join(path, CONTROL_SOCKET)  # noqa: PTH118  see ``protocol.settings``
    try:
        os.stat(socket)  # noqa: PTH116  the same
    except PermissionError as cause:
        raise AccessDeniedError(f"{path}: {cause.strerror}") from cause
    except OSError as cause:
        raise DaemonLostError(f"no daemon at {path}: {cause.strerror}") from cause
    if not os.access(socket, os.R_OK | os.W_OK):
        raise AccessDeniedError(f"{socket}: this user may not write to it")
    return path


def open_control_socket(
    context: zmq.Context[zmq.Socket[bytes]], runtime_dir: str | os.PathLike[str]
) -> zmq.Socket[bytes]:
    """Return a DEALER connected to the daemon of that directory."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)  # requests in flight are bounded by the daemon's limits
    socket.setsockopt(zmq.RCVHWM, 0)  # nothing the daemon says is dropped here
    socket.connect(control_address(runtime_dir))
    return socket

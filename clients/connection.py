"""What both shells do alike: finding the daemon, its control socket, and turning seconds into deadlines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import zmq

from kvferry.clients import arguments
from kvferry.clients.session_channel import SessionChannel
from kvferry.protocol.errors import AccessDeniedError, DaemonLostError
from kvferry.protocol.paths import CONTROL_SOCKET, control_address, default_runtime_dir

LAST_WORDS_MS = 50
"""How long a client listens for what the daemon said before it closed the session: it comes by another socket."""

REPLY_MARGIN_S = 2.0
"""How much longer than the request's own deadline a client waits for the daemon's word on it."""


class Connection(NamedTuple):
    """What a client is made of once the daemon has let it in."""

    runtime_dir: Path
    channel: SessionChannel | None
    devices: Mapping[str, str]


def find_runtime_dir(runtime_dir: Path | str | None) -> Path:
    """Return the directory given, or the default one.

    Raises:
        DaemonLostError: no daemon has its sockets there.
        AccessDeniedError: this user may not use them.
    """
    if not isinstance(runtime_dir, str | os.PathLike | None):
        raise arguments.wrong_kind(runtime_dir, "path", "runtime_dir")
    path = Path(runtime_dir) if runtime_dir else default_runtime_dir(os.environ)
    socket = path / CONTROL_SOCKET
    try:
        socket.stat()
    except PermissionError as cause:
        raise AccessDeniedError(f"{path}: {cause.strerror}") from cause
    except OSError as cause:
        raise DaemonLostError(f"no daemon at {path}: {cause.strerror}") from cause
    if not os.access(socket, os.R_OK | os.W_OK):
        raise AccessDeniedError(f"{socket}: this user may not write to it")
    return path


def open_control_socket(context: zmq.Context[zmq.Socket[bytes]], runtime_dir: Path) -> zmq.Socket[bytes]:
    """Return a DEALER connected to the daemon of that directory."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)  # requests in flight are bounded by the daemon's limits
    socket.setsockopt(zmq.RCVHWM, 0)  # nothing the daemon says is dropped here
    socket.connect(control_address(runtime_dir))
    return socket


def milliseconds(deadline_s: float) -> int:
    """Return a deadline as it travels: at least 1 ms.

    Raises:
        InvalidFieldError: it is no number of seconds.
    """
    return max(1, round(arguments.seconds(deadline_s, "deadline_s") * 1000))

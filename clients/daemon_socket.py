"""Where the daemon is, and a socket to it: for the clients, and for commands that must start fast.

Loads nothing that an engine's client needs beyond that.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

import zmq

from kvferry.protocol.errors import AccessDeniedError, DaemonLostError, InvalidFieldError
from kvferry.protocol.settings import CONTROL_SOCKET, control_address, runtime_dirs

LAST_WORDS_MS = 50
"""How long a client listens for what the daemon said before it closed the session: it comes by another socket."""

NOBLOCK, SNDMORE, POLLIN = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.POLLIN)  # an enum costs a microsecond a use

REPLY_MARGIN_S = 2.0
"""How much longer than the request's own deadline a client waits for the daemon's word on it."""


def find_runtime_dir(runtime_dir: str | os.PathLike[str] | None) -> str:
    """Return the directory of a daemon: the one given, or where daemons are by default; see ``choose``.

    It is absolute: a client that reconnects finds it wherever its process has gone.
    """
    return choose([absolute(one) for one in ((os.fspath(runtime_dir),) if runtime_dir else runtime_dirs(os.environ))])


def absolute(path: str) -> str:
    """Return a path that means the same after the process has changed its working directory.

    Raises:
        DaemonLostError: it is relative, and the working directory was deleted.
    """
    try:
        return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH117, PTH118
    except FileNotFoundError:
        raise DaemonLostError(f"no daemon at {path}: the working directory was deleted") from None


def choose(places: Sequence[str]) -> str:
    """Return the directory of the one daemon at the first of these places that has any.

    A place is a daemon's own directory, or holds those of several, as ``/run/kvferry`` does for the systemd unit.

    Raises:
        DaemonLostError: no daemon has its sockets there.
        AccessDeniedError: this user may not use them.
        InvalidFieldError: several daemons are there; names them.
    """
    for place in places:
        found = _daemons_at(place)
        if len(found) > 1:
            raise InvalidFieldError(
                f"{len(found)} daemons are in {place}: {', '.join(found)}",
                field="runtime_dir",
                remedy="name one of them: runtime_dir=, --runtime-dir or KVFERRY_RUNTIME_DIR",
            )
        if found:
            return _usable(found[0])
    raise DaemonLostError(f"no daemon at {', nor at '.join(places)}: {os.strerror(errno.ENOENT)}")


def _daemons_at(place: str) -> list[str]:
    """Return the directories of daemons there: those that this user may enter, if any."""
    if _has_socket(place) is not False:
        return [place]
    try:
        with os.scandir(place) as entries:
            below = sorted(one.path for one in entries if one.is_dir())
    except OSError:
        return []
    has = {one: _has_socket(one) for one in below}
    return [one for one in below if has[one]] or [one for one in below if has[one] is None]


def _has_socket(directory: str) -> bool | None:
    """Return whether it has a control socket; None where this user may not look."""
    try:
        os.stat(_control_socket(directory))  # noqa: PTH116  see ``protocol.settings``
    except PermissionError:
        return None
    except OSError:
        return False
    return True


def _control_socket(directory: str) -> str:
    return os.path.join(directory, CONTROL_SOCKET)  # noqa: PTH118  see ``protocol.settings``


def _usable(directory: str) -> str:
    if not _has_socket(directory):
        raise AccessDeniedError(f"{directory}: {os.strerror(errno.EACCES)}")
    path = _control_socket(directory)
    if not os.access(path, os.R_OK | os.W_OK):
        raise AccessDeniedError(f"{path}: this user may not write to it")
    return directory


def no_answer(runtime_dir: str | os.PathLike[str], timeout_s: float) -> DaemonLostError:
    """Return the error for a daemon that said nothing: whose sockets are there, or which was killed and left them."""
    import socket  # noqa: PLC0415  quick commands need it only here

    directory = os.fspath(runtime_dir)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as one:
        one.setblocking(False)  # noqa: FBT003  socket's own signature
        refused = one.connect_ex(_control_socket(directory)) == errno.ECONNREFUSED
    if refused:
        return DaemonLostError(f"no daemon answers at {directory}: it has ended and left its sockets")
    return DaemonLostError(
        f"the daemon at {directory} does not answer within {timeout_s:g} s, though its sockets are there",
        remedy="see whether it is stopped or hangs (ps, systemctl status, its log), and restart it; or wait longer",
    )


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


# -- messages. What pyzmq does in Python for these three looks options up by enums: where an engine's caches are cold,
# that is as much again as to send, and a third of receiving.


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[bytes | memoryview]) -> None:
    """Send a message, as ``send_multipart`` does."""
    for one in frames[:-1]:
        socket.send(one, NOBLOCK | SNDMORE)
    socket.send(frames[-1], NOBLOCK)


def receive_frames(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Return the frames of the next message, which is there, as ``recv_multipart`` does."""
    frame = socket.recv(NOBLOCK, copy=False)
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(NOBLOCK, copy=False)
        frames.append(frame.bytes)
    return frames


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message is there: the socket's descriptor tells of changes only.

    To ask costs little; to receive in vain raises, and what raises is slow where an engine's caches are cold.
    """
    return bool(zmq.zmq_poll([(socket, POLLIN)], 0))

"""What both shells do alike: finding the daemon, its control socket, and turning seconds into deadlines."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import zmq

from kvferry.clients import arguments, daemon_socket
from kvferry.clients.connecting import Closable
from kvferry.clients.daemon_socket import LAST_WORDS_MS, REPLY_MARGIN_S, open_control_socket
from kvferry.clients.session_channel import SessionChannel

__all__ = [
    "LAST_WORDS_MS",
    "REPLY_MARGIN_S",
    "Connection",
    "find_runtime_dir",
    "given_back_with",
    "milliseconds",
    "open_control_socket",
]


class Connection(NamedTuple):
    """What a client is made of once the daemon has let it in."""

    runtime_dir: str
    channel: SessionChannel | None
    devices: Mapping[str, str]


def find_runtime_dir(runtime_dir: str | os.PathLike[str] | None) -> str:
    """Return the directory given, or the default one.

    Raises:
        DaemonLostError: no daemon has its sockets there.
        AccessDeniedError: this user may not use them.
        InvalidFieldError: it is no path.
    """
    if not isinstance(runtime_dir, str | os.PathLike | None):
        raise arguments.wrong_kind(runtime_dir, "path", "runtime_dir")
    try:
        return daemon_socket.find_runtime_dir(runtime_dir)
    except (TypeError, ValueError):  # bytes of its own making, a NUL, half a surrogate pair
        raise arguments.wrong_kind(runtime_dir, "path", "runtime_dir") from None


def milliseconds(deadline_s: float) -> int:
    """Return a deadline as it travels: at least 1 ms.

    Raises:
        InvalidFieldError: it is no number of seconds.
    """
    return max(1, round(arguments.seconds(deadline_s, "deadline_s") * 1000))


def given_back_with(
    client: object, channel: SessionChannel | None, sockets: Sequence[Closable], context: zmq.Context[zmq.Socket[bytes]]
) -> weakref.finalize[[int, SessionChannel | None, Sequence[Closable], zmq.Context[zmq.Socket[bytes]]], object]:
    """Return what gives a client's connection back: when it is called, or the client is garbage that nobody closed.

    Left to the collector, a context may be ended before its socket is closed, and that waits for ever.
    """
    finalizer = weakref.finalize(client, _give_back, os.getpid(), channel, sockets, context)
    finalizer.atexit = False  # the process's end does it
    return finalizer


def _give_back(
    pid: int, channel: SessionChannel | None, sockets: Sequence[Closable], context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    if channel is not None:
        if os.getpid() == pid:
            channel.end()
        channel.close()
    for socket in sockets:
        socket.close()  # zmq's, and its context's end, do nothing in a forked child
    context.term()

"""Processes of this project's own that outlive the daemon that starts them, each behind a Unix socket of packets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

_MODE: Final = 0o600


def connected(path: Path, timeout_s: float) -> socket.socket | None:
    """Return a connection to the process that listens at a path; None if none does."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    channel.settimeout(timeout_s)
    try:
        channel.connect(os.fspath(path))
    except (FileNotFoundError, ConnectionRefusedError):
        channel.close()
        return None
    except BaseException:
        channel.close()
        raise
    return channel


def bound(path: Path) -> socket.socket:
    """Return a socket that is bound to a path, for this user alone, and does not listen yet."""
    path.unlink(missing_ok=True)
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        one.bind(os.fspath(path))
        path.chmod(_MODE)  # nobody can connect before: it does not listen
    except BaseException:
        one.close()
        raise
    return one


def start(path: Path, program: str, *arguments: str, timeout_s: float) -> None:
    """Start a program, a file of this package that only needs the standard library, which listens at ``path``.

    It is given its socket's descriptor before the other arguments, and detaches itself: this returns once it listens.

    Raises:
        OSError, subprocess.SubprocessError: it does not.
    """
    with bound(path) as listener:
        subprocess.run(  # noqa: S603  ourselves, no shell
            [sys.executable, "-I", "-S", program, str(listener.fileno()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            check=True,
            timeout=timeout_s,
        )

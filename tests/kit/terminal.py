"""The command on a terminal, as a person runs it."""

from __future__ import annotations

import os
import pty
import struct
import subprocess
from collections.abc import Mapping
from fcntl import ioctl
from termios import TIOCSWINSZ
from typing import Final, NamedTuple

from tests.kit.kvferry_command import COMMAND

COLUMNS: Final = 80
WIPE: Final = "\x1b[K"


class OnTerminal(NamedTuple):
    """Everything that a terminal got, standard error too, and the exit status."""

    text: str
    status: int


def on_terminal(*words: str, environ: Mapping[str, str] = os.environ) -> OnTerminal:
    """Run ``kvferry`` on a terminal of ``COLUMNS``."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    command = [str(COMMAND), *words]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ) as running:
        os.close(theirs)
        said = b""
        try:
            while part := os.read(ours, 1 << 16):
                said += part
        except OSError:  # how a terminal says that its last program has ended
            pass
    os.close(ours)
    return OnTerminal(said.decode().replace("\r\n", "\n"), running.returncode)

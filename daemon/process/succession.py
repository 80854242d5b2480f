"""From one daemon to the next without a stop: the next one starts beside it, looks, and is handed what it needs.

The old daemon starts the new one by its own command line, with one end of a Unix socket. Each packet is a word, with at
most one descriptor:

=====  =================  ==========================================================================================
from   packet             meaning
=====  =================  ==========================================================================================
old    KEPT NAME          a descriptor of what outlives the old one, for a look
old    LOOK               these were all
new    READY VERSION      it can go on with them
new    NO WHY             it cannot, and ends; the old one goes on
old    HAND NAME          a descriptor that is the new one's from now on: its lock, where it listens, what is kept
old    GO                 these were all: the old one serves no more
=====  =================  ==========================================================================================

An end that closes its socket before it said its last word has ended, and nothing was handed over. If the new one ends
after READY, the old one has refused requests by then: it ends as well, and says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Final, Self, TypeAlias

from kvferry.protocol.errors import DaemonLostError, UpgradeRefusedError

VARIABLE: Final = "KVFERRY_PREDECESSOR"
"""Names the descriptor of the new daemon's end."""

CONFIG_VARIABLE: Final = "KVFERRY_PREDECESSOR_CONFIG"
"""Has the old daemon's configuration, as JSON: the new one says what has changed."""

MAX_PACKET_BYTES: Final = 1024
READY_S: Final = 60.0
"""How long the new daemon may take until it is ready, and the old one until it has ended its work."""

_WATCHDOG: Final = "WATCHDOG_PID"
"""Says that the service manager watches the old one alone."""

NO_CONFIG: Final[Mapping[str, object]] = MappingProxyType({})
Descriptors: TypeAlias = Mapping[str, Sequence[int]]


class Successor:
    """The new daemon, as the old one sees it."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        """Use ``start``."""
        self.version = ""
        self._process = process
        self._channel = channel

    def __repr__(self) -> str:
        """Show its process and version."""
        return f"<Successor pid={self.pid} {self.version}>"

    @property
    def pid(self) -> int:
        """Return its process."""
        return self._process.pid

    @classmethod
    async def start(
        cls, kept: Descriptors, command: Sequence[str] | None = None, config: Mapping[str, object] = NO_CONFIG
    ) -> Self:
        """Start it, and return once it is ready.

        Args:
            kept: what outlives this daemon; they stay this daemon's.
            command: by default this process's own.
            config: of this daemon, by key.

        Raises:
            UpgradeRefusedError: it is not ready, and has been ended.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: value for name, value in os.environ.items() if name != _WATCHDOG}
        try:
            with theirs:
                process = await asyncio.to_thread(
                    subprocess.Popen,
                    command or sys.orig_argv,
                    stdin=subprocess.DEVNULL,
                    env={**environment, VARIABLE: str(theirs.fileno()), CONFIG_VARIABLE: json.dumps(dict(config))},
                    pass_fds=[theirs.fileno()],
                )
        except OSError as cause:
            ours.close()
            raise UpgradeRefusedError(f"the next daemon cannot be started: {cause.strerror}") from cause
        made = cls(process, ours)
        try:
            await asyncio.to_thread(made._look, kept)
        except BaseException:
            await asyncio.to_thread(made.end)
            raise
        return made

    def hand(self, descriptors: Descriptors) -> None:
        """Give it these, of which this process keeps its own; where it has ended, ``go`` says so."""
        with contextlib.suppress(OSError):
            _send_all(self._channel, "HAND", descriptors)

    def go(self) -> None:
        """Let it serve: this process does nothing more with what it has handed over.

        Raises:
            DaemonLostError: it has ended.
        """
        with self._channel as channel:
            try:
                channel.send(b"GO")
            except OSError as cause:
                raise DaemonLostError(
                    f"process {self.pid} has ended before it took this daemon's place", remedy="see its log; start one"
                ) from cause

    def tell_to_end(self) -> None:
        """Pass on what this process was told; it ends in order as soon as it serves."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def end(self) -> None:
        """End it: it will not be needed."""
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def _look(self, kept: Descriptors) -> None:
        self._channel.settimeout(READY_S)
        try:
            _send_all(self._channel, "KEPT", kept)
            self._channel.send(b"LOOK")
            answer = self._channel.recv(MAX_PACKET_BYTES).decode(errors="replace")
        except TimeoutError:
            raise UpgradeRefusedError(f"the next daemon was not ready within {READY_S:g} s") from None
        except OSError as cause:
            raise UpgradeRefusedError(f"the next daemon ended before it was ready: {cause.strerror}") from cause
        word, _, rest = answer.partition(" ")
        if word != "READY":
            raise UpgradeRefusedError(rest or "the next daemon ended before it was ready; see the log")
        self.version = rest


class Predecessor:
    """The old daemon, as the new one sees it. Blocking: nothing is served yet."""

    def __init__(self, channel: socket.socket, config: str = "") -> None:
        """Hear what it has; ``kept`` are owned from now on. ``config``: its configuration, as JSON.

        Raises:
            DaemonLostError: it has ended.
        """
        self._channel = channel
        self.config: dict[str, object] = json.loads(config) if config else {}
        self.kept = _received(channel, "KEPT", b"LOOK")

    @classmethod
    def find(cls, environ: MutableMapping[str, str] = os.environ) -> Self | None:
        """Return it, where this process was started by it.

        Raises:
            DaemonLostError: it has ended.
        """
        fd, config = environ.pop(VARIABLE, ""), environ.pop(CONFIG_VARIABLE, "")
        if not fd.isdecimal():
            return None
        channel = socket.socket(fileno=int(fd))
        os.set_inheritable(channel.fileno(), False)  # noqa: FBT003  os's own signature
        return cls(channel, config)

    def refuse(self, why: str) -> None:
        """Say why this process cannot go on with what it has; it goes on then."""
        self._forget()
        with contextlib.suppress(OSError), self._channel as channel:
            channel.send(f"NO {why}".encode()[:MAX_PACKET_BYTES])

    def take_over(self, version: str) -> dict[str, list[int]]:
        """Say that this process is ready, and return what the old one hands over when it serves no more.

        Raises:
            DaemonLostError: it has ended without that.
        """
        self._forget()
        with self._channel as channel:
            with contextlib.suppress(OSError):  # then nothing comes
                channel.send(f"READY {version}".encode())
            return _received(channel, "HAND", b"GO")

    def _forget(self) -> None:
        _close(self.kept.values())
        self.kept = {}


def _send_all(channel: socket.socket, word: str, descriptors: Descriptors) -> None:
    for name, fds in descriptors.items():
        for fd in fds:
            socket.send_fds(channel, [f"{word} {name}".encode()], [fd])


def _received(channel: socket.socket, word: str, last: bytes) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(channel, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            data, fds = b"", []
        if data == last:
            return found
        kind, _, name = data.decode(errors="replace").partition(" ")
        found.setdefault(name, []).extend(fds)
        if kind != word or len(fds) != 1:
            _close(found.values())
            raise DaemonLostError("the daemon that started this one has ended before it handed over")


def _close(several: Iterable[Sequence[int]]) -> None:
    for fds in several:
        for fd in fds:
            os.close(fd)

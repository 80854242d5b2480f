"""The demo's child processes: started, listened to, and ended in every case."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from kvferry.clients.demo.messages import FromEngine, Line, decode_line, encode_line
from kvferry.protocol.errors import DaemonLostError, DeadlineError, InternalError

ENDING_S = 15.0
STDERR_LINES = 15
DAEMON_START_S = 30.0


class Child:
    """One Python module as a process; its standard error goes to a file."""

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  ourselves, no shell
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C reaches the demo alone, which ends its children in order
            )

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self.end()

    @property
    def pid(self) -> int:
        """Return the process's number."""
        return self._process.pid

    @property
    def output(self) -> IO[bytes]:
        """Return its standard output."""
        return _present(self._process.stdout)

    def tell(self, lines: Sequence[Line]) -> None:
        """Write lines to its standard input and close that.

        Raises:
            InternalError: it has ended.
        """
        try:
            with _present(self._process.stdin) as channel:
                channel.writelines(encode_line(line) for line in lines)
        except BrokenPipeError:
            self.fail()

    def fail(self) -> None:
        """Raise what is known of its end."""
        status = self._process.wait(ENDING_S)
        lines = self._log.read_text(errors="replace").splitlines()[-STDERR_LINES:]
        raise InternalError("\n    ".join([f"the {self.name} process ended with status {status}", *lines]))

    def end(self) -> None:
        """Ask it to end, and make it if it does not."""
        self._process.terminate()
        try:
            self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def start_daemon(runtime_dir: Path, folder: Path) -> Child:
    """Return a daemon that serves in ``runtime_dir``, waiting for its READY as a service manager does.

    Raises:
        DaemonLostError: it ended instead, or is not ready in time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
        address = folder / "notify"
        notifications.bind(os.fspath(address))
        notifications.settimeout(0.2)
        environment = {"NOTIFY_SOCKET": os.fspath(address)}
        child = Child("daemon", "kvferry.daemon", ["--runtime-dir", os.fspath(runtime_dir)], environment, folder)
        ends_at = time.monotonic() + DAEMON_START_S
        while time.monotonic() < ends_at and child._process.poll() is None:  # noqa: SLF001  its own module
            try:
                if b"READY=1" in notifications.recv(4096):
                    return child
            except TimeoutError:
                continue
    log = (folder / "daemon.log").read_text(errors="replace").strip()
    child.end()
    raise DaemonLostError(f"the daemon did not start: {log}")


def listen(children: Sequence[Child], timeout_s: float) -> Iterator[tuple[Child, FromEngine]]:
    """Yield what the children say until all of them have closed their output.

    Raises:
        InternalError: a child ended with an error.
        DeadlineError: none said anything for ``timeout_s``.
    """
    with selectors.DefaultSelector() as selector:
        pending = dict.fromkeys(children, b"")
        for child in children:
            selector.register(child.output, selectors.EVENT_READ, child)
        while pending:
            ready = selector.select(timeout_s)
            if not ready:
                names = " and ".join(child.name for child in pending)
                raise DeadlineError(f"{names} said nothing for {timeout_s:g} s")
            for key, _ in ready:
                speaker: Child = key.data
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(speaker.output)
                    del pending[speaker]
                    if speaker._process.wait(ENDING_S):  # noqa: SLF001  its own module
                        speaker.fail()
                    continue
                *lines, pending[speaker] = (pending[speaker] + data).split(b"\n")
                yield from ((speaker, _decoded(speaker, line)) for line in lines)


def _decoded(child: Child, line: bytes) -> FromEngine:
    try:
        return decode_line(line)
    except msgspec.MsgspecError as cause:
        raise InternalError(f"{child.name} said {line[:80]!r}") from cause


def _present(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream

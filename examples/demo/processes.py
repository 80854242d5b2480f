"""The demo's child processes: starting them, reading their output, and always ending them."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

import msgspec

from examples.demo.errors import DemoError
from examples.demo.hosts import Host
from examples.demo.messages import FromEngine, Line, decode_line, encode_line

ENDING_S: Final = 15.0
DAEMON_START_S: Final = 30.0
MORE_FAILURES_S: Final = 1.5
"""How long to wait after a failure for related ones: a process was killed, and then its peer fails."""
LOG_LINES: Final = 15


class Child:
    """A Python module running as a process; its standard error goes to a file."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        host: Host | None = None,
    ) -> None:
        """Start it, on ``host`` or where this process is; its log is in ``folder``."""
        self.name = name
        self.folder = folder
        command = [sys.executable, "-m", module, *arguments]
        self._log = folder / f"{name.replace(' ', '-')}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  ourselves, no shell
                host.command(command) if host else command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C reaches only the demo, which ends its children in order
            )

    def __repr__(self) -> str:
        """Show name, pid and exit status."""
        return f"<Child {self.name} pid={self.pid} status={self._process.poll()}>"

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
        """Return the process id."""
        return self._process.pid

    @property
    def output(self) -> IO[bytes]:
        """Return the process's standard output."""
        return _present(self._process.stdout)

    def notify(self, lines: Sequence[Line]) -> None:
        """Write lines to the standard input of the process, and close it.

        Raises:
            DemoError: the process has ended.
        """
        try:
            with _present(self._process.stdin) as channel:
                channel.writelines(encode_line(line) for line in lines)
        except BrokenPipeError:
            self.status(ENDING_S)
            raise failure([self]) from None

    def status(self, timeout_s: float) -> int | None:
        """Return the exit status; None if the process still runs after ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> int:
        """Terminate the process, kill it if it does not end, and return its exit status."""
        self._process.terminate()
        try:
            self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        return self._process.returncode

    def outcome(self) -> str:
        """Return in one line how the process ended, if it did."""
        who = f"the {self.name} (pid {self.pid})"
        status = self._process.poll()
        if status is None:
            return f"{who} stopped talking"
        if status < 0:
            return f"{who} was killed by {signal.Signals(-status).name}"
        lines = self._log_lines()
        return f"{who} ended with status {status}{lines and f': {lines[-1]}'}"

    def log_end(self) -> list[str]:
        """Return the last lines of the process's standard error, prefixed with its name."""
        return [f"    {self.name} | {line}" for line in self._log_lines()[-LOG_LINES:]]

    def _log_lines(self) -> list[str]:
        return [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]


def start_daemon(runtime_dir: Path, folder: Path, config: str = "", host: Host | None = None) -> Child:
    """Start a daemon in ``runtime_dir``, and wait for its READY as a service manager does.

    Args:
        runtime_dir: for its sockets.
        folder: for its log and configuration, not shared with other daemons.
        config: the text of its configuration file.
        host: where it runs, if not where this process does.

    Raises:
        DemoError: it ended, or was not ready in time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
        address = folder / "notify"
        notifications.bind(os.fspath(address))
        notifications.settimeout(0.2)
        environment = {"NOTIFY_SOCKET": os.fspath(address)}
        arguments = ["--runtime-dir", os.fspath(runtime_dir)]
        if config:
            file = folder / "kvferry.toml"
            file.write_text(config)
            arguments += ["--config", os.fspath(file)]
        name = f"daemon of host {host.number}" if host else "daemon"
        child = Child(name, "kvferry.daemon", arguments, environment, folder, host)
        try:
            _wait_for_ready(child, notifications)
        except BaseException:
            child.end()
            raise
        return child


def listen(children: Sequence[Child], daemons: Sequence[Child], timeout_s: float) -> Iterator[tuple[Child, FromEngine]]:
    """Yield the children's messages until all of them have closed their output.

    Raises:
        DemoError: a child ended with an error, a daemon ended, or there was no output for ``timeout_s``.
    """
    with selectors.DefaultSelector() as selector:
        pending = dict.fromkeys(children, b"")
        watched = [*children, *daemons]
        for child in watched:
            selector.register(child.output, selectors.EVENT_READ, child)
        while pending:
            ready = selector.select(timeout_s)
            if not ready:
                raise DemoError(f"{' and '.join(child.name for child in pending)} said nothing for {timeout_s:g} s")
            for key, _ in ready:
                speaker: Child = key.data
                data = os.read(key.fd, 1 << 16)
                if data and speaker not in daemons:
                    *lines, pending[speaker] = (pending[speaker] + data).split(b"\n")
                    yield from ((speaker, _decoded(speaker, line)) for line in lines)
                elif not data:
                    selector.unregister(speaker.output)
                    pending.pop(speaker, None)
                    if speaker in daemons or speaker.status(ENDING_S) != 0:
                        raise failure([speaker, *(one for one in watched if one is not speaker)])


def failure(children: Sequence[Child]) -> DemoError:
    """Return the error that says how the first child ended, and others that fail within ``MORE_FAILURES_S``."""
    ends_at = time.monotonic() + MORE_FAILURES_S
    for child in children:
        child.status(max(0.0, ends_at - time.monotonic()))
    failed = [child for child in children if child is children[0] or child.status(0)]
    details = [line for child in failed for line in child.log_end()]
    return DemoError("; ".join(child.outcome() for child in failed), "\n".join(details))


def _wait_for_ready(daemon: Child, notifications: socket.socket) -> None:
    ends_at = time.monotonic() + DAEMON_START_S
    while time.monotonic() < ends_at and daemon.status(0) is None:
        try:
            if b"READY=1" in notifications.recv(4096).splitlines():
                return
        except TimeoutError:
            continue
    raise failure([daemon])


def _decoded(child: Child, line: bytes) -> FromEngine:
    try:
        return decode_line(line)
    except msgspec.MsgspecError as cause:
        raise DemoError(f"the {child.name} said {line[:80]!r}") from cause


def _present(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream

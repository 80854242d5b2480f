"""Real daemons for tests: started as a process, known to serve, ended with SIGTERM."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from kvferry.clients import Client
from kvferry.clients.cli.main import main as command_line
from kvferry.daemon.daemon import Tuning
from kvferry.daemon.process.device_keeper import open_keeper
from kvferry.daemon.process.fd_store import HolderStore, open_store
from kvferry.daemon.process.inherited import Inherited
from tests.kit.started import Started, started

START_S = 120.0
END_S = 60.0
SOON_S = 120.0
"""Which only a test that fails waits for: a daemon that opens an NPU imports torch_npu first, on busy cores."""
LOOK_EVERY_S = 0.5
"""How often is looked whether a daemon that says nothing still runs."""
USERS_COMMAND: Final = ("-m", "kvferry.daemon")
"""What ``kvferry daemon`` becomes: it saves the time to import the command line."""
TUNED_COMMAND: Final = os.fspath(Path(__file__).with_name("tuned_daemon.py"))
"""The same, forked from a process that has imported it, with its tuning."""


class Orphan:
    """A process that a daemon has started in its own place: its end is seen, its status is what it was told.

    As ``subprocess.Popen``, as far as a ``Daemon`` needs it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)
        self._killed = False

    def poll(self) -> int | None:
        """Return the status, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the status, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it runs still.
        """
        if self.returncode is None:
            ends = select.poll()
            ends.register(self._pidfd, select.POLLIN)
            if not ends.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("a daemon's successor", timeout or 0.0)
            os.close(self._pidfd)
            self.returncode = -signal.SIGKILL if self._killed else 0
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            self._killed |= number == signal.SIGKILL
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Daemon:
    """A daemon in a process and a runtime directory of its own, which a test ends and starts anew at will.

    Attributes:
        runtime_dir: where it serves, in each of its lives.
        process: its present life, or the last.
        log: what it writes to its standard error in its present life.
    """

    process: Started | Orphan

    def __init__(self, folder: Path, command: Sequence[str], options: Mapping[str, Any]) -> None:
        """Start it for the first time; see ``daemon``."""
        self.runtime_dir = folder / "run"
        self.log = folder / "daemon.log"
        self._file = folder / "daemon.toml"
        self._notify = folder / "notify"
        self._command = [*command, "--config", os.fspath(self._file), "--runtime-dir", os.fspath(self.runtime_dir)]
        self._options = options

    def configure(self, config: str) -> None:
        """Give it another configuration, which it reads when it starts."""
        self._file.write_text(config)

    def start(self) -> None:
        """Start it, once it has ended; it serves on return."""
        self.process = start_and_wait_until_ready(self._command, self._notify, self.log, **self._options)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal that ends it, and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(END_S)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self.end(signal.SIGKILL)

    def restart(self, number: int = signal.SIGKILL) -> None:
        """End it by a signal, and start it anew."""
        self.end(number)
        self.start()

    def upgrade(self) -> None:
        """Have the next one, which is started by the same command, take its place; it serves on return."""
        with Client.connect(self.runtime_dir, name="upgrade") as client:
            before = client.boot_id
        assert command_line(["upgrade", "--runtime-dir", os.fspath(self.runtime_dir)]) == 0
        assert self.process.wait(END_S) == 0
        with Client.connect(self.runtime_dir, name="upgrade") as client:
            assert client.boot_id != before
            self.process = Orphan(client.status().pid)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Have it do nothing meanwhile; it may be killed."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def store(self) -> Iterator[HolderStore]:
        """Return what holds its memory, while it does not run."""
        store = open_store(self.runtime_dir, Inherited(), {}, keep=True)
        assert isinstance(store, HolderStore)
        try:
            yield store
        finally:
            store.leave(60)


@contextlib.contextmanager
def daemon(
    config: str = "",
    *,
    keep: bool = False,
    tuning: Tuning | None = None,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    python: Path | None = None,
) -> Iterator[Daemon]:
    """Run a daemon with this TOML configuration; on leaving it must end with status 0, unless it was killed.

    Args:
        config: the configuration file's text.
        keep: let its pools and sessions outlive it (``--keep``), until this returns.
        tuning: in place of what the daemon chooses itself.
        environment: added to this process's.
        prefix: a command that runs the daemon's, in another network namespace say.
        python: another environment's interpreter.
    """
    by_user = prefix or python or environment  # no fork: what the process is like counts
    command = (
        USERS_COMMAND
        if by_user and tuning is None
        else (TUNED_COMMAND, msgspec.json.encode(tuning or Tuning()).decode())
    )
    options = {"environment": environment or {}, "prefix": prefix, "python": python}
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as folder:
        one = Daemon(Path(folder), [*command, *(["--keep"] if keep else [])], options)
        one.configure(config)
        one.start()
        try:
            yield one
        finally:
            status = one.end()
            if keep:
                open_keeper(one.runtime_dir, open_store(one.runtime_dir, Inherited(), {}), 1)
        assert status in {0, -signal.SIGKILL}, one.log.read_text()


@contextlib.contextmanager
def engine(at: Daemon, name: str = "engine", **options: Any) -> Iterator[Client]:  # noqa: ANN401  those of connect
    """Open an engine's session with a daemon; ``options`` are those of ``Client.connect``."""
    with Client.connect(at.runtime_dir, name=name, **options) as client:
        yield client


def start_and_wait_until_ready(
    command: Sequence[str],
    notify: Path,
    log: Path,
    environment: Mapping[str, str],
    prefix: Sequence[str] = (),
    python: Path | None = None,
) -> Started:
    """Start a daemon and return once it says READY, as a service manager would wait."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications, log.open("wb") as output:
        notifications.bind(os.fspath(notify))
        more = {**environment, "NOTIFY_SOCKET": os.fspath(notify)}
        process = started(command, environment=more, prefix=prefix, python=python, stderr=output.fileno(), pipes=False)
        ends_at = time.monotonic() + START_S
        ready = select.poll()  # select() knows only descriptors below 1024
        ready.register(notifications, select.POLLIN)
        while not ready.poll(1000 * LOOK_EVERY_S):
            status = process.poll()
            if status is None and time.monotonic() < ends_at:
                continue
            process.kill()
            pytest.fail(f"no READY within {START_S} s, status {process.wait(END_S)}:\n{log.read_text()}")
        said = notifications.recv(4096)
    notify.unlink()
    assert b"READY=1" in said, said
    return process


def soon(condition: Callable[[], bool]) -> bool:
    """Return whether something becomes true; each look is a round trip."""
    ends_at = time.monotonic() + SOON_S
    while not (met := condition()) and time.monotonic() < ends_at:
        pass
    return met


def said_by_another_user(daemon: Daemon, code: str, *arguments: str) -> str:
    """Return what a program of another user prints; it has kvferry.clients, and sys.argv[1] is the folder."""
    daemon.runtime_dir.parent.chmod(0o755)
    become = "import os, sys; from kvferry.clients import Client, KvferryError, MhaSpec\n"
    become += "os.setuid(12345)\n"  # the group stays, and with it the way to the sockets
    command = [sys.executable, "-c", become + code, str(daemon.runtime_dir), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert not done.stderr, done.stderr
    return done.stdout.strip()

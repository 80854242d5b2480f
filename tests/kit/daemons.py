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
from typing import Final, NamedTuple

import msgspec
import pytest

from kvferry.daemon.daemon import Tuning
from kvferry.daemon.process.fd_store import HolderStore, open_store
from kvferry.daemon.process.inherited import Inherited
from tests.kit.started import Started, started

START_S = 30.0
END_S = 30.0
SOON_S = 20.0
LOOK_EVERY_S = 0.5
"""How often is looked whether a daemon that says nothing still runs."""
COMMAND: Final = ("-m", "kvferry.daemon")
"""What ``kvferry daemon`` becomes: it saves the time to import the command line."""
FORKED_COMMAND: Final = os.fspath(Path(__file__).with_name("tuned_daemon.py"))
"""The same, forked from a process that has imported it, with its tuning: for those that are started often."""


class DaemonProcess(NamedTuple):
    """A daemon that serves."""

    runtime_dir: Path
    process: Started
    log: Path

    def end(self) -> int:
        """Send SIGTERM and return the exit status."""
        self.process.terminate()
        return self.process.wait(END_S)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self.process.kill()
        self.process.wait(END_S)


@contextlib.contextmanager
def running_daemon(
    tmp_path: Path,
    config: str = "",
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    python: Path | None = None,
    tuning: Tuning | None = None,
) -> Iterator[DaemonProcess]:
    """Run a daemon with this TOML configuration; on leaving it must end with status 0, unless it was killed.

    Args:
        tmp_path: for the configuration and the log; the sockets go to a short path of their own.
        config: the configuration file's text.
        environment: added to this process's.
        prefix: a command that runs the daemon's, in another network namespace say.
        python: another environment's interpreter.
        tuning: in place of what the daemon chooses itself.
    """
    log = tmp_path / "daemon.log"
    file = tmp_path / "daemon.toml"
    file.write_text(config)
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as folder:
        runtime_dir = Path(folder) / "run"
        start = COMMAND if tuning is None else ("-m", "tests.kit.tuned_daemon", msgspec.json.encode(tuning).decode())
        command = [*start, "--config", os.fspath(file), "--runtime-dir", os.fspath(runtime_dir)]
        process = start_and_wait_until_ready(command, Path(folder) / "notify", log, environment or {}, prefix, python)
        daemon = DaemonProcess(runtime_dir, process, log)
        try:
            yield daemon
        finally:
            status = daemon.end()
        assert status in {0, -signal.SIGKILL}, log.read_text()


class RestartedDaemon:
    """A daemon in a runtime directory of its own, which is killed and started again at will; mostly with ``--keep``.

    Attributes:
        runtime_dir: where it serves, in each of its lives.
    """

    def __init__(self, folder: Path, config: str = "", *, keep: bool = True) -> None:
        """Start it for the first time; ``folder`` is a short path."""
        self.runtime_dir = folder / "run"
        self._keep = ["--keep"] if keep else []
        self._folder = folder
        self.configure(config)
        self.daemon = self._started()

    def configure(self, config: str) -> None:
        """Give it another configuration, which it reads when it starts."""
        (self._folder / "daemon.toml").write_text(config)

    def restart(self, number: int = signal.SIGKILL) -> DaemonProcess:
        """End it by a signal, and start it anew."""
        self.end(number)
        return self.start()

    def end(self, number: int = signal.SIGKILL) -> None:
        """End it by a signal."""
        os.kill(self.daemon.process.pid, number)
        self.daemon.process.wait(END_S)

    def start(self) -> DaemonProcess:
        """Start it anew, once it has ended."""
        self.daemon = self._started()
        return self.daemon

    @contextlib.contextmanager
    def store(self) -> Iterator[HolderStore]:
        """Return what holds its memory, while it does not run."""
        store = open_store(self.runtime_dir, Inherited(), {}, keep=True)
        assert isinstance(store, HolderStore)
        try:
            yield store
        finally:
            store.leave(60)

    def close(self) -> None:
        """End it, and what holds its memory."""
        status = self.daemon.end()
        open_store(self.runtime_dir, Inherited(), {})
        assert status in {0, -signal.SIGKILL}, self.daemon.log.read_text()

    def _started(self) -> DaemonProcess:
        log = self._folder / "daemon.log"
        command = [FORKED_COMMAND, "{}", *self._keep, "--config", os.fspath(self._folder / "daemon.toml")]
        command += ["--runtime-dir", os.fspath(self.runtime_dir)]
        process = start_and_wait_until_ready(command, self._folder / "notify", log, {})
        return DaemonProcess(self.runtime_dir, process, log)


@contextlib.contextmanager
def stopped(daemon: RestartedDaemon) -> Iterator[None]:
    """Have the daemon do nothing meanwhile; it may be killed."""
    process = daemon.daemon.process
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)


@contextlib.contextmanager
def restarted_daemon(config: str = "", *, keep: bool = True) -> Iterator[RestartedDaemon]:
    """Run a daemon that is killed and started again at will; at last it must end in order, unless it was killed."""
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as folder:
        one = RestartedDaemon(Path(folder), config, keep=keep)
        try:
            yield one
        finally:
            one.close()


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
        while not select.select([notifications], [], [], LOOK_EVERY_S)[0]:
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


def said_by_another_user(daemon: DaemonProcess, code: str, *arguments: str) -> str:
    """Return what a program of another user prints; it has kvferry.clients, and sys.argv[1] is the folder."""
    daemon.runtime_dir.parent.chmod(0o755)
    become = "import os, sys; from kvferry.clients import Client, KvferryError, MhaSpec\n"
    become += "os.setuid(12345)\n"  # the group stays, and with it the way to the sockets
    command = [sys.executable, "-c", become + code, str(daemon.runtime_dir), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert not done.stderr
    return done.stdout.strip()

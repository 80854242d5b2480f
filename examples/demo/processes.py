"""The demo's processes, daemons and engines: started afresh, listened to, and always ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from examples.demo.hosts import Host
from examples.demo.messages import DemoError, Failed, Message
from kvferry.clients import Client
from kvferry.protocol.errors import DaemonLostError

ENDING_S: Final = 15.0
DAEMON_START_S: Final = 30.0
LOOK_S: Final = 0.05
MORE_FAILURES_S: Final = 1.5
"""How long to wait after a failure for related ones: a process was killed, and then its peer fails."""
LOG_LINES: Final = 15

SPAWN: Final = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads' locks


class Child:
    """A function that runs in a process of its own: ``main(tell, *arguments)``; ``tell`` sends a message to here."""

    def __init__(
        self,
        name: str,
        main: Callable[..., None],
        *arguments: object,
        host: Host | None = None,
        log: Path | None = None,
    ) -> None:
        """Start it, on ``host`` or where this process is; standard error goes to ``log`` or where ours does."""
        self.name = name
        self._messages, theirs = SPAWN.Pipe(duplex=False)
        self._log = log
        self._reason = ""
        self._process = SPAWN.Process(target=_run, args=(main, theirs, host, log, *arguments), name=name)
        self._process.start()
        theirs.close()

    def __repr__(self) -> str:
        """Show name, pid and exit status."""
        return f"<Child {self.name} pid={self.pid} status={self._process.exitcode}>"

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
        assert self._process.pid is not None
        return self._process.pid

    def status(self, timeout_s: float = 0.0) -> int | None:
        """Return the exit status; None if the process still runs after ``timeout_s``."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def end(self) -> int | None:
        """Terminate the process, kill it if it does not end, and return its exit status."""
        self._process.terminate()
        if self.status(ENDING_S) is None:
            self._process.kill()
        return self.status(ENDING_S)

    @property
    def channel(self) -> connection.Connection[Message, Message]:
        """Return what becomes readable with the next message, and when the process ends."""
        return self._messages

    @property
    def sentinel(self) -> int:
        """Return what becomes readable when the process ends."""
        return self._process.sentinel

    def receive(self) -> Message | None:
        """Return its next message, or None if there will be none."""
        try:
            message: Message = self._messages.recv()
        except EOFError:
            return None
        if isinstance(message, Failed):
            self._reason = message.reason
        return message

    def outcome(self) -> str:
        """Return in one line how the process ended, if it did."""
        who, status = f"the {self.name} (pid {self.pid})", self.status()
        if status is None:
            return f"{who} stopped talking"
        if status < 0:
            return f"{who} was killed by {signal.Signals(-status).name}"
        reason = self._reason or "".join(self.log_end()[-1:])
        return f"{who} ended with status {status}{reason and f': {reason}'}"

    def log_end(self) -> list[str]:
        """Return the last lines of the process's log."""
        text = self._log.read_text(errors="replace") if self._log else ""
        return [line for line in text.splitlines() if line.strip()][-LOG_LINES:]


def start_daemon(name: str, runtime_dir: Path, folder: Path, config: str, host: Host | None = None) -> Child:
    """Start a daemon in ``runtime_dir``, and wait until it serves.

    Args:
        name: for people.
        runtime_dir: for its sockets.
        folder: for its log and configuration, not shared with other daemons.
        config: the text of its configuration file.
        host: where it runs, if not where this process does.

    Raises:
        DemoError: it ended, or did not serve in time.
    """
    file = folder / "kvferry.toml"
    file.write_text(config)
    arguments = ["--runtime-dir", os.fspath(runtime_dir), "--config", os.fspath(file)]
    daemon = Child(name, _become_daemon, arguments, host=host, log=folder / "daemon.log")
    ends_at = time.monotonic() + DAEMON_START_S
    while time.monotonic() < ends_at and daemon.status(LOOK_S) is None:
        try:
            Client.connect(runtime_dir, session=False).close()
        except DaemonLostError:
            continue
        return daemon
    daemon.end()
    raise failure([daemon])


def listen(engines: Sequence[Child], daemons: Sequence[Child], timeout_s: float) -> Iterator[tuple[Child, Message]]:
    """Yield the engines' messages until all of them have ended.

    Raises:
        DemoError: an engine ended with an error, a daemon ended, or there was no message for ``timeout_s``.
    """
    talking = {engine.channel: engine for engine in engines}
    serving = {daemon.sentinel: daemon for daemon in daemons}
    while talking:
        ready = connection.wait([*talking, *serving], timeout_s)
        if not ready:
            raise DemoError(f"{' and '.join(one.name for one in talking.values())} said nothing for {timeout_s:g} s")
        ended = [daemon for sentinel, daemon in serving.items() if sentinel in ready]
        for channel, engine in list(talking.items()):
            message = engine.receive() if channel in ready else None
            if message is not None:
                yield engine, message
            elif channel in ready:
                del talking[channel]
                ended += [engine] if engine.status(ENDING_S) != 0 else []
        if ended:
            raise failure([*ended, *(one for one in (*engines, *daemons) if one not in ended)])


def failure(children: Sequence[Child]) -> DemoError:
    """Return the error that says how the first child ended, and others that fail within ``MORE_FAILURES_S``."""
    ends_at = time.monotonic() + MORE_FAILURES_S
    for child in children:
        child.status(max(0.0, ends_at - time.monotonic()))
    failed = [child for child in children if child is children[0] or child.status()]
    details = [f"    {child.name} | {line}" for child in failed for line in child.log_end()]
    return DemoError("; ".join(child.outcome() for child in failed), "\n".join(details))


def _run(
    main: Callable[..., None],
    channel: connection.Connection[Message, Message],
    host: Host | None,
    log: Path | None,
    *arguments: object,
) -> None:
    os.setsid()  # Ctrl-C reaches only the demo, which ends its children in order
    if host is not None:
        host.enter()
    if log is not None:
        with log.open("wb") as file:
            os.dup2(file.fileno(), sys.stderr.fileno())
    try:
        main(channel.send, *arguments)
    except Exception as error:
        channel.send(Failed(f"{type(error).__name__}: {error}"))
        raise


def _become_daemon(_tell: object, arguments: Sequence[str]) -> None:
    """Run ``kvferry daemon``."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", "kvferry.daemon", *arguments])  # noqa: S606  ourselves

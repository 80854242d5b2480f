"""Restarts and upgrades: how long until the session is resumed, and how long an engine has no answer."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.measure import MILLISECONDS, Effort, Row, Target, compare, interleave, row_of
from benchmarks.processes import STOP_TIMEOUT_S
from kvferry.clients import Client, MhaSpec, calls
from kvferry.clients.cli.main import main as command_line
from kvferry.clients.session_channel import SessionChannel
from kvferry.daemon.process.fd_store import open_store
from kvferry.daemon.process.inherited import Inherited
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.session_stream import SessionOpen

SPEC = MhaSpec(layers=2, tokens=32 << 10, page_size=128, kv_heads=8, head_dim=128, dtype="float16")
"""256 MiB."""
LARGE = msgspec.structs.replace(SPEC, tokens=1 << 20)
"""8 GiB."""
PAGES = 100
LOOK_S = 0.001
RESTART_MS, UPGRADE_MS = 500.0, 200.0
"""Without an answer, at most."""


class Lives:
    """A daemon in a runtime directory of its own, one life after the other; what it imports is compiled once."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.runtime_dir = folder / "run"
        self._log = folder / "log"
        self._command = [sys.executable, "-P", "-m", "kvferry.daemon", "--runtime-dir", str(self.runtime_dir), *options]
        self._pidfd = self._started()

    def restart(self) -> None:
        """Kill it, and start it anew; it does not serve yet."""
        self._end(signal.SIGKILL)
        self._pidfd = self._started()

    def restart_and_serve(self) -> None:
        """Kill it, start it anew, and return once it serves."""
        self.restart()
        self.opened(calls.session_open("again")).close()

    def upgrade(self) -> None:
        """Have the next one take its place."""
        with open(os.devnull, "w") as out, contextlib.redirect_stdout(out):  # noqa: PTH123
            assert command_line(["upgrade", "--runtime-dir", str(self.runtime_dir)]) == 0
        os.close(self._pidfd)
        with Client.connect(self.runtime_dir) as client:
            self._pidfd = os.pidfd_open(client.status().pid)

    def close(self) -> None:
        """End it, and who holds its memory."""
        self._end(signal.SIGTERM)
        open_store(self.runtime_dir, Inherited(), {})

    def _end(self, number: int) -> None:
        signal.pidfd_send_signal(self._pidfd, number)
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        assert ended.poll(1000 * STOP_TIMEOUT_S)
        os.close(self._pidfd)

    def _started(self) -> int:
        with self._log.open("ab") as out:
            process = subprocess.Popen(  # noqa: S603  what is measured
                self._command, stdout=out, stderr=out, env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
            )
        process.returncode = 0  # its end is seen by its descriptor, as that of a successor
        return os.pidfd_open(process.pid)

    def opened(self, opening: SessionOpen) -> SessionChannel:
        """Open a session as soon as it serves."""
        while True:
            with contextlib.suppress(KvferryError):
                return SessionChannel.open(self.runtime_dir, opening)
            time.sleep(LOOK_S)


@contextlib.contextmanager
def lives(*options: str) -> Iterator[Lives]:
    """Run a daemon with these options."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        one = Lives(Path(folder), *options)
        try:
            yield one
        finally:
            one.close()


def measure(effort: Effort) -> list[Row]:
    """Measure a session that is resumed with its pages, and what an engine waits for at most, over each."""
    return [resumed(effort), *waited(effort)]


def resumed(effort: Effort) -> Row:
    """Measure until a session is resumed, against a daemon that has nothing to adopt."""
    with lives("--keep") as warm, lives() as cold:
        channel = warm.opened(calls.session_open("engine", keep=True))
        cold.opened(calls.session_open("engine")).close()
        with Client.connect(warm.runtime_dir) as client:
            client.create_pool("pool", SPEC)
            client.allocate("pool", PAGES)
        resume = calls.session_open("", keep=True, resume=channel.opened.secret)
        channel.close()

        def resumed() -> float:
            began = time.perf_counter()
            warm.restart()
            warm.opened(resume).close()
            return 1000 * (time.perf_counter() - began)

        def started() -> float:
            began = time.perf_counter()
            cold.restart()
            cold.opened(calls.session_open("engine")).close()
            return 1000 * (time.perf_counter() - began)

        return compare(
            "warm_restart",
            MILLISECONDS,
            ours=resumed,
            peer=started,
            peer_is="the same of a daemon that has nothing to adopt",
            rounds=effort.pick(9, 1),
            target=Target(1.2),
            note="from kill -9 to the session resumed by its secret, with a pool of 256 MiB that was adopted",
        )


def waited(effort: Effort) -> Iterator[Row]:
    """Measure the longest time that an engine, which asks all the time, waits for an answer."""
    with lives("--keep") as one, contextlib.closing(one.opened(calls.session_open("first"))):
        for size, spec in (("256MiB", SPEC), ("8GiB", LARGE))[: effort.pick(2, 1)]:
            with Client.connect(one.runtime_dir, name="engine") as engine:
                engine.create_pool(size, spec)

                def longest(change: Callable[[], None], engine: Client = engine) -> float:
                    changing = threading.Thread(target=change)
                    changing.start()
                    waits, last = [], time.perf_counter()
                    while changing.is_alive():
                        engine.ping()
                        waits.append(time.perf_counter() - last)
                        last = time.perf_counter()
                    return 1000 * max(waits)

                figures = interleave(
                    effort.pick(20, 1), lambda: longest(one.restart_and_serve), lambda: longest(one.upgrade)
                )
                engine.delete_pool(size)
            restarts, upgrades = figures
            for what, ours, peer, bound in (
                ("restart", restarts, upgrades, RESTART_MS),
                ("upgrade", upgrades, restarts, UPGRADE_MS),
            ):
                p50, p99 = np.percentile(ours, [50, 99])
                yield row_of(
                    f"warm_restart/{what}/{size}",
                    MILLISECONDS,
                    ours,
                    peer,
                    peer_is="an upgrade" if what == "restart" else "kill -9 and a restart",
                    target=Target(bound, "ours"),
                    note=f"the longest wait of an engine for a PING, p50 {p50:.0f}, p99 {p99:.0f} ms; a pool of {size}",
                )

"""From ``kill -9`` of the daemon to the first answer of the next one, which has adopted a pool and a session."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import MILLISECONDS, Effort, Row, Target, compare
from benchmarks.processes import STOP_TIMEOUT_S
from kvferry.clients import Client, MhaSpec, calls
from kvferry.clients.session_channel import SessionChannel
from kvferry.daemon.process.fd_store import open_store
from kvferry.daemon.process.inherited import Inherited
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.session_stream import SessionOpen

SPEC = MhaSpec(layers=2, tokens=32 << 10, page_size=128, kv_heads=8, head_dim=128, dtype="float16")
"""256 MiB."""
PAGES = 100
LOOK_S = 0.001


class Lives:
    """A daemon in a runtime directory of its own, one life after the other."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.runtime_dir = folder / "run"
        self._log = folder / "log"
        self._command = [sys.executable, "-P", "-m", "kvferry.daemon", "--runtime-dir", str(self.runtime_dir), *options]
        self._process = self._started()

    def restart(self) -> None:
        """Kill it, and start it anew; it does not serve yet."""
        self._process.kill()
        self._process.wait()
        self._process = self._started()

    def close(self) -> None:
        """End it, and who holds its memory."""
        self._process.terminate()
        self._process.wait(STOP_TIMEOUT_S)
        open_store(self.runtime_dir, Inherited(), {})

    def _started(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as out:
            return subprocess.Popen(self._command, stdout=out, stderr=out)  # noqa: S603  what is measured

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
    """Measure a session that is resumed with its pages, against a daemon that has nothing to adopt."""
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

        return [
            compare(
                "warm_restart",
                MILLISECONDS,
                ours=resumed,
                peer=started,
                peer_is="the same of a daemon that has nothing to adopt",
                rounds=effort.pick(9, 1),
                target=Target(1.2),
                note="from kill -9 to the session resumed by its secret, with a pool of 256 MiB that was adopted",
            )
        ]

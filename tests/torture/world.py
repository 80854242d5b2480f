"""The daemons and engines of a run: real processes, started, ended, and started anew."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from kvferry.clients import AsyncClient
from kvferry.daemon.process.fd_store import open_store
from kvferry.daemon.process.inherited import Inherited
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.ids import HOST
from kvferry.protocol.settings import PEER_SOCKET
from tests.cann_simulator.build import NPU_PYTHON
from tests.kit.control_groups import ControlGroup
from tests.kit.started import REPOSITORY, Started, started
from tests.kit.tcp_proxy import Proxy
from tests.torture.actors import LAST_S, READY, Ended, Order

ACTORS: Final = Path(__file__).with_name("actors.py")
START_S: Final = 60.0
END_S: Final = 40.0
DISK_BYTES: Final = 24 << 20
MEMORY_BYTES: Final = 1 << 30
"""Of a daemon, where a control group can be made; of one on a device, what stands for the device would count."""
CONFIG: Final = """
[service]
drain_timeout_s = 2
[peers]
timeout_ms = 1000
[tiers]
host_bytes = 33554432
[tiers.disk]
path = "{disk}"
max_bytes = 16777216
[logging]
format = "json"
"""


COSTLY: Final = 0.1
"""So much rarer than others are those hit whose start takes seconds: on a device."""


class RunFailedError(Exception):
    """The run has found something: what, and where."""


class Daemon:
    """A daemon in a runtime directory of its own, in one life after the other.

    Attributes:
        ready: set while it serves.
        address: where the other daemons of this host find it; known once it has served.
        warm: whether its pools and sessions outlive it, with ``--keep``.
        small_disk: whether its disk tier has a file system of its own, which can be filled.
        lives: how often it was started.
        stopped: whether it is stopped at the moment.
    """

    def __init__(
        self, number: int, folder: Path, sabotage: str, simulated: Mapping[str, str] | None = None, *, links: Proxy
    ) -> None:
        """Prepare one; those with even numbers are warm.

        Args:
            number: of it.
            folder: where its own folder is made.
            sabotage: its own fault, or "".
            simulated: the environment of one on simulated NPUs.
            links: what other daemons say to it goes through this from its first answer on.
        """
        self._links = links
        self.simulated = simulated
        self.warm = number % 2 == 0
        self.number = number
        self.folder = folder / f"daemon-{number}"
        self.runtime_dir = self.folder / "run"
        self.log = self.folder / "daemon.log"
        self.disk = self.folder / "disk"
        self.ready = asyncio.Event()
        self.lives = 0
        self.address = ""
        self.stopped = False
        self._sabotage = sabotage
        self._process: asyncio.subprocess.Process | None = None
        self.disk.mkdir(parents=True, mode=0o700)
        self.small_disk = os.geteuid() == 0 and _mounted(self.disk)
        self._group = None if simulated else _group(f"kvferry-torture-{os.getpid()}-{number}")
        (self.folder / "daemon.toml").write_text(CONFIG.format(disk=self.disk))

    @property
    def hit(self) -> float:
        """Return how often a fault is to hit it."""
        return 1.0 if self.simulated is None else 3 * COSTLY

    @property
    def python(self) -> Path | None:
        """Return the interpreter of it and its engines, where that is not this process's."""
        return None if self.simulated is None else NPU_PYTHON

    @property
    def pid(self) -> int:
        """Return the process id."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it, and return when it serves.

        Raises:
            RunFailedError: it does not, or ends.
        """
        command = ["-m", "tests.torture.sabotage", self._sabotage] if self._sabotage else ["-P", "-m", "kvferry.daemon"]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(self._group.prefix if self._group is not None else []),
                os.fspath(self.python or sys.executable),
                *command,
                *(["--keep"] if self.warm else []),
                *("--config", os.fspath(self.folder / "daemon.toml"), "--runtime-dir", os.fspath(self.runtime_dir)),
                stderr=log,
                stdout=log,
                stdin=asyncio.subprocess.DEVNULL,
                cwd=REPOSITORY,
                env={**os.environ, **(self.simulated or {})},
            )
        self.lives += 1
        try:
            async with asyncio.timeout(START_S):
                while not await self._answers():
                    if self._process.returncode is not None:
                        raise RunFailedError(f"daemon {self.number} ended with {self._process.returncode} at its start")
        except TimeoutError:
            raise RunFailedError(f"daemon {self.number} did not serve within {START_S:g} s") from None
        # a new life takes the place of the route's file, so nothing is to be moved back
        self._links.route_unix(self.runtime_dir / PEER_SOCKET, f"daemon {self.number}")
        self.ready.set()

    async def end(self, number: signal.Signals) -> None:
        """End it by a signal, and wait for its end.

        Raises:
            RunFailedError: it does not end, or not as it should.
        """
        assert self._process is not None
        self.ready.clear()
        self.send(number)
        try:
            status = await asyncio.wait_for(self._process.wait(), END_S)
        except TimeoutError:
            raise RunFailedError(f"daemon {self.number} did not end within {END_S:g} s of {number.name}") from None
        wanted = -number if number == signal.SIGKILL else 0
        if status != wanted:
            raise RunFailedError(f"daemon {self.number} ended with status {status} after {number.name}")

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        """Kill it, if it runs, and wait for its end."""
        if self._process is not None:
            self.send(signal.SIGKILL)
            await self._process.wait()
        await asyncio.to_thread(open_store, self.runtime_dir, Inherited(), {})  # ends what held its memory
        if self.small_disk:
            self.small_disk = False
            await asyncio.to_thread(_unmount, self.disk)
        if self._group is not None:
            with contextlib.suppress(OSError):  # what held its memory may still be ending
                self._group.remove()

    def check_alive(self) -> None:
        """Check that it has not ended by itself.

        Raises:
            RunFailedError: it has.
        """
        if self.ready.is_set() and self._process is not None and self._process.returncode is not None:
            raise RunFailedError(f"daemon {self.number} ended by itself with status {self._process.returncode}")

    async def _answers(self) -> bool:
        with contextlib.suppress(KvferryError):
            async with await AsyncClient.connect(self.runtime_dir, name="torture") as client:
                self.address = (await client.status()).addresses[0]
                return True
        await asyncio.sleep(0.05)
        return False


def _group(name: str) -> ControlGroup | None:
    """Return a control group with little memory, where that is allowed here."""
    try:
        return ControlGroup.make(name, MEMORY_BYTES)
    except OSError:
        return None


def _mounted(folder: Path) -> bool:
    """Mount a small file system, and return whether that is allowed here."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "kvferry-torture", os.fspath(folder)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", os.fspath(folder)], check=True)


class Engine:
    """An engine process, in one life after the other; each order gets its end, if only by the process's.

    Attributes:
        ready: set once the process has its pool; what it is told before would only wait.
        on_device: whether its pool's memory is a device's.
    """

    def __init__(
        self,
        number: int,
        daemon: Daemon,
        heard: Callable[[Ended], None],
        device: str = HOST,
        *,
        registers: bool = False,
    ) -> None:
        """Call ``heard`` with each end that an engine tells. Its pool is on ``device``; it ``registers`` its memory."""
        self.on_device = device != HOST
        self.ready = asyncio.Event()
        self._where = [device, "yes" if registers else "no"]
        self.number = number
        self.daemon = daemon
        self._heard = heard
        self._process: Started | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Ended | None]] = {}
        self._last = 0

    @property
    def hit(self) -> float:
        """Return how often a fault is to hit it."""
        return COSTLY if self.on_device else 1.0

    async def start(self) -> None:
        """Start the process, forked from one that has imported torch; it connects by itself."""
        script = ["-m", "tests.torture.actors"] if self.on_device else [os.fspath(ACTORS)]
        program = [*script, os.fspath(self.daemon.runtime_dir), f"engine-{self.number}", *self._where]
        with (self.daemon.folder / f"engine-{self.number}.log").open("ab") as log:
            self._process = started(  # forked in milliseconds, but for the first, and for those on devices
                program,
                stderr=log.fileno(),
                environment=self.daemon.simulated if self.on_device else None,
                python=self.daemon.python if self.on_device else None,
            )
        told = asyncio.StreamReader()
        assert self._process.stdout is not None
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), self._process.stdout)
        self._reading = asyncio.create_task(self._read(told))

    async def until_ready(self) -> None:
        """Return once it has its pool.

        Raises:
            RunFailedError: it does not come so far.
        """
        try:
            await asyncio.wait_for(self.ready.wait(), START_S)
        except TimeoutError:
            raise RunFailedError(f"engine {self.number} had no pool within {START_S:g} s") from None

    async def run(self, order: Order) -> Ended | None:
        """Have an order run; return how it ended, None where the engine ended first.

        Raises:
            RunFailedError: it did not end in time.
        """
        process = self._process
        if process is None or process.stdin is None or self._reading is None or self._reading.done():
            return None
        self._last += 1
        order.number = self._last
        ended = self._waiting[order.number] = asyncio.get_running_loop().create_future()
        try:
            os.write(process.stdin.fileno(), msgspec.json.encode(order) + b"\n")  # less than the pipe holds
            return await asyncio.wait_for(ended, LAST_S + 2 * (order.deadline_s + order.margin_s))
        except TimeoutError:
            raise RunFailedError(f"engine {self.number} has not ended {order.part} {order.request}") from None
        except (OSError, ValueError):  # it has just ended: the pipe is broken, or closed
            return None
        finally:
            self._waiting.pop(order.number, None)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def kill(self) -> None:
        """Kill it, if it runs, and wait for its end."""
        await self.end()

    async def end(self, *, kindly: bool = False) -> None:
        """Kill it, or let it finish what it does; wait for its end."""
        process = self._process
        self.ready.clear()
        if process is None or self._reading is None:
            return
        if kindly and process.stdin is not None:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._reading), 2 * LAST_S)
        self.send(signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        await self._reading
        if process.stdin is not None and not kindly:
            process.stdin.close()

    async def _read(self, told: asyncio.StreamReader) -> None:
        while line := await told.readline():
            if not line.startswith(b"{"):
                continue  # torch_npu says that CANN is not installed
            ended = msgspec.json.decode(line, type=Ended)
            if ended.outcome == READY:
                self.ready.set()
            self._heard(ended)
            waiting = self._waiting.get(ended.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(ended)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(None)

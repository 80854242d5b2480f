"""The daemons and engines of a run: real processes, started, ended, and started anew."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import pytest

from kvferry.clients import AsyncClient
from kvferry.daemon.process.device_keeper import open_keeper
from kvferry.daemon.process.fd_store import open_store
from kvferry.daemon.process.inherited import Inherited
from kvferry.protocol.ids import HOST
from kvferry.protocol.settings import PEER_SOCKET
from tests.cann_simulator.build import NPU_PYTHON
from tests.kit import daemons as kit_daemons
from tests.kit.control_groups import ControlGroup
from tests.kit.started import Started, started
from tests.kit.tcp_proxy import Proxy
from tests.torture.actors import LAST_S, READY, Ended, Order

ACTORS: Final = Path(__file__).with_name("actors.py")
START_S: Final = 60.0
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


class Daemon(kit_daemons.Daemon):
    """A daemon in one life after the other; one with an even number is warm: its pools and sessions outlive it."""

    def __init__(
        self, number: int, folder: Path, sabotage: str, simulated: Mapping[str, str] | None = None, *, links: Proxy
    ) -> None:
        self.number = number
        self.folder = folder / f"daemon-{number}"
        self.disk = self.folder / "disk"
        self.address = ""  # where the other daemons of this host find it; known once it has served
        self.simulated = simulated
        self.python = None if simulated is None else NPU_PYTHON
        self._links = links
        self._life = 0
        self._serves = False
        self.disk.mkdir(parents=True, mode=0o700)
        # its disk tier has a file system of its own, which can be filled
        self.small_disk = os.geteuid() == 0 and _mounted(self.disk)
        self._group = None if simulated else _group(f"kvferry-torture-{os.getpid()}-{number}")
        command = ["-m", "tests.torture.sabotage", sabotage] if sabotage else [*kit_daemons.USERS_COMMAND]
        options = {
            "environment": simulated or {},
            "prefix": self._group.prefix if self._group is not None else (),
            "python": self.python,
        }
        super().__init__(self.folder, [*command, *(["--keep"] if number % 2 == 0 else [])], options)
        self.configure(CONFIG.format(disk=self.disk))

    @property
    def hit(self) -> float:
        return 1.0 if self.simulated is None else 3 * COSTLY

    async def begin(self) -> None:
        """Start it, and return when it serves."""
        self._life += 1
        self.log = self.folder / f"daemon-{self._life}.log"
        try:
            await asyncio.to_thread(self.start)
        except pytest.fail.Exception as error:
            raise RunFailedError(f"daemon {self.number}: {error}") from None
        if not self.address:
            async with await AsyncClient.connect(self.runtime_dir, name="torture") as client:
                self.address = (await client.status()).addresses[0]
        # a new life takes the place of the route's file, so nothing is to be moved back
        self._links.route_unix(self.runtime_dir / PEER_SOCKET, f"daemon {self.number}")
        self._serves = True

    async def finish(self, number: signal.Signals) -> None:
        """End it by a signal, and wait for its end."""
        self._serves = False
        try:
            status = await asyncio.to_thread(self.end, number)
        except subprocess.TimeoutExpired:
            raise RunFailedError(f"daemon {self.number} did not end after {number.name}") from None
        if status != (-number if number == signal.SIGKILL else 0):
            raise RunFailedError(f"daemon {self.number} ended with status {status} after {number.name}")

    async def remove(self) -> None:
        """Kill it, if it runs, and what holds its memory."""
        if self._life:
            await asyncio.to_thread(self.kill)
        store = await asyncio.to_thread(open_store, self.runtime_dir, Inherited(), {})
        await asyncio.to_thread(open_keeper, self.runtime_dir, store, 1)
        if self.small_disk:
            self.small_disk = False
            await asyncio.to_thread(_unmount, self.disk)
        if self._group is not None:
            with contextlib.suppress(OSError):  # what held its memory may still be ending
                self._group.remove()

    def check_alive(self) -> None:
        """Check that it has not ended by itself."""
        if self._serves and self.process.poll() is not None:
            raise RunFailedError(f"daemon {self.number} ended by itself with status {self.process.poll()}")


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
    """An engine process, in one life after the other; each order gets its end, if only by the process's."""

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
        self.ready = asyncio.Event()  # it has its pool; what it is told before would only wait
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
        """Return once it has its pool."""
        try:
            await asyncio.wait_for(self.ready.wait(), START_S)
        except TimeoutError:
            raise RunFailedError(f"engine {self.number} had no pool within {START_S:g} s") from None

    async def run(self, order: Order) -> Ended | None:
        """Have an order run; return how it ended, None where the engine ended first."""
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
            raise RunFailedError(f"engine {self.number} has not ended {order.part} {order.task.request}") from None
        except (OSError, ValueError):  # it has just ended: the pipe is broken, or closed
            return None
        finally:
            self._waiting.pop(order.number, None)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

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

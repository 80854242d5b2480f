"""What tests of the Mooncake engine share: peers in processes of their own, and an engine that a test scripts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvferry.daemon.transports.mooncake_native import MooncakeSettings, NativeEngine
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.errors import KvferryError

WAIT_S = 60.0
PROGRESS_TIMEOUT_S = 2
SCRIPT = Path(__file__).with_name("mooncake_peer.py")


def mooncake_works() -> bool:
    try:
        import mooncake.engine  # noqa: F401, PLC0415
    except ImportError:
        return False
    return True


class Peer:
    """A process with an engine, and its registered memory, which is shared with the test."""

    def __init__(self, process: subprocess.Popen[str], region: HostRegion) -> None:
        self.region = region
        self._process = process
        hello = self.hear()
        self.session_name: str = hello["session_name"]
        self.address: int = hello["address"]

    def notify(self, **order: object) -> None:
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the peer has died"
        heard: dict[str, Any] = json.loads(line)
        return heard

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, and wait until it has worked where it stops."""
        self._process.send_signal(number)
        if number is signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)


@contextmanager
def running_peer(size_bytes: int) -> Iterator[Peer]:
    with HostRegion.create("peer", size_bytes) as region:
        fd = region.fd
        command = [sys.executable, "-P", str(SCRIPT), str(fd), str(size_bytes), str(PROGRESS_TIMEOUT_S)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[fd]
        ) as process:
            try:
                yield Peer(process, region)
            finally:
                process.kill()


class Ends:
    """Collects the ends of writes."""

    def __init__(self) -> None:
        self.errors: list[KvferryError | None] = []
        self._news = asyncio.Event()

    def __call__(self, error: KvferryError | None) -> None:
        self.errors.append(error)
        self._news.set()

    async def wait(self, count: int) -> list[KvferryError | None]:
        async with asyncio.timeout(WAIT_S):
            while len(self.errors) < count:
                self._news.clear()
                await self._news.wait()
        return self.errors


class ScriptedEngine:
    """Mooncake's engine as far as it is used: a write ends when the test says so; ``aborted`` is what would abort."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.regions: dict[int, int] = {}
        self.under_way: dict[int, int] = {}  # status by id
        self.submitted: list[int] = []  # remote addresses
        self.refuse = False
        self.hangs: threading.Event | None = None  # a submission waits for it
        self.hanging = False
        self.polls = 0
        self.fails: dict[int, Exception] = {}  # by id, once, when its status is asked for
        self.aborted: list[int] = []
        self.ended = threading.Event()
        self.ids: dict[int, int] = {}  # by remote address
        self.free_ids: list[int] = []  # given again, as the real one does
        self.returns: threading.Event | None = None  # what a status waits for after its id has become free

    def initialize(self, *_: object) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return self.port

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        self.regions[buffer_addr] = capacity
        return 0

    def unregister_memory(self, buffer_addr: int, /) -> int:
        return -1 if self.regions.pop(buffer_addr, None) is None else 0

    def batch_transfer_async_write(
        self, target: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int:
        assert target
        assert len(buffers) == len(peer_buffer_addresses) == len(lengths) == 1
        self.hanging = self.hangs is not None
        assert self.hangs is None or self.hangs.wait(WAIT_S)
        if self.refuse:
            return 0
        batch_id = self.free_ids.pop() if self.free_ids else len(self.submitted) + 1
        self.submitted.append(peer_buffer_addresses[0])
        self.ids[peer_buffer_addresses[0]] = batch_id
        self.under_way[batch_id] = 0
        return batch_id

    def transfer_check_status(self, batch_id: int, /) -> int:
        self.polls += 1
        if batch_id in self.fails:
            raise self.fails.pop(batch_id)
        if batch_id not in self.under_way:
            self.aborted.append(batch_id)
        status = self.under_way[batch_id]
        if status in (1, -1):
            del self.under_way[batch_id]
            self.free_ids.append(batch_id)
            self.ended.set()
            assert self.returns is None or self.returns.wait(WAIT_S)
        return status

    def end(self, remote_address: int, status: int) -> None:
        """Let the write to this address end; addresses are written once a test."""
        self.under_way[self.ids[remote_address]] = status


class Factory:
    """Makes scripted engines, on ports that rise, and remembers them; ``fail`` makes the next one fail."""

    def __init__(self) -> None:
        self.engines: list[ScriptedEngine] = []
        self.destroyed: list[ScriptedEngine] = []
        self.fail: KvferryError | None = None
        self.worker = ThreadPoolExecutor(1)  # of the wrapper; what else is given to it holds the wrapper up

    def create(self, settings: MooncakeSettings) -> NativeEngine:
        assert settings.address
        if self.fail is not None:
            raise self.fail
        self.engines.append(ScriptedEngine(1000 + len(self.engines)))
        return self.engines[-1]

    def destroy(self, holder: list[NativeEngine]) -> None:
        engine = holder.pop()
        assert isinstance(engine, ScriptedEngine)
        engine.under_way.clear()
        self.destroyed.append(engine)

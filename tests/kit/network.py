"""Transfer ops between two daemons for the real transports: real state machines and pools, nothing else is real."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
import xxhash

from kvferry.daemon.transfer.endpoints import Incarnation, TransferOp
from kvferry.daemon.transports.mooncake import MooncakeEngine, OnWriteDone, OnWriteLate
from kvferry.daemon.transports.network_memory import FenceBounds, NetworkMemory, NetworkTuning
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.copies import copy_one_by_one
from kvferry.pools.pool import Pool
from kvferry.protocol.config.schema import NetworkConfig
from kvferry.protocol.errors import KvferryError, TransferFailedError
from kvferry.protocol.peer_messages import Announce, PeerBody, PeerSend, WriteCredit
from tests.kit.bytes import read_region
from tests.kit.peers import PAGES, Transfer, Way
from tests.kit.transfers import PAGE_BYTES

SEGMENTS = PAGES * 4
BYTES = SEGMENTS * PAGE_BYTES
WRITE_TIMEOUT_S = 7.0
NEVER = FenceBounds(quarantined_bytes=1 << 30, quarantined_s=1e9, drain_timeout_s=1e9, pages_s=1e9)
TURNS = 10
"""More than any report takes to come through the loop."""

P = ParamSpec("P")
T = TypeVar("T")


class ManualExecutor(Executor):
    """Does work when the test says so, on a thread of its own, as an executor does: it may wait for a device."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def operation() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # noqa: BLE001  whatever it is, it is the future's
                future.set_exception(error)

        self.waiting.append(operation)
        return future

    async def run(self) -> None:
        await turns()
        while self.waiting:
            await self.run_one()

    async def run_one(self) -> None:
        worker = threading.Thread(target=self.waiting.popleft())
        worker.start()
        worker.join()
        await turns()


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Said:
    """What was said to peers, for ``SendToPeer``."""

    def __init__(self) -> None:
        self.all: list[tuple[Incarnation, PeerBody]] = []
        self.gone: set[Incarnation] = set()  # peers that cannot be spoken to

    def __call__(self, peer: Incarnation, body: PeerBody) -> bool:
        if peer in self.gone:
            return False
        self.all.append((peer, body))
        return True

    def of(self, kind: type[T]) -> list[T]:
        return [body for _, body in self.all if isinstance(body, kind)]


class Begun(NamedTuple):
    """A write that was begun."""

    session_name: str
    content: bytes
    remote_address: int
    on_done: OnWriteDone
    on_late: OnWriteLate | None


class ScriptedNetwork:
    """A network engine whose writes, registrations and rebuilds end when the test says so; see ``MooncakeEngine``.

    ``may_rebuild`` and ``may_register`` are set to let it.
    """

    def __init__(self) -> None:
        self.session_name = "session 1"
        self.writing = False
        self.held = False
        self.may_rebuild, self.may_register, self.forgotten = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.error: TransferFailedError | None = None  # what rebuilding or registering raises
        self.registered: dict[int, int] = {}  # what peers may write, by address
        self.begun: list[Begun] = []  # the writes
        self.refuse_after: int | None = None  # so many writes begin, and no more
        self.rebuilds = 0  # how many were begun

    def hold(self, *, held: bool) -> None:
        self.held = held

    async def rebuild(self) -> str:
        self.rebuilds += 1
        await self._wait(self.may_rebuild)
        self.session_name = f"session {self.rebuilds + 1}"
        return self.session_name

    async def register(self, address: int, size_bytes: int) -> None:
        await self._wait(self.may_register)
        assert address not in self.registered
        self.registered[address] = size_bytes

    async def unregister(self, address: int) -> None:
        await self._wait(self.may_register)
        del self.registered[address]
        self.forgotten.set()

    def write(
        self,
        session_name: str,
        local_address: int,
        remote_address: int,
        size_bytes: int,
        on_done: OnWriteDone,
        *,
        timeout_s: float,
        on_late: OnWriteLate | None = None,
    ) -> int:
        """Begin a write, which moves nothing."""
        assert timeout_s == WRITE_TIMEOUT_S
        if len(self.begun) == self.refuse_after:
            raise TransferFailedError("the engine is closed")
        self.begun.append(Begun(session_name, bytes_at(local_address, size_bytes), remote_address, on_done, on_late))
        return len(self.begun)

    async def close(self) -> None:
        """End it."""

    async def _wait(self, may: asyncio.Event) -> None:
        await may.wait()
        if self.error is not None:
            raise self.error


def network_memory(
    *, buffer_bytes: int, bounce_buffers: int = 8, staging: int = 2, bounds: FenceBounds = NEVER, direct: bool = False
) -> tuple[ScriptedNetwork, NetworkMemory]:
    """Return the memory of a daemon that other hosts may write, and the engine that they would write it by."""
    engine = ScriptedNetwork()
    config = NetworkConfig(bounce_buffers=bounce_buffers, bounce_buffer_bytes=buffer_bytes, direct=direct)
    tuning = NetworkTuning(staging=staging, write_timeout_s=WRITE_TIMEOUT_S, **bounds._asdict())
    regions = region(bounce_buffers * buffer_bytes), region(staging * buffer_bytes)
    return engine, NetworkMemory(config, tuning, cast("MooncakeEngine", engine), *regions)


class NetworkHarness(Transfer):
    """A source and a home whose receive requests meet, so that there are transfer ops to move."""

    def __init__(self, way: Way = "tcp") -> None:
        super().__init__(way)
        self.source_pool, self.home_pool = self.prefill.pool, self.decode.pool
        self.home_pool.allocator.free(self.decode.session, self.decode.pages)  # so that the page numbers differ
        self.greet()
        self._requests = itertools.count(1)
        self.reports: list[tuple[int, KvferryError | None]] = []  # the ends of ops, as a home's transport tells them

    def op(self) -> TransferOp:
        before, request = set(self.home.state_machine.endpoints.ops), f"{next(self._requests):032x}"
        self.receive(ids=self.home_pool.allocator.allocate(self.decode.session, PAGES), request=request)
        self.harness.deliver_until(self.home, self.source, Announce)
        self.send(ids=self.source.filled(self.source_pool, self.prefill.session, PAGES), request=request)
        self.harness.deliver_until(self.source, self.home, PeerSend)
        (number,) = set(self.home.state_machine.endpoints.ops) - before
        return self.home.state_machine.endpoints.ops[number]

    def report(self, op_id: int, error: KvferryError | None) -> None:
        self.reports.append((op_id, error))

    @property
    def outcomes(self) -> list[tuple[int, str]]:
        return [(number, error.code if error else "OK") for number, error in self.reports]

    @property
    def to_source(self) -> Incarnation:
        peer = self.home.links.connect(self.address(self.source))
        assert peer is not None
        return peer

    @property
    def to_home(self) -> Incarnation:
        (connection,) = self.source.links.connections.values()
        assert connection.peer is not None
        return connection.peer

    def arrived(self, op: TransferOp) -> bool:
        return content_at_source(self.source_pool, op) == content_at_home(op)


def content_at_source(pool: Pool, op: TransferOp) -> bytes:
    return _content(pool, op, 0)


def content_at_home(op: TransferOp) -> bytes:
    return _content(op.receive_request.pool, op, 1)


def _content(pool: Pool, op: TransferOp, column: int) -> bytes:
    memory, (planned_copy,) = read_region(pool.region), op.planned_copies
    return b"".join(memory[one[column] : one[column] + one[2]].tobytes() for one in planned_copy.plan.blocks().tolist())


def write(harness: NetworkHarness, op: TransferOp, credit: WriteCredit) -> int:
    """Write to a bounce buffer what was credited; return the checksum."""
    side = op.planned_copies[credit.segment].plan.source
    harness.source_pool.region.gather(side, credit.first, credit.stop, credit.address, copy_one_by_one)
    return checksum_at(credit.address, credit.size_bytes)


def checksum_at(address: int, size_bytes: int) -> int:
    return xxhash.xxh3_64_intdigest((ctypes.c_char * size_bytes).from_address(address))


def bytes_at(address: int, size_bytes: int) -> bytes:
    return ctypes.string_at(address, size_bytes)


def region(size_bytes: int) -> HostRegion:
    made = HostRegion.create("test", size_bytes)
    made.view()[:] = np.uint8(0xEE)
    return made

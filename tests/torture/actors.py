"""An engine of a run: does what it is told, one JSON object a line, at the same time, and says how each thing ended.

It connects anew where its daemon is lost. Bytes are checked when they have arrived, and once more before pages go back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvferry.clients import AsyncClient, ModelIdentity, Transfer, pages, pages_wanted
from kvferry.clients.connection import Reconnected
from kvferry.clients.core.followed import TierOperation
from kvferry.protocol import errors
from kvferry.protocol.events import Finished, TierDone
from kvferry.protocol.ids import HOST
from tests.torture import oracle
from tests.torture.oracle import ANY_PAGE, Claims
from tests.torture.plan import Task

POOL: Final = "kv"
MODEL: Final = ModelIdentity(name="torture")
LAST_S: Final = 60.0
"""For so long an engine that is to end waits for what it does."""

HOST_TENSORS: Final = "cpu"
AGAIN_S: Final = 0.05
OPENING_S: Final = 60.0
"""The first pool on a device takes the daemon so long at most: it imports torch_npu."""

NEVER_ENDED: Final = "NEVER_ENDED"
WRONG: Final = "WRONG_BYTES"
OK: Final = "OK"
READY: Final = "READY"


class Order(msgspec.Struct):
    """What an engine is told: to do its ``part`` of a task: send, receive, offload, cache, tables or keep."""

    part: str
    task: Task
    number: int = 0
    source_daemon: str = ""
    deadline_s: float = 4.0
    margin_s: float = 20.0
    """After its deadline a request must have ended within this time, whatever the machine's load."""


class Ended(msgspec.Struct):
    """How it ended: ``OK``, the code of an error, NEVER_ENDED or WRONG_BYTES; and how many bytes were checked."""

    number: int
    outcome: str
    detail: str = ""
    checked_bytes: int = 0


class WrongBytesError(Exception):
    """Bytes that were acknowledged are not what was sent."""

    def __init__(self, found: str, ids: npt.NDArray[np.int64] | None = None, name: str = "") -> None:
        super().__init__(found)
        self.ids = ids
        self.name = name


class NeverEndedError(Exception):
    """A request has not ended long after its deadline."""


class Engine:
    """One session after the other, and what runs in it."""

    def __init__(
        self, client: AsyncClient, pool: str, memory: oracle.Memory, claims: Claims, own: list[int] | None = None
    ) -> None:
        """``own``: the free pages of a pool that this engine has registered: it gives them out itself."""
        self.client = client
        self.pool = pool
        self.memory = memory
        self._own = own
        self._claims = claims
        self._noted: dict[str, int] = {}

    async def run(self, order: Order) -> Ended:
        part: Callable[[Order], Awaitable[int]] = getattr(self, order.part)
        try:
            checked = await part(order)
        except errors.KvferryError as error:
            return Ended(order.number, error.code, error.detail)
        except WrongBytesError as error:
            return await self._blamed(order, error)
        except NeverEndedError as error:
            return Ended(order.number, NEVER_ENDED, f"{order.part}: {error}")
        return Ended(order.number, OK, checked_bytes=checked * oracle.page_bytes())

    async def _blamed(self, order: Order, wrong: WrongBytesError) -> Ended:
        """Return that bytes are wrong; of a lost session, unless they are those of whoever got the pages since."""
        try:
            await self.client.snapshots()
        except (errors.DaemonLostError, errors.SessionLostError, errors.ClientClosedError) as error:
            if wrong.ids is None:
                return Ended(order.number, error.code, str(wrong))
            since = self._noted.get(order.task.request, 0)
            unexplained = self._claims.unexplained(self.memory, wrong.ids, since)
            if not unexplained:
                return Ended(order.number, error.code, "its pages were others' after the session had gone")
            return Ended(order.number, WRONG, f"{order.part}, its session lost: {unexplained}; {wrong}")
        return Ended(order.number, WRONG, f"{order.part}: {wrong}")

    async def send(self, order: Order) -> int:
        """Send pages full of the request's bytes, in chunks; they must be as they were when they are given back."""
        ids = await self._allocate(order)
        oracle.fill(self.memory, ids, order.task.request)
        if order.task.late == order.part:
            await asyncio.sleep(AGAIN_S)
        cuts = np.array_split(np.arange(order.task.pages), min(order.task.chunks, order.task.pages))
        transfer: Transfer | None = None
        try:
            for number, part in enumerate(cuts):
                listed = [pages(ids[part], first_page=int(part[0]))]
                last = number == len(cuts) - 1
                transfer = self.client.send(
                    self.pool, order.task.request, listed, last=last, deadline_s=order.deadline_s
                )
            if order.task.cancels == order.part and transfer is not None:
                await self.client.cancel(transfer)
            if transfer is not None:
                await self._finished(order, transfer)
        finally:
            if transfer is not None:
                await self._settled(order, transfer)
            self._check(ids, order.task.request)
            await self._free(ids)
        return order.task.pages

    async def receive(self, order: Order) -> int:
        """Receive pages and check them; after a failure nobody may write them any more."""
        if order.task.into == "host":
            return await self._receive_to_host(order)
        ids = await self._allocate(order)
        oracle.fill(self.memory, ids, oracle.LATE)
        if order.task.late == order.part:
            await asyncio.sleep(AGAIN_S)
        name, daemons = oracle.LATE, [order.source_daemon] if order.source_daemon else []
        listed = [pages(ids, first_page=0)]
        transfer = self.client.receive(
            self.pool, order.task.request, listed, source_daemons=daemons, deadline_s=order.deadline_s
        )
        try:
            if order.task.cancels == order.part:
                await self.client.cancel(transfer)
            await self._finished(order, transfer)
            name = order.task.request
            self._check(ids, name)
        finally:
            await self._settled(order, transfer)
            if name == oracle.LATE:
                oracle.fill(self.memory, ids, name)
            await asyncio.sleep(order.task.lasts_s)
            self._check(ids, name)
            await self._free(ids)
        return order.task.pages

    async def _receive_to_host(self, order: Order) -> int:
        daemons = [order.source_daemon] if order.source_daemon else []
        wanted = [pages_wanted(order.task.pages, first_page=0)]
        transfer = self.client.receive(
            self.pool, order.task.request, wanted, source_daemons=daemons, into="host", deadline_s=order.deadline_s
        )
        try:
            finished = await self._finished(order, transfer)
        finally:
            await self._settled(order, transfer)
        return await self._restore(order, finished.snapshot)

    async def offload(self, order: Order) -> int:
        """Offload pages, give them back, and restore them into others."""
        ids = await self._allocate(order)
        oracle.fill(self.memory, ids, order.task.request)
        try:
            operation = self.client.offload(self.pool, [pages(ids, first_page=0)], deadline_s=order.deadline_s)
            snapshot = (await self._done(order, operation)).snapshot
        finally:
            await self._free(ids)
        await asyncio.sleep(order.task.lasts_s)
        return await self._restore(order, snapshot)

    async def _restore(self, order: Order, snapshot: str) -> int:
        """Restore into pages of the daemon's choice; of a pool that this engine has registered, into its own."""
        ids, listed = np.empty(0, np.int64), None
        if self._own is None:
            self._claims.note(np.full(order.task.pages, ANY_PAGE), order.task.request)
        else:
            ids = await self._allocate(order)
            listed = [pages(ids, first_page=0)]
        try:
            operation = self.client.restore(self.pool, snapshot, listed, drop=True, deadline_s=order.deadline_s)
            await self._done(order, operation)
            ids = operation.pages["main"] if self._own is None else ids
            self._check(ids, order.task.request)
        finally:
            await self._free(ids)
        return order.task.pages

    async def cache(self, order: Order) -> int:
        """Store blocks, find them again, and load them; blocks of other engines' orders are as good."""
        ids = await self._allocate(order)
        hashes = [
            hashlib.blake2b(f"{order.task.request}{at}".encode(), digest_size=16).digest()
            for at in range(order.task.pages)
        ]
        oracle.fill(self.memory, ids, order.task.request)
        try:
            await self._done(order, self.client.store(self.pool, hashes, ids, deadline_s=order.deadline_s))
            found = await self.client.lookup(self.pool, hashes, deadline_s=order.deadline_s)
            if not found.blocks:
                return 0
            oracle.fill(self.memory, ids, oracle.LATE)
            await asyncio.sleep(order.task.lasts_s)
            there = ids[: found.blocks]
            await self._done(
                order, self.client.load(self.pool, found.lease, there, unpin=True, deadline_s=order.deadline_s)
            )
            self._check(there, order.task.request)
        finally:
            await self._free(ids)
        return len(there)

    async def tables(self, order: Order) -> int:
        """Make graph tables, put pages into a row, and look at it; those on devices are read by graphs alone."""
        if self.memory[oracle.ROLES[0]].device.type != HOST_TENSORS:
            return await self.keep(order)
        tables = await self.client.create_tables(
            order.task.request[:16],
            self.pool,
            max_batch=4,
            max_context_tokens=16 * oracle.SPEC.page_size,
            deadline_s=order.deadline_s,
        )
        ids = await self._allocate(order)
        try:
            lengths = np.array([order.task.pages * oracle.SPEC.page_size], np.int64)
            await self.client.wait(
                self.client.update_tables(tables, lengths, rows={0: ids}, deadline_s=order.deadline_s)
            )
            row = tables.block_tables[0, : order.task.pages].cpu().numpy()
            if not np.array_equal(row, ids):
                raise WrongBytesError(f"a row of graph tables is {row.tolist()}, and should be {ids.tolist()}")
        finally:
            await self._free(ids)
            await self.client.delete_tables(tables)
        return 0

    async def keep(self, order: Order) -> int:
        """Hold pages for longer, and look at them now and then."""
        ids = await self._allocate(order)
        oracle.fill(self.memory, ids, order.task.request)
        for _ in range(10):
            await asyncio.sleep(order.task.lasts_s)
            self._check(ids, order.task.request)
        await self._free(ids)
        return order.task.pages

    def _check(self, ids: npt.NDArray[np.int64], name: str) -> None:
        found = oracle.wrong(self.memory, ids, name)
        if found:
            raise WrongBytesError(found, ids, name)

    async def _allocate(self, order: Order) -> npt.NDArray[np.int64]:
        count = order.task.pages
        if self._own is None:
            ids = await self.client.allocate(self.pool, count)
            noted = self._claims.note(ids, order.task.request)
            self._noted[order.task.request] = max(noted, self._noted.get(order.task.request, 0))
            return ids
        if len(self._own) < count:
            raise errors.PoolFullError(f"{len(self._own)} pages of its own left, {count} wanted")
        taken, self._own[:] = self._own[:count], self._own[count:]
        return np.array(taken, np.int64)

    async def _free(self, ids: npt.NDArray[np.int64]) -> None:
        if self._own is not None:
            self._own += ids.tolist()
            return
        with contextlib.suppress(errors.DaemonLostError):
            await self.client.free(self.pool, ids)

    async def _finished(self, order: Order, transfer: Transfer) -> Finished:
        try:
            return await self.client.wait_finished(transfer, order.deadline_s + order.margin_s)
        except errors.DeadlineError as error:
            if not transfer.is_finished:
                raise NeverEndedError(str(transfer)) from error
            raise

    async def _settled(self, order: Order, transfer: Transfer) -> None:
        try:
            await self.client.wait_settled(transfer, order.deadline_s + order.margin_s)
        except errors.DeadlineError as error:
            raise NeverEndedError(f"not settled: {transfer}") from error
        except errors.DaemonLostError:
            pass

    async def _done(self, order: Order, operation: TierOperation) -> TierDone:
        try:
            return await self.client.wait_done(operation, order.deadline_s + order.margin_s)
        except errors.DeadlineError as error:
            if not operation.is_done:
                raise NeverEndedError(str(operation)) from error
            raise


class Actor:
    """Reads orders and has an engine run them, all at the same time."""

    def __init__(self, runtime_dir: str, name: str, device: str, registers: str) -> None:
        """``registers``: "yes" where the pool's memory is the engine's own."""
        self._runtime_dir = runtime_dir
        self._name = name
        self._device = device
        self._registers = registers == "yes"
        self._lost_pools = 0
        self._engine: Engine | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Run orders until standard input ends, then what is under way to its end."""
        loop = asyncio.get_running_loop()
        orders = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        connecting = asyncio.create_task(self._stay_connected())
        while line := await orders.readline():
            task = asyncio.create_task(self._run(msgspec.json.decode(line, type=Order)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_S)
        connecting.cancel()

    async def _run(self, order: Order) -> None:
        if self._engine is None:
            ended = Ended(order.number, errors.DaemonLostError.code, "not connected")
        else:
            ended = await self._engine.run(order)
        self._say(ended)

    def _say(self, ended: Ended) -> None:
        os.write(sys.stdout.fileno(), b"\n" + msgspec.json.encode(ended) + b"\n")  # others may print, too

    async def _stay_connected(self) -> None:
        while True:
            with contextlib.suppress(errors.KvferryError):
                async with await AsyncClient.connect(
                    self._runtime_dir, name=self._name, on_reconnect=self._reconnected
                ) as client:
                    await self._stay_in(client)
            self._engine = None
            await asyncio.sleep(AGAIN_S)

    def _reconnected(self, event: Reconnected) -> None:
        """See whether the daemon's restart has cost the pool: three kills while it is adopted on a device do."""
        if self._engine is not None and self._engine.pool in event.pools:
            if self._registers or self._device == HOST:
                self._say(Ended(0, WRONG, f"{self._name}: {self._engine.pool} is POOL_LOST, and its memory is not"))
            self._lost_pools += 1
            self._engine = None

    async def _stay_in(self, client: AsyncClient) -> None:
        while True:
            if self._engine is None:
                self._engine = await self._new_engine(client)
                self._say(Ended(0, READY))
            await client.ping()
            await asyncio.sleep(AGAIN_S)

    async def _new_engine(self, client: AsyncClient) -> Engine:
        """Make the pool: on the host all engines share one; on a device a new one has a new name."""
        claims = Claims(Path(self._runtime_dir).parent / "claims")
        if self._registers:
            shape = (oracle.SPEC.layers, oracle.PAGES + 1, oracle.SPEC.page_size, oracle.SPEC.kv_heads)
            memory = {
                role: torch.zeros((*shape, oracle.SPEC.head_dim), dtype=torch.float16, device=self._device)
                for role in oracle.ROLES
            }
            tensors = {("main", role): tensor for role, tensor in memory.items()}
            name = f"own-{self._name}"
            await client.register_pool(
                name, oracle.SPEC, tensors, device=self._device, model=MODEL, deadline_s=OPENING_S
            )
            return Engine(client, name, memory, claims, list(range(1, oracle.PAGES + 1)))
        name = POOL if self._device == HOST else f"{self._device[:3]}-{self._name}-{self._lost_pools}"
        pool = await client.create_pool(name, oracle.SPEC, device=self._device, model=MODEL, deadline_s=OPENING_S)
        return Engine(client, name, {role: pool.tensor("main", role) for role in oracle.ROLES}, claims)


if __name__ == "__main__":
    asyncio.run(Actor(*sys.argv[1:5]).serve())

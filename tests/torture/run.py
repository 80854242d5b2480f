"""A run: engines at work, faults on top of them, and the accounts at the end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final, NamedTuple

from kvferry.clients import AsyncClient
from kvferry.clients.cli.verify import finding_line
from kvferry.protocol.errors import DaemonLostError, KvferryError
from kvferry.protocol.ids import HOST
from tests.cann_simulator.simulator import Simulator
from tests.kit.tcp_proxy import Proxy
from tests.torture import plan
from tests.torture.actors import OK, Order
from tests.torture.faults import Faults
from tests.torture.report import Report
from tests.torture.world import Daemon, Engine, RunFailedError

NPU: Final = "npu:0"
VERIFY_EVERY_S: Final = 1.0
QUIET_S: Final = 60.0
"""At the end, everything must be given back within this time: sessions end, snapshots and leases go with them."""


class Size(NamedTuple):
    """How large a run is: how long, with how many, how long a request may take, and how fast faults come."""

    seconds: float = 120.0
    daemons: int = 2
    engines: int = 4
    workers: int = 10
    deadline_s: float = 4.0
    margin_s: float = 20.0
    harm: bool = True
    pace: float = 1.0
    npu: bool = False


class Run:
    """One run."""

    def __init__(self, seed: int, size: Size, folder: Path, sabotage: str = "") -> None:
        self.report = Report(seed)
        self._seed = seed
        self._size = size
        self._links = Proxy()
        self._daemons = [Daemon(number, folder, sabotage, links=self._links) for number in range(size.daemons)]
        self._engines = [
            Engine(number, self._daemons[number % size.daemons], self.report.heard) for number in range(size.engines)
        ]
        if size.npu:
            self._add_npu(folder)
        self._faults = Faults(self._daemons, self._engines, self._links)
        self._ends_at = 0.0

    async def run(self) -> None:
        """Run, and leave no process behind; the report says what was found."""
        try:
            await asyncio.gather(*(daemon.begin() for daemon in self._daemons))
            await asyncio.gather(*(engine.start() for engine in self._engines))
            for engine in self._engines:
                await engine.until_ready()
            self._ends_at = time.monotonic() + self._size.seconds
            async with asyncio.TaskGroup() as group:
                for number in range(self._size.workers):
                    group.create_task(self._work(number))
                if self._size.harm:
                    group.create_task(self._harm())
                group.create_task(self._look())
            if not self.report.findings:
                await self._settle_accounts()
        except* RunFailedError as several:
            self.report.findings += _texts(several)
        finally:
            await asyncio.gather(*(engine.end() for engine in self._engines))
            await asyncio.gather(*(daemon.remove() for daemon in self._daemons))
            self._links.close()
            self.report.broken = self._faults.broken

    def _add_npu(self, folder: Path) -> None:
        """Add a daemon on a simulated NPU, and three engines: with a pool there, with memory there, on the host."""
        simulator = Simulator(folder / "npu", ordering=False)
        daemon = Daemon(2 * len(self._daemons), folder, "", simulator.environment(), links=self._links)
        self._daemons.append(daemon)
        for device, registers in ((NPU, False), (NPU, True), (HOST, False)):
            number = len(self._engines)
            self._engines.append(Engine(number, daemon, self.report.heard, device, registers=registers))

    @property
    def _over(self) -> bool:
        return time.monotonic() >= self._ends_at or bool(self.report.findings)

    async def _work(self, number: int) -> None:
        for task in plan.tasks(self._seed, number, engines=len(self._engines)):
            if self._over:
                return
            if not all(self._engines[one].ready.is_set() for one in (task.source, task.destination)):
                await asyncio.sleep(plan.GAP_S[0])
            elif task.work is plan.Work.TRANSFER:
                await self._transfer(task)
            else:
                await self._order(self._engines[task.source], task, task.work.value)

    async def _transfer(self, task: plan.Task) -> None:
        source, destination = self._engines[task.source], self._engines[task.destination]
        if source.on_device and source.daemon is not destination.daemon:
            source, destination = destination, source  # memory of a device is shared with no other daemon
        sent, received = await asyncio.gather(
            self._order(source, task, "send"),
            self._order(
                destination, task, "receive", "" if source.daemon is destination.daemon else source.daemon.address
            ),
        )
        self.report.transfers += sent and received

    async def _order(self, engine: Engine, task: plan.Task, part: str, source_daemon: str = "") -> bool:
        order = Order(
            part, task, source_daemon=source_daemon, deadline_s=self._size.deadline_s, margin_s=self._size.margin_s
        )
        ended = await engine.run(order)
        if ended is None:
            self.report.outcomes[f"{part}: its engine was killed"] += 1
            await asyncio.sleep(plan.GAP_S[0])
            return False
        self.report.ended(part, ended)
        if ended.outcome != OK:
            await asyncio.sleep(plan.GAP_S[0])
        return ended.outcome == OK

    async def _harm(self) -> None:
        """Do one fault after the other; they overlap, but for two that are done to one process."""
        held: dict[object, asyncio.Lock] = {}
        planned = plan.faults(
            self._seed,
            engines=[one.hit for one in self._engines],
            daemons=[one.hit for one in self._daemons],
            kinds=self._faults.kinds,
        )
        async with asyncio.TaskGroup() as group:
            for one in planned:
                await asyncio.sleep(one.after_s / self._size.pace)
                if self._over:
                    return
                if not self._faults.can_take(one):
                    continue
                hit = "links" if one.fault in plan.OF_LINKS else (one.fault in plan.OF_ENGINES, one.target)
                lock = held.setdefault(hit, asyncio.Lock())
                if not lock.locked():
                    await lock.acquire()
                    self.report.faults[one.fault] += 1
                    group.create_task(self._do(one, lock))

    async def _do(self, planned: plan.Planned, lock: asyncio.Lock) -> None:
        try:
            await self._faults.do(planned)
        finally:
            lock.release()

    async def _look(self) -> None:
        """Verify each daemon now and then, and see that it lives."""
        while not self._over:
            await asyncio.sleep(VERIFY_EVERY_S)
            for daemon in self._daemons:
                daemon.check_alive()
                try:
                    await self._verify(daemon, deep=False)
                except KvferryError as error:
                    self.report.outcomes[f"verify: {error.code}"] += 1

    async def _verify(self, daemon: Daemon, *, deep: bool) -> None:
        async with await AsyncClient.connect(daemon.runtime_dir, name="verify") as client:
            verified = await client.verify(deep=deep)
        self.report.verified += 1
        self.report.findings += (f"daemon {daemon.number}: {finding_line(one)}" for one in verified.findings)

    async def _settle_accounts(self) -> None:
        """Let the engines end, and see that nothing is left of them, and that everything is accounted for."""
        await asyncio.gather(*(engine.end(kindly=True) for engine in self._engines))
        for daemon in self._daemons:
            await self._wait_until_empty(daemon)
            await self._verify(daemon, deep=True)

    async def _wait_until_empty(self, daemon: Daemon) -> None:
        left = ["it does not answer"]
        ends_at = time.monotonic() + QUIET_S
        while left:
            if time.monotonic() > ends_at:
                raise RunFailedError(f"daemon {daemon.number}: left after all engines have ended: {', '.join(left)}")
            await asyncio.sleep(plan.GAP_S[0])
            try:
                left = await _left(daemon)
            except DaemonLostError as error:
                left = [str(error)]


def _texts(error: BaseException) -> list[str]:
    """Return what an error says, or each one of a group."""
    if isinstance(error, BaseExceptionGroup):
        return [text for one in error.exceptions for text in _texts(one)]
    return [str(error)]


async def _left(daemon: Daemon) -> list[str]:
    """Return what a daemon holds for engines that have ended, in words."""
    async with await AsyncClient.connect(daemon.runtime_dir, name="verify") as client:
        status = await client.status()
    left = [f"{pool.pages - pool.free} pages of pool {pool.pool}" for pool in status.pools if pool.free < pool.pages]
    left += [f"{one.direction} {one.request_id}: {one.waits_for}" for one in status.transfers]
    left += [f"operation {one.operation} {one.kind}: {one.waits_for}" for one in status.operations]
    left += [f"session {one.session} {one.name}" for one in status.sessions if one.name != "verify"]
    left += [f"tables {one.tables}" for one in status.tables]
    return left

"""Doing the planned faults to the world, and undoing those that pass."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from tests.kit.faults import limited
from tests.kit.tcp_proxy import Proxy
from tests.torture.plan import LATE, OF_LIMITS, SILENCE_S, Fault, Planned
from tests.torture.world import Daemon, Engine

HEADROOM_BYTES: Final = 8 << 20


class Faults:
    """What can be done to these daemons and engines."""

    def __init__(self, daemons: Sequence[Daemon], engines: Sequence[Engine], links: Proxy) -> None:
        """``links``: what the daemons say to each other goes through it."""
        self.broken = 0  # connections that were cut, or led nowhere for a while
        self._links = links
        self._daemons = daemons
        self._engines = engines
        self._kinds: dict[Fault, Callable[[Planned], Awaitable[None]]] = {
            Fault.KILL_ENGINE: self._kill_engine,
            Fault.STOP_ENGINE: self._stop_engine,
            Fault.KILL_DAEMON: self._restart_daemon,
            Fault.END_DAEMON: self._restart_daemon,
            Fault.STOP_DAEMON: self._stop_daemon,
            Fault.NO_DESCRIPTORS: self._limit_daemon,
            Fault.NO_MEMORY: self._limit_daemon,
            Fault.SILENCE: self._stop_daemon,
        }
        if len(daemons) > 1:
            self._kinds |= {Fault.CUT: self._break_links, Fault.HOLE: self._break_links, Fault.DELAY: self._delay_links}
        if all(daemon.small_disk for daemon in daemons):
            self._kinds[Fault.FILL_DISK] = self._fill_disk

    @property
    def kinds(self) -> list[Fault]:
        return list(self._kinds)

    def can_take(self, planned: Planned) -> bool:
        """Return whether the fault is one for its target: a device that lacks what a daemon needs is lost by that."""
        return planned.fault not in OF_LIMITS or self._daemons[planned.target].simulated is None

    async def do(self, planned: Planned) -> None:
        """Do a fault, and undo it if it is one that passes."""
        await self._kinds[planned.fault](planned)

    async def _kill_engine(self, planned: Planned) -> None:
        engine = self._engines[planned.target]
        await engine.end()
        await engine.start()

    async def _stop_engine(self, planned: Planned) -> None:
        engine = self._engines[planned.target]
        engine.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(planned.lasts_s)
        finally:
            engine.send(signal.SIGCONT)

    async def _restart_daemon(self, planned: Planned) -> None:
        daemon = self._daemons[planned.target]
        await daemon.finish(signal.SIGKILL if planned.fault is Fault.KILL_DAEMON else signal.SIGTERM)
        await daemon.begin()

    async def _stop_daemon(self, planned: Planned) -> None:
        with self._daemons[planned.target].stopped():
            await asyncio.sleep(planned.lasts_s + (SILENCE_S if planned.fault is Fault.SILENCE else 0.0))

    async def _break_links(self, planned: Planned) -> None:
        self.broken += self._links.connections
        if planned.fault is Fault.CUT:
            self._links.cut()
        else:
            self._links.black_hole()
        try:
            await asyncio.sleep(planned.lasts_s)
        finally:
            self._links.heal()

    async def _delay_links(self, planned: Planned) -> None:
        self._links.delay(LATE * planned.lasts_s)
        try:
            await asyncio.sleep(planned.lasts_s)
        finally:
            self._links.delay(0.0)

    async def _fill_disk(self, planned: Planned) -> None:
        filler = self._daemons[planned.target].disk / "filler"
        with filler.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while file.write(bytes(HEADROOM_BYTES)) == HEADROOM_BYTES:
                    pass
            try:
                await asyncio.sleep(planned.lasts_s)
            finally:
                filler.unlink()

    async def _limit_daemon(self, planned: Planned) -> None:
        daemon = self._daemons[planned.target]
        daemon.check_alive()
        if planned.fault is Fault.NO_DESCRIPTORS:
            kind, most = resource.RLIMIT_NOFILE, len(os.listdir(f"/proc/{daemon.process.pid}/fd"))  # noqa: PTH208
        else:
            kind, most = resource.RLIMIT_AS, _address_space(daemon.process.pid) + HEADROOM_BYTES
        with limited(daemon.process.pid, kind, most):
            await asyncio.sleep(planned.lasts_s)


def _address_space(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()

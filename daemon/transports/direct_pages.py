"""Pools whose pages other hosts write directly: registered on first use, until they are deleted.

Everybody who reaches the engine's port can write any byte of a registered pool, and a late write lands in a page. So
this is optional, the receiver holds pages until nothing can land in them, and a pool's memory stays mapped until it is
unregistered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import structlog

from kvferry.pools.devices.host import HostRegion
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import KvferryError

log = structlog.get_logger(__name__)

State = Literal["pending", "ready", "refused"]


class Registrar(Protocol):
    """Lets peers write memory; see ``MooncakeEngine``."""

    async def register(self, address: int, size_bytes: int) -> None:
        """Allow peers to write this memory."""

    async def unregister(self, address: int) -> None:
        """Refuse new writes to this memory."""


class _Registered:
    """One pool's memory, kept mapped by the view."""

    def __init__(self, view: npt.NDArray[np.uint8]) -> None:
        self.view = view
        self.state: State = "pending"

    @property
    def address(self) -> int:
        return int(self.view.ctypes.data)


class DirectPages:
    """The registered pools. For the control loop."""

    def __init__(self, registrar: Registrar) -> None:
        self._listeners: list[Callable[[], None]] = []
        self._registrar = registrar
        self._pools: dict[Pool, _Registered] = {}
        self._tasks: dict[_Registered, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        """Show the number of pools in each state."""
        states = [registered.state for registered in self._pools.values()]
        return f"<DirectPages ready={states.count('ready')} pending={states.count('pending')}>"

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever a pool stops being pending."""
        self._listeners.append(listener)

    def state(self, pool: Pool) -> State:
        """Return whether peers may write the pool's pages; start registering it if it is new."""
        registered = self._pools.get(pool)
        if registered is None:
            assert isinstance(pool.region, HostRegion), pool
            registered = self._pools[pool] = _Registered(pool.region.view())
            self._run(registered, self._register(pool, registered))
        return registered.state

    def drop(self, pool: Pool) -> None:
        """Unregister a pool that has no writes in flight; its memory stays mapped until that is done."""
        registered = self._pools.pop(pool, None)
        if registered is not None:
            self._run(registered, self._unregister(registered, self._tasks.get(registered)))

    async def close(self) -> None:
        """Cancel what is in progress. Called after the engine was closed."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _run(self, registered: _Registered, coroutine: Coroutine[None, None, None]) -> None:
        task = self._tasks[registered] = self._loop.create_task(coroutine)
        task.add_done_callback(lambda done: self._on_ended(registered, done))

    def _on_ended(self, registered: _Registered, task: asyncio.Task[None]) -> None:
        if self._tasks.get(registered) is task:
            del self._tasks[registered]

    async def _register(self, pool: Pool, registered: _Registered) -> None:
        try:
            await self._registrar.register(registered.address, registered.view.nbytes)
        except KvferryError as error:
            registered.state = "refused"
            log.warning("pages are not written directly, but through bounce buffers", pool=pool.name, cause=str(error))
        else:
            registered.state = "ready"
        for listener in self._listeners:
            listener()

    async def _unregister(self, registered: _Registered, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await asyncio.wait([previous])
        if registered.state == "ready":
            with contextlib.suppress(KvferryError):  # the engine is closed, which unregisters everything
                await self._registrar.unregister(registered.address)

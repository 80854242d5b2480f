"""Pools into whose pages other hosts write directly: registered when first wanted, until they are deleted.

A registered pool can be written, anywhere, by whoever reaches the engine's port, and a write that comes late lands in a
page. So this is an option, the receiver holds pages back until nothing can land in them, and what a pool is mapped to
stays mapped until the engine has forgotten it.
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
    """What lets peers write memory; see ``MooncakeEngine``."""

    async def register(self, address: int, size_bytes: int) -> None:
        """Let peers write this memory."""

    async def unregister(self, address: int) -> None:
        """Refuse writes that begin from now on."""


class _Registered:
    """One pool's memory, which the view keeps mapped."""

    def __init__(self, view: npt.NDArray[np.uint8]) -> None:
        self.view = view
        self.state: State = "pending"

    @property
    def address(self) -> int:
        """Return where it begins."""
        return int(self.view.ctypes.data)


class DirectPages:
    """Which pools are registered. All methods belong on the loop."""

    def __init__(self, registrar: Registrar) -> None:
        self._listeners: list[Callable[[], None]] = []
        self._registrar = registrar
        self._pools: dict[Pool, _Registered] = {}
        self._work: dict[_Registered, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        """Show how many pools are in which state."""
        states = [one.state for one in self._pools.values()]
        return f"<DirectPages ready={states.count('ready')} pending={states.count('pending')}>"

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call this whenever a pool is no longer pending."""
        self._listeners.append(listener)

    def state(self, pool: Pool) -> State:
        """Return whether peers may be told to write the pool's pages; begin to register it if it is new."""
        one = self._pools.get(pool)
        if one is None:
            assert isinstance(pool.region, HostRegion), pool
            one = self._pools[pool] = _Registered(pool.region.view())
            self._begin(one, self._register(pool, one))
        return one.state

    def drop(self, pool: Pool) -> None:
        """Forget a pool, none of whose pages is written any more; its memory stays mapped until that is done."""
        one = self._pools.pop(pool, None)
        if one is not None:
            self._begin(one, self._unregister(one, self._work.get(one)))

    async def close(self) -> None:
        """End what is under way; after the engine has been closed."""
        for task in list(self._work.values()):
            task.cancel()
        await asyncio.gather(*self._work.values(), return_exceptions=True)

    def _begin(self, one: _Registered, work: Coroutine[None, None, None]) -> None:
        task = self._work[one] = self._loop.create_task(work)
        task.add_done_callback(lambda done: self._ended(one, done))

    def _ended(self, one: _Registered, task: asyncio.Task[None]) -> None:
        if self._work.get(one) is task:
            del self._work[one]

    async def _register(self, pool: Pool, one: _Registered) -> None:
        try:
            await self._registrar.register(one.address, one.view.nbytes)
        except KvferryError as error:
            one.state = "refused"
            log.warning("pages are not written directly, but through bounce buffers", pool=pool.name, cause=str(error))
        else:
            one.state = "ready"
        for listener in self._listeners:
            listener()

    async def _unregister(self, one: _Registered, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        if one.state == "ready":
            with contextlib.suppress(KvferryError):  # the engine is closed: it has forgotten everything
                await self._registrar.unregister(one.address)

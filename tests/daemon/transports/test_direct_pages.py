"""Which pools peers may write directly: registered once, forgotten before their memory goes."""

from __future__ import annotations

import asyncio
import weakref

import pytest

from kvferry.daemon.transports.direct_pages import DirectPages
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.layouts import manifest_of
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import TransferFailedError
from kvferry.protocol.manifests import MhaSpec

pytestmark = pytest.mark.anyio
SPEC = MhaSpec(layers=1, tokens=64, page_size=16, kv_heads=1, head_dim=8, dtype="float16")


class ScriptedRegistrar:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.may_answer = asyncio.Event()
        self.forgotten = asyncio.Event()
        self.error: TransferFailedError | None = None

    async def register(self, address: int, size_bytes: int) -> None:
        """Register a pool's memory."""
        assert size_bytes == manifest_of(SPEC).region_bytes
        await self._answer("register", address)

    async def unregister(self, address: int) -> None:
        """Forget it."""
        await self._answer("unregister", address)
        self.forgotten.set()

    async def _answer(self, call: str, address: int) -> None:
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        self.calls.append((call, address))


class World:
    """A pool, and who is told of changes."""

    def __init__(self) -> None:
        self.registrar = ScriptedRegistrar()
        self.pages = DirectPages(self.registrar)
        self.changed = asyncio.Event()
        self.pages.on_change = self.changed.set
        manifest = manifest_of(SPEC)
        region = HostRegion.create("kv", manifest.region_bytes)
        self.pool = Pool(0, "kv", manifest, region)
        self.address, self.mapping = region.address, weakref.ref(region.buffer)

    async def until_changed(self) -> None:
        """Let the registrar answer and wait for the news."""
        self.registrar.may_answer.set()
        await asyncio.wait_for(self.changed.wait(), 10)


async def test_a_pool_is_registered_once_when_it_is_first_wanted() -> None:
    world = World()
    assert [world.pages.state(world.pool) for _ in range(3)] == ["pending"] * 3
    await world.until_changed()
    assert world.pages.state(world.pool) == "ready"
    assert world.registrar.calls == [("register", world.address)]


async def test_a_pool_that_cannot_be_registered_is_refused_and_not_asked_for_again() -> None:
    world = World()
    world.registrar.error = TransferFailedError("it overlaps")
    world.pages.state(world.pool)
    await world.until_changed()
    assert [world.pages.state(world.pool) for _ in range(2)] == ["refused", "refused"]
    world.pages.drop(world.pool)
    await world.pages.close()
    assert world.registrar.calls == []


async def test_memory_stays_mapped_until_the_engine_has_forgotten_it() -> None:
    world = World()
    world.pages.state(world.pool)
    await world.until_changed()
    mapping = world.mapping
    world.registrar.may_answer.clear()
    world.pages.drop(world.pool)
    world.pool.close()
    del world.pool
    await asyncio.sleep(0)
    assert mapping() is not None
    world.registrar.may_answer.set()
    await asyncio.wait_for(world.registrar.forgotten.wait(), 10)
    assert world.registrar.calls[1] == ("unregister", world.address)
    await world.pages.close()
    assert mapping() is None


async def test_a_pool_deleted_while_it_is_being_registered_is_forgotten_afterwards() -> None:
    world = World()
    world.pages.state(world.pool)
    world.pages.drop(world.pool)
    world.registrar.may_answer.set()
    await asyncio.wait_for(world.registrar.forgotten.wait(), 10)
    assert [call for call, _ in world.registrar.calls] == ["register", "unregister"]


async def test_an_unknown_pool_may_be_dropped() -> None:
    world = World()
    world.pages.drop(world.pool)
    await world.pages.close()
    assert world.registrar.calls == []

"""Which pools peers may write directly: registered once, forgotten before their memory goes."""

from __future__ import annotations

import asyncio
import weakref

import pytest

from kvferry.daemon.transports.network_memory import DirectPages
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.layouts import manifest_of
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import TransferFailedError
from kvferry.protocol.manifests import MhaSpec
from tests.daemon.transports.network_harness import ScriptedNetwork

pytestmark = pytest.mark.anyio
SPEC = MhaSpec(layers=1, tokens=64, page_size=16, kv_heads=1, head_dim=8, dtype="float16")


class Harness:
    """A pool, and who is told of changes."""

    def __init__(self) -> None:
        self.engine = ScriptedNetwork()
        self.pages = DirectPages(self.engine)
        self.changed = asyncio.Event()
        self.pages.subscribe(self.changed.set)
        manifest = manifest_of(SPEC)
        region = HostRegion.create("kv", manifest.region_bytes)
        self.pool = Pool(0, "kv", manifest, region)
        self.address, self.mapping = region.address, weakref.ref(region.buffer)

    async def until_changed(self) -> None:
        """Let the registrar answer and wait for the news."""
        self.engine.may_register.set()
        await asyncio.wait_for(self.changed.wait(), 10)


async def test_a_pool_is_registered_once_when_it_is_first_wanted() -> None:
    harness = Harness()
    assert [harness.pages.state(harness.pool) for _ in range(3)] == ["pending"] * 3
    await harness.until_changed()
    assert harness.pages.state(harness.pool) == "ready"
    assert harness.engine.registered == {harness.address: manifest_of(SPEC).region_bytes}


async def test_a_pool_that_cannot_be_registered_is_refused_and_not_asked_for_again() -> None:
    harness = Harness()
    harness.engine.error = TransferFailedError("it overlaps")
    harness.pages.state(harness.pool)
    await harness.until_changed()
    assert [harness.pages.state(harness.pool) for _ in range(2)] == ["refused", "refused"]
    harness.pages.drop(harness.pool)
    await harness.pages.close()
    assert harness.engine.registered == {}


async def test_memory_stays_mapped_until_the_engine_has_forgotten_it() -> None:
    harness = Harness()
    harness.pages.state(harness.pool)
    await harness.until_changed()
    mapping = harness.mapping
    harness.engine.may_register.clear()
    harness.pages.drop(harness.pool)
    harness.pool.close()
    del harness.pool
    await asyncio.sleep(0)
    assert mapping() is not None
    harness.engine.may_register.set()
    await asyncio.wait_for(harness.engine.forgotten.wait(), 10)
    assert harness.engine.registered == {}
    await harness.pages.close()
    assert mapping() is None


async def test_a_pool_deleted_while_it_is_being_registered_is_forgotten_afterwards() -> None:
    harness = Harness()
    harness.pages.state(harness.pool)
    harness.pages.drop(harness.pool)
    harness.engine.may_register.set()
    await asyncio.wait_for(harness.engine.forgotten.wait(), 10)
    assert harness.engine.registered == {}


async def test_an_unknown_pool_may_be_dropped() -> None:
    harness = Harness()
    harness.pages.drop(harness.pool)
    await harness.pages.close()
    assert harness.engine.registered == {}

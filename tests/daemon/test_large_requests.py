"""No request of one engine holds the control loop up for long, however large it is: its sizes are bounded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import numpy as np
import pytest

from kvferry.clients import Client, MhaSpec
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.manifests import MAX_LAYERS, MAX_PAGES, MAX_ROLE_SCALES, HybridSwaSpec, PoolSpec
from tests.kit.in_process import serving

LONGEST_S: Final = 0.1
"""Of one turn of the loop, in its thread's processor time: what else the machine does is not counted."""

TOKENS: Final = MhaSpec(layers=1, tokens=MAX_PAGES - 1, page_size=1, kv_heads=1, head_dim=1, dtype="int8")
SCALED: Final = MhaSpec(layers=256, tokens=1, page_size=1, kv_heads=128, head_dim=1, dtype="int8")
WINDOWED: Final = HybridSwaSpec(
    full_layers=(0,), window_layers=(1,), tokens=MAX_PAGES // 2, window_tokens=MAX_PAGES // 2 - 2,
    page_size=1, kv_heads=1, head_dim=1, dtype="int8",
)  # fmt: skip


@asynccontextmanager
async def short_turns(during: str) -> AsyncIterator[None]:
    """Check that no turn of the loop takes longer than ``LONGEST_S`` meanwhile."""
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        while True:
            began_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - began_s)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    yield
    await asyncio.sleep(0)
    assert watching.cancel()
    assert 0 < longest_s < LONGEST_S, during


async def one_engine_uses_the_largest_pool() -> None:
    each, all_pages = asyncio.to_thread, MAX_PAGES - 1
    async with serving() as (path, _, _):
        engine = await each(Client.connect, path, name="engine")
        async with short_turns("CREATE_POOL"):
            await each(engine.create_pool, "pool", TOKENS)
        async with short_turns("ALLOCATE"):
            ids = await each(engine.allocate, "pool", all_pages)
        assert np.array_equal(ids, np.arange(1, MAX_PAGES))
        apart = ids[::2].copy()
        async with short_turns("FREE"):
            for part in np.array_split(apart, 8):
                await each(engine.free, "pool", part)
        async with short_turns("LIST_OWNED of pages that lie apart"):
            owned = await each(engine.owned_pages, "pool")
        assert np.array_equal(owned["main"], ids[1::2])
        async with short_turns("ALLOCATE of pages that lie apart"):
            assert np.array_equal(await each(engine.allocate, "pool", len(apart)), apart)
        async with short_turns("LIST_OWNED"):
            assert np.array_equal((await each(engine.owned_pages, "pool"))["main"], ids)
        with await each(Client.connect, path, name="observer") as observer:
            assert (await each(observer.status)).pools[0].free == 0
            async with short_turns("the end of a session"):
                await each(engine.close)
                while (await each(observer.status)).pools[0].free < all_pages:
                    pass
            assert not (await each(observer.verify)).findings


def test_an_engine_with_all_pages_of_the_largest_pool_holds_nobody_up() -> None:
    asyncio.run(one_engine_uses_the_largest_pool())  # not in debug mode, whose checks take time themselves


async def one_engine_creates_the_pools_with_most_to_check() -> None:
    scales = tuple(tuple(1.0 + head / 256 + layer for head in range(128)) for layer in range(256))
    async with serving() as (path, _, _):
        with await asyncio.to_thread(Client.connect, path, name="engine") as engine:
            for name, spec in (
                ("scales", msgspec.structs.replace(SCALED, k_scale=scales, v_scale=scales)),
                ("layers", msgspec.structs.replace(SCALED, layers=MAX_LAYERS, kv_heads=1, k_scale="page")),
            ):
                async with short_turns(name):
                    await asyncio.to_thread(engine.create_pool, name, spec)


def test_an_engine_whose_pool_has_most_layers_and_scales_holds_nobody_up() -> None:
    asyncio.run(one_engine_creates_the_pools_with_most_to_check())


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (msgspec.structs.replace(TOKENS, tokens=MAX_PAGES), "tokens"),
        (msgspec.structs.replace(TOKENS, tokens=(1 << 31) - 1), "tokens"),
        (msgspec.structs.replace(WINDOWED, tokens=MAX_PAGES // 2 + 1), "tokens"),
        (msgspec.structs.replace(WINDOWED, tokens=1, window_tokens=MAX_PAGES), "window_tokens"),
    ],
)
def test_more_pages_than_a_pool_may_have_are_refused(client: Client, spec: PoolSpec, field: str) -> None:
    with pytest.raises(InvalidFieldError, match=f"at most {MAX_PAGES} of a pool.*use a larger page_size") as refused:
        client.create_pool("pool", spec)
    assert refused.value.field == field
    assert not client.status().pools


def test_more_scales_or_layers_than_a_pool_may_have_are_refused(client: Client) -> None:
    scales = ((1.0,) * 256,) * (MAX_ROLE_SCALES // 256) + ((1.0,) * 256,)
    spec = msgspec.structs.replace(SCALED, layers=len(scales), kv_heads=256, v_scale=scales)
    with pytest.raises(InvalidFieldError, match=f"at most {MAX_ROLE_SCALES}.*one for each layer") as refused:
        client.create_pool("pool", spec)
    assert refused.value.field == "v_scale"
    with pytest.raises(InvalidFieldError, match=f"<= {MAX_LAYERS}") as refused:
        client.create_pool("pool", msgspec.structs.replace(SCALED, layers=MAX_LAYERS + 1))
    assert refused.value.field == "spec.layers"
    assert not client.status().pools

"""Two models of equal shape and one user: neither finds the other's blocks, in memory, on disk or in the store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from structlog.testing import capture_logs

from kvferry.pools.tiers.cached_block import Tier
from kvferry.protocol import errors
from kvferry.protocol.ids import ModelIdentity
from kvferry.protocol.pool_messages import CreatePool, PoolCreated
from kvferry.protocol.tier_messages import Found, Lookup
from tests.kit.tiers import MODEL, POOL, SPEC, Engine, Harness, harness, hashes, names, new_pool, settle, until

pytestmark = pytest.mark.anyio

OTHERS: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "model": ({"name": "another/model"}, {}),
    "revision": ({"revision": "2"}, {}),
    "adapter": ({"adapter": "sql"}, {}),
    "salt": ({"salt": "pepper"}, {}),
    "dtype": ({}, {"dtype": "bfloat16", "head_dim": 8, "v_head_dim": 4}),
    "heads": ({}, {"head_start": 1, "total_heads": 2}),
    "layers": ({}, {"first_layer": 1}),
}
"""What makes a pool of as many bytes another one: changes of its identity and of its spec."""

DIFFERENCE = pytest.mark.parametrize("difference", OTHERS)
OTHER, SAME = "other", "same"


async def with_others(tiers: Harness, difference: str) -> Engine:
    """Make a pool that differs from the first in this, and one that differs in nothing; return a session."""
    of_model, of_spec = OTHERS[difference]
    model, spec = msgspec.structs.replace(MODEL, **of_model), msgspec.structs.replace(SPEC, **of_spec)
    await new_pool(tiers, OTHER, spec, model=model)
    await new_pool(tiers, SAME, msgspec.structs.replace(SPEC, tokens=32), model=MODEL)
    assert sum(one.page_bytes for one in tiers.pool(OTHER).manifest.entries) == 192
    return tiers.engine()


def written(tiers: Harness) -> int:
    """Return how many blocks are on disk."""
    return sum(block.on_disk for block in tiers.host.index.page(0, 100).blocks)


async def found(engine: Engine, pool: str, *numbers: int) -> int:
    """Return how many blocks a pool finds, wherever they are."""
    body = Lookup(pool=pool, hashes=hashes(*numbers), pin=False)
    return (await engine.answer(body, Found)).blocks


async def is_found_by_its_own_only(engine: Engine) -> None:
    assert (await found(engine, OTHER, 1, 2), await found(engine, SAME, 1, 2)) == (0, 2)


@DIFFERENCE
async def test_in_memory_in_the_store_and_on_disk_across_a_restart(difference: str, folder: Path) -> None:
    async with harness(8, disk=folder, remote=True, adds_up=False) as tiers:
        engine = await with_others(tiers, difference)
        await engine.stored(1, 2)
        await is_found_by_its_own_only(engine)
        await until(lambda: written(tiers) == len(tiers.store.values) == 2)
        await settle()
        tiers.empty_memory()
        for block in tiers.host.index.page(0, 10).blocks:
            for tier in (Tier.DISK, Tier.REMOTE):
                tiers.host.index.set_tier(block, tier, present=False)
        assert not len(tiers.host.index), "the store alone has them"
        await is_found_by_its_own_only(engine)
    async with harness(8, disk=folder) as tiers:
        await until(lambda: len(tiers.host.index) == 2)
        engine = await with_others(tiers, difference)
        await is_found_by_its_own_only(engine)
        operation = engine.store(names(1, 2), engine.allocate(2, OTHER), OTHER)
        await tiers.finish()
        done = engine.ended(operation)
        assert (done.stored, done.present) == (2, 0), "they are blocks of their own"


def put_with(folder: Path, one: bytes, other: bytes) -> None:
    """Copy one block's file to where another namespace has its files."""
    ours, theirs = (next(folder.rglob(name.hex())) for name in (one, other))
    shutil.copytree(ours.parents[1], theirs.parents[1], dirs_exist_ok=True)


async def test_a_file_in_the_folder_of_another_model_is_not_served(folder: Path) -> None:
    async with harness(8, disk=folder) as first:
        await new_pool(first, OTHER, model=ModelIdentity(name="another/model"))
        engine = first.engine()
        await engine.stored(1)
        theirs = engine.allocate(1, OTHER)
        engine.store(names(2), theirs, OTHER)
        first.copier.finish_all()
        await until(lambda: written(first) == 2)
    put_with(folder, *names(1, 2))
    async with harness(8, disk=folder) as second:
        await new_pool(second, OTHER, model=ModelIdentity(name="another/model"))
        await until(lambda: len(second.host.index) == 2)
        engine = second.engine()
        assert await found(engine, OTHER, 1) == 0
        assert await found(engine, OTHER, 2) == 1
        assert await found(engine, POOL, 1) == 1


async def test_files_that_say_of_no_model_are_left_alone_and_named(folder: Path) -> None:
    old = folder / "1" / ("0f" * 16) / "main-1" / "00" / names(1)[0].hex()
    old.parent.mkdir(parents=True)
    old.write_bytes(b"kvfblock\x01")
    with capture_logs() as logs:
        async with harness(8, disk=folder) as tiers:
            await until(lambda: any(one["event"] == "disk tier ready" for one in logs))
            assert not len(tiers.host.index)
    (said,) = [one for one in logs if one["log_level"] == "warning"]
    assert (said["folders"], said["count"]) == ([f"1/{'0f' * 16}"], 1)
    assert old.exists()


async def test_a_pool_without_a_model_has_no_cache() -> None:
    async with harness(8) as tiers:
        await new_pool(tiers, OTHER, model=None)
        engine = tiers.engine()
        await engine.stored(1)
        lease = engine.lookup(names(1)).lease
        ids = engine.allocate(1, OTHER)
        calls: list[Callable[[], object]] = [
            lambda: engine.store(names(1), ids, OTHER),
            lambda: engine.lookup(names(1), OTHER),
            lambda: engine.load(lease, ids, OTHER),
        ]
        for call in calls:
            with pytest.raises(errors.NoModelError) as caught:
                call()
            assert caught.value.field == "model"
        snapshot = engine.offload(ids, OTHER)
        await tiers.finish()
        assert engine.error(snapshot.operation) is None, "its pages may go and come all the same"


@DIFFERENCE
async def test_neither_a_lease_nor_a_snapshot_is_a_way_into_another_models_pool(difference: str) -> None:
    async with harness(8) as tiers:
        engine = await with_others(tiers, difference)
        await engine.stored(1)
        lease, snapshot = engine.lookup(names(1)).lease, engine.offload(engine.allocate(1)).snapshot
        await tiers.finish()
        assert [one.status().model for one in tiers.service.snapshots] == ["some/model@1"]
        ids = engine.allocate(1, OTHER)
        with pytest.raises(errors.LayoutMismatchError if OTHERS[difference][1] else errors.ModelMismatchError) as load:
            engine.load(lease, ids, OTHER)
        assert load.value.field == "pool"
        assert "pepper" not in str(load.value)
        if difference in {"model", "revision"}:
            with pytest.raises(errors.ModelMismatchError, match=r"some/model@1.*(another/model@1|some/model@2)"):
                engine.restore(snapshot, pool=OTHER)


@pytest.mark.parametrize("field", ["name", "revision", "adapter", "salt", ""])
async def test_a_pool_is_found_again_by_its_own_model_only(field: str) -> None:
    async with harness(8) as tiers:
        engine = tiers.engine()
        again = engine.ask(CreatePool(pool=POOL, spec=SPEC, model=MODEL), PoolCreated)
        assert not again.created
        other = msgspec.structs.replace(MODEL, **{field: "pepper"}) if field else None
        with pytest.raises(errors.PoolExistsError) as caught:
            engine.ask(CreatePool(pool=POOL, spec=SPEC, model=other), PoolCreated)
        assert caught.value.field == f"model.{field}".rstrip(".")
        assert field != "salt" or "pepper" not in str(caught.value)
        assert tiers.pool().model == MODEL

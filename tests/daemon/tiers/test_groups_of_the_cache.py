"""Cached prefixes of several groups: full attention beside windows, beside states, and groups of one page space."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.daemon.services.prefix_cache import namespace_of
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.manifest import groups_of
from kvferry.pools.tiers.cached_block import BlockState, CachedBlock, Tier
from kvferry.protocol import errors
from kvferry.protocol.manifests import MambaSpec, MhaSpec, PoolSpec
from kvferry.protocol.pool_messages import Allocate
from kvferry.protocol.tier_messages import CacheGroup, Found, Load, Lookup, OperationStarted, Store
from tests.kit.tiers import HYBRID, Harness, harness, hashes, names, new_pool, settle, until

pytestmark = pytest.mark.anyio

STATES: Final = MambaSpec(
    state_layers=(0, 1), slots=7, conv_window=3, conv_channels=8, ssm_shape=(2, 4, 4), attention_layers=(2,),
    tokens=60, page_size=4, kv_heads=1, head_dim=4, dtype="float32",
)  # fmt: skip
GROUPED: Final = MhaSpec(
    layers=4, tokens=60, page_size=4, kv_heads=1, head_dim=4, dtype="float32", groups=((0, 2), (1, 3))
)
SPECS: Final[dict[str, PoolSpec]] = {"hybrid": HYBRID, "states": STATES, "grouped": GROUPED}
MAIN: Final = CacheGroup()
WINDOW: Final = CacheGroup(group="swa", last=2)
STATE: Final = CacheGroup(group="mamba", last=1)


class Hybrid:
    """A session at one of these pools."""

    def __init__(self, tiers: Harness, name: str) -> None:
        self.tiers, self.name, self.engine = tiers, name, tiers.engine()
        self._pool = tiers.pool(name)
        assert isinstance(self._pool.region, HostRegion)
        self._memory = self._pool.region.view()

    def allocate(self, group: str, count: int) -> npt.NDArray[np.int64]:
        space = groups_of(self._pool.manifest)[group]
        number = self.engine.send(Allocate(pool=self.name, count=count, space=space))
        return self.engine.replies[number][1][0]

    def write(self, group: str, page: int, value: int) -> None:
        """Fill a page of a group."""
        for array in self._arrays(group):
            array[page] = value

    def read(self, group: str, ids: npt.NDArray[np.int64]) -> list[set[int]]:
        """Return which bytes are in each page."""
        arrays = self._arrays(group)
        return [{int(byte) for array in arrays for byte in array[page]} for page in ids.tolist()]

    async def store(self, group: str, numbers: Sequence[int], values: Sequence[int]) -> None:
        """Store a chain, each block full of its value, from pages that are free again."""
        ids = self.allocate(group, len(numbers))
        for page, value in zip(ids.tolist(), values, strict=True):
            self.write(group, page, value)
        body = Store(pool=self.name, hashes=hashes(*numbers), pages=len(ids), group=group)
        await self.done(self.engine.ask(body, OperationStarted, ids).operation)
        self.free(group, ids)

    async def load(self, found: Found, group: str, first: int) -> list[set[int]]:
        """Return what a lease's blocks of a group have brought into wiped pages, from one block on."""
        ids = self.allocate(group, found.blocks - first)
        for page in ids.tolist():
            self.write(group, page, 0xFF)
        body = Load(lease=found.lease, pool=self.name, pages=len(ids), group=group, first_block=first)
        await self.done(self.engine.ask(body, OperationStarted, ids).operation)
        brought = self.read(group, ids)
        self.free(group, ids)
        return brought

    async def done(self, operation: int) -> None:
        await until(lambda: self.tiers.copier.under_way or self.engine.done(operation))
        await self.tiers.finish()
        assert self.engine.error(operation) is None

    async def find(self, numbers: Sequence[int], *groups: CacheGroup, pin: bool = True) -> Found:
        body = Lookup(pool=self.name, hashes=hashes(*numbers), groups=groups, pin=pin)
        return await self.engine.answer(body, Found)

    def free(self, group: str, ids: npt.NDArray[np.int64]) -> None:
        self._pool.space(groups_of(self._pool.manifest)[group]).free(self.engine.session.owner_id, ids)

    def block(self, group: str, number: int) -> CachedBlock | None:
        return self.tiers.host.index.get(namespace_of(self._pool, group, 1), names(number)[0])

    def evict(self, group: str, number: int) -> None:
        block = self.block(group, number)
        assert block is not None
        self.tiers.host.remove([block])
        self.tiers.lower.remove([block])

    def _arrays(self, group: str) -> list[npt.NDArray[np.uint8]]:
        """Return each array of a group's entries, ``(pages, page_bytes)``."""
        return [
            self._memory[one.base : one.base + one.pages * one.page_bytes].reshape(one.pages, one.page_bytes)
            for one in self._pool.manifest.entries
            if one.component == group
        ]


async def at(tiers: Harness, name: str) -> Hybrid:
    await new_pool(tiers, name, SPECS[name])
    return Hybrid(tiers, name)


@pytest.fixture
async def tiers() -> AsyncIterator[Harness]:
    async with harness(64) as one:
        yield one


@pytest.mark.parametrize(("name", "group", "last"), [("hybrid", "swa", 2), ("states", "mamba", 1)])
async def test_a_prefix_ends_where_both_groups_have_what_they_need(
    tiers: Harness, name: str, group: str, last: int
) -> None:
    one = await at(tiers, name)
    need = CacheGroup(group=group, last=last)
    await one.store("main", range(1, 7), range(1, 7))
    assert (await one.find(range(1, 9), MAIN, need)).blocks == 0
    await one.store(group, [3, 4], [103, 104])
    found = await one.find(range(1, 9), MAIN, need)
    assert (found.blocks, found.host, found.lease_blocks) == (4, 4 + last, 4)
    assert await one.load(found, "main", 0) == [{1}, {2}, {3}, {4}]
    assert await one.load(found, group, 4 - last) == [{103}, {104}][-last:]
    assert one.block("main", 5), "it is there, but not of this prefix"
    assert not one.block("main", 5).pins  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "groups", "host", "disk"), [("hybrid", (WINDOW, MAIN), 2, 2), ("states", (STATE,), 0, 4)]
)
async def test_a_block_of_several_groups_counts_once_where_the_slowest_is(
    tmp_path: Path, name: str, groups: tuple[CacheGroup, ...], host: int, disk: int
) -> None:
    """Those before the first that is needed count as that one: it stands for them."""
    first, *others = groups
    async with harness(64, disk=tmp_path) as tiers:
        one = await at(tiers, name)
        await one.store(first.group, [3, 4], [103, 104])
        await until(lambda: all((block := one.block(first.group, at)) and block.on_disk for at in (3, 4)))
        tiers.empty_memory()
        for other in others:
            await one.store(other.group, range(1, 7), range(1, 7))
        assert (await one.find(range(1, 9), *others, first, pin=False)).blocks == 4
        counted = tiers.counters.snapshot()
    where = ("host", "disk", "remote", "nowhere")
    assert [counted[f"cache.found.{at}"] for at in where] == [host, disk, 0, 4]
    assert counted["cache.unbounded_hit_blocks"] == 4


async def test_one_hash_names_a_block_of_each_group_of_one_space(tiers: Harness) -> None:
    one = await at(tiers, "grouped")
    await one.store("main", [1, 2], [1, 2])
    await one.store("group1", [1, 2], [101, 102])
    found = await one.find([1, 2, 3], MAIN, CacheGroup(group="group1"))
    assert (found.blocks, found.host) == (2, 4)
    assert await one.load(found, "group1", 0) == [{101}, {102}]
    assert await one.load(found, "main", 0) == [{1}, {2}]


async def test_an_evicted_block_of_one_group_shortens_the_prefix(tiers: Harness) -> None:
    one = await at(tiers, "hybrid")
    await one.store("main", range(1, 7), range(1, 7))
    await one.store("swa", range(1, 7), range(1, 7))
    lengths = []
    for group, number in (("swa", 6), ("swa", 4), ("main", 3), ("swa", 1)):
        one.evict(group, number)
        lengths.append((await one.find(range(1, 7), MAIN, WINDOW, pin=False)).blocks)
    assert lengths == [5, 3, 2, 0]


async def test_a_prefix_shorter_than_the_window_needs_all_of_it(tiers: Harness) -> None:
    one = await at(tiers, "hybrid")
    await one.store("main", [1], [1])
    await one.store("swa", [1], [1])
    assert (await one.find([1, 2], MAIN, CacheGroup(group="swa", last=5))).blocks == 1


async def test_a_pool_of_states_alone_finds_the_last_one(tiers: Harness) -> None:
    one = await at(tiers, "states")
    await one.store("mamba", [3], [3])
    found = await one.find(range(1, 7), STATE)
    assert (found.blocks, found.host) == (3, 1)
    assert await one.load(found, "mamba", 2) == [{3}]


@pytest.mark.parametrize("seed", range(6))
async def test_lookups_find_what_a_model_of_sets_does(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  a script, no secrets
    there: dict[str, set[int]] = defaultdict(set)
    async with harness(256, remote=True) as tiers:
        one = await at(tiers, "hybrid")
        leases: list[int] = []
        for _ in range(150):
            group, number = chance.choice(["main", "swa"]), chance.randrange(1, 10)
            match chance.randrange(5):
                case 0 | 1:
                    chain = range(number, min(10, number + chance.randrange(1, 5)))
                    await one.store(group, chain, chain)
                    there[group].update(chain)
                case 2 if (block := one.block(group, number)) is not None:
                    await until(lambda: not tiers.remote.waiting and not tiers.remote.copying)  # type: ignore[union-attr]
                    tiers.empty_memory()
                    if block.state is BlockState.READY and not block.in_host:
                        tiers.host.index.set_tier(block, Tier.REMOTE, present=False)  # the store alone has it
                case 3 if (block := one.block(group, number)) is not None and not block.pins:
                    await until(lambda: not tiers.remote.waiting and not tiers.remote.copying)  # type: ignore[union-attr]
                    one.evict(group, number)
                    there[group].discard(number)
                    await settle()
                case _:
                    needs = [MAIN, CacheGroup(group="swa", last=chance.randrange(1, 5))]
                    found = await one.find(range(1, 10), *needs[:: chance.choice([1, -1])], pin=chance.random() < 0.5)
                    assert found.blocks == longest(there, needs), (there, needs)
                    if found.lease:
                        assert await one.load(found, "swa", found.blocks - 1) == [{found.blocks}]
                        leases.append(found.lease)
            if leases and chance.random() < 0.5:
                one.engine.unpin(leases.pop(chance.randrange(len(leases))))


def longest(there: dict[str, set[int]], needs: Sequence[CacheGroup]) -> int:
    """Return the longest prefix of the blocks 1 to 9 of which each group has what it needs."""
    return max(
        length
        for length in range(10)
        if all(
            there[one.group] >= set(range(1 if one.last is None else max(1, length + 1 - one.last), length + 1))
            for one in needs
        )
    )


async def test_a_block_that_goes_while_another_group_is_asked_for_is_not_found() -> None:
    async with harness(64, remote=True) as tiers:
        one = await at(tiers, "grouped")
        needs = CacheGroup(last=2), CacheGroup(group="group1", last=2)
        for need in needs:
            await one.store(need.group, range(1, 5), range(1, 5))
        tiers.store.holds = True
        number = one.engine.send(Lookup(pool="grouped", hashes=hashes(1, 2, 3, 4), groups=needs))
        await until(lambda: tiers.store.waiting)
        tiers.store.let_go()
        await until(lambda: tiers.store.waiting)  # which blocks of main are there was seen
        one.evict("main", 4)
        await tiers.let_store_answer()
        await until(lambda: number in one.engine.replies)
        found = one.engine.reply(number, Found)
        assert (found.blocks, found.host) == (3, 4)


async def test_a_lookup_that_ends_while_the_store_is_asked_pins_nothing() -> None:
    async with harness(64, remote=True) as tiers:
        one = await at(tiers, "hybrid")
        await one.store("main", [1, 2], [1, 2])
        tiers.store.holds = True
        number = one.engine.send(Lookup(pool="hybrid", hashes=hashes(1, 2), groups=(MAIN, WINDOW)), deadline_ms=5)
        await until(lambda: number in one.engine.replies)
        with pytest.raises(errors.DeadlineError):
            one.engine.reply(number, Found)
        await settle()
        assert (tiers.cache.lookups, tiers.host.index.pinned_by()) == (0, {})
        await tiers.let_store_answer()


async def test_blocks_come_back_from_disk_whichever_group_they_are_of(folder: Path) -> None:
    async with harness(64, disk=folder) as first:
        one = await at(first, "grouped")
        await one.store("main", [1, 2, 3], [1, 2, 3])
        await one.store("group1", [2, 3], [102, 103])
        await until(lambda: all(block.on_disk for block in first.host.index.page(0, 10).blocks))
    async with harness(64, disk=folder) as second:
        one = await at(second, "grouped")
        found = await one.find([1, 2, 3], MAIN, CacheGroup(group="group1", last=2))
        assert (found.blocks, found.host, found.disk) == (3, 0, 5)
        assert await one.load(found, "group1", 1) == [{102}, {103}]
        assert await one.load(found, "main", 0) == [{1}, {2}, {3}]


async def test_a_lease_of_windows_is_not_extended_and_has_no_earlier_blocks(tiers: Harness) -> None:
    one = await at(tiers, "hybrid")
    await one.store("main", [1, 2], [1, 2])
    await one.store("swa", [1, 2], [1, 2])
    need = CacheGroup(group="swa", last=1)
    found = await one.find([1, 2], MAIN, need)
    with pytest.raises(errors.InvalidFieldError, match="look all hashes up, without a lease"):
        await one.engine.answer(Lookup(pool="hybrid", hashes=hashes(3), groups=(MAIN, need), lease=found.lease), Found)
    with pytest.raises(errors.InvalidFieldError, match="of 'swa' the lease has the blocks from 1 on"):
        await one.load(found, "swa", 0)

"""What goes down to lower tiers and comes up, with a store that a test lets answer: memory, charges, and races."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import xxhash
from structlog.testing import capture_logs

from kvferry.daemon.tiers import lower_tiers, remote_tier
from kvferry.daemon.tiers.host_tier import DEMOTION
from kvferry.daemon.tiers.lower_tiers import LowerTiers
from kvferry.pools.tiers.cached_block import BlockState, CachedBlock
from kvferry.protocol.errors import DeadlineError
from kvferry.protocol.tier_messages import Found, Lookup
from tests.kit.tiers import UNIT, Engine, Harness, harness, names, settle, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def far() -> AsyncIterator[Harness]:
    """Return services over a host tier of 8 blocks, a pool of 15 pages, and a store that answers at once."""
    async with harness(8, remote=True) as one:
        yield one
        await one.let_store_answer()


async def away(far: Harness, *numbers: int) -> list[CachedBlock]:
    """Store blocks, and have them in the store alone."""
    blocks = await far.stored(*numbers)
    await until(lambda: all(one.in_remote for one in blocks))
    far.empty_memory()
    assert far.host.arena.used_bytes == 0
    return blocks


def charged(far: Harness) -> int:
    return sum(one.charged_bytes for _, one in far.host.index.accounts.items())


async def test_new_blocks_go_down_pinned_meanwhile(far: Harness) -> None:
    far.store.holds = True
    first, second = await far.stored(1, 2)
    assert first.pins == {DEMOTION: 1}
    assert not second.pins
    assert far.store.let_go()
    await until(lambda: bool(far.store.waiting))
    assert first.in_remote
    assert not first.pins
    assert second.pins == {DEMOTION: 1}
    far.store.let_go()
    await until(lambda: second.in_remote)
    assert far.counters.snapshot()["tiers.remote.written_blocks"] == 2


@pytest.mark.parametrize("checksums", [True, False])
async def test_what_goes_to_the_store_has_digests_also_where_host_memory_has_none(*, checksums: bool) -> None:
    """Whoever fetches it, another node perhaps, compares them."""
    async with harness(8, remote=True, checksums=checksums) as far:
        [block] = await far.stored(1)
        assert bool(block.digests) is checksums
        await until(lambda: block.in_remote)
        [value] = far.store.values.values()
        assert value.header.digests == tuple(xxhash.xxh3_64_intdigest(page) for page in value.pages)


async def test_a_block_comes_up_once_however_many_ask(far: Harness) -> None:
    [block] = await away(far, 1)
    far.store.holds = True
    first, second = far.lower.promote(block), far.lower.promote(block)
    assert first is not None
    assert first is second
    await settle()
    assert charged(far) == UNIT
    assert len(far.store.waiting) == 1
    far.store.let_go()
    assert await first
    assert charged(far) == 0
    assert far.lower.promote(block) is None
    assert far.host.arena.used_bytes == UNIT


@pytest.mark.parametrize("how", ["gone", "damaged", "removed", "raises"])
async def test_a_block_that_cannot_come_up_leaves_no_byte(
    far: Harness, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [block] = await away(far, 1)
    far.store.holds = True
    [name] = far.store.values
    coming = far.lower.promote(block)
    assert coming is not None
    await settle()
    if how == "gone":
        del far.store.values[name]
    elif how == "damaged":
        far.store.values[name].pages[0] = bytes(len(far.store.values[name].pages[0]))
    elif how == "removed":
        assert far.host.index.remove(block) == []
    else:

        def fails(*_: object) -> bool:
            raise RuntimeError

        monkeypatch.setattr(xxhash, "xxh3_64_intdigest", fails)
    with capture_logs():
        far.store.holds = False
        far.store.let_go()
        if how == "raises":
            with pytest.raises(RuntimeError):
                await coming
        else:
            assert not await coming
    assert far.host.arena.used_bytes == charged(far) == 0
    if how != "raises":
        assert block.state is BlockState.GONE


async def test_so_many_have_memory_at_a_time(far: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = await away(far, 1, 2, 3, 4)
    monkeypatch.setattr(lower_tiers, "MAX_PROMOTIONS", 2)
    far.store.holds = True
    lower = LowerTiers(far.host, None, far.remote, far.counters)
    coming = [lower.promote(one) for one in blocks]
    await settle()
    assert far.host.arena.used_bytes == 2 * UNIT
    far.host.index.remove(blocks[2])  # it waits for its turn
    await far.let_store_answer()
    assert [await one for one in coming if one is not None] == [True, True, False, True]
    assert far.host.arena.used_bytes == 3 * UNIT


async def test_a_full_host_tier_lets_nothing_come_up(far: Harness) -> None:
    [block] = await away(far, 1)
    engine = far.engine()
    engine.offload(engine.allocate(7))  # the user's share of 8 blocks
    coming = far.lower.promote(block)
    assert coming is not None
    assert not await coming
    assert far.counters.snapshot()["tiers.host.promotions_refused"] == 1
    assert block.state is BlockState.READY
    far.copier.finish_all()


async def test_a_block_that_is_evicted_while_it_goes_down_is_nowhere_at_last(far: Harness) -> None:
    far.store.holds = True
    [block] = await far.stored(1)
    assert far.host.index.remove(block) == []
    far.lower.remove([block])
    assert block.in_host  # for the one that reads it
    far.store.let_go()
    far.store.holds = False
    await until(lambda: block.state is BlockState.GONE)
    await until(lambda: not far.store.values)
    assert far.host.arena.used_bytes == 0


async def test_evicted_blocks_leave_the_store_together(far: Harness) -> None:
    blocks = await far.stored(1, 2)
    await until(lambda: all(one.in_remote for one in blocks))
    far.store.holds = True
    far.host.free_all([freed for one in blocks for freed in far.host.index.remove(one)])
    far.lower.remove(blocks)
    await settle()
    assert len(far.store.waiting) == 1
    far.store.let_go()
    await settle()
    assert far.store.values == {}
    far.lower.remove([])


async def test_what_the_store_had_once_is_forgotten_some_time(far: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_tier, "MAX_KNOWN", 3)
    first = await away(far, 1, 2, 3)
    far.host.index.pin(first[:1], 5)
    await away(far, 4, 5)
    assert [one.hash for one in far.blocks(1, 2, 3, 4, 5)] == names(1, 3, 4, 5)  # 1 is pinned: the next one went
    found = await far.lower.find(far.namespace, names(2), None, 192)
    assert [one.hash for one in found] == names(2)  # the store has it still
    far.host.index.unpin(first[:1], 5)


async def test_a_bug_with_one_block_is_not_the_end_of_the_tier(far: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    real = far.store.put

    async def fails(*_: object, **__: object) -> bool:
        raise RuntimeError

    monkeypatch.setattr(far.store, "put", fails)
    with capture_logs() as logs:
        await far.stored(1)
        await until(lambda: bool(logs))
    monkeypatch.setattr(far.store, "put", real)
    [second] = await far.stored(2)
    await until(lambda: second.in_remote)
    assert not far.blocks(1)[0].pins
    assert far.scheduler.bytes_in_flight == 0


async def test_a_lookup_that_is_late_is_answered_so_and_pins_nothing(far: Harness) -> None:
    engine: Engine = far.engine()
    await far.stored(1)
    far.store.holds = True
    number = engine.send(Lookup(pool="pool", hashes=b"".join(names(1, 2))), deadline_ms=5)
    await until(lambda: number in engine.replies)
    with pytest.raises(DeadlineError):
        engine.reply(number, Found)
    await far.let_store_answer()
    await until(lambda: not far.host.index.pinned_by())

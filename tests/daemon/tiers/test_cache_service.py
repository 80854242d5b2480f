"""STORE, LOOKUP, LOAD and the reports about the cache: pins, leases, users, and what ends early."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from kvferry.daemon.services import cache_reports, leases, prefix_cache
from kvferry.pools.integrity import WALKED, check
from kvferry.pools.tiers.cached_block import Tier
from kvferry.pools.tiers.index import BlockIndex
from kvferry.protocol import errors
from kvferry.protocol.events import TierDone
from kvferry.protocol.ids import ModelIdentity
from kvferry.protocol.tier_messages import (
    LEASE_S,
    CacheChanges,
    CacheEvents,
    CacheEvict,
    CacheEvicted,
    CacheList,
    CacheListed,
    CachePin,
    CachePinned,
    CancelOperation,
    ChainStart,
    Found,
    Lookup,
    OperationCancelled,
    OperationStarted,
    Store,
)
from tests.kit.tiers import POOL, UNIT, Engine, Harness, harness, hashes, names, new_pool, settle, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def tiers() -> AsyncIterator[Harness]:
    """Return services over a host tier of 8 blocks, and a pool of 15 pages for each of two users."""
    async with harness(8, tenants=(1, 2)) as one:
        yield one


@pytest.fixture
async def far() -> AsyncIterator[Harness]:
    """Return the same with a remote tier, whose answers the test lets go."""
    async with harness(8, remote=True) as one:
        one.store.holds = True
        yield one
        await one.let_store_answer()


async def put_away(far: Harness, engine: Engine, *numbers: int) -> None:
    """Store blocks and let them go to the remote tier, and out of the host tier."""
    await engine.stored(*numbers)
    await far.let_store_answer()
    values = far.store.values
    await until(lambda: len(values) == len(numbers))
    await settle()
    far.store.holds = True
    far.empty_memory()


# -- what is counted of lookups


async def test_each_block_that_is_asked_for_counts_once_where_it_was_found(tmp_path: Path) -> None:
    """Hits of all tiers and misses sum to the blocks asked for; an unbounded cache would have all that was stored."""
    random = Random(47)  # noqa: S311  the same each time
    async with harness(8, disk=tmp_path, disk_bytes=40_000) as tiers:
        engine = tiers.engine()
        stored, seen = dict.fromkeys(range(5), 0), Counter[str]()
        for _ in range(60):
            prompt, blocks = random.randrange(5), random.randrange(1, 5)
            numbers = [1 + 10 * prompt + number for number in range(blocks)]
            before = tiers.counters.snapshot()
            found = await engine.answer(Lookup(pool=POOL, hashes=hashes(*numbers), pin=False), Found)
            counted = Counter(tiers.counters.snapshot())
            counted.subtract(before)
            where = {one: counted[f"cache.found.{one}"] for one in ("host", "disk", "remote", "nowhere")}
            assert sum(where.values()) == counted["cache.asked_blocks"] == blocks
            assert where == {
                "host": found.host, "disk": found.disk, "remote": found.remote, "nowhere": blocks - found.blocks,
            }  # fmt: skip
            assert counted["cache.unbounded_hit_blocks"] == min(blocks, stored[prompt])
            seen.update({one: count for one, count in where.items() if count})
            if random.random() < 0.5:
                await engine.stored(*numbers)
                stored[prompt] = max(stored[prompt], blocks)
                await until(lambda: not any(one.pins for one in tiers.host.index.page(0, 100).blocks))
        assert seen.keys() == {"host", "disk", "nowhere"}
        lost = tiers.counters.snapshot()
        assert lost["cache.unbounded_hit_blocks"] > lost["cache.hit_blocks"] > 0
        assert tiers.counters.times()["tiers.host.residence"].values > 0


# -- lookups and leases


async def test_an_instance_may_end_in_the_middle_of_a_look_at_the_pins(tiers: Harness, engine: Engine) -> None:
    other = tiers.engine()
    await engine.stored(1, 2)
    other.unpin(other.lookup(names(1)).lease)
    for _ in range(WALKED):
        engine.lookup(names(1, 2))
    [looking] = [one for one in tiers.all.checks() if one.where == "the pins of cached blocks"]
    walk = looking.walk()
    next(walk)
    tiers.lose(other)
    check(walk)


async def test_another_users_blocks_are_not_there(tiers: Harness, engine: Engine) -> None:
    other = tiers.engine(uid=2)
    await engine.stored(1)
    assert other.lookup(names(1)).blocks == 0
    assert other.ask(CacheList(), CacheListed).blocks == ()
    with pytest.raises(errors.UnknownLeaseError):
        other.load(engine.lookup(names(1)).lease, other.allocate(1))
    assert (await other.evict()).blocks == 0
    assert (await other.answer(CachePin(hashes=hashes(1), pool=POOL), CachePinned)).blocks == 0
    assert len(engine.ask(CacheList(), CacheListed).blocks) == 1


async def test_a_lease_lasts_while_it_is_used(tiers: Harness, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was used last ends last, and not while it is being loaded."""
    await engine.stored(1, 2)
    loop = asyncio.get_running_loop()
    first, second = engine.lookup(names(1)).lease, engine.lookup(names(2)).lease
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now + LEASE_S - 1)
    engine.lookup(names(2), lease=first)
    monkeypatch.setattr(loop, "time", lambda: now + LEASE_S + 1)
    await until(lambda: tiers.counters.snapshot().get("cache.expired_leases"))
    with pytest.raises(errors.UnknownLeaseError):
        engine.unpin(second)
    operation = engine.load(first, ids := engine.allocate(2), deadline_ms=3_600_000)
    monkeypatch.setattr(loop, "time", lambda: now + 3 * LEASE_S)
    await settle()
    assert engine.done(operation) is None
    assert engine.session.session_id in tiers.host.index.pinned_by()
    await tiers.finish()
    assert engine.ended(operation).loaded == 2
    assert engine.read(ids) == [{1}, {2}]
    assert engine.unpin(first) == 2


async def test_a_lease_that_ends_while_the_store_is_asked_pins_nothing(far: Harness) -> None:
    engine = far.engine()
    await engine.stored(1, 2)
    lease = engine.lookup(names(1)).lease
    more = engine.send(Lookup(pool=POOL, hashes=hashes(2, 3), lease=lease))
    assert more not in engine.replies
    engine.unpin(lease)
    while far.store.let_go():
        await settle()
    with pytest.raises(errors.UnknownLeaseError):
        engine.reply(more, Found)
    assert engine.session.session_id not in far.host.index.pinned_by()


async def test_a_prefix_goes_on_where_a_near_block_follows_a_far_one(far: Harness) -> None:
    engine = far.engine()
    await put_away(far, engine, 1)
    for block in far.host.index.page(0, 10).blocks:
        far.host.index.set_tier(block, Tier.REMOTE, present=False)  # as if another node had put it there
    await engine.stored(2)  # its way to the store is held up
    far.store.holds = False
    found = await engine.answer(Lookup(pool=POOL, hashes=hashes(1, 2, 3)), Found)
    assert (found.blocks, found.host, found.remote) == (2, 1, 1)


async def test_an_operation_that_ends_while_blocks_come_up_leaves_them_to_others(far: Harness) -> None:
    engine, other = far.engine(), far.engine()
    await put_away(far, engine, 1, 2)
    lease = other.lookup(names(1, 2)).lease
    operation = engine.load(engine.lookup(names(1, 2)).lease, engine.allocate(2))
    theirs = other.allocate(2)
    their_operation = other.load(lease, theirs)
    engine.cancel(operation)
    await settle()
    assert engine.error(operation) is errors.CancelledError
    far.lose(engine)
    assert far.pool().allocator.busy_count == 2
    await far.let_store_answer()
    await until(lambda: far.copier.under_way)
    await far.finish()
    assert other.error(their_operation) is None
    assert other.read(theirs) == [{1}, {2}]


# -- load


@pytest.mark.parametrize("compared", [True, False])
async def test_a_damaged_block_is_a_miss_and_goes_and_those_beside_it_stay(
    tiers: Harness, engine: Engine, *, compared: bool
) -> None:
    """Where one of the blocks has no checksum, none is compared."""
    await engine.stored(1, 2, 3)
    if not compared:
        tiers.blocks(3)[0].digests = ()
    lease = engine.lookup(names(1, 2, 3)).lease
    ids = engine.allocate(3)
    engine.write(ids, 200)
    operation = engine.load(lease, ids)
    tiers.damage(tiers.copier.under_way[0].segments[0].pages.offsets[1])
    await tiers.finish()
    assert engine.error(operation) is (errors.CacheMissError if compared else None)
    if compared:
        assert engine.read(ids) == [{200}] * 3
        assert engine.lookup(names(1, 2, 3), pin=False).blocks == 1
        assert tiers.host.arena.used_bytes == 3 * UNIT  # the lease still pins the damaged one
        engine.unpin(lease)
        assert tiers.host.arena.used_bytes == 2 * UNIT


@pytest.mark.parametrize("there", [0, 1])
async def test_a_load_of_what_is_gone_says_how_far_it_came(
    far: Harness, there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = far.engine()
    await put_away(far, engine, 1, 2, 3)
    lease = engine.lookup(names(1, 2, 3)).lease
    monkeypatch.setattr(prefix_cache, "BLOCKS_AT_ONCE", 1)
    del far.store.values[sorted(far.store.values)[there]]
    await far.let_store_answer()
    ids = engine.allocate(3)
    engine.write(ids, 200)
    operation = engine.load(lease, ids)
    await until(lambda: far.copier.under_way or engine.done(operation))
    await far.finish()
    assert engine.ended(operation).loaded == there
    assert engine.error(operation) is errors.CacheMissError
    assert engine.read(ids) == ([{1}, {200}, {200}] if there else [{200}] * 3)


# -- long prompts

MANY = 9
"""Blocks, where two are done in a turn of the loop."""


@pytest.fixture
async def turns(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    """Return services that do two blocks in a turn of the loop."""
    monkeypatch.setattr(prefix_cache, "BLOCKS_AT_ONCE", 2)
    monkeypatch.setattr(leases, "UNPINNED_AT_ONCE", 2)
    async with harness(12) as one:
        yield one


async def test_a_long_prompt_is_stored_found_and_loaded_some_blocks_in_each_turn(
    turns: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, most = Counter[str](), Counter[str]()

    def count(what: str, at: int) -> None:
        original = getattr(BlockIndex, what)

        def counted(self: BlockIndex, *given: Any) -> Any:  # noqa: ANN401
            now[what] += len(given[at])
            most[what] = max(most[what], now[what])
            return original(self, *given)

        monkeypatch.setattr(BlockIndex, what, counted)

    async def pass_turns_until(condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0)
            now.clear()

    async def finish(operation: int) -> TierDone:
        await pass_turns_until(lambda: turns.copier.under_way)
        turns.copier.end(turns.copier.under_way[0])
        await pass_turns_until(lambda: engine.done(operation))
        return engine.ended(operation)

    for what, at in (("longest_prefix", 1), ("begin", 1), ("commit", 0), ("touch", 0), ("pin", 0), ("unpin", 0)):
        count(what, at)
    engine = turns.engine()
    ids = engine.allocate(MANY)
    assert (await finish(engine.store(names(*range(MANY)), ids))).stored == MANY
    number = engine.send(Lookup(pool=POOL, hashes=hashes(*range(MANY))))
    await pass_turns_until(lambda: number in engine.replies)
    found = engine.reply(number, Found)
    operation = engine.load(found.lease, ids)
    engine.unpin(found.lease)
    assert (found.blocks, (await finish(operation)).loaded) == (MANY, MANY)
    await pass_turns_until(lambda: not turns.host.index.pinned_by())
    assert max(most.values()) <= 4 < MANY, "two in each turn of the loop: this test sees two turns at a time"


async def test_of_a_store_in_turns_each_block_is_told_after_its_parent(turns: Harness) -> None:
    engine = turns.engine()
    await engine.stored(*range(MANY))
    changes = engine.ask(CacheEvents(cursor=1), CacheChanges).changes
    told = [change.hashes[at : at + 16] for change in changes for at in range(0, len(change.hashes), 16)]
    assert told == names(*range(MANY))
    assert [change.parent for change in changes] == [b"", *(change.hashes[-16:] for change in changes[:-1])]


@pytest.fixture
def two_prompts() -> Store:
    """Return a STORE of blocks 1 and 2 of a prompt, 11 of another one, and 21 after its block 20."""
    chains = (ChainStart(first=2), ChainStart(first=3, parent=names(20)[0]))
    return Store(pool=POOL, hashes=hashes(1, 2, 11, 21), pages=4, parent=names(0)[0], chains=chains)


@pytest.mark.parametrize("at_once", [2, 1024])
async def test_a_store_of_several_prompts_keeps_their_chains(
    turns: Harness, two_prompts: Store, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "BLOCKS_AT_ONCE", at_once)
    engine = turns.engine()
    operation = engine.ask(two_prompts, OperationStarted, engine.allocate(4)).operation
    await until(lambda: turns.copier.under_way)
    turns.copier.finish_all()
    await until(lambda: engine.done(operation))
    assert engine.ended(operation).stored == 4
    changes = engine.ask(CacheEvents(cursor=1), CacheChanges).changes
    assert [(change.parent, change.hashes) for change in changes] == [
        (names(0)[0], hashes(1, 2)),
        (b"", hashes(11)),
        (names(20)[0], hashes(21)),
    ]
    parents = {block.hash: block.parent for block in engine.ask(CacheList(), CacheListed).blocks}
    told = {1: 0, 2: 1, 11: None, 21: 20}
    assert parents == {
        h: "" if p is None else hashes(p).hex()
        for h, p in zip(map(bytes.hex, names(*told)), told.values(), strict=True)
    }


@pytest.mark.parametrize(
    ("chains", "field"),
    [
        ([ChainStart(first=4)], "chains[0].first"),
        ([ChainStart(first=2), ChainStart(first=2)], "chains[1].first"),
        ([ChainStart(first=2), ChainStart(first=1)], "chains[1].first"),
        ([ChainStart(first=2, parent=b"short")], "chains[0].parent"),
    ],
)
async def test_chains_that_do_not_fit_their_blocks_are_refused(
    tiers: Harness, engine: Engine, two_prompts: Store, chains: list[ChainStart], field: str
) -> None:
    body = msgspec.structs.replace(two_prompts, chains=tuple(chains))
    with pytest.raises(errors.InvalidFieldError) as refused:
        engine.ask(body, OperationStarted, engine.allocate(4))
    assert refused.value.field == field
    assert not tiers.copier.under_way


@pytest.mark.parametrize("turn", range(MANY // 2))
@pytest.mark.parametrize("how", ["cancel", "death", "death of a lookup"])
async def test_what_ends_while_it_begins_leaves_nothing(turns: Harness, turn: int, how: str) -> None:
    engine, other = turns.engine(), turns.engine()
    if how == "death of a lookup":
        await other.stored(*range(MANY))
        number = engine.send(Lookup(pool=POOL, hashes=hashes(*range(MANY))))
    else:
        number = engine.store(names(*range(MANY)), engine.allocate(MANY))
    for _ in range(turn):
        await asyncio.sleep(0)
    turns.check()
    assert not turns.copier.under_way
    if how == "cancel":
        engine.cancel(number)
        await settle()
        assert engine.error(number) is errors.CancelledError
    turns.lose(engine)
    await settle()
    assert not turns.host.index.pinned_by()
    await other.evict()
    turns.check_empty()


async def test_a_store_that_is_cancelled_while_its_blocks_become_visible_is_done(turns: Harness) -> None:
    engine = turns.engine()
    operation = engine.store(names(*range(MANY)), engine.allocate(MANY))
    await until(lambda: turns.copier.under_way)
    turns.copier.finish_all()
    await until(lambda: turns.blocks(0))
    number = engine.cancel(operation)
    assert len(turns.blocks(*range(MANY))) == 2
    await until(lambda: engine.done(operation))
    assert number in engine.replies
    assert engine.ended(operation).stored == len(turns.blocks(*range(MANY))) == MANY


async def test_what_a_lookup_finds_and_a_load_takes_in_turns_stays(turns: Harness) -> None:
    engine = turns.engine()
    await engine.stored(*range(MANY))
    number = engine.send(Lookup(pool=POOL, hashes=hashes(*range(MANY))))
    assert (await turns.engine().evict()).kept >= 2
    await until(lambda: number in engine.replies)
    found = engine.reply(number, Found)
    assert 2 <= found.host == found.blocks == len(turns.blocks(*range(MANY)))
    operation = engine.load(found.lease, engine.allocate(found.blocks))
    engine.unpin(found.lease)
    assert (await engine.evict()).kept == found.blocks
    await until(lambda: turns.copier.under_way)
    turns.check()
    await turns.finish()
    assert engine.ended(operation).loaded == found.blocks
    await settle()
    assert not turns.host.index.pinned_by()


async def test_an_instance_may_have_so_many_pins_and_leases(turns: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = turns.engine(), Lookup(pool=POOL, hashes=hashes(*range(MANY)))
    await engine.stored(*range(MANY))
    monkeypatch.setattr(leases, "MAX_PINS", MANY)
    monkeypatch.setattr(leases, "MAX_LEASES", 1)
    first = await engine.answer(asked, Found)
    with pytest.raises(errors.OverloadedError, match="9 blocks; 2 more exceed 9"):
        await engine.answer(msgspec.structs.replace(asked, lease=first.lease), Found)
    engine.unpin(first.lease)
    await settle()
    assert not turns.host.index.pinned_by()
    one = engine.lookup(names(0)).lease
    with pytest.raises(errors.OverloadedError, match="1 leases"):
        engine.lookup(names(1))
    assert engine.lookup(names(1), lease=one).blocks == 1


# -- reports


async def test_events_of_other_users_are_passed(
    tiers: Harness, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_reports, "LOOK_AT", 2)
    other, first = tiers.engine(uid=2), tiers.host.journal.position()
    for number in (1, 3, 5, 7, 9):  # each a change of its own
        await other.stored(number)
        other.ask(CacheList(), CacheListed)
    dead = tiers.engine()
    dead.send(CacheEvents(cursor=1))
    tiers.lose(dead)
    cursor = engine.send(CacheEvents(cursor=1))
    assert cursor not in engine.replies
    await engine.stored(2)
    await settle()
    changes = engine.reply(cursor, CacheChanges)
    assert [one.hashes for one in changes.changes] == [hashes(2)]
    assert changes.cursor == first + 6
    assert repr(tiers.reports) == "<CacheReports waiting=0>", "nor does the one who died wait"
    late = engine.send(CacheEvents(cursor=1), deadline_ms=20_000)
    await settle()
    assert [one.hashes for one in engine.reply(late, CacheChanges).changes] == [hashes(2)]


async def test_what_the_daemon_before_has_given_is_nothing_of_this_one(engine: Engine) -> None:
    """An engine that has a lease of it must not load what others have found since; nor is a list gone on with."""
    await engine.stored(1, 2, 3)
    before = engine.ask(CacheList(limit=2), CacheListed)
    assert before.position is not None
    assert len(engine.ask(CacheList(position=before.position), CacheListed).blocks) == 1
    lease, store = engine.lookup(names(1)).lease, engine.store(names(4), engine.allocate(1))
    async with harness(8) as restarted:
        later = restarted.engine()
        for number in (4, 5, 6, 7):  # each a change of its own
            await later.stored(number)
            later.ask(CacheList(), CacheListed)
        assert lease != later.lookup(names(4)).lease
        with pytest.raises(errors.UnknownLeaseError):
            later.load(lease, later.allocate(1))
        assert later.ask(CacheEvents(cursor=before.cursor), CacheChanges).lost
        told = later.ask(CacheEvents(cursor=1), CacheChanges).changes
        assert [one.hashes for one in told] == [hashes(4), hashes(5), hashes(6), hashes(7)]
        with pytest.raises(errors.InvalidFieldError, match="begin again at 0"):
            later.ask(CacheList(position=before.position), CacheListed)
        with pytest.raises(errors.UnknownOperationError):
            later.ask(CancelOperation(operation=store), OperationCancelled)


async def test_a_list_comes_in_segments_that_are_not_too_long(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_reports, "LOOK_AT", 2)
    await engine.stored(1, 2, 3, 4, 5)
    listed, position = [], 0
    while True:
        segment = engine.ask(CacheList(position=position, limit=10_000), CacheListed)
        assert len(segment.blocks) <= 2
        listed += [one.hash for one in segment.blocks]
        if segment.position is None:
            break
        position = segment.position
    assert listed == [one.hex() for one in names(1, 2, 3, 4, 5)]


async def test_an_operator_evicts_what_nobody_pins(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_reports, "LOOK_AT", 2)
    await engine.stored(1, 2, 3, 4, 5)
    engine.lookup(names(1))
    assert (await engine.answer(CachePin(hashes=hashes(2, 9), pool=POOL), CachePinned)).blocks == 1
    evicted = await engine.evict()
    assert evicted == CacheEvicted(blocks=3, size_bytes=3 * UNIT, kept=2)
    await engine.answer(CachePin(hashes=hashes(2), pinned=False, pool=POOL), CachePinned)
    assert await engine.evict(hashes=hashes(1, 2), pool=POOL) == CacheEvicted(blocks=1, size_bytes=UNIT, kept=1)


async def test_a_reset_of_one_model_leaves_the_same_prompts_of_others(tiers: Harness, engine: Engine) -> None:
    """The labels of the two models are equal."""
    await new_pool(tiers, "base", model=ModelIdentity(name="m+a"))
    await new_pool(tiers, "adapted", model=ModelIdentity(name="m", adapter="a"))
    for pool in ("base", "adapted"):
        engine.store(names(1, 2), engine.allocate(2, pool), pool)
    await tiers.finish()
    assert (await engine.evict(hashes=hashes(2), pool="base")).blocks == 1
    for pinned in (True, False):
        body = CachePin(hashes=hashes(1), pool="base", pinned=pinned)
        assert (await engine.answer(body, CachePinned)).blocks == 1
    assert (await engine.evict(everything=True, pool="base")).blocks == 1
    assert [engine.lookup(names(1, 2), pool, pin=False).blocks for pool in ("base", "adapted")] == [0, 2]
    identity = engine.ask(CacheList(), CacheListed).blocks[0].identity
    assert (await engine.evict(everything=True, identity=identity)).blocks == 2


async def test_a_hash_without_an_identity_names_no_block(engine: Engine) -> None:
    await engine.stored(1)
    for body in (
        CacheEvict(hashes=hashes(1)),
        CachePin(hashes=hashes(1)),
        CachePin(hashes=hashes(1), pinned=False),
        CacheEvict(everything=True, pool=POOL, identity="0" * 32),
        CachePin(hashes=b"", pool=POOL),
    ):
        with pytest.raises(errors.InvalidFieldError):
            engine.ask(body, CacheEvicted)
    assert engine.lookup(names(1), pin=False).blocks == 1

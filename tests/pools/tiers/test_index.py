"""The index against plain dictionaries, and readers of the journal against the index."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.pools.tiers.arena import Freed
from kvferry.pools.tiers.cached_block import BlockState, CachedBlock, Namespace, Tier
from kvferry.pools.tiers.index import OPERATOR, BlockIndex
from kvferry.pools.tiers.journal import CacheJournal, Change, ChangeKind
from kvferry.pools.tiers.policies import POLICY_NAMES
from kvferry.pools.tiers.split_dict import SPLIT_AT, SplitDict
from tests.kit.devices import DEVICE

SPACES = [Namespace(1, "d", "i", "main", 1), Namespace(1, "d", "i", "swa", 2), Namespace(2, "d", "i", "main", 1)]
HASHES = [bytes([number]) * 16 for number in range(6)]
BOUNDS = {1: 3000, 2: 1000}
PARTS = {1: 0.75, 2: 0.25}
SIZE = 128
NAMES = HASHES[:4]
CHAINS = st.integers(1, 4).map(lambda count: NAMES[:count]) | st.lists(st.sampled_from(NAMES), max_size=4)
HOLDERS = st.sampled_from([OPERATOR, 1, 2])
Place = tuple[Namespace, bytes, Tier]


@dataclass(eq=False)
class _Known:
    """What the model knows of a block."""

    space: Namespace
    hash: bytes
    parent: bytes | None
    block: CachedBlock
    tiers: set[Tier] = field(default_factory=set)
    pins: Counter[int] = field(default_factory=Counter)
    number: int = 0  # of its bytes in the host tier, 0 without any

    def pinned(self) -> bool:
        return self.pins.total() > 0


class _Reader:
    """A router: it knows where blocks are from what the journal says, and from the list where it came late."""

    def __init__(self, cursor: int) -> None:
        self.cursor = cursor
        self.from_the_first = cursor == 1
        self.places: set[Place] = set()

    def meet(self, blocks: Iterable[CachedBlock]) -> None:
        for block in blocks:
            flags = {Tier.HOST: block.in_host, Tier.DISK: block.on_disk, Tier.REMOTE: block.in_remote}
            self.places |= {(block.namespace, block.hash, tier) for tier, there in flags.items() if there}

    def read(self, journal: CacheJournal) -> None:
        while (found := journal.since(self.cursor, 3)).changes:
            self.cursor = found.next_cursor
            for change in found.changes:
                self.apply(change)
        assert not found.lost

    def apply(self, change: Change) -> None:
        places = {(change.namespace, name, change.tier) for name in change.hashes}
        if self.from_the_first:  # nothing is said twice
            assert len(places) == len(change.hashes)
            assert (places & self.places) == (set() if change.kind is ChangeKind.STORED else places)
        self.places = self.places | places if change.kind is ChangeKind.STORED else self.places - places


class _IndexAgainstDictionaries(RuleBasedStateMachine):
    """Does the same to an index and to dictionaries; its bytes in the host tier are numbered, and freed once each."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = CacheJournal(10_000)
        self.index = BlockIndex(self.journal, most_bytes=999, bounds=BOUNDS, parts=PARTS, policy="lru")
        self.ready: dict[tuple[Namespace, bytes], _Known] = {}
        self.writing: dict[tuple[Namespace, bytes], _Known] = {}
        self.gone: list[_Known] = []
        self.order: list[_Known] = []  # of blocks in the host tier, the one used longest ago first
        self.charged: Counter[int] = Counter()
        self.numbers = 0
        self.used: set[int] = set()  # numbers of bytes that are somebody's
        self.reader = _Reader(1)
        self.late: _Reader | None = None
        self.position = 0

    # --- the model ---

    def known(self) -> list[_Known]:
        return [*self.ready.values(), *self.writing.values(), *self.gone]

    def new_bytes(self, known: _Known) -> np.typing.NDArray[np.int64]:
        self.numbers += 1
        known.number = self.numbers
        self.used.add(known.number)
        return np.full(known.space.block_pages, known.number, np.int64)

    def freed(self, freed: Iterable[Freed], expected: Iterable[_Known]) -> None:
        """Check that what the index gave back is the bytes of those blocks, and free it."""
        expected = list(expected)
        wanted = [([one.number] * one.space.block_pages, SIZE // one.space.block_pages) for one in expected]
        assert sorted((one.offsets.tolist(), one.size_bytes) for one in freed) == sorted(wanted)
        for known in expected:
            self.used.remove(known.number)
            known.number = 0

    def forget(self, known: _Known) -> None:
        del self.ready[known.space, known.hash]
        idle = [one for one in self.gone if not one.number and not one.pinned()]
        self.gone = [one for one in self.gone if one not in idle[1:]]  # what is gone for good need not be many
        known.tiers.clear()
        self.gone.append(known)

    def evictable(self) -> list[_Known]:
        return [known for known in self.order if not known.pinned()]

    def used_bytes(self, tenant: int) -> int:
        """Return what counts against a tenant's quota."""
        there = sum(SIZE for known in self.known() if known.space.tenant == tenant and known.number)
        return there + SIZE * sum(space.tenant == tenant for space, _ in self.writing) + self.charged[tenant]

    # --- stores ---

    @rule(space=st.sampled_from(SPACES), hashes=CHAINS, parent=st.none() | st.sampled_from(NAMES))
    def begin(self, space: Namespace, hashes: list[bytes], parent: bytes | None) -> None:
        begun = self.index.begin(space, hashes, parent, SIZE)
        assert len(begun) == len(hashes)
        for name, (block, fresh), before in zip(hashes, begun, [parent, *hashes], strict=False):
            old = self.ready.get((space, name)) or self.writing.get((space, name))
            assert fresh == (old is None)
            if old is not None:
                assert block is old.block
                assert block.state is (BlockState.READY if (space, name) in self.ready else BlockState.WRITING)
                continue
            assert (block.namespace, block.hash, block.parent) == (space, name, before)
            self.writing[space, name] = _Known(space, name, before, block)

    @precondition(lambda self: self.writing)
    @rule()
    def commit_all(self) -> None:
        self.end_writing(list(self.writing.values()), hashed=False)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        done = data.draw(st.lists(st.sampled_from(list(self.writing.values())), unique=True))
        self.end_writing(done, hashed=data.draw(st.booleans()))

    def end_writing(self, done: list[_Known], *, hashed: bool) -> None:
        for space in dict.fromkeys(known.space for known in done):
            its = [known for known in done if known.space == space]
            digests = [[known.hash[0]] * space.block_pages for known in its]
            self.index.commit(
                [known.block for known in its],
                np.stack([self.new_bytes(known) for known in its]),
                np.array(digests, np.uint64) if hashed else None,
            )
            for known, its_digests in zip(its, digests, strict=True):
                self.ready[known.space, known.hash] = self.writing.pop((known.space, known.hash))
                known.tiers.add(Tier.HOST)
                assert known.block.digests == (tuple(its_digests) if hashed else ())
            self.order += reversed(its)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        """Give a store up; what another tier has is visible all the same."""
        known = data.draw(st.sampled_from(list(self.writing.values())))
        self.index.abandon([known.block])
        del self.writing[known.space, known.hash]
        if known.tiers:
            self.ready[known.space, known.hash] = known
        else:
            self.gone.append(known)

    # --- tiers ---

    @rule(space=st.sampled_from(SPACES), name=st.sampled_from(NAMES), tier=st.sampled_from([Tier.DISK, Tier.REMOTE]))
    def adopt(self, space: Namespace, name: bytes, tier: Tier) -> None:
        block = self.index.adopt(space, name, None, SIZE, tier=tier, digests=(7,))
        old = self.ready.get((space, name)) or self.writing.get((space, name))
        if old is None:
            assert block.digests == (7,)
            old = self.ready[space, name] = _Known(space, name, None, block)
        assert block is old.block
        old.tiers.add(tier)

    @precondition(lambda self: self.known())
    @rule(data=st.data(), tier=st.sampled_from([Tier.DISK, Tier.REMOTE]), present=st.booleans())
    def set_tier(self, data: st.DataObject, tier: Tier, *, present: bool) -> None:
        known = data.draw(st.sampled_from(self.known()))
        live = known not in self.gone
        assert self.index.set_tier(known.block, tier, present=present) is live
        if not live:
            return
        (known.tiers.add if present else known.tiers.discard)(tier)
        if not known.tiers and (known.space, known.hash) in self.ready:
            self.forget(known)

    @precondition(lambda self: self.ready or self.gone)
    @rule(data=st.data())
    def enter_host(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from([*self.ready.values(), *self.gone]))
        wanted = known in self.ready.values() and Tier.HOST not in known.tiers
        offsets = self.new_bytes(known) if wanted else np.zeros(1, np.int64)
        assert self.index.enter_host(known.block, offsets) is wanted
        if wanted:
            known.tiers.add(Tier.HOST)
            self.order.append(known)

    @rule(tenant=st.sampled_from([1, 2]), data=st.data())
    def evict_of_one(self, tenant: int, data: st.DataObject) -> None:
        """Evict and skip as a tenant's policy says."""
        expected = [known for known in self.evictable() if known.space.tenant == tenant]
        for victim in self.index.host_victims(tenant):
            known = expected.pop(0)
            assert victim is known.block
            if data.draw(st.booleans()):
                self.drop(known)
        assert not expected

    @rule(data=st.data())
    def evict_of_any(self, data: st.DataObject) -> None:
        """Evict and skip: always one of the tenant that has most by its share and has any left."""
        left = self.evictable()
        for victim in self.index.host_victims():
            shares = {known.space.tenant: self.used_bytes(known.space.tenant) for known in left}
            assert shares[victim.namespace.tenant] / PARTS[victim.namespace.tenant] == max(
                used / PARTS[tenant] for tenant, used in shares.items()
            )
            known = next(known for known in left if known.space.tenant == victim.namespace.tenant)
            assert victim is known.block
            left.remove(known)
            if data.draw(st.booleans()):
                self.drop(known)
        assert not left

    def drop(self, known: _Known) -> None:
        self.freed([self.index.drop_host(known.block)], [known])
        self.order.remove(known)
        known.tiers.remove(Tier.HOST)
        if not known.tiers:
            self.forget(known)

    @precondition(lambda self: self.known())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """Remove a block from everywhere; bytes that are pinned wait."""
        known = data.draw(st.sampled_from(self.known()))
        freed = self.index.remove(known.block)
        if known not in self.ready.values():
            assert freed == []
            return
        self.freed(freed, [known] if known.number and not known.pinned() else [])
        if known in self.order:
            self.order.remove(known)
        self.forget(known)

    # --- use ---

    @rule(space=st.sampled_from(SPACES), hashes=CHAINS, holder=st.none() | HOLDERS)
    def look_up(self, space: Namespace, hashes: list[bytes], holder: int | None) -> None:
        expected: list[_Known] = []
        for name in hashes:
            if (space, name) not in self.ready:
                break
            expected.append(self.ready[space, name])
        found = self.index.longest_prefix(space, iter(hashes))
        assert found == [known.block for known in expected]
        self.index.touch(found)
        for known in reversed(expected):
            if known in self.order:
                self.order.remove(known)
                self.order.append(known)
        if holder is not None:
            self.index.pin(found, holder)
            for known in expected:
                known.pins[holder] += 1

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), holder=HOLDERS)
    def pin_what_is_being_written(self, data: st.DataObject, holder: int) -> None:
        known = data.draw(st.sampled_from(list(self.writing.values())))
        self.index.pin([known.block], holder)
        known.pins[holder] += 1

    @precondition(lambda self: any(known.pinned() for known in self.known()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from([known for known in self.known() if known.pinned()]))
        holder = data.draw(st.sampled_from(sorted(+known.pins)))
        freed = self.index.unpin([known.block], holder)
        known.pins[holder] -= 1
        self.freed(freed, [known] if known in self.gone and known.number and not known.pinned() else [])

    @rule(tenant=st.sampled_from([1, 2]), size=st.integers(0, 900))
    def charge(self, tenant: int, size: int) -> None:
        self.index.accounts[tenant].charged_bytes += size
        self.charged[tenant] += size

    @rule(tenant=st.sampled_from([1, 2]))
    def discharge(self, tenant: int) -> None:
        size = (self.charged[tenant] + 1) // 2
        self.index.accounts[tenant].charged_bytes -= size
        self.charged[tenant] -= size

    # --- those who come late ---

    @rule()
    def come_late(self) -> None:
        self.late, self.position = _Reader(self.journal.position()), 0
        self.late.from_the_first = False

    @precondition(lambda self: self.late is not None)
    @rule(limit=st.integers(1, 4))
    def read_the_list(self, limit: int) -> None:
        """Read one more part of it, and after the last one what happened meanwhile."""
        assert self.late is not None
        part = self.index.page(self.position, limit)
        self.late.meet(part.blocks)
        if part.next_position is not None:
            self.position = part.next_position
            return
        self.late.read(self.journal)
        assert self.late.places == self.places()
        self.late = None

    def places(self) -> set[Place]:
        return {(*key, tier) for key, known in self.ready.items() for tier in known.tiers}

    @invariant()
    def agrees_with_the_dictionaries(self) -> None:
        """Check everything that can be asked for, the index's own integrity, and one who reads along."""
        self.index.check_integrity()
        assert len(self.index) == len(self.ready)
        for space in SPACES:
            for name in NAMES:
                known = self.ready.get((space, name))
                assert self.index.get(space, name) is (known.block if known else None)
        for tenant, most in BOUNDS.items():
            usage = self.index.accounts[tenant]
            assert (usage.used_bytes, usage.most_bytes) == (self.used_bytes(tenant), most)
            assert usage.evictable_bytes == SIZE * sum(known.space.tenant == tenant for known in self.evictable())
        pinned = Counter(
            {h: SIZE * sum(k.number > 0 and k.pins[h] > 0 for k in self.known()) for h in (OPERATOR, 1, 2)}
        )
        assert self.index.pinned_by() == +pinned
        assert self.used == {known.number for known in self.known() if known.number}
        for known in self.gone:
            assert known.block.state is (BlockState.DOOMED if known.number else BlockState.GONE)
        self.reader.read(self.journal)
        assert self.reader.places == self.places()


TestIndex = _IndexAgainstDictionaries.TestCase
TestIndex.settings = DEVICE.examples(80, stateful_step_count=40)


def new_index(*, most_bytes: int = 1 << 40, policy: str = "reuse") -> tuple[BlockIndex, CacheJournal]:
    journal = CacheJournal(1000)
    return BlockIndex(journal, most_bytes=most_bytes, policy=policy), journal


def store(index: BlockIndex, hashes: list[bytes], space: Namespace = SPACES[0]) -> list[CachedBlock]:
    blocks = [begun.block for begun in index.begin(space, hashes, None, SIZE)]
    index.commit(blocks, np.arange(len(blocks), dtype=np.int64)[:, None].repeat(space.block_pages, 1))
    return blocks


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_the_end_of_a_prefix_goes_before_its_beginning(policy: str) -> None:
    index, _ = new_index(policy=policy)
    blocks = store(index, HASHES)
    index.touch(blocks[:2])
    assert list(index.host_victims()) == [blocks[at] for at in (5, 4, 3, 2, 1, 0)]


def test_who_has_no_share_gives_first_where_all_is_given_away_and_who_is_unknown_has_nothing() -> None:
    index = BlockIndex(CacheJournal(10), most_bytes=0, parts={2: 1.0})
    store(index, HASHES[:4], SPACES[2])
    store(index, HASHES[:1], Namespace(3, "d", "i", "main", 1))
    assert next(index.host_victims()).namespace.tenant == 3
    index, _ = new_index(most_bytes=50)
    assert (index.accounts[9].used_bytes, index.accounts[9].most_bytes) == (0, 50)
    assert list(index.host_victims(9)) == []


@pytest.mark.parametrize("count", [100, SPLIT_AT + 1000])
def test_a_dict_in_parts_holds_what_a_dict_holds_before_and_after_it_is_split(count: int) -> None:
    drawn = random.Random(0)  # noqa: S311  no secret
    ours, model = SplitDict[bytes, int](), dict[bytes, int]()
    keys = [number.to_bytes(16) for number in range(count)]
    for number, key in enumerate(keys):
        ours[key] = model[key] = number
    assert ours.leading([*keys[:3], b"no", keys[3]]) == [0, 1, 2]
    for key in drawn.sample(keys, count // 2):
        assert ours.pop(key) == model.pop(key)
        assert ours.get(key) is None
        assert key not in ours
        with pytest.raises(KeyError):
            ours.pop(key)
    for key in drawn.sample(sorted(model), count // 4):
        ours[key] = model[key] = -1
    assert len(ours) == len(model)
    assert dict(ours.items()) == model
    assert sorted(ours.values()) == sorted(model.values())
    assert all(key in ours and ours[key] == ours.get(key) == value for key, value in model.items())

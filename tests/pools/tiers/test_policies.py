"""What all policies promise, and those that are told later; LRU is tested against a plain list by ``test_index``."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.pools.tiers import policies
from kvferry.pools.tiers.policies import POLICY_NAMES, Deferred, EvictionPolicy, Key, make_policy
from kvferry.pools.tiers.reuse_policy import Place, ReuseRate
from tests.kit.devices import DEVICE

KEYS = st.integers(0, 11)
ALL = pytest.mark.parametrize("name", POLICY_NAMES)


def place(key: int) -> Place:
    return Place("space", key.to_bytes(16, "big"), None, 0)


def take_all(policy: EvictionPolicy[Key]) -> list[Key]:
    gone = []
    for key in policy.victims():
        policy.remove(key)
        gone.append(key)
    assert len(policy) == 0
    return gone


@ALL
@given(steps=st.lists(st.tuples(st.sampled_from(["add", "hit", "remove", "next"]), KEYS), max_size=80))
@DEVICE.examples(200)
def test_whatever_happens_meanwhile_no_key_comes_twice_and_the_end_comes(
    name: str, steps: list[tuple[str, int]]
) -> None:
    policy: EvictionPolicy[int] = make_policy(name)
    there: set[int] = set()
    victims, chunk_announced = policy.victims(), set[int]()
    for step, key in steps:
        if step == "add" and key not in there:
            policy.add(key, place(key))
            there.add(key)
            chunk_announced.discard(key)  # another one of that name
        elif step == "hit" and key in there:
            policy.hit(key)
        elif step == "remove" and key in there:
            policy.remove(key)
            there.remove(key)
        elif step == "next":
            victim = next(victims, None)
            if victim is None:
                victims, chunk_announced = policy.victims(), set()
                continue
            assert victim in there
            assert victim not in chunk_announced
            chunk_announced.add(victim)
    assert len(list(victims)) <= len(there)
    assert sorted(policy.victims()) == sorted(there)


@ALL
def test_the_place_of_a_skipped_key_is_no_way_back_to_keys_that_left(name: str) -> None:
    policy: EvictionPolicy[int] = make_policy(name)
    for key in (1, 2, 3):
        policy.add(key, place(key))
    assert next(policy.victims()) == 1, "asked for and not passed it comes first again"
    victims = policy.victims()
    assert [next(victims), next(victims)] == [1, 2]
    for key in (1, 2, 3):
        policy.remove(key)
    policy.add(4, place(4))
    assert 3 not in victims


@ALL
@given(data=st.data(), steps=st.integers(1, 60))
@DEVICE.examples(60)
def test_a_policy_that_is_told_later_decides_the_same(name: str, data: st.DataObject, steps: int) -> None:
    now: EvictionPolicy[int] = make_policy(name)
    later: Deferred[int] = Deferred(make_policy(name), place, lambda: None)
    there: dict[int, None] = {}
    for _ in range(steps):
        what = data.draw(st.sampled_from(["add", "hit", "hit", "remove", "evict", "catch up"]))
        keys = data.draw(st.lists(KEYS, unique=True, max_size=4))
        if what == "add":
            new = [key for key in keys if key not in there]
            later.add(new)
            for key in new:
                now.add(key, place(key))
            there |= dict.fromkeys(new)
        elif what == "hit":
            old = [key for key in keys if key in there]
            later.hit(old)
            for key in old:
                now.hit(key)
        elif what == "remove" and keys and keys[0] in there:
            now.remove(keys[0])
            later.remove(keys[0])
            del there[keys[0]]
        elif what == "evict" and there:
            gone = next(now.victims())
            assert next(later.victims()) == gone
            now.remove(gone)
            later.remove(gone)
            del there[gone]
        elif what == "catch up":
            before = later.behind
            count = data.draw(st.integers(0, 5))
            later.catch_up(count)
            assert later.behind == max(0, before - count)
        assert len(later) == len(now) == len(there)
    gone_now = take_all(now)
    for victim, expected in zip(later.victims(), gone_now, strict=True):
        assert victim == expected
        later.remove(victim)
    assert later.behind == 0


def test_a_policy_falls_behind_by_so_many_uses_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "MOST_BEHIND", 3)
    told: list[int] = []
    later: Deferred[int] = Deferred(make_policy("lru"), place, lambda: told.append(later.behind))
    later.add([0, 1])
    later.add([2, 3, 4, 5, 6, 7])
    later.hit([])
    assert (later.behind, len(later)) == (3, 8)
    later.catch_up(2)
    later.hit([0])
    assert told == [2, 3, 2]
    assert list(later.victims()) == [1, 2, 3, 4, 5, 6, 7, 0]


# -- eviction by expected reuse: prefixes leave from their ends, whatever happens, and what comes back is kept

BLOCKS = 10
PARENTS = st.lists(st.integers(-1, BLOCKS - 1), min_size=BLOCKS, max_size=BLOCKS)
"""The parent of each key, -1 for none; engines may name wrong ones: any key, and in a circle."""

STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "hit", "remove", "evict"]), st.integers(0, BLOCKS - 1)), max_size=60
)


def name(key: int) -> bytes:
    return key.to_bytes(16, "big")


def place_after(key: int, parent: int = -1, space: str = "space", depth: int = 0) -> Place:
    return Place(space, name(key), None if parent < 0 else name(parent), depth)


def chain(policy: ReuseRate[int], first: int, count: int) -> None:
    """Add a prefix from its end, as a store does."""
    for key in reversed(range(first, first + count)):
        policy.add(key, place_after(key, key - 1 if key > first else -1, depth=key - first))


@given(parents=PARENTS, steps=STEPS, pinned=st.frozensets(st.integers(0, BLOCKS - 1), max_size=3))
@DEVICE.examples(300)
@example([0, 0, 0, 0, 0, 0, 0, 0, 1, 0], [("add", 0), ("add", 1), ("add", 8)], frozenset({0, 8}))  # 1 goes, 8 stays
def test_a_block_goes_after_those_below_it_unless_they_are_skipped(
    parents: list[int], steps: list[tuple[str, int]], pinned: frozenset[int]
) -> None:
    policy: ReuseRate[int] = ReuseRate()
    there: set[int] = set()
    tree = [parent if parent < key else -1 for key, parent in enumerate(parents)]

    def check_order(*, evict: int) -> None:
        seen: list[int] = []
        for key in policy.victims():
            assert not [child for child in there if tree[child] == key and child not in seen]
            seen.append(key)
            if key not in pinned and evict > 0:
                evict -= 1
                policy.remove(key)
                there.remove(key)
        assert there <= set(seen)
        assert len(seen) == len(set(seen))

    for step, key in steps:
        if step == "add" and key not in there:
            policy.add(key, place_after(key, tree[key]))
            there.add(key)
        elif step == "hit" and key in there:
            policy.hit(key)
        elif step == "remove" and key in there:
            policy.remove(key)
            there.remove(key)
        elif step == "evict":
            check_order(evict=key)
        assert len(policy) == len(there)
    check_order(evict=0)
    check_order(evict=BLOCKS)
    assert there <= pinned


def test_of_prefixes_the_end_that_was_used_longest_ago_goes_first() -> None:
    policy: ReuseRate[int] = ReuseRate()
    chain(policy, 0, 3)
    for _ in range(2):  # another class, so that the places differ
        chain(policy, 10, 200)
        for key in range(10, 210):
            policy.remove(key)
    chain(policy, 300, 3)
    assert list(policy.victims()) == [2, 1, 0, 302, 301, 300]


def test_the_same_hash_in_another_space_is_another_block() -> None:
    policy: ReuseRate[str] = ReuseRate()
    policy.add("a", place_after(1, space="one"))
    policy.add("b", place_after(2, 1, space="two"))
    policy.add("c", place_after(1, space="two"))
    assert list(policy.victims()) == ["a", "b", "c"]


def test_what_comes_back_is_kept_and_what_never_does_goes_although_it_is_newer() -> None:
    policy: ReuseRate[int] = ReuseRate()
    fresh = 1000
    for _ in range(30):
        for key in range(40):  # asked for again and again, 4 of 5 uses apart
            if key in _keys(policy):
                policy.hit(key)
            else:
                policy.add(key, place_after(key))
        for key in range(fresh, fresh + 160):  # asked for once
            policy.add(key, place_after(key))
        fresh += 160
        victims = policy.victims()
        while len(policy) > 120:
            policy.remove(next(victims))
    assert set(range(40)) <= _keys(policy)


def _keys(policy: ReuseRate[int]) -> set[int]:
    return set(policy.victims())

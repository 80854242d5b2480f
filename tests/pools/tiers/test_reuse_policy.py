"""Eviction by expected reuse: prefixes leave from their ends, whatever happens, and what comes back is kept."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.pools.tiers.reuse_policy import Place, ReuseRate
from tests.kit.devices import DEVICE

KEYS = 10
PARENTS = st.lists(st.integers(-1, KEYS - 1), min_size=KEYS, max_size=KEYS)
"""The parent of each key, -1 for none; engines may name wrong ones: any key, and in a circle."""

STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "hit", "remove", "evict"]), st.integers(0, KEYS - 1)), max_size=60
)


def name(key: int) -> bytes:
    return key.to_bytes(16, "big")


def place(key: int, parent: int = -1, space: str = "space", depth: int = 0) -> Place:
    return Place(space, name(key), None if parent < 0 else name(parent), depth)


def chain(policy: ReuseRate[int], first: int, count: int) -> None:
    """Add a prefix from its end, as a store does."""
    for key in reversed(range(first, first + count)):
        policy.add(key, place(key, key - 1 if key > first else -1, depth=key - first))


@given(parents=PARENTS, steps=STEPS, pinned=st.frozensets(st.integers(0, KEYS - 1), max_size=3))
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
            policy.add(key, place(key, tree[key]))
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
    check_order(evict=KEYS)
    assert there <= pinned


@given(parents=PARENTS, steps=STEPS)
@DEVICE.examples(200)
def test_wrong_parents_keep_nothing_from_being_evicted(parents: list[int], steps: list[tuple[str, int]]) -> None:
    policy: ReuseRate[int] = ReuseRate()
    there: set[int] = set()
    for step, key in steps:
        if step == "add" and key not in there:
            policy.add(key, place(key, parents[key]))
            there.add(key)
        elif step in {"remove", "evict"} and key in there:
            policy.remove(key)
            there.remove(key)
    assert sorted(policy.victims()) == sorted(there)


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
    policy.add("a", place(1, space="one"))
    policy.add("b", place(2, 1, space="two"))
    policy.add("c", place(1, space="two"))
    assert list(policy.victims()) == ["a", "b", "c"]


def test_what_comes_back_is_kept_and_what_never_does_goes_although_it_is_newer() -> None:
    policy: ReuseRate[int] = ReuseRate()
    fresh = 1000
    for _ in range(60):
        for key in range(100):  # asked for again and again, 4 of 5 uses apart
            if key in _keys(policy):
                policy.hit(key)
            else:
                policy.add(key, place(key))
        for key in range(fresh, fresh + 400):  # asked for once
            policy.add(key, place(key))
        fresh += 400
        victims = policy.victims()
        while len(policy) > 300:
            policy.remove(next(victims))
    assert set(range(100)) <= _keys(policy)


def _keys(policy: ReuseRate[int]) -> set[int]:
    return set(policy.victims())


def test_it_says_what_it_has() -> None:
    policy: ReuseRate[int] = ReuseRate()
    chain(policy, 0, 3)
    assert "keys=3" in repr(policy)
    assert "uses=3 followed=3" in repr(policy)

"""Stores of several requests as one: each block once, and each after its parent."""

from __future__ import annotations

from kvferry.clients.vllm.metadata import MOST_JOINED, Blocks, Store, Stores, joined_stores
from tests.kit.tiers import names


def store(number: int, ids: list[int], blocks: list[int], parent: int | None = None) -> Store:
    """Return the store of blocks under numbers."""
    before = None if parent is None else names(parent)[0]
    return Store(number, f"r{number}", Blocks(ids, 0), names(*blocks), before)


def told(whole: Stores) -> dict[bytes, tuple[int, bytes | None]]:
    """Return by its name each block's id and its parent's name, as the daemon reads it."""
    parents = [whole.parent, *whole.names[:-1]]
    for one in whole.chains:
        parents[one.first] = one.parent or None
    assert len(whole.names) == len(set(whole.names))
    return {name: (block, parent) for name, block, parent in zip(whole.names, whole.ids, parents, strict=True)}


def expected(told: dict[int, tuple[int, int | None]]) -> dict[bytes, tuple[int, bytes | None]]:
    return {
        names(name)[0]: (block, None if parent is None else names(parent)[0]) for name, (block, parent) in told.items()
    }


def test_each_request_keeps_its_chain() -> None:
    stores = [store(1, [7, 8], [10, 11]), store(2, [5], [21], parent=20), store(3, [6], [30])]
    [(whole, parts)] = joined_stores(stores)
    assert parts == stores
    assert told(whole) == expected({10: (7, None), 11: (8, 10), 21: (5, 20), 30: (6, None)})


def test_a_block_of_two_requests_goes_once() -> None:
    """The second prompt begins as the first one does, and the third has what both do not have, around a block."""
    stores = [store(1, [1, 2, 3], [10, 11, 12]), store(2, [4, 5, 6], [10, 11, 13]), store(3, [7, 8, 9], [9, 10, 14])]
    [(whole, _)] = joined_stores(stores)
    assert told(whole) == expected({10: (1, None), 11: (2, 10), 12: (3, 11), 13: (6, 11), 9: (7, None), 14: (9, 10)})


def test_many_blocks_go_in_several() -> None:
    most = MOST_JOINED
    stores = [store(number, [number], [number]) for number in range(most + 1)]
    long = store(most + 1, list(range(most + 1)), list(range(2 * most, 3 * most + 1)))
    joined = joined_stores([*stores, long])
    assert [len(whole.ids) for whole, _ in joined] == [most, 1, most + 1]
    assert [one for _, parts in joined for one in parts] == [*stores, long]


def test_groups_go_apart() -> None:
    """A group's blocks may be smaller than what has a name: two of its blocks have one here."""
    wide = [store(1, [1], [10]), store(2, [2, 3], [10, 11])]
    narrow = [one._replace(blocks=Blocks([2 * one.number, 2 * one.number + 1], 0, group=1)) for one in wide]
    narrow[1] = narrow[1]._replace(blocks=Blocks([4, 5, 6, 7], 0, group=1))
    one, other = joined_stores([wide[0], narrow[0], wide[1], narrow[1]])
    assert one[1] == wide
    assert (one[0].group, one[0].each, one[0].ids, one[0].names) == (0, 1, [1, 3], names(10, 11))
    assert other[1] == narrow
    assert (other[0].group, other[0].each, other[0].ids, other[0].names) == (1, 2, [2, 3, 6, 7], names(10, 11))

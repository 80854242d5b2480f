"""Which blocks were stored before: nothing is made up, and what was overwritten does not cut a prompt short."""

from __future__ import annotations

from kvferry.pools.tiers.cached_block import Namespace
from kvferry.pools.tiers.stored_before import StoredBefore
from tests.kit.tiers import names

ONE = Namespace(1, "0" * 32, "1" * 32, "main", 1)
OTHER = ONE._replace(tenant=2)


def test_a_prompt_reaches_as_far_as_it_was_stored() -> None:
    before = StoredBefore()
    before.add(ONE, names(*range(1, 101)))
    assert before.reach(ONE, names(*range(1, 201))) == 100
    assert before.reach(ONE, names(*range(101, 201))) == 0
    assert before.reach(OTHER, names(*range(1, 101))) == 0, "another user's blocks are not found"


def test_newer_blocks_take_the_place_of_older_ones() -> None:
    before = StoredBefore(slots=1 << 10)
    before.add(ONE, names(*range(1, 101)))
    before.add(ONE, names(*range(1001, 1513)))
    assert before.reach(ONE, names(*range(1, 201))) >= 90, "of some of the last blocks the place is still theirs"
    for first in range(2000, 22_000, 1000):
        before.add(ONE, names(*range(first, first + 1000)))
    assert before.reach(ONE, names(*range(1, 101))) == 0

"""Heads of ranks, and what two ranks share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.planning.geometry import Heads, RankHeads, intersect, rank_heads
from kvferry.protocol.errors import HeadsIndivisibleError, InvalidFieldError

DIVISORS = st.tuples(st.integers(1, 16), st.integers(1, 16))


@given(DIVISORS)
def test_ranks_tile_the_heads(drawn: tuple[int, int]) -> None:
    tp_size, each = drawn
    held = [rank_heads(tp_size * each, tp_size, rank) for rank in range(tp_size)]
    assert [one.start for one in held] == [rank * each for rank in range(tp_size)]
    assert {(one.count, one.replicas) for one in held} == {(each, 1)}


@given(DIVISORS)
def test_every_head_has_as_many_ranks(drawn: tuple[int, int]) -> None:
    heads, replicas = drawn
    held = [rank_heads(heads, heads * replicas, rank) for rank in range(heads * replicas)]
    assert [one.start for one in held] == [head for head in range(heads) for _ in range(replicas)]
    assert {(one.count, one.replicas) for one in held} == {(1, replicas)}


@given(st.integers(1, 32), st.integers(1, 32))
def test_what_does_not_divide_is_refused(heads: int, tp_size: int) -> None:
    if heads % tp_size and tp_size % heads:
        with pytest.raises(HeadsIndivisibleError, match=f"{heads} KV heads over {tp_size} ranks"):
            rank_heads(heads, tp_size, 0)
    else:
        assert rank_heads(heads, tp_size, 0).start == 0


def test_three_heads_over_two_ranks() -> None:
    with pytest.raises(HeadsIndivisibleError) as refused:
        rank_heads(3, 2, 1)
    assert refused.value.code == "HEADS_INDIVISIBLE"
    assert "neither is a multiple of the other" in str(refused.value)


@pytest.mark.parametrize(
    ("total_heads", "tp_size", "rank", "field"),
    [(0, 1, 0, "total_heads"), (8, 0, 0, "tp_size"), (8, 2, 2, "rank"), (8, 2, -1, "rank")],
)
def test_senseless_numbers(total_heads: int, tp_size: int, rank: int, field: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        rank_heads(total_heads, tp_size, rank)
    assert refused.value.field == field


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9))
def test_intersect_is_that_of_sets(start: int, count: int, other_start: int, other_count: int) -> None:
    one, other = Heads(start, count), Heads(other_start, other_count)
    common = sorted(set(range(start, one.stop)) & set(range(other_start, other.stop)))
    expected = Heads(common[0], len(common)) if common else None
    assert intersect(one, other) == intersect(other, one) == expected


def test_a_rank_holds_heads() -> None:
    assert rank_heads(8, 4, 3) == RankHeads(6, 2, 8, 1)

"""Element sizes, pages of a pool, and the two derivations of a page's bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.planning.geometry import (
    DTYPE_BYTES,
    MAX_PAGES,
    dtype_bytes,
    page_count,
    rank_heads,
)
from kvferry.protocol.errors import HeadsIndivisibleError, InvalidFieldError

SMALL = st.integers(1, 9)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_dtypes_are_torchs(dtype: str) -> None:
    assert dtype_bytes(dtype) == getattr(torch, dtype).itemsize


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (1000, "1000 tokens are not a multiple of page_size 128: use 896 or 1024"),
        (127, "127 tokens are not a multiple of page_size 128: use 128"),
        (129, "128 or 256"),
    ],
)
def test_a_part_of_a_page_is_refused_and_never_rounded(tokens: int, said: str) -> None:
    with pytest.raises(InvalidFieldError, match=said) as refused:
        page_count(tokens, 128, "window_tokens")
    assert refused.value.field == "window_tokens"


def test_pages_are_numbered_in_31_bits() -> None:
    assert page_count(MAX_PAGES - 1, 1) == MAX_PAGES
    with pytest.raises(InvalidFieldError) as refused:
        page_count(MAX_PAGES, 1)
    assert refused.value.field == "tokens"


# -- heads of ranks, and what two ranks share.


DIVISORS = st.tuples(st.integers(1, 16), st.integers(1, 16))


@given(DIVISORS)
def test_ranks_tile_the_heads_or_every_head_has_as_many_ranks(drawn: tuple[int, int]) -> None:
    tp_size, each = drawn
    held = [rank_heads(tp_size * each, tp_size, rank) for rank in range(tp_size)]
    assert [one.start for one in held] == [rank * each for rank in range(tp_size)]
    assert {(one.count, one.replicas) for one in held} == {(each, 1)}

    heads, replicas = drawn
    held = [rank_heads(heads, heads * replicas, rank) for rank in range(heads * replicas)]
    assert [one.start for one in held] == [head for head in range(heads) for _ in range(replicas)]
    assert {(one.count, one.replicas) for one in held} == {(1, replicas)}


@pytest.mark.parametrize(
    ("total_heads", "tp_size", "rank", "field"),
    [(0, 1, 0, "total_heads"), (8, 0, 0, "tp_size"), (8, 2, 2, "rank"), (8, 2, -1, "rank"), (8, 3, 0, "tp_size")],
)
def test_senseless_numbers(total_heads: int, tp_size: int, rank: int, field: str) -> None:
    with pytest.raises((InvalidFieldError, HeadsIndivisibleError)) as refused:
        rank_heads(total_heads, tp_size, rank)
    assert refused.value.field == field

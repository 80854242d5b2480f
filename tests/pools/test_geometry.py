"""Element sizes, pages of a pool, and the two derivations of a page's bytes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.planning.geometry import (
    DTYPE_BYTES,
    MAX_PAGES,
    Heads,
    dtype_bytes,
    intersect,
    page_bytes_of,
    page_count,
    rank_heads,
)
from kvferry.protocol.errors import GeometryMismatchError, HeadsIndivisibleError, InvalidFieldError

SMALL = st.integers(1, 9)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_dtypes_are_torchs(dtype: str) -> None:
    assert dtype_bytes(dtype) == getattr(torch, dtype).itemsize


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(InvalidFieldError, match="unknown dtype 'float13'") as refused:
        dtype_bytes("float13")
    assert refused.value.field == "dtype"


@given(st.integers(1, 10_000), st.integers(1, 300))
def test_pages_hold_the_tokens_and_the_padding_page(pages: int, page_size: int) -> None:
    tokens = pages * page_size
    assert page_count(tokens, page_size) == tokens // page_size + 1 == pages + 1


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


@given(SMALL, SMALL, SMALL, SMALL, st.sampled_from(sorted(DTYPE_BYTES)))
def test_both_views_give_the_formula(pages: int, page_size: int, heads: int, dim: int, dtype: str) -> None:
    formula = page_size * heads * dim * dtype_bytes(dtype)
    for shape in ((pages, page_size, heads, dim), (pages * page_size, 1, heads, dim)):
        assert page_bytes_of(shape, dtype, pages, formula, "main/k/0") == formula
        assert math.prod(shape) * dtype_bytes(dtype) == pages * formula


@given(SMALL, st.integers(2, 9), SMALL, SMALL)
def test_a_row_of_the_fia_view_taken_for_a_page_is_refused(pages: int, page_size: int, heads: int, dim: int) -> None:
    row = heads * dim * 2
    with pytest.raises(GeometryMismatchError, match="main/k/3: shape and dtype give") as refused:
        page_bytes_of((pages * page_size, 1, heads, dim), "float16", pages, row, "main/k/3")
    assert refused.value.field == "page_bytes"


def test_an_array_that_does_not_divide_into_pages_is_refused() -> None:
    with pytest.raises(GeometryMismatchError):
        page_bytes_of((7, 1, 1, 1), "int8", 2, 3, "main/k/0")


# -- heads of ranks, and what two ranks share.


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
        said = f"{heads} KV heads over {tp_size} ranks.*neither is a multiple of the other"
        with pytest.raises(HeadsIndivisibleError, match=said):
            rank_heads(heads, tp_size, 0)
    else:
        assert rank_heads(heads, tp_size, 0).start == 0


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
